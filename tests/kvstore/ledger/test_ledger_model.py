"""Random lives of a node against a small reference model: for any calls in any order, nothing leaks, nothing held is
removed, and everyone in the queue is admitted when memory is free."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pillion.errors import Conflict, NotFound, Overloaded
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import SESSION, Ledger
from pillion.kvstore.ledger.waiting_queue import Grant, Waiter, WaitingQueue
from pillion.rules.priority import PRIORITY_AGING_S
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.examples import examples

NUM_SLOTS = 12
RESERVE_PERCENT = 20
MAX_WAITING = 4
BLOCKS = st.integers(0, 4)


@dataclass
class ModelTicket:
    """``prompt``: every hash that the request may commit; ``done``: how many of them are held."""

    prompt: list[bytes]
    done: int
    holders: set[int]


@dataclass
class ModelHolder:
    role: str
    fenced: bool = False
    leased: set[int] = field(default_factory=set)


class NodeLife(RuleBasedStateMachine):
    """Two tokens and few slots, so that prefixes are shared, races are lost and memory is always short."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(itertools.count(1).__next__, RESERVE_PERCENT)
        self.ledger.shape(NUM_SLOTS)
        self.line = WaitingQueue(self.ledger, MAX_WAITING)
        self.nonces = itertools.count(1)
        self.holders: dict[int, ModelHolder] = {}
        self.tickets: dict[int, ModelTicket] = {}
        self.resumed: list[Waiter] = []
        self.new: list[Waiter] = []
        self.prompts: dict[tuple[int, int], list[bytes]] = {}
        self.index: set[bytes] = set()
        self.now = 0.0

    @initialize()
    def everybody_comes(self) -> None:
        for role in (SESSION, SESSION, "prefill", "decode"):
            self.attach(role)

    @precondition(lambda self: self.live(SESSION) and self.live("decode"))
    @rule(tokens=st.lists(st.integers(0, 1), max_size=7))
    def serve(self, tokens: list[int]) -> None:
        """A complete request, if there is room at once: its chain stays in the cache."""
        gateway, worker = self.live(SESSION)[0], self.live("decode")[0]
        hashes = split_hashes(chain_hashes(bytes(32), tokens, 1))
        missing = self.ledger.shortage(hashes, len(hashes) + 1)
        ticket = None if len(self.line) else self.ledger.admit(gateway, next(self.nonces), hashes, len(hashes) + 1)
        if ticket is None:
            assert len(self.line) or missing
            return
        assert not missing
        left = hashes[ticket.blocks :]
        slots = self.ledger.adopt(worker, ticket.ticket_id, len(left)).leased_slots if not self.lost() else ()
        if left and slots:
            [result] = self.ledger.commit(
                worker, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))]
            )
            assert result.slots == slots
        for epoch in (gateway, worker):
            self.ledger.release(epoch, [ticket.ticket_id])

    @rule(role=st.sampled_from([SESSION, "prefill", "decode"]))
    def attach(self, role: str) -> None:
        if len(self.holders) < 7:
            self.holders[self.ledger.attach(role, role)] = ModelHolder(role)

    @precondition(lambda self: self.live(SESSION))
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), max_size=12),
        extra=st.integers(1, 2),
        resume=st.booleans(),
        priority=st.integers(-1, 1),
        passed_s=st.sampled_from([0.0, 3.0, PRIORITY_AGING_S]),
    )
    def ask(
        self, data: st.DataObject, tokens: list[int], extra: int, resume: bool, priority: int, passed_s: float
    ) -> None:
        self.now += passed_s
        epoch = data.draw(st.sampled_from(self.live(SESSION)))
        hashes = split_hashes(chain_hashes(bytes(32), tokens, 1))
        total = len(hashes) + extra
        waiter = Waiter(
            epoch=epoch,
            nonce=next(self.nonces),
            hashes=tuple(hashes),
            total_blocks=total,
            resume=resume,
            priority=priority,
            asked_s=self.now,
        )
        more = split_hashes(chain_hashes(hashes[-1] if hashes else bytes(32), [0] * 3, 1))
        self.prompts[waiter.key] = [*hashes, *more]
        try:
            grant = self.line.ask(waiter)
        except Overloaded:
            assert total > NUM_SLOTS or len(self.resumed if resume else self.new) == MAX_WAITING
            return
        if grant is None:
            line = self.resumed if resume else self.new
            line.append(waiter)
            # One level of priority is worth PRIORITY_AGING_S of waiting; among equals the sort keeps who came first.
            line.sort(key=lambda other: other.asked_s + other.priority * PRIORITY_AGING_S)
        else:
            mine = self.now + priority * PRIORITY_AGING_S
            assert all(other.asked_s + other.priority * PRIORITY_AGING_S > mine for other in self.resumed) or (
                not resume and not self.resumed
            ), "nobody overtakes a resumed stream that is as urgent"
            assert resume or all(o.asked_s + o.priority * PRIORITY_AGING_S > mine for o in self.new), "overtaken"
            self.granted(grant, waiter)

    @precondition(lambda self: self.resumed or self.new)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.resumed + self.new))
        assert self.line.withdraw(waiter.key)
        self.forget(waiter)

    @precondition(lambda self: self.workers() and self.tickets)
    @rule(data=st.data(), blocks=BLOCKS)
    def adopt(self, data: st.DataObject, blocks: int) -> None:
        epoch = data.draw(st.sampled_from(self.workers()))
        ticket_id, ticket = data.draw(st.sampled_from(sorted(self.tickets.items(), key=lambda item: item[0])))
        reserved = self.ledger.tickets[ticket_id].reserved
        try:
            adopted = self.ledger.adopt(epoch, ticket_id, blocks)
        except Overloaded:
            assert blocks > reserved or self.lost(), "what was reserved is there"
            return
        assert len(adopted.chain_slots) == ticket.done
        assert adopted.last_hash == (ticket.prompt[ticket.done - 1] if ticket.done else b"")
        assert len(adopted.leased_slots) == blocks
        ticket.holders.add(epoch)
        self.holders[epoch].leased |= set(adopted.leased_slots)

    @precondition(lambda self: self.workers())
    @rule(data=st.data(), blocks=BLOCKS)
    def lease(self, data: st.DataObject, blocks: int) -> None:
        epoch = data.draw(st.sampled_from(self.workers()))
        left = self.ledger.available - self.ledger.reserved
        slots = self.ledger.lease(epoch, blocks)
        assert len(slots) <= max(0, left), "promised slots stay"
        if self.holders[epoch].role == "decode":
            assert len(slots) == min(blocks, max(0, left))
        self.holders[epoch].leased |= set(slots)

    @precondition(lambda self: self.committers())
    @rule(data=st.data(), blocks=st.integers(1, 3), back=st.integers(0, 2))
    def commit(self, data: st.DataObject, blocks: int, back: int) -> None:
        """``back``: start with blocks that the ticket already has, like a late second worker."""
        epoch, ticket_id = data.draw(st.sampled_from(self.committers()))
        ticket, holder = self.tickets[ticket_id], self.holders[epoch]
        start = max(0, ticket.done - back)
        slots = sorted(holder.leased)[:blocks]
        hashes = ticket.prompt[start : start + len(slots)]
        slots = slots[: len(hashes)]
        if not slots:
            return
        here = dict(self.slots_by_hash())
        [result] = self.ledger.commit(
            epoch, [CommitRun(ticket_id=ticket_id, slots=tuple(slots), block_hashes=b"".join(hashes))]
        )
        assert not result.refusal
        assert tuple(result.slots) == tuple(here.get(h, slot) for h, slot in zip(hashes, slots, strict=True))
        holder.leased -= {slot for h, slot in zip(hashes, slots, strict=True) if h not in here}
        ticket.done = max(ticket.done, start + len(hashes))

    @precondition(lambda self: self.workers())
    @rule(data=st.data())
    def return_slots(self, data: st.DataObject) -> None:
        holder = self.holders[epoch := data.draw(st.sampled_from(self.workers()))]
        slots = sorted(holder.leased)[: data.draw(BLOCKS)]
        self.ledger.return_slots(epoch, slots)
        holder.leased -= set(slots)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(sorted(self.tickets)))
        epoch = data.draw(st.sampled_from(sorted(self.tickets[ticket_id].holders)))
        if self.holders[epoch].fenced:
            with pytest.raises(Conflict):
                self.ledger.release(epoch, [ticket_id])
        else:
            self.ledger.release(epoch, [ticket_id])
            self.let_go(epoch, [ticket_id])

    @precondition(lambda self: self.workers())
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(self.workers()))
        self.ledger.fence(epoch)
        self.holders[epoch].fenced = True
        with pytest.raises(Conflict):
            self.ledger.lease(epoch, 1)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def gone(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.holders)))
        self.ledger.end_epoch(epoch)
        self.line.withdraw_epoch(epoch)
        for waiter in [w for w in self.resumed + self.new if w.epoch == epoch]:
            self.forget(waiter)
        del self.holders[epoch]
        self.let_go(epoch, list(self.tickets))
        with pytest.raises(NotFound):
            self.ledger.lease(epoch, 1)

    @invariant()
    def admits_in_order(self) -> None:
        for grant in self.line.poll():
            waiter = (self.resumed or self.new)[0]
            assert grant.key == waiter.key
            self.forget(waiter)
            self.granted(grant, waiter)
        self.line.check_integrity()
        assert len(self.line) == len(self.resumed) + len(self.new)
        assert not (self.line.recall_blocks() == 0 and len(self.line)), "the oldest waits only for what is missing"

    @invariant()
    def books_add_up(self) -> None:
        check_integrity(self.ledger)
        books = self.ledger.status()
        assert books.leased_blocks == sum(len(h.leased) for h in self.holders.values() if not h.fenced)
        assert books.quarantined_blocks == sum(len(h.leased) for h in self.holders.values() if h.fenced)
        assert self.ledger.tickets.keys() == self.tickets.keys()
        for epoch, holder in self.holders.items():
            assert self.ledger.holders[epoch].leased.keys() == holder.leased

    @invariant()
    def what_is_held_is_there(self) -> None:
        held = set()
        for ticket_id, ticket in self.tickets.items():
            chain = self.ledger.tree.chain(self.ledger.tickets[ticket_id].last_block)
            assert [block.hash for block in chain] == ticket.prompt[: ticket.done]
            assert self.ledger.tickets[ticket_id].holders == ticket.holders
            held |= set(ticket.prompt[: ticket.done])
        assert self.ledger.status().pinned_blocks == len(held)

    @invariant()
    def the_index_could_follow(self) -> None:
        for event in self.ledger.drain_events():
            assert (event.block_hash in self.index) != event.here
            (self.index.add if event.here else self.index.remove)(event.block_hash)
        assert self.index == {block_hash for block_hash, _ in self.ledger.hashes()}

    def teardown(self) -> None:
        """When all admitted requests end, everyone in the queue is admitted, and at last every slot is free or
        cached."""
        for epoch in [e for e, holder in self.holders.items() if holder.role != SESSION]:
            self.ledger.end_epoch(epoch)
        waiting = len(self.resumed) + len(self.new)
        for _ in range(waiting + 1):
            for ticket in list(self.ledger.tickets.values()):
                self.ledger.release(ticket.opener[0], [ticket.ticket_id])
            self.line.poll()
        assert len(self.line) == 0
        assert self.ledger.reserved == sum(t.reserved for t in self.ledger.tickets.values())
        for epoch in list(self.ledger.holders):
            self.ledger.end_epoch(epoch)
        check_integrity(self.ledger)
        books = self.ledger.status()
        assert books.free_blocks + books.committed_blocks == NUM_SLOTS
        assert (books.pinned_blocks, books.reserved_blocks, books.tickets, books.holders) == (0, 0, 0, 0)

    def live(self, role: str) -> list[int]:
        return sorted(epoch for epoch, holder in self.holders.items() if holder.role == role and not holder.fenced)

    def workers(self) -> list[int]:
        return self.live("prefill") + self.live("decode")

    def committers(self) -> list[tuple[int, int]]:
        able = {epoch for epoch in self.workers() if self.holders[epoch].leased}
        return sorted((e, t) for t, ticket in self.tickets.items() for e in ticket.holders & able)

    def lost(self) -> bool:
        return any(charge < 0 for holder in self.ledger.holders.values() for charge in holder.leased.values())

    def slots_by_hash(self) -> list[tuple[bytes, int]]:
        return [(block.hash, block.slot) for block in self.ledger.tree.by_hash.values()]

    def granted(self, grant: Grant, waiter: Waiter) -> None:
        left = self.ledger.available - self.ledger.reserved
        assert left >= (self.ledger.decode_reserve if self.tickets else 0), "decodes keep their reserve"
        self.tickets[grant.ticket_id] = ModelTicket(self.prompts[waiter.key], grant.pinned_blocks, {waiter.epoch})

    def forget(self, waiter: Waiter) -> None:
        (self.resumed if waiter.resume else self.new).remove(waiter)

    def let_go(self, epoch: int, ticket_ids: list[int]) -> None:
        for ticket_id in ticket_ids:
            self.tickets[ticket_id].holders.discard(epoch)
            if not self.tickets[ticket_id].holders:
                del self.tickets[ticket_id]


NodeLife.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50)
TestNodeLife = NodeLife.TestCase
