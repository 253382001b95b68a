"""Adapters in a worker's slots: waiting, admission past waiters, and no starvation."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.adapter_slots import SLOT_PATIENCE_S
from pillion.engine.scheduling.sequence import SequenceState
from pillion.errors import Internal
from tests.support.ahead_harness import AheadHarness
from tests.support.scheduler_harness import BAD_ADAPTER, SchedulerHarness, prompt, states


def run_out(harness: SchedulerHarness) -> None:
    harness.finish()
    harness.check_answers()


def steps(harness: SchedulerHarness, count: int) -> None:
    for _ in range(count):
        harness.step()
        while harness.answer():
            pass


def ended(harness: SchedulerHarness, seq_id: int | None) -> bool:
    assert seq_id is not None
    return harness.records[seq_id].end is not None


def test_one_step_mixes_adapters_and_the_plain_model() -> None:
    harness = SchedulerHarness(max_loras=2, budget=40)
    for adapter in (0, 1, 2, 1):
        harness.submit(prompt(adapter, 6), 5, adapter=adapter)
    harness.step()
    assert sorted(harness.loading) == ["1", "2"]
    harness.load(2)
    plan = harness.step()
    assert sorted(chunk.sequence.adapter for chunk in plan.scheduled) == ["", "1", "1", "2"]
    assert len(plan.placements) == 2
    assert not harness.step().placements
    run_out(harness)


def test_a_loading_adapter_delays_no_other_sequence() -> None:
    """Sequences that cannot run block neither slots nor the queue."""
    harness = SchedulerHarness(max_loras=1, max_num_seqs=2, budget=8)
    late = [harness.submit(prompt(1, 5), 3, adapter=1) for _ in range(3)]
    others = [harness.submit(prompt(2, 5), 3) for _ in range(4)]
    steps(harness, 20)
    assert all(ended(harness, seq_id) for seq_id in others)
    assert states(harness) == [SequenceState.WAITING] * len(late)
    assert harness.scheduler.positions() == {seq_id: slot for slot, seq_id in enumerate(late, 1)}
    run_out(harness)


def test_idle_adapters_are_evicted_least_recently_used_first() -> None:
    harness = SchedulerHarness(max_loras=2)
    for adapter in (1, 2, 1, 3, 2):
        harness.submit(prompt(1, 5), 2, adapter=adapter)
        run_out(harness)
    # 3 replaced 2, and 2 replaced 1.
    assert harness.adapters.ready == ("2", "3")
    assert harness.evicted_adapters == 2


def test_adapters_are_preloaded_only_into_idle_slots() -> None:
    harness = SchedulerHarness(max_loras=1)
    harness.expect_adapter(1)
    steps(harness, 1)
    assert harness.loading == ["1"]
    harness.load()
    harness.submit(prompt(1, 5), 9, adapter=1)
    steps(harness, 1)
    harness.expect_adapter(2)
    steps(harness, 1)
    assert not harness.loading
    run_out(harness)


def test_more_adapters_than_slots_take_turns() -> None:
    harness = SchedulerHarness(max_loras=2, slots=200)
    for turn in range(12):
        harness.submit(prompt(turn, 9), 6, adapter=1 + turn % 5)
    run_out(harness)
    assert harness.evicted_adapters >= 3


def test_a_busy_adapter_is_drained_for_a_long_waiting_one() -> None:
    """Streams of one adapter follow each other without a gap, so it would never be idle."""
    harness = SchedulerHarness(max_loras=1, max_num_seqs=8, slots=200)
    harness.submit(prompt(1, 5), 20, adapter=1)
    steps(harness, 1)
    harness.load()
    steps(harness, 1)
    other = harness.submit(prompt(2, 5), 4, adapter=2)
    served = 0
    while not ended(harness, other):
        assert served < 100, "the other adapter starves"
        harness.submit(prompt(3, 5), 20, adapter=1)
        harness.load()
        steps(harness, 10)
        served += 1
    assert served * 0.1 > SLOT_PATIENCE_S, "nobody was let past"
    run_out(harness)


def test_an_urgent_stream_does_not_wait_for_queued_streams_of_another_adapter() -> None:
    harness = SchedulerHarness(max_loras=1, max_num_seqs=2, slots=600)
    background = [harness.submit(prompt(number, 5), 20, adapter=1, priority=5) for number in range(40)]
    steps(harness, 1)
    harness.load()
    steps(harness, 1)
    urgent = harness.submit(prompt(1, 5), 4, adapter=2, priority=-5)
    harness.now += SLOT_PATIENCE_S
    for _ in range(200):
        if ended(harness, urgent):
            break
        harness.load()
        steps(harness, 1)
    assert sum(ended(harness, seq_id) for seq_id in background) <= 4
    assert ended(harness, urgent)
    run_out(harness)


def test_a_stream_that_is_stopped_while_its_adapter_loads_leaves_nothing_behind() -> None:
    harness = SchedulerHarness(max_loras=1)
    first = harness.submit(prompt(1, 5), 5, adapter=1)
    steps(harness, 1)
    assert first is not None
    harness.cancel(first)
    waiting = harness.submit(prompt(1, 5), 5, adapter=2)
    steps(harness, 2)
    # The slot stays reserved until the loader has answered.
    assert harness.loading == ["1"]
    assert not ended(harness, waiting)
    harness.load()
    steps(harness, 2)
    assert harness.loading == ["2"]
    run_out(harness)


def test_an_adapter_that_cannot_be_loaded_fails_only_its_sequences() -> None:
    harness = SchedulerHarness(max_loras=1)
    harness.broken_adapters = {2}
    lost = [harness.submit(prompt(1, 5), 5, adapter=2, parallel_seeds=(3,)) for _ in range(2)]
    other = harness.submit(prompt(1, 5), 5, adapter=1)
    run_out(harness)
    for seq_id in lost:
        assert seq_id is not None
        end = harness.records[seq_id].end
        assert end is not None
        assert end.ending is not None
        assert end.ending.error is not None
        assert end.ending.error.message == BAD_ADAPTER
    assert ended(harness, other)


def test_preempted_streams_and_parallel_samples_keep_their_adapter() -> None:
    harness = SchedulerHarness(max_loras=2, slots=18, max_num_seqs=6)
    for adapter in (1, 2, 1):
        harness.submit(prompt(adapter, 10), 24, adapter=adapter, parallel_seeds=(5,))
    run_out(harness)
    assert harness.preemptions


def test_adapters_share_no_blocks() -> None:
    harness = SchedulerHarness(max_loras=2)
    for adapter, cached in ((1, 0), (2, 0), (0, 0), (1, 12), (2, 12), (0, 12)):
        seq_id = harness.submit(prompt(1, 13), 2, adapter=adapter)
        assert seq_id is not None
        harness.finish()
        end = harness.records[seq_id].end
        assert end is not None
        assert end.progress is not None
        assert end.progress.tail_tokens == 13 - cached
    harness.check_answers()


def test_an_adapter_that_was_not_placed_fails_its_streams_and_is_reloaded() -> None:
    harness = SchedulerHarness(max_loras=1, max_num_seqs=1)
    first, second = (harness.submit(prompt(number, 5), 5, adapter=1) for number in (1, 2))
    steps(harness, 1)
    harness.load()
    plan = harness.scheduler.schedule(harness.now)
    assert [chunk.sequence.seq_id for chunk in plan.scheduled] == [first]
    assert plan.placements
    harness.receive(harness.scheduler.fail_step(plan, Internal("broken"), harness.now))
    assert ended(harness, first)
    assert ended(harness, second), "it would run with whatever is in the slot"
    harness.records.clear()
    harness.submit(prompt(3, 5), 5, adapter=1)
    steps(harness, 1)
    assert harness.loading == ["1"]
    run_out(harness)


@pytest.mark.parametrize("state", ["holders", "slot"])
def test_check_integrity_finds_inconsistent_slots(state: str) -> None:
    harness = SchedulerHarness(max_loras=1)
    harness.submit(prompt(1, 5), 20, adapter=1)
    steps(harness, 1)
    harness.load()
    steps(harness, 1)
    (sequence,) = harness.scheduler.sequences.values()
    if state == "holders":
        harness.adapters.leave(sequence)
    else:
        sequence.adapter_slot = 5
    with pytest.raises(AssertionError, match=r"sequence|slot"):
        harness.scheduler.check_integrity()


def test_a_reassigned_slot_survives_the_failed_step_of_its_old_adapter() -> None:
    """The step's only sequence is cancelled meanwhile; when the step fails, its slot belongs to another adapter."""
    harness = AheadHarness(max_loras=1, budget=4)
    first = harness.submit(prompt(1, 9), 5, adapter=1)
    harness.step()
    harness.load()
    assert harness.step().placements
    assert first is not None
    harness.cancel(first)
    harness.submit(prompt(2, 9), 5, adapter=2)
    harness.breaks = "landing"
    harness.step()
    assert harness.loading == ["2"]
    run_out(harness)
