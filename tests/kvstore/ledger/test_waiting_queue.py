"""The queue for memory: its order, and who cannot be overtaken forever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import DECODE, SESSION, Ledger
from pillion.kvstore.ledger.waiting_queue import Waiter, WaitingQueue
from pillion.rules.priority import MAX_PRIORITY, NO_FLOW, PRIORITY_AGING_S, Flow
from pillion.v1.kvnode_pb2 import CommitRun
from tests.support.examples import examples

SLOTS = 8
MAX_WAITING = 60
FLOOD, LONE, HEAVY = Flow(b"flood"), Flow(b"lone"), Flow(b"heavy", 3.0)


class QueueDriver:
    """A pool that is held completely, and the queue for it."""

    def __init__(self, flow: Flow = NO_FLOW, slots: int = SLOTS, tickets: int = 1) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0)
        self.ledger.shape(slots)
        self.line = WaitingQueue(self.ledger, MAX_WAITING)
        self.epoch = self.ledger.attach("edge", SESSION)
        self.ticket_ids = []
        for nonce in range(-tickets, 0):
            waiter = Waiter(epoch=self.epoch, nonce=nonce, hashes=(), total_blocks=slots // tickets, flow=flow)
            grant = self.line.ask(waiter)
            assert grant is not None
            self.ticket_ids.append(grant.ticket_id)

    def ask(
        self,
        nonce: int,
        blocks: int = 4,
        *,
        resume: bool = False,
        priority: int = 0,
        at_s: float = 0.0,
        flow: Flow = NO_FLOW,
    ) -> None:
        waiter = Waiter(
            epoch=self.epoch,
            nonce=nonce,
            hashes=(),
            total_blocks=blocks,
            resume=resume,
            priority=priority,
            flow=flow,
            asked_s=at_s,
        )
        assert self.line.ask(waiter) is None
        self.line.check_integrity()

    def admitted(self) -> list[int]:
        """Return nonces in the order in which they got the memory, each releasing it at once."""
        order = []
        self.ledger.release(self.epoch, self.ticket_ids)
        while grants := self.line.poll():
            order += [grant.key[1] for grant in grants]
            self.ledger.release(self.epoch, [grant.ticket_id for grant in grants])
        check_integrity(self.ledger)
        self.line.check_integrity()
        assert not len(self.line)
        return order

    def served(self, tickets: int) -> list[int]:
        """Return nonces in the order in which they got the memory, each keeping it until ``tickets`` are held."""
        self.ledger.release(self.epoch, self.ticket_ids)
        held: list[int] = []
        order = []
        while len(self.line):
            grants = self.line.poll()
            order += [grant.key[1] for grant in grants]
            held += [grant.ticket_id for grant in grants]
            if len(held) >= tickets or not grants:
                self.ledger.release(self.epoch, [held.pop(0)])
        return order


def test_first_come_first_served() -> None:
    line = QueueDriver()
    for nonce in (2, 3, 4):
        line.ask(nonce, blocks=8 - nonce)
    assert line.admitted() == [2, 3, 4]


def test_running_streams_go_before_urgent_new_prompts() -> None:
    line = QueueDriver()
    line.ask(2, priority=-5)
    line.ask(3, resume=True, priority=5, at_s=1.0)
    assert line.admitted() == [3, 2]


def test_priorities_age() -> None:
    line = QueueDriver()
    line.ask(2, priority=1)
    line.ask(3, priority=0, at_s=0.9 * PRIORITY_AGING_S)
    line.ask(4, priority=0, at_s=1.1 * PRIORITY_AGING_S)
    assert line.admitted() == [3, 2, 4]


def test_cancelled_waiters_keep_the_order_of_the_others() -> None:
    line = QueueDriver()
    for nonce, priority in ((2, 0), (3, -1), (4, 0), (5, 1)):
        line.ask(nonce, priority=priority)
    assert line.line.withdraw((line.epoch, 4))
    assert not line.line.withdraw((line.epoch, 4))
    assert line.admitted() == [3, 2, 5]


def test_waiters_of_an_ended_epoch_are_removed() -> None:
    line = QueueDriver()
    for nonce in (2, 3):
        line.ask(nonce)
    assert line.line.withdraw_epoch(line.epoch) == [(line.epoch, 2), (line.epoch, 3)]
    assert not len(line.line)


def test_requests_that_never_fit_are_rejected_at_once() -> None:
    line = QueueDriver()
    with pytest.raises(Overloaded, match="9 KV blocks, the pool has 8"):
        line.ask(2, blocks=9)


def test_new_prompts_do_not_shut_out_a_preempted_stream() -> None:
    line = QueueDriver()
    for nonce in range(2, 2 + MAX_WAITING):
        line.ask(nonce)
    with pytest.raises(Overloaded, match="wait for KV memory"):
        line.ask(90)
    line.ask(91, resume=True)
    assert line.admitted() == [91, *range(2, 2 + MAX_WAITING)]


def test_a_full_queue_rejects_no_prompt_that_fits() -> None:
    driver = QueueDriver(tickets=0)
    driver.line.max_waiting = 0
    grant = driver.line.ask(Waiter(epoch=driver.epoch, nonce=2, hashes=(), total_blocks=4))
    assert grant is not None
    assert grant.key == (driver.epoch, 2)
    assert not len(driver.line)


def test_an_empty_queue_recalls_no_blocks() -> None:
    driver = QueueDriver()
    assert driver.line.recall_blocks() == 0


def test_fenced_workers_may_not_wait() -> None:
    """Also behind another waiter, when no ticket can be opened yet."""
    driver = QueueDriver()
    driver.ask(2)
    worker = driver.ledger.attach("decode-0", DECODE)
    driver.ledger.fence(worker)
    with pytest.raises(Conflict, match="fenced"):
        driver.line.ask(Waiter(epoch=worker, nonce=3, hashes=(), total_blocks=4))
    with pytest.raises(NotFound, match="void"):
        driver.line.ask(Waiter(epoch=99, nonce=3, hashes=(), total_blocks=4))
    assert len(driver.line) == 1


def test_a_pool_without_a_shape_rejects_waiters() -> None:
    ledger = Ledger(itertools.count(1).__next__, 0)
    line = WaitingQueue(ledger)
    with pytest.raises(Unavailable, match="no shape"):
        line.ask(Waiter(epoch=ledger.attach("edge", SESSION), nonce=2, hashes=(), total_blocks=4))


@pytest.mark.parametrize("total_blocks", [1, 2])
def test_a_prompt_needs_a_block_beyond_its_hashes(total_blocks: int) -> None:
    driver = QueueDriver()
    with pytest.raises(InvalidRequest, match="total_blocks"):
        driver.line.ask(Waiter(epoch=driver.epoch, nonce=2, hashes=(b"a" * 32, b"b" * 32), total_blocks=total_blocks))


def test_a_nonce_is_used_once_by_waiters_and_tickets() -> None:
    driver = QueueDriver()
    driver.ask(2)
    for nonce in (-1, 2):
        with pytest.raises(InvalidRequest, match="nonce"):
            driver.line.ask(Waiter(epoch=driver.epoch, nonce=nonce, hashes=(), total_blocks=1))


@pytest.mark.parametrize("expected_blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("adopt", [False, True])
def test_a_ticket_is_adopted_if_the_expected_blocks_are_present(adopt: bool, expected_blocks: int) -> None:
    driver = QueueDriver(tickets=0)
    hashes = split_hashes(chain_hashes(bytes(32), (1, 2, 3), 1))
    ticket = driver.ledger.admit(driver.epoch, 1, hashes[:2], 3)
    assert ticket is not None
    slots = driver.ledger.adopt(driver.epoch, ticket.ticket_id, 2).leased_slots
    run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(hashes[:2]))
    [result] = driver.ledger.commit(driver.epoch, [run])
    assert not result.refusal
    waiter = Waiter(
        epoch=driver.epoch,
        nonce=2,
        hashes=tuple(hashes),
        total_blocks=5,
        adopt=adopt,
        expected_blocks=expected_blocks,
    )
    grant = driver.line.ask(waiter)
    assert grant is not None
    assert grant.pinned_blocks == 2
    leased = None if grant.adopted is None else len(grant.adopted.leased_slots)
    assert leased == (3 if adopt and expected_blocks <= 2 else None)
    check_integrity(driver.ledger)


def test_a_tenant_without_memory_goes_before_a_flood_that_has_it_all() -> None:
    """The flood's preempted streams also come after it: between tenants, shares decide."""
    line = QueueDriver(FLOOD, tickets=2)
    line.ask(2, flow=FLOOD)
    line.ask(3, flow=FLOOD, resume=True)
    line.ask(4, flow=LONE, at_s=5.0)
    line.ledger.release(line.epoch, [line.ticket_ids.pop()])
    assert [grant.key[1] for grant in line.line.poll()] == [4]
    assert line.admitted() == [3, 2]


def test_memory_is_shared_by_weights() -> None:
    line = QueueDriver(slots=16)
    for nonce in range(2, 10):
        line.ask(nonce, blocks=1, flow=FLOOD)
        line.ask(nonce + 100, blocks=1, flow=HEAVY)
    order = line.served(8)
    assert sum(nonce > 100 for nonce in order[:8]) == 6
    assert sorted(order[8:10]) == [4, 108]


def test_long_prompts_are_charged_by_their_size() -> None:
    line = QueueDriver(slots=16)
    for nonce in range(2, 6):
        line.ask(nonce, blocks=4, flow=FLOOD)
    for nonce in range(6, 18):
        line.ask(nonce, blocks=1, flow=LONE)
    order = line.served(5)
    assert order[:5] == [2, 6, 7, 8, 9]


def test_raised_and_background_priorities_override_tenant_shares() -> None:
    line = QueueDriver()
    line.ask(2, flow=FLOOD, at_s=2.0, priority=1)
    line.ask(3, flow=LONE, at_s=3.0, priority=5)
    line.ask(4, flow=HEAVY, at_s=4.0, priority=-1)
    line.ask(5, flow=NO_FLOW, at_s=1.0, priority=MAX_PRIORITY)
    assert line.admitted() == [4, 2, 3, 5]


def whose_turn(waiters: list[Waiter], held: dict[int, Waiter]) -> Waiter:
    """Return the first of each flow; among equally urgent ones, the one whose flow claims least relative to its weight;
    and among these, the first. ``held`` are the waiters that have a ticket."""

    def place(waiter: Waiter) -> tuple[bool, float]:
        return not waiter.resume, waiter.asked_s + waiter.priority * PRIORITY_AGING_S

    def share(waiter: Waiter) -> tuple[float, tuple[bool, float]]:
        claimed = sum(other.total_blocks for other in held.values() if other.flow == waiter.flow)
        return claimed / waiter.flow.weight, place(waiter)

    heads = [min((w for w in waiters if w.flow == flow), key=place) for flow in {waiter.flow for waiter in waiters}]
    ranks: dict[int, list[Waiter]] = {}
    for head in heads:
        ranks.setdefault((head.priority >= 0) + (head.priority >= MAX_PRIORITY), []).append(head)
    return min((min(rank, key=share) for rank in ranks.values()), key=place)


ASKS = st.tuples(
    st.sampled_from([NO_FLOW, FLOOD, HEAVY]), st.integers(1, 6), st.booleans(), st.sampled_from([-1, 0, 0, 1, 100])
)


@settings(max_examples=examples(200))
@given(st.lists(st.one_of(ASKS, st.integers(0, 7)), min_size=20, max_size=60))
def test_memory_is_allocated_in_turn(events: list) -> None:
    """An event is a request for memory, or a release."""
    driver = QueueDriver(tickets=0, slots=12)
    waiting: list[Waiter] = []
    held: dict[int, Waiter] = {}
    for number, event in enumerate(events):
        if isinstance(event, int):
            for ticket_id in list(held)[event : event + 1]:
                driver.ledger.release(driver.epoch, [ticket_id])
                del held[ticket_id]
            grants = driver.line.poll()
        else:
            flow, blocks, resume, priority = event
            waiter = Waiter(
                epoch=driver.epoch,
                nonce=number + 1,
                hashes=(),
                total_blocks=blocks,
                resume=resume,
                priority=priority,
                flow=flow,
                asked_s=number / 100,
            )
            waiting.append(waiter)
            grant = driver.line.ask(waiter)
            grants = [*([grant] if grant is not None else ()), *driver.line.poll()]
        for grant in grants:
            waiter = whose_turn(waiting, held)
            assert grant.key == waiter.key
            waiting.remove(waiter)
            held[grant.ticket_id] = waiter
        if waiting:
            assert driver.line.recall_blocks() == driver.ledger.shortage((), whose_turn(waiting, held).total_blocks) > 0
        check_integrity(driver.ledger)
        driver.line.check_integrity()
        assert len(driver.line) == len(waiting)
