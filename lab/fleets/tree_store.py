"""Keeps the blocks of a simulated KV node in the production tree, by an eviction policy of production's form (I9).

It is for studies of such policies; the store of :mod:`lab.fleets.prefix_store` evicts as the default
policy does, and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.fleets.prefix_store import NodeStore, PrefixIndex, SimTicket
from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import BlockTree

NUMBER_BYTES = 8


def name_of(block: int) -> bytes:
    """Returns the name that a block of the trace has in the tree."""
    return block.to_bytes(NUMBER_BYTES)


class TreeStore(NodeStore):
    """Represents the pool of one node, whose blocks leave by ``policy``."""

    def __init__(
        self, node_id: str, index: PrefixIndex, capacity: int, block_size: int, policy: EvictionPolicy
    ) -> None:
        super().__init__(node_id, index, capacity, block_size)
        self.tree = BlockTree(policy)
        self._lasts: dict[SimTicket, Block] = {}

    def prefix(self, blocks: Sequence[int]) -> int:
        by_hash = self.tree.by_hash
        return next((at for at, block in enumerate(blocks) if name_of(block) not in by_hash), len(blocks))

    def leave(self) -> None:
        for name in self.tree.by_hash:
            self._index.remove(int.from_bytes(name), self.node_id)
        super().leave()

    def check_integrity(self) -> None:
        super().check_integrity()
        idle = sum(not block.holds for block in self.tree.by_hash.values())
        assert idle == len(self.tree.policy) == self._shared() - self._pinned(), "the policy knows other blocks"

    def _shared(self) -> int:
        return len(self.tree)

    def _pinned(self) -> int:
        return self.tree.protected

    def _idle_among(self, blocks: Sequence[int]) -> int:
        return sum(not self.tree.by_hash[name_of(block)].holds for block in blocks)

    def _pin_all(self, ticket: SimTicket, count: int) -> None:
        if count:
            self._lasts[ticket] = last = self.tree.by_hash[name_of(ticket.blocks[count - 1])]
            self.tree.pin(last)

    def _share(self, ticket: SimTicket, block: int) -> None:
        last, name = self._lasts.get(ticket), name_of(block)
        found = self.tree.by_hash.get(name)
        if found is None:
            self._lasts[ticket] = self.tree.add(0, name, last)
            self._index.add(block, self.node_id)
            return
        self._lasts[ticket] = found
        self.tree.pin(found)
        if last is not None:
            self.tree.unpin(last)

    def _unpin_all(self, ticket: SimTicket) -> None:
        last = self._lasts.pop(ticket, None)
        if last is not None:
            self.tree.unpin(last)

    def _victim(self) -> int:
        return int.from_bytes(self.tree.evict().hash)
