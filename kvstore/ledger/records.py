"""Defines the records of the slot ledger: plain data, changed by the ledger, the block tree and the eviction policy
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A slot number has to fit into 31 bits.
MAX_BLOCKS = 2**31 - 1

# A leased slot that belongs to no ticket is charged to this number.
NO_TICKET = 0
# A slot with this mark lost a commit race: it comes back to the pool, never to a reservation.
LOST_RACE = -1

# Holders have one of these roles.
SESSION = "gateway"
PREFILL = "prefill"
DECODE = "decode"
# A holder with this role is one fetch of this node's own, while it lasts.
FETCH = "fetch"
# A holder with this role has blocks of the node's earlier life, until they are checked.
KEPT = "kept"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Holds what the first worker that attaches decides: number of slots, bytes of each, and namespace
    (hexadecimal)."""

    num_slots: int
    block_bytes: int
    namespace: str


def slots_of(pool_bytes: int, block_bytes: int) -> int:
    """Returns the number of blocks of ``block_bytes`` that fit into ``pool_bytes``, at most MAX_BLOCKS."""
    return min(pool_bytes // block_bytes, MAX_BLOCKS) if block_bytes > 0 else 0


@dataclass(slots=True, eq=False)
class Block:
    """Represents a committed slot.

    Attributes:
        depth: number of blocks before it in its chain.
        segment: hash of the first block of its segment, the SEGMENT_BLOCKS of a chain that the index keeps together.
        holds: pins on the block itself plus its protected children; the block is protected while this is not 0.
        children: committed blocks whose parent it is.
        page: whether it is a page of a state, which stands behind a block or another page.
        prefix_pins: prefix pins that end with the block plus its prefix-pinned children; it is evicted late while this
            is not 0.
        parted: whether two blocks have stood after it at once: several texts begin with it.
        retained: retentions that end with the block plus its retained children.
        idle_since_s: when it lost its last protection, where retentions are kept.
        checksum: XXH3-64 of its bytes, 0 as long as nobody has asked for it.
    """

    slot: int
    hash: bytes
    parent: Block | None = field(repr=False)
    depth: int
    segment: bytes = field(repr=False)
    holds: int = 0
    children: int = 0
    page: bool = False
    prefix_pins: int = 0
    parted: bool = False
    retained: int = 0
    idle_since_s: float = 0.0
    checksum: int = 0


@dataclass(slots=True)
class Holder:
    """Represents one epoch: a worker, a gateway's session, a fetch, or what is kept of the node's earlier life.

    Attributes:
        leased: slot -> the ticket whose reservation it came from, NO_TICKET or LOST_RACE.
        seen_s: time of its last call. None until the first one, so that a worker which is still loading is not taken
            for a silent one: it has nothing yet that could be misused.
    """

    epoch: int
    name: str
    role: str
    fenced: bool = False
    seen_s: float | None = None
    leased: dict[int, int] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)


@dataclass(slots=True)
class TicketState:
    """Represents one request's claim at a KV node.

    Attributes:
        opener: (epoch, nonce) of the call that opened it.
        last_block: last block of the pinned chain, None where nothing is pinned.
        reserved: slots that are promised and not leased yet.
        holders: epochs that hold it.
        slots: the chain's slots, as far as it had grown when they were last asked for.
        state: the last page of the state that the ticket holds, None for none; it has ``state_pages`` pages.
        flow_key: key of the flow whose claim it is (:class:`pillion.rules.priority.Flow`).
        asked_blocks: blocks that the request needed in all when the ticket was opened.
        known_blocks: after so many blocks of the request's chain other texts part from it: those that the pool or
            another node had when a state was looked for, or more where the pool remembers a place after them.
    """

    ticket_id: int
    opener: tuple[int, int]
    last_block: Block | None
    reserved: int
    holders: set[int]
    slots: frozenset[int] = frozenset()
    state: Block | None = None
    state_pages: int = 0
    known_blocks: int = 0
    flow_key: bytes = b""
    asked_blocks: int = 0

    @property
    def blocks(self) -> int:
        """Returns how many blocks the ticket's pinned chain has."""
        return self.last_block.depth + 1 if self.last_block else 0


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """Says that a block came (``here``) or went. :class:`Block` describes ``segment``. ``parent`` is the hash of the
    block before one that came into the pool, empty for a chain's first."""

    block_hash: bytes
    here: bool
    segment: bytes = b""
    parent: bytes = b""
