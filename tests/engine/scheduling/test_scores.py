"""Prompts with log probabilities: caching, preemption and chunks neither lose nor repeat a score."""

from __future__ import annotations

from pillion.types import PoolingParams
from tests.support.ahead_harness import AheadHarness
from tests.support.scheduler_harness import SchedulerHarness, prompt


def preempt(harness: SchedulerHarness, seq_id: int) -> None:
    """Take a stream's memory, as if another one needed it."""
    harness.scheduler._close(harness.scheduler.sequences[seq_id], harness.now, commit_rest=True, resume=True)


def test_a_preempted_scored_prompt_skips_only_scored_tokens() -> None:
    harness = SchedulerHarness(slots=64, budget=10)
    harness.submit(prompt(1, 40), 2)
    harness.finish()
    seq_id = harness.submit(prompt(1, 40), 3, scored=True)
    assert seq_id is not None
    harness.step()
    harness.step()
    assert len(harness.records[seq_id].scores) == 20
    preempt(harness, seq_id)
    while harness.answer():
        pass
    harness.receive_flush()
    while harness.answer():
        pass
    # The node has all ten blocks; those of twenty tokens are used.
    assert harness.scheduler.sequences[seq_id].num_computed == 20
    harness.finish()
    harness.check_answers()


def test_recomputation_scores_no_token_twice() -> None:
    harness = SchedulerHarness(slots=64, budget=10)
    seq_id = harness.submit(prompt(1, 40), 3, scored=True)
    assert seq_id is not None
    harness.scheduler.sequences[seq_id].may_commit = False
    harness.step()
    harness.step()
    preempt(harness, seq_id)
    harness.finish()
    assert harness.preemptions == 1
    harness.check_answers()


def test_scores_of_a_cancelled_sequence_are_dropped() -> None:
    harness = AheadHarness(budget=24, max_num_seqs=3)
    ids = [harness.submit(prompt(seed, 8), 3, scored=True) for seed in (1, 2, 3)]
    harness.step()
    harness.cancel(ids[0])  # type: ignore[arg-type]
    harness.finish()
    assert all(len(harness.records[one].scores) == 7 for one in ids[1:] if one is not None)
    harness.check_answers()


def test_scored_rows_of_a_step_are_limited() -> None:
    harness = SchedulerHarness(slots=64, budget=16)
    harness.scheduler._max_scored_rows = 5
    scored = harness.submit(prompt(1, 30), 3, scored=True)
    beside = harness.submit(prompt(2, 30), 3, scored=True)
    plain = harness.submit(prompt(3, 30), 3)
    plan = harness.scheduler.schedule(harness.now)
    assert [(chunk.sequence.seq_id, chunk.count, chunk.scores) for chunk in plan.scheduled] == [
        (scored, 5, 5),
        (plain, 11, 0),
    ]
    assert beside is not None


def test_texts_with_requested_logits_count_as_scored_rows() -> None:
    """A text that would exceed the row limit waits; a text with a vector has no logits and does not."""
    harness = SchedulerHarness(slots=64, budget=64, max_num_seqs=8)
    harness.scheduler._max_scored_rows = 2
    asked = [harness.submit(prompt(seed, 6), 0) for seed in range(1, 6)]
    for seq_id, ids in zip(asked, ((5,), (), (6, 7), (8,), ()), strict=True):
        assert seq_id is not None
        sequence = harness.scheduler.sequences[seq_id]
        sequence.pooling = PoolingParams(rows=range(5, 6), logits_of=ids)
        sequence.num_scored, sequence.score_end = 5, 6
    plan = harness.scheduler.schedule(harness.now)
    assert [(chunk.sequence.seq_id, chunk.pools) for chunk in plan.scheduled] == [
        (seq_id, 1) for number, seq_id in enumerate(asked) if number != 3
    ]
