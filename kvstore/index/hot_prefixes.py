"""What a gateway remembers of the index for the time when Redis does not answer. Sans-IO, bounded, hints only (I3).

    a hit of n blocks --remember--> its chain at 1, 2, 4, 8 ... and n blocks --find--> the deepest of these on a chain

So a prompt that shares a popular beginning with one asked before finds at least half of what is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pillion.kvstore.hashing import HASH_BYTES

# Places in chains that are remembered, some 250 bytes each; the least recently used go first.
MAX_PLACES = 16_384
MAX_NODES_PER_PLACE = 4


class HotPrefixes:
    """Place in a chain (a block hash) -> nodes that had it, the newest first."""

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._nodes: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def remember(self, block_hashes: bytes, hits: Iterable[tuple[str, int]]) -> None:
        """Adds what the index said of a chain (32 bytes per hash): node id and blocks, the most wanted first."""
        for node_id, blocks in list(hits)[:MAX_NODES_PER_PLACE][::-1]:
            reached = 1
            while reached < blocks:
                self._add(_place(block_hashes, reached), node_id)
                reached *= 2
            self._add(_place(block_hashes, blocks), node_id)
        while len(self._nodes) > self._max_places:
            self._nodes.popitem(last=False)

    def find(self, block_hashes: bytes) -> dict[str, int]:
        """Node id -> blocks of this chain that it probably has."""
        found: dict[str, int] = {}
        for blocks in range(len(block_hashes) // HASH_BYTES, 0, -1):
            place = _place(block_hashes, blocks)
            if place in self._nodes:
                self._nodes.move_to_end(place)
                for node_id in self._nodes[place]:
                    found.setdefault(node_id, blocks)
        return found

    def _add(self, place: bytes, node_id: str) -> None:
        others = (other for other in self._nodes.get(place, ()) if other != node_id)
        self._nodes[place] = (node_id, *others)[:MAX_NODES_PER_PLACE]
        self._nodes.move_to_end(place)


def _place(block_hashes: bytes, blocks: int) -> bytes:
    return block_hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]
