"""The messages of the KV node's service (protos/pillion/v1/kvnode.proto).

Most are the generated ones, imported from here. Workers name slots in every step, so what adopts and commits blocks has
plain records with tuples of its own, and converters to and from the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.v1 import kvnode_pb2
from pillion.v1.kvnode_pb2 import HeartbeatReply, NodeStatus, OpenTicketReply, PrefetchReply

__all__ = [
    "AdoptedTicket",
    "CommitResult",
    "CommitRun",
    "HeartbeatReply",
    "NodeStatus",
    "OpenTicketReply",
    "PrefetchReply",
    "adopted_from_pb",
    "adopted_to_pb",
    "results_from_pb",
    "results_to_pb",
    "runs_from_pb",
    "runs_to_pb",
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


def adopted_from_pb(message: kvnode_pb2.AdoptTicketReply) -> AdoptedTicket:
    """Reads an AdoptTicketReply."""
    return AdoptedTicket(tuple(message.chain_slots), tuple(message.leased_slots), message.tail_hash)


def adopted_to_pb(adopted: AdoptedTicket) -> kvnode_pb2.AdoptTicketReply:
    """Makes an AdoptTicketReply."""
    return kvnode_pb2.AdoptTicketReply(
        chain_slots=adopted.chain_slots, leased_slots=adopted.leased_slots, tail_hash=adopted.tail_hash
    )


def runs_from_pb(message: kvnode_pb2.CommitRequest) -> list[CommitRun]:
    """Returns the runs of a CommitRequest, in its order."""
    return [CommitRun(run.ticket_id, tuple(run.slots), run.block_hashes) for run in message.runs]


def runs_to_pb(epoch: int, runs: Sequence[CommitRun]) -> kvnode_pb2.CommitRequest:
    """Makes a CommitRequest of runs, in the order given."""
    message = kvnode_pb2.CommitRequest(epoch=epoch)
    for run in runs:
        message.runs.add(ticket_id=run.ticket_id, slots=run.slots, block_hashes=run.block_hashes)
    return message


def results_from_pb(message: kvnode_pb2.CommitReply) -> list[CommitResult]:
    """Returns the results of a CommitReply, in the order of the request's runs."""
    return [CommitResult(tuple(result.slots), result.refusal) for result in message.results]


def results_to_pb(results: Sequence[CommitResult]) -> kvnode_pb2.CommitReply:
    """Makes a CommitReply of results, in the order of the request's runs."""
    message = kvnode_pb2.CommitReply()
    for result in results:
        message.results.add(slots=result.slots, refusal=result.refusal)
    return message
