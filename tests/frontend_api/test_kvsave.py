"""The index on disk: what is written is read again, anything else is passed over; and a router that goes on with it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import stat
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RoutingMode, RoutingPolicy, SnapshotDeployment, SnapshotEngine
from frontend_api.kv import save, sequence
from frontend_api.kv.evidence import Cache, Evidence, Source, State
from frontend_api.kv.knowledge import Knowledge, Saved
from frontend_api.kv.listen import Follower
from frontend_api.kv.save import SavedIndex, Unreadable, decode, encode, file_name
from frontend_api.kv.sequence import Rank
from frontend_api.routing.view import View
from tests.frontend_api.conftest import until
from tests.frontend_api.publisher import Publisher

SIZE = 4
HERE = Source("d", "e", 1, "http://127.0.0.1:1", 0, "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")
SAVED = Saved(41, b"d" * 16, True, SIZE, 0, (1, 3), array("Q", [1, 2]).tobytes(), array("Q", [3, 4]).tobytes(), True)


def test_what_is_written_is_read_again() -> None:
    assert decode(encode(HERE, SAVED), HERE) == SAVED
    assert len(encode(HERE, SAVED)) < 300


@given(st.data())
def test_a_file_that_was_damaged_anywhere_is_passed_over(data: st.DataObject) -> None:
    whole = encode(HERE, SAVED)
    at = data.draw(st.integers(0, len(whole) - 1))
    torn = data.draw(st.sampled_from([whole[:at], whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]]))
    with pytest.raises(Unreadable):
        decode(torn, HERE)


@given(st.binary(max_size=200))
def test_a_file_of_any_kind_is_passed_over(data: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(data, HERE)


@pytest.mark.parametrize(
    "other",
    [
        HERE._replace(attempt=2),
        HERE._replace(url="http://127.0.0.1:9"),
        HERE._replace(engine="x"),
        HERE._replace(rank=1),
    ],
)
def test_another_incarnation_has_another_file_and_the_wrong_one_is_refused(other: Source) -> None:
    assert file_name(other) != file_name(HERE)
    with pytest.raises(Unreadable, match="another engine"):
        decode(encode(other, SAVED), HERE)


@pytest.mark.parametrize(("name", "value"), [("VERSION", 2), ("HASHING", "other")])
def test_another_version_is_refused(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(save, name, value)
        written = encode(HERE, SAVED)
    with pytest.raises(Unreadable, match="another version"):
        decode(written, HERE)


# ---- a router that is started again


def line(seed: int, blocks: int = 4) -> list[int]:
    return [seed * 1_000 + n for n in range(blocks * SIZE)]


class Process:
    """What a router process has of it all: view, evidence, follower, files."""

    def __init__(self, folder: Path, *engines: SnapshotEngine, limit: int = 10_000) -> None:
        self.view = View()
        self.evidence = Evidence(self.view, limit)
        self.saved = SavedIndex(self.evidence, folder)
        self._follower = asyncio.create_task(Follower(self.evidence, lambda folder, key: None, self.saved).run())  # type: ignore[arg-type, return-value]
        deployment = SnapshotDeployment(
            name="d", served_name="m", routing=RoutingPolicy(mode=RoutingMode.KV), engines=engines
        )
        self.view.take(FleetSnapshot(version=1, deployments=(deployment,)))
        self.evidence.tick(0.0)

    async def end(self) -> None:
        await self.saved.save()
        await self.kill()

    async def kill(self) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)

    @property
    def cache(self) -> Cache:
        return self.evidence.caches["m"]

    @property
    def ranks(self) -> list[Rank]:
        return [rank for ranks in self.cache.ranks.values() for rank in ranks]

    @property
    def knowledge(self) -> list[Knowledge]:
        return [rank.knowledge for rank in self.ranks]

    def overlap(self, tokens: list[int]) -> list[int]:
        return list(self.cache.prompt(array("I", tokens), None).overlap.values())


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published before the subscriber is there is lost, and found at the next check."""
    monkeypatch.setattr(sequence, "CHECK_SECONDS", 0.2)


Start = Callable[..., Awaitable[Process]]
Publish = Callable[..., Publisher]


@pytest_asyncio.fixture
async def publish() -> AsyncIterator[Publish]:
    made: list[Publisher] = []

    def make(ports: tuple[int, int] | None = None, **options: int) -> Publisher:
        made.append(Publisher(ports, **options))
        return made[-1]

    yield make
    for publisher in made:
        await publisher.close()


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    processes: list[Process] = []

    async def make(*publishers: Publisher, attempt: int = 1, ranks: int = 1, limit: int = 10_000) -> Process:
        engines = tuple(
            SnapshotEngine(
                f"e{n}",
                f"e{n}",
                attempt,
                Role.AGGREGATED,
                f"http://e{n}",
                events=p.events,
                replay=p.replay,
                ranks=ranks,
            )
            for n, p in enumerate(publishers)
        )
        processes.append(Process(tmp_path / "kv", *engines, limit=limit))
        return processes[-1]

    yield make
    for process in processes:
        await process.kill()


async def test_a_saved_index_closes_what_replay_no_longer_reaches(
    publish: Publish, start: Start, tmp_path: Path
) -> None:
    publisher = publish()
    first = await start(publisher)
    await until(lambda: first.knowledge == [Knowledge.COMPLETE])
    for seed in range(20):
        publisher.publish(publisher.stored(line(seed)))
    await until(lambda: first.ranks[0].batches == 20)
    await first.end()
    publisher.publish(publisher.removed(line(3), 2))
    publisher.publish(publisher.stored(line(99)))
    publisher.forget(3)
    second = await start(publisher)
    await until(lambda: second.overlap(line(99)) == [16])
    assert second.knowledge == [Knowledge.COMPLETE]
    assert publisher.asked[-1] == 19
    assert second.overlap(line(7)) == [16]
    assert second.overlap(line(3)) == [8]
    assert second.cache.index.entries == 20 * 4 - 2 + 4
    (file,) = (tmp_path / "kv").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not any(array("I", line(seed)[:4]).tobytes() in file.read_bytes() for seed in range(20))


async def test_without_it_the_beginning_is_not_known(publish: Publish, start: Start) -> None:
    publisher = publish()
    for seed in range(20):
        publisher.publish(publisher.stored(line(seed)))
    publisher.forget(3)
    process = await start(publisher)
    await until(lambda: process.overlap(line(19)) == [16])
    assert process.knowledge == [Knowledge.PARTIAL]
    assert process.overlap(line(7)) == []


async def test_a_publisher_that_restarted_meanwhile_starts_empty(publish: Publish, start: Start) -> None:
    publisher = publish()
    first = await start(publisher)
    for seed in range(5):
        publisher.publish(publisher.stored(line(seed)))
    await until(lambda: first.ranks[0].batches == 5)
    await first.end()
    await publisher.close()
    other = publish(publisher.ports)
    for seed in range(50, 58):
        other.publish(other.stored(line(seed)))
    second = await start(other)
    await until(lambda: second.overlap(line(57)) == [16])
    assert second.knowledge == [Knowledge.COMPLETE]
    assert second.overlap(line(3)) == []
    assert second.ranks[0].restarts == 1


async def test_another_attempt_starts_empty(publish: Publish, start: Start) -> None:
    publisher = publish()
    first = await start(publisher)
    publisher.publish(publisher.stored(line(1)))
    publisher.publish(publisher.stored(line(2)))
    await until(lambda: first.ranks[0].batches == 2)
    await first.end()
    publisher.forget(1)
    second = await start(publisher, attempt=2)
    await until(lambda: second.knowledge == [Knowledge.PARTIAL])
    assert second.overlap(line(1)) == []


async def test_a_damaged_file_costs_a_line_in_the_log(
    publish: Publish, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publish()
    first = await start(publisher)
    publisher.publish(publisher.stored(line(1)))
    await until(lambda: first.ranks[0].batches == 1)
    await first.end()
    (file,) = (tmp_path / "kv").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        second = await start(publisher)
        await until(lambda: second.overlap(line(1)) == [16])
    assert second.knowledge == [Knowledge.COMPLETE]
    assert len(caplog.records) == 1
    assert "it is torn" in caplog.text
    # and is made whole again by the next one who ends
    publisher.publish(publisher.stored(line(2)))
    await until(lambda: second.ranks[0].batches == 2)
    await second.end()
    third = await start(publisher)
    await until(lambda: third.knowledge == [Knowledge.COMPLETE])
    assert publisher.asked[-1] == 1


async def test_a_publisher_that_does_not_answer_leaves_nothing_of_it(
    publish: Publish, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend_api.kv.listen.REPLAY_SECONDS", 0.1)
    publisher = publish()
    first = await start(publisher)
    publisher.publish(publisher.stored(line(1)))
    await until(lambda: first.ranks[0].batches == 1)
    await first.end()
    publisher.answers = False
    second = await start(publisher)
    await until(lambda: second.ranks[0].replays >= 1 and second.knowledge == [Knowledge.UNHEARD])
    assert second.overlap(line(1)) == []
    assert second.cache.standing().state is State.BLIND


async def test_only_what_changed_is_written_and_what_is_old_goes(
    publish: Publish, start: Start, tmp_path: Path
) -> None:
    one, two = publish(), publish()
    process = await start(one, two)
    one.publish(one.stored(line(1)))
    two.publish(two.stored(line(2)))
    await until(lambda: [rank.batches for rank in process.ranks] == [1, 1])
    folder = tmp_path / "kv"
    folder.mkdir()
    for name, age in (("old.kv", 2e5), ("young.kv", 10.0), ("torn.kv.123", 2e5), ("other.txt", 2e5)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (time.time() - age,) * 2)
    await process.saved.save()
    assert {path.name for path in folder.iterdir()} - {"young.kv", "other.txt"} == {
        file_name(source) for source in process.evidence.sources()
    }
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    one.publish(one.stored(line(3)))
    await until(lambda: process.ranks[0].batches == 2)
    await process.saved.save()
    await process.saved.save()
    changed = [path for path, before in written.items() if path.stat().st_mtime_ns != before]
    assert [path.name for path in changed] == [file_name(next(iter(process.evidence.sources())))]


async def test_a_folder_that_cannot_be_written_is_told(
    publish: Publish, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("a file")
    publisher = publish()
    process = await start(publisher)
    publisher.publish(publisher.stored(line(1)))
    await until(lambda: process.ranks[0].batches == 1)
    await process.saved.save()
    assert "cannot be saved" in caplog.text
    assert process.overlap(line(1)) == [16]


async def test_a_file_that_is_larger_than_the_index_may_be_is_not_read(
    publish: Publish, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publish()
    first = await start(publisher)
    publisher.publish(*(publisher.stored(line(seed, 100)) for seed in range(80)))
    await until(lambda: first.cache.index.entries == 8_000)
    await first.end()
    second = await start(publisher, limit=2_000)
    await until(lambda: second.knowledge != [Knowledge.UNHEARD])
    assert "larger than the index may be" in caplog.text
    assert second.cache.index.entries <= 2_000


async def test_a_large_index_is_loaded_little_by_little(publish: Publish, start: Start) -> None:
    publisher = publish()
    first = await start(publisher, limit=100_000)
    publisher.publish(*(publisher.stored(line(seed, 100)) for seed in range(150)))
    await until(lambda: first.cache.index.entries == 15_000)
    await first.end()
    second = await start(publisher, limit=100_000)
    seen = set()
    while second.knowledge != [Knowledge.COMPLETE]:
        seen.add(second.cache.index.entries)
        assert second.overlap(line(1)) == []
        await asyncio.sleep(0)
    assert len(seen) > 10
    assert second.overlap(line(1, 100)) == [400]


def two_ranks(publish: Publish) -> tuple[Publisher, Publisher]:
    """The second on the first one's ports plus 1.

    Below the ports that the system gives by itself: after a test with thousands of connections
    nearly every second one of those waits for its minute to pass.
    """
    for port in random.sample(range(20_000, 32_000, 4), 20):
        with suppress(zmq.ZMQError):
            zero = publish((port, port + 2))
            return zero, publish(zero.ports, rank=1)
    raise AssertionError("no ports could be had")


async def test_ranks_publish_on_ports_of_their_own_and_are_saved_one_by_one(
    publish: Publish, start: Start, tmp_path: Path
) -> None:
    zero, one = two_ranks(publish)
    first = await start(zero, ranks=2)
    zero.publish(zero.stored(line(1)))
    one.publish(one.stored(line(1, 8)))
    one.publish(one.stored(line(2)))
    await until(lambda: [rank.batches for rank in first.ranks] == [1, 2])
    assert first.overlap(line(1, 8)) == [32]
    assert first.overlap(line(2)) == [16]
    await first.end()
    assert len(list((tmp_path / "kv").iterdir())) == 2
    for publisher in (zero, one):
        publisher.forget(1)
    second = await start(zero, ranks=2)
    await until(lambda: second.knowledge == [Knowledge.COMPLETE] * 2)
    assert second.overlap(line(1, 8)) == [32]
