"""What counts as an answer, and what as a proof that KV moved: engines that lie, on a transport in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from controlplane.fleet.model import PairProof, Peer
from workers.probe import EngineClient, Unanswered, fresh_prompt, prove_pair

PEER = Peer("p", 3, "http://p", "secret-p")
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1"}


class FakeEngine:
    """Answers completions; `moves` decides what a request with transfer params does to the counters."""

    def __init__(
        self, *, params: dict[str, Any] | None = None, moves: Callable[[FakeEngine, int], None] | None = None
    ) -> None:
        self.params = params
        self.moves = moves
        self.bytes = self.taken = self.local = 0
        self.tokens = 1
        self.status = 200
        self.alone: int | None = None
        """Status of completions without transfer params, if another."""
        self.vocabulary: int | None = 50_000
        """None: there is no `/tokenize`."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def client(self, secret: str = "s") -> EngineClient:
        return EngineClient("http://engine", secret, transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("authorization", ""))
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics())
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return self.tokenize(body["prompt"])
        self.bodies.append(body)
        status = self.status if self.alone is None or body.get("kv_transfer_params") else self.alone
        if status != 200:
            return httpx.Response(status, json={"error": {"message": "KV load failed"}})
        if isinstance(body["prompt"], list) and self.vocabulary and max(body["prompt"]) >= self.vocabulary:
            return httpx.Response(400, json={"error": {"message": "Token id is out of vocabulary"}})
        if self.moves and body.get("kv_transfer_params"):
            self.moves(self, len(body["prompt"]))
        usage = {"completion_tokens": self.tokens}
        return httpx.Response(200, json={"choices": [{"text": ""}], "usage": usage, "kv_transfer_params": self.params})

    def tokenize(self, text: str) -> httpx.Response:
        if self.vocabulary is None:
            return httpx.Response(404)
        return httpx.Response(200, json={"tokens": [ord(character) % self.vocabulary for character in text]})

    def metrics(self) -> str:
        source = "vllm:prompt_tokens_by_source_total{source="
        return (
            f"vllm:nixl_bytes_transferred_sum {self.bytes}\n"
            f'{source}"local_compute"}} {self.local}\n{source}"external_kv_transfer"}} {self.taken}\n'
        )


def honest(engine: FakeEngine, tokens: int) -> None:
    engine.bytes += tokens * 1000
    engine.taken += tokens


def computes_itself(engine: FakeEngine, tokens: int) -> None:
    engine.local += tokens


def computes_itself_beside_others(engine: FakeEngine, tokens: int) -> None:
    engine.local += tokens
    engine.bytes += 5000
    engine.taken += 5


def tells_bytes_only(engine: FakeEngine, tokens: int) -> None:
    engine.bytes += tokens * 1000


def prove(decode: FakeEngine, prefill: FakeEngine, **more: Any) -> PairProof:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    return prove_pair(
        decode.client(),
        prefill.client("secret-p"),
        PEER,
        model="m",
        **{"block_size": 128, "max_model_len": 2048, "chance": random.Random(1), **more},
        clock=lambda: now,
        sleep=sleep,
    )


@pytest.mark.parametrize(
    ("moves", "ok", "detail"),
    [
        (honest, True, "146 prompt tokens came from p."),
        (tells_bytes_only, True, "146 prompt tokens"),
        (computes_itself, False, "decode computed the prompt itself"),
        (computes_itself_beside_others, False, "Only 5 of 146"),
    ],
)
def test_only_kv_that_moved_is_a_proof(moves: Callable[[FakeEngine, int], None], ok: bool, detail: str) -> None:
    proof = prove(FakeEngine(moves=moves), FakeEngine(params=PARAMS))
    assert (proof.prefill, proof.prefill_attempt, proof.ok) == ("p", 3, ok)
    assert detail in proof.detail
    assert (proof.bytes_moved > 0) == (moves is not computes_itself)


def test_the_exchange_is_the_one_that_engines_know() -> None:
    decode, prefill = FakeEngine(moves=honest), FakeEngine(params=PARAMS)
    prove(decode, prefill)
    (asked,), (handed,) = prefill.bodies, decode.bodies
    assert asked["max_tokens"] == 1
    assert asked["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert handed["kv_transfer_params"] == PARAMS
    assert handed["prompt"] == asked["prompt"]
    assert set(prefill.keys) == {"Bearer secret-p"}
    assert set(decode.keys) == {"Bearer s"}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_a_prefill_answer_without_params_is_no_hand_over(params: dict[str, Any] | None) -> None:
    decode = FakeEngine(moves=honest)
    proof = prove(decode, FakeEngine(params=params))
    assert not proof.ok
    assert decode.bodies == [], "decode is not asked: it would answer 200 by computing the prompt itself"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_refusal_names_its_side(side: str) -> None:
    engines = {"decode": FakeEngine(moves=honest), "prefill": FakeEngine(params=PARAMS)}
    engines[side].status = 500
    proof = prove(engines["decode"], engines["prefill"])
    assert not proof.ok
    assert proof.detail.lower().startswith(side)
    assert "500" in proof.detail
    assert proof.fault == side, "it fails alone, too"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_answers_alone_is_not_at_fault_for_the_pair(side: str) -> None:
    engines = {"decode": FakeEngine(moves=honest), "prefill": FakeEngine(params=PARAMS)}
    engines[side].status, engines[side].alone = 500, 200
    assert prove(engines["decode"], engines["prefill"]).fault is None


def test_prefill_without_params_is_at_fault_itself() -> None:
    assert prove(FakeEngine(moves=honest), FakeEngine()).fault == "prefill"


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("max_model_len", [8, 64, 2048, None])
@pytest.mark.parametrize("vocabulary", [2, 5, 60, 1_999, 150_000, None])
def test_a_pair_is_proved_with_tokens_that_the_model_has(
    vocabulary: int | None, max_model_len: int | None, block_size: int
) -> None:
    """The smallest vocabulary makes the fewest different prompts: then a salt makes them new."""
    decode, prefill = FakeEngine(moves=honest), FakeEngine(params=PARAMS)
    decode.vocabulary = prefill.vocabulary = vocabulary
    chance = random.Random(3)
    for _ in range(2):
        proof = prove(decode, prefill, block_size=block_size, max_model_len=max_model_len, chance=chance)
        assert proof.ok, proof.detail
    first, second = prefill.bodies
    assert len(first["prompt"]) + 2 <= (max_model_len or 10**9)
    assert (first["prompt"], first.get("cache_salt")) != (second["prompt"], second.get("cache_salt"))
    assert decode.bodies[0].get("cache_salt") == first.get("cache_salt")


@pytest.mark.parametrize("params", [PARAMS, None])
def test_a_model_shorter_than_a_block_has_nothing_to_transfer_and_that_is_said(params: dict[str, Any] | None) -> None:
    proof = prove(FakeEngine(moves=computes_itself), FakeEngine(params=params), max_model_len=64)
    assert (proof.ok, proof.fault) == (False, None)
    assert proof.detail.startswith("No prompt that fits the model (64 tokens) fills a KV block (128 tokens)")


def test_a_model_that_knows_no_letter_of_hello_answers_with_a_token_of_its_own() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [4, 3]})
        if body["prompt"] == "Hello":
            return httpx.Response(400, text="The decoder prompt cannot be empty")
        assert body["prompt"] == [3]
        return httpx.Response(200, json={"choices": [{"text": ""}], "usage": {"completion_tokens": 1}})

    with EngineClient("http://e", "s", transport=httpx.MockTransport(answer)) as client:
        client.answer("m")


def test_200_without_a_token_is_no_answer() -> None:
    engine = FakeEngine()
    engine.tokens = 0
    with engine.client() as client, pytest.raises(Unanswered, match="without a single token"):
        client.complete("m", "Hello", max_tokens=2)


@pytest.mark.parametrize("body", ["", "[]", "not json", "null"])
def test_a_strange_answer_is_no_answer(body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    with EngineClient("http://e", "s", transport=transport) as client, pytest.raises(Unanswered):
        client.complete("m", "Hello", max_tokens=2)


@pytest.mark.parametrize(
    ("sources", "on", "ranks"),
    [
        ({}, False, 1),
        ({"0": {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:1"}}, True, 1),
        ({str(n): {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{n + 1}"} for n in range(4)}, True, 4),
        ({"0": {"enable_kv_cache_events": False, "endpoint": "tcp://127.0.0.1:1"}}, False, 1),
        ({"0": {"enable_kv_cache_events": True, "endpoint": None}}, False, 1),
    ],
)
def test_kv_events_are_on_when_the_engine_says_where(sources: dict[str, Any], on: bool, ranks: int) -> None:
    answers: dict[str, Any] = {
        "/v1/models": {"data": [{"id": "m", "max_model_len": 2048}]},
        "/version": {"version": "0.32.0"},
        "/kv_event_sources": sources,
        "/metrics": {},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers[request.url.path]))
    with EngineClient("http://e", "s", transport=transport) as client:
        identity = client.identity()
    assert (identity.kv_events, identity.kv_ranks) == (on, ranks)
    assert (identity.version, identity.max_model_len) == ("0.32.0", 2048)


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ((), 16),
        (("--seed", "2"), 16),
        (("-dcp", "4"), 64),
        (("-dcp=4",), 64),
        (("--decode-context-parallel-size", "8"), 128),
        (("--decode_context_parallel_size=2", "--seed", "1"), 32),
        (("-dcp", "8", "-dcp", "2"), 32),
        (("-dcp", "some"), 16),
        (("-dcp",), 16),
    ],
)
def test_a_block_spread_over_ranks_has_their_number_times_the_tokens(arguments: tuple[str, ...], tokens: int) -> None:
    """As its KV events say: the router would take that for the block size of another engine."""
    answers = {
        "/v1/models": "{}",
        "/version": "{}",
        "/kv_event_sources": "{}",
        "/metrics": 'vllm:cache_config_info{block_size="16",num_gpu_blocks="455"} 1.0',
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=answers[request.url.path]))
    with EngineClient("http://e", "s", transport=transport) as client:
        identity = client.identity(arguments)
    assert (identity.block_size, identity.kv_blocks) == (tokens, 455)


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "length"), [(128, 2048, 146), (16, None, 20), (128, 64, 60), (128, 4, 1)]
)
def test_the_prompt_is_longer_than_a_block_where_the_model_allows_it(
    block_size: int, max_model_len: int | None, length: int
) -> None:
    assert len(fresh_prompt(range(9), block_size, max_model_len, random.Random(1))) == length


def test_no_two_prompts_are_alike() -> None:
    chance = random.Random(1)
    assert fresh_prompt(range(9), 128, None, chance) != fresh_prompt(range(9), 128, None, chance)


@pytest.mark.parametrize("models", [{"data": {"a": 1}}, {"data": ["x"]}, {"data": [{"max_model_len": 1 << 70}]}, {}])
def test_an_engine_that_says_nonsense_of_itself_spoils_no_report(models: dict[str, Any]) -> None:
    answers = {
        "/v1/models": models,
        "/kv_event_sources": {"a": 1} | {str(n): {"endpoint": "x"} for n in range(20_000)},
        "/version": {"version": "v" * 1_000_000},
        "/metrics": {},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers[request.url.path]))
    seen = EngineClient("http://engine", "s", transport=transport).identity()
    assert (seen.max_model_len, seen.kv_ranks, len(seen.version)) == (None, 64, 100)


def test_no_more_of_an_answer_is_read_than_one_may_have() -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        while True:
            sent.append(1 << 20)
            yield b"x" * (1 << 20)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=endless()))
    with pytest.raises(Unanswered, match="more than 32 MiB"):
        EngineClient("http://engine", "s", transport=transport).figures()
    assert sum(sent) <= (33 << 20)
