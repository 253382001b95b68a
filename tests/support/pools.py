"""Pools of a KV node without its memory and sockets."""

from __future__ import annotations

from pillion.kvstore.events.block_log import BlockLog
from pillion.kvstore.events.followers import Followers
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.node.pool import Pool, new_id


def make_pool(pool_bytes: int, *, max_waiting: int = 4, heartbeat_timeout_s: float = 5.0) -> Pool:
    """Return a pool whose admission reserves nothing for running decodes."""
    ledger = Ledger(new_id, 0)
    pool = Pool(
        ledger,
        Followers(ledger.tree, BlockLog(1)),
        max_waiting=max_waiting,
        heartbeat_timeout_s=heartbeat_timeout_s,
        announce=lambda events: None,
        shaped=lambda shape: None,
    )
    pool.pool_bytes = pool_bytes
    return pool
