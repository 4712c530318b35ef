"""The stand-in as the agent meets it: a process with arguments, sockets, signals, and faults that can be switched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import msgspec
import psutil
import pytest
import zmq

from tests.conftest import free_port
from tests.contract.bodies import chat, long_prompt
from tests.contract.exchange import prefill
from tests.contract.kv_events import replayed
from tests.contract.pair import EnginePair
from tests.contract.standins import KEY, StandIn, pair_of
from workers.sim.__main__ import parse_arguments
from workers.sim.settings import Settings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[StandIn]:
    with StandIn("aggregated") as engine:
        yield engine


@pytest.fixture(autouse=True)
def no_faults_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").faults()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "workers.sim", *arguments], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fault", "nope"], "unknown fault 'nope'"),
        (["--role", "prefill"], "--side-channel-port is needed"),
        (["--kv-blocks", "10", "--block-size", "16", "--max-model-len", "161"], "raise --kv-blocks"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--prefill-tokens-per-second", "0"], "greater than 0"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_argument_is_a_sentence(arguments: list[str], says: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert says in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "99999"], "--port must be from 0 to 65535"),
        (["--events-port", "-1"], "--events-port must be from 0 to 65535"),
        (["--host", ""], "--host must name one address"),
        (["--itl-ms", "nan"], "--itl-ms must be a number of at least 0"),
        (["--startup-seconds", "-1"], "--startup-seconds must be a number of at least 0"),
        (["--kv-blocks", "9" * 20], "--kv-blocks must be at most"),
    ],
)
def test_a_number_that_makes_no_sense_is_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert says in capsys.readouterr().err


def test_the_default_length_fits_a_small_cache() -> None:
    assert parse_arguments(["--kv-blocks", "10", "--block-size", "16"]).max_model_len == 160
    assert parse_arguments([]).max_model_len == Settings().max_model_len


@pytest.mark.parametrize("option", ["--port", "--side-channel-port", "--events-port", "--replay-port"])
def test_a_taken_port_is_named(option: str) -> None:
    other = StandIn("prefill")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = run(*other.argv[3:], option, port)
    assert ended.returncode == 98
    assert port in ended.stderr


def test_a_port_taken_between_its_bind_and_its_listen_is_named() -> None:
    """Its own events here; asked for the same by hand, or by another process at the same moment."""
    port = str(free_port())
    ended = run("--port", port, "--events-port", port, "--replay-port", str(free_port()))
    assert ended.returncode == 98
    assert f"HTTP port {port} on 127.0.0.1 cannot be had" in ended.stderr


def test_it_listens_on_its_address_only() -> None:
    with StandIn("prefill") as engine:
        sockets = psutil.Process(engine.process.pid).net_connections("tcp")
        listening = {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
        assert listening == {("127.0.0.1", p) for p in (engine.port, engine.side_channel, engine.events, engine.replay)}


def test_sigterm_ends_it_although_a_stream_is_open() -> None:
    with StandIn("aggregated", "--fault", "stalled-stream") as engine:
        with engine.client.stream("POST", CHAT, json=BODY | {"stream": True}) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            engine.process.terminate()
            assert engine.process.wait(10) == 0
        assert not psutil.pid_exists(engine.process.pid)


def test_the_key_is_not_in_its_arguments(engine: StandIn) -> None:
    assert KEY not in " ".join(psutil.Process(engine.process.pid).cmdline())


def test_faults_need_the_key(engine: StandIn) -> None:
    assert httpx.post(engine.url + "/sim/faults", json={"faults": ["hang"]}).status_code == 401
    refused = engine.client.post("/sim/faults", json={"faults": ["nope"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "faults")
    assert engine.client.get("/sim/faults").json()["faults"] == []


def test_unhealthy(engine: StandIn) -> None:
    engine.faults("unhealthy")
    assert engine.client.get("/health").status_code == 503


def test_http_500(engine: StandIn) -> None:
    engine.faults("http-500")
    for stream in (False, True):
        reply = engine.client.post(CHAT, json=BODY | {"stream": stream})
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "InternalServerError")


def test_empty_stream(engine: StandIn) -> None:
    engine.faults("empty-stream")
    assert engine.client.post(CHAT, json=BODY | {"stream": True}).text == "data: [DONE]\n\n"
    reply = engine.client.post(CHAT, json=BODY).json()
    assert reply["choices"][0]["message"]["content"] == ""


def test_truncated_stream(engine: StandIn) -> None:
    engine.faults("truncated-stream")
    seen: list[bytes] = []
    with (
        engine.client.stream("POST", CHAT, json=BODY | {"stream": True}) as reply,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        seen.extend(reply.iter_raw())
    assert b"".join(seen).count(b"data: ") == 3
    assert b"[DONE]" not in b"".join(seen)


def test_in_band_error(engine: StandIn) -> None:
    engine.faults("in-band-error")
    frames = engine.client.post(CHAT, json=BODY | {"stream": True}).text.strip().split("\n\n")
    assert len(frames) == 5
    assert msgspec.json.decode(frames[3].removeprefix("data: "))["error"]["code"] == 500
    assert frames[4] == "data: [DONE]"


def test_crash_at_the_second_request() -> None:
    with StandIn("aggregated", "--fault", "crash-after-2") as engine:
        assert engine.client.post(CHAT, json=BODY).status_code == 200
        with pytest.raises(httpx.TransportError):
            engine.client.post(CHAT, json=BODY)
        assert engine.process.wait(10) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(engine: StandIn, stream: bool) -> None:
    body = msgspec.json.encode(BODY | {"max_tokens": 8000, "stream": stream})
    before = engine.metrics()['vllm:request_success_total{finished_reason="abort"}']
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", engine.port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        _until(lambda: engine.metrics()["vllm:kv_cache_usage_perc"] > 0)
    _until(lambda: engine.metrics()["vllm:kv_cache_usage_perc"] == 0)
    after = engine.metrics()
    assert after['vllm:request_success_total{finished_reason="abort"}'] == before + 1
    assert after["vllm:num_requests_running"] == 0
    assert engine.client.get("/load").json() == {"server_load": 0}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_forced_tool_call_is_the_same_streamed_or_whole(engine: StandIn) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")):
        body = BODY | {"tools": tools, "tool_choice": choice, "ignore_eos": False, "max_tokens": 100}
        whole = engine.client.post(CHAT, json=body).json()["choices"][0]
        (call,) = whole["message"]["tool_calls"]
        assert (whole["finish_reason"], call["function"]["name"]) == (reason, "weather")
        assert msgspec.json.decode(call["function"]["arguments"]) == {"city": "text"}
        frames = EnginePair(engine.url, engine.url, KEY, "", "", "").stream(engine.url, CHAT, body)
        deltas = [c for f in frames[1:-1] for c in f["choices"][0]["delta"].get("tool_calls", [])]
        assert "".join(c["function"]["arguments"] for c in deltas) == call["function"]["arguments"]
        assert [c["function"]["name"] for c in deltas if "name" in c["function"]] == ["weather"]
    wrong = BODY | {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "other"}}}
    assert engine.client.post(CHAT, json=wrong).status_code == 400


def test_json_answers_are_json(engine: StandIn) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}):
        reply = engine.client.post(CHAT, json=BODY | {"response_format": form, "max_tokens": 50}).json()
        assert isinstance(msgspec.json.decode(reply["choices"][0]["message"]["content"]), dict)


# --- events --------------------------------------------------------------------------------------------------------


def _publishes(engine: StandIn) -> bool:
    """Whether a subscriber that has surely had the time hears of a new prompt."""
    pair = pair_of(engine, engine)
    context = zmq.Context()
    try:
        socket_ = context.socket(zmq.SUB)
        socket_.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket_.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket_.connect(pair.events)
        if not monitor.poll(500):
            return False
        for _ in range(20):
            pair.ok(engine.url, "/v1/completions", {"prompt": long_prompt(pair, 40), "max_tokens": 1})
            if socket_.poll(100):
                return True
        return False
    finally:
        context.destroy(0)


def test_events_off_is_said() -> None:
    with StandIn("prefill", "--fault", "events-off") as engine:
        assert engine.client.get("/kv_event_sources").json() == {}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", engine.events), 1)


def test_a_publisher_that_connects_is_heard_by_nobody_yet_can_be_replayed() -> None:
    with StandIn("prefill", "--fault", "events-connect") as engine:
        assert engine.client.get("/kv_event_sources").json()["0"]["endpoint"].endswith(str(engine.events))
        assert not _publishes(engine)
        pair = pair_of(engine, engine)
        pair.ok(engine.url, "/v1/completions", {"prompt": long_prompt(pair, 40), "max_tokens": 1})
        assert replayed(pair, 0)


def test_event_faults_come_and_go() -> None:
    with StandIn("prefill") as engine:
        pair = pair_of(engine, engine)
        assert _publishes(engine)
        engine.faults("no-events")
        known = len(replayed(pair, 0))
        assert not _publishes(engine)
        assert len(replayed(pair, 0)) == known
        engine.faults("wrong-block-size")
        pair.ok(engine.url, "/v1/completions", {"prompt": long_prompt(pair, 40), "max_tokens": 1})
        ((_, _, payload),) = replayed(pair, known)
        (event,) = msgspec.msgpack.decode(payload)[1]
        assert event["block_size"] * len(event["block_hashes"]) == 2 * len(event["token_ids"])


def test_evicted_and_cleared_blocks_are_told() -> None:
    with StandIn("prefill", "--kv-blocks", "8", "--max-model-len", "128") as engine:
        pair = pair_of(engine, engine)
        kinds = []
        for _ in range(3):
            pair.ok(engine.url, "/v1/completions", {"prompt": long_prompt(pair, 100), "max_tokens": 1})
        assert engine.client.post("/sim/reset_prefix_cache").status_code == 200
        for _, _, payload in replayed(pair, 0):
            kinds += [event["type"] for event in msgspec.msgpack.decode(payload)[1]]
        assert {"BlockStored", "BlockRemoved"} <= set(kinds)
        assert kinds[-1] == "AllBlocksCleared"


# --- hand-over -----------------------------------------------------------------------------------------------------


def test_an_aggregated_engine_takes_no_part_in_the_exchange(engine: StandIn) -> None:
    pair = pair_of(engine, engine)
    assert prefill(pair, "chat", chat(pair)) is None
    assert not any("nixl" in name for name in engine.metrics())


def test_a_killed_prefill_engine_is_an_error_not_a_hang() -> None:
    with StandIn("decode") as decode:
        with StandIn("prefill") as gone:
            pair = pair_of(gone, decode)
            body = chat(pair)
            params = prefill(pair, "chat", body)
            gone.process.kill()
            gone.process.wait(10)
        reply = pair.post(decode.url, CHAT, body | {"kv_transfer_params": params})
        assert reply.status_code == 500
        assert decode.metrics()["vllm:nixl_num_failed_transfers_total"] == 1


def test_environment_is_read_for_the_key_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "workers.sim", "--help"],
        env=os.environ | {"VLLM_API_KEY": "do-not-show"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "do-not-show" not in ended.stdout + ended.stderr
