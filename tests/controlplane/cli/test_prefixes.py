"""`tandem bench prefixes`: its plan, its judgement, and how it talks to an endpoint; the whole experiment is in tests/flows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from controlplane import cli
from controlplane.cli.prefix_report import Finding, Hits, Shot, report, verdict
from controlplane.cli.prefixes import Plan

SETTINGS = {"prefixes": 2, "words": 16, "repeats": 2, "tail_words": 1, "seed": 1}


# ---- the plan


def test_equal_seeds_ask_the_same_and_tails_are_always_fresh() -> None:
    plan = Plan(12, 6, 1_500, 24, 7)
    asked = list(plan.prompts())
    assert asked == list(Plan(12, 6, 1_500, 24, 7).prompts())
    assert asked != list(Plan(12, 6, 1_500, 24, 8).prompts())
    assert len(asked) == plan.count == 72
    numbers = [number for number, _ in asked]
    assert sorted(numbers) == sorted(list(range(12)) * 6) != numbers
    heads = {(number, " ".join(text.split()[:1_500])) for number, text in asked}
    tails = {tuple(text.split()[1_500:]) for _, text in asked}
    assert (len(heads), len(tails)) == (12, 72)
    assert {len(text.split()) for _, text in asked} == {1_524}
    assert len({text.split()[0] + text.split()[1] + text.split()[2] for _, text in heads}) == 12


# ---- the judgement


def shots(*had: int | None, mode: str = "kv", state: str = "exact", **more: Any) -> list[Shot]:
    """Requests for one prefix of 100 tokens, of which the engine had so many; the time follows what is left."""
    return [
        Shot(
            prefix=0, ttft=(100 - (n or 0)) / 100, prompt_tokens=100, cached=n, overlap=n, reader=f"e{at % 2}", mode=mode,
            reason="overlap", state=state, **more,
        )
        for at, n in enumerate(had)
    ]  # fmt: skip


def test_a_hit_leaves_less_than_sixty_percent_to_do() -> None:
    found = report("m", ["e0", "e1"], SETTINGS, shots(0, 96, 41, 40, 0), 5)
    assert (found.hits.of, found.hits.by_ttft, found.hits.by_router, found.hits.by_engine) == (4, 2, 2, 2)
    assert found.readers == {"e0": 3, "e1": 2}
    assert (found.mode, found.states, found.reasons) == ("kv", {"exact": 5}, {"overlap": 5})


def test_a_witness_that_says_nothing_is_not_counted() -> None:
    found = report("m", ["e0", "e1"], SETTINGS, shots(None, None, mode="random", state=""), 2)
    assert (found.hits.by_router, found.hits.by_engine) == (None, None)
    assert "by the time to the first token" in found.verdict
    assert any("--enable-prompt-tokens-details" in note for note in found.notes)


@pytest.mark.parametrize(
    ("mode", "state", "hits", "router", "finding", "says"),
    [
        ("kv", "exact", 60, 60, Finding.WORKS, "as published for kv: 60 of 60"),
        ("kv", "exact", 59, 60, Finding.WORKS, "as published"),
        ("kv", "exact", 52, 58, Finding.FAILS, "fewer than published for kv"),
        ("kv", "exact", 41, 41, Finding.FAILS, "does not work here"),
        ("kv", "degraded", 47, 0, Finding.FAILS, "the router foresaw 0"),
        ("kv", "blind", 41, 0, Finding.FAILS, "routes like one without a cache"),
        ("kv-approximate", "approximate", 55, 60, Finding.WORKS, "as published for kv-approximate: 53–60"),
        ("kv-approximate", "approximate", 44, 60, Finding.FAILS, "fewer than"),
        ("round-robin", "", 40, None, Finding.NOTHING, "as published for round-robin: 35–43"),
        ("round-robin", "", 50, None, Finding.NOTHING, "more than"),
        ("least-load", "", 38, None, Finding.NOTHING, "as published"),
        ("random", "", 20, None, Finding.NOTHING, "fewer than"),
        ("", "", 20, None, Finding.NOTHING, "nothing is published"),
    ],
)
def test_the_verdict(mode: str, state: str, hits: int, router: int | None, finding: Finding, says: str) -> None:
    found, told = verdict(mode, [state] * 72, Hits(60, 3, router, hits))
    assert found is finding
    assert says in told
    assert told.startswith(f"{hits} of 60 repeats were hits by the engines' own count")
    assert told.count(". ") <= 1


def test_a_short_run_is_measured_against_the_same_share() -> None:
    assert "as published for kv: 60 of 60" in verdict("kv", ["exact"], Hits(10, 10, 10, 10))[1]
    assert "as published" in verdict("kv", ["exact"], Hits(10, 9, 10, 9))[1], "one repeat of ten weighs six of sixty"
    assert "fewer than" in verdict("kv", ["exact"], Hits(10, 8, 10, 8))[1]
    found, says = verdict("kv", ["exact"], Hits())
    assert (found, "nothing to judge" in says) == (Finding.NOTHING, True)


def test_prompts_that_no_block_holds_show_nothing() -> None:
    """Block size 128, prompts of 89 tokens: nothing is ever found, whatever the router does."""
    why = "no longer than one KV block (128 tokens): cannot be cached"
    found = report("m", ["e0", "e1"], SETTINGS, shots(0, 0, 0, 0, uncacheable=why), 4)
    assert found.finding is Finding.NOTHING
    assert found.verdict == f"4 of 4 prompts are {why}. Ask with more --words."


def test_one_reader_shows_nothing() -> None:
    given = [*shots(0), *shots(90), *shots(90)]
    assert report("m", ["e0", "e1"], SETTINGS, given, 3).finding is Finding.NOTHING
    assert report("m", ["e0", "e1"], SETTINGS, shots(0, 90, 90), 3).finding is Finding.WORKS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (shots(90, 90), "not cold for prefix 1"),
        (
            shots(0, 90, state="degraded", because="e1=kv_events_gap"),
            "Not exact for 2 of 2 requests, mostly (2): e1=kv_",
        ),
        (shots(0, 90, fallback="prefill-connect"), "2 requests were not disaggregated and should have been"),
        ([*shots(0), *shots(0)], "One engine read every prompt"),
    ],
)
def test_what_makes_it_doubtful_is_said(given: list[Shot], says: str) -> None:
    notes = report("m", ["e0", "e1"], SETTINGS, given, 2).notes
    assert any(says in note for note in notes), notes
    assert not any("Broken off" in note for note in notes)


# ---- the endpoint


class Endpoint:
    """Looks like the router: two engines take turns, and remember prefixes by their first word."""

    def __init__(self) -> None:
        self.readers = ["p0", "p1"]
        self.explains = True
        self.uncacheable = "-"
        self.remembers = True
        self.key = ""
        self.models = ["m"]
        self.error_at = self.hold_at = -1
        self.asked: list[dict[str, Any]] = []
        self.let_go = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": name} for name in endpoint.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if endpoint.key and self.headers.get("authorization") != f"Bearer {endpoint.key}":
                    self.answer(401, {"error": {"message": "Give a valid API key."}})
                elif body["model"] not in endpoint.models:
                    self.answer(404, {"error": {"message": f"The model {body['model']!r} does not exist."}})
                elif not body.get("stream"):
                    self.answer(200, {"choices": []})
                else:
                    endpoint.stream(self, body)

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                endpoint.explain(self, "p0", None)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def explain(self, to: BaseHTTPRequestHandler, reader: str, overlap: int | None) -> None:
        if not self.explains:
            return
        candidates = [f"{engine} prefill total=0.1 overlap=0" for engine in self.readers]
        for name, value in {
            "reason": "overlap", "mode": "kv", "state": "exact", "state-because": "-", "prefill": reader, "decode": "d0",
            "fallback": "-", "overlap-because": self.uncacheable, "overlap": "unknown" if overlap is None else f"{overlap}/100",
            "candidates": "; ".join([*candidates, "d0 decode total=0.1 overlap=0", "d0 local total=0.2 overlap=0"]),
        }.items():  # fmt: skip
            to.send_header(f"x-tandem-{name}", value)

    def stream(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        number = len(self.asked)
        self.asked.append(body)
        if number == self.hold_at:
            self.let_go.wait(20)
        head = body["prompt"].split()[0]
        before = sum(earlier["prompt"].split()[0] == head for earlier in self.asked[:-1])
        cached = 96 if before and self.remembers else 0
        to.send_response(200)
        self.explain(to, self.readers[number % len(self.readers)], cached)
        to.send_header("content-type", "text/event-stream")
        to.send_header("connection", "close")
        to.end_headers()
        events: list[Any] = [{"choices": [{"text": "a"}]}, {"choices": [{"text": " b"}]}]
        if number == self.error_at:
            events = [{"choices": [{"text": "a"}]}, {"error": {"message": "The engine ended."}}]
        usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
        events.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        to.wfile.write(text.encode())
        to.close_connection = True

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    yield found
    found.close()


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(endpoint: Endpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in ("TANDEM_KEY", "TANDEM_KEY_FILE", "TANDEM_API_KEY", "TANDEM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        small = ("--prefixes", "3", "--words", "16", "--repeats", "4", "--seed", "5")
        code = cli.main(["bench", "prefixes", "--url", endpoint.url, *small, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_whole_run_without_a_control_plane(endpoint: Endpoint, bench: Bench) -> None:
    code, out, err = bench()
    assert code == 0
    assert len(endpoint.asked) == 12
    for body in endpoint.asked:
        assert (body["stream"], body["temperature"], body["max_tokens"]) == (True, 0, 4)
        assert body["stream_options"] == {"include_usage": True}
    assert "m: 3 prefixes of 16 words, 4 times each, tails of 24 words, seed 5" in out
    assert "mode: kv; state: exact (12); reasons: overlap (12)" in out
    assert "prompts read by: p0 (6), p1 (6)" in out
    assert out.count("3 of 3") >= 6
    assert "9 of 9 repeats were hits by the engines' own count: as published for kv: 60 of 60." in out
    assert err == "12 of 12 requests\n"


def test_the_exit_status_is_the_verdict(endpoint: Endpoint, bench: Bench) -> None:
    assert bench()[0] == 0
    endpoint.asked.clear()
    endpoint.remembers = False
    code, out, _ = bench()
    assert (code, "Cache-aware routing does not work here." in out) == (3, True)
    endpoint.uncacheable = "no longer than one KV block (128 tokens): cannot be cached"
    code, out, _ = bench("--json")
    assert (code, json.loads(out)["finding"]) == (4, "inconclusive")


def test_json_holds_every_request(bench: Bench) -> None:
    code, out, _ = bench("--json")
    assert code == 0
    found = json.loads(out)
    assert found["hits"]["by_engine"] == found["hits"]["by_router"] == found["hits"]["of"] == 9
    assert [len(row["shots"]) for row in found["rows"]] == [4, 4, 4]
    assert found["ready"] == ["p0", "p1"]
    assert found["settings"] == {"prefixes": 3, "repeats": 4, "words": 16, "tail_words": 24, "seed": 5}


@pytest.mark.parametrize(
    ("readers", "says"), [(["p0"], "only one ready engine that reads prompts (p0)"), ([], "no ready engine")]
)
def test_fewer_than_two_engines_are_refused(endpoint: Endpoint, bench: Bench, readers: list[str], says: str) -> None:
    endpoint.readers = readers
    code, out, err = bench()
    assert (code, out) == (1, "")
    assert says in err
    assert "tandem scale" in err
    assert endpoint.asked == []


def test_what_explains_nothing_is_refused(endpoint: Endpoint, bench: Bench) -> None:
    endpoint.explains = False
    code, out, err = bench()
    assert (code, out) == (1, "")
    assert "is it Tandem's OpenAI endpoint?" in err


def test_models(endpoint: Endpoint, bench: Bench) -> None:
    endpoint.models = ["one", "two"]
    assert "--model: name one of one, two" in bench()[2]
    assert "The model 'three' does not exist." in bench("--model", "three")[2]
    assert bench("--model", "two")[0] == 0


def test_the_key_comes_from_the_environment_or_a_file(
    endpoint: Endpoint, bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint.key = "tdm-secret"
    code, _, err = bench()
    assert code == 1
    assert "TANDEM_KEY_FILE" in err
    file = tmp_path / "key"
    file.write_text("tdm-secret\n")
    assert bench("--key-file", str(file))[0] == 0
    assert "--key-file" in bench("--key-file", str(tmp_path / "none"))[2]
    monkeypatch.setenv("TANDEM_KEY", "tdm-secret")
    code, out, err = bench()
    assert code == 0
    assert "tdm-secret" not in out + err


def test_nobody_there(bench: Bench) -> None:
    code, out, err = bench("--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "is it up, and is --url right?" in err


def test_a_stream_that_breaks_ends_it_and_what_there_is_is_printed(endpoint: Endpoint, bench: Bench) -> None:
    endpoint.error_at = 7
    code, out, err = bench()
    assert code == 1
    assert "The engine ended." in err
    assert "Broken off after 7 of 12 requests." in out


def test_ctrl_c_prints_what_there_is(endpoint: Endpoint) -> None:
    endpoint.hold_at = 5
    process = subprocess.Popen(
        [sys.executable, "-m", "controlplane.cli", "bench", "prefixes", "--url", endpoint.url, "--words", "16"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while len(endpoint.asked) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Broken off after 5 of 72 requests." in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "wrong", [("--prefixes", "1"), ("--repeats", "1"), ("--words", "0"), ("--seed", "-1"), ("--key", "tdm-x")]
)
def test_wrong_usage(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "prefixes", *wrong])
    assert left.value.code == 2
    assert wrong[0] in capsys.readouterr().err
