"""KV events as publishers write them: batches of maps (vLLM 0.32), or of rows as older versions send them. Pure.

Unknown fields and positions after the last known one are passed over; block hashes may be numbers or bytes
(`distributed/kv_events.py` of vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct


class Stored(Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class Removed(Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(Struct, tag="AllBlocksCleared"):
    pass


class StoredRow(Struct, tag="BlockStored", array_like=True):
    """As older versions send it: positions after the last known one are passed over."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    block_mm_infos: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class RemovedRow(Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class ClearedRow(Struct, tag="AllBlocksCleared", array_like=True):
    pass


class Batch(Struct, array_like=True):
    """Of maps, all of them understood: what an engine of today sends."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class AnyBatch(Struct, array_like=True):
    ts: float
    events: list[Raw]
    data_parallel_rank: int | None = None


_batch = msgspec.msgpack.Decoder(Batch)
_any = msgspec.msgpack.Decoder(AnyBatch)
_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
_row = msgspec.msgpack.Decoder(StoredRow | RemovedRow | ClearedRow)


UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What the functions here raise for bytes that are nothing of the kind, or are nested too deep."""

Event = Stored | Removed | Cleared | StoredRow | RemovedRow | ClearedRow


def batch(payload: bytes) -> tuple[Sequence[Event | None], int | None]:
    """The events of a batch, None for each that is not understood, and the rank that sends it. Raises `UNREADABLE` for what is
    no batch."""
    try:
        known = _batch.decode(payload)
    except UNREADABLE:
        others = _any.decode(payload)
        return [_event(data) for data in others.events], others.data_parallel_rank
    return known.events, known.data_parallel_rank


def _event(data: Raw) -> Event | None:
    first = memoryview(data)[0]
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF)
    try:
        return _map.decode(data) if is_map else _row.decode(data)
    except UNREADABLE:
        return None
