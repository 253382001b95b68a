"""A KV node's books as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.wire.kvnode import NodeStatus


def readings(status: NodeStatus) -> Iterator[Reading]:
    """Everything in the books that is worth a line. The four states of blocks add up to the pool."""
    states = {
        "free": status.free_blocks,
        "leased": status.leased_blocks,
        "committed": status.committed_blocks,
        "quarantined": status.quarantined_blocks,
    }
    for state, blocks in states.items():
        yield names.KV_BLOCKS, (state,), blocks
    held = status.leased_blocks + status.quarantined_blocks + status.pinned_blocks + status.reserved_blocks
    yield names.KV_HELD, ("pinned",), status.pinned_blocks
    yield names.KV_HELD, ("reserved",), status.reserved_blocks
    yield names.KV_USAGE, (), min(1.0, held / status.total_blocks) if status.total_blocks else 0.0
    yield names.KV_BLOCK_BYTES, (), status.block_bytes
    yield names.KV_DISK_BLOCKS, (), status.disk_blocks
    yield names.KV_TICKETS, ("held",), status.tickets
    yield names.KV_TICKETS, ("waiting",), status.waiting_tickets
    yield names.KV_FENCED, (), len(status.fenced_components)
    yield names.KV_COMMITTED, (), status.committed_blocks_ever
    yield names.KV_EVICTED, (), status.evicted_blocks
    moved = {
        "fetched": status.fetched_blocks,
        "served": status.served_blocks,
        "restored": status.restored_blocks,
        "spilled": status.spilled_blocks,
    }
    for way, blocks in moved.items():
        yield names.KV_MOVED, (way,), blocks
    yield names.KV_FETCH_BYTES, ("node",), status.fetched_blocks * status.block_bytes
    yield names.KV_FETCH_BYTES, ("disk",), status.restored_blocks * status.block_bytes
    yield names.KV_CORRUPT, (), status.corrupt_blocks
    yield names.KV_SHORT_FETCHES, (), status.short_fetches
