"""What the router knows of the engines' KV, per deployment, and how far that can be trusted. No IO.

The state is never flattered: it is drawn from what was heard and proved, engine by engine, not from what is configured.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain as joined
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from controlplane.fleet.wire import RoutingMode
from frontend_api.kvevents import Knowledge, Rank, Trouble
from frontend_api.kvindex import Holder, Index, Sent, chain
from frontend_api.view import Deployment, Engine, View

if TYPE_CHECKING:
    from frontend_api.openai import Endpoint

USUAL_BLOCK_SIZE = 16
"""Of an engine that says none."""
NO_TOKENIZER = "the router has no tokenizer for this model"
LOADING = "the tokenizer is being loaded"
CACHE_AWARE = (RoutingMode.KV, RoutingMode.KV_APPROXIMATE)


class Slow(Protocol):
    """Token ids that take too long for an event loop."""

    @property
    def ids(self) -> Callable[[], array[int] | None]:
        """Gives them, in any thread."""


class TokenSource(Protocol):
    """The token ids of requests, as the engine makes them."""

    @property
    def marks(self) -> Sequence[str]:
        """Some of the added tokens: what a check of the ids should hold."""

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int] | Slow | None:
        """Of a request's body; None: they cannot be known."""


class Tokenization(StrEnum):
    """What an engine's own tokeniser said of the router's token ids."""

    SAME = "same"
    MISMATCH = "tokenization_mismatch"
    UNVERIFIED = "tokenization_unverified"
    """It was asked in vain, and has never answered."""


class State(StrEnum):
    """How exact cache-aware routing is for one deployment now."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    DEGRADED = "degraded"
    BLIND = "blind"


class Standing(NamedTuple):
    state: State
    reasons: Mapping[str, str]
    """Why it is not EXACT: by engine id, `*` for the deployment."""


class Source(NamedTuple):
    """Where one engine publishes its events."""

    engine: str
    attempt: int
    events: str
    replay: str


class Prompt:
    """The tokens of one request, and how many of them each engine has already."""

    __slots__ = ("_cache", "_hashes", "overlap", "tokens")

    def __init__(self, cache: Cache, tokens: int, overlap: dict[Engine, int], hashes: dict[int, list[int]]) -> None:
        self.tokens = tokens
        self.overlap = overlap
        """Tokens from the first on that an engine holds; engines with none are left out."""
        self._cache = cache
        self._hashes = hashes

    def lacking(self, engine: Engine) -> int:
        """Tokens the engine has to compute. It always computes the last one."""
        return max(self.tokens - self.overlap.get(engine, 0), 1)

    def sent(self, engine: Engine, now: float) -> None:
        """The request is on its way to the engine. `now`: monotonic."""
        self._cache.sent_to(engine, self._hashes, now)

    def computed(self, engine: Engine, now: float) -> None:
        """The engine has computed what it lacked."""
        self._cache.computed_on(engine, self.lacking(engine), now)


class Cache:
    """The KV of one deployment's engines."""

    def __init__(self, deployment: Deployment) -> None:
        self.name = deployment.name
        self.index = Index()
        self.tokens: TokenSource | None = None
        self.folder = ""
        """Whose tokens these are to be; another one brings others."""
        self.no_tokens = NO_TOKENIZER
        """Why there are none."""
        self.ranks: dict[Engine, Rank] = {}
        self.mode = deployment.routing.mode
        self.tokenization: dict[Engine, Tokenization] = {}
        """Of the engines that were asked (`tokencheck`)."""
        self._engines: tuple[Engine, ...] = ()
        self._sent = Sent(self.index)
        self._left_counts: Counter[str] = Counter()
        """Of ranks that are gone."""
        self._holders: dict[Engine, Holder] = {}
        """What was sent to engines, in the mode without events."""

    def keep_up(self, deployment: Deployment, now: float) -> None:
        """Follow who is in the deployment. An engine that left takes its blocks with it."""
        if deployment.tokenizer != self.folder:
            self.folder = deployment.tokenizer
            self.tokens = None
            self.no_tokens = LOADING if self.folder else NO_TOKENIZER
            self.tokenization = {}
        engines = (*deployment.prefill, *deployment.decode, *deployment.aggregated)
        for engine in [e for e in self.ranks if e not in engines]:
            rank = self.ranks.pop(engine)
            self._left_counts += rank.counts()
            rank.close()
        for engine in [e for e in self._holders if e not in engines]:
            holder = self._holders.pop(engine)
            self._sent.forget(holder)
            self.index.drop_holder(holder)
        for engine in engines:
            if self.mode is RoutingMode.KV_APPROXIMATE:
                if engine not in self._holders:
                    self._holders[engine] = self.index.add_holder()
                    self.index.block_sizes.add(_block_size(engine))
            elif engine.spec.events and engine not in self.ranks:
                self.ranks[engine] = Rank(
                    self.index, block_size=engine.spec.block_size, replays=bool(engine.spec.replay), now=now
                )
        self._engines = engines
        self.tokenization = {engine: found for engine, found in self.tokenization.items() if engine in engines}

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self._engines

    def tick(self, now: float) -> None:
        for rank in self.ranks.values():
            rank.tick(now)
        self._sent.expire(now)
        self.index.sweep()

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()

    def prompt(self, tokens: array[int], salt: str | None) -> Prompt:
        """What the engines have of a prompt."""
        overlap: dict[Engine, int] = {}
        hashes: dict[int, list[int]] = {}
        index = self.index
        for size in tuple(index.block_sizes):
            own = hashes[size] = chain(tokens, size, salt=salt)
            found = index.match(own)
            if found:
                for engine, holder in self._all_holders():
                    blocks = found.get(holder.bit)
                    if blocks:
                        overlap[engine] = max(blocks * size, overlap.get(engine, 0))
        return Prompt(self, len(tokens), overlap, hashes)

    def sent_to(self, engine: Engine, hashes: Mapping[int, Sequence[int]], now: float) -> None:
        holder = self._holders.get(engine)
        if holder is not None:
            self._sent.record(holder, hashes.get(_block_size(engine), ()), now)

    def computed_on(self, engine: Engine, tokens: int, now: float) -> None:
        rank = self.ranks.get(engine)
        if rank is not None and tokens >= 2 * (rank.block_size or USUAL_BLOCK_SIZE):
            rank.computed(now)

    def counts(self) -> Counter[str]:
        """What events brought since the start, by kind."""
        counts = self._left_counts + self.index.counts
        for rank in self.ranks.values():
            counts += rank.counts()
        return counts

    def standing(self) -> Standing:
        """How far the evidence goes, and why no further."""
        if self.tokens is None:
            return Standing(State.BLIND, {"*": self.no_tokens})
        standing = self._standing_of_kv()
        found = self.tokenization.items()
        unequal = {engine.id: why.value for engine, why in found if why is Tokenization.MISMATCH}
        unknown = {engine.id: why.value for engine, why in found if why is Tokenization.UNVERIFIED}
        if not unequal and not unknown:
            return standing
        state = State.DEGRADED if unequal and standing.state is not State.BLIND else standing.state
        return Standing(state, {**unknown, **standing.reasons, **unequal})

    def _standing_of_kv(self) -> Standing:
        if self.mode is RoutingMode.KV_APPROXIMATE:
            return Standing(State.APPROXIMATE, {"*": "by choice: without events, from what was sent"})
        wrong: dict[str, str] = {}
        partial: dict[str, str] = {}
        evident = False
        claimed = [engine.spec.events for engine in self._engines if engine.spec.events]
        for engine in self._engines:
            rank = self.ranks.get(engine)
            if rank is None:
                wrong[engine.id] = "kv_events_disabled"
                continue
            evident = evident or rank.evident
            if claimed.count(engine.spec.events) > 1:
                wrong[engine.id] = Trouble.AMBIGUOUS.value
            elif rank.trouble:
                wrong[engine.id] = next(iter(rank.trouble)).value
            elif rank.knowledge is not Knowledge.COMPLETE:
                partial[engine.id] = rank.knowledge.value
        if not evident:
            return Standing(State.BLIND, {**wrong, **partial} or {"*": "no engine"})
        if wrong:
            return Standing(State.DEGRADED, {**wrong, **partial})
        return Standing(State.APPROXIMATE if partial else State.EXACT, partial)

    def _all_holders(self) -> Iterable[tuple[Engine, Holder]]:
        return joined(self._holders.items(), ((engine, rank.holder) for engine, rank in self.ranks.items()))


class Evidence:
    """The caches of all deployments that route by KV."""

    def __init__(self, view: View) -> None:
        self.caches: dict[str, Cache] = {}
        """By served name."""
        self._view = view
        self._seen: object = None

    def of(self, deployment: Deployment) -> Cache | None:
        """The cache of a deployment; None: it does not route by KV."""
        if self._seen is not self._view.deployments:
            self._keep_up()
        return self.caches.get(deployment.served_name)

    def tick(self, now: float) -> None:
        """Time limits and sweeping, several times a second. `now`: monotonic."""
        if self._seen is not self._view.deployments:
            self._keep_up()
        for cache in self.caches.values():
            cache.tick(now)

    def sources(self) -> dict[Source, Rank]:
        """The publishers to follow."""
        if self._seen is not self._view.deployments:
            self._keep_up()
        return {
            Source(engine.id, engine.spec.attempt, engine.spec.events, engine.spec.replay): rank
            for cache in self.caches.values()
            for engine, rank in cache.ranks.items()
        }

    def _keep_up(self) -> None:
        self._seen = deployments = self._view.deployments
        now = monotonic()
        for name, cache in list(self.caches.items()):
            deployment = deployments.get(name)
            if deployment is None or deployment.routing.mode is not cache.mode:
                self.caches.pop(name).close()
        for name, deployment in deployments.items():
            if deployment.routing.mode in CACHE_AWARE:
                if name not in self.caches:
                    self.caches[name] = Cache(deployment)
                self.caches[name].keep_up(deployment, now)


def _block_size(engine: Engine) -> int:
    return engine.spec.block_size or USUAL_BLOCK_SIZE
