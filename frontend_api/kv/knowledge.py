"""Words for what is known of one engine rank's KV, what is wrong with its events, and what outlives the process. Pure.

The values are what people read: in headers, on pages, in metrics.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Knowledge(StrEnum):
    """What the router knows of the blocks of one rank."""

    REPLAYING = "replay-running"
    """It restarted, and its first events are being fetched."""
    COMPLETE = "complete"
    PARTIAL = "known-in-part"
    """Its beginning, or batches since, are lost: what is indexed is there, more may be."""
    UNHEARD = "not-heard"
    """No batch and no answer to a replay yet: nothing is known."""
    RESTORED = "saved-index-unproved"
    """Its blocks were loaded from disk, and are not counted until the publisher proves to be the one that told of them."""


class Trouble(StrEnum):
    """What is wrong with the events of one rank, or keeps them from being followed."""

    NOT_OBSERVED = "kv_events_not_observed"
    """It computed a prompt, and what it published did not tell of it: nothing comes, or what comes is another engine's."""
    GAP = "kv_events_gap"
    MISMATCH = "kv_block_mismatch"
    AMBIGUOUS = "kv_events_ambiguous"
    EXCESSIVE = "kv_events_excessive"
    """They take more of the router than those of any engine need: they are not followed for some seconds."""
    SILENT = "kv_events_silent"
    """It answered a replay before and no longer does."""
    CLAIMS = "kv_claims_refused"
    """What is told of its KV (block size, counts, ranks, addresses) cannot be: it is used without it."""
    CROWDED = "kv_ranks_not_followed"
    """The engines have more ranks than the router may open files for; those with the fewest come first."""
    REPLAY_ONLY = "kv_events_replay_only"
    """Batches come by replay alone, and late: its publisher connects instead of binding, or the way to it is cut."""


class Bound(StrEnum):
    """Why the blocks that are indexed are not all that decides about a hit, although every batch is known."""

    INDEX_FULL = "kv_index_full"
    """The router's own limit has cost it blocks."""
    OTHER_GROUPS = "kv_other_cache_groups"
    """A hit also needs the state of a sliding window or a state space, which is not followed (dynamo#9376)."""
    LOWER_TIER = "kv_in_lower_tier"
    """It keeps blocks in CPU memory or on disk, which are not counted (dynamo#5565)."""


class Saved(Struct, frozen=True):
    """What is known of one rank after one batch, to be gone on with by a later process. Holds no token."""

    sequence: int
    """Of the last batch that was taken."""
    digest: bytes
    """Of that batch."""
    complete: bool
    block_size: int | None
    source: int | None
    groups: tuple[int, ...]
    keys: bytes
    values: bytes
    """`Names.dump`."""
    tiered: bool
    """It keeps blocks in a lower tier, too."""
    copies: bytes = b""
    """Keys of the blocks that it has more than once, for each once more."""
