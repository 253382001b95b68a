"""What the ledger keeps books of."""

from __future__ import annotations

from dataclasses import dataclass, field

from pillion.kvstore.ledger.tree import Block

# What a leased slot is charged to, where that is no ticket.
NO_TICKET = 0
# The slot lost a commit race: it comes back to the pool, never to a reservation.
LOST_RACE = -1

SESSION = "gateway"
PREFILL = "prefill"
# One fetch of this node's own, while it lasts.
FETCH = "fetch"


@dataclass(slots=True)
class Holder:
    """One epoch. ``leased``: slot -> the ticket whose reservation it came from. ``seen_s``: None until its first call,
    so that a worker which is still loading is not taken for a silent one: it has nothing that could be misused."""

    epoch: int
    name: str
    role: str
    fenced: bool = False
    seen_s: float | None = None
    leased: dict[int, int] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)


@dataclass(slots=True)
class TicketState:
    """One request's claim. ``reserved``: slots promised and not leased yet. ``opener``: (epoch, nonce)."""

    ticket_id: int
    opener: tuple[int, int]
    tail: Block | None
    reserved: int
    holders: set[int]

    @property
    def blocks(self) -> int:
        """Length of the pinned chain."""
        return self.tail.depth + 1 if self.tail else 0


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """A block came (``here``) or went; what the index should learn. ``segment``: see
    :class:`pillion.kvstore.ledger.tree.Block`.
    """

    block_hash: bytes
    here: bool
    segment: bytes = b""
