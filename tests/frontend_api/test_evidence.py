"""What the router says it knows: states and reasons as a table, ranks, predictions, and the memory it may take. No sockets."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from typing import Any

import msgspec
import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RoutingMode, RoutingPolicy, SnapshotDeployment, SnapshotEngine
from frontend_api.flow import Flow, Serving
from frontend_api.kv.debt import HELD_SECONDS, OWED_SECONDS
from frontend_api.kv.debt import SENT_SECONDS as SAMPLE_SECONDS
from frontend_api.kv.evidence import LARGE_BLOCK_SIZE, Cache, Evidence, State, source
from frontend_api.kv.index import Index, chain
from frontend_api.kv.knowledge import Knowledge
from frontend_api.kv.predict import COMPUTED_SECONDS, MOST, SENT_SECONDS, Predicted
from frontend_api.kv.sequence import END, Rank
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Engine, View
from frontend_api.steps import Began, Decode, Ended
from frontend_api.trace import Trace

SIZE = 16
KV = RoutingPolicy(mode=RoutingMode.KV)


class NoTokens:
    """A token source that nobody asks."""

    marks = ()

    def at_once(self, endpoint: object, body: bytes) -> None:
        return None


class Fleet:
    """Engines of one deployment, whose publishers are played by the test."""

    def __init__(self, *names: str, **spec: Any) -> None:
        self.view = View()
        self.evidence = Evidence(self.view)
        self.now = 100.0
        self.specs = {name: self.spec(name, **spec) for name in names}
        self.publish()

    @staticmethod
    def spec(name: str, **more: Any) -> SnapshotEngine:
        port = 1_000 + 10 * int(name[1:])
        fields: dict[str, Any] = {
            "id": name, "name": name, "attempt": 1, "role": Role.AGGREGATED, "url": f"http://{name}",
            "block_size": SIZE, "events": f"tcp://h:{port}", "replay": f"tcp://h:{port + 5}",
        }  # fmt: skip
        return SnapshotEngine(**{**fields, **more})

    def publish(self, *, without: tuple[str, ...] = (), policy: RoutingPolicy = KV, tokenizer: str = "") -> None:
        engines = tuple(spec for name, spec in self.specs.items() if name not in without)
        deployment = SnapshotDeployment(name="d", served_name="m", routing=policy, engines=engines, tokenizer=tokenizer)
        self.view.take(FleetSnapshot(version=self.view.version + 1, deployments=(deployment,)))
        self.evidence.tick(self.now)
        for cache in self.evidence.caches.values():
            cache.tokens = NoTokens()

    @property
    def cache(self) -> Cache:
        return self.evidence.caches["m"]

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.view.engines() if engine.id == name)

    def ranks(self, name: str) -> tuple[Rank, ...]:
        return self.cache.ranks[self.engine(name)]

    def answer(self, *names: str, events: tuple[dict[str, Any], ...] = (), first: int = 0) -> None:
        """The replays of these engines, with one batch if there are events."""
        for rank in (rank for name in names or self.specs for rank in self.ranks(name)):
            while rank.wanted is not None:
                rank.asked()
                if events:
                    rank.replayed(first, batch(*events), self.now)
                rank.replayed(END, b"", self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.evidence.tick(self.now)

    def standing(self) -> tuple[State, dict[str, str]]:
        state, reasons = self.cache.standing()
        return state, dict(reasons)

    def overlap(self, tokens: array[int]) -> dict[str, int]:
        return {engine.id: held for engine, held in self.cache.prompt(tokens, None).overlap.items()}

    def serve(self, tokens: array[int], alone: Reason | None = None) -> tuple[Flow, Engine]:
        """A request, up to its leg."""
        deployment = self.view.deployments["m"]
        flow = Serving(deployment, alone, Trace(), lambda: self.now, self.cache.prompt(tokens, None)).steps()
        step = next(flow)
        assert isinstance(step, Decode)
        return flow, step.engine


def batch(*events: dict[str, Any], rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), rank])


def prompt(seed: int, blocks: int = 10) -> array[int]:
    return array("I", [seed * 100_000 + n for n in range(blocks * SIZE)])


def stored(tokens: array[int], **more: Any) -> dict[str, Any]:
    hashes = [hash((tokens[0], n)) & 0xFFFF_FFFF for n in range(len(tokens) // SIZE)]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": list(tokens),
             "block_size": SIZE, "medium": "GPU"}  # fmt: skip
    return {**event, **more}


def compute(fleet: Fleet, name: str, tokens: array[int]) -> None:
    """The engine is sent a prompt, and answers."""
    asked = fleet.cache.prompt(tokens, None)
    asked.sent(fleet.engine(name), fleet.now)
    asked.computed(fleet.engine(name), fleet.now)


# ---- states and reasons


def test_nothing_is_known_before_the_engines_are_heard() -> None:
    fleet = Fleet("a1", "a2")
    assert fleet.standing() == (State.BLIND, {"a1": "not-heard", "a2": "not-heard"})
    fleet.answer("a1")
    assert fleet.standing() == (State.APPROXIMATE, {"a2": "not-heard"})
    fleet.answer("a2")
    assert fleet.standing() == (State.EXACT, {})


@pytest.mark.parametrize(
    ("event", "state", "why"),
    [
        (stored(prompt(1)), State.EXACT, None),
        (stored(prompt(1), medium="CPU"), State.APPROXIMATE, "kv_in_lower_tier"),
        (stored(prompt(1), kv_cache_spec_kind="mamba", group_idx=1), State.APPROXIMATE, "kv_other_cache_groups"),
        (stored(prompt(1), parent_block_hash=77), State.APPROXIMATE, "known-in-part"),
        (stored(prompt(1), token_ids=[1, 2, 3]), State.APPROXIMATE, "known-in-part"),
        (stored(prompt(1), block_size=8), State.DEGRADED, "kv_block_mismatch"),
    ],
)
def test_what_an_event_may_do_to_the_state(event: dict[str, Any], state: State, why: str | None) -> None:
    fleet = Fleet("a1", "a2")
    fleet.answer("a1", events=(event,))
    fleet.answer("a2", events=(stored(prompt(9)),))
    assert fleet.standing() == (state, {"a1": why} if why else {})


def test_an_engine_without_events_beside_one_with() -> None:
    fleet = Fleet("a1")
    fleet.specs["a2"] = fleet.spec("a2", events="", replay="")
    fleet.publish()
    fleet.answer("a1")
    assert fleet.standing() == (State.DEGRADED, {"a2": "kv_events_disabled"})


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_engine_that_owes_events(ranks: int) -> None:
    fleet = Fleet("a1", ranks=ranks)
    fleet.answer("a1")
    for _ in range(2):
        asked = fleet.cache.prompt(prompt(1), None)
        asked.sent(fleet.engine("a1"), fleet.now)
        asked.computed(fleet.engine("a1"), fleet.now)
    fleet.pass_time(OWED_SECONDS)
    assert fleet.standing()[0] is not State.BLIND
    fleet.pass_time(1.0)
    assert fleet.standing() == (State.BLIND, {"a1": "kv_events_not_observed"})
    fleet.ranks("a1")[-1].asked()
    fleet.ranks("a1")[-1].replayed(0, batch(stored(prompt(1))), fleet.now)
    fleet.pass_time(0.1)
    assert fleet.standing()[0] is (State.EXACT if ranks == 1 else State.APPROXIMATE)


def test_nothing_is_owed_for_what_another_tokenizer_made_of_prompts() -> None:
    fleet = Fleet("a1")
    fleet.answer("a1")
    compute(fleet, "a1", prompt(1))
    under_way = fleet.cache.prompt(prompt(2), None)
    under_way.sent(fleet.engine("a1"), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.BLIND, {"a1": "kv_events_not_observed"})
    fleet.publish(tokenizer="the right one")
    assert fleet.standing() == (State.EXACT, {})
    under_way.sent(fleet.engine("a1"), fleet.now)  # to another engine, as the first one failed
    under_way.computed(fleet.engine("a1"), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})


def test_an_engine_whose_events_came_before_its_answer_owes_none() -> None:
    fleet = Fleet("a1")
    fleet.answer("a1")
    asked = fleet.cache.prompt(prompt(1), None)
    asked.sent(fleet.engine("a1"), fleet.now)
    fleet.ranks("a1")[0].live(0, batch(stored(prompt(1))), fleet.now)
    asked.computed(fleet.engine("a1"), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})


def test_events_that_are_another_engines_are_told_from_what_they_leave_out() -> None:
    """As when somebody has mixed two addresses up: each publisher is in good order, and still nothing is where it seems."""
    fleet = Fleet("a1", "a2", replay="")
    (one,), (two,) = fleet.ranks("a1"), fleet.ranks("a2")
    for rank in (one, two):
        rank.live(0, batch(stored(prompt(8))), fleet.now)
    compute(fleet, "a1", prompt(1))
    two.live(1, batch(stored(prompt(1))), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_not_observed"})
    for number in (1, 2):
        one.live(number, batch(stored(prompt(3 + number))), fleet.now)  # of what a2 has computed
        fleet.pass_time(OWED_SECONDS + 1.0)
    compute(fleet, "a1", prompt(3))
    one.live(3, batch(stored(prompt(3))), fleet.now)  # by chance
    fleet.pass_time(HELD_SECONDS - OWED_SECONDS - 2.0)
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_not_observed"})
    fleet.pass_time(2.0)
    assert fleet.standing() == (State.EXACT, {})


def test_a_prompt_whose_answer_is_only_announced_is_not_computed_yet() -> None:
    """A stream of responses begins before its prompt's turn comes."""
    fleet = Fleet("a1", replay="")
    (rank,) = fleet.ranks("a1")
    rank.live(0, batch(stored(prompt(9))), fleet.now)
    flow, _ = fleet.serve(prompt(1))
    assert flow.send(Began(token=False)) is None
    for number in (1, 2):
        fleet.pass_time(OWED_SECONDS + 1.0)
        rank.live(number, batch(stored(prompt(9 + number))), fleet.now)
        fleet.pass_time(1.0)
        assert fleet.standing() == (State.EXACT, {})
    with pytest.raises(StopIteration):
        flow.send(Ended(7, 0.1))
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_not_observed"})


def test_a_prompt_that_is_answered_before_it_is_computed_proves_nothing() -> None:
    fleet = Fleet("a1", replay="")
    (rank,) = fleet.ranks("a1")
    rank.live(0, batch(stored(prompt(9))), fleet.now)
    flow, _ = fleet.serve(prompt(1), Reason.BACKGROUND)
    with pytest.raises(StopIteration):
        flow.send(Began(whole=True))
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})


def test_what_comes_late_and_in_order_is_not_missing() -> None:
    """As over a connection that stood still: what was told before comes first."""
    fleet = Fleet("a1")
    fleet.answer()
    compute(fleet, "a1", prompt(1))
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing()[1] == {"a1": "kv_events_not_observed"}
    (rank,) = fleet.ranks("a1")
    rank.live(0, batch(stored(prompt(2))), fleet.now)
    rank.live(1, batch(stored(prompt(1))), fleet.now)
    fleet.answer()
    fleet.pass_time(0.1)
    assert fleet.standing() == (State.EXACT, {})


def test_a_block_of_which_the_engine_has_another_copy_is_not_owed() -> None:
    """vLLM keeps both of two that came at once, and tells of the end of each."""
    fleet = Fleet("a1")
    fleet.answer()
    (rank,) = fleet.ranks("a1")
    for number in (0, 1):
        rank.live(number, batch(stored(prompt(1))), fleet.now)
    rank.live(2, batch({**stored(prompt(1)), "type": "BlockRemoved"}), fleet.now)
    for number in (3, 4, 5):
        compute(fleet, "a1", prompt(1))
        fleet.pass_time(OWED_SECONDS + 1.0)
        assert fleet.standing() == (State.EXACT, {})
        rank.live(number, batch(stored(prompt(number))), fleet.now)
    compute(fleet, "a1", prompt(9))
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing()[1] == {"a1": "kv_events_not_observed"}


def test_an_engine_need_not_tell_of_a_prompts_last_block() -> None:
    """vLLM keeps it to itself while several tokens that it has guessed (MTP) may change its end."""
    fleet = Fleet("a1")
    fleet.answer()
    compute(fleet, "a1", prompt(1))
    (rank,) = fleet.ranks("a1")
    rank.live(0, batch(stored(prompt(1)[: 9 * SIZE])), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})


def test_an_engine_whose_block_size_nobody_knows_owes_nothing() -> None:
    fleet = Fleet("a1")
    fleet.specs["a2"] = fleet.spec("a2", block_size=None)
    fleet.publish()
    fleet.answer()
    compute(fleet, "a2", prompt(1))
    fleet.ranks("a2")[0].live(0, batch(stored(prompt(1), block_size=2 * SIZE, block_hashes=[1, 2, 3, 4, 5])), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})


def test_blocks_that_were_told_of_and_are_gone_before_the_answer_are_not_owed() -> None:
    fleet = Fleet("a1")
    fleet.answer()
    asked = fleet.cache.prompt(prompt(1), None)
    asked.sent(fleet.engine("a1"), fleet.now)
    (rank,) = fleet.ranks("a1")
    rank.live(0, batch(stored(prompt(1))), fleet.now)
    rank.live(1, batch({**stored(prompt(1)), "type": "BlockRemoved"}, stored(prompt(2))), fleet.now)
    asked.computed(fleet.engine("a1"), fleet.now)
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})


def test_requests_that_nobody_finishes_leave_the_next_one_to_be_looked_at() -> None:
    fleet = Fleet("a1")
    fleet.answer()
    engine = fleet.engine("a1")
    for seed in (1, 2):
        fleet.cache.prompt(prompt(seed), None).sent(engine, fleet.now)
    compute(fleet, "a1", prompt(3))
    fleet.pass_time(SAMPLE_SECONDS + 1.0)
    assert fleet.standing() == (State.EXACT, {})
    refused = fleet.cache.prompt(prompt(4), None)
    refused.sent(engine, fleet.now)
    refused.failed(engine)
    compute(fleet, "a1", prompt(5))
    fleet.pass_time(OWED_SECONDS + 1.0)
    assert fleet.standing()[1] == {"a1": "kv_events_not_observed"}


def test_a_prompt_that_it_had_unknown_keeps_an_engine_known_in_part() -> None:
    """One that is asked for again and again is never the oldest, and tells of nothing: the others turn over without it."""
    fleet = Fleet("a1", replay="")
    (rank,) = fleet.ranks("a1")
    for number in range(10, 14):
        gone = {**stored(prompt(number - 1)), "type": "BlockRemoved"}
        rank.live(number, batch(stored(prompt(number)), gone), fleet.now)
        assert fleet.standing()[0] is (State.APPROXIMATE if number < 13 else State.EXACT)
        if number < 12:
            compute(fleet, "a1", prompt(1))
            fleet.pass_time(OWED_SECONDS + 1.0)


def test_an_engine_of_other_groups_owes_no_more_than_any_event() -> None:
    fleet = Fleet("a1")
    fleet.answer()
    compute(fleet, "a1", prompt(1))
    window = stored(prompt(1), group_idx=1, kv_cache_spec_kind="sliding_window")
    fleet.ranks("a1")[0].live(0, batch(window), fleet.now)
    for _ in range(2):
        fleet.pass_time(OWED_SECONDS + 1.0)
        assert fleet.standing() == (State.APPROXIMATE, {"a1": "kv_other_cache_groups"})
        compute(fleet, "a1", prompt(1))  # which it has, and tells nothing of


def test_two_engines_that_claim_one_address_also_by_their_ranks() -> None:
    fleet = Fleet("a1", ranks=3)
    fleet.specs["a2"] = fleet.spec("a2", events="tcp://h:1012")
    fleet.publish()
    fleet.answer()
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_ambiguous", "a2": "kv_events_ambiguous"})


def test_an_engine_that_never_tells_of_anything_and_computes() -> None:
    fleet = Fleet("a1", "a2")
    fleet.answer("a2", events=(stored(prompt(1)),))
    compute(fleet, "a1", prompt(2, blocks=1))
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing() == (State.APPROXIMATE, {"a1": "not-heard"})
    compute(fleet, "a1", prompt(1))
    compute(fleet, "a2", prompt(1))
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS - 1)
    assert fleet.standing() == (State.APPROXIMATE, {"a1": "not-heard"})
    compute(fleet, "a1", prompt(2))
    fleet.pass_time(2)
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_not_observed"})
    fleet.answer("a1")
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing() == (State.EXACT, {})


def test_a_saved_index_excuses_nobody() -> None:
    fleet = Fleet("a1", "a2")
    fleet.answer("a2")
    (rank,) = fleet.ranks("a1")
    rank.contents.restored = Knowledge.COMPLETE
    compute(fleet, "a1", prompt(1))
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_not_observed"})
    rank.contents.proved()
    fleet.pass_time(0)
    assert fleet.standing() == (State.EXACT, {})


def test_without_a_replay_an_engine_must_say_that_it_computed_a_prompt() -> None:
    fleet = Fleet("a1", "a2", replay="", block_size=None)
    compute(fleet, "a1", prompt(1))  # which it may have had
    fleet.cache.counted("a1", 2 * SIZE)
    fleet.cache.counted("nobody", 160)
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing()[1] == {"a1": "not-heard", "a2": "not-heard"}  # a block may be larger
    (other,) = fleet.ranks("a2")
    other.live(0, batch(stored(prompt(1))), fleet.now)
    fleet.cache.counted("a2", 160)
    fleet.pass_time(0)
    assert fleet.standing() == (State.APPROXIMATE, {"a1": "not-heard"})
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_not_observed"})
    (rank,) = fleet.ranks("a1")
    rank.live(7, batch(stored(prompt(1))), fleet.now)
    fleet.pass_time(0)
    assert fleet.standing() == (State.APPROXIMATE, {"a1": "known-in-part"})


def test_an_engine_that_answers_replays_and_never_tells_of_a_block() -> None:
    fleet = Fleet("a1", block_size=None)
    fleet.answer()
    compute(fleet, "a1", prompt(1))
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing() == (State.EXACT, {})  # a block may be larger
    compute(fleet, "a1", prompt(2, blocks=2 * LARGE_BLOCK_SIZE // SIZE))
    fleet.pass_time(0)
    fleet.pass_time(OWED_SECONDS + 1)
    assert fleet.standing() == (State.BLIND, {"a1": "kv_events_not_observed"})
    fleet.answer(events=(stored(prompt(3)),))
    fleet.pass_time(0)
    assert fleet.standing() == (State.EXACT, {})


def test_two_engines_that_claim_one_replay() -> None:
    fleet = Fleet("a1", "a2", replay="tcp://h:9")
    fleet.answer()
    assert fleet.standing() == (State.DEGRADED, {"a1": "kv_events_ambiguous", "a2": "kv_events_ambiguous"})
    assert Fleet("a1", "a2", replay="").standing()[1] == {"a1": "not-heard", "a2": "not-heard"}


# ---- ranks


def test_ranks_publish_on_the_ports_that_follow() -> None:
    fleet = Fleet("a1", ranks=3)
    assert [(s.rank, s.events, s.replay) for s in fleet.evidence.sources()] == [
        (0, "tcp://h:1010", "tcp://h:1015"),
        (1, "tcp://h:1011", "tcp://h:1016"),
        (2, "tcp://h:1012", "tcp://h:1017"),
    ]
    assert source("d", Engine(fleet.spec("a1", replay="")), 2).replay == ""


def test_an_engine_holds_what_any_of_its_ranks_holds_and_says_that_it_chooses() -> None:
    fleet = Fleet("a1", ranks=2)
    one, two = fleet.ranks("a1")
    for rank, held in ((one, prompt(1)[: 2 * SIZE]), (two, prompt(1))):
        rank.asked()
        rank.replayed(0, batch(stored(held)), fleet.now)
        rank.replayed(END, b"", fleet.now)
    assert fleet.overlap(prompt(1)) == {"a1": 160}
    assert fleet.standing() == (State.APPROXIMATE, {"a1": "kv_rank_unknown"})
    fleet.specs["a1"] = fleet.spec("a1", ranks=1)
    fleet.publish()
    assert fleet.overlap(prompt(1)) == {}
    assert len(fleet.ranks("a1")) == 1


def test_the_capacity_may_become_known_later() -> None:
    fleet = Fleet("a1")
    (rank,) = fleet.ranks("a1")
    fleet.specs["a1"] = fleet.spec("a1", kv_blocks=77)
    fleet.publish()
    assert fleet.ranks("a1") == (rank,)
    assert rank.contents.capacity == 77


# ---- who comes and goes


def test_an_engine_that_leaves_and_comes_again_begins_anew() -> None:
    fleet = Fleet("a1", "a2")
    fleet.answer(events=(stored(prompt(1)),), first=0)
    assert fleet.overlap(prompt(1)) == {"a1": 160, "a2": 160}
    fleet.publish(without=("a1",))
    assert fleet.overlap(prompt(1)) == {"a2": 160}
    fleet.publish()
    assert fleet.overlap(prompt(1)) == {"a2": 160}
    assert fleet.standing() == (State.APPROXIMATE, {"a1": "not-heard"})
    (rank,) = fleet.ranks("a1")
    assert rank.wanted == 0  # and not what came after its last batch (dynamo#7863)
    counts = fleet.cache.counts()
    assert counts["batches"] == 2


def test_another_attempt_begins_anew() -> None:
    fleet = Fleet("a1")
    fleet.answer(events=(stored(prompt(1)),))
    fleet.specs["a1"] = fleet.spec("a1", attempt=2)
    fleet.publish()
    assert fleet.overlap(prompt(1)) == {}
    assert fleet.ranks("a1")[0].wanted == 0


# ---- predictions


def test_a_burst_with_one_new_prefix_is_computed_once_per_engine_and_goes_together() -> None:
    fleet = Fleet("a1", "a2")
    fleet.answer()
    long = 400
    flows = [fleet.serve(prompt(9, 3 * long))]  # another, longer one: its engine is busy
    burst = [fleet.serve(prompt(1, long) + prompt(20 + n, 1)) for n in range(6)]
    flows += burst
    assert {engine.id for _, engine in burst} == {"a2"}
    assert fleet.engine("a2").queued < (long + 20) * SIZE  # and not six times as much
    for flow, _ in flows:
        flow.close()
    assert fleet.overlap(prompt(1, long)) == {}  # none of them was computed


def test_what_was_computed_is_expected_until_events_can_have_come() -> None:
    fleet = Fleet("a1")
    fleet.answer()
    asked = fleet.cache.prompt(prompt(1), None)
    engine = fleet.engine("a1")
    asked.sent(engine, fleet.now)
    assert fleet.overlap(prompt(1) + prompt(2)) == {"a1": 160}
    fleet.pass_time(SENT_SECONDS - 1.0)
    assert fleet.overlap(prompt(1)) == {"a1": 160}
    asked.computed(engine, fleet.now)
    fleet.pass_time(COMPUTED_SECONDS + 0.1)
    assert fleet.overlap(prompt(1)) == {}


def test_what_events_have_told_of_is_held_only_as_long_as_they_say() -> None:
    fleet = Fleet("a1")
    fleet.answer()
    asked = fleet.cache.prompt(prompt(1), None)
    asked.sent(fleet.engine("a1"), fleet.now)
    (rank,) = fleet.ranks("a1")
    rank.live(0, batch(stored(prompt(1))), fleet.now)
    asked.computed(fleet.engine("a1"), fleet.now)
    assert fleet.overlap(prompt(1)) == {"a1": 160}
    rank.live(1, batch({"type": "AllBlocksCleared"}), fleet.now)
    assert fleet.overlap(prompt(1)) == {}


def test_what_is_held_and_what_is_coming_make_one_prefix() -> None:
    fleet = Fleet("a1")
    fleet.answer(events=(stored(prompt(1)[: 4 * SIZE]),))
    asked = fleet.cache.prompt(prompt(1), None)
    assert asked.lacking(fleet.engine("a1")) == 6 * SIZE
    asked.sent(fleet.engine("a1"), fleet.now)
    assert fleet.overlap(prompt(1)) == {"a1": 160}
    asked.failed(fleet.engine("a1"))
    assert fleet.overlap(prompt(1)) == {"a1": 64}


def test_of_an_engine_that_shows_no_events_nothing_is_expected() -> None:
    fleet = Fleet("a1")
    fleet.cache.prompt(prompt(1), None).sent(fleet.engine("a1"), fleet.now)
    assert fleet.overlap(prompt(1)) == {}


def test_of_an_engine_that_restarted_nothing_is_expected() -> None:
    fleet = Fleet("a1")
    fleet.answer(events=(stored(prompt(9)),))
    fleet.cache.prompt(prompt(1), None).sent(fleet.engine("a1"), fleet.now)
    assert fleet.overlap(prompt(1)) == {"a1": 160}
    fleet.ranks("a1")[0].live(0, batch(stored(prompt(8))), fleet.now)
    fleet.answer(events=(stored(prompt(8)),))
    assert fleet.standing() == (State.EXACT, {})
    assert fleet.overlap(prompt(1)) == {}
    fleet.cache.prompt(prompt(1), None).sent(fleet.engine("a1"), fleet.now)
    assert fleet.overlap(prompt(1)) == {"a1": 160}


def test_a_restart_is_also_seen_by_a_request_that_was_weighed_before() -> None:
    fleet = Fleet("a1")
    fleet.answer(events=(stored(prompt(9)),))
    fleet.cache.prompt(prompt(1), None).sent(fleet.engine("a1"), fleet.now)
    weighed = fleet.cache.prompt(prompt(2), None)
    fleet.ranks("a1")[0].live(0, batch(stored(prompt(8))), fleet.now)
    fleet.answer(events=(stored(prompt(8)),))
    weighed.sent(fleet.engine("a1"), fleet.now)
    assert fleet.overlap(prompt(1)) == {}


def test_an_engine_that_left_is_not_expected_to_hold_anything() -> None:
    fleet = Fleet("a1")
    fleet.answer()
    fleet.cache.prompt(prompt(1), None).sent(fleet.engine("a1"), fleet.now)
    fleet.publish(without=("a1",))
    assert fleet.cache.predicted.engines == ()


def test_predictions_are_bounded_and_leave_nothing_behind() -> None:
    predicted = Predicted()
    engine = Engine(Fleet.spec("a1"))
    for number in range(100):
        predicted.tick(float(number))
        predicted.sent(engine, range(number * 1_000, number * 1_000 + 1_000), float(number))
        assert predicted.depth(engine, range(number * 1_000, number * 1_000 + 1_000), 0) == 1_000
        assert len(predicted._until[engine]) <= MOST + 1_000
    predicted.tick(99.0 + SENT_SECONDS)
    assert predicted.engines == ()
    assert predicted._end == {}


# ---- memory


def test_the_index_takes_no_more_memory_than_its_limit_allows() -> None:
    """Four times as many blocks as it may hold, asked for now and then (dynamo#4429, production-stack#687)."""
    limit = 3_000
    draw = random.Random(1)
    index = Index(limit)
    holders = [index.add_holder() for _ in range(2)]
    tracemalloc.start()
    try:
        for seed in range(190):
            tokens = array("I", draw.randbytes(64 * SIZE * 4))
            hashes = [seed * 64 + n for n in range(64)]
            assert index.stored(holders[seed % 2], hashes, None, tokens, SIZE) is None
            index.match(chain(tokens, SIZE))
            assert index.entries <= limit
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert index.counts["evicted"] >= 190 * 64 - limit
    assert size < limit * 160  # with what is kept of blocks that were asked for lately
