"""Plan of a leaving node's hand-over: which chains, in which order, to which nodes, and how fast. Sans-IO (I9).

    warm_tips --> chains, hottest first --> next: look up the chain --looked up: a full node, whole--> next chain
                                             +-- ask a node for a piece --answered: the chain is whole--> next chain
                                             |                  +-- some came: the next piece, when it is due
                                             |                  +-- none came: retry once, then another chain
                                             +-- wait: the bytes sent are ahead of the rate
                                             +-- None: no time, no room, or no chain is left

Another node fetches as it does for a prompt, under a ticket, and may fetch less (I1, I3). Serving pools are full, so a
node's room is not only its free slots: it also evicts its coldest blocks, in the proportion in which blocks would leave
a common pool of all nodes that shrinks by this node's.

The node that has most of a chain, by the index, is asked first. If it has the whole chain, it
fetches nothing; only its answer is authoritative (I3).

The most recent arrivals leave a pool last. So the handed-over chains are touched again at the end, the hottest last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# Looks a chain (32 bytes per hash) up in the index; returns node id -> number of leading blocks.
LookUp = Callable[[bytes], Awaitable[Mapping[str, int]]]

Item = TypeVar("Item")
Name = TypeVar("Name", bound=Hashable)

# Bytes requested per call; the transfer may be this far ahead of its rate.
PIECE_BYTES = 4 * 2**20
# Consecutive failures after which a node, or a chain, is given up.
MAX_FAILED_ASKS = 2


@dataclass(frozen=True, slots=True)
class OtherNode:
    """A node that may receive blocks: numbers of its ``free`` slots and of its ``cached``, i.e. unpinned, blocks."""

    node_id: str
    free: int
    cached: int


@dataclass(frozen=True, slots=True)
class HandOverAsk(Generic[Name]):
    """Ask a node to fetch up to ``max_blocks`` more blocks of a chain, given from its first block."""

    node_id: str
    chain: tuple[Name, ...]
    max_blocks: int


@dataclass(frozen=True, slots=True)
class HandOverLook(Generic[Name]):
    """Look a chain up in the index."""

    chain: tuple[Name, ...]


def warm_tips(
    hot_first: Iterable[Item], parent_of: Callable[[Item], Item | None], kept: Callable[[Item], bool]
) -> list[Item]:
    """Return the last block of each chain to hand over, in the order of sending.

    Args:
        hot_first: all blocks in reverse order of eviction, so that each comes after its parent.
        kept: returns whether a block is prefix-pinned; such chains come first.
    """
    tips: list[Item] = []
    for item in hot_first:
        if tips and parent_of(item) is tips[-1] and kept(item) == kept(tips[-1]):
            tips[-1] = item
        else:
            tips.append(item)
    return sorted(tips, key=lambda tip: not kept(tip))


def rooms_of(leaving_blocks: int, others: Sequence[OtherNode]) -> dict[str, int]:
    """Return how many blocks each node may receive from one that leaves with ``leaving_blocks``: its free slots, and
    the share of its cached blocks that a common pool would evict."""
    total = leaving_blocks + sum(other.cached for other in others)
    rooms = {other.node_id: other.free + other.cached * leaving_blocks // max(1, total) for other in others}
    return {node_id: room for node_id, room in rooms.items() if room > 0}


class HandOver(Generic[Name]):
    """Plan of one hand-over; times are seconds on one clock.

    Args:
        chains: each from its first block, the hottest chain first; read lazily.
        rooms: max blocks that each node may receive.
        bytes_per_s: limit of the average rate since ``begun_s``.
        until_s: end of the hand-over.

    Attributes:
        blocks: blocks that other nodes have fetched.
        whole: (node id, chain) of completely transferred chains, in order of arrival.
        left: chains begun of which no node has all blocks.
    """

    def __init__(
        self,
        chains: Iterable[tuple[Name, ...]],
        rooms: Mapping[str, int],
        *,
        block_bytes: int,
        bytes_per_s: float,
        begun_s: float,
        until_s: float,
    ) -> None:
        self.blocks = 0
        self.whole: list[tuple[str, tuple[Name, ...]]] = []
        self.left: list[tuple[Name, ...]] = []
        self._chains = iter(chains)
        self._rooms = dict(rooms)
        self._block_bytes, self._bytes_per_s = block_bytes, bytes_per_s
        self._begun_s, self.until_s = begun_s, until_s
        self._chain: tuple[Name, ...] | None = None
        # Leading blocks of the current chain per remaining node, from the index and the nodes' answers; None before the
        # look-up.
        self._prefix_blocks: dict[str, int] | None = None
        self._full: set[str] = set()
        self._failed_asks = 0
        self._failed_by_node: dict[str, int] = {}
        self._node_of: dict[Name, str] = {}

    def next(self, now_s: float) -> HandOverLook[Name] | HandOverAsk[Name] | float | None:
        """Return the next look-up or request, or the time until which to wait, or None when the hand-over is over."""
        if now_s >= self.until_s or not self._rooms:
            return None
        if self._chain is None:
            self._chain, self._prefix_blocks, self._failed_asks = next(self._chains, None), None, 0
        if self._chain is None:
            return None
        if self._prefix_blocks is None:
            return HandOverLook(self._chain)
        due_s = self._begun_s + self.blocks * self._block_bytes / self._bytes_per_s
        if due_s > now_s:
            return min(due_s, self.until_s)
        node_id = self._node_for(self._chain, self._prefix_blocks)
        piece = max(1, PIECE_BYTES // self._block_bytes)
        return HandOverAsk(node_id, self._chain, min(piece, self._rooms[node_id]))

    def record_lookup(self, look: HandOverLook[Name], prefix_blocks: Mapping[str, int]) -> str | None:
        """Record the index's answer, leaving nodes included. Return the full node that supposedly has the whole chain,
        which is then not asked; None if there is none."""
        self._prefix_blocks = {node_id: blocks for node_id, blocks in prefix_blocks.items() if node_id in self._rooms}
        if len(look.chain) in self._prefix_blocks.values():
            return None
        for node_id in self._full:
            if prefix_blocks.get(node_id, 0) >= len(look.chain):
                self.whole.append((node_id, look.chain))
                self._chain = None
                return node_id
        return None

    def record_answer(self, ask: HandOverAsk[Name], present: int, fetched: int) -> bool:
        """Record that the node has the first ``present`` blocks of the chain, ``fetched`` of them just now; return
        whether it has the whole chain."""
        self.blocks += fetched
        for name in ask.chain[:present]:
            self._node_of.setdefault(name, ask.node_id)
        if self._prefix_blocks is not None:
            self._prefix_blocks[ask.node_id] = present
        if present >= len(ask.chain):
            self.whole.append((ask.node_id, ask.chain))
            self._chain = None
        elif not fetched:
            self.record_failure(ask)
            return False
        self._failed_by_node[ask.node_id] = self._failed_asks = 0
        self._rooms[ask.node_id] -= fetched
        if self._rooms[ask.node_id] <= 0:
            del self._rooms[ask.node_id]
            self._full.add(ask.node_id)
            self._abandon_chain()
        return present >= len(ask.chain)

    def record_failure(self, ask: HandOverAsk[Name]) -> None:
        """Record that the node fetched nothing."""
        self._failed_asks += 1
        self._failed_by_node[ask.node_id] = self._failed_by_node.get(ask.node_id, 0) + 1
        if self._failed_by_node[ask.node_id] >= MAX_FAILED_ASKS:
            del self._rooms[ask.node_id]
        if self._failed_asks >= MAX_FAILED_ASKS:
            self._abandon_chain()

    def leftover(self) -> Iterator[tuple[Name, ...]]:
        """Yield the chains that no node has completely, in order, after the hand-over has ended."""
        self._abandon_chain()
        yield from self.left
        yield from self._chains

    def _abandon_chain(self) -> None:
        if self._chain is not None:
            self.left.append(self._chain)
            self._chain = None

    def _node_for(self, chain: Sequence[Name], prefix_blocks: Mapping[str, int]) -> str:
        """Return the node with the most of the chain; on a tie, the one with the most room."""
        present = dict(prefix_blocks)
        for blocks in range(len(chain), 0, -1):
            node_id = self._node_of.get(chain[blocks - 1])
            if node_id is not None:
                present[node_id] = max(blocks, present.get(node_id, 0))
                break
        return max(self._rooms, key=lambda node_id: (present.get(node_id, 0), self._rooms[node_id]))
