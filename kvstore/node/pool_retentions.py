"""Defines the seam at which a room keeps chains in a KV node's pool until their next use is expected."""

from __future__ import annotations

from collections.abc import Callable

from pillion.config import KVNodeFlags
from pillion.errors import InvalidRequest
from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.ledger import Ledger
from pillion.rooms import Seam, entered_one
from pillion.v1.kvnode_pb2 import RetainChainReply, RetainChainRequest


class PoolRetentions:
    """Takes what callers say of chains' next uses. This class keeps nothing: its pool evicts by ``policy`` alone."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy

    def bind(self, ledger: Ledger) -> None:
        """Notes whose blocks ``policy`` evicts; the pool has no shape yet."""

    def retain(self, request: RetainChainRequest) -> RetainChainReply:
        """Keeps a chain or lets it go. Raises InvalidRequest, NotFound for a void epoch, Conflict for a fenced one."""
        raise InvalidRequest("this KV node retains no chains: it was installed without (docs/rooms.md)")

    def check_integrity(self) -> None:
        """Raises Conflict, which names what does not add up."""


RETENTIONS = Seam[Callable[[KVNodeFlags, EvictionPolicy], PoolRetentions]]("kvstore.node.retentions")


def retentions_of(flags: KVNodeFlags, policy: EvictionPolicy) -> PoolRetentions:
    """Makes what keeps chains in a pool whose own policy is ``policy``, by the node's flags."""
    return entered_one(RETENTIONS)(flags, policy)
