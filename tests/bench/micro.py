"""The KV index, the choice and the tokeniser, each alone. Best of several tries."""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingMode, RoutingPolicy, SnapshotDeployment, SnapshotEngine
from frontend_api.formats.openai import ENDPOINTS
from frontend_api.kv.chains import Chains
from frontend_api.kv.evidence import Cache
from frontend_api.kv.index import Index, chain
from frontend_api.routing.choice import choose
from frontend_api.routing.view import Deployment, Engine
from frontend_api.tokens.tokenizer import Slow, Tokenizer
from tests.bench import events, model

BLOCK = 16
RUN = 32
"""Blocks of one event."""
ENGINES = 64
PROMPT_BLOCKS = 100


def best(work: Callable[[], object], *, tries: int, clock: Callable[[], float] = perf_counter) -> float:
    """Seconds of the fastest try."""
    found = float("inf")
    for _ in range(tries):
        began = clock()
        work()
        found = min(found, clock() - began)
    return found


def _fill(blocks: int, seed: int) -> float:
    """Blocks per CPU second that events bring into the index, from the bytes of their batches on."""
    draw = random.Random(seed)
    _, cache = _following(1)
    ((rank,),) = cache.ranks.values()
    batches = []
    for _ in range(blocks // RUN):
        tokens = [draw.randrange(150_000) for _ in range(RUN * BLOCK)]
        batches.append(events.batch([events.stored([draw.getrandbits(64) for _ in range(RUN)], None, tokens)]))
    began = process_time()
    for sequence, batch in enumerate(batches):
        rank.live(sequence, batch, 0.0)
    took = process_time() - began
    assert cache.index.entries == blocks // RUN * RUN
    return cache.index.entries / took


def _weight(blocks: int, engines: int) -> float:
    """Bytes per (engine, block) entry when `engines` hold the same blocks."""
    tracemalloc.start()
    index = Index()
    for number in range(engines):
        draw, hashes = random.Random(1), random.Random(number)
        holder = index.add_holder()
        for _ in range(blocks // RUN):
            tokens = [draw.randrange(150_000) for _ in range(RUN * BLOCK)]
            index.stored(holder, [hashes.getrandbits(64) for _ in range(RUN)], None, tokens, BLOCK)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / index.entries


def _following(engines: int) -> tuple[Deployment, Cache]:
    """A deployment of aggregated engines, and what is known of their KV: nothing yet."""
    specs = tuple(
        SnapshotEngine(
            id=f"a{n}", name=f"a{n}", attempt=1, role=Role.AGGREGATED, url=f"http://e:{n + 1}",
            events=f"tcp://e:{n + 1}", block_size=BLOCK,
        )
        for n in range(engines)
    )  # fmt: skip
    entry = SnapshotDeployment(name="m", served_name="m", routing=RoutingPolicy(mode=RoutingMode.KV), engines=specs)
    deployment = Deployment(entry, tuple(map(Engine, specs)))
    cache = Cache(deployment)
    cache.keep_up(deployment, 0.0)
    return deployment, cache


def _choice() -> dict[str, float]:
    """Microseconds of one choice among 64 aggregated engines that have 0 to 100 of the prompt's 100 blocks, and each another
    prompt on its way: its hashes, as of a prompt that was there before, what the index knows of them, and costs and choice; and
    all of it."""
    deployment, cache = _following(ENGINES)
    tokens = array("I", range(PROMPT_BLOCKS * BLOCK))
    for number, (rank,) in enumerate(cache.ranks.values()):
        have = number * PROMPT_BLOCKS // (ENGINES - 1)
        rank.live(0, events.batch([events.stored(list(range(have)), None, tokens[: have * BLOCK])]), 0.0)
    for engine in deployment.aggregated:
        cache.prompt(array("I", range(9_000, 9_000 + PROMPT_BLOCKS * BLOCK)), None).sent(engine, 0.0)
    assert len(cache.predicted.engines) == ENGINES
    chains, hashes = Chains(), chain(tokens, BLOCK)
    prompt = cache.prompt(tokens, None)
    assert len(prompt.overlap) == ENGINES - 1
    parts = {
        "hash": lambda: chains.of(tokens, BLOCK),
        "match": lambda: cache.index.match(hashes),
        "weigh": lambda: choose(deployment, now=0.0, prompt=prompt),
        "all": lambda: choose(deployment, now=0.0, prompt=cache.prompt(tokens, None)),
    }
    return {name: round(best(work, tries=500) * 1e6, 1) for name, work in parts.items()}


def _tokeniser(sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Microseconds from a body's bytes to its token ids: the same body again, all segments known, all new."""
    endpoint = ENDPOINTS["/v1/chat/completions"]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(model.write(Path(folder)))
        for size in sizes:
            number = model.numbers()
            known = model.body(size, model.Warmth.HOT, stream=False).whole(0)
            new = model.body(size, model.Warmth.COLD, stream=False)
            first = tokenizer.at_once(endpoint, known)
            if isinstance(first, Slow):
                first.ids()
            again = best(lambda known=known: tokenizer.at_once(endpoint, known), tries=200)
            warm = best(lambda known=known: tokenizer.token_ids(endpoint, known), tries=50)
            cold = best(lambda new=new, number=number: tokenizer.token_ids(endpoint, new.whole(next(number))), tries=10)
            times = {"again_us": again, "warm_us": warm, "cold_us": cold}
            found[f"{size / 1000:g} kB"] = {name: round(seconds * 1e6, 1) for name, seconds in times.items()}
    return found


def measured(*, brief: bool = False) -> dict[str, object]:
    """All of it. `brief`: fewer tries and cases."""
    sizes = ((20_000, 1),) if brief else ((40_000, 1), (44_000, 1), (40_000, 2), (20_000, 8))
    return {
        "blocks_per_second": round(max(_fill(64_000, seed) for seed in range(2 if brief else 5))),
        "bytes_per_entry": {f"{blocks} blocks on {n}": round(_weight(blocks, n), 1) for blocks, n in sizes},
        "choose_us_64_engines_100_blocks": _choice(),
        "tokenise": _tokeniser((1_200, 16_000) if brief else (1_200, 16_000, 128_000)),
    }
