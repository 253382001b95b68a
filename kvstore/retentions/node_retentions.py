"""Serves a KV node's call about the next uses of chains: the order of eviction decides
(:mod:`pillion.kvstore.ledger.retention_eviction`)."""

from __future__ import annotations

import time

from pillion.errors import Conflict, InvalidRequest
from pillion.kvstore.hashing import split_hashes
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.retention_eviction import MAX_WORTH_STEPS, RetentionEviction
from pillion.v1.kvnode_pb2 import RetainChainReply, RetainChainRequest

# A tenant's name has at most this many characters, which the gateway bounds more tightly.
MAX_OWNER_CHARS = 256


class NodeRetentions:
    """Takes what gateways say of chains' next uses, for a ledger whose policy is ``retaining``. Only the node's loop
    calls it."""

    def __init__(self, ledger: Ledger, retaining: RetentionEviction) -> None:
        self.retaining = retaining
        self._ledger = ledger
        retaining.bind(ledger.tree, 0)

    def retain(self, request: RetainChainRequest) -> RetainChainReply:
        """Keeps a chain or lets it go, as far as it is in the pool. A pool without a shape has nothing to keep. Raises
        InvalidRequest, NotFound for a void epoch, Conflict for a fenced one."""
        ledger = self._ledger
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
        """Raises Conflict, which names what does not add up."""
        for line in self.retaining.check():
            raise Conflict(line)
