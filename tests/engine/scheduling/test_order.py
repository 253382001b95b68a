"""The order of sequences: admission, preemption, no starvation."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import SequenceState
from pillion.errors import ConfigError
from pillion.rules.priority import PRIORITY_AGING_S
from tests.support.scheduler_harness import SchedulerHarness, prompt, states


def served(harness: SchedulerHarness) -> list[int]:
    """Run one step; return who got tokens, in order."""
    ids = [chunk.sequence.seq_id for chunk in harness.step().scheduled]
    while harness.answer():
        pass
    return ids


def test_the_more_urgent_prompt_tail_goes_first() -> None:
    harness = SchedulerHarness(slots=100, budget=8, max_num_seqs=4)
    usual = harness.submit(prompt(1, 30), 4)
    urgent = harness.submit(prompt(2, 30), 4, priority=-1)
    patient = harness.submit(prompt(3, 30), 4, priority=1)
    assert served(harness) == [urgent]
    harness.finish()
    ends = {
        i: record.end.progress.first_token_s
        for i, record in harness.records.items()
        if record.end and record.end.progress
    }
    assert sorted(ends, key=ends.__getitem__) == [urgent, usual, patient]
    harness.check_answers()


def test_a_started_prompt_tail_runs_before_an_equally_urgent_one() -> None:
    harness = SchedulerHarness(slots=100, budget=8, max_num_seqs=4)
    first = harness.submit(prompt(1, 30), 4)
    assert served(harness) == [first]
    harness.submit(prompt(2, 3), 4)
    assert served(harness) == [first]


def measured(**limits: int) -> SchedulerHarness:
    """A scheduler with measured steps, so that it can predict a prompt's time."""
    harness = SchedulerHarness(**limits, token_s=0.005)
    harness.submit(prompt(99, 30), 2)
    harness.finish()
    assert harness.scheduler.budget.cost.steps
    return harness


def test_a_short_prompt_overtakes_a_begun_long_one_between_two_steps() -> None:
    harness = measured(slots=400, budget=8, max_num_seqs=4)
    long = harness.submit(prompt(1, 300), 2)
    assert served(harness) == [long]
    short = harness.submit(prompt(2, 3), 2)
    assert served(harness) == [short, long]
    harness.finish()
    harness.check_answers()


def test_a_long_prompt_waits_in_proportion_to_its_own_length_at_most() -> None:
    harness = measured(slots=2000, budget=8, max_num_seqs=4)
    long = harness.submit(prompt(1, 120), 1)
    assert long is not None
    arrived_s = harness.now
    patience_s = harness.scheduler.sequences[long].prompt_order - arrived_s
    assert patience_s > 0
    for number in range(400):
        if harness.records[long].end is not None:
            break
        harness.submit(prompt(100 + number, 12), 1)
        served(harness)
    end = harness.records[long].end
    assert end is not None
    assert end.progress is not None
    harness.finish()
    harness.check_answers()
    overtook = [
        record.end.progress.arrived_s - arrived_s
        for record in harness.records.values()
        if record.end and record.end.progress and record.end.progress.first_token_s <= end.progress.first_token_s
    ]
    assert len([s for s in overtook if s > 0]) > 5, "few overtook it: the scene shows little"
    assert max(overtook) <= patience_s


def test_a_migrated_stream_keeps_its_arrival_order() -> None:
    harness = measured(slots=400, budget=8, max_num_seqs=4)
    moved = harness.submit(prompt(1, 60), 8)
    assert moved is not None
    sequence = harness.scheduler.sequences[moved]
    sequence.prompt_tokens = 50
    sequence.wait_for(5.0)
    assert sequence.prompt_order == sequence.queue_order


def test_a_long_wait_outranks_urgency() -> None:
    harness = SchedulerHarness(slots=100, budget=8, max_num_seqs=4)
    patient = harness.submit(prompt(1, 30), 4, priority=2)
    harness.now = 2 * PRIORITY_AGING_S + 0.5
    harness.submit(prompt(2, 30), 4)
    assert served(harness) == [patient]


def test_a_patient_prompt_tail_is_not_starved_by_a_stream_of_urgent_ones() -> None:
    harness = SchedulerHarness(slots=400, budget=4, max_num_seqs=2)
    patient = harness.submit(prompt(1, 40), 2, priority=1)
    assert patient is not None
    for number in range(400):
        if harness.records[patient].end is not None:
            break
        harness.submit(prompt(number, 12), 1, priority=0)
        harness.now += 0.2
        served(harness)
    harness.finish()
    harness.check_answers()
    progress = {i: record.end.progress for i, record in harness.records.items() if record.end and record.end.progress}
    before = [m.arrived_s for m in progress.values() if m.first_step_s < progress[patient].first_step_s]
    # The load is three times the capacity. But the request competes only with those that came within a level of aging,
    # and, once begun, those of its class.
    assert len(before) > 20
    assert max(before) <= 2 * PRIORITY_AGING_S


def test_an_urgent_prompt_goes_before_a_begun_one() -> None:
    harness = SchedulerHarness(slots=100, budget=8, max_num_seqs=4)
    usual = harness.submit(prompt(1, 30), 4)
    assert served(harness) == [usual]
    urgent = harness.submit(prompt(2, 30), 4, priority=-1)
    assert served(harness) == [urgent]


def test_the_least_urgent_is_preempted_even_for_newer_ones() -> None:
    harness = SchedulerHarness(slots=20, budget=32, max_num_seqs=4)
    patient = harness.submit(prompt(1, 8), 40, priority=1)
    urgent = [harness.submit(prompt(seed, 8), 40, priority=-1) for seed in (2, 3)]
    while SequenceState.RESUMING not in states(harness):
        served(harness)
        assert harness.now < 1, "nobody was preempted"
    assert patient is not None
    assert harness.scheduler.sequences[patient].state is SequenceState.RESUMING
    assert all(harness.scheduler.sequences[i].state is SequenceState.RUNNING for i in urgent if i is not None)
    harness.finish()
    harness.check_answers()


def test_a_preempted_sequence_does_not_run_in_the_same_step() -> None:
    harness = SchedulerHarness(slots=14, budget=32, max_num_seqs=4)
    harness.submit(prompt(0, 8), 40)
    patient = harness.submit(prompt(1, 10), 40, priority=1)
    harness.now = 3 * PRIORITY_AGING_S
    # They come after the patient one in queue order, so the step has planned it before they ask for memory.
    later = [harness.submit(prompt(seed, 8), 40) for seed in (2, 3)]
    assert patient is not None
    ids = served(harness)
    while harness.scheduler.sequences[patient].state is SequenceState.RUNNING:
        ids = served(harness)
        assert harness.now < 3 * PRIORITY_AGING_S + 1, "nobody was preempted"
    assert patient not in ids
    assert set(later) & set(ids)
    harness.finish()
    harness.check_answers()


def test_the_oldest_is_not_preempted_even_if_it_is_the_least_urgent() -> None:
    harness = SchedulerHarness(slots=16, budget=24, max_num_seqs=4)
    head = harness.submit(prompt(0, 8), 40, priority=1)
    harness.now = 2 * PRIORITY_AGING_S
    for seed in (1, 2):
        assert harness.submit(prompt(seed, 8), 40) is not None
    harness.finish()
    assert head is not None
    end = harness.records[head].end
    assert end is not None
    assert end.progress is not None
    assert end.progress.preemptions == 0
    assert harness.preemptions > 0
    harness.check_answers()


def test_a_preempted_stream_resumes_before_new_ones() -> None:
    harness = SchedulerHarness(slots=16, budget=24, max_num_seqs=2)
    for seed in range(2):
        harness.submit(prompt(seed, 15), 20)
    while SequenceState.RESUMING not in states(harness):
        served(harness)
    # Its memory comes when the other one ends; a new prompt queues behind it.
    while SequenceState.PREEMPTED not in states(harness):
        served(harness)
        if harness.now < 3:
            harness.submit(prompt(9, 3), 2)
    waiting = list(harness.scheduler.queues.waiting)
    ids = served(harness)
    assert ids[0] == 2
    assert waiting, "nobody waited: the scene shows nothing"
    harness.finish()
    harness.check_answers()


def test_whole_prompts_wait_until_they_fit() -> None:
    harness = SchedulerHarness(slots=100, budget=24, max_num_seqs=3, max_whole_tokens=23)
    for seed in range(3):
        assert harness.submit(prompt(seed, 15), 4) is not None
    assert [chunk.count for chunk in harness.step().scheduled] == [15]
    assert [chunk.count for chunk in harness.step().scheduled] == [1, 15]
    harness.finish()
    harness.check_answers()


def test_whole_prompts_need_a_budget_that_holds_the_longest_one() -> None:
    with pytest.raises(ConfigError, match="max-model-len 64"):
        Scheduler(blocks=BlockManager(4), max_num_batched_tokens=63, max_num_seqs=4, max_whole_tokens=64)
    Scheduler(blocks=BlockManager(4), max_num_batched_tokens=66, max_num_seqs=4, max_whole_tokens=64)
