"""Deploy, scale both pools up and down under load, delete: the client loses nothing."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx

from tests.flows.load import KINDS, Load
from tests.flows.site import Site


def test_deploy_answers_disaggregated(site: Site) -> None:
    site.deploy(prefill=1, decode=1)
    status, reply = site.ask()
    assert status == 200
    assert reply["choices"][0]["message"]["content"]
    assert reply["headers"]["x-tandem-prefill"]
    assert reply["headers"]["x-tandem-decode"]


def test_a_keys_limits_and_secrets_reach_the_router_and_its_use_comes_back(site: Site) -> None:
    made = site.api.post("/keys", json={"name": "small", "scope": "inference", "requests_per_minute": 2}).json()
    key = made["id"]

    def post(secret: str) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        return httpx.post(
            f"{site.openai_url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
        )

    site.until(lambda: post(made["key"]).status_code == 200, "the router knows the key")
    rotated = site.api.post(f"/keys/{key}/rotate", json={"overlap_seconds": 600}).json()
    site.until(lambda: post(rotated["key"]).status_code != 401, "the router knows the new secret")
    answers = [post(secret) for secret in (made["key"], rotated["key"])]
    assert [answer.status_code for answer in answers] == [429, 429]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
    site.api.patch(f"/keys/{key}", json={"requests_per_minute": 100, "concurrency": 5}).raise_for_status()
    site.until(lambda: post(made["key"]).status_code == 200, "the router knows the new limits")
    used = site.until(lambda: site.api.get(f"/keys/{key}").json()["last_used_at"], "the control plane knows of its use")
    assert used
    site.api.delete(f"/keys/{key}").raise_for_status()
    site.until(lambda: {post(s["key"]).status_code for s in (made, rotated)} == {401}, "neither secret works")


def test_choices_are_told_to_those_who_manage_and_one_engine_is_no_experiment(site: Site) -> None:
    request = site.ask()[1]["headers"]["x-request-id"]
    url, elsewhere = f"{site.openai_url}/debug/decisions?model=demo&limit=5", {"x-forwarded-for": "192.0.2.7"}
    answers = [
        httpx.get(url, headers=headers)
        for headers in (
            {},
            elsewhere,
            elsewhere | {"Authorization": f"Bearer {site.inference_key}"},
            elsewhere | {"Authorization": f"Bearer {site.manage_key}"},
        )
    ]
    assert [answer.status_code for answer in answers] == [200, 401, 403, 200]
    decision = answers[-1].json()["decisions"][0]
    assert decision["id"] == request
    assert {c["part"] for c in decision["candidates"]} == {"prefill", "decode"}
    bench = subprocess.run(
        [sys.executable, "-m", "controlplane.cli", "bench", "prefixes"],
        env=site.env | {"TANDEM_KEY": site.inference_key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bench.returncode == 1
    assert "demo has only one ready engine that reads prompts" in bench.stderr


def test_scaling_up_and_down_under_load_loses_nothing(site: Site) -> None:
    with Load(site, rate=24) as load:
        for role, replicas in (("decode", 3), ("prefill", 2), ("decode", 1), ("prefill", 1)):
            site.scale(role, replicas)
            site.until(lambda role=role, n=replicas: site.ready(**{role: n}), f"{replicas} {role} engines", 120)
            seen = load.outcomes.total()
            site.until(lambda seen=seen: load.outcomes.total() > seen + 3 * len(KINDS), "more requests were answered")
    assert load.outcomes["ok"] > 100
    assert load.lost == {}, "\n".join(load.failures[:10])


def test_zero_replicas_stop_a_pool_and_the_router_says_so(site: Site) -> None:
    site.scale("decode", 0)
    site.until(lambda: not site.engines(role="decode"), "no decode engine is left")
    site.until(lambda: site.ask()[0] == 503, "the router knows")
    status, reply = site.ask()
    assert status == 503
    assert reply["error"]["message"]
    assert "retry-after" in reply["headers"]
    site.scale("decode", 1)
    site.until(lambda: site.ready(decode=1, prefill=1), "it is back")
    site.until(lambda: site.ask()[0] == 200, "it serves again")


def test_delete_ends_every_engine(site: Site) -> None:
    pids = [engine["pid"] for engine in site.engines()]
    assert all(pids)
    assert site.api.delete("/deployments/demo").status_code in (202, 204)
    site.until(lambda: site.api.get("/deployments/demo").status_code == 404, "the deployment is gone")
    assert site.ask()[0] == 404
    deadline = time.monotonic() + 30
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
