"""Limits of a KV node that no flag sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """Limits of a KV node that no flag sets. Percentages are of the pool's slots.

    Attributes:
        decode_reserve_percent: slots that prompts leave to running decodes (I5).
        pinned_percent: slots of all prefix pins; one tenant may use half of these.
        state_percent: slots of states of hybrid models, without those of running requests.
        low_watermark_percent: free slots below which blocks are evicted ahead of need.
        high_watermark_percent: free slots at which that eviction stops.
        fetch_timeout_s: timeout of a fetch from another node, a disk or a bucket.
        max_fetch_bytes: size of one fetch.
        hand_over_bytes_per_s: rate at which a stopping node copies warm blocks to other nodes.
    """

    decode_reserve_percent: int = 10
    pinned_percent: int = 50
    state_percent: int = 100
    low_watermark_percent: int = 2
    high_watermark_percent: int = 5
    fetch_timeout_s: float = 2.0
    max_fetch_bytes: int = 2**30
    hand_over_bytes_per_s: int = 64 * 2**20
