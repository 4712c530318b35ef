"""What routers say about their evidence for cache-aware routing, in words. Pure.

Routers tell reasons by code (`CacheState`), as headers and metrics do; whoever reads a page should not have to look one up.
"""

from __future__ import annotations

from controlplane.fleet.wire import CacheState

REASONS = {
    "not-heard": "no KV events heard yet",
    "replay-running": "restarted: its first KV events are being fetched",
    "saved-index-unproved": "known from a saved index, which KV events have not confirmed yet",
    "known-in-part": "KV from before the first event, or from a gap between events, is not known",
    "kv_index_full": "more KV blocks than a router may remember; raise TANDEM_KV_INDEX_BLOCKS",
    "kv_other_cache_groups": "a hit also needs a sliding window or a state that KV events do not show in full",
    "kv_in_lower_tier": "KV in CPU memory or on disk is not counted",
    "kv_rank_unknown": "several data-parallel ranks, and the engine itself chooses which one takes a request",
    "kv_events_disabled": "no KV events are published",
    "kv_claims_refused": "its node reports KV values that cannot be right: a block size, a count or an address is out of bounds",
    "kv_ranks_not_followed": "it has more data-parallel ranks than a router follows; engines with fewer come first",
    "kv_events_not_observed": "a prompt was computed, and no KV event about it came within 10 s: no events arrive, or those of another engine",
    "kv_events_replay_only": "KV events arrive only late, by replay: the publisher connects instead of binding, or its port cannot be reached",
    "kv_events_gap": "KV events were lost and cannot be replayed; all is known again once the engine has replaced all of its KV",
    "kv_events_silent": "the replay of KV events no longer answers",
    "kv_events_excessive": "its KV events take more of the router than any engine needs; they are followed with pauses",
    "kv_events_ambiguous": "two sources send KV events from one address, or the replay belongs to another engine",
    "kv_block_mismatch": "the block size in KV events differs from the one that the engine reports",
    "tokenization_mismatch": "the engine's token ids differ from the router's: another chat template, or other tokenizer files",
    "prompt_tokens_mismatch": "the engine counts a different number of prompt tokens from the router",
    "tokenization_unverified": "the engine did not answer when asked for its token ids",
}
"""By code."""
_SHOWN = 3
_FEW = 4
"""Prompts, of which fewer tell nothing."""


def sentence(cache: CacheState) -> str:
    """How exact cache-aware routing is, and why it is not. Engines of one reason stand together, a few by name."""
    alike: dict[str, list[str]] = {}
    for who, reason in cache.reasons.items():
        alike.setdefault(reason, []).append(who)
    why = "; ".join(_one(reason, engines) for reason, engines in alike.items())
    return f"Cache-aware routing is {cache.state}{f': {why}' if why else ''}.{_of_short(cache)}"


def _of_short(cache: CacheState) -> str:
    """Said where it explains why nothing is found in any cache."""
    if cache.short_prompts < _FEW or 2 * cache.short_prompts < cache.prompts:
        return ""
    return (
        f" Of the last {cache.prompts} prompts {cache.short_prompts} are no longer than one KV block ({cache.short_block} tokens): "
        "they cannot be cached."
    )


def _one(reason: str, engines: list[str]) -> str:
    more = len(engines) - _SHOWN
    where = [] if "*" in engines else [", ".join(engines[:_SHOWN]) + (f" and {more} more" if more > 0 else "")]
    code = [reason] if reason in REASONS else []
    source = ": ".join(where + code)
    return REASONS.get(reason, reason) + (f" ({source})" if source else "")
