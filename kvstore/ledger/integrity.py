"""Checks that a ledger's slot states, pins and reservations are consistent (I4). O(slots): for tests and diagnosis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pillion.errors import Conflict
from pillion.kvstore.ledger.ledger import LOST_RACE, Ledger
from pillion.kvstore.ledger.records import Block

MAX_FINDINGS = 20


class IntegrityError(Conflict):
    """A ledger is inconsistent; the message lists the inconsistencies."""


def check_integrity(ledger: Ledger) -> None:
    """Raise IntegrityError, with at most MAX_FINDINGS inconsistencies, if a ledger has any."""
    findings = [*_slots(ledger), *_tree(ledger), *_tickets(ledger), *_reservations(ledger)]
    findings += [*ledger.prefix_pins.check(), *ledger.states.check()]
    if findings:
        raise IntegrityError("; ".join(findings[:MAX_FINDINGS]))


def _slots(ledger: Ledger) -> Iterator[str]:
    """Check that every slot is in exactly one state."""
    owners: Counter[int] = Counter(ledger.free)
    for holder in ledger.holders.values():
        owners.update(holder.leased.keys())
    owners.update(block.slot for block in ledger.tree.by_hash.values())
    yield from (f"slot {slot} has no state" for slot in range(ledger.num_slots) if slot not in owners)
    yield from (f"slot {slot} is in {count} states" for slot, count in owners.items() if count > 1)
    yield from (f"slot {slot} is not of this pool" for slot in owners if not 0 <= slot < ledger.num_slots)
    counts = ledger.status()
    total = counts.free_blocks + counts.leased_blocks + counts.committed_blocks + counts.quarantined_blocks
    if total != ledger.num_slots:
        yield f"states add up to {total} of {ledger.num_slots} slots"


def _tree(ledger: Ledger) -> Iterator[str]:
    """Check that parents exist, and that reference counts equal pins plus protected children."""
    blocks = ledger.tree.by_hash
    children = Counter(block.parent for block in blocks.values() if block.parent is not None)
    protected = Counter(block.parent for block in blocks.values() if block.parent is not None and block.ref_count)
    ends = ((ticket.last_block, ticket.state) for ticket in ledger.tickets.values())
    pins = Counter(block for both in ends for block in both if block is not None)
    yield from (
        f"a ticket pins slot {last_block.slot}, which is gone"
        for last_block in pins
        if blocks.get(last_block.hash) is not last_block
    )
    for block_hash, block in blocks.items():
        name = f"block of slot {block.slot}"
        if block.hash != block_hash:
            yield f"{name} is filed under another hash"
        if block.parent is not None and blocks.get(block.parent.hash) is not block.parent:
            yield f"{name} has lost its parent"
        if block.depth != (block.parent.depth + 1 if block.parent else 0):
            yield f"{name} has depth {block.depth}"
        if block.children != children[block]:
            yield f"{name} counts {block.children} children of {children[block]}"
        if block.ref_count != protected[block] + pins[block]:
            yield f"{name} has {block.ref_count} references, {pins[block]} pins, {protected[block]} protected children"
    yield from _protection(ledger)


def _protection(ledger: Ledger) -> Iterator[str]:
    """Check that the eviction policy has exactly the unprotected blocks, children before their parents."""
    blocks = ledger.tree.by_hash.values()
    protected = sum(block.ref_count > 0 for block in blocks)
    if protected != ledger.tree.protected:
        yield f"{ledger.tree.protected} blocks counted as protected of {protected}"
    order = list(ledger.tree.policy)
    position: dict[Block, int] = {block: index for index, block in enumerate(order)}
    if position.keys() != {block for block in blocks if not block.ref_count} or len(order) != len(ledger.tree.policy):
        yield "the eviction policy does not know exactly the unprotected blocks"
    for block, index in position.items():
        if block.parent is not None and position.get(block.parent, len(order)) < index:
            yield f"slot {block.parent.slot} would be evicted before its child {block.slot}"


def _tickets(ledger: Ledger) -> Iterator[str]:
    """Check that tickets and holders refer to each other, and openers to their tickets."""
    for ticket_id, ticket in ledger.tickets.items():
        if not ticket.holders:
            yield f"ticket {ticket_id} has no holder"
        if any(ticket_id not in ledger.holders[e].tickets for e in ticket.holders if e in ledger.holders):
            yield f"a holder of ticket {ticket_id} does not know it"
        if not ticket.holders <= ledger.holders.keys():
            yield f"ticket {ticket_id} is held by a void epoch"
        if ledger.by_opener.get(ticket.opener) is not ticket:
            yield f"ticket {ticket_id} is not found by its opener"
    if len(ledger.by_opener) != len(ledger.tickets):
        yield f"{len(ledger.by_opener)} openers of {len(ledger.tickets)} tickets"
    for holder in ledger.holders.values():
        if not holder.tickets <= ledger.tickets.keys():
            yield f"{holder.name} holds a void ticket"


def _reservations(ledger: Ledger) -> Iterator[str]:
    """Check that reserved slots are available, or lost a commit race and have not been returned yet."""
    reserved = sum(ticket.reserved for ticket in ledger.tickets.values())
    if reserved != ledger.reserved or any(ticket.reserved < 0 for ticket in ledger.tickets.values()):
        yield f"{ledger.reserved} slots counted as reserved of {reserved}"
    lost = sum(charge == LOST_RACE for holder in ledger.holders.values() for charge in holder.leased.values())
    if reserved > ledger.available + lost:
        yield f"{reserved} slots are reserved, {ledger.available} available, {lost} lost a commit race"
    for ticket in ledger.tickets.values():
        usable = any(not ledger.holders[e].fenced for e in ticket.holders if e in ledger.holders)
        if ticket.reserved and not usable:
            yield f"ticket {ticket.ticket_id} reserves {ticket.reserved} slots that nobody may lease"
