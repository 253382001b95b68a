"""Committing a run of blocks under a ticket, and what happens when two workers commit the same block (I2).

    new block            the slot is sealed and the ticket's pin moves on to it
    somebody was first   their slot stays and the pin moves on to it; the own slot stays leased until its worker's
                         tables no longer name it, and then goes back to the pool
    the ticket has it    another worker of the same ticket was first: the same, only that the pin is there already

A run is judged as a whole before anything changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pillion.errors import InvalidRequest
from pillion.kvstore.hashing import HASH_BYTES, split_hashes
from pillion.kvstore.ledger.records import LOST_RACE, Holder, TicketState
from pillion.wire.kvnode import CommitResult, CommitRun

if TYPE_CHECKING:
    from pillion.kvstore.ledger.ledger import Ledger


def commit_run(ledger: Ledger, holder: Holder, run: CommitRun) -> CommitResult:
    """Takes all of ``run`` or, with a ``refusal``, nothing of it."""
    try:
        ticket, hashes = _judge(ledger, holder, run)
    except InvalidRequest as error:
        return CommitResult(refusal=error.message)
    return CommitResult(_apply(ledger, holder, ticket, run.slots, hashes))


def _judge(ledger: Ledger, holder: Holder, run: CommitRun) -> tuple[TicketState, list[bytes]]:
    ticket = ledger.tickets.get(run.ticket_id)
    if ticket is None or holder.epoch not in ticket.holders:
        raise InvalidRequest("the ticket is void, or not held by this epoch")
    hashes = split_hashes(run.block_hashes)
    if not hashes or len(hashes) != len(run.slots):
        raise InvalidRequest(f"{len(run.slots)} slots need as many hashes of {HASH_BYTES} bytes, and at least one")
    if len(set(hashes)) != len(hashes) or len(set(run.slots)) != len(run.slots):
        raise InvalidRequest("a slot or a hash is named twice")
    if not holder.leased.keys() >= set(run.slots):
        raise InvalidRequest("a slot is not leased to this epoch")
    _judge_chain(ledger, ticket, hashes)
    return ticket, hashes


def _judge_chain(ledger: Ledger, ticket: TicketState, hashes: list[bytes]) -> None:
    """Known blocks lead, each the child of the one before, and lie on the ticket's chain or go on from its tail; new
    ones only go on from the tail, or from known ones behind it."""
    known = [block for block in map(ledger.tree.by_hash.get, hashes) if block is not None]
    if not known:
        return
    first, end = known[0], ticket.blocks - 1
    linked = all(child.parent is parent for parent, child in pairwise(known))
    if not linked or any(block.hash != block_hash for block, block_hash in zip(known, hashes, strict=False)):
        raise InvalidRequest("a block is here already with another parent")
    if first.depth > end:
        continues = first.parent is ticket.tail
    else:
        continues = ledger.tree.on_chain(known[: end - first.depth + 1][-1], ticket.tail)
    if not continues or (len(known) < len(hashes) and known[-1].depth < end):
        raise InvalidRequest("the run does not continue the ticket's chain")


def _apply(
    ledger: Ledger, holder: Holder, ticket: TicketState, slots: Sequence[int], hashes: list[bytes]
) -> tuple[int, ...]:
    staying = []
    for slot, block_hash in zip(slots, hashes, strict=True):
        block = ledger.tree.by_hash.get(block_hash)
        if block is None:
            ledger.sealed(holder, slot, block_hash, ticket)
            staying.append(slot)
            continue
        holder.leased[slot] = LOST_RACE
        if block.depth >= ticket.blocks:
            ledger.move_pin(ticket, block)
        staying.append(block.slot)
    return tuple(staying)
