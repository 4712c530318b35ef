"""A rank against a model of its engine: whatever is lost, late, cut or restarted, what it calls complete is what the engine holds.

The network does what ZMQ does: batches of one connection come in order or not at all, the end of a connection is told before
anything of the next one comes, a replay is cut or answered by another process.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from typing import Any

import msgspec
import pytest

from frontend_api.kv.contents import Contents
from frontend_api.kv.index import Index, chain
from frontend_api.kv.knowledge import Knowledge, Saved
from frontend_api.kv.sequence import CHECK_SECONDS, END, UNSTEADY_SECONDS, Rank

SCENES = 200
STEPS = 120
LINES = [[seed * 100 + n for n in range(24)] for seed in range(3)]
LINES.append(LINES[0][:12] + LINES[1][:12])
KINDS = [(None, None), ("a-lora", None), (None, "salt"), ("a-lora", "salt")]
Entry = tuple[int, bytes]


class Engine:
    """One process: `capacity` blocks, of which the one used longest ago is reused; `kept` batches for replay."""

    def __init__(self, rnd: random.Random, number: int, capacity: int, kept: int) -> None:
        self.rnd = rnd
        self.number = number
        self.capacity = capacity
        self.size = rnd.choice((4, 4, 2, 8))
        self.held: list[int] = []
        """By own hash, the one used longest ago first."""
        self.buffer: deque[Entry] = deque(maxlen=kept)
        self.sequence = 0

    def step(self) -> Entry:
        events: list[dict[str, Any]] = []
        for _ in range(self.rnd.randint(1, 3)):
            if self.rnd.random() < 0.04:
                self.held.clear()
                events.append({"type": "AllBlocksCleared"})
            else:
                self._prompt(events)
        entry = self.sequence, msgspec.msgpack.encode([self.rnd.random(), events, 0])
        self.buffer.append(entry)
        self.sequence += 1
        return entry

    def _prompt(self, events: list[dict[str, Any]]) -> None:
        lora, salt = self.rnd.choice(KINDS)
        line = self.rnd.choice(LINES)
        owns = chain(array("I", line), self.size, lora=lora, salt=salt)
        owns = owns[: self.rnd.randint(1, min(len(owns), self.capacity))]
        hits = 0
        while hits < len(owns) and owns[hits] in self.held:
            hits += 1
        new = owns[hits:]
        if not new or any(own in self.held for own in new):
            return
        self.held = [own for own in self.held if own not in owns]
        gone = [self.held.pop(0) for _ in range(len(self.held) + len(owns) - self.capacity)]
        self.held += reversed(owns)
        events += [{"type": "BlockRemoved", "block_hashes": [self._name(own)], "medium": "GPU"} for own in gone]
        extra = [[*([lora] if lora else []), *([salt] if salt and not n else [])] for n in range(hits, len(owns))]
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": [self._name(own) for own in new],
                "parent_block_hash": self._name(owns[hits - 1]) if hits else None,
                "token_ids": line[hits * self.size : len(owns) * self.size],
                "block_size": self.size,
                "lora_name": lora,
                "extra_keys": [keys or None for keys in extra],
            }
        )

    def _name(self, own: int) -> int:
        return own * 31 + self.number & (1 << 64) - 1


class Scene:
    """An engine, what is on the way, and a router that may start again with what it saved."""

    def __init__(self, seed: int) -> None:
        self.rnd = rnd = random.Random(seed)
        self.now = 0.0
        self.replays = rnd.random() < 0.8
        self.told = rnd.random() < 0.5
        self.capacity = rnd.choice((6, 12, 30))
        self.kept = rnd.choice((3, 6, 12, 1_000))
        self.lossy = True
        self.index = Index(rnd.choice((20, 10_000, 10_000)))
        self.engine = Engine(rnd, 0, self.capacity, self.kept)
        for _ in range(rnd.choice((0, 0, 3, 20))):
            self.engine.step()
        self.up = True
        self.on_the_way: deque[Entry] = deque()
        self.replay: deque[Entry] | None = None
        """Under way; empty: cut."""
        self.start: int | None = None
        """Of a replay that is asked for and not answered."""
        self.saved: list[Saved] = []
        self.rank = self._new_rank()

    def _new_rank(self) -> Rank:
        contents = Contents(self.index, block_size=None, capacity=self.capacity if self.told else None)
        return Rank(contents, replays=self.replays, now=self.now)

    # ---- steps

    def publish(self) -> None:
        if self.up:
            entry = self.engine.step()
            if not self.lossy or self.rnd.random() < 0.85:
                self.on_the_way.append(entry)

    def deliver(self) -> None:
        if self.on_the_way:
            self.rank.live(*self.on_the_way.popleft(), self.now)

    def ask(self) -> None:
        if self.rank.wanted is not None and self.replay is None and self.start is None:
            self.start = self.rank.asked()

    def answer(self) -> None:
        if self.start is not None and self.up:
            self.replay = deque((n, payload) for n, payload in self.engine.buffer if n >= (self.start or 0))
            self.replay.append((END, b""))
            self.start = None
        elif self.replay:
            sequence, payload = self.replay.popleft()
            if sequence == END:
                self.replay = None
            self.rank.replayed(sequence, payload, self.now)

    def fail(self) -> None:
        if self.start is not None or self.replay is not None:
            self.start = self.replay = None
            self.rank.replay_failed(self.now)

    def end(self) -> None:
        if not self.up:
            return
        self.up = False
        for _ in range(self.rnd.randint(0, len(self.on_the_way))):
            self.deliver()
        self.on_the_way.clear()
        self.rank.disconnected()
        if self.replay:
            self.replay = deque(list(self.replay)[: self.rnd.randint(0, len(self.replay) - 1)])

    def begin(self) -> None:
        """Another process, whose first batches nobody hears."""
        if self.up:
            return
        before = self.engine.sequence
        self.engine = Engine(self.rnd, self.engine.number + 7, self.capacity, self.kept)
        heard = not self.rank.batches or not self.replays
        for _ in range(0 if heard else self.rnd.choice((0, 0, 2, max(before - 1, 0), before, before, before + 1))):
            self.engine.step()
        self.up = True

    def blink(self) -> None:
        """The connection ends, the process does not."""
        self.on_the_way.clear()
        self.rank.disconnected()

    def pass_time(self) -> None:
        self.now += self.rnd.choice((0.5, 1.0, CHECK_SECONDS + 1))
        self.rank.tick(self.now)

    def save(self) -> None:
        if saved := self.rank.saved():
            self.saved.append(saved)

    def start_again(self) -> None:
        """The router. What is still on its way to the rank that was comes too late."""
        before, self.rank = self.rank, self._new_rank()
        before.contents.close()
        self.index.sweep(1_000)
        while self.on_the_way:
            before.live(*self.on_the_way.popleft(), self.now)
        self.start = self.replay = None
        if self.saved and self.rnd.random() < 0.8:
            for _ in self.rank.restore(self.rnd.choice(self.saved[-3:])):
                self.rank.tick(self.now)

    # ---- what must hold

    def settle(self) -> None:
        """Let everything arrive, and the rank be quiet for so long that it looks."""
        self.begin()
        self._arrive()
        self.now += CHECK_SECONDS + 0.1
        self.rank.tick(self.now)
        self._arrive()
        if not self.replays:
            self.on_the_way.append(self.engine.step())  # only the next batch can tell
            self._arrive()
        self.rank.tick(self.now)
        self.check()

    def _arrive(self) -> None:
        for _ in range(10_000):
            self.deliver()
            self.ask()
            if self.replay is not None and not self.replay:
                self.fail()
            self.answer()
            if not self.on_the_way and self.replay is None and self.start is None and self.rank.wanted is None:
                return
        pytest.fail("it never ends")

    def check(self) -> None:
        rank, held = self.rank, self.engine.held
        known = set(array("Q", rank.contents.holder.blocks.dump()[1]))
        assert known <= set(held)
        assert rank.knowledge in (Knowledge.COMPLETE, Knowledge.PARTIAL)
        if rank.knowledge is Knowledge.COMPLETE and not rank.trouble:
            assert known == set(held)
        for line in LINES:
            for lora, salt in KINDS:
                owns = chain(array("I", line), self.engine.size, lora=lora, salt=salt)
                depth = next((n for n, own in enumerate(owns) if own not in known), len(owns))
                assert self.index.match(owns) == ({rank.contents.holder.bit: depth} if depth else {})

    def converge(self) -> None:
        """No more faults: soon all is known again."""
        self.lossy = False
        self.settle()
        self.now += UNSTEADY_SECONDS
        for _ in range(400):
            self.publish()
            self._arrive()
            self.now += 0.3
            self.rank.tick(self.now)
            self.check()
            if self.rank.knowledge is Knowledge.COMPLETE and not self.rank.trouble:
                return
        assert self.index.limit == 20  # which is less than it holds


FAULTS = [Scene.fail, Scene.end, Scene.blink, Scene.start_again]
OTHERS = (
    [Scene.publish, Scene.deliver, Scene.answer] * 8
    + [Scene.ask, Scene.begin] * 3
    + [Scene.settle, Scene.pass_time, Scene.save] * 2
)


@pytest.mark.parametrize("tenth", range(10))
def test_what_it_calls_complete_is_what_the_engine_holds(tenth: int) -> None:
    for seed in range(tenth * SCENES // 10, (tenth + 1) * SCENES // 10):
        scene = Scene(seed)
        steps = OTHERS + [fault for fault in FAULTS if scene.rnd.random() < 0.6]
        for _ in range(STEPS):
            scene.rnd.choice(steps)(scene)
        scene.converge()
