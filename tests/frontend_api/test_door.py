"""Keys, models, paths, and the fields and headers that only the router may send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Result
from tests.frontend_api.client import PROMPT, ask
from tests.frontend_api.conftest import MakeSite, Site

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
        ({"kv_transfer_params": None}, "kv_transfer_params"),
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
        b'{"kv_transfer_params":{"remote_host":"x"},"model":"m","kv_transfer_params":null}',
    ],
)
async def test_disguised_fields_are_refused(pair: Site, raw: bytes) -> None:
    assert (await ask(pair.port, CHAT, raw)).error["param"] == "kv_transfer_params"


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
