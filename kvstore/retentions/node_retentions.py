"""Serves a KV node's call about the next uses of chains: the order of eviction decides
(:mod:`pillion.kvstore.retentions.retention_eviction`)."""

from __future__ import annotations

import time

from pillion.config import KVNodeFlags
from pillion.errors import Conflict, InvalidRequest
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.node.pool_retentions import PoolRetentions
from pillion.kvstore.retentions.retention_eviction import MAX_WORTH_STEPS, RetentionEviction
from pillion.v1.kvnode_pb2 import RetainChainReply, RetainChainRequest

# A tenant's name has at most this many characters, which the gateway bounds more tightly.
MAX_OWNER_CHARS = 256


class NodeRetentions(PoolRetentions):
    """Holds the retentions of one pool, which may have these shares of it. Only the node's loop calls it."""

    def __init__(self, policy: EvictionPolicy, percent: int, owner_percent: int) -> None:
        self.retaining = RetentionEviction(policy, percent, owner_percent, time.monotonic)
        super().__init__(self.retaining)
        self._ledger: Ledger | None = None

    def bind(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.retaining.bind(ledger.tree, 0)

    def retain(self, request: RetainChainRequest) -> RetainChainReply:
        """Keeps a chain or lets it go, as far as it is in the pool. A pool without a shape has nothing to keep."""
        ledger = self._ledger
        assert ledger is not None, "the retentions have no pool"
        now = time.monotonic()
        ledger.seen(request.epoch, now)
        ledger.active(request.epoch)
        hashes = split_hashes(request.block_hashes)
        if not hashes or len(request.owner) > MAX_OWNER_CHARS:
            raise InvalidRequest(f"a chain has a block, and its owner's name at most {MAX_OWNER_CHARS} characters")
        times = [step.from_ms for step in request.worth]
        if len(times) > MAX_WORTH_STEPS or times != sorted(times) or not all(step.use_ms > 0 for step in request.worth):
            raise InvalidRequest(f"a worth has at most {MAX_WORTH_STEPS} steps, in order, each of a use in some time")
        self.retaining.bind(ledger.tree, ledger.num_slots)
        if not request.worth:
            self.retaining.let_go(request.owner, hashes, request.shared_blocks)
            return RetainChainReply()
        steps = [(now + step.from_ms / 1000, 1000 / step.use_ms) for step in request.worth]
        until_s = now + request.until_ms / 1000
        return RetainChainReply(kept=self.retaining.retain(request.owner, hashes, steps, until_s))

    def check_integrity(self) -> None:
        for line in self.retaining.check():
            raise Conflict(line)


def make_retentions(flags: KVNodeFlags, policy: EvictionPolicy) -> PoolRetentions:
    """Makes the retentions of a node by its flags."""
    return NodeRetentions(policy, flags.max_retained_percent, flags.max_tenant_retained_percent)
