"""KV that engines have free: what they tell of it, what requests take of it, and that none goes where it must wait for some."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, RoutingMode, RoutingPolicy, SnapshotEngine
from frontend_api.flow import Serving
from frontend_api.http.upstream import Upstreams
from frontend_api.kv.room import SELDOM_SECONDS, RoomReader, Told, read
from frontend_api.routing.choice import Choice, choose, explain_costs
from frontend_api.routing.costs import Need, costs_of, waits_of
from frontend_api.routing.loads import Loads, Table
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import ROOM_SECONDS, USUAL_ANSWER, Deployment, Engine, View, carrying
from frontend_api.steps import Began, Decode, Ended, Prefill
from frontend_api.trace import Trace
from tests.frontend_api.client import PROMPT, Client
from tests.frontend_api.conftest import MakeSite, until
from tests.frontend_api.scripted import after
from tests.frontend_api.test_flow import Clock, fleet, prefilled
from tests.frontend_api.test_loads import Process
from tests.frontend_api.test_routing import asked
from workers.sim.metrics import Metrics

# ---- what engines tell


def page(*lines: str) -> bytes:
    return "\n".join(["", "# HELP vllm:kv_cache_usage_perc KV-cache usage.", *lines, ""]).encode()


CONFIG = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0'
PAGES: dict[str, tuple[bytes, Told | None]] = {
    "one rank": (
        page('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25', CONFIG, "vllm:num_preemptions_total 3.0"),
        Told(0.25, 3, 16, 1_000),
    ),
    "the emptiest of two ranks": (
        page('vllm:kv_cache_usage_perc{engine="0"} 0.9', 'vllm:kv_cache_usage_perc{engine="1"} 0.4'),
        Told(0.4, 0, None, None),
    ),
    "a number that is none": (page("vllm:kv_cache_usage_perc NaN"), None),
    "a usage beyond all": (page("vllm:kv_cache_usage_perc 7"), None),
    "endless preemptions": (
        page("vllm:kv_cache_usage_perc 0", "vllm:num_preemptions_total +Inf"),
        Told(0, 0, None, None),
    ),
    "another metric that begins so": (page("vllm:kv_cache_usage_perc_max 0.5"), None),
    "nothing": (b"", None),
    "no text": (b"\n\xff\xfe\nvllm:kv_cache_usage_perc{", None),
}


@pytest.mark.parametrize(("text", "told"), PAGES.values(), ids=PAGES)
def test_what_a_page_says_of_kv(text: bytes, told: Told | None) -> None:
    assert read(text) == told


def test_the_stand_ins_page_is_read_as_an_engines() -> None:
    metrics = Metrics("m", 8_192, nixl=False, block_size=32, kv_blocks=50)
    metrics.kv_usage.set(0.5)
    metrics.preemptions.add(2)
    assert read(b"\n" + metrics.text()) == Told(0.5, 2, 32, 50)


@pytest.fixture
def reader() -> RoomReader:
    return RoomReader(View(), Loads(), Upstreams())


def test_an_engine_that_puts_requests_back_has_nothing_free(reader: RoomReader) -> None:
    (engine,) = fleet("a0").aggregated
    for preemptions, free in ((5, 8_000), (5, 8_000), (6, 0), (6, 8_000)):
        text = page("vllm:kv_cache_usage_perc 0.5", CONFIG, f"vllm:num_preemptions_total {preemptions}")
        reader.take(engine, text, 1.0)
        assert engine.known_room == free


def test_sizes_that_the_engine_does_not_tell_are_the_snapshots(reader: RoomReader) -> None:
    spec = SnapshotEngine(
        id="a", name="a", attempt=1, role=Role.AGGREGATED, url="http://a:1", block_size=128, kv_blocks=10
    )
    engine, unsized = Engine(spec), fleet("a1").aggregated[0]
    for each in (engine, unsized):
        reader.take(each, page("vllm:kv_cache_usage_perc 0.2"), 5.0)
    assert (engine.known_room, unsized.known_room) == (1_024, None)
    assert reader._due == {unsized: 5.0 + SELDOM_SECONDS}


# ---- what requests take


def test_a_request_takes_room_until_the_engine_tells_of_it_and_gives_it_back_when_it_ends() -> None:
    (engine,) = fleet("a0").aggregated
    engine.tells_room(1_000, 1.0)
    with carrying(engine, 0, 300) as first, carrying(engine, 0, 200) as second:
        assert engine.room == 500
        engine.tells_room(1_000, 2.0)  # the engine has begun neither
        assert engine.room == 500
        first.computed()
        assert engine.room == 500, "it is not in the figures yet"
        engine.tells_room(700, 3.0)
        assert engine.room == 500
        first.release()
        assert engine.room == 800
        second.computed()
    assert engine.room == 1_000
    engine.tells_room(1_000, 4.0)
    assert (engine.room, engine.kv, engine.kv_pending) == (1_000, 0, 0)


def test_what_was_told_long_ago_is_not_known_any_more() -> None:
    (engine,) = fleet("a0").aggregated
    assert engine.known_room is None
    engine.tells_room(10, 100.0)
    engine.rest(100.0 + ROOM_SECONDS)
    assert engine.known_room == 10
    engine.rest(100.1 + ROOM_SECONDS)
    assert engine.known_room is None
    assert waits_of((engine,), Need(1_000_000), None, answers=True) == ()
    engine.tells_room(10, 200.0)
    assert engine.known_room == 10


def test_a_flow_takes_room_where_its_legs_are_and_gives_all_of_it_back() -> None:
    deployment, clock = fleet("p0", "d0"), Clock()
    (prefill,), (decode,) = deployment.prefill, deployment.decode
    prefill.tells_room(50_000, 1.0)
    decode.tells_room(50_000, 1.0)
    flow = Serving(deployment, None, Trace(), clock, need=Need(1_000, 50)).steps()
    assert isinstance(next(flow), Prefill)
    assert (prefill.room, decode.room) == (49_000, 48_950)
    assert (prefill.kv_pending, decode.kv_pending) == (1_000, 1_050)
    assert isinstance(flow.send(prefilled(clock)), Decode)
    assert (prefill.kv_pending, decode.kv_pending) == (0, 1_050)
    flow.send(Began())
    assert (prefill.room, decode.room, decode.kv_pending) == (50_000, 48_950, 0)
    with pytest.raises(StopIteration):
        flow.send(Ended())
    assert (prefill.kv, decode.kv) == (0, 0)


async def test_how_long_answers_are_is_learned_and_what_a_request_asks_for_bounds_it(make_site: MakeSite) -> None:
    go_on = asyncio.Event()
    site = await make_site()
    scripted = await site.engine("a", Role.AGGREGATED, after(go_on))
    site.publish()
    deployment = site.view.deployments["m"]
    (engine,) = deployment.aggregated
    assert deployment.answer_tokens == USUAL_ANSWER
    for _ in range(100):
        engine.wrote(5_000)
    site.router.sweep(monotonic())
    usual = deployment.answer_tokens
    assert 4_500 < usual <= 5_000
    for limit, expected in ((None, usual), (10, 10), (100_000, usual)):
        async with Client(site.port) as client:
            heard = len(scripted.heard)
            client.post("/v1/chat/completions", {**PROMPT, **({"max_tokens": limit} if limit else {})})
            await until(lambda heard=heard: len(scripted.heard) > heard)
            assert engine.kv == len(scripted.heard[-1].raw) // 4 + expected
            go_on.set()
            assert (await client.reply()).status == 200
            go_on.clear()
        await site.settled()
        assert engine.kv == 0
    assert engine.answer < usual - 100, "the scripted engine wrote three tokens each time"


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(2)
    yield made
    made.close()


def test_processes_of_a_host_see_what_one_of_them_was_told_and_what_the_others_took(table: Table) -> None:
    one, two = Process(table, 0).take("a", "b"), Process(table, 1).take("c", "b", "a")
    one.loads.tell_room(one.engine("a"), 900, 10.0)
    two.loads.see_rooms(10.5)
    assert (two.engine("a").known_room, two.engine("b").known_room) == (900, None)
    with carrying(two.engine("a"), 0, 100), carrying(one.engine("a"), 0, 250) as mine:
        for process in (one, two):
            process.loads.look(11.0)
            assert process.engine("a").room == 550
        mine.computed()
        one.loads.tell_room(one.engine("a"), 650, 12.0)
        two.loads.see_rooms(12.5)
        assert (one.engine("a").room, two.engine("a").room) == (550, 550)
        one.take("b")  # while its request there runs on
        two.loads.see_rooms(13.0)
        one.loads.tell_room(one.engine("b"), 7, 13.0)
        two.loads.see_rooms(13.5)
        assert two.engine("b").known_room == 7
    two.engine("a").rest(12.0 + ROOM_SECONDS + 1)
    assert two.engine("a").known_room is None


def test_hosts_tell_each_other_what_their_requests_took() -> None:
    one, two = Process(None).take("a"), Process(None).take("a")
    two.engine("a").tells_room(1_000, 1.0)
    with carrying(one.engine("a"), 0, 400):
        two.loads.hear("one", one.loads.said(), 1.0)
        assert two.engine("a").room == 600
    two.loads.hear("one", {}, 1.1)
    assert two.engine("a").room == 1_000


# ---- where a request goes

FULL, EMPTY = 9_000, 96_000
"""KV tokens free of 100,000."""
NEED = Need(30_000, USUAL_ANSWER)
WEIGHING = {
    "least load": (RoutingPolicy(), False, None),
    "least load, a session": (RoutingPolicy(), False, b"s"),
    "kv": (RoutingPolicy(mode=RoutingMode.KV), True, None),
    "kv, a session": (RoutingPolicy(mode=RoutingMode.KV), True, b"s"),
    "kv, without tokens": (RoutingPolicy(mode=RoutingMode.KV), False, None),
    "approximate": (RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE), True, None),
    "temperature": (RoutingPolicy(mode=RoutingMode.KV, temperature=1.0), True, None),
    "round robin, a session": (RoutingPolicy(mode=RoutingMode.ROUND_ROBIN), False, b"s"),
}


def go(deployment: Deployment, known: bool, session: bytes | None, **overlap: int) -> Choice:
    prompt = asked(deployment, NEED.prompt, **overlap) if known else None
    return choose(deployment, now=0.0, prompt=prompt, session=session, need=NEED)


@pytest.mark.parametrize(("policy", "known", "session"), WEIGHING.values(), ids=WEIGHING)
@pytest.mark.parametrize("full", [0, 1])
def test_a_request_does_not_go_where_it_must_wait_while_another_engine_has_room(
    policy: RoutingPolicy, known: bool, session: bytes | None, full: int
) -> None:
    deployment = fleet("a0", "a1", policy=policy)
    engines = deployment.aggregated
    for at, engine in enumerate(engines):
        engine.tells_room(FULL if at == full else EMPTY, 1.0)
    with ExitStack() as running:
        for _ in range(20):  # the one with room carries far more
            running.enter_context(carrying(engines[1 - full]))
        assert {go(deployment, known, session).decode for _ in range(10)} == {engines[1 - full]}
        choice = go(deployment, known, session)
        assert choice.reason is Reason.ROOM_WINS
        costs = {c.engine: c for c in costs_of(explain_costs(deployment, choice, now=0.0, need=NEED))}
        assert costs[engines[full]].wait > 0 == costs[engines[1 - full]].wait
        for cost in costs.values():
            parts = cost.queue + cost.compute + cost.transfer + cost.stalls + cost.streams + cost.wait
            assert cost.total == pytest.approx(parts)


def test_kv_that_an_engine_has_of_the_prompt_already_needs_no_room() -> None:
    deployment = fleet("a0", "a1", policy=RoutingPolicy(mode=RoutingMode.KV))
    one, two = deployment.aggregated
    one.tells_room(FULL, 1.0)
    two.tells_room(EMPTY, 1.0)
    assert go(deployment, True, None, a0=24_000).decode is one
    assert go(deployment, True, None, a0=16_000).decode is two


def test_where_no_engine_has_room_the_rest_decides_and_so_it_does_where_nobody_knows() -> None:
    for rooms in ((FULL, FULL), (None, None)):
        deployment = fleet("a0", "a1")
        for engine, room in zip(deployment.aggregated, rooms, strict=True):
            if room is not None:
                engine.tells_room(room, 1.0)
        with carrying(deployment.aggregated[0]):
            choice = go(deployment, False, None)
        assert (choice.decode, choice.reason) == (deployment.aggregated[1], Reason.AGGREGATED)


def test_round_robin_and_random_do_not_look_at_room() -> None:
    for mode in (RoutingMode.ROUND_ROBIN, RoutingMode.RANDOM):
        deployment = fleet("a0", "a1", policy=RoutingPolicy(mode=mode))
        deployment.aggregated[0].tells_room(0, 1.0)
        deployment.aggregated[1].tells_room(EMPTY, 1.0)
        taken = set()
        for _ in range(40):
            choice = go(deployment, False, None)
            assert choice.decode is not None
            with carrying(choice.decode):
                taken.add(choice.decode.id)
        assert taken == {"a0", "a1"}


def test_a_burst_between_two_figures_does_not_fill_one_engine() -> None:
    deployment = fleet("a0", "a1")
    for engine, room in zip(deployment.aggregated, (150_000, 60_000), strict=True):
        engine.tells_room(room, 1.0)
    with ExitStack() as running:
        taken = []
        for _ in range(5):
            engine = go(deployment, False, None).decode
            assert engine is not None
            running.enter_context(carrying(engine, 0, NEED.at(engine, None, answers=True)))
            taken.append(engine.id)
    assert sorted(taken) == ["a0", "a0", "a0", "a0", "a1"]


NAMES = ("p0", "p1", "p2", "d0", "d1", "d2")
MODES = st.sampled_from([RoutingMode.LEAST_LOAD, RoutingMode.KV, RoutingMode.KV_APPROXIMATE])
ROOMS = st.dictionaries(st.sampled_from(NAMES), st.integers(-5_000, 60_000) | st.none())
LOADS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 30))
OVERLAPS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100).map(lambda blocks: 16 * blocks))
PAIRS = st.sets(st.tuples(st.sampled_from(NAMES[:3]), st.sampled_from(NAMES[3:])), max_size=8)


@given(
    mode=MODES,
    known=st.booleans(),
    session=st.sampled_from([None, b"s"]),
    temperature=st.sampled_from([0.0, 0.5]),
    always=st.booleans(),
    rooms=ROOMS,
    loads=LOADS,
    overlaps=OVERLAPS,
    broken=PAIRS,
    need=st.builds(Need, st.integers(1_600, 40_000), st.integers(1, 256)),
)
def test_what_fits_somewhere_never_goes_where_it_does_not_fit(
    mode: RoutingMode,
    known: bool,
    session: bytes | None,
    temperature: float,
    always: bool,
    rooms: Mapping[str, int | None],
    loads: Mapping[str, int],
    overlaps: Mapping[str, int],
    broken: set[tuple[str, str]],
    need: Need,
) -> None:
    disaggregate = Disaggregate.ALWAYS if always else Disaggregate.AUTO
    policy = RoutingPolicy(mode=mode, temperature=temperature, disaggregate=disaggregate)
    deployment = fleet(*NAMES, policy=policy, broken_pairs=tuple(broken))
    engines: dict[str, Engine] = {e.id: e for e in (*deployment.prefill, *deployment.decode)}
    for name, room in rooms.items():
        if room is not None:
            engines[name].tells_room(room, 1.0)
    known = known and mode is not RoutingMode.LEAST_LOAD
    prompt = asked(deployment, need.prompt, **{n: min(o, need.prompt) for n, o in overlaps.items()}) if known else None
    arguments: dict[str, Any] = {"now": 0.0, "prompt": prompt, "session": session, "need": need}
    with ExitStack() as running:
        for name, count in loads.items():
            for _ in range(count):
                running.enter_context(carrying(engines[name]))
        choice = choose(deployment, **arguments)
        for engine in engines.values():
            engine.tells_room(1 << 40, 1.0)
        roomy = choose(deployment, **arguments)

    def fits(name: str) -> bool:
        room = rooms.get(name)
        if room is None:
            return True
        tokens = need.at(engines[name], prompt, answers=name[0] == "d")
        return -(-tokens // 16) * 16 <= room

    ways = [(p, d) for p in NAMES[:3] for d in NAMES[3:] if (p, d) not in broken and fits(p) and fits(d)]
    local = [d for d in NAMES[3:] if fits(d)] if known and not always else []
    assert choice.decode is not None
    if choice.prefill is not None:
        assert (choice.prefill.id, choice.decode.id) not in broken
        assert (fits(choice.prefill.id) and fits(choice.decode.id)) or not (ways or local)
    elif not choice.fallback:
        assert fits(choice.decode.id) or not (ways or local)
    else:
        assert (len(broken) > 0 and fits(choice.decode.id)) or not any(map(fits, NAMES[3:]))
    if not temperature and all(map(fits, NAMES)):
        same = (choice.prefill, choice.decode, choice.reason)
        assert same == (roomy.prefill, roomy.decode, roomy.reason), "where all fit, room changes nothing"
