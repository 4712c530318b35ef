"""Request bodies that the checks share, and prompts that nobody has sent before."""

from __future__ import annotations

from tests.contract.pair import EnginePair, fresh_text

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)


def chat(pair: EnginePair, text: str = "Name a colour.", **more: object) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"model": pair.model, "messages": messages, "temperature": 0, "max_tokens": 6} | more


def completion(pair: EnginePair, text: str = "Red, green,", **more: object) -> dict:
    return {"model": pair.model, "prompt": text, "temperature": 0, "max_tokens": 6} | more


def long_prompt(pair: EnginePair, tokens: int) -> list[int]:
    """A prompt of just so many tokens that nobody has sent before."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += pair.ok(pair.prefill_url, "/tokenize", {"prompt": fresh_text(tokens)})["tokens"]
    return ids[:tokens]
