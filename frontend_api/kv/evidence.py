"""What the router knows of the engines' KV, per deployment, and how far that can be trusted. No IO.

The state is never flattered: it is drawn from what was heard and proved, engine by engine, not from what is configured.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import chain as joined
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from controlplane.fleet.wire import RoutingMode
from frontend_api.kv.chains import Chains
from frontend_api.kv.contents import Contents
from frontend_api.kv.debt import Debt, owed
from frontend_api.kv.index import LIMIT, Holder, Index, Sent
from frontend_api.kv.knowledge import Knowledge, Trouble
from frontend_api.kv.predict import Predicted
from frontend_api.kv.sequence import Rank
from frontend_api.routing.view import Deployment, Engine, View

if TYPE_CHECKING:
    from frontend_api.formats.openai import Endpoint

USUAL_BLOCK_SIZE = 16
"""Of an engine that says none."""
MOST_BLOCK_SIZES = 4
"""Of one deployment, those that most engines have."""
LARGE_BLOCK_SIZE = 128
"""Of such a one, if it is large: what vLLM takes on a CPU."""
NO_TOKENIZER = "the router has no tokenizer for this model"
LOADING = "the tokenizer is being loaded"
CACHE_AWARE = (RoutingMode.KV, RoutingMode.KV_APPROXIMATE)
HALF_SECONDS = 60.0
"""After which what prompts were like counts half."""
RANKS = "kv_rank_unknown"
"""The engine itself chooses which of its data-parallel ranks takes a request."""


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


MISCOUNT = "prompt_tokens_mismatch"
"""An engine counted other prompt tokens in a request than the router: `/tokenize` does not show all that changes a prompt."""
MISCOUNT_SECONDS = 600.0
"""For which that is held against it."""


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
    """Where one rank of an engine publishes its events."""

    deployment: str
    engine: str
    attempt: int
    url: str
    rank: int
    events: str
    replay: str


def source(deployment: str, engine: Engine, rank: int) -> Source:
    """vLLM's data-parallel ranks publish on the engine's ports plus their number (`offset_endpoint_port`)."""
    spec = engine.spec
    events, replay = _offset(spec.events, rank), _offset(spec.replay, rank)
    return Source(deployment, spec.id, spec.attempt, spec.url, rank, events, replay)


def _offset(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank and port.isdecimal() else address


class Prompt:
    """The tokens of one request, and how many of them each engine has already."""

    __slots__ = ("_cache", "_evident", "_hashes", "_tokenizer", "below_block", "overlap", "tokens")

    def __init__(
        self,
        cache: Cache,
        tokens: int,
        overlap: dict[Engine, int],
        hashes: dict[int, list[int]],
        evident: Mapping[Engine, int] | None = None,
        below_block: int = 0,
    ) -> None:
        self.tokens = tokens
        self.below_block = below_block
        """Tokens of a KV block, if the prompt is no longer than one, so that nothing of it can be cached; else 0."""
        self.overlap = overlap
        """Tokens from the first on that an engine holds; engines with none are left out."""
        self._cache = cache
        self._tokenizer = cache.tokenizer
        self._hashes = hashes
        self._evident = overlap if evident is None else evident
        """The same without what is only on its way."""

    def lacking(self, engine: Engine) -> int:
        """Tokens the engine has to compute. It always computes the last one."""
        return max(self.tokens - self.overlap.get(engine, 0), 1)

    @property
    def current(self) -> bool:
        """Its tokens are of the tokenizer that the deployment has now. Others say nothing about its engines any more."""
        return self._tokenizer == self._cache.tokenizer

    def sent(self, engine: Engine, now: float) -> None:
        """The request is on its way to the engine. `now`: monotonic."""
        if self.current:
            self._cache.sent_to(engine, self._hashes, self._evident.get(engine, 0), now)

    def computed(self, engine: Engine, now: float) -> None:
        """The engine has computed what it lacked."""
        if self.current:
            self._cache.computed_on(engine, self._hashes, self._evident.get(engine, 0), self.tokens, now)

    def failed(self, engine: Engine) -> None:
        """The engine will not compute it."""
        self._cache.failed_on(engine, self._hashes)


class Cache:
    """The KV of one deployment's engines."""

    def __init__(self, deployment: Deployment, limit: int = LIMIT) -> None:
        """`limit`: of its index."""
        self.name = deployment.name
        self.index = Index(limit)
        self._chains = Chains()
        self.tokens: TokenSource | None = None
        self.folder = ""
        self.tokenizer_key = ""
        """Where the files of the tokenizer are: in this folder, and in Redis."""
        self.tokenizer = ""
        """Whose tokens these are to be: the files' digest, else their folder. Another one brings others."""
        self.awaits_tokens = False
        """They are being loaded, or can still come."""
        self.no_tokens = NO_TOKENIZER
        """Why there are none."""
        self.ranks: dict[Engine, tuple[Rank, ...]] = {}
        """Of the engines that publish events."""
        self._debts: dict[Engine, Debt] = {}
        """The same engines'."""
        self._mute: dict[Engine, int] = {}
        """Engines that have told of no block yet: the most tokens of one prompt that each has computed."""
        self.predicted = Predicted()
        self._restarts: dict[Engine, int] = {}
        """Of the engines that something was predicted of, as they were then."""
        self.mode = deployment.routing.mode
        self.tokenization: dict[Engine, Tokenization] = {}
        """Of the engines that were asked (`tokens.check`)."""
        self._miscounts: dict[str, float] = {}
        """By engine id, when it last was so; monotonic."""
        self._engines: tuple[Engine, ...] = ()
        self._sent = Sent(self.index)
        self._left_counts: Counter[str] = Counter()
        """Of ranks that are gone."""
        self._holders: dict[Engine, Holder] = {}
        """What was sent to engines, in the mode without events."""
        self._holding: tuple[tuple[Engine, Holder], ...] = ()
        """Whose blocks the index has."""
        self.prompts = self.short_prompts = self.short_block = 0
        """Lately: prompts, those of them that were no longer than one KV block, and its tokens."""
        self._halved_at = 0.0
        self._several = False
        """Some engine has several holders: its data-parallel ranks."""

    def keep_up(self, deployment: Deployment, now: float) -> None:
        """Follow who is in the deployment. An engine that left takes its blocks with it."""
        self.folder, self.tokenizer_key = deployment.tokenizer, deployment.tokenizer_key
        tokenizer = self.tokenizer_key.rpartition(":")[2] or self.folder
        if tokenizer != self.tokenizer:
            self.tokenizer = tokenizer
            self.tokens = None
            self.awaits_tokens = bool(tokenizer)
            self.no_tokens = LOADING if tokenizer else NO_TOKENIZER
            self.tokenization = {}
            self._miscounts = {}
            for debt in self._debts.values():
                debt.forgive()  # events cannot tell of what was made of other tokens
        engines = (*deployment.prefill, *deployment.decode, *deployment.aggregated)
        for engine, ranks in list(self.ranks.items()):
            spec, said = engine.spec, ranks[0].contents.said_size
            if (
                engine not in engines
                or not spec.events
                or len(ranks) != spec.ranks
                or said not in (None, spec.block_size)
            ):
                self._leave(engine)
        for engine in [e for e in self._holders if e not in engines]:
            holder = self._holders.pop(engine)
            self._sent.forget(holder)
            self.index.drop_holder(holder)
        for engine in engines:
            if self.mode is RoutingMode.KV_APPROXIMATE:
                if engine not in self._holders:
                    self._holders[engine] = self.index.add_holder()
            elif engine.spec.events:
                if engine not in self.ranks:
                    self.ranks[engine] = self._follow(engine, now)
                for rank in self.ranks[engine]:
                    rank.contents.capacity = engine.spec.kv_blocks
        self._engines = engines
        self._list_holders()
        self._list_sizes()
        self.tokenization = {engine: found for engine, found in self.tokenization.items() if engine in engines}
        ids = {engine.id for engine in engines}
        self._miscounts = {engine: at for engine, at in self._miscounts.items() if engine in ids}

    def _list_holders(self) -> None:
        ranks = ((engine, rank.contents.holder) for engine, ranks in self.ranks.items() for rank in ranks)
        self._holding = tuple(self._holders.items() or ranks)
        self._several = len(self._holding) > len(self.ranks) + len(self._holders)

    def _list_sizes(self) -> None:
        """The block sizes that prompts are hashed by: each costs every request, so engines that claim odd ones get no more than
        their part."""
        sizes: Counter[int] = Counter(_block_size(engine) for engine in self._holders)
        for engine, ranks in self.ranks.items():
            said = {engine.spec.block_size, *(rank.contents.block_size for rank in ranks)}
            sizes.update(size for size in said if size)
        self.index.block_sizes = {size for size, _ in sizes.most_common(MOST_BLOCK_SIZES)}

    def _follow(self, engine: Engine, now: float) -> tuple[Rank, ...]:
        spec = engine.spec
        debt = self._debts[engine] = Debt()
        return tuple(
            Rank(Contents(self.index, block_size=spec.block_size, debt=debt), replays=bool(spec.replay), now=now)
            for _ in range(spec.ranks)
        )

    def _leave(self, engine: Engine) -> None:
        self.predicted.forget(engine)
        self._restarts.pop(engine, None)
        del self._debts[engine]
        for rank in self.ranks.pop(engine):
            self._left_counts += rank.counts()
            rank.contents.close()
        self._list_holders()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self._engines

    def tick(self, now: float) -> None:
        self._look_for_mute(now)
        for rank in joined.from_iterable(self.ranks.values()):
            rank.tick(now)
        self._sent.expire(now)
        if now - self._halved_at > HALF_SECONDS:
            self._halved_at = now
            self.prompts //= 2
            self.short_prompts //= 2
        self._list_sizes()
        self.predicted.tick(now)
        self.index.sweep()
        if self._miscounts:
            since = now - MISCOUNT_SECONDS
            self._miscounts = {engine: at for engine, at in self._miscounts.items() if at > since}

    def close(self) -> None:
        for engine in list(self.ranks):
            self._leave(engine)

    def prompt(self, tokens: array[int], salt: str | None) -> Prompt:
        """What the engines have of a prompt."""
        overlap: dict[Engine, int] = {}
        hashes: dict[int, list[int]] = {}
        index = self.index
        for size in tuple(index.block_sizes):
            own = hashes[size] = self._chains.of(tokens, size, salt)
            if found := index.match(own):
                if overlap or self._several:
                    for engine, holder in self._holding:
                        tokens_held = found.get(holder.bit, 0) * size
                        if tokens_held > overlap.get(engine, 0):
                            overlap[engine] = tokens_held
                else:  # the same, faster
                    overlap = {
                        engine: blocks * size for engine, holder in self._holding if (blocks := found.get(holder.bit))
                    }
        evident = overlap
        for size, own in hashes.items():
            for engine, blocks in self.predicted.ahead(own, size, evident):
                if self._may_predict(engine):
                    if overlap is evident:
                        overlap = evident.copy()
                    overlap[engine] = blocks * size
        below = min(hashes, default=0)
        if len(tokens) > below:
            below = 0
        self.prompts += 1
        if below:
            self.short_prompts += 1
            self.short_block = below
        return Prompt(self, len(tokens), overlap, hashes, evident, below)

    def sent_to(self, engine: Engine, hashes: Mapping[int, Sequence[int]], evident: int, now: float) -> None:
        """`evident`: tokens that it has already, as events tell."""
        holder = self._holders.get(engine)
        if holder is not None:
            self._sent.record(holder, hashes.get(_block_size(engine), ()), now)
            return
        size = self._size_of(engine)
        lacking = hashes.get(size, ())[evident // size :]
        if lacking and self._may_predict(engine):
            self.predicted.sent(engine, lacking, now)
        block = owed(lacking)
        if block is not None and engine in self.ranks and self._must_tell(engine, block):
            self._debts[engine].sent(block, now)

    def _must_tell(self, engine: Engine, own: int) -> bool:
        """Whether something follows from events that do not tell of a block which the engine computes.

        Of one that is known in part only that it may have had it: with several ranks, nobody knows which. Of one with other cache
        groups nothing, nor where its block size is only supposed.
        """
        ranks = self.ranks[engine]
        if any(rank.contents.block_size is None or rank.contents.holder.skipped_groups for rank in ranks):
            return False
        known = {rank.knowledge for rank in ranks}
        whole = known == {Knowledge.COMPLETE} or (known == {Knowledge.PARTIAL} and len(ranks) == 1)
        return whole and not any(self.index.has(rank.contents.holder, own) for rank in ranks)

    def _may_predict(self, engine: Engine) -> bool:
        """Its events can prove a prediction, and it is the process that was predicted of: else that is forgotten."""
        ranks = self.ranks.get(engine)
        if ranks is None:
            return False
        restarts = sum(rank.restarts for rank in ranks)
        before, self._restarts[engine] = self._restarts.get(engine, restarts), restarts
        if before == restarts and any(rank.evident for rank in ranks):
            return True
        self.predicted.forget(engine)
        return False

    def computed_on(
        self, engine: Engine, hashes: Mapping[int, Sequence[int]], evident: int, tokens: int, now: float
    ) -> None:
        ranks = self.ranks.get(engine)
        if ranks is not None:
            if self._mute and engine.spec.replay:  # which would have been answered, had it the prompt or not
                self.counted(engine.id, tokens)
            size = self._size_of(engine)
            lacked = hashes.get(size, ())[evident // size :]
            told = self.index.match(lacked[-1:])  # events may be faster than the answer
            if any(rank.contents.holder.bit in told for rank in ranks):
                self.predicted.failed(engine, lacked)  # from now on they alone say how long it is there
                return
            self.predicted.computed(engine, lacked, now)
            block = owed(lacked)
            if block is not None:
                self._debts[engine].computed(block, now)

    def counted(self, engine: str, tokens: int) -> None:
        """An engine, by id, has computed so many tokens of one prompt."""
        for mute, most in self._mute.items():
            if mute.id == engine and tokens > most:
                self._mute[mute] = tokens

    def _look_for_mute(self, now: float) -> None:
        before = self._mute
        self._mute = {
            engine: before.get(engine, 0) for engine, ranks in self.ranks.items() if all(map(_is_mute, ranks))
        }
        for engine, tokens in self._mute.items():
            size = engine.spec.block_size or max(self.index.block_sizes, default=LARGE_BLOCK_SIZE)
            if tokens >= 2 * size:  # there was a block that it must tell of
                self._debts[engine].mute(now)

    def failed_on(self, engine: Engine, hashes: Mapping[int, Sequence[int]]) -> None:
        blocks = hashes.get(self._size_of(engine), ())
        self.predicted.failed(engine, blocks)
        block = owed(blocks)
        if block is not None and engine in self._debts:
            self._debts[engine].dropped(block)

    def _size_of(self, engine: Engine) -> int:
        """Tokens in a block of an engine, as its events or else its control plane say."""
        ranks = self.ranks.get(engine)
        return (ranks[0].contents.block_size if ranks else None) or _block_size(engine)

    def miscounted(self, engine: str, now: float) -> bool:
        """An engine, by id, counted other prompt tokens than the router had. False: that is known already. `now`: monotonic."""
        new = engine not in self._miscounts
        if any(engine == one.id for one in self._engines):
            self._miscounts[engine] = now
        return new

    def counts(self) -> Counter[str]:
        """What events brought since the start, by kind."""
        counts = self._left_counts + self.index.counts
        for rank in joined.from_iterable(self.ranks.values()):
            counts += rank.counts()
        return counts

    def standing(self) -> Standing:
        """How far the evidence goes, and why no further."""
        if self.tokens is None:
            return Standing(State.BLIND, {"*": self.no_tokens})
        standing = self._standing_of_kv()
        found = self.tokenization.items()
        unequal = dict.fromkeys(self._miscounts, MISCOUNT)
        unequal |= {engine.id: why.value for engine, why in found if why is Tokenization.MISMATCH}
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
        claimed = Counter(joined.from_iterable((source.events, source.replay) for source in self.sources()))
        for engine in self._engines:
            ranks = self.ranks.get(engine)
            if ranks is None:
                wrong[engine.id] = engine.refused or "kv_events_disabled"
                continue
            evident = evident or any(rank.evident for rank in ranks)
            troubles = [trouble.value for rank in ranks for trouble in rank.trouble]
            sources = [source(self.name, engine, n) for n in range(len(ranks))]
            if any(claimed[one.events] > 1 or (one.replay and claimed[one.replay] > 1) for one in sources):
                wrong[engine.id] = Trouble.AMBIGUOUS.value
            elif troubles:
                wrong[engine.id] = troubles[0]
            elif (why := _in_part(ranks)) is not None:
                partial[engine.id] = why
        if not evident:
            return Standing(State.BLIND, {**wrong, **partial} or {"*": "no engine"})
        if wrong:
            return Standing(State.DEGRADED, {**wrong, **partial})
        return Standing(State.APPROXIMATE if partial else State.EXACT, partial)

    def sources(self) -> dict[Source, Rank]:
        """Whose events are to be followed."""
        return {
            source(self.name, engine, number): rank
            for engine, ranks in self.ranks.items()
            for number, rank in enumerate(ranks)
        }


def _in_part(ranks: Sequence[Rank]) -> str | None:
    """Why what is indexed of an engine is not all that decides about a hit; None: it is."""
    for rank in ranks:
        if bounds := rank.contents.bounds:
            return min(bounds).value
        if rank.knowledge is not Knowledge.COMPLETE:
            return rank.knowledge.value
    return RANKS if len(ranks) > 1 else None


class Evidence:
    """The caches of all deployments that route by KV. `limit`: (engine, block) entries of the index of each."""

    def __init__(self, view: View, limit: int = LIMIT) -> None:
        self.caches: dict[str, Cache] = {}
        """By served name."""
        self._view = view
        self.limit = limit
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
        return {source: rank for cache in self.caches.values() for source, rank in cache.sources().items()}

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
                    self.caches[name] = Cache(deployment, self.limit)
                self.caches[name].keep_up(deployment, now)


def _is_mute(rank: Rank) -> bool:
    """It has told of nothing; or of no block, and its size nobody knows either: there is none of which to say that it is owed."""
    contents, knowledge = rank.contents, rank.knowledge
    unknown = contents.block_size is None and not contents.holder.skipped_groups
    return knowledge in (Knowledge.UNHEARD, Knowledge.RESTORED) or (knowledge is Knowledge.COMPLETE and unknown)


def _block_size(engine: Engine) -> int:
    return engine.spec.block_size or USUAL_BLOCK_SIZE
