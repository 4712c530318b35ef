"""Which engines serve a request. Pure: engines with their loads in, a choice and its reason out.

Where tokens are known, whatever can be done is weighed in seconds (`costs`): the prompts that wait at an engine, the tokens
of this one that it lacks and computes or fetches, the streams that run there and those that would stall. Load is part of
the sum, so a hot prefix moves on before its engine drowns. Reading the prompt elsewhere is one way to serve it; the cheapest
is taken. Without tokens a mode is an order over the engines of one pool, and what can be disaggregated is.

An engine that has not enough KV free for a request, as far as it told lately, would let it wait: whatever else speaks for it,
it is taken only where no other that could be has enough. Round robin and random do not look at that.

Ties go to the engine taken longest ago, so that a newcomer is not flooded. A session's requests stay together by a hash that
every router computes alike: in an order they go to the session's engine until that carries clearly more than the others; by
cost, where costs are as good as equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import exp, inf
from operator import attrgetter
from random import random

from xxhash import xxh3_64_intdigest

from controlplane.fleet.wire import Disaggregate, RoutingMode
from frontend_api.kv.evidence import CACHE_AWARE, Prompt
from frontend_api.routing.costs import Need, Part, Weighed, rows_of, waits_of
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Deployment, Engine, Health

Chance = Callable[[], float]
"""Gives 0 ≤ number < 1."""


class Choice:
    """Where a request goes."""

    __slots__ = ("decode", "fallback", "prefill", "reason", "weighed")

    def __init__(
        self,
        prefill: Engine | None,
        decode: Engine | None,
        reason: Reason,
        fallback: bool = False,
        weighed: tuple[Weighed, ...] = (),
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        """The engine that answers the client (decode or aggregated); None: nobody can."""
        self.reason = reason
        self.fallback = fallback
        """It should have been disaggregated and is not."""
        self.weighed = weighed
        """What was weighed where tokens are known, as it was then."""


NEAR = 1.05
NEAR_SECONDS = 0.001
"""Costs within these of the smallest are as good as equal: the session decides."""
SESSION_SLACK = 4
"""Requests that a session's engine may have more than half again as many as the least loaded one has."""

_IN_MODE = (Reason.AGGREGATED, Reason.NO_PREFILL_POOL)
"""Reasons to be alone that are nothing special: what decided between several engines tells more."""
_TELLING = (Reason.AFFINITY, Reason.SESSION_MOVED, Reason.ROOM_WINS)
"""What tells more than the mode."""
_FELL_BACK = (Reason.PREFILL_FAILED, Reason.TRANSFER_FAILED)
_REASONS = {
    RoutingMode.LEAST_LOAD: Reason.LEAST_LOAD,
    RoutingMode.ROUND_ROBIN: Reason.ROUND_ROBIN,
    RoutingMode.RANDOM: Reason.RANDOM,
    RoutingMode.KV: Reason.NO_TOKENS,
    RoutingMode.KV_APPROXIMATE: Reason.NO_TOKENS,
}

_by_turn = attrgetter("last_taken")


def _by_load(engine: Engine) -> tuple[int, int]:
    return engine.in_flight + engine.others, engine.last_taken


def usable(pool: Sequence[Engine], avoid: Collection[Engine], now: float) -> Sequence[Engine]:
    """The engines of a pool that may be tried, best kind only: healthy, else suspect, else overloaded, else failing, else down
    but not hanging."""
    up = Health.UP
    for engine in pool:
        if engine.health is not up or engine.spec.suspect or avoid:
            break
    else:
        return pool
    healthy = []
    suspect = []
    overloaded = []
    failing = []
    last = []
    for engine in pool:
        if engine in avoid:
            continue
        if engine.health is Health.DOWN:
            if engine.retry_at <= now:
                last.append(engine)
        elif engine.health is Health.HALF_OPEN and engine.in_flight:
            last.append(engine)
        elif engine.health is Health.OVERLOADED and engine.retry_at > now:
            overloaded.append(engine)
        elif engine.health is Health.FAILING:
            failing.append(engine)
        elif engine.spec.suspect:
            suspect.append(engine)
        else:
            healthy.append(engine)
    return healthy or suspect or overloaded or failing or last


class _Asked:
    """What decides between the engines of a pool, beside these."""

    __slots__ = ("chance", "mode", "need", "prompt", "session", "temperature")

    def __init__(
        self,
        mode: RoutingMode,
        temperature: float,
        prompt: Prompt | None,
        session: bytes | None,
        need: Need,
        chance: Chance,
    ) -> None:
        self.mode = mode
        self.temperature = temperature
        self.prompt = prompt
        self.session = session
        self.need = need
        self.chance = chance


_NEEDS_NOTHING = Need()


def choose(
    deployment: Deployment,
    *,
    now: float,
    alone: Reason | None = None,
    avoid: Collection[Engine] = (),
    prefill: Engine | None = None,
    prompt: Prompt | None = None,
    session: bytes | None = None,
    need: Need = _NEEDS_NOTHING,
    chance: Chance = random,
) -> Choice:
    """Where a request goes. `alone`: why it must not be disaggregated. `prefill`: the engine that holds its KV already.
    `session`: what it has in common with others that are to go the same way. `need`: of KV."""
    policy = deployment.routing
    asked = _Asked(policy.mode, policy.temperature, prompt, session, need, chance)
    limit = policy.max_in_flight
    choice = _choose(deployment, asked, now, alone, avoid, prefill, limit)
    if limit is None or (choice.decode is not None and not choice.fallback):
        return choice
    wanted = _choose(deployment, asked, now, alone, avoid, prefill, None)
    if wanted.decode is None or (wanted.fallback and choice.decode is not None):
        return choice
    if wanted.prefill is None and wanted.decode.load < limit:
        return wanted  # prefill engines are full and not needed
    return Choice(None, None, Reason.ENGINES_FULL)


def _with_room(pool: Sequence[Engine], limit: int | None) -> Sequence[Engine]:
    return pool if limit is None else [engine for engine in pool if engine.in_flight + engine.others < limit]


def _choose(
    deployment: Deployment,
    asked: _Asked,
    now: float,
    alone: Reason | None,
    avoid: Collection[Engine],
    prefill: Engine | None,
    limit: int | None,
) -> Choice:
    """Among the engines with fewer than `limit` requests."""
    answering = _with_room(usable(deployment.answering, avoid, now), limit)
    if alone is Reason.RELAYED and not answering:
        answering = _with_room(usable(deployment.prefill, avoid, now), limit)
    if not answering:
        return Choice(None, None, Reason.NO_ENGINE)
    if alone is None and not deployment.decode:
        alone = Reason.AGGREGATED
    if alone is None and not deployment.wants_prefill and not deployment.prefill:
        alone = Reason.NO_PREFILL_POOL
    if alone is not None:
        return _alone(answering, asked, alone, fallback=alone in _FELL_BACK)
    prompt, below = asked.prompt, deployment.routing.local_below_tokens
    if below and prompt is not None and prefill is None:  # such a prompt needs no prefill engine, and misses none
        local = _alone(answering, asked, Reason.LOCAL_BELOW_THRESHOLD)
        if local.decode is not None and prompt.lacking(local.decode) < below:
            return local
    prefills = (prefill,) if prefill is not None else _with_room(usable(deployment.prefill, avoid, now), limit)
    if not prefills or (prefill is None and prefills[0].health is Health.FAILING and deployment.falls_back):
        return _alone(answering, asked, Reason.PREFILL_UNAVAILABLE, fallback=True)
    if prompt is None:
        choice = _pair_by_order(prefills, answering, asked, deployment.broken_pairs)
    else:
        choice = _pair_by_cost(deployment, prefills, answering, asked, prompt, held=prefill is not None)
    return choice or _alone(answering, asked, Reason.PAIRS_BROKEN, fallback=True)


def explain_costs(
    deployment: Deployment,
    choice: Choice,
    *,
    now: float,
    avoid: Collection[Engine] = (),
    need: Need = _NEEDS_NOTHING,
) -> tuple[Weighed, ...]:
    """What a choice just made would have been weighed by: its own columns, or those of load where tokens are not known."""
    if choice.weighed or choice.decode is None:
        return choice.weighed
    answering = usable(deployment.answering, avoid, now)
    if choice.prefill is None:
        return (_weighed(answering, Part.ALONE, None, need),)
    prefills = usable(deployment.prefill, avoid, now)
    return _weighed(prefills, Part.PREFILL, None, need), _weighed(answering, Part.DECODE, None, need)


def _weighed(engines: Sequence[Engine], part: Part, prompt: Prompt | None, need: Need) -> Weighed:
    waits = waits_of(engines, need, prompt, answers=part is not Part.PREFILL)
    return Weighed(engines, part, rows_of(engines, prompt), prompt, waits)


def _alone(answering: Sequence[Engine], asked: _Asked, reason: Reason, *, fallback: bool = False) -> Choice:
    """One engine reads and answers."""
    if asked.prompt is None:
        taken, why = _first(answering, asked, answers=True)
        tells = reason in _IN_MODE and (asked.mode in CACHE_AWARE or why in _TELLING)
        return Choice(None, taken, why if tells else reason, fallback)
    local = _weighed(answering, Part.ALONE, asked.prompt, asked.need)
    at, special = _pick(local, asked)
    if reason in _IN_MODE:
        reason = special or _why(local, at, asked.prompt)
    return Choice(None, answering[at], reason, fallback, (local,))


# ---- where tokens are not known


def _pair_by_order(
    prefills: Sequence[Engine], answering: Sequence[Engine], asked: _Asked, broken: Collection[tuple[str, str]]
) -> Choice | None:
    tight = None
    while prefills:
        first, reason = _first(prefills, asked, answers=False)
        partners = [e for e in answering if (first.id, e.id) not in broken] if broken else answering
        if partners:
            second, other = _first(partners, asked, answers=True)
            choice = Choice(first, second, _telling(reason, other))
            if not broken or not waits_of((second,), asked.need, None, answers=True):
                return choice
            tight = tight or choice  # another prefill engine may have partners with room
        prefills = [engine for engine in prefills if engine is not first]
    return tight


def _first(pool: Sequence[Engine], asked: _Asked, *, answers: bool) -> tuple[Engine, Reason]:
    mode = asked.mode
    if len(pool) == 1:
        return pool[0], _REASONS[mode]
    if asked.session is not None or mode not in (RoutingMode.ROUND_ROBIN, RoutingMode.RANDOM):
        waits = waits_of(pool, asked.need, None, answers=answers)
        if waits and not all(waits):
            roomy = [engine for engine, wait in zip(pool, waits, strict=True) if not wait]
            engine, reason = _in_order(roomy, asked)
            return engine, reason if engine is _in_order(pool, asked)[0] else Reason.ROOM_WINS
    return _in_order(pool, asked)


def _in_order(pool: Sequence[Engine], asked: _Asked) -> tuple[Engine, Reason]:
    if asked.session is not None and len(pool) > 1:
        return _of_session(pool, asked.session)
    mode = asked.mode
    if mode is RoutingMode.ROUND_ROBIN:
        engine = min(pool, key=_by_turn)
    elif mode is RoutingMode.RANDOM:
        engine = pool[int(asked.chance() * len(pool))]
    else:
        engine = min(pool, key=_by_load)
    return engine, _REASONS[mode]


def _of_session(pool: Sequence[Engine], session: bytes) -> tuple[Engine, Reason]:
    """The engine with the highest hash of the session, of those that do not carry too much: an engine that leaves moves its
    own sessions and no other's."""
    loads = [engine.in_flight + engine.others for engine in pool]
    least = min(loads)
    most = least + least // 2 + SESSION_SLACK
    home = _home(pool, session)
    if home.in_flight + home.others <= most:
        return home, Reason.AFFINITY
    spare = [engine for engine, load in zip(pool, loads, strict=True) if load <= most]
    return _home(spare, session), Reason.SESSION_MOVED


def _home(pool: Sequence[Engine], session: bytes) -> Engine:
    return max(pool, key=lambda engine: xxh3_64_intdigest(session, engine.seed))


def _telling(first: Reason, second: Reason) -> Reason:
    """The reason of a pair: prefill's, unless only decode's tells more than the mode."""
    return second if second in _TELLING and first not in _TELLING else first


# ---- where tokens are known


def _pair_by_cost(
    deployment: Deployment,
    prefills: Sequence[Engine],
    answering: Sequence[Engine],
    asked: _Asked,
    prompt: Prompt,
    *,
    held: bool,
) -> Choice | None:
    """The cheapest way to serve a prompt. `held`: the prefill engine has computed it; only the answer is to be placed."""
    policy = deployment.routing
    rows = rows_of(answering, prompt)
    waits = waits_of(answering, asked.need, prompt, answers=True)
    read = _weighed(prefills, Part.PREFILL, prompt, asked.need)
    fetch = Weighed(answering, Part.DECODE, rows, prompt, waits)
    broken = deployment.broken_pairs
    pair = _cheapest_pair(read, fetch, broken) if broken else None
    if broken and pair is None:
        return None
    weighed: tuple[Weighed, ...] = (read, fetch)
    if not held and policy.disaggregate is Disaggregate.AUTO:
        local = Weighed(answering, Part.LOCAL, rows, prompt, waits)
        weighed = (read, fetch, local)
        remote = read.totals[pair[0]] + fetch.totals[pair[1]] if pair else min(read.totals) + min(fetch.totals)
        if min(local.totals) < remote:
            at, _ = _pick(local, asked)
            return Choice(None, answering[at], Reason.LOCAL_CHEAPER, False, weighed)
    (one, first), (two, second) = _pick(read, asked), _pick(fetch, asked)
    if pair and (prefills[one].id, answering[two].id) in broken:
        (one, two), first, second = pair, None, None
    reason = first or (second if second in _TELLING else None) or _why(read, one, prompt)
    return Choice(prefills[one], answering[two], reason, False, weighed)


def _pick(weighed: Weighed, asked: _Asked) -> tuple[int, Reason | None]:
    """A position in the pool, and why that if it is not simply the cheapest."""
    totals, engines, waits = weighed.totals, weighed.engines, weighed.waits
    if len(totals) == 1:
        return 0, None
    if not waits:
        return _cheapest(totals, engines, asked)
    roomy = [at for at, wait in enumerate(waits) if not wait]
    if not roomy:
        return _cheapest([bare + wait for bare, wait in zip(weighed.bare, waits, strict=True)], engines, asked)
    at, special = _cheapest([totals[at] for at in roomy], [engines[at] for at in roomy], asked)
    wanted = weighed.bare.index(min(weighed.bare))
    return roomy[at], Reason.ROOM_WINS if waits[wanted] else special


def _cheapest(totals: Sequence[float], engines: Sequence[Engine], asked: _Asked) -> tuple[int, Reason | None]:
    least = min(totals)
    if asked.session is not None:
        limit = least * NEAR + NEAR_SECONDS
        near = [engine for engine, total in zip(engines, totals, strict=True) if total <= limit]
        if len(near) > 1:
            return engines.index(_home(near, asked.session)), Reason.AFFINITY
    if asked.temperature:
        at = _drawn(totals, least, asked)
        return at, Reason.TEMPERATURE if totals[at] > least else None
    if totals.count(least) == 1:
        return totals.index(least), None
    return min((at for at, total in enumerate(totals) if total == least), key=lambda at: engines[at].last_taken), None


def _why(weighed: Weighed, at: int, prompt: Prompt) -> Reason:
    """What the KV has to do with it."""
    if prompt.below_block:
        return Reason.BELOW_ONE_BLOCK
    overlap = weighed.overlap
    if not overlap:
        return Reason.NO_OVERLAP
    has = overlap.get(weighed.engines[at], 0)
    for engine in weighed.engines:
        if overlap.get(engine, 0) > has:
            return Reason.LOAD_WINS
    return Reason.OVERLAP if has else Reason.NO_OVERLAP


def _drawn(totals: Sequence[float], least: float, asked: _Asked) -> int:
    """Softmax over the costs scaled to 0…1, the cheapest the likeliest."""
    span = max(totals) - least or 1.0
    weights = [exp((least - total) / span / asked.temperature) for total in totals]
    left = asked.chance() * sum(weights)
    for at, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return at
    return totals.index(least)


def _cheapest_pair(read: Weighed, fetch: Weighed, broken: Collection[tuple[str, str]]) -> tuple[int, int] | None:
    """The positions of the cheapest pair whose transfer works."""
    best, found = inf, None
    seconds = fetch.sorted()
    for one in read.sorted():
        cost = read.totals[one]
        if cost + fetch.totals[seconds[0]] >= best:
            break
        for two in seconds:
            if (read.engines[one].id, fetch.engines[two].id) not in broken:
                if cost + fetch.totals[two] < best:
                    best, found = cost + fetch.totals[two], (one, two)
                break
    return found
