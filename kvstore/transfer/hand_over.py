"""Decides what a node that leaves hands over: which chains, in which order, to which nodes, and how fast. Sans-IO (I9).

    warm_tips --> chains, hottest first --> next: look up who has the chain --looked: a full node, whole--> next chain
                                             +-- ask a node for a piece --answered: the chain is whole--> next chain
                                             |                  +-- some came: the next piece, when it is due
                                             |                  +-- none came: once more, then another chain
                                             +-- wait: the bytes that went are ahead of the rate
                                             +-- None: no time, no room, or no chain is left

Another node fetches what it is asked for as it does for a prompt, under a ticket, and may bring less (I1, I3). A pool
that serves is full, so a node's room is not only what is free there: it gives up its coldest blocks, in the proportion
in which blocks leave a pool of all nodes that has become smaller by this node's.

What the index says of a chain chooses the node that is asked: one that has the chain already fetches nothing, and what
it says then is certain (I3).

What came last is the last to leave a pool. So chains that came are touched again, the hottest last, when all is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# Such a function asks the index: it returns how many of the first blocks of a chain (32 bytes per hash) each node has.
LookUp = Callable[[bytes], Awaitable[Mapping[str, int]]]

Item = TypeVar("Item")
Name = TypeVar("Name", bound=Hashable)

# One call asks for at most this many bytes: what goes is ahead of the rate by no more.
PIECE_BYTES = 4 * 2**20
# A node that was asked so often in a row in vain is asked no more, and neither is anybody for a chain.
MAX_VAIN_ASKS = 2


@dataclass(frozen=True, slots=True)
class OtherNode:
    """Describes a node that may take blocks: how many of its slots are ``free``, and in how many it has ``cached``
    blocks that nobody pins."""

    node_id: str
    free: int
    cached: int


@dataclass(frozen=True, slots=True)
class HandOverAsk(Generic[Name]):
    """Says that a node is to fetch up to ``most_blocks`` further blocks of a chain, which begins with its first
    block."""

    node_id: str
    chain: tuple[Name, ...]
    most_blocks: int


@dataclass(frozen=True, slots=True)
class HandOverLook(Generic[Name]):
    """Says that the index is to be asked which nodes have how much of a chain."""

    chain: tuple[Name, ...]


def warm_tips(
    hot_first: Iterable[Item], parent_of: Callable[[Item], Item | None], kept: Callable[[Item], bool]
) -> list[Item]:
    """Returns the last blocks of the chains that are worth handing over, in the order in which they should go.

    Args:
        hot_first: all blocks, the last to be evicted first, so that each comes after its parent.
        kept: whether somebody has asked that a block stays; such chains go before all others.
    """
    tips: list[Item] = []
    for item in hot_first:
        # Blocks of one chain that were used together stand side by side: only the last of them is asked for.
        if tips and parent_of(item) is tips[-1] and kept(item) == kept(tips[-1]):
            tips[-1] = item
        else:
            tips.append(item)
    return sorted(tips, key=lambda tip: not kept(tip))


def rooms_of(leaving_blocks: int, others: Sequence[OtherNode]) -> dict[str, int]:
    """Returns how many blocks each node may be given by one that leaves with ``leaving_blocks``: its free slots, and
    the share of its cached blocks that a common pool would evict."""
    total = leaving_blocks + sum(other.cached for other in others)
    rooms = {other.node_id: other.free + other.cached * leaving_blocks // max(1, total) for other in others}
    return {node_id: room for node_id, room in rooms.items() if room > 0}


class HandOver(Generic[Name]):
    """Decides about one hand-over; times are seconds on one clock.

    Args:
        chains: each from its first block, the hottest chain first; read one by one.
        rooms: how many blocks each node may be given.
        bytes_per_s: the rate that is kept on the average since ``begun_s``.
        until_s: after this time nothing is asked any more.

    Attributes:
        blocks: how many blocks other nodes have fetched.
        whole: the chains that a node has whole, with its id, in the order in which they came there.
        left: the chains that were begun, and that no node has whole.
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
        # The nodes that stay have the first so many blocks of this chain, as the index and their answers say; None
        # before the index was asked.
        self._held: dict[str, int] | None = None
        self._full: set[str] = set()
        self._vain_asks = 0
        self._vain: dict[str, int] = {}
        # For each block that came somewhere, this has the first node that got it.
        self._where: dict[Name, str] = {}

    def next(self, now_s: float) -> HandOverLook[Name] | HandOverAsk[Name] | float | None:
        """Returns what to ask the index or a node for now, or the time until which to wait, or None where the hand-over
        is over."""
        if now_s >= self.until_s or not self._rooms:
            return None
        if self._chain is None:
            self._chain, self._held, self._vain_asks = next(self._chains, None), None, 0
        if self._chain is None:
            return None
        if self._held is None:
            return HandOverLook(self._chain)
        due_s = self._begun_s + self.blocks * self._block_bytes / self._bytes_per_s
        if due_s > now_s:
            return min(due_s, self.until_s)
        node_id = self._node_for(self._chain, self._held)
        piece = max(1, PIECE_BYTES // self._block_bytes)
        return HandOverAsk(node_id, self._chain, min(piece, self._rooms[node_id]))

    def looked(self, look: HandOverLook[Name], held: Mapping[str, int]) -> str | None:
        """Notes how many of the first blocks of the chain nodes probably have, those that leave included. Returns the
        node that is taken to have all of it and has no room for others, which is not asked."""
        self._held = {node_id: blocks for node_id, blocks in held.items() if node_id in self._rooms}
        if len(look.chain) in self._held.values():
            return None
        for node_id in self._full:
            if held.get(node_id, 0) >= len(look.chain):
                self.whole.append((node_id, look.chain))
                self._chain = None
                return node_id
        return None

    def answered(self, ask: HandOverAsk[Name], here: int, fetched: int) -> bool:
        """Notes that the node has the first ``here`` blocks of the chain, some of which it has just fetched; returns
        whether it has the whole chain."""
        self.blocks += fetched
        for name in ask.chain[:here]:
            self._where.setdefault(name, ask.node_id)
        if self._held is not None:
            self._held[ask.node_id] = here
        if here >= len(ask.chain):
            self.whole.append((ask.node_id, ask.chain))
            self._chain = None
        elif not fetched:
            self.failed(ask)
            return False
        self._vain[ask.node_id] = self._vain_asks = 0
        self._rooms[ask.node_id] -= fetched
        if self._rooms[ask.node_id] <= 0:
            del self._rooms[ask.node_id]
            self._full.add(ask.node_id)
            self._give_up()
        return here >= len(ask.chain)

    def failed(self, ask: HandOverAsk[Name]) -> None:
        """Notes that the node fetched nothing."""
        self._vain_asks += 1
        self._vain[ask.node_id] = self._vain.get(ask.node_id, 0) + 1
        if self._vain[ask.node_id] >= MAX_VAIN_ASKS:
            del self._rooms[ask.node_id]
        if self._vain_asks >= MAX_VAIN_ASKS:
            self._give_up()

    def leftover(self) -> Iterator[tuple[Name, ...]]:
        """Yields the chains that no node has whole, in the order in which they should go elsewhere. Nothing is asked
        any more."""
        self._give_up()
        yield from self.left
        yield from self._chains

    def _give_up(self) -> None:
        if self._chain is not None:
            self.left.append(self._chain)
            self._chain = None

    def _node_for(self, chain: Sequence[Name], held: Mapping[str, int]) -> str:
        """Returns the node that has the most of the chain, and of those that have as much the one with the most
        room."""
        most = dict(held)
        for blocks in range(len(chain), 0, -1):
            node_id = self._where.get(chain[blocks - 1])
            if node_id is not None:
                most[node_id] = max(blocks, most.get(node_id, 0))
                break
        return max(self._rooms, key=lambda node_id: (most.get(node_id, 0), self._rooms[node_id]))
