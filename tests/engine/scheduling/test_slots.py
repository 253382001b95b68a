"""The free slots: one call at a time, short answers, and what goes back."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.block_manager import LEASE_RETRY_S, SPARE_BLOCKS, FreeSlots


def test_one_lease_refills_free_slots_to_the_target() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(2, 5)
    assert free_slots.start_lease(0.0, urgent=False) == 5
    assert free_slots.start_lease(0.0, urgent=True) == 0
    free_slots.granted([1, 2, 3, 4, 5], 0.0)
    assert free_slots.start_lease(0.0, urgent=True) == 0
    assert not free_slots.exhausted(0.0)
    assert free_slots.allocate() in {1, 2, 3, 4, 5}


def test_a_short_grant_suspends_leases_for_a_while() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(1, 4)
    assert free_slots.start_lease(0.0, urgent=True) == 4
    free_slots.granted([], 1.0)
    assert free_slots.exhausted(1.0)
    assert free_slots.start_lease(1.0, urgent=False) == 0
    assert free_slots.start_lease(1.0 + LEASE_RETRY_S, urgent=False) == 4
    assert not free_slots.exhausted(1.0 + LEASE_RETRY_S)


def test_memory_released_meanwhile_voids_a_short_grant() -> None:
    free_slots = FreeSlots()
    free_slots.set_target(1, 4)
    assert free_slots.start_lease(0.0, urgent=True) == 4
    free_slots.memory_released()
    free_slots.granted([], 0.0)
    assert not free_slots.exhausted(0.0)
    assert free_slots.start_lease(0.0, urgent=False) == 4
    free_slots.granted([], 0.0)
    assert free_slots.exhausted(0.0)


def test_surplus_and_recalled_slots_are_returned() -> None:
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


def test_check_integrity_finds_a_duplicate_slot() -> None:
    free_slots = FreeSlots()
    free_slots.free([1, 1])
    with pytest.raises(AssertionError, match="twice"):
        free_slots.check_integrity()
