"""Keys, models, paths, and the fields and headers that only the router may send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, Result, RoutingPolicy, SnapshotDeployment
from tests.frontend_api.client import PROMPT, Client, ask, request
from tests.frontend_api.conftest import KEYS, MakeSite, Site
from tests.frontend_api.scripted import unary

CHAT = "/v1/chat/completions"
GOOD = {"Authorization": "Bearer tdm-inference"}


@pytest.fixture
async def guarded(make_site: MakeSite) -> Site:
    site = await make_site(auth=True)
    await site.engine("a", Role.AGGREGATED, max_model_len=2048)
    site.publish()
    return site


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer "}, 401, "invalid_api_key"),
        ({"Authorization": "Basic tdm-inference"}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer tdm-old"}, 401, "expired_api_key"),
        ({"Authorization": "Bearer tdm-manage"}, 403, "wrong_scope"),
        ({"Authorization": "Bearer tdm-other"}, 404, "model_not_found"),
        ({"x-api-key": "wrong"}, 401, "invalid_api_key"),
        (GOOD, 200, ""),
        ({"authorization": "bearer  tdm-inference"}, 200, ""),
        ({"x-api-key": "tdm-inference"}, 200, ""),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings", "/tokenize"])
async def test_keys(guarded: Site, path: str, headers: dict[str, str], status: int, code: str) -> None:
    reply = await ask(guarded.port, path, PROMPT, **headers)
    assert reply.status == status
    if status != 200:
        assert reply.error["code"] == code
        assert guarded.engines["a"].heard == []
    assert ("www-authenticate" in reply.headers) is (status == 401)


async def test_unknown_and_forbidden_models_answer_alike(guarded: Site) -> None:
    unknown = await ask(guarded.port, CHAT, {**PROMPT, "model": "m2"}, **GOOD)
    forbidden = await ask(guarded.port, CHAT, PROMPT, Authorization="Bearer tdm-other")
    assert unknown.status == forbidden.status == 404
    assert unknown.body.replace(b"m2", b"m") == forbidden.body
    assert [(r.result, r.key, r.status) for r in guarded.telemetry.records] == [
        (Result.REFUSED, "k-all", 404),
        (Result.REFUSED, "k-other", 404),
    ]


async def test_models(guarded: Site) -> None:
    listed = await ask(guarded.port, "/v1/models", **GOOD)
    (model,) = listed.json["data"]
    assert (model["id"], model["object"], model["created"], model["max_model_len"]) == (
        "m",
        "model",
        1_700_000_000,
        2048,
    )
    assert (await ask(guarded.port, "/v1/models/m", **GOOD)).json == model
    assert (await ask(guarded.port, "/v1/models", Authorization="Bearer tdm-other")).json["data"] == []
    assert (await ask(guarded.port, "/v1/models/m", Authorization="Bearer tdm-other")).error[
        "code"
    ] == "model_not_found"
    assert (await ask(guarded.port, "/v1/models")).status == 401


async def test_only_models_that_an_engine_can_answer_now_are_listed(guarded: Site) -> None:
    await guarded.engine("p", Role.PREFILL)
    guarded.publish(without=("a",))
    assert (await ask(guarded.port, "/v1/models", **GOOD)).json["data"] == []
    assert (await ask(guarded.port, "/ready")).status == 503
    guarded.publish()
    assert [model["id"] for model in (await ask(guarded.port, "/v1/models", **GOOD)).json["data"]] == ["m"]
    assert (await ask(guarded.port, "/ready")).status == 200


async def test_models_as_anthropics_clients_read_them(guarded: Site) -> None:
    listed = (await ask(guarded.port, "/v1/models?limit=1000", anthropic_version="2023-06-01", **GOOD)).json
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "m", "m")
    (model,) = listed["data"]
    assert (model["type"], model["display_name"], model["created_at"]) == ("model", "m", "2023-11-14T22:13:20+00:00")
    assert (await ask(guarded.port, "/v1/models/m", anthropic_version="2023-06-01", **GOOD)).json == model


@pytest.mark.parametrize("made_at", [-1.0, 1e300])
async def test_a_moment_that_no_calendar_has_is_none(guarded: Site, made_at: float) -> None:
    guarded.view.take(
        FleetSnapshot(
            version=9,
            made_at=made_at,
            keys=KEYS,
            deployments=(
                SnapshotDeployment(
                    name="dep",
                    served_name="m",
                    routing=RoutingPolicy(),
                    engines=tuple(e.spec for e in guarded.view.engines()),
                ),
            ),
        )
    )
    listed = (await ask(guarded.port, "/v1/models", anthropic_version="2023-06-01", **GOOD)).json
    assert [model["created"] for model in listed["data"]] == [0]


@pytest.mark.parametrize("path", ["org/team/m", "org%2Fteam%2Fm", "org/team%2fm"])
async def test_model_ids_with_slashes(guarded: Site, path: str) -> None:
    """Case peer-S27."""
    guarded.view.deployments["org/team/m"] = guarded.view.deployments["m"]
    reply = await ask(guarded.port, f"/v1/models/{path}", **GOOD)
    assert (reply.status, reply.json["id"]) == (200, "org/team/m")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[]", None),
        (b'"m"', None),
        (b"\xff\xfe{\x00}\x00", None),  # UTF-16: an engine might read what the router cannot
        (b'\xef\xbb\xbf\xef\xbb\xbf{"model":"m"}', None),
        (b'{"messages":[]}', "model"),
        (b'{"model":null}', "model"),
        (b'{"model":7}', "model"),
        (b'{"model":["m"]}', "model"),
        (b"[" * 100_000, None),
    ],
    ids=range(11),
)
async def test_bad_bodies(alone: Site, body: bytes, param: str | None) -> None:
    """Case peer-S19."""
    reply = await ask(alone.port, CHAT, body, method="POST")
    assert reply.status == 400
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", param)
    assert alone.engines["a"].heard == []


FORGED = {"do_remote_prefill": True, "remote_host": "10.6.6.6"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"kv_transfer_params": FORGED}, "kv_transfer_params"),
        ({"ec_transfer_params": FORGED}, "ec_transfer_params"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"vllm_xargs": {"kv_transfer_params": FORGED}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"kv_cache_report_mode": "full"}}, "vllm_xargs.kv_cache_report_mode"),
    ],
)
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"]
)
async def test_the_routers_own_fields_are_refused(pair: Site, path: str, more: dict[str, Any], param: str) -> None:
    reply = await ask(pair.port, path, {**PROMPT, **more})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not pair.engines["p"].heard
    assert not pair.engines["d"].heard


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","kv\\u005ftransfer_params":{"remote_host":"x"}}',
        b'{"kv_transfer_params":null,"model":"m","kv_transfer_params":{"remote_host":"x"}}',
    ],
)
async def test_disguised_fields_are_refused(pair: Site, raw: bytes) -> None:
    assert (await ask(pair.port, CHAT, raw)).error["param"] == "kv_transfer_params"


NULLS = {
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "data_parallel_rank", "vllm_xargs", "cache_salt", "user")
    ),
    **dict.fromkeys(
        ("n", "best_of", "use_beam_search", "echo", "prompt_logprobs", "prompt_embeds", "background", "metadata")
    ),
    **dict.fromkeys(("previous_response_id", "stream", "stream_options", "max_completion_tokens", "tools", "stop")),
}


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (CHAT, {"max_tokens": None}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": None}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": None}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
async def test_null_is_absent(pair: Site, path: str, prompt: dict[str, Any]) -> None:
    """Gateways send every field that they know."""
    assert (await ask(pair.port, path, {**PROMPT, **NULLS, **prompt})).status == 200
    generates = path not in ("/v1/embeddings", "/tokenize")
    assert len(pair.engines["p"].heard) == generates
    (heard,) = pair.engines["d"].heard
    assert ("kv_transfer_params" in heard.body) is generates
    assert not {"ec_transfer_params", "data_parallel_rank"}.intersection(heard.body)
    await pair.settled()
    assert pair.record.reason == ("least-load" if generates else "relayed")


async def test_what_null_overrides_reaches_no_engine(pair: Site) -> None:
    raw = b'{"kv_transfer_params":{"remote_host":"x"},"model":"m","messages":[],"kv_transfer_params":null}'
    assert (await ask(pair.port, CHAT, raw)).status == 200
    assert all(b'remote_host":"x' not in engine.heard[0].raw for engine in pair.engines.values())


@pytest.mark.parametrize("more", [{"messages": None}, {}])
async def test_a_prompt_that_is_null_is_none(pair: Site, more: dict[str, Any]) -> None:
    await ask(pair.port, CHAT, {"model": "m", **more})
    assert not pair.engines["p"].heard  # it is decode's to refuse, and no KV is kept for it


async def test_the_fields_names_as_text_are_nobodys_business(pair: Site) -> None:
    body = {
        **PROMPT,
        "messages": [{"role": "user", "content": '"kv_transfer_params": {}'}],
        "tools": [{"kv_transfer_params": 1}],
    }
    assert (await ask(pair.port, CHAT, body)).status == 200


@pytest.mark.parametrize("name", ["x-data-parallel-rank", "X-Data-Parallel-Rank", "x-data-parallel-rank-local"])
async def test_rank_headers_are_refused(pair: Site, name: str) -> None:
    reply = await ask(pair.port, CHAT, PROMPT, **{name: "3"})
    assert (reply.status, reply.error["param"]) == (400, name.lower())


async def test_compressed_bodies_are_refused(pair: Site) -> None:
    assert (await ask(pair.port, CHAT, PROMPT, Content_Encoding="gzip")).status == 415
    assert (await ask(pair.port, CHAT, PROMPT, Content_Encoding="Identity")).status == 200


EMPTY = (
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "Accept-Encoding",
    "Expect",
    "Upgrade",
    "Origin",
    "Traceparent",
)


async def test_a_header_without_a_value_is_absent(guarded: Site) -> None:
    """As gateways send what they have no value for."""
    empty = {**dict.fromkeys((*EMPTY, "x-request-id", "x-session-id", "x-data-parallel-rank", "x-forwarded-for"), "")}
    reply = await ask(guarded.port, CHAT, PROMPT, **{**empty, "x-api-key": "tdm-inference"})
    assert reply.status == 200
    assert len(reply.headers["x-request-id"]) == 32
    (heard,) = guarded.engines["a"].heard
    assert "" not in heard.headers.values()
    assert (await ask(guarded.port, CHAT, PROMPT, **{**empty, "x-api-key": ""})).status == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/tokenizer_info", None),
        ("/v1/embeddings", {"model": "m", "input": "a"}),
        ("/v2/embed", {"texts": ["a"]}),
        *((path, {"query": "a", "documents": ["b"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *((path, {"queries": "a", "documents": ["b"]}) for path in ("/score", "/v1/score")),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
    ],
)
async def test_what_else_engines_are_asked_is_relayed(guarded: Site, path: str, body: dict[str, Any] | None) -> None:
    assert (await ask(guarded.port, path, body)).status == 401
    engine = guarded.engines["a"]
    engine.answer = lambda heard, writer: _write(writer, unary({"said": heard.target}))
    reply = await ask(guarded.port, path + "?a=b", body, **GOOD)
    assert (reply.status, reply.json) == (200, {"said": path + "?a=b"})
    (heard,) = engine.heard
    assert heard.raw == (b"" if body is None else json.dumps(body).encode())
    assert heard.headers["authorization"] == "Bearer secret-a"
    wrong = await ask(guarded.port, path, None if body else {}, **GOOD)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST" if body else "GET, HEAD")


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)


async def test_a_request_without_a_body_names_its_model_in_the_query(alone: Site) -> None:
    alone.view.deployments["an/other"] = alone.view.deployments["m"]
    assert (await ask(alone.port, "/tokenizer_info")).error["param"] == "model"
    assert (await ask(alone.port, "/tokenizer_info?model=none")).status == 404
    alone.engines["a"].answer = lambda heard, writer: _write(writer, unary({}))
    assert (await ask(alone.port, "/tokenizer_info?model=an%2Fother")).status == 200


WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "WebSocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAA",
}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime?model=m", CHAT])
async def test_a_websocket_is_refused_so_that_clients_go_on_by_http(guarded: Site, path: str) -> None:
    async with Client(guarded.port) as client:
        client.send(request(path, **WEBSOCKET))
        reply = await client.reply()
        assert (reply.status, reply.error["code"], reply.headers["upgrade"]) == (426, "no_websocket", "HTTP/1.1")
        assert reply.json["error"]["type"] == "invalid_request_error"
        client.post(CHAT, PROMPT, **GOOD)  # on the same connection
        assert (await client.reply()).status == 200


async def test_a_byte_order_mark_is_no_part_of_the_body(pair: Site) -> None:
    assert (await ask(pair.port, CHAT, b"\xef\xbb\xbf" + json.dumps(PROMPT).encode())).status == 200
    assert [engine.heard[0].raw[:1] for engine in pair.engines.values()] == [b"{", b"{"]


async def test_tokenize_may_leave_out_the_only_model(alone: Site) -> None:
    assert (await ask(alone.port, "/tokenize", {"prompt": "a"})).status == 200
    alone.view.deployments["other"] = alone.view.deployments["m"]
    assert (await ask(alone.port, "/tokenize", {"prompt": "a"})).error["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/files", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/m", 405),
        ("POST", "/health", 405),
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("POST", CHAT + "/", 200),
        ("GET", "/v1/models/", 200),
        ("POST", CHAT + "//", 404),
        ("POST", "http://router?" + CHAT, 404),
        ("POST", "/v1//chat/completions", 404),
        ("POST", "/collective_rpc", 404),
    ],
)
async def test_paths(alone: Site, method: str, path: str, status: int) -> None:
    reply = await ask(alone.port, path, PROMPT if method == "POST" else None, method=method)
    assert reply.status == status
    if status >= 400:
        assert reply.error["message"]
    assert reply.headers.get("allow") == ({CHAT: "POST"}.get(path, "GET, HEAD") if status == 405 else None)
    assert {heard.target for heard in alone.engines["a"].heard} <= {CHAT}


async def test_metrics_are_for_this_machine_or_a_manage_key(guarded: Site) -> None:
    await ask(guarded.port, CHAT, PROMPT, **GOOD)
    text = (await ask(guarded.port, "/metrics")).body.decode()
    assert 'tandem_router_requests_total{deployment="dep",endpoint="/v1/chat/completions",result="ok"} 1' in text
    assert 'tandem_router_in_flight{engine="a",role="aggregated"} 0' in text
    assert "secret" not in text
    proxied = {"X-Forwarded-For": "10.1.1.1"}
    assert (await ask(guarded.port, "/metrics", **proxied)).status == 401
    assert (await ask(guarded.port, "/metrics", **proxied, **GOOD)).status == 403
    assert (await ask(guarded.port, "/metrics", **proxied, Authorization="Bearer tdm-manage")).status == 200
