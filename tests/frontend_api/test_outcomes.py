"""Who is at fault, as outcomes of requests and probes tell: tables, and whole fleets in which anything fails. No IO."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    Disaggregate,
    FleetSnapshot,
    OnPrefillFailure,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
)
from frontend_api.flow import MAX_STRIKES, Serving
from frontend_api.formats.openai import Usage
from frontend_api.http.upstream import Broken
from frontend_api.routing.failures import Failure
from frontend_api.routing.outcomes import (
    DOUBT_SECONDS,
    ENOUGH,
    FORGET_SECONDS,
    HUNG_PROBES,
    Outcomes,
    Trouble,
    computed_itself,
)
from frontend_api.routing.view import Deployment, Engine, Health, View
from frontend_api.steps import Began, Decode, Ended, Lost, Outcome, Prefill, Prefilled, Probe, Replied
from frontend_api.trace import Trace

P = b'{"remote_host":"10.0.0.1","remote_port":5600}'
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}
FAULTS: dict[str, Outcome] = {
    "500": Replied(500, b""),
    "404": Replied(404, b""),
    "reset": Lost(Broken.RESET, True),
    "silent": Lost(Broken.SILENT, True),
    "refused": Lost(Broken.CONNECT, False),
}


class Fleet:
    """Engines that fail as told, the router's view of them, and its probes."""

    def __init__(self, *names: str, policy: RoutingPolicy | None = None) -> None:
        self.now = 100.0
        self.view, self.outcomes = View(), Outcomes()
        self.view.followers.append(self.outcomes)
        self.policy = policy or RoutingPolicy(disaggregate=Disaggregate.ALWAYS)
        self.names = names
        self.faults: dict[str, str] = {}
        """By engine: of all it does, or `transfer…` of its part in them."""
        self.pairs: set[tuple[str, str]] = set()
        """Whose transfers fail."""
        self.publish()

    def publish(self) -> None:
        specs = tuple(SnapshotEngine(id=n, name=n, attempt=1, role=ROLES[n[0]], url="http://x") for n in self.names)
        entry = SnapshotDeployment(name="x", served_name="m", routing=self.policy, engines=specs)
        self.view.take(FleetSnapshot(version=self.view.version + 1, deployments=(entry,)))

    @property
    def deployment(self) -> Deployment:
        return self.view.deployments["m"]

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.view.engines() if engine.id == name)

    def answers_alone(self, name: str) -> bool:
        return self.faults.get(name, "transfer").startswith("transfer")

    def moves(self, prefill: str, decode: str) -> bool:
        return (prefill, decode) not in self.pairs and not (self.faults.get(prefill) or self.faults.get(decode))

    def outcome(self, step: Any, source: Engine | None, usage: Usage) -> Outcome:
        name = step.engine.id
        fault = self.faults.get(name, "")
        if isinstance(step, Probe):
            return FAULTS[fault] if fault == "refused" else None
        if fault in FAULTS:
            return FAULTS[fault]
        if isinstance(step, Prefill):
            return Prefilled(None if fault == "transfer-none" else P, self.now)
        if step.params is not None:
            assert source is not None
            if not self.moves(source.id, name):
                if fault != "transfer-computes":
                    return FAULTS["reset" if fault == "transfer-reset" else "500"]
                usage.prompt, usage.cached = 700, 0
                return Began(whole=True)
        usage.prompt, usage.cached = 700, 700
        return Began(whole=True)

    def ask(self) -> tuple[bool, Trace, list[Any]]:
        """One request. Returns whether it was answered, its trace, and its steps."""
        trace, usage = Trace(), Usage()
        trace.usage = usage
        serving = Serving(self.deployment, None, trace, lambda: self.now, outcomes=self.outcomes)
        flow, outcome, steps = serving.steps(), None, []
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as stop:
                return stop.value is None, trace, steps
            if step is None:
                outcome = Ended()
                continue
            steps.append(step)
            outcome = self.outcome(step, serving.source, usage)

    def probe(self, seconds: float = 0.0) -> None:
        """Let time pass; what is due is probed, as `probing` does it."""
        self.now += seconds
        for engine in self.view.engines():
            if engine.health is Health.DOWN and self.faults.get(engine.id) != "refused":
                engine.accepts()
        for trouble in self.outcomes.due(self.now):
            if self.outcomes.begin(trouble):
                unsure = any(self.faults.get(e.id) == "refused" for e in (trouble.prefill, trouble.engine) if e)
                self.outcomes.end(trouble, self.now, self.found(trouble), unsure=unsure)

    def found(self, trouble: Trouble) -> Failure | None:
        engine, prefill = trouble.engine, trouble.prefill
        if prefill is not None:
            if not self.answers_alone(prefill.id):
                return Failure(prefill, self.what(prefill.id))
            if self.faults.get(prefill.id) == "transfer-none":
                return Failure(prefill, "no-params")
        if not self.answers_alone(engine.id):
            return Failure(engine, self.what(engine.id))
        if prefill is not None and not self.moves(prefill.id, engine.id):
            return Failure(engine, "status-500", prefill)
        if prefill is None and trouble.failure.what == "no-params" and self.faults.get(engine.id) == "transfer-none":
            return Failure(engine, "no-params")
        return None

    def what(self, name: str) -> str:
        fault = self.faults[name]
        return f"status-{fault}" if fault.isdigit() else fault

    def left_out(self) -> set[str]:
        """Engines `d0` and pairs `p0 d0` that are out."""
        return {f"{f.prefill.id} {f.engine.id}" if f.prefill else f.engine.id for f in self.outcomes.left_out}

    def told(self) -> list[tuple[str, str, str]]:
        """Faults as the control plane hears them: engine, prefill, cause."""
        return sorted((f.engine, f.prefill, f.cause) for f in self.outcomes.faults(self.view.engines(), self.now))


def test_an_engine_that_others_replace_is_out_after_a_few_requests_and_comes_back_when_it_works() -> None:
    fleet = Fleet("a0", "a1")
    fleet.faults["a0"] = "500"
    tried = [fleet.ask() for _ in range(8)]
    assert all(answered for answered, _, _ in tried)
    assert fleet.left_out() == {"a0"}
    assert sum(bool(trace.tried) for _, trace, _ in tried) == ENOUGH, "afterwards nobody is sent there"
    assert fleet.told() == [("a0", "", "aggregated-status-500")]
    fault = fleet.outcomes.faults(fleet.view.engines(), fleet.now + 7.0)[0]
    assert (fault.attempt, fault.failures, fault.seconds) == (1, ENOUGH, 7.0)
    assert fault.reason == "Aggregated engine a0 answered with status 500."
    fleet.probe()
    assert fleet.left_out() == {"a0"}, "the probe found the same"
    fleet.faults.clear()
    fleet.probe(0.5)
    assert fleet.left_out() == {"a0"}, "not probed all the time"
    fleet.probe(5.0)
    assert (fleet.left_out(), fleet.told(), fleet.engine("a0").health) == (set(), [], Health.UP)


def test_what_one_request_meets_everywhere_takes_nothing_out() -> None:
    fleet = Fleet("a0", "a1", "a2")
    fleet.faults = {"a0": "500", "a1": "500"}  # as if this one request were the reason
    while len(fleet.ask()[1].tried) < MAX_STRIKES:
        pass
    assert fleet.left_out() == set()
    fleet.faults.clear()
    fleet.probe()
    assert all(engine.health is Health.UP for engine in fleet.view.engines())


def test_no_client_keeps_a_healthy_engine_out_by_requests_that_only_one_leg_refuses_or_that_break_their_stream() -> (
    None
):
    fleet = Fleet("p0", "d0")
    prefill, decode = fleet.engine("p0"), fleet.engine("d0")
    for _ in range(40):
        for outcome in (Replied(400, b""), Replied(422, b"")):
            flow = Serving(fleet.deployment, None, Trace(), lambda: fleet.now, outcomes=fleet.outcomes).steps()
            assert isinstance(flow.send(None), Prefill)
            assert isinstance(flow.send(outcome), Decode)
            assert flow.send(Began()) is None
            with pytest.raises(StopIteration):
                flow.send(Ended(error=True))
        assert (prefill.health, decode.health) == (Health.UP, Health.UP)
        fleet.probe(0.5)
    assert fleet.told() == []


def test_one_decode_whose_transfers_fail_is_named_and_serves_what_needs_none() -> None:
    fleet = Fleet("p0", "d0", "d1")
    fleet.faults["d0"] = "transfer"
    legs = [fleet.ask() for _ in range(8)]
    assert all(answered and not trace.fallback for answered, trace, _ in legs), "the other decode engine takes it"
    assert fleet.left_out() == {"p0 d0"}
    assert all([s.engine.id for s in steps] == ["p0", "d1"] for _, _, steps in legs[-3:])
    assert fleet.told() == [("d0", "p0", "transfer-status-500")]
    assert fleet.engine("d0").health is Health.UP
    fleet.faults.clear()
    fleet.probe(5.0)
    assert fleet.left_out() == set()


def test_the_only_pair_falls_back_and_is_named_as_a_pair() -> None:
    fleet = Fleet("p0", "d0")
    fleet.pairs.add(("p0", "d0"))
    causes = []
    for _ in range(5):
        answered, trace, steps = fleet.ask()
        assert (answered, trace.fallback, trace.decode, trace.prefill) == (True, True, "d0", None)
        causes.append((trace.cause, len(steps)))
    assert causes == [("transfer-status-500", 3)] * ENOUGH + [("pairs-broken", 1)] * 3
    (fault,) = fleet.outcomes.faults(fleet.view.engines(), fleet.now)
    assert (fault.engine, fault.prefill, fault.prefill_attempt) == ("d0", "p0", 1)
    assert fault.reason == (
        "Decode engine d0 answered with status 500; it was to fetch KV from prefill engine p0 "
        "(side channel 10.0.0.1:5600)."
    )
    assert {e.health for e in fleet.view.engines()} == {Health.UP}


def test_a_prefill_engine_whose_kv_nobody_can_read_is_named_and_its_other_pairs_are_not_tried_first() -> None:
    fleet = Fleet("p0", "p1", "d0", "d1", "d2", "d3")
    fleet.faults["p0"] = "transfer"
    for _ in range(30):
        assert fleet.ask()[0]
    assert fleet.left_out() == {f"p0 d{n}" for n in range(4)}
    assert fleet.told() == [("p0", "", "transfer-status-500")]
    fleet.faults.clear()
    for _ in range(8):
        fleet.probe(60.0)
    assert fleet.left_out() == set()


def test_what_only_prefill_refuses_is_the_prefill_engines() -> None:
    fleet = Fleet("p0", "d0")
    fleet.faults["p0"] = "404"
    for _ in range(2 * ENOUGH):
        answered, trace, steps = fleet.ask()
        assert (answered, trace.fallback, trace.cause) == (True, True, "prefill-status-404")
    assert fleet.left_out() == set(), "these requests may be odd"
    fleet.probe()
    answered, trace, steps = fleet.ask()
    assert (answered, trace.fallback, trace.cause) == (True, True, "prefill-unavailable")
    assert len(steps) == 1, "nobody is sent there any more"
    assert fleet.told() == [("p0", "", "prefill-status-404")]


def test_a_decode_engine_that_computes_what_it_should_fetch_is_a_fallback_and_its_pair_out() -> None:
    fleet = Fleet("p0", "d0", "d1")
    fleet.faults["d0"] = "transfer-computes"
    seen = [fleet.ask()[1] for _ in range(8)]
    assert [t.cause for t in seen if t.fallback] == ["decode-computed"] * ENOUGH
    assert {t.decode for t in seen[-3:]} == {"d1"}
    assert fleet.told() == [("d0", "p0", "decode-computed")]


def test_policy_fail_says_who_and_where() -> None:
    policy = RoutingPolicy(disaggregate=Disaggregate.ALWAYS, on_prefill_failure=OnPrefillFailure.FAIL)
    fleet = Fleet("p0", "d0", policy=policy)
    fleet.pairs.add(("p0", "d0"))
    for _ in range(4):
        answered, _, steps = fleet.ask()
        assert not answered
        assert not any(isinstance(step, Decode) and step.params is None for step in steps)


def test_streams_that_break_off_count_though_they_have_begun() -> None:
    fleet = Fleet("a0", "a1")
    for whole, out in ((False, set()), (True, set()), (False, set()), (False, {"a0"}), (True, set())):
        fleet.engine("a1").failed(fleet.now, hangs=False)
        fleet.engine("a1").retry_at = fleet.now + 1.0
        flow = Serving(fleet.deployment, None, Trace(), lambda: fleet.now, outcomes=fleet.outcomes).steps()
        assert isinstance(flow.send(None), Decode)
        assert flow.send(Began()) is None
        with pytest.raises(StopIteration):
            flow.send(Ended(whole=whole))
        assert fleet.left_out() == out


@pytest.mark.parametrize(
    ("prompt", "cached", "created", "prefill_had", "block", "itself"),
    [
        (700, 0, None, None, None, True),  # the params do not say what prefill had: the zero is decode's own
        (700, 0, None, 0, None, False),  # vLLM 0.32 repeats prefill's zero
        (700, 0, None, 512, None, True),
        (700, 512, None, 512, None, False),
        (700, None, None, None, None, False),  # no details are told
        (100, 0, None, None, None, False),  # shorter than a block may be
        (100, 0, None, None, 16, True),
        (15, 0, None, None, 16, False),
        (700, 0, 688, 0, 16, True),  # it says what it computed
        (700, 0, 0, 0, 16, False),
        (700, 0, 16, 0, 16, False),  # a rest of it
        (None, 0, 0, None, 16, False),
    ],
)
def test_counts_show_whether_decode_computed_the_prompt_itself(
    prompt: int | None,
    cached: int | None,
    created: int | None,
    prefill_had: int | None,
    block: int | None,
    itself: bool,
) -> None:
    usage = Usage()
    usage.prompt, usage.cached, usage.created = prompt, cached, created
    assert computed_itself(usage, prefill_had, block) is itself


def test_a_silent_engine_is_probed_and_what_hangs_there_is_given_up_where_another_is_left() -> None:
    fleet = Fleet("a0", "a1")
    engine, since = fleet.engine("a0"), fleet.now
    fleet.faults["a0"] = "silent"

    def hung() -> bool:
        return fleet.outcomes.silent(engine, None, fleet.deployment, since, fleet.now)

    fleet.outcomes.look(fleet.view, fleet.now)
    assert not hung()
    assert fleet.outcomes.due(fleet.now) == []
    fleet.now += DOUBT_SECONDS
    for _ in range(HUNG_PROBES):
        assert not hung()
        fleet.probe(1.0)
    assert fleet.left_out() == {"a0"}
    assert hung()
    fleet.faults["a1"] = "refused"
    fleet.engine("a1").failed(fleet.now, hangs=False)
    assert not hung(), "where else should it go"
    fleet.outcomes.worked(engine)
    assert fleet.left_out() == set()


def test_an_engine_that_answers_others_is_not_called_silent() -> None:
    fleet = Fleet("a0")
    engine, since = fleet.engine("a0"), fleet.now
    for _ in range(20):
        fleet.now += 1.0
        engine.answered()
        fleet.outcomes.look(fleet.view, fleet.now)
        assert not fleet.outcomes.silent(engine, None, fleet.deployment, since, fleet.now)
    assert fleet.outcomes.troubles == {}


def test_one_engine_has_one_probe_at_a_time_and_a_pair_waits_for_its_engines() -> None:
    fleet = Fleet("p0", "d0")
    prefill, decode = fleet.engine("p0"), fleet.engine("d0")
    fleet.outcomes.doubt(Failure(decode, "silent", prefill), fleet.deployment, fleet.now)
    fleet.outcomes.doubt(Failure(decode, "silent"), fleet.deployment, fleet.now)
    pair, alone = fleet.outcomes.due(fleet.now)
    assert fleet.outcomes.begin(alone)
    assert not fleet.outcomes.begin(pair)
    fleet.outcomes.end(alone, fleet.now, Failure(decode, "silent"))
    assert fleet.outcomes.due(fleet.now) == [], "first the engine"
    assert fleet.told() == [("d0", "", "decode-silent")]


def test_what_is_gone_or_works_for_long_is_forgotten() -> None:
    fleet = Fleet("a0", "a1")
    fleet.faults["a0"] = "500"
    for _ in range(6):
        fleet.ask()
    fleet.names = ("a1",)
    fleet.publish()
    assert (fleet.outcomes.troubles, fleet.outcomes.left_out) == ({}, ())
    fleet.outcomes.doubt(Failure(fleet.engine("a1"), "silent"), fleet.deployment, fleet.now)
    fleet.probe()
    fleet.outcomes.look(fleet.view, fleet.now + FORGET_SECONDS + 10.0)
    assert fleet.outcomes.troubles == {}


def test_people_hear_of_it_once_in_a_while() -> None:
    fleet = Fleet("p0", "d0")
    fleet.pairs.add(("p0", "d0"))
    for _ in range(20):
        fleet.ask()
    (told,) = fleet.outcomes.news()
    assert told.endswith("(side channel 10.0.0.1:5600). It gets no more of such requests until it works again.")
    fleet.pairs.clear()
    fleet.probe(1.0)
    assert fleet.outcomes.news() == ["x: Decode engine d0 with KV of prefill engine p0 works again."]


ENGINE_FAULTS = st.sampled_from(
    ["500", "404", "reset", "silent", "refused", "transfer", "transfer-reset", "transfer-none", "transfer-computes"]
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("fault"), st.integers(0, 5), ENGINE_FAULTS),
        st.tuples(st.just("pair"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("heal"), st.integers(0, 5), st.none()),
        st.tuples(st.just("ask"), st.integers(1, 6), st.none()),
        st.tuples(st.just("probe"), st.sampled_from([0.0, 0.3, 2.0, 40.0]), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(
        [("p0", "d0"), ("p0", "d0", "d1"), ("p0", "p1", "d0"), ("p0", "p1", "d0", "d1"), ("a0", "a1"), ("a0",)]
    ),
    EVENTS,
)
def test_whatever_fails_the_healthy_serve_and_come_back_and_what_went_another_way_says_so(
    names: tuple[str, ...], events: list[tuple[str, Any, Any]]
) -> None:
    fleet = Fleet(*names)
    sound = set(names)
    """Engines that never had a fault of their own."""
    sound_pairs = {(p, d) for p in names for d in names if p[0] == "p" and d[0] == "d"}
    failed: set[tuple[str, str]] = set()
    """Pairs with a fault at some time."""
    healed = False
    since_change = 0
    """Requests that failed although somebody could have answered."""
    for what, one, two in events:
        name = names[one % len(names)] if what in ("fault", "pair", "heal") else ""
        if what == "fault":
            if (name[0] != "d" and two == "transfer-computes") or (name[0] != "p" and two == "transfer-none"):
                continue
            fleet.faults[name] = two
            sound.discard(name)
            sound_pairs = {pair for pair in sound_pairs if name not in pair}
        elif what == "pair":
            pair = name, names[two % len(names)]
            fleet.pairs.add(pair)
            sound_pairs.discard(pair)
            failed.add(pair)
        elif what == "heal":
            healed = True  # what was seen before may still be believed
            fleet.faults.pop(name, None)
            fleet.pairs = {pair for pair in fleet.pairs if name not in pair}
        elif what == "probe":
            fleet.probe(one)
        else:
            for _ in range(one):
                answered, trace, steps = fleet.ask()
                check_told(answered, trace, steps)
                if not answered and any(n[0] != "p" and fleet.answers_alone(n) for n in names):
                    since_change += 1
                fleet.probe(0.1)
        if what in ("fault", "pair"):
            since_change = 0
        assert since_change <= 2, "what fails is known by then, and goes another way"
        for engine in fleet.view.engines():
            if engine.id in sound:
                assert engine.health is Health.UP, "a healthy engine was taken out"
        assert not fleet.deployment.broken_pairs & sound_pairs, "a healthy pair was taken out"
        named = {f.engine for f in fleet.outcomes.faults(fleet.view.engines(), fleet.now) if not f.prefill}
        several = {
            name for name in names if sum(name in pair for pair in fleet.pairs) > 1
        }  # that is as if it were its own
        assert healed or not named & (sound - several)
    fleet.faults.clear()
    fleet.pairs.clear()
    for _ in range(6):
        fleet.probe(60.0)
        fleet.ask()
    assert (fleet.left_out(), fleet.told()) == (set(), [])
    answered, trace, _ = fleet.ask()
    assert (answered, trace.tried, trace.fallback) == (True, (), False)


def check_told(answered: bool, trace: Trace, steps: list[Any]) -> None:
    legs = [step for step in steps if not isinstance(step, Probe)]
    if not answered:
        return
    straight = 1 + isinstance(legs[0], Prefill)
    assert (len(legs) > straight) <= bool(trace.tried), "it took another way than planned and does not say so"
    if isinstance(legs[0], Prefill) and legs[-1].params is None:
        assert trace.fallback
        assert trace.cause
    assert trace.decode == legs[-1].engine.id
