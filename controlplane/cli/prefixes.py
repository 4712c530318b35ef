"""`tandem bench prefixes`: the known experiment that shows whether requests go where their KV lies.

Some long prefixes, each asked several times with a fresh tail, shuffled, one request at a time; whether a repeat was a hit is
asked of three witnesses: the time to the first token, the router (`x-tandem-explain`), and the engine (`cached_tokens`). It
talks to the OpenAI endpoint alone, so that it serves a router without a control plane as well.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from controlplane.cli import prefix_report
from controlplane.cli.client import Refused, Unreachable
from controlplane.cli.prefix_report import Finding, Report, Shot
from controlplane.fleet import addresses
from controlplane.fleet.addresses import reachable
from controlplane.fleet.config import Config, secret_file
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.outbound import proxy_for

LONGEST_WAIT = 600.0
"""Seconds for one answer: a CPU reads a long prompt for a minute."""
OUTPUT_TOKENS = 4
EXIT_CODES = {Finding.WORKS: 0, Finding.FAILS: 3, Finding.NOTHING: 4}
_EVERYDAY = (
    "able about above add again ago air allow also always among angle answer apple area arm arrive art ask away bank "
    "bath bear beauty before best big bird bit board boat bone born bought bread bright broad broke brown busy but "
    "buy can car card carry case cat cause center chair chance change chart check chief city claim clean clear climb "
    "clock close coast coat cook corner could course cover cow create crop crowd cry dance day dead decide deep "
    "design did divide dog dollar done door down dream drink drive drop dry duck during early east egg eight else end "
    "enough equal even event ever every exact excite eye fact fall famous fast father feel feet felt fig fight fill "
    "fire first flow flower food forest found free fresh friend from game garden gas gather gentle get gone grass "
    "group guide hair happen hard has hat have hear heart heat heavy held her hit hold hole home hour house human "
    "hunt hurry idea inch insect iron island job just keep kept key kill king know lake land last law lay learn leave "
    "led leg level lift like line listen little log long love major make man many map mass"
)
WORDS = tuple(_EVERYDAY.split())
"""About one token each for most tokenizers."""


def run(settings: Config, arguments: argparse.Namespace) -> int:
    """The whole command; returns the exit code of what it found (`EXIT_CODES`). Raises `TandemError` (refused, unreachable, wrong input) and `KeyboardInterrupt`, after printing what
    there is by then."""
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1 << 31)
    url = _endpoint(arguments.url) if arguments.url else f"http://{reachable(settings.bind)}:{settings.openai_port}"
    with Endpoint(url, _key(settings, arguments.key_file), arguments.model) as endpoint:
        readers = endpoint.readers()
        if len(readers) < 2:
            raise Refused(_too_few(endpoint.model, readers), status=503)
        plan = Plan(arguments.prefixes, arguments.repeats, arguments.words, arguments.tail_words, seed)
        shots: list[Shot] = []
        finding = Finding.NOTHING
        try:
            with _progress(plan.count) as advance:
                for prefix, text in plan.prompts():
                    shots.append(endpoint.ask(prefix, text))
                    advance()
        finally:  # also of a run that was broken off
            if shots:
                report = prefix_report.report(endpoint.model, readers, plan.settings, shots, plan.count)
                _print(report, as_json=arguments.json)
                finding = report.finding
    return EXIT_CODES[finding]


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(prefix_report.as_plain(report), indent=2))
    else:
        prefix_report.show(report)


def _too_few(model: str, readers: list[str]) -> str:
    have = f"has only one ready engine that reads prompts ({readers[0]})" if readers else "has no ready engine"
    return (
        f"{model} {have}: the experiment asks to which of several a repeated prefix goes. Wait until a second one is ready, or "
        "add one (tandem scale NAME --prefill 2, or --aggregated 2; a router alone: one more URL)"
    )


class Plan:
    """What is asked, in which order. Equal seeds give equal plans."""

    def __init__(self, prefixes: int, repeats: int, words: int, tail_words: int, seed: int) -> None:
        self.settings = {
            "prefixes": prefixes, "repeats": repeats, "words": words, "tail_words": tail_words, "seed": seed,
        }  # fmt: skip
        self.count = prefixes * repeats
        self._texts = [_words(words, seed, number) for number in range(prefixes)]
        self._order = [number for number in range(prefixes) for _ in range(repeats)]
        random.Random(seed).shuffle(self._order)
        self._tail_words = tail_words
        self._seed = seed

    def prompts(self) -> Iterator[tuple[int, str]]:
        """(number of the prefix, whole prompt)."""
        for turn, number in enumerate(self._order):
            yield number, f"{self._texts[number]} {_words(self._tail_words, self._seed, 'tail', turn)}"


def _words(count: int, *seed: object) -> str:
    return " ".join(random.Random(repr(seed)).choices(WORDS, k=count))


class Endpoint:
    """One model at an OpenAI endpoint of Tandem."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=self.url,
            headers={"x-tandem-explain": "1"} | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(LONGEST_WAIT, connect=10),
            transport=httpx.HTTPTransport(proxy=proxy_for(self.url)),
        )
        self.model = model

    def __enter__(self) -> Endpoint:
        if not self.model:
            self.model = self._only_model()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def _only_model(self) -> str:
        with self._answer("GET", "/v1/models") as response:
            names = [model["id"] for model in json.loads(response.read())["data"]]
        if len(names) != 1:
            raise InvalidInput(f"--model: name one of {', '.join(names) or 'no models at all'}", field="--model")
        return str(names[0])

    def readers(self) -> list[str]:
        """The engines that could read a prompt now, by id: what the router weighed for a short one."""
        body = {"model": self.model, "prompt": _words(3, secrets.token_hex(4)), "max_tokens": 1}
        with self._answer("POST", "/v1/completions", body) as response:
            response.read()
            headers = response.headers
        if "x-tandem-reason" not in headers:
            raise Refused(f"{self.url} explains nothing: is it Tandem's OpenAI endpoint?", status=200)
        candidates = re.findall(r"(\S+) (\S+) total=", headers.get("x-tandem-candidates", ""))
        parts = {part for _, part in candidates}
        part = "prefill" if "prefill" in parts else "alone"
        return sorted({engine for engine, could in candidates if could == part})

    def ask(self, prefix: int, text: str) -> Shot:
        """One prompt, streamed, timed. Raises `Refused` for an answer that is none."""
        body = {
            "model": self.model, "prompt": text, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began = time.perf_counter()
        ttft: float | None = None
        usage: dict[str, Any] = {}
        with self._answer("POST", "/v1/completions", body) as response:
            for line in response.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                if ttft is None:
                    ttft = time.perf_counter() - began
                event = json.loads(line[5:])
                if "error" in event:
                    raise Refused(f"the stream broke: {event['error']}", status=502)
                usage = event.get("usage") or usage
            headers = response.headers
        if ttft is None:
            raise Refused("an answer came without a token", status=502)
        return _shot(prefix, ttft, usage, headers)

    @contextmanager
    def _answer(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response, self.model)
                yield response
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"no answer from {self.url} ({error}): is it up, and is --url right?") from None


def _shot(prefix: int, ttft: float, usage: Mapping[str, Any], headers: httpx.Headers) -> Shot:
    def told(name: str) -> str:
        value = headers.get(f"x-tandem-{name}", "-")
        return "" if value == "-" else value

    overlap = re.fullmatch(r"(\d+)/(\d+)", told("overlap"))
    details = usage.get("prompt_tokens_details") or {}
    return Shot(
        prefix=prefix,
        ttft=ttft,
        prompt_tokens=usage.get("prompt_tokens") or (int(overlap[2]) if overlap else None),
        cached=details.get("cached_tokens"),
        overlap=int(overlap[1]) if overlap else None,
        reader=told("prefill") or told("decode"),
        mode=told("mode"),
        reason=told("reason"),
        fallback=told("fallback"),
        state=told("state"),
        because=told("state-because"),
        uncacheable=told("overlap-because"),
    )


def _refusal(response: httpx.Response, model: str) -> Refused:
    status = response.status_code
    try:
        says = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        says = f"{response.url.host} answered {status}"
    if status == 401:
        says += " Set TANDEM_KEY_FILE or TANDEM_KEY to a key of scope inference, or give --key-file."
    elif status == 400 and "context length" in says:
        says += " Choose fewer --words."
    return Refused(f"{model}: {says}" if model else says, status=status)


def _endpoint(text: str) -> str:
    try:
        return addresses.web_url(text.rstrip("/").removesuffix("/v1"))
    except InvalidInput as error:
        raise InvalidInput(f"--url: {error.message}", field="--url") from None


def _key(settings: Config, file: str) -> str:
    if not file:
        return settings.key
    try:
        return addresses.key(secret_file(file))
    except InvalidInput as error:
        raise InvalidInput(f"--key-file: {error.message}", field="--key-file") from None


@contextmanager
def _progress(count: int) -> Iterator[Any]:
    """Yields what is to be called after each request. On a pipe: a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        done = 0

        def line() -> None:
            nonlocal done
            done += 1
            if done % 12 == 0:
                print(f"{done} of {count} requests", file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("requests"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=count)
        yield lambda: progress.advance(task)
