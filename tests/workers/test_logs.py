"""Engine logs on their way to a real Valkey: every line once, no secret, whatever goes down meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import wire
from tests.conftest import RedisServer
from workers import logs
from workers.logs import LogShipper, Source, lines
from workers.mailbox import connect

SECRET = "0123456789abcdef"


class Log:
    """One engine's log file and what has arrived of it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.url = url
        self.now = 0.0
        self.sources: list[Source] = [Source("e", 2, folder, False, (SECRET,))]
        self.shipper = self.new_shipper()

    def new_shipper(self) -> LogShipper:
        self.shipper = LogShipper("x", connect(self.url), lambda: self.sources, clock=lambda: self.now)
        return self.shipper

    def write(self, text: str) -> None:
        with (self.folder / "engine.log").open("a") as file:
            file.write(text)

    def ship(self) -> list[str]:
        while self.shipper.ship_once():
            pass
        return self.arrived()

    def arrived(self) -> list[str]:
        return [entry["line"] for _, entry in self.client.xrange(wire.log_key("x", "e", 2))]


@pytest.fixture
def log(tmp_path: Path, redis_url: str) -> Log:
    return Log(tmp_path, redis_url)


def test_each_line_once(log: Log) -> None:
    assert log.ship() == []
    log.write("one\ntwo\n\nfour\n")
    assert log.ship() == ["one", "two", "", "four"]
    assert log.ship() == ["one", "two", "", "four"]
    log.write("five\n")
    log.new_shipper()  # a restarted agent
    assert log.ship() == ["one", "two", "", "four", "five"]
    assert 0 < log.client.ttl(wire.log_key("x", "e", 2)) <= wire.LOG_TTL


def test_a_line_is_sent_whole(log: Log) -> None:
    log.write("first\nsec")
    assert log.ship() == ["first"]
    log.write("ond\n")
    assert log.ship() == ["first", "second"]


def test_a_prompt_without_a_newline_is_sent_when_it_stays(log: Log) -> None:
    log.write("Password")
    assert log.ship() == []
    log.now += 1
    log.write(":")
    assert log.ship() == []
    log.now += 1.9
    assert log.ship() == []
    log.now += 0.2
    assert log.ship() == ["Password:"]


def test_the_last_words_of_an_engine_that_was_dropped_still_arrive(log: Log) -> None:
    log.write("alive\n")
    log.ship()
    log.write("last words")
    log.sources = []
    assert log.ship() == ["alive", "last words"]
    assert log.ship() == ["alive", "last words"]


def test_redis_away_loses_nothing(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        log = Log(tmp_path, server.url)
        log.write("one\n")
        log.ship()
        server.stop()
        log.write("two\n")
        for _ in range(2):
            with pytest.raises(redis.RedisError):
                log.shipper.ship_once()
        log.sources = []  # dropped while Redis is away
        with pytest.raises(redis.RedisError):
            log.shipper.ship_once()
        server.start()
        assert log.ship()[-1] == "two"
        assert log.arrived().count("two") == 1
    finally:
        server.stop()


def test_a_chatty_log_is_capped_and_keeps_its_end(log: Log) -> None:
    log.write("".join(f"line {number}\n" for number in range(wire.LOG_MAXLEN * 3)))
    arrived = log.ship()
    assert wire.LOG_MAXLEN <= len(arrived) < wire.LOG_MAXLEN * 1.2
    assert arrived[-1] == f"line {wire.LOG_MAXLEN * 3 - 1}"


def test_a_chatty_log_lets_the_others_through(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 1000)
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / "engine.log").write_text("me too\n")
    log.sources.append(Source("quiet", 1, quiet, False, ()))
    log.write("a line\n" * 10_000)
    assert log.shipper.ship_once(), "there is more"
    assert log.client.xlen(wire.log_key("x", "quiet", 1)) == 1


def test_a_line_longer_than_a_chunk_arrives_cut(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CHUNK_BYTES", 100)
    log.write("x" * 250 + "\nnext\n")
    arrived = log.ship()
    assert arrived[-1] == "next"
    assert "".join(arrived[:-1]).count("x") == 250


def test_a_large_log_is_turned_over_and_goes_on(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ROTATE_BYTES", 100)
    engine = (log.folder / "engine.log").open("a")
    with engine:
        engine.write("before " + "x" * 100 + "\n")
        engine.flush()
        log.ship()
        log.ship()
        assert (log.folder / "engine.log").stat().st_size == 0
        assert (log.folder / "engine.log.1").stat().st_size > 100
        assert (log.folder / "engine.log.1").stat().st_mode & 0o077 == 0
        engine.write("after\n")
        engine.flush()
        assert log.ship()[-1] == "after"
        assert (log.folder / "engine.log").read_text() == "after\n", "no hole: the engine appends"


def test_a_log_that_nobody_fetches_does_not_fill_the_disk(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "ROTATE_BYTES", 100)
    monkeypatch.setattr(logs, "FULL_BYTES", 300)
    log.shipper = LogShipper("x", connect("redis://127.0.0.1:1/0"), lambda: log.sources)
    for text, size in (("x" * 199 + "\n", 200), ("y" * 199 + "\n", 400)):
        log.write(text)
        assert (log.folder / "engine.log").stat().st_size == size
        with pytest.raises(redis.RedisError):
            log.shipper.ship_once()
    assert (log.folder / "engine.log").stat().st_size < 100
    log.new_shipper()
    assert log.ship() == ["[tandem] 400 bytes before this line were not sent; they are in engine.log.1"]


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain\n", ["plain"]),
        (b"a\nb", ["a", "b"]),
        (b"\n", [""]),
        (b"10%\r50%\r100%\n", ["100%"]),
        (b"windows\r\n", ["windows"]),
        (b"bad \xff byte\n", ["bad \ufffd byte"]),
        (f"key={SECRET} again {SECRET}\n".encode(), ["key=[secret] again [secret]"]),
        (b"\x1b[1;36m(EngineCore)\x1b[0m up\t1\n", ["(EngineCore) up\t1"]),
        (b"\x1b]0;title\x07\x1b[2Ja\x1b", ["a\ufffd"]),
        (b"nul \x00 bell \x07\n", ["nul \ufffd bell \ufffd"]),
        (f"{SECRET[:3]}\x1b[m{SECRET[3:]}\n".encode(), ["[secret]"]),
        (b"x" * 5000 + b"\n", ["x" * 4096 + " … (cut)"]),
        ("é".encode() * 3000 + b"\n", ["é" * 2048 + " … (cut)"]),
    ],
)
def test_lines_are_for_people(data: bytes, shown: list[str]) -> None:
    assert lines(data, (SECRET, "")) == shown


@given(st.binary(max_size=6000))
def test_no_bytes_break_it_and_no_line_is_long(data: bytes) -> None:
    for line in lines(data + SECRET.encode(), (SECRET,)):
        assert len(line.encode()) <= wire.LOG_LINE_BYTES + 20
        assert SECRET not in line


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.mailbox.REPLY_SECONDS", 1.0)
