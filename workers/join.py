"""How a machine becomes a node: a one-time token for a Redis user of its own, kept in `node.json`, 0600.

The token comes by environment or file, never by argv. A node that has joined needs none again.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import msgspec
import redis
from msgspec import Struct

from controlplane.fleet.addresses import web_url
from controlplane.fleet.errors import Forbidden, InvalidInput
from controlplane.fleet.outbound import proxy_for
from controlplane.fleet.this_node import NODE_FILE
from workers.mailbox import connect
from workers.record import private_folder, write_private

log = logging.getLogger(__name__)

TRY_EVERY_SECONDS = 2.0
ASK_TIMEOUT_SECONDS = 10.0
NAME_IN_USE_SECONDS = 16.0
"""For which a node of this name may still seem to report, after its agent has ended."""


class NameInUse(Forbidden):
    """A node of this name reports now, or did a moment ago."""


class Identity(Struct, frozen=True):
    """What joining gave."""

    name: str
    redis_url: str
    control_plane: str = ""
    address: str = ""
    """On which the control plane expects this node's engines; empty: one of an older version did not say."""
    took_over: bool = False
    """Another machine had this name."""

    @property
    def password(self) -> str:
        """Of its Redis user. Shown when the node joins again, it stays the same node."""
        return unquote(urlsplit(self.redis_url).password or "")


def identify(
    folder: Path,
    *,
    name: str,
    control_plane: str,
    token: str,
    address: Callable[[str], str] = lambda control_plane: "",
    ask: Callable[[str, Application], Identity | None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Identity:
    """This node's identity: the stored one, or a new one by the token (waiting until the control plane is up).

    `address`: on which its engines will listen, by the control plane's URL. With a token at hand the node joins anew where Redis
    refuses the stored login, or is gone and another control plane is named, or where its address is another by now; it shows
    that it is the same node, and so keeps its engines. While the name seems in use, a stored login that Redis takes again, as
    after a restart of all, is the quicker way back; a login that works is also kept where the control plane refuses the token.

    Raises `InvalidInput` where something is missing, `Forbidden` when the token is refused.
    """
    file = private_folder(folder) / NODE_FILE
    stored = _read(file)
    outdated = bool(token) and stored is not None and _is_outdated(stored, control_plane)
    moved = bool(token) and stored is not None and not outdated and _has_moved(stored, address, control_plane)
    if stored is not None and not outdated and not moved:
        return stored
    if not control_plane:
        raise InvalidInput(
            "This machine has not joined yet: run `python -m workers --join URL` with a join token in TANDEM_JOIN_TOKEN.",
            field="join",
        )
    try:
        control_plane = web_url(control_plane)
    except InvalidInput as error:
        raise InvalidInput(f"--join: {error.message}", field="join") from None
    if not token:
        raise InvalidInput(
            "This machine has not joined yet: put a one-time join token into TANDEM_JOIN_TOKEN, or its file's path into "
            "TANDEM_JOIN_TOKEN_FILE. The Nodes page and `manage.py jointoken` make one.",
            field="join_token",
        )
    same = stored is not None and stored.control_plane == control_plane
    application = Application(token, name, address(control_plane), stored.password if stored and same else "")
    try:
        identity = _await(ask or ask_control_plane, control_plane, application, sleep, None if moved else stored)
    except Forbidden as error:
        if stored is None or outdated:
            raise
        log.warning("%s This node goes on as it joined before, with the address %s.", error.message, stored.address)
        return stored
    if identity == stored:
        return stored
    write_private(file, msgspec.json.encode(identity))
    (folder / "applied.json").unlink(missing_ok=True)  # generations are counted by each control plane for itself
    return identity


class Application(Struct, frozen=True, omit_defaults=True):
    """What a machine says to be let in."""

    token: str
    name: str
    address: str = ""
    former_password: str = ""


def ask_control_plane(url: str, application: Application) -> Identity | None:
    """One attempt. None: the control plane is not up yet.

    Raises `Forbidden` when it refuses (`NameInUse`: perhaps not for long), `InvalidInput` for a URL that no control plane
    answers on, or whose TLS this machine does not accept.
    """
    try:
        with httpx.Client(transport=httpx.HTTPTransport(proxy=proxy_for(url)), timeout=ASK_TIMEOUT_SECONDS) as client:
            answer = client.post(f"{url}/api/v1/nodes/join", json=msgspec.to_builtins(application))
    except httpx.HTTPError as error:
        if (why := _tls_objection(error)) is not None:
            raise InvalidInput(f"--join {url}: {why}", field="join") from None
        return None
    if answer.status_code >= 500 or answer.status_code == 429:
        return None
    if answer.is_success:
        try:
            joined = msgspec.json.decode(answer.content, type=Identity)
        except msgspec.DecodeError:
            raise InvalidInput(f"--join {url}: what answers there is no Tandem control plane", field="join") from None
        return msgspec.structs.replace(joined, control_plane=url)
    refused = NameInUse if answer.status_code == httpx.codes.CONFLICT else Forbidden
    raise refused(f"The control plane refused to let this node join: {_message(answer)}")


def why_over(identity: Identity) -> str:
    """Why this machine is that node no more: a sentence. Empty: it is, or nobody answers."""
    url = identity.control_plane
    if not url or not identity.password:
        return ""
    asked = {"name": identity.name, "password": identity.password}
    try:
        with httpx.Client(transport=httpx.HTTPTransport(proxy=proxy_for(url)), timeout=ASK_TIMEOUT_SECONDS) as client:
            answer = client.post(f"{url}/api/v1/nodes/standing", json=asked)
            told = answer.json() if answer.is_success else {}
            if told.get("replaced") is True:
                return f"Another machine has joined as node {identity.name}."
            return f"Node {identity.name} was removed." if told.get("removed") is True else ""
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return ""


def _tls_objection(error: BaseException) -> str | None:
    """What is wrong with the TLS at the other end, which waiting does not mend; None: it is something else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({cause.verify_message}); name its authority's file in SSL_CERT_FILE"
    if cause is not None and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        return "what answers there speaks no TLS; write http://"
    return None


def _message(answer: httpx.Response) -> str:
    if answer.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):  # a router says so too
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return str(answer.json()["error"]["message"])
    return f"it answered {answer.status_code}; is {answer.url.netloc.decode()} a Tandem control plane?"


def _await(
    ask: Callable[[str, Application], Identity | None],
    url: str,
    application: Application,
    sleep: Callable[[float], None],
    stored: Identity | None,
) -> Identity:
    told = False
    in_use = 0.0
    while True:
        try:
            if (identity := ask(url, application)) is not None:
                break
            why = f"The control plane at {url} is not up yet"
        except NameInUse as error:
            if stored is not None and not _is_outdated(stored, url):
                log.info("Redis takes the login of node %s again.", stored.name)
                return stored
            if in_use >= NAME_IN_USE_SECONDS:
                raise
            in_use += TRY_EVERY_SECONDS
            why = error.message.rstrip(".")
        if not told:
            log.info("%s; this is tried again.", why)
            told = True
        sleep(TRY_EVERY_SECONDS)
    log.info("Joined %s as node %s.", url, identity.name)
    if identity.took_over:
        log.warning("Another machine had this name. Its access has ended, and its engines are started again.")
    return identity


def _read(file: Path) -> Identity | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Identity)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        log.warning("%s cannot be read; this node has to join again.", file)
        return None


def _has_moved(stored: Identity, address: Callable[[str], str], control_plane: str) -> bool:
    return bool(stored.address) and stored.address != (address(control_plane or stored.control_plane) or stored.address)


def _is_outdated(stored: Identity, control_plane: str) -> bool:
    """Redis refuses the stored login, or is gone together with the control plane that gave it."""
    client = connect(stored.redis_url)
    try:
        client.ping()
    except redis.AuthenticationError:
        return True
    except redis.RedisError:
        return bool(control_plane) and stored.control_plane != control_plane
    finally:
        client.close()
    return False
