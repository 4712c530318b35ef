"""The door: paths, keys, models, and the answers that need no engine.

A request that passes becomes an `Exchange`. Keys are looked up by digest; the text of a key is kept no longer than
its connection and goes to no engine. Unknown models and models that the key may not use answer alike.
"""

from __future__ import annotations

import logging
import re
from codecs import BOM_UTF8
from datetime import UTC, datetime
from hashlib import sha256
from ipaddress import ip_address
from random import getrandbits
from time import time
from urllib.parse import unquote_to_bytes

import msgspec

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.wire import RequestRecord, Result, Scope, SnapshotKey
from frontend_api.exchange import Exchange
from frontend_api.formats import openai
from frontend_api.formats.openai import ENDPOINTS, OWNED_HEADER, Problem, Shape
from frontend_api.http.cors import METHODS, Origins
from frontend_api.http.reading import Request
from frontend_api.http.server import ClientConnection, Server
from frontend_api.http.upstream import Upstreams
from frontend_api.kv.evidence import Evidence
from frontend_api.limits.reserve import KeyLimits
from frontend_api.observe.decisions import Decisions, Telling
from frontend_api.observe.telemetry import Telemetry
from frontend_api.routing.loads import Loads
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.view import Deployment, View
from frontend_api.routing.waiting import Waiting

log = logging.getLogger(__name__)

_JSON = b"content-type: application/json\r\n"
_TEXT = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")
_ENDPOINTS = {path.encode(): endpoint for path, endpoint in ENDPOINTS.items()}
_DECISIONS = b"/debug/decisions"
_INSIGHTS = (b"/metrics", _DECISIONS)
_OPEN = (b"/health", b"/ready", *_INSIGHTS)
_MODELS = b"/v1/models"


class Router:
    """The application behind `Server`: one per process."""

    def __init__(
        self,
        view: View,
        upstreams: Upstreams,
        telemetry: Telemetry,
        *,
        evidence: Evidence | None = None,
        loads: Loads | None = None,
        decisions: Decisions | None = None,
        limits: KeyLimits | None = None,
        origins: Origins | None = None,
        auth: bool = True,
    ) -> None:
        self.view = view
        self.upstreams = upstreams
        self.telemetry = telemetry
        self.evidence = evidence or Evidence(view)
        self.loads = loads or Loads()
        self.waiting = Waiting(view, self.loads)
        self.outcomes = Outcomes()
        view.followers += [self.outcomes, self.loads, self.waiting]
        self.decisions = decisions or Decisions()
        self.limits = limits or KeyLimits()
        self.origins = origins or Origins()
        self.auth = auth
        self.exchanges: set[Exchange] = set()
        self.server: Server | None = None

    # ---- Application

    def judge(self, request: Request, peer: str) -> Problem | None:
        if request.digest:  # one with this very head was let in before
            return self._check_key(request)
        path = request.path
        if path.endswith(b"/"):  # engines send such clients on to the path without it
            path = request.path = path[:-1] or path
        request.cors = self.cors(request)
        upgrade = request.headers.get(b"upgrade")
        if upgrade is not None and b"websocket" in upgrade.lower() and not _is_known(path):
            return Problem(426, "no_websocket", "There are no WebSockets here: send the request by HTTP POST.")
        if request.method == b"OPTIONS":
            return self._check_preflight(request)
        if endpoint := _ENDPOINTS.get(path):
            if request.method != endpoint.method and (request.method, endpoint.method) != (b"HEAD", b"GET"):
                return Problem(405, "method_not_allowed", f"Use {endpoint.method.decode()} here.")
            for name in request.headers:
                if name.startswith(OWNED_HEADER):
                    text = name.decode("latin-1")
                    return Problem(400, "invalid_input", f"{text}: this header is set by the router; remove it", text)
            return self._check_key(request)
        if request.method not in (b"GET", b"HEAD"):
            return Problem(405, "method_not_allowed", "Use GET here.") if _is_known(path) else _no_path(path)
        if path in _INSIGHTS:
            return self._check_insight(request, peer)
        if path in _OPEN:
            return None
        if path == _MODELS or path.startswith(_MODELS + b"/"):
            return self._check_key(request)
        return _no_path(path)

    def cors(self, request: Request) -> bytes:
        """No web page may read figures and decisions: the browser's machine is let in without a key."""
        return b"" if request.path in _INSIGHTS else self.origins.headers(request.headers)

    def serve(self, request: Request, connection: ClientConnection) -> None:
        endpoint = _ENDPOINTS.get(request.path)
        if endpoint is None or request.method == b"OPTIONS":
            self._answer(request, connection)
            return
        request_id = _request_id(request)
        request.body = request.body.removeprefix(BOM_UTF8)  # engines take it, our own reader does not
        try:
            ask = openai.read_request(
                endpoint, request.body if endpoint.method == b"POST" else openai.named_in(request.query)
            )
            if ask.owned:
                request.body = openai.without_owned(request.body)
            deployment = self._deployment(ask.model, request.key)
        except InvalidInput as error:
            problem = Problem(400, error.code, error.message, error.field)
            self._refuse(request, connection, problem, request_id)
            return
        if deployment is None:
            self._refuse(request, connection, _no_model(ask.model), request_id)
            return
        Exchange(self, connection, request, request_id, endpoint, ask, deployment).start()

    def refused(self, request: Request, problem: Problem, connection: ClientConnection) -> None:
        self.telemetry.count_refused(problem.status)
        endpoint = _ENDPOINTS.get(request.path)
        extra = b""
        if problem.status == 401:
            extra = b"www-authenticate: Bearer\r\n"
        elif problem.status == 405:
            extra = b"allow: POST\r\n" if endpoint and endpoint.method == b"POST" else b"allow: GET, HEAD\r\n"
        elif problem.status == 426:
            extra = b"upgrade: HTTP/1.1\r\nconnection: upgrade\r\n"
        shape = endpoint.shape if endpoint else Shape.PLAIN
        self.reply_problem(connection, problem, shape, _request_id(request), extra)

    def count_refused(self, status: int) -> None:
        self.telemetry.count_refused(status)

    # ---- for exchanges

    def reply_problem(
        self, connection: ClientConnection, problem: Problem, shape: Shape, request_id: bytes, extra: bytes = b""
    ) -> None:
        headers = b"%bx-request-id: %b\r\n%b" % (_JSON, request_id, extra)
        if problem.retry_after is not None:
            headers += b"retry-after: %d\r\n" % problem.retry_after
        connection.reply(problem.status, headers, openai.error_body(problem, shape))

    def sweep(self, now: float) -> None:
        """Once a second: what is known of engines ages, and their time limits. `now`: monotonic."""
        self.view.settle(now)
        self.outcomes.look(self.view, now)
        for sentence in self.outcomes.news():
            log.warning("%s", sentence)
        self.loads.see_rooms(now)
        for exchange in list(self.exchanges):
            exchange.check(now)
        for engine in self.view.engines():
            engine.rest(now)
        self.waiting.look()  # engines came back, or their overload is over

    def share_figures(self) -> None:
        """Once a second: show the figures of this process to its siblings."""
        self.telemetry.share(self.view, self.evidence, waiting=self.waiting.counts(), **self._connections())

    def _connections(self) -> dict[str, int]:
        clients = len(self.server.connections) if self.server is not None else 0
        return {"clients": clients, "upstream": self.upstreams.open_connections()}

    # ---- keys and models

    def _check_key(self, request: Request) -> Problem | None:
        if not self.auth:
            return None
        key = self._key(request)
        if key is None:
            return Problem(401, "invalid_api_key", "Send a valid API key: Authorization: Bearer KEY.")
        if key.expires_at is not None and key.expires_at <= time():
            return Problem(401, "expired_api_key", "This API key has expired.")
        if key.scope is not Scope.INFERENCE:
            return Problem(403, "wrong_scope", f"This key has the scope {key.scope}; inference is needed here.")
        request.key = key
        return None

    def _key(self, request: Request) -> SnapshotKey | None:
        if request.digest:
            return self.view.keys.get(request.digest)
        given = request.headers.get(b"authorization")
        if given is not None:
            scheme, _, text = given.partition(b" ")
            if scheme.lower() != b"bearer":
                return None
            text = text.strip()
        else:
            text = request.headers.get(b"x-api-key", b"")
        if not text:
            return None
        request.digest = sha256(text).hexdigest()
        return self.view.keys.get(request.digest)

    def _check_preflight(self, request: Request) -> Problem | None:
        """A browser asks before it sends a page's request, and has no key then."""
        path, headers = request.path, request.headers
        if path in _INSIGHTS or not (path in _ENDPOINTS or _is_known(path)):
            return _no_path(path)
        origin = headers.get(b"origin")
        if origin is not None and not self.origins.allow(origin):
            text = (
                f"The router does not allow the web pages of {origin.decode('latin-1')}; TANDEM_CORS_ORIGINS sets this."
            )
            return Problem(403, "origin_not_allowed", text)
        return None

    def _check_insight(self, request: Request, peer: str) -> Problem | None:
        """Figures and decisions are for this machine alone, or for a key with the scope manage. A proxy's clients are not this
        machine; nor is a web page that reaches it by a name of its own."""
        if not self.auth:
            return None
        proxied = b"x-forwarded-for" in request.headers or b"forwarded" in request.headers
        if not proxied and _is_loopback(peer) and _is_local_name(request.headers.get(b"host", b"")):
            return None
        key = self._key(request)
        if key is None or (key.expires_at is not None and key.expires_at <= time()):
            return Problem(401, "invalid_api_key", "Send an API key with the scope manage.")
        if key.scope is not Scope.MANAGE:
            return Problem(403, "wrong_scope", f"This key has the scope {key.scope}; manage is needed here.")
        return None

    def _may_use(self, model: str, key: SnapshotKey | None) -> bool:
        return not self.auth or (key is not None and (not key.models or model in key.models))

    def _deployment(self, model: str, key: SnapshotKey | None) -> Deployment | None:
        deployments = self.view.deployments
        if not model:  # /tokenize may leave it out
            usable = [d for name, d in deployments.items() if self._may_use(name, key)]
            if len(usable) != 1:
                raise InvalidInput("model: send the name of a model", field="model")
            return usable[0]
        deployment = deployments.get(model)
        return deployment if deployment is not None and self._may_use(model, key) else None

    def _refuse(self, request: Request, connection: ClientConnection, problem: Problem, request_id: bytes) -> None:
        shape = _ENDPOINTS[request.path].shape
        self.reply_problem(connection, problem, shape, request_id)
        self.telemetry.record(
            RequestRecord(
                id=request_id.decode(),
                at=time(),
                deployment="",
                endpoint=request.path.decode(),
                status=problem.status,
                result=Result.REFUSED,
                key=request.key.id if request.key else "",
            )
        )

    # ---- answers without an engine

    def _answer(self, request: Request, connection: ClientConnection) -> None:
        path = request.path
        if request.method == b"OPTIONS":
            connection.reply(200, b"allow: %b\r\n%b" % (METHODS, self.origins.preflight(request.headers)), b"")
        elif path == b"/health":
            connection.reply(200, _JSON, b'{"status":"ok"}')
        elif path == b"/ready":
            ready = self.view.ready
            body = b'{"status":"ready"}' if ready else b'{"status":"no engine can answer"}'
            connection.reply(200 if ready else 503, _JSON, body)
        elif path == b"/metrics":
            waiting = self.waiting.counts()
            text = self.telemetry.text(self.view, self.evidence, waiting=waiting, **self._connections())
            connection.reply(200, _TEXT, text)
        elif path == _DECISIONS:
            self._tell_decisions(request, connection)
        elif path == _MODELS:
            self._note_key(request)
            deployments = self.view.deployments.items()
            names = sorted(name for name, d in deployments if d.ready and self._may_use(name, request.key))
            listed: dict[str, object] = {"object": "list", "data": [self._model(name, request) for name in names]}
            if _is_anthropic(request):
                listed |= {
                    "has_more": False,
                    "first_id": names[0] if names else None,
                    "last_id": names[-1] if names else None,
                }
            connection.reply(200, self._headers(request), msgspec.json.encode(listed))
        else:
            self._note_key(request)
            name = unquote_to_bytes(path[len(_MODELS) + 1 :]).decode("utf-8", "replace")
            if name in self.view.deployments and self._may_use(name, request.key):
                connection.reply(200, self._headers(request), msgspec.json.encode(self._model(name, request)))
            else:
                self.reply_problem(connection, _no_model(name), Shape.PLAIN, _request_id(request))

    def _tell_decisions(self, request: Request, connection: ClientConnection) -> None:
        try:
            connection.exchange = Telling(connection, self._headers(request), self.decisions, request.query)
        except InvalidInput as error:
            problem = Problem(400, error.code, error.message, error.field)
            self.reply_problem(connection, problem, Shape.PLAIN, _request_id(request))

    def _note_key(self, request: Request) -> None:
        if request.key is not None:
            self.telemetry.note_key(request.key.id, time())

    def _headers(self, request: Request) -> bytes:
        return b"%bx-request-id: %b\r\n" % (_JSON, _request_id(request))

    def _model(self, name: str, request: Request) -> dict[str, object]:
        deployment = self.view.deployments[name]
        lengths = [e.spec.max_model_len for e in (*deployment.answering, *deployment.prefill) if e.spec.max_model_len]
        made_at = int(self.view.made_at)
        told: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": made_at,
            "owned_by": "tandem",
            "max_model_len": min(lengths, default=None),
        }
        if _is_anthropic(request):
            told |= {
                "type": "model",
                "display_name": name,
                "created_at": datetime.fromtimestamp(made_at, UTC).isoformat(),
            }
        return told


def _is_anthropic(request: Request) -> bool:
    """Its client knows Anthropic's form of the list of models; the fields of both do not clash."""
    return b"anthropic-version" in request.headers


def _is_known(path: bytes) -> bool:
    """Whether it is answered without an engine."""
    return path in _OPEN or path == _MODELS or path.startswith(_MODELS + b"/")


def _no_model(model: str) -> Problem:
    return Problem(404, "model_not_found", f"The model {model!r} does not exist or you may not use it.", "model")


def _no_path(path: bytes) -> Problem:
    return Problem(404, "not_found", f"There is no {path.decode('latin-1')} here.")


def _request_id(request: Request) -> bytes:
    given = request.headers.get(b"x-request-id")
    if given is not None and _SANE_ID.fullmatch(given):
        return given
    return b"%032x" % getrandbits(128)


def _is_local_name(host: bytes) -> bool:
    """Whether nobody outside this network can have given this machine that name: it is an address, or it has no dot. A page may
    make its own domain's name mean this machine (DNS rebinding), and the browser then takes the router for the page's server."""
    name = host.decode("latin-1")
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if "." not in name and ":" not in name:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(peer: str) -> bool:
    try:
        address = ip_address(peer)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
