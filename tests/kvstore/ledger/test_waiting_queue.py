"""The line for memory: who comes first, and who cannot be overtaken for ever."""

from __future__ import annotations

import itertools

import pytest

from pillion.errors import Overloaded
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import SESSION
from pillion.kvstore.ledger.waiting_queue import Waiter, WaitingQueue
from pillion.priority import PRIORITY_AGING_S

SLOTS = 8
MAX_WAITING = 16


class QueueDriver:
    """A pool that somebody holds whole, and the line before it."""

    def __init__(self) -> None:
        self.ledger = Ledger(itertools.count(1).__next__, 0)
        self.ledger.shape(SLOTS)
        self.line = WaitingQueue(self.ledger, MAX_WAITING)
        self.epoch = self.ledger.attach("edge", SESSION)
        holding = self.line.ask(Waiter(epoch=self.epoch, nonce=1, hashes=(), total_blocks=SLOTS))
        assert holding is not None
        self.ticket_id = holding.ticket_id

    def ask(self, nonce: int, blocks: int = 4, *, resume: bool = False, priority: int = 0, at_s: float = 0.0) -> None:
        waiter = Waiter(
            epoch=self.epoch,
            nonce=nonce,
            hashes=(),
            total_blocks=blocks,
            resume=resume,
            priority=priority,
            asked_s=at_s,
        )
        assert self.line.ask(waiter) is None

    def admitted(self) -> list[int]:
        """Nonces in the order in which the memory went to them, each giving it back at once."""
        order = []
        self.ledger.release(self.epoch, [self.ticket_id])
        while grants := self.line.poll():
            order += [grant.key[1] for grant in grants]
            self.ledger.release(self.epoch, [grant.ticket_id for grant in grants])
        check_integrity(self.ledger)
        assert not len(self.line)
        return order


def test_first_come_first_served() -> None:
    line = QueueDriver()
    for nonce in (2, 3, 4):
        line.ask(nonce, blocks=8 - nonce)
    assert line.admitted() == [2, 3, 4]


def test_who_is_read_already_comes_before_new_prompts_however_urgent() -> None:
    line = QueueDriver()
    line.ask(2, priority=-5)
    line.ask(3, resume=True, priority=5, at_s=1.0)
    assert line.admitted() == [3, 2]


def test_the_urgent_one_comes_first_until_the_other_has_waited_long_enough() -> None:
    line = QueueDriver()
    line.ask(2, priority=1)
    line.ask(3, priority=0, at_s=0.9 * PRIORITY_AGING_S)
    line.ask(4, priority=0, at_s=1.1 * PRIORITY_AGING_S)
    assert line.admitted() == [3, 2, 4]


def test_who_goes_away_leaves_the_others_in_order() -> None:
    line = QueueDriver()
    for nonce, priority in ((2, 0), (3, -1), (4, 0), (5, 1)):
        line.ask(nonce, priority=priority)
    assert line.line.withdraw((line.epoch, 4))
    assert not line.line.withdraw((line.epoch, 4))
    assert line.admitted() == [3, 2, 5]


def test_an_epoch_that_is_gone_takes_its_waiters_along() -> None:
    line = QueueDriver()
    for nonce in (2, 3):
        line.ask(nonce)
    assert line.line.withdraw_epoch(line.epoch) == [(line.epoch, 2), (line.epoch, 3)]
    assert not len(line.line)


def test_what_never_fits_is_refused_at_once() -> None:
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
