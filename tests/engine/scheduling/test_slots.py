"""The stock of free slots: one call at a time, short answers, and what goes back."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.block_manager import LEASE_RETRY_S, SPARE_BLOCKS, SlotStock


def test_it_asks_below_low_up_to_the_target_and_once() -> None:
    stock = SlotStock()
    stock.aim(2, 5)
    assert stock.wanted(0.0, urgent=False) == 5
    assert stock.wanted(0.0, urgent=True) == 0
    stock.granted([1, 2, 3, 4, 5], 0.0)
    assert stock.wanted(0.0, urgent=True) == 0
    assert not stock.exhausted(0.0)
    assert stock.take() in {1, 2, 3, 4, 5}


def test_a_short_answer_is_believed_for_a_while() -> None:
    stock = SlotStock()
    stock.aim(1, 4)
    assert stock.wanted(0.0, urgent=True) == 4
    stock.granted([], 1.0)
    assert stock.exhausted(1.0)
    assert stock.wanted(1.0, urgent=False) == 0
    assert stock.wanted(1.0 + LEASE_RETRY_S, urgent=False) == 4
    assert not stock.exhausted(1.0 + LEASE_RETRY_S)


def test_memory_let_go_since_makes_the_answer_void() -> None:
    stock = SlotStock()
    stock.aim(1, 4)
    assert stock.wanted(0.0, urgent=True) == 4
    stock.memory_is_coming()
    stock.granted([], 0.0)
    assert not stock.exhausted(0.0)
    assert stock.wanted(0.0, urgent=False) == 4
    stock.granted([], 0.0)
    assert stock.exhausted(0.0)


def test_surplus_and_recall() -> None:
    stock = SlotStock()
    stock.aim(2, 4)
    stock.give(range(4 + SPARE_BLOCKS))
    assert stock.surplus() == ()
    stock.give([100])
    assert len(stock.surplus()) == SPARE_BLOCKS + 1
    assert len(stock) == 4
    stock.recall(100)
    assert len(stock.surplus()) == 2
    stock.aim(0, 0)
    assert len(stock.surplus()) == 2
    stock.send_back([7])
    assert stock.slots == (7,)
    assert stock.surplus() == (7,)


def test_integrity_sees_a_slot_that_is_here_twice() -> None:
    stock = SlotStock()
    stock.give([1, 1])
    with pytest.raises(AssertionError, match="twice"):
        stock.check_integrity()
