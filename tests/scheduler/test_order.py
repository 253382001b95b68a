"""Who goes first, who gives way, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import SequenceState
from pillion.errors import ConfigError
from pillion.priority import PRIORITY_AGING_S
from tests.support.scheduler_line import SchedulerLine, prompt, states


def served(line: SchedulerLine) -> list[int]:
    """One step; who got tokens, in order."""
    ids = [piece.sequence.seq_id for piece in line.step().pieces]
    while line.answer():
        pass
    return ids


def test_the_more_urgent_prompt_tail_goes_first() -> None:
    line = SchedulerLine(slots=100, budget=8, max_num_seqs=4)
    usual = line.submit(prompt(1, 30), 4)
    urgent = line.submit(prompt(2, 30), 4, priority=-1)
    patient = line.submit(prompt(3, 30), 4, priority=1)
    assert served(line) == [urgent]
    line.finish()
    ends = {i: said.end.progress.first_token_s for i, said in line.said.items() if said.end and said.end.progress}
    assert sorted(ends, key=ends.__getitem__) == [urgent, usual, patient]
    line.check_answers()


def test_a_begun_prompt_tail_is_not_left_for_one_as_urgent() -> None:
    line = SchedulerLine(slots=100, budget=8, max_num_seqs=4)
    first = line.submit(prompt(1, 30), 4)
    assert served(line) == [first]
    line.submit(prompt(2, 3), 4)
    assert served(line) == [first]


def test_who_has_waited_long_enough_goes_before_the_urgent() -> None:
    line = SchedulerLine(slots=100, budget=8, max_num_seqs=4)
    patient = line.submit(prompt(1, 30), 4, priority=2)
    line.now = 2 * PRIORITY_AGING_S + 0.5
    line.submit(prompt(2, 30), 4)
    assert served(line) == [patient]


def test_a_patient_prompt_tail_is_not_starved_by_a_stream_of_urgent_ones() -> None:
    line = SchedulerLine(slots=400, budget=4, max_num_seqs=2)
    patient = line.submit(prompt(1, 40), 2, priority=1)
    assert patient is not None
    for number in range(400):
        if line.said[patient].end is not None:
            break
        line.submit(prompt(number, 12), 1, priority=0)
        line.now += 0.2
        served(line)
    line.finish()
    line.check_answers()
    progress = {i: said.end.progress for i, said in line.said.items() if said.end and said.end.progress}
    before = [m.arrived_s for m in progress.values() if m.first_step_s < progress[patient].first_step_s]
    # Three times as much comes as can be served. Yet it competes only with those that came within a level of aging, and
    # the class of a begun one, after it.
    assert len(before) > 20
    assert max(before) <= 2 * PRIORITY_AGING_S


def test_an_urgent_prompt_goes_before_a_begun_one() -> None:
    line = SchedulerLine(slots=100, budget=8, max_num_seqs=4)
    usual = line.submit(prompt(1, 30), 4)
    assert served(line) == [usual]
    urgent = line.submit(prompt(2, 30), 4, priority=-1)
    assert served(line) == [urgent]


def test_the_least_urgent_gives_way_even_to_newer_ones() -> None:
    line = SchedulerLine(slots=20, budget=32, max_num_seqs=4)
    patient = line.submit(prompt(1, 8), 40, priority=1)
    urgent = [line.submit(prompt(seed, 8), 40, priority=-1) for seed in (2, 3)]
    while SequenceState.RESUMING not in states(line):
        served(line)
        assert line.now < 1, "nobody was preempted"
    assert patient is not None
    assert line.scheduler.sequences[patient].state is SequenceState.RESUMING
    assert all(line.scheduler.sequences[i].state is SequenceState.RUNNING for i in urgent if i is not None)
    line.finish()
    line.check_answers()


def test_who_gives_way_to_a_later_one_does_not_run_in_that_step() -> None:
    line = SchedulerLine(slots=14, budget=32, max_num_seqs=4)
    line.submit(prompt(0, 8), 40)
    patient = line.submit(prompt(1, 10), 40, priority=1)
    line.now = 3 * PRIORITY_AGING_S
    # Behind the patient one by rank, so the step has planned that one already when these ask for memory.
    later = [line.submit(prompt(seed, 8), 40) for seed in (2, 3)]
    assert patient is not None
    ids = served(line)
    while line.scheduler.sequences[patient].state is SequenceState.RUNNING:
        ids = served(line)
        assert line.now < 3 * PRIORITY_AGING_S + 1, "nobody was preempted"
    assert patient not in ids
    assert set(later) & set(ids)
    line.finish()
    line.check_answers()


def test_the_head_is_spared_even_if_it_is_the_least_urgent() -> None:
    line = SchedulerLine(slots=16, budget=24, max_num_seqs=4)
    head = line.submit(prompt(0, 8), 40, priority=1)
    line.now = 2 * PRIORITY_AGING_S
    for seed in (1, 2):
        assert line.submit(prompt(seed, 8), 40) is not None
    line.finish()
    assert head is not None
    end = line.said[head].end
    assert end is not None
    assert end.progress is not None
    assert end.progress.preemptions == 0
    assert line.preemptions > 0
    line.check_answers()


def test_a_preempted_stream_comes_back_before_new_ones() -> None:
    line = SchedulerLine(slots=16, budget=24, max_num_seqs=2)
    for seed in range(2):
        line.submit(prompt(seed, 15), 20)
    while SequenceState.RESUMING not in states(line):
        served(line)
    # Its memory comes when the other one ends; a prompt that arrives meanwhile gets in line behind it.
    while SequenceState.PREEMPTED not in states(line):
        served(line)
        if line.now < 3:
            line.submit(prompt(9, 3), 2)
    waiting = list(line.scheduler.queues.waiting)
    ids = served(line)
    assert ids[0] == 2
    assert waiting, "nobody waited: the scene shows nothing"
    line.finish()
    line.check_answers()


def test_whole_prompts_wait_until_they_fit() -> None:
    line = SchedulerLine(slots=100, budget=24, max_num_seqs=3, max_whole_tokens=23)
    for seed in range(3):
        assert line.submit(prompt(seed, 15), 4) is not None
    assert [piece.count for piece in line.step().pieces] == [15]
    assert [piece.count for piece in line.step().pieces] == [1, 15]
    line.finish()
    line.check_answers()


def test_whole_prompts_need_a_budget_that_holds_the_longest_one() -> None:
    with pytest.raises(ConfigError, match="max-model-len 64"):
        Scheduler(block_size=4, max_num_batched_tokens=63, max_num_seqs=4, max_whole_tokens=64)
    Scheduler(block_size=4, max_num_batched_tokens=66, max_num_seqs=4, max_whole_tokens=64)
