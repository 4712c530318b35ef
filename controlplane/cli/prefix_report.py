"""What the prefix experiment showed: hits by three witnesses, a table, and a sentence against the published figures. Pure but
for printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

WARM_SHARE = 0.6
"""A repeat is a hit under this share of its prefix's first: of the seconds, or of the tokens left to compute."""
PUBLISHED_OF = 60
PUBLISHED = {
    "kv": (60, 60),
    "kv-approximate": (53, 60),
    "round-robin": (35, 43),
    "least-load": (35, 43),  # one request at a time: the loads are equal, and engines take turns
    "random": (37, 41),
}
"""Hits of 60, by one author on Dynamo with two workers of 14,816 tokens each."""
CACHE_AWARE = ("kv", "kv-approximate")
WITHOUT_EVENTS = (39, 44)
"""The same, asked for cache-aware routing by events that never came."""


class Shot(Struct):
    """One request. `ttft`: seconds. None: nobody told."""

    prefix: int
    ttft: float
    prompt_tokens: int | None = None
    cached: int | None = None
    """Tokens that the engine says it had."""
    overlap: int | None = None
    """Tokens that the router expected it to have."""
    reader: str = ""
    """The engine that read the prompt."""
    mode: str = ""
    reason: str = ""
    fallback: str = ""
    state: str = ""
    because: str = ""
    uncacheable: str = ""
    """Why nothing of it can be cached."""

    def had(self, tokens: int | None) -> bool | None:
        """Whether so many known tokens leave few enough to compute."""
        if tokens is None or not self.prompt_tokens:
            return None
        return self.prompt_tokens - tokens < WARM_SHARE * self.prompt_tokens


class Hits(Struct):
    """Repeats that were hits. None: that witness does not testify."""

    of: int = 0
    by_ttft: int = 0
    by_router: int | None = None
    by_engine: int | None = None

    def count(self, first: Shot, repeat: Shot) -> None:
        self.of += 1
        self.by_ttft += repeat.ttft < WARM_SHARE * first.ttft
        if (hit := repeat.had(repeat.overlap)) is not None:
            self.by_router = (self.by_router or 0) + hit
        if (hit := repeat.had(repeat.cached)) is not None:
            self.by_engine = (self.by_engine or 0) + hit


class Row(Struct):
    """One prefix: its first request, and its repeats."""

    prefix: int
    shots: list[Shot]
    hits: Hits


class Finding(StrEnum):
    """What it shows of cache-aware routing."""

    WORKS = "works"
    FAILS = "does-not-work"
    NOTHING = "inconclusive"


class Report(Struct):
    model: str
    mode: str
    states: dict[str, int]
    """Requests by how exact cache-aware routing was."""
    settings: dict[str, int]
    requests: int
    planned: int
    ready: list[str]
    """Engines that could read a prompt when it began."""
    readers: dict[str, int]
    """Requests by the engine that read the prompt."""
    reasons: dict[str, int]
    """Requests by why they went there."""
    hits: Hits
    rows: list[Row]
    finding: Finding
    verdict: str
    notes: list[str]


def report(model: str, ready: Sequence[str], settings: dict[str, int], shots: Sequence[Shot], planned: int) -> Report:
    """What the requests so far show."""
    by_prefix: dict[int, list[Shot]] = {}
    for shot in shots:
        by_prefix.setdefault(shot.prefix, []).append(shot)
    whole, rows = Hits(), []
    for prefix, mine in sorted(by_prefix.items()):
        hits = Hits()
        for repeat in mine[1:]:
            hits.count(mine[0], repeat)
            whole.count(mine[0], repeat)
        rows.append(Row(prefix, mine, hits))
    mode = Counter(shot.mode for shot in shots).most_common(1)[0][0]
    finding, sentence = verdict(mode, [shot.state for shot in shots], whole)
    if short := Counter(shot.uncacheable for shot in shots if shot.uncacheable):
        why, times = short.most_common(1)[0]
        if 2 * times > len(shots):
            finding, sentence = Finding.NOTHING, f"{times} of {len(shots)} prompts are {why}. Ask with more --words."
    if len({shot.reader for shot in shots}) < 2:
        finding = Finding.NOTHING
    return Report(
        model=model,
        mode=mode,
        states=dict(Counter(shot.state for shot in shots if shot.state)),
        settings=settings,
        requests=len(shots),
        planned=planned,
        ready=list(ready),
        readers=dict(sorted(Counter(shot.reader for shot in shots).items())),
        reasons=dict(Counter(shot.reason for shot in shots).most_common()),
        hits=whole,
        rows=rows,
        finding=finding,
        verdict=sentence,
        notes=[*_notes(shots, rows, whole, planned)],
    )


class Range(NamedTuple):
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"


def published(mode: str, states: Sequence[str]) -> Range | None:
    """Published hits of 60 for what ran here. Cache-aware routing without evidence is compared as such."""
    if mode == "kv" and states and all(state == "blind" for state in states):
        return Range(*WITHOUT_EVENTS)
    return Range(*PUBLISHED[mode]) if mode in PUBLISHED else None


def verdict(mode: str, states: Sequence[str], hits: Hits) -> tuple[Finding, str]:
    """What it shows, in a word and in a sentence. The engine's own count decides, where there is one; a mode that is not
    cache-aware shows nothing of cache-aware routing."""
    if not hits.of:
        return Finding.NOTHING, "No prefix was repeated yet: there is nothing to judge."
    found, witness = (hits.by_engine, "by the engines' own count") if hits.by_engine is not None else (None, "")
    if found is None:
        found, witness = hits.by_ttft, "by the time to the first token"
    here = f"{found} of {hits.of} repeats were hits {witness}"
    share = found * PUBLISHED_OF / hits.of
    expected = published(mode, states)
    if expected is None:
        return Finding.NOTHING, f"{here}; nothing is published for the mode {mode or 'of this endpoint'}."
    if mode == "kv" and expected == WITHOUT_EVENTS:
        return Finding.FAILS, (
            f"{here} (published for kv without events: {expected} of {PUBLISHED_OF}): the router knows nothing of the engines' "
            "KV, and routes like one without a cache."
        )
    against = f"published for {mode}: {expected} of {PUBLISHED_OF}"
    foreseen = hits.by_router if hits.by_router is not None else found
    if mode == "kv" and min(share, foreseen * PUBLISHED_OF / hits.of) <= WITHOUT_EVENTS[1]:
        return Finding.FAILS, (
            f"{here}, and the router foresaw {foreseen}: that is what a router without events gives "
            f"({Range(*WITHOUT_EVENTS)}); {against}. Cache-aware routing does not work here."
        )
    slack = PUBLISHED_OF / hits.of if hits.of < PUBLISHED_OF else 1  # one repeat of a short run weighs more
    aware = mode in CACHE_AWARE
    if share < expected.low - slack:
        return Finding.FAILS if aware else Finding.NOTHING, f"{here}: fewer than {against}."
    how = "as" if share <= expected.high + slack else "more than"
    return Finding.WORKS if aware else Finding.NOTHING, f"{here}: {how} {against}."


def _notes(shots: Sequence[Shot], rows: Sequence[Row], hits: Hits, planned: int) -> list[str]:
    notes = []
    if len(shots) < planned:
        notes.append(f"Broken off after {len(shots)} of {planned} requests.")
    warm = [str(row.prefix + 1) for row in rows if row.shots[0].had(row.shots[0].cached)]
    if warm:
        notes.append(f"The first request was not cold for prefix {', '.join(warm)}: give no --seed, or another one.")
    because = Counter(shot.because for shot in shots if shot.because and shot.state != "exact")
    if because:
        reason, times = because.most_common(1)[0]
        notes.append(f"Not exact for {because.total()} of {len(shots)} requests, mostly ({times}): {reason}.")
    if shots[0].state and all(shot.overlap is None for shot in shots):
        notes.append("The router knows no prompt's tokens: load alone decided.")
    if hits.of and hits.by_engine is None:
        notes.append("The engines report no cached tokens (vLLM: --enable-prompt-tokens-details).")
    elif hits.by_engine is not None and abs(hits.by_engine - hits.by_ttft) > hits.of / 10:
        notes.append(
            "Time and the engines' count disagree: the machine is noisy, or the prefixes are too short to be felt."
        )
    if (
        hits.by_engine is not None
        and hits.by_router is not None
        and abs(hits.by_engine - hits.by_router) > hits.of / 10
    ):
        notes.append("Router and engines disagree about what was there: its evidence or its token ids are wrong.")
    fallbacks = Counter(shot.fallback for shot in shots if shot.fallback)
    if fallbacks:
        notes.append(
            f"{fallbacks.total()} requests were not disaggregated and should have been: {', '.join(fallbacks)}."
        )
    if len({shot.reader for shot in shots}) < 2:
        notes.append(
            "One engine read every prompt, so that nothing was shown about the choice between several: see the reasons "
            "(local-cheaper: routing.disaggregate is auto; always sends each prompt to the prefill pool)."
        )
    return notes


def as_plain(report: Report) -> Any:
    """For JSON."""
    return msgspec.to_builtins(report)


def show(report: Report) -> None:
    """Print it for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # a pipe has no width: nothing is folded or cut for it
    given = report.settings
    words = f"{given['prefixes']} prefixes of {given['words']} words, {given['repeats']} times each"
    console.print(Text(f"{report.model}: {words}, tails of {given['tail_words']} words, seed {given['seed']}"))
    states = ", ".join(f"{state} ({count})" for state, count in report.states.items()) or "not cache-aware"
    readers = ", ".join(f"{engine} ({count})" for engine, count in report.readers.items())
    reasons = ", ".join(f"{reason} ({count})" for reason, count in report.reasons.items())
    console.print(Text(f"mode: {report.mode}; state: {states}; reasons: {reasons}"))
    console.print(Text(f"prompts read by: {readers}\n"))
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=True)
    engines = {engine: chr(ord("A") + n % 26) for n, engine in enumerate(report.readers)}
    total = report.hits
    for title, footer, justify in (
        ("PREFIX", "all", "left"),
        ("TOKENS", "", "right"),
        ("COLD ms", "", "right"),
        ("REPEATS ms", "", "left"),
        ("HITS BY TTFT", f"{total.by_ttft} of {total.of}", "right"),
        ("ROUTER", _of(total.by_router, total.of), "right"),
        ("ENGINE", _of(total.by_engine, total.of), "right"),
        ("READ BY", " ".join(f"{letter}={engine}" for engine, letter in engines.items()), "left"),
    ):
        table.add_column(title, footer, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in report.rows:
        first, *repeats = row.shots
        hits = row.hits
        table.add_row(
            str(row.prefix + 1),
            str(first.prompt_tokens or "-"),
            _ms(first.ttft),
            " ".join(map(_ms, (shot.ttft for shot in repeats))),
            f"{hits.by_ttft} of {hits.of}",
            _of(hits.by_router, hits.of),
            _of(hits.by_engine, hits.of),
            "".join(engines[shot.reader] for shot in row.shots),
        )
    console.print(table)
    console.print(Text(f"\n{report.verdict}", style="bold"))
    for note in report.notes:
        console.print(Text(note, style="yellow"))


def _of(hits: int | None, of: int) -> str:
    return "not told" if hits is None else f"{hits} of {of}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"
