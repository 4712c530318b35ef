"""Checks of the prefill→decode exchange: what is asked, what comes back, what the counters prove."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract import expected as e
from tests.contract.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, chat, completion, long_prompt
from tests.contract.kv_events import block_size
from tests.contract.pair import PREFILL_PARAMS, EnginePair, fresh_text

BYTES_MOVED = "vllm:nixl_bytes_transferred_sum"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
AFTER_EXPIRY = "vllm:nixl_num_notifications_after_expiry_total"
FAILED = "vllm:nixl_num_failed_transfers_total"

EXCHANGES: dict[str, tuple[str, str, Callable[[EnginePair, str], dict], Callable[[dict], str]]] = {
    "chat": (
        CHAT,
        "max_tokens",
        lambda pair, text: chat(pair, text),
        lambda reply: reply["choices"][0]["message"]["content"],
    ),
    "completion": (
        COMPLETIONS,
        "max_tokens",
        lambda pair, text: completion(pair, text),
        lambda reply: reply["choices"][0]["text"],
    ),
    "responses": (
        RESPONSES,
        "max_output_tokens",
        lambda pair, text: {"model": pair.model, "input": text, "temperature": 0, "max_output_tokens": 6},
        lambda reply: reply["output"][0]["content"][0]["text"],
    ),
    "messages": (
        MESSAGES,
        "max_tokens",
        lambda pair, text: chat(pair, text),
        lambda reply: reply["content"][0]["text"],
    ),
}
"""Per API: path, the field that limits the answer, a body, and the text of a reply."""


def prefill(pair: EnginePair, api: str, body: dict) -> dict:
    """The first leg; its params."""
    path, limit, _, _ = EXCHANGES[api]
    reply = pair.ok(pair.prefill_url, path, body | {limit: 1, "kv_transfer_params": PREFILL_PARAMS})
    return reply["kv_transfer_params"]


def check_exchange(pair: EnginePair) -> None:
    """Prefill → decode gives the text that decode alone gives, and the counters prove that the KV moved."""
    for api, (path, _, make, text_of) in EXCHANGES.items():
        body = make(pair, fresh_text(20))
        params = prefill(pair, api, body)
        assert params.keys() == e.TRANSFER_PARAMS
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert (params["transfer_mode"], params["tp_size"]) == ("pull", 1)
        assert params["remote_prefill_cached_tokens"] == 0
        assert all(isinstance(group, list) for group in params["remote_block_ids"])
        tokens = params["remote_num_tokens"]
        before = pair.metrics(pair.decode_url)
        handed = pair.ok(pair.decode_url, path, body | {"kv_transfer_params": params})
        grown = pair.grown(pair.decode_url, before, BYTES_MOVED)
        assert handed.get("kv_transfer_params") is None
        assert grown["vllm:nixl_xfer_time_seconds_count"] == grown["vllm:nixl_bytes_transferred_count"] == 1
        assert grown["vllm:nixl_bytes_transferred_sum"] > 0
        assert grown['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == tokens
        assert grown['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 0
        assert grown["vllm:external_prefix_cache_hits_total"] == tokens
        alone = pair.ok(pair.decode_url, path, body | {"cache_salt": fresh_text(2)})
        assert text_of(handed) == text_of(alone)


def check_stream_after_exchange(pair: EnginePair) -> None:
    body = chat(pair, fresh_text(20))
    params = prefill(pair, "chat", body)
    frames = pair.stream(pair.decode_url, CHAT, body | {"kv_transfer_params": params})
    alone = pair.ok(pair.decode_url, CHAT, body | {"cache_salt": fresh_text(2)})
    text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames[:-1])
    assert text == alone["choices"][0]["message"]["content"]
    assert all("kv_transfer_params" not in frame for frame in frames[:-1])


def check_silent_local_compute(pair: EnginePair) -> None:
    """Without params decode computes the prompt itself, answers 200 and says nothing: only a counter knows."""
    before = pair.metrics(pair.decode_url)
    usage = pair.ok(pair.decode_url, CHAT, chat(pair, fresh_text(20)))["usage"]
    grown = pair.grown(pair.decode_url, before)
    by_source = {
        source: grown[f'vllm:prompt_tokens_by_source_total{{source="{source}"}}']
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source["external_kv_transfer"] == 0
    assert by_source["local_compute"] > 0
    assert sum(by_source.values()) == usage["prompt_tokens"]
    assert grown["vllm:nixl_bytes_transferred_count"] == 0


def check_refusing_lets_go_of_the_kv(pair: EnginePair) -> None:
    """A request that decode refuses frees the KV that prefill keeps for it: at once if the engine refuses it; if its own
    grammar is wrong (vLLM's endpoint never sees it then) only when the lease ends."""
    usage = "vllm:kv_cache_usage_perc"
    body = completion(pair) | {"prompt": long_prompt(pair, 2 * block_size(pair) + 3)}
    met = prefill(pair, "completion", body)  # two engines that never met shake hands first, and the notice waits
    pair.ok(pair.decode_url, COMPLETIONS, body | {"kv_transfer_params": met})
    before = pair.metrics(pair.prefill_url)
    kept = prefill(pair, "completion", body)
    pinned = pair.metrics(pair.prefill_url)[usage]
    assert pinned > before[usage]
    reply = pair.post(pair.decode_url, COMPLETIONS, body | {"max_tokens": "odd", "kv_transfer_params": kept})
    assert reply.status_code == 400
    reply = pair.post(pair.decode_url, COMPLETIONS, body | {"max_tokens": 0, "kv_transfer_params": kept})
    assert reply.status_code == 400

    def free(samples: dict[str, float]) -> bool:
        pair.nudge()
        return samples[usage] < pinned

    freed = pair.settled(pair.prefill_url, free, 15)
    assert freed[AFTER_EXPIRY] == before[AFTER_EXPIRY], "the wrong one let go of nothing"


def check_unreachable_prefill(pair: EnginePair) -> None:
    """Params that lead nowhere end in 500, or in an error event once a stream has begun; a counter rises."""
    body = chat(pair, fresh_text(20))
    params = prefill(pair, "chat", body) | {"remote_port": 9, "remote_engine_id": "nobody"}
    before = pair.metrics(pair.decode_url)
    reply = pair.post(pair.decode_url, CHAT, body | {"kv_transfer_params": params})
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert error.keys() == e.ERROR
    assert error["type"] == "InternalServerError"
    opening, *frames = pair.stream(pair.decode_url, CHAT, body | {"kv_transfer_params": params})
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert frames == [{"error": error}, "[DONE]"]
    text = completion(pair, fresh_text(20), kv_transfer_params=params)
    assert pair.stream(pair.decode_url, COMPLETIONS, text) == [{"error": error}, "[DONE]"]
    assert pair.grown(pair.decode_url, before, FAILED)[FAILED] >= 3


def check_decode_pulls_only_what_it_lacks(pair: EnginePair) -> None:
    """The same long prompt again moves fewer bytes: decode keeps whole blocks; prefill reports its cached tokens."""
    size = block_size(pair)
    body = completion(pair) | {"prompt": long_prompt(pair, 2 * size + 3)}
    moved = []
    for _ in range(2):
        params = prefill(pair, "completion", body)
        before = pair.metrics(pair.decode_url)
        reply = pair.ok(pair.decode_url, COMPLETIONS, body | {"kv_transfer_params": params})
        moved.append(pair.grown(pair.decode_url, before, BYTES_MOVED)[BYTES_MOVED])
    assert moved[1] * 3 == moved[0]
    assert params["remote_prefill_cached_tokens"] == 2 * size
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * size
