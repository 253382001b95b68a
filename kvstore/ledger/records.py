"""The records of the slot ledger: plain data, changed by the ledger, the block tree and the eviction policy alone."""

from __future__ import annotations

from dataclasses import dataclass, field

# A slot number has to fit into 31 bits.
MAX_BLOCKS = 2**31 - 1

# What a leased slot is charged to, where that is no ticket.
NO_TICKET = 0
# The slot lost a commit race: it comes back to the pool, never to a reservation.
LOST_RACE = -1

# Roles of holders.
SESSION = "gateway"
PREFILL = "prefill"
# One fetch of this node's own, while it lasts.
FETCH = "fetch"
# Blocks of the node's earlier life, until they are looked at.
KEPT = "kept"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the first worker that attaches decides: number of slots, bytes of each, and namespace (hexadecimal)."""

    num_slots: int
    block_bytes: int
    namespace: str


def slots_of(pool_bytes: int, block_bytes: int) -> int:
    """The number of blocks of ``block_bytes`` that fit into ``pool_bytes``, at most MAX_BLOCKS."""
    return min(pool_bytes // block_bytes, MAX_BLOCKS) if block_bytes > 0 else 0


@dataclass(slots=True, eq=False)
class Block:
    """A committed slot.

    Attributes:
        depth: number of blocks before it in its chain.
        segment: hash of the first block of its segment, the SEGMENT_BLOCKS of a chain that the index keeps together.
        holds: pins on the block itself plus its protected children; the block is protected while this is not 0.
        children: committed blocks whose parent it is.
        retained: retentions that end with the block plus its retained children; it is evicted late while this is not 0.
        checksum: XXH3-64 of its bytes, 0 as long as nobody has asked for it.
        uses, child_uses, rank: written by :class:`pillion.kvstore.ledger.eviction.LfuEviction` alone.
    """

    slot: int
    hash: bytes
    parent: Block | None = field(repr=False)
    depth: int
    segment: bytes = field(repr=False)
    holds: int = 0
    children: int = 0
    retained: int = 0
    checksum: int = 0
    uses: int = 0
    child_uses: int = 0
    rank: int = 0


@dataclass(slots=True)
class Holder:
    """One epoch: a worker, a gateway's session, a fetch, or what is kept of the node's earlier life.

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
    """One request's claim.

    Attributes:
        opener: (epoch, nonce) of the call that opened it.
        tail: last block of the pinned chain, None where nothing is pinned.
        reserved: slots that are promised and not leased yet.
        holders: epochs that hold it.
        slots: the chain's slots, as far as it had grown when they were last asked for.
    """

    ticket_id: int
    opener: tuple[int, int]
    tail: Block | None
    reserved: int
    holders: set[int]
    slots: frozenset[int] = frozenset()

    @property
    def blocks(self) -> int:
        """Length of the pinned chain."""
        return self.tail.depth + 1 if self.tail else 0


@dataclass(frozen=True, slots=True)
class RetentionWish:
    """What is to be retained, by whom, and for how long.

    Attributes:
        owner: the tenant; names are its own.
        name: unique for an owner. A later wish of the same name takes the place of the earlier one.
        tail_hash: the last block of the chain, which names the whole chain.
        blocks, tokens: length of the chain, and of the prompt that it is the beginning of.
        until_s: when it lapses, on the ledger's clock.
        model: for people who list it.
        ephemeral: made for a moment's conversation. A longer one of the same owner takes the place of those that it
            covers.
    """

    owner: str
    name: str
    tail_hash: bytes
    blocks: int
    until_s: float
    tokens: int = 0
    model: str = ""
    ephemeral: bool = False


@dataclass(slots=True, eq=False)
class Retention:
    """A wish and how far it is met.

    Attributes:
        end: the last block of the chain that is in the pool; None where none is known to be.
        hits: tickets whose chain had the whole wish in it, in the pool, when they were admitted.
    """

    wish: RetentionWish
    end: Block | None = None
    hits: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the chain that are retained now."""
        return self.end.depth + 1 if self.end is not None else 0


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """A block came (``here``) or went. ``segment``: see :class:`Block`; ``parent``: of a block that came into the pool,
    the hash of the block before it, empty for a chain's first."""

    block_hash: bytes
    here: bool
    segment: bytes = b""
    parent: bytes = b""
