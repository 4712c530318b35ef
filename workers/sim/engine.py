"""The engine itself: continuous batching over a finite KV cache, one step at a time.

Owns the block pool and the queue. Knows nothing of HTTP or OpenAI. It walks through vLLM's scheduler in
small: running sequences first, chunked prefill within a token budget, admission in order of arrival, preemption of the
newest when blocks run out, one batch of KV events per step.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence as Many

from workers.sim.events import EventPublisher
from workers.sim.faults import Faults
from workers.sim.handover import Leases, Pulls
from workers.sim.kv import Block, BlockPool, OutOfBlocks, external
from workers.sim.latency import Pace
from workers.sim.metrics import Metrics
from workers.sim.sequence import Phase, Sequence
from workers.sim.settings import Settings
from workers.sim.text import Answer, pack
from workers.sim.transfer import Remote, remote_of


class Engine:
    def __init__(self, settings: Settings, faults: Faults, publisher: EventPublisher | None) -> None:
        self.settings = settings
        self.faults = faults
        self.engine_id = secrets.token_hex(16)
        self.metrics = Metrics(
            settings.served_model_name,
            settings.max_model_len,
            nixl=settings.disaggregated,
            block_size=settings.block_size,
            kv_blocks=settings.kv_blocks,
        )
        self._publisher = publisher
        self.pool = BlockPool(
            settings.kv_blocks,
            settings.block_size,
            seed=secrets.token_bytes(16),
            on_stored=self._on_stored,
            on_removed=self._on_removed,
        )
        self._pace = Pace(settings.prefill_tokens_per_second, settings.itl_seconds)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._receiving: set[Sequence] = set()
        self._wake = asyncio.Event()
        self.leases: Leases | None = None
        self._pulls: Pulls | None = None
        if nixl := self.metrics.nixl:
            self.leases = Leases(self.engine_id, settings, faults, self.pool, nixl, self._wake.set)
            self._pulls = Pulls(settings, faults, nixl)

    # --- intake ------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Takes a sequence in; its outputs go into its queue."""
        sequence.phase = Phase.WAITING
        self._waiting.append(sequence)
        self._wake.set()
        if sequence.remote is not None and self._pulls:
            wanted = lambda: sequence.phase is Phase.WAITING and sequence.remote is not None  # noqa: E731
            self._pulls.keep_alive(sequence.remote, wanted)

    def abort(self, sequence: Sequence) -> None:
        """The client left: its blocks are free at once, and blocks that wait for it elsewhere are let go."""
        if sequence.phase in (Phase.NEW, Phase.FINISHED):
            return
        if sequence.phase is Phase.WAITING and sequence.remote is not None and self._pulls:
            self._pulls.let_go(sequence.remote)
        self._finish(sequence, "abort")

    def let_go(self, params: dict[str, object] | None) -> None:
        """A request was refused: KV that waits for it elsewhere will not be read."""
        remote = remote_of(params)
        if remote is not None and self._pulls:
            self._pulls.let_go(remote)

    def load(self) -> tuple[int, int]:
        """(running, waiting)"""
        return len(self._running), len(self._waiting) + len(self._receiving)

    def metrics_text(self) -> bytes:
        metrics = self.metrics
        metrics.running.set(len(self._running))
        metrics.waiting.set(len(self._waiting) + len(self._receiving))
        metrics.waiting_by_reason.set(len(self._waiting), 'reason="capacity"')
        metrics.waiting_by_reason.set(len(self._receiving), 'reason="deferred"')
        metrics.kv_usage.set(self.pool.usage)
        return metrics.text()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. False while blocks are in use."""
        done = self.pool.clear()
        if done and self._publisher:
            self._publisher.cleared()
            self._publisher.flush()
        return done

    # --- the loop ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            if not await self.step():
                self._wake.clear()
                await self._wake.wait()

    async def step(self) -> bool:
        """One engine step. False: there was nothing to do."""
        work = self._schedule()
        self._flush()
        if not work:
            return False
        decoding = sum(sequence.decoding for sequence, _ in work)
        prefill = sum(count for sequence, count in work if not sequence.decoding)
        await self._pace.spend(self._pace.step_seconds(prefill, decoding))
        now = time.monotonic()
        for sequence, count in work:
            if sequence.phase is Phase.RUNNING:
                self._computed(sequence, count, now)
        self._flush()
        return True

    def _schedule(self) -> list[tuple[Sequence, int]]:
        budget = self.settings.max_num_batched_tokens
        work: list[tuple[Sequence, int]] = []
        index, preempted = 0, False
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(sequence.missing, budget)
            if not self._reserve(sequence, sequence.computed + count):
                preempted = True
                continue  # the newest sequence lost its blocks: look at what runs now
            work.append((sequence, count))
            budget -= count
            index += 1
        while self._waiting and not preempted and budget > 0 and len(self._running) < self.settings.max_num_seqs:
            sequence = self._waiting[0]
            admitted = self._admit(sequence, budget)
            if admitted is None:
                break
            self._waiting.popleft()
            if admitted:
                work.append((sequence, admitted))
                budget -= admitted
        return [(sequence, count) for sequence, count in work if sequence.phase is Phase.RUNNING]

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for that many tokens; preempts the newest running sequence when there are none, and says False."""
        fresh = -(-tokens // self.pool.block_size) - len(sequence.blocks)
        if fresh <= 0:
            return True
        try:
            sequence.blocks += self.pool.take((), fresh)
            return True
        except OutOfBlocks:
            newest = self._running.pop()
            self.pool.give_back(newest.blocks)
            newest.preempt()
            self._waiting.appendleft(newest)
            self.metrics.preemptions.add(1)
            return False

    def _admit(self, sequence: Sequence, budget: int) -> int | None:
        """Tokens that the waiting sequence computes in this step; 0: it receives KV first; None: no room for it yet."""
        size, tokens = self.pool.block_size, sequence.tokens
        self.pool.digests(tokens, sequence.salt, sequence.digests)
        hits = self.pool.match(sequence.digests, (len(tokens) - 1) // size)
        cached = len(hits) * size
        remote = sequence.remote
        count = len(tokens) - cached if remote else min(len(tokens) - cached, budget)
        try:
            sequence.blocks = self.pool.take(hits, -(-(cached + count) // size) - len(hits))
        except OutOfBlocks:
            return None
        sequence.computed, sequence.published = cached, len(hits)
        self._count_admission(sequence, cached, count if remote else 0)
        if remote and self._pulls:
            self._receive(sequence, remote, self._pulls)
            return 0
        sequence.phase = Phase.RUNNING
        self._running.append(sequence)
        return count

    def _count_admission(self, sequence: Sequence, cached: int, transferred: int) -> None:
        now = time.monotonic()
        if sequence.admitted_at is not None:
            return
        sequence.admitted_at = now
        sequence.cached, sequence.transferred = cached, transferred
        self.metrics.queue_time.observe(now - sequence.arrived_at)
        self.metrics.prefix_queries.add(sequence.prompt_length)
        self.metrics.prefix_hits.add(cached)
        if self.settings.disaggregated:
            self.metrics.external_queries.add(sequence.prompt_length - cached)
            self.metrics.external_hits.add(transferred)

    def _computed(self, sequence: Sequence, count: int, now: float) -> None:
        start, end = sequence.computed, sequence.computed + count
        self._write(sequence.blocks, start, sequence.tokens[start:end])
        sequence.computed = end
        self._publish(sequence)
        if sequence.missing:
            return
        if sequence.answer is None:
            sequence.answer = Answer(self._prompt_kv(sequence), sequence.variant)
        self._count_token(sequence, now)
        if reason := sequence.sample():
            self._finish(sequence, reason)

    def _prompt_kv(self, sequence: Sequence) -> list[bytes]:
        size = self.pool.block_size
        whole, rest = divmod(sequence.prompt_length, size)
        contents = [block.content for block in sequence.blocks[:whole]]
        return [*contents, sequence.blocks[whole].content[: rest * 8]] if rest else contents

    def _write(self, blocks: Many[Block], start: int, tokens: Many[int]) -> None:
        """Puts the KV of `tokens` at position `start` of a sequence."""
        size, done = self.pool.block_size, 0
        while done < len(tokens):
            index, offset = divmod(start + done, size)
            part = tokens[done : done + size - offset]
            block = blocks[index]
            block.content = block.content[: offset * 8].ljust(offset * 8, b"\0") + pack(part)
            done += len(part)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pool.block_size
        if full > sequence.published:
            digests = self.pool.digests(sequence.tokens[: sequence.computed], sequence.salt, sequence.digests)[:full]
            self.pool.publish(sequence.blocks, digests, sequence.tokens, sequence.salt, sequence.published)
            sequence.published = full

    def _count_token(self, sequence: Sequence, now: float) -> None:
        metrics = self.metrics
        metrics.generation_tokens.add(1)
        if sequence.last_token_at is not None:
            metrics.itl.observe(now - sequence.last_token_at)
        else:
            length = sequence.prompt_length
            metrics.ttft.observe(now - sequence.arrived_at)
            metrics.prefill_time.observe(now - (sequence.admitted_at or now))
            sequence.first_token_at = now
            metrics.prompt_tokens.add(length)
            metrics.prompt_tokens_cached.add(sequence.cached + sequence.transferred)
            by_source = metrics.prompt_tokens_by_source
            by_source.add(length - sequence.cached - sequence.transferred, 'source="local_compute"')
            by_source.add(sequence.cached, 'source="local_cache_hit"')
            by_source.add(sequence.transferred, 'source="external_kv_transfer"')
        sequence.last_token_at = now

    def _finish(self, sequence: Sequence, reason: str) -> None:
        phase, sequence.phase = sequence.phase, Phase.FINISHED
        if phase is Phase.RUNNING:
            self._running.remove(sequence)
        elif phase is Phase.WAITING:
            self._waiting.remove(sequence)
        now = time.monotonic()
        self.metrics.request_success.add(1, f'finished_reason="{reason}"')
        self.metrics.e2e.observe(now - sequence.arrived_at)
        if sequence.first_token_at is not None:
            self.metrics.decode_time.observe(now - sequence.first_token_at)
        self.metrics.request_prompt_tokens.observe(sequence.prompt_length)
        self.metrics.request_generation_tokens.observe(len(sequence.tokens) - sequence.prompt_length)
        params = None
        if sequence.keep_for_reader and self.leases and reason in ("stop", "length"):
            params = self._lease(sequence, self.leases)
        elif phase is not Phase.RECEIVING:  # a pull still writes into them: it gives them back itself
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []
        sequence.finished(reason, params)
        self._wake.set()

    def _flush(self) -> None:
        if self._publisher:
            self._publisher.flush()

    def _on_stored(self, digests: list[bytes], parent: bytes | None, tokens: Many[int], salt: str | None) -> None:
        if self._publisher:
            hashes = [external(digest) for digest in digests]
            self._publisher.stored(hashes, external(parent) if parent else None, tokens, salt)

    def _on_removed(self, digest: bytes) -> None:
        if self._publisher:
            self._publisher.removed(external(digest))

    # --- hand-over ---------------------------------------------------------------------------------------------

    def _lease(self, sequence: Sequence, leases: Leases) -> dict[str, object] | None:
        kept = sequence.blocks[: -(-sequence.computed // self.pool.block_size)]
        self.pool.give_back(sequence.blocks[len(kept) :])
        sequence.blocks = []
        return leases.grant(sequence.id, kept, sequence.computed, sequence.cached)

    def _receive(self, sequence: Sequence, remote: Remote, pulls: Pulls) -> None:
        sequence.remote = None  # one pull only: after a preemption the prompt is computed here
        sequence.phase = Phase.RECEIVING
        self._receiving.add(sequence)
        blocks = sequence.blocks[sequence.published :]
        pulls.start(sequence.id, blocks, remote, lambda worked: self._received(sequence, worked))

    def _received(self, sequence: Sequence, worked: bool) -> None:
        self._receiving.discard(sequence)
        if sequence.phase is Phase.FINISHED:
            self.pool.give_back(sequence.blocks)
        else:
            sequence.phase = Phase.RUNNING
            self._running.append(sequence)
            if worked:
                sequence.computed = len(sequence.tokens) - 1  # the last token is computed again, for its logits
                self._publish(sequence)
            else:
                self._finish(sequence, "error")
        self._wake.set()

    async def close(self) -> None:
        if self.leases:
            self.leases.close()
        if self._pulls:
            await self._pulls.close()
