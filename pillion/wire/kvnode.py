"""The messages of the KV node's service (protos/pillion/v1/kvnode.proto).

Most are the generated ones, imported from here. Workers name slots in every step, so what adopts and commits blocks has
plain records with tuples of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pillion.v1.kvnode_pb2 import HeartbeatReply, NodeStatus, OpenTicketReply, PrefetchReply

__all__ = [
    "AdoptedTicket",
    "CommitResult",
    "CommitRun",
    "HeartbeatReply",
    "NodeStatus",
    "OpenTicketReply",
    "PrefetchReply",
]


@dataclass(frozen=True, slots=True)
class AdoptedTicket:
    """What a worker gets when it adopts a ticket.

    Attributes:
        chain_slots: slots of the pinned chain, in order.
        leased_slots: as many fresh slots as were asked for.
        tail_hash: hash of the chain's last block (32 bytes), empty where the chain is empty.
    """

    chain_slots: tuple[int, ...]
    leased_slots: tuple[int, ...]
    tail_hash: bytes


@dataclass(frozen=True, slots=True)
class CommitRun:
    """Blocks of one ticket, each the child of the one before; ``block_hashes`` has 32 bytes per slot."""

    ticket_id: int
    slots: tuple[int, ...]
    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The slot that stays for each block (I2), or the reason why nothing of the run was taken."""

    slots: tuple[int, ...] = ()
    refusal: str = ""
