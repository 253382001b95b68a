"""A worker's free slots: decodes grow into them without waiting for the node, which may have them back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pillion.engine.scheduling.block_manager import BlockManager
from tests.support.ahead_harness import AheadHarness
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt


@pytest.mark.parametrize("kind", [SchedulerHarness, AheadHarness])
@pytest.mark.parametrize("late_steps", [1, 2])
def test_slow_node_replies_delay_no_decode(late_steps: int, kind: type[SchedulerHarness]) -> None:
    """Each outcome is heard by the node only ``late_steps`` steps later; a decode needs a slot every BLOCK steps.

    A stream that begins at the end of a block is no such decode yet: its first slot is asked for with its first token.
    """
    harness = kind(slots=200, budget=32, max_num_seqs=4)
    streams = [harness.submit(prompt(seed, 5 + seed), 60) for seed in range(4)]
    for _ in range(BLOCK):
        harness.step()
        while harness.answer():
            pass
    for _ in range(48):
        plan = harness.step()
        assert [chunk.sequence.seq_id for chunk in plan.scheduled] == streams, "a decode waited for a slot"
        while len(harness.unsent) > late_steps:
            harness.answer()
    assert all(len(harness.records[s].token_ids) > 50 > BLOCK for s in streams if s is not None)
    harness.finish()
    harness.check_answers()


def decode(room_tokens: int) -> Any:
    return SimpleNamespace(num_blocks=2, next_start=2 * 16 - room_tokens)


def test_free_slots_are_recallable_unless_needed_at_once() -> None:
    block_manager = BlockManager(16)
    decodes = [decode(2), decode(10), decode(10), decode(16)]
    out = block_manager.finish_outcome(decodes, 0.0, urgent=False, wanted_blocks=0)
    assert out.lease_blocks == 3, "a slot for each decode that fills its block within FREE_SLOTS_TARGET_TOKENS"
    block_manager.granted((7, 8, 9), 0.0)
    block_manager.free_slots.recall(100)
    out = block_manager.finish_outcome(decodes, 0.0, urgent=False, wanted_blocks=0)
    assert len(out.returned_slots) == 2, "the one that grows within FREE_SLOTS_LOW_TOKENS keeps its slot"
    assert out.lease_blocks == 0, "what was recalled is not asked for again at once"
    assert block_manager.finish_outcome(decodes, 0.0, urgent=False, wanted_blocks=0).returned_slots == [], (
        "a recall is for once"
    )
    out = block_manager.finish_outcome([], 0.0, urgent=False, wanted_blocks=0)
    assert len(out.returned_slots) == 1, "without decodes nothing is kept"
