"""`tandem bench prefixes` against the router's program and stand-in engines that hold 14,816 tokens of KV each: too little
for twelve prefixes in one, enough in two. Judged by the router's and the engines' own counts, never by time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

from controlplane.cli import prefix_report
from controlplane.cli.prefixes import EXIT_CODES, WORDS
from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, FleetSnapshot, RoutingMode, RoutingPolicy, SnapshotDeployment, encode
from tests.frontend_api.client import ask
from tests.frontend_api.test_kv_standins import Standin
from tests.frontend_api.test_process import Program

KV_BLOCKS = 926
"""Of 16 tokens: 14,816."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that makes one token of each word, as a large one does of everyday words."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: number for number, word in enumerate(("<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class Fleet:
    """Two engines that read prompts, one more that only answers where `disaggregated`, and the router's program."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = str(model)
        self.engines: list[Standin] = []
        self.router: Program | None = None

    async def start(self, mode: RoutingMode, *, disaggregated: bool = False, events: bool = True) -> None:
        """`events`: False: the engines are asked for them and publish none."""
        roles = [Role.PREFILL, Role.PREFILL, Role.DECODE] if disaggregated else [Role.AGGREGATED] * 2
        given = ("--kv-blocks", str(KV_BLOCKS), "--max-model-len", "2048", "--tokenizer", self._model)
        fast = ("--prefill-tokens-per-second", "200000", "--itl-ms", "0.1")
        self.engines += [Standin(f"{role}-{n}", role, *given, *fast) for n, role in enumerate(roles)]
        await asyncio.gather(*(engine.start() for engine in self.engines))
        if not events:
            await asyncio.gather(*(engine.fault("no-events") for engine in self.engines))
        deployment = SnapshotDeployment(
            name="dep",
            served_name="m",
            routing=RoutingPolicy(mode=mode, disaggregate=Disaggregate.ALWAYS),
            engines=tuple(engine.spec() for engine in self.engines),
            tokenizer=self._model,
        )
        fleet = self._folder / "fleet.json"
        fleet.write_bytes(encode(FleetSnapshot(version=1, deployments=(deployment,))))
        self.router = await Program(self._folder, "--no-auth", "--fleet", str(fleet)).up()
        known = {RoutingMode.KV: "exact", RoutingMode.KV_APPROXIMATE: "approximate"}.get(mode)
        if known:
            await self.stands(known)

    async def stands(self, state: str) -> None:
        async with asyncio.timeout(30):
            while f'kv_state{{deployment="dep",state="{state}"}} 1' not in await self._metrics():
                await asyncio.sleep(0.05)

    async def serve_one_prompt_each(self) -> None:
        assert self.router is not None
        for number in range(2):
            prompt = " ".join(WORDS[number : number + 100])
            body = {"model": "m", "prompt": prompt, "max_tokens": 1}
            assert (await ask(self.router.port, "/v1/completions", body)).status == 200

    async def _metrics(self) -> str:
        assert self.router is not None
        return (await ask(self.router.port, "/metrics")).body.decode()

    async def bench(self) -> dict[str, Any]:
        """What the command says, in JSON."""
        assert self.router is not None
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "controlplane.cli", "bench", "prefixes", "--url",
            f"http://127.0.0.1:{self.router.port}/v1", "--seed", "36", "--json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert out, err.decode()
        report: dict[str, Any] = json.loads(out)
        assert process.returncode == EXIT_CODES[prefix_report.Finding(report["finding"])]
        prefix_report.show(msgspec.convert(report, prefix_report.Report))
        assert (report["requests"], report["hits"]["of"]) == (72, 60)
        assert len(report["readers"]) == 2
        assert {shot["prompt_tokens"] for row in report["rows"] for shot in row["shots"]} == {1_524}
        return report

    async def stop(self) -> None:
        if self.router is not None:
            self.router.kill()
        for engine in self.engines:
            await engine.stop()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path, model: Path) -> AsyncIterator[Fleet]:
    found = Fleet(tmp_path, model)
    yield found
    await found.stop()


@pytest.mark.parametrize("disaggregated", [False, True], ids=["aggregated", "disaggregated"])
async def test_with_events_every_prefix_is_found_again(fleet: Fleet, disaggregated: bool) -> None:
    await fleet.start(RoutingMode.KV, disaggregated=disaggregated)
    report = await fleet.bench()
    assert report["hits"]["by_engine"] >= 58
    assert report["hits"]["by_router"] >= 58
    assert report["states"] == {"exact": 72}
    assert "as published for kv: 60 of 60" in report["verdict"]
    assert report["finding"] == "works"
    reading = {name for name in report["readers"] if not name.startswith("decode")}
    assert set(report["ready"]) == reading == set(report["readers"])


async def test_without_events_what_was_sent_is_remembered(fleet: Fleet) -> None:
    await fleet.start(RoutingMode.KV_APPROXIMATE)
    report = await fleet.bench()
    assert report["hits"]["by_engine"] >= 53
    assert report["hits"]["by_router"] >= 53
    assert report["states"] == {"approximate": 72}


async def test_turns_find_a_prefix_by_chance(fleet: Fleet) -> None:
    await fleet.start(RoutingMode.ROUND_ROBIN)
    report = await fleet.bench()
    assert 30 <= report["hits"]["by_engine"] <= 52
    assert report["hits"]["by_router"] is None
    assert set(report["readers"].values()) == {36}


async def test_events_that_never_come_leave_chance_and_it_is_said(fleet: Fleet) -> None:
    await fleet.start(RoutingMode.KV, events=False)
    await fleet.serve_one_prompt_each()
    await fleet.stands("blind")  # until then what was sent is expected to be told
    report = await fleet.bench()
    assert report["states"] == {"blind": 72}
    assert report["hits"]["by_router"] == 0
    assert 25 <= report["hits"]["by_engine"] <= 57
    assert report["hits"]["by_engine"] > report["hits"]["by_router"]
    assert report["finding"] == "does-not-work"
    assert "does not work here" in report["verdict"] or "like one without a cache" in report["verdict"]
