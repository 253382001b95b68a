"""The free slots: one call at a time, short answers, and what goes back."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.block_manager import LEASE_RETRY_S, SPARE_BLOCKS, FreeSlots


def test_it_asks_below_low_up_to_the_target_and_once() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(2, 5)
    assert free_slots.start_lease(0.0, urgent=False) == 5
    assert free_slots.start_lease(0.0, urgent=True) == 0
    free_slots.granted([1, 2, 3, 4, 5], 0.0)
    assert free_slots.start_lease(0.0, urgent=True) == 0
    assert not free_slots.exhausted(0.0)
    assert free_slots.allocate() in {1, 2, 3, 4, 5}


def test_a_short_answer_is_believed_for_a_while() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(1, 4)
    assert free_slots.start_lease(0.0, urgent=True) == 4
    free_slots.granted([], 1.0)
    assert free_slots.exhausted(1.0)
    assert free_slots.start_lease(1.0, urgent=False) == 0
    assert free_slots.start_lease(1.0 + LEASE_RETRY_S, urgent=False) == 4
    assert not free_slots.exhausted(1.0 + LEASE_RETRY_S)


def test_memory_let_go_since_makes_the_answer_void() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(1, 4)
    assert free_slots.start_lease(0.0, urgent=True) == 4
    free_slots.memory_released()
    free_slots.granted([], 0.0)
    assert not free_slots.exhausted(0.0)
    assert free_slots.start_lease(0.0, urgent=False) == 4
    free_slots.granted([], 0.0)
    assert free_slots.exhausted(0.0)


def test_surplus_and_recall() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(2, 4)
    free_slots.free(range(4 + SPARE_BLOCKS))
    assert free_slots.pop_surplus() == ()
    free_slots.free([100])
    assert len(free_slots.pop_surplus()) == SPARE_BLOCKS + 1
    assert len(free_slots) == 4
    free_slots.recall(100)
    assert len(free_slots.pop_surplus()) == 2
    free_slots.set_target(0, 0)
    assert len(free_slots.pop_surplus()) == 2
    free_slots.return_to_node([7])
    assert free_slots.slots == (7,)
    assert free_slots.pop_surplus() == (7,)


def test_integrity_sees_a_slot_that_is_here_twice() -> None:
    free_slots = FreeSlots()
    free_slots.free([1, 1])
    with pytest.raises(AssertionError, match="twice"):
        free_slots.check_integrity()
