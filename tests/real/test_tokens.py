"""The router's token ids are vLLM's: of its own request models and renderer, and of a running engine's `/tokenize`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend_api.formats.openai import ENDPOINTS
from frontend_api.tokens.check import mismatches, probes
from frontend_api.tokens.tokenizer import Tokenizer
from tests.frontend_api.tiny_model import write_model
from tests.real.conftest import Site
from tests.real.engines import KEY, MODEL
from tests.real.prompt_cases import (
    CHATS,
    KNOWN,
    OTHERS,
    PARTS_TEMPLATE,
    TEXT_TEMPLATE,
    TEXTS,
    WHOLE_TEMPLATE,
    Case,
    damaged,
)
from workers import tokenizer_folder
from workers.runtimes import EngineRuntime

REST = OTHERS + damaged(600, seed=7)
TEMPLATES = {"its own": None, "text": TEXT_TEMPLATE, "parts": PARTS_TEMPLATE, "whole": WHOLE_TEMPLATE}


@pytest.fixture(scope="session")
def engines_ids(model_path: Path, runtime_script: Callable[..., str]) -> dict[str, list[Any]]:
    """What vLLM makes of KNOWN and then REST, by template."""
    script = str(Path(__file__).with_name("render_prompts.py"))
    asked = json.dumps([list(TEMPLATES.values()), KNOWN + REST])
    answers = json.loads(runtime_script(script, str(model_path), stdin=asked))
    return dict(zip(TEMPLATES, answers, strict=True))


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, model_path: Path, tmp_path: Path) -> Tokenizer:
    """Of the real model with that template."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path / name, tmp_path)
    if (template := TEMPLATES[request.param]) is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return Tokenizer(tmp_path)


def mine(tokenizer: Tokenizer, case: Case) -> list[int] | None:
    path, body = case
    ids = tokenizer.token_ids(ENDPOINTS[path], json.dumps(body).encode())
    return None if ids is None else list(ids)


def test_every_known_request_has_vllms_ids(
    tokenizer: Tokenizer, engines_ids: dict[str, list[Any]], request: pytest.FixtureRequest
) -> None:
    theirs = engines_ids[request.node.callspec.params["tokenizer"]][: len(KNOWN)]
    assert tokenizer.caches_segments
    for case, expected in zip(KNOWN, theirs, strict=True):
        assert mine(tokenizer, case) == expected, case


def test_no_request_has_other_ids_than_vllms(
    tokenizer: Tokenizer, engines_ids: dict[str, list[Any]], request: pytest.FixtureRequest
) -> None:
    theirs = engines_ids[request.node.callspec.params["tokenizer"]][len(KNOWN) :]
    known = 0
    for case, expected in zip(REST, theirs, strict=True):
        if isinstance(expected, list) and (ids := mine(tokenizer, case)) is not None:
            assert ids == expected, case
            known += 1
    assert known > len(REST) // 3


def ask(site: Site, body: bytes) -> bytes:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    reply = httpx.post(site.aggregated.url + "/tokenize", content=body, headers=headers, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.content


@pytest.mark.parametrize(("path", "body"), CHATS + TEXTS)
def test_a_running_engine_says_the_same(site: Site, model_path: Path, path: str, body: dict[str, Any]) -> None:
    tokenizer = Tokenizer(model_path)
    asked = body | {"model": MODEL}
    if asked.get("continue_final_message"):
        asked["add_generation_prompt"] = False
    theirs = json.loads(ask(site, json.dumps(asked).encode()))["tokens"]
    assert mine(tokenizer, (path, body)) == theirs


def test_the_probes_find_the_engines_own_tokenizer(
    site: Site, runtime: EngineRuntime, model_path: Path, tmp_path: Path
) -> None:
    mine = Tokenizer(model_path)
    asked = probes(MODEL, mine.marks)
    answers = {probe: json.loads(ask(site, probe.body))["tokens"] for probe in asked}
    assert len(answers) == 10
    assert mismatches(mine, answers) == []
    effective = tokenizer_folder.ensure(model_path, (), runtime=runtime, cache=tmp_path / "cache", progress=print)
    assert effective.digest
    assert mismatches(Tokenizer(effective.folder), answers) == []
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    assert len(mismatches(Tokenizer(tmp_path), answers)) == 7, "all chats, no text"


LOADED = """
import json, sys
from vllm.tokenizers import get_tokenizer
samples = json.load(sys.stdin)
ids = []
for folder in sys.argv[1:]:
    tokenizer = get_tokenizer(folder)
    ids.append([tokenizer.encode(text, add_special_tokens=special) for text in samples for special in (True, False)])
print(json.dumps(ids))
"""
REBUILT = ("Qwen2Tokenizer", "LlamaTokenizer")
"""Classes that `transformers` builds anew from vocabulary and merges."""
SAMPLES = [
    "  Gro\u0308ße  of 1234 crates\n\n\tin\u00a0世界 🙂?",
    "I'LL we'll <|im_start|>user\nx<|im_end|>",
    "<s> a </s>",
    "x",
]


def test_a_tokenizer_that_is_built_anew_is_read_as_it_came_out(
    runtime: EngineRuntime, runtime_script: Callable[..., str], tmp_path: Path
) -> None:
    models = [write_model(tmp_path / kind, tokenizer_class=kind, eos_token="<|im_end|>") for kind in REBUILT]
    script = tmp_path / "loaded.py"
    script.write_text(LOADED)
    theirs = json.loads(runtime_script(str(script), *map(str, models), stdin=json.dumps(SAMPLES)))
    bodies = [{"prompt": text, "add_special_tokens": special} for text in SAMPLES for special in (True, False)]
    for kind, model, expected in zip(REBUILT, models, theirs, strict=True):
        made = tokenizer_folder.ensure(model, (), runtime=runtime, cache=tmp_path / "cache", progress=print)
        assert made.digest
        as_made, as_it_lies = (
            [mine(Tokenizer(folder), ("/v1/completions", body)) for body in bodies] for folder in (made.folder, model)
        )
        assert as_made == expected, kind
        assert as_it_lies != expected, "else this proves nothing"
