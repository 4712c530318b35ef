"""What stays on a node's disk of its engines."""

from __future__ import annotations

import os
from pathlib import Path

from controlplane.fleet.model import Ports
from tests.workers.conftest import assignment
from workers.record import KEEP_ATTEMPTS, KEEP_DROPPED, EngineRecord, Records


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    records = Records(tmp_path / "engines")
    record = EngineRecord(assignment=assignment("d", attempt=2), ports=Ports(1, 2, 3, 4), pid=7, boot="b", warmed=True)
    records.save(record)
    assert records.load("d", 2) == record
    assert list(records.attempts()) == [("d", 2)]


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    records = Records(tmp_path / "engines")
    records.save(EngineRecord(assignment=assignment("d")))
    (records.folder("d", 1) / "engine.json").write_text('{"assignment":')
    assert records.load("d", 1) is None
    assert records.load("d", 2) is None
    assert list(records.attempts()) == [("d", 1)], "its folder is still looked through for strays"


def test_the_newest_attempts_are_kept(tmp_path: Path) -> None:
    records = Records(tmp_path / "engines")
    for attempt in range(1, 13):
        records.save(EngineRecord(assignment=assignment("d", attempt=attempt)))
    records.prune({"d"})
    assert [attempt for _, attempt in records.attempts()] == list(range(13 - KEEP_ATTEMPTS, 13))


def test_engines_of_now_are_kept_and_of_the_dropped_the_newest(tmp_path: Path) -> None:
    records = Records(tmp_path / "engines")
    names = [f"e{number:02}" for number in range(KEEP_DROPPED + 6)]
    for age, name in enumerate(reversed(names)):
        records.save(EngineRecord(assignment=assignment(name)))
        os.utime(records.root / name, (1e9 - age, 1e9 - age))
    records.prune({names[0], names[1]})
    left = {engine for engine, _ in records.attempts()}
    assert left == {names[0], names[1], *names[-KEEP_DROPPED:]}
