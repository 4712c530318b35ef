"""Both ends of the KV hand-over inside an engine: leases on a prefill engine, pulls on a decode engine.

Leases keep the blocks of a finished prefill until a reader says it is done, or until they expire. Pulls fill the blocks
of a waiting sequence from another engine. Which sequence runs when is the engine's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

from workers.sim.faults import Faults
from workers.sim.kv import Block, BlockPool
from workers.sim.metrics import NixlMetrics
from workers.sim.settings import Settings
from workers.sim.transfer import Done, Heartbeat, Remote, TransferFailed, pull, tell


class Lease:
    """Blocks of a finished prefill that wait for their reader."""

    def __init__(self, blocks: list[Block], timer: asyncio.TimerHandle) -> None:
        self.blocks = blocks
        self.timer = timer


class Leases:
    """The prefill end. `freed` is called when blocks come back."""

    def __init__(
        self,
        engine_id: str,
        settings: Settings,
        faults: Faults,
        pool: BlockPool,
        nixl: NixlMetrics,
        freed: Callable[[], None],
    ) -> None:
        self._engine_id, self._settings, self._faults = engine_id, settings, faults
        self._pool, self._nixl, self._freed = pool, nixl, freed
        self._leases: dict[str, Lease] = {}

    def grant(self, request_id: str, blocks: list[Block], tokens: int, cached: int) -> dict[str, object] | None:
        """Keeps the blocks of `tokens` computed tokens; the params for whoever shall read them."""
        seconds = 0.0 if "expire-now" in self._faults else self._settings.lease_seconds
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, request_id)
        self._leases[request_id] = Lease(blocks, timer)
        if "missing-params" in self._faults:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block.id for block in blocks]],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": self._settings.host,
            "remote_port": self._settings.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    def _expire(self, request_id: str) -> None:
        self._pool.give_back(self._leases.pop(request_id).blocks)
        self._nixl.expired.add(1)
        self._freed()

    def read(self, block_ids: Iterable[int]) -> list[bytes]:
        """What those blocks hold now, whoever owns them."""
        blocks = self._pool.blocks
        contents = [blocks[id].content for id in block_ids if 0 <= id < len(blocks)]
        if "wrong-kv" in self._faults:
            return [bytes(reversed(content)) for content in contents]
        return contents

    def done(self, request_id: str) -> None:
        """A decode engine has what it needs: the blocks are free."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            self._nixl.notified_after_expiry.add(1)
            return
        lease.timer.cancel()
        self._pool.give_back(lease.blocks)
        self._freed()

    def extend(self, request_ids: Iterable[str]) -> None:
        """A decode engine still has those requests in its queue."""
        loop = asyncio.get_running_loop()
        for request_id in request_ids:
            if lease := self._leases.get(request_id):
                lease.timer.cancel()
                lease.timer = loop.call_later(self._settings.lease_seconds, self._expire, request_id)

    def close(self) -> None:
        for lease in self._leases.values():
            lease.timer.cancel()


class Pulls:
    """The decode end."""

    def __init__(self, settings: Settings, faults: Faults, nixl: NixlMetrics) -> None:
        self._settings, self._faults, self._nixl = settings, faults, nixl
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request_id: str, blocks: Sequence[Block], remote: Remote, finish: Callable[[bool], None]) -> None:
        """Fills `blocks`, the last ones of the sequence, from `remote`; then calls `finish` with whether it worked."""
        self._spawn(self._run(request_id, blocks, remote, finish))

    async def _run(
        self, request_id: str, blocks: Sequence[Block], remote: Remote, finish: Callable[[bool], None]
    ) -> None:
        try:
            await self._fill(blocks, remote)
        except TransferFailed as error:
            print(f"KV transfer of {request_id} failed: {error}", flush=True)
            self._nixl.failed_transfers.add(1)
            finish(False)
        else:
            finish(True)

    async def _fill(self, blocks: Sequence[Block], remote: Remote) -> None:
        settings = self._settings
        faults = self._faults
        if "transfer-fails" in faults or f"transfer-fails-from-{remote.port}" in faults:
            raise TransferFailed("told to fail")
        if "transfer-hangs" in faults:
            await asyncio.Event().wait()
        block_bytes = settings.block_size * settings.kv_bytes_per_token
        seconds = block_bytes / settings.transfer_bytes_per_second
        if "slow-transfer" in self._faults:
            seconds *= 100
        contents, took = await pull(remote, len(blocks), settings.block_size, seconds)
        for block, content in zip(blocks, contents, strict=False):
            block.content = content
        self._nixl.seconds.observe(took)
        self._nixl.post_seconds.observe(0.0)
        self._nixl.bytes.observe(len(contents) * block_bytes)
        self._nixl.descriptors.observe(len(contents))

    def let_go(self, remote: Remote) -> None:
        """Tells the other side that its blocks will not be read."""
        self._spawn(self._let_go(remote))

    async def _let_go(self, remote: Remote) -> None:
        try:
            await tell(remote, self._settings.block_size, [Done(remote.request_id)])
        except TransferFailed:
            self._nixl.failed_notifications.add(1)
            self._nixl.failed_transfers.add(1)

    def keep_alive(self, remote: Remote, wanted: Callable[[], bool]) -> None:
        """Renews the lease over there, six times per lease, while `wanted()` says that the request waits here."""

        def beat() -> None:
            if wanted():
                self._spawn(self._beat(remote))
                self.keep_alive(remote, wanted)

        asyncio.get_running_loop().call_later(self._settings.lease_seconds / 6, beat)

    async def _beat(self, remote: Remote) -> None:
        with suppress(TransferFailed):
            await tell(remote, self._settings.block_size, [Heartbeat([remote.request_id])])

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
