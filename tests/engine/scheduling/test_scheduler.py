"""The scheduler's guarantees, one scenario each."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import SequenceState
from pillion.engine.scheduling.step_plan import Outcome
from pillion.errors import ConfigError, Internal
from pillion.types import FinishReason
from tests.support.fake_backend import greedy
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt, states


def run_steps(harness: SchedulerHarness, count: int) -> None:
    for _ in range(count):
        harness.step()
        while harness.answer():
            pass


def test_a_step_is_decodes_then_prompt_tails_filled_exactly() -> None:
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    first = harness.submit(prompt(1, 10), 20)
    harness.step()
    second, third = harness.submit(prompt(2, 11), 20), harness.submit(prompt(3, 30), 20)
    plan = harness.step()
    # One decode, a whole short prompt tail, and the rest of the budget of the long one, cut within a block.
    assert [(chunk.sequence.seq_id, chunk.count) for chunk in plan.scheduled] == [(first, 1), (second, 11), (third, 4)]
    assert [chunk.samples for chunk in plan.scheduled] == [True, True, False]
    plan = harness.step()
    assert [(chunk.sequence.seq_id, chunk.count) for chunk in plan.scheduled] == [(first, 1), (second, 1), (third, 14)]
    harness.finish()
    harness.check_answers()


def test_a_long_prompt_never_delays_a_decode() -> None:
    harness = SchedulerHarness(slots=200, budget=8, max_num_seqs=4)
    first = harness.submit(prompt(1, 5), 60)
    run_steps(harness, 1)
    harness.submit(prompt(2, 300), 4)
    for _ in range(40):
        assert harness.step().scheduled[0].sequence.seq_id == first
        while harness.answer():
            pass
    harness.finish()
    harness.check_answers()


def test_at_most_max_num_seqs_run_and_the_queue_is_fifo() -> None:
    harness = SchedulerHarness(budget=32, max_num_seqs=2)
    ids = [harness.submit(prompt(seed, 6), 5) for seed in range(5)]
    harness.step()
    assert states(harness) == [SequenceState.RUNNING] * 2 + [SequenceState.WAITING] * 3
    harness.finish()
    ends = [
        (record.end.progress.ended_s, i) for i, record in harness.records.items() if record.end and record.end.progress
    ]
    assert [i for _, i in sorted(ends)] == ids


def test_generated_text_is_committed_too() -> None:
    harness = SchedulerHarness()
    first = harness.submit(prompt(1, 10), 11)
    harness.finish()
    assert first is not None
    tokens = prompt(1, 10) + harness.records[first].token_ids
    # 20 tokens have KV, the 21st has none: five blocks.
    assert harness.ledger.status().committed_blocks == 20 // BLOCK
    again = harness.submit([*tokens, 1], 3)
    assert again is not None
    harness.finish()
    progress = harness.records[again].end.progress  # type: ignore[union-attr]
    assert progress is not None
    assert progress.tail_tokens == 2
    harness.check_answers()


def test_a_stop_id_ends_the_stream_and_is_reported() -> None:
    tokens = greedy(prompt(4, 9), 8)
    harness = SchedulerHarness()
    seq_id = harness.submit(prompt(4, 9), 50, stop=frozenset({tokens[5]}))
    assert seq_id is not None
    harness.finish()
    record = harness.records[seq_id]
    assert record.token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert record.end is not None
    assert record.end.ending is not None
    assert record.end.ending.reason is FinishReason.STOP


def test_the_newest_is_preempted_without_changing_its_answer() -> None:
    harness = SchedulerHarness(slots=16, budget=16, max_num_seqs=4)
    for seed in range(3):
        assert harness.submit(prompt(seed, 8), 40) is not None
    run_steps(harness, 30)
    assert [s for s in states(harness) if s is SequenceState.RESUMING], "nobody was preempted"
    assert states(harness)[0] is SequenceState.RUNNING
    harness.finish()
    assert harness.preemptions > 0
    oldest = harness.records[1].end
    assert oldest is not None
    assert oldest.progress is not None
    assert oldest.progress.preemptions == 0
    harness.check_answers()


def test_commits_of_streams_may_wait_but_not_of_prefill_ranges() -> None:
    harness = SchedulerHarness(budget=64)
    stream = harness.submit(prompt(1, 10), 9)
    prefill_range = harness.submit(prompt(2, 16), 0, chunks=(8, 16))
    assert stream is not None
    orders, hurried = [], []
    while harness.scheduler.sequences:
        harness.step()
        while harness.unsent:
            orders += harness.unsent[0].commits
            hurried.append(harness.unsent[0].hurry)
            harness.answer()
    # Two whole blocks of the prompt, the block in which it ends, and one of the answer; 18 tokens with KV need no more.
    runs = [(len(one.slots), one.may_wait) for one in orders if one.seq_id == stream]
    assert runs == [(2, True), (1, True), (1, True)]
    assert not any(one.may_wait for one in orders if one.seq_id == prefill_range)
    assert not any(hurried)


def test_the_end_of_a_stream_makes_its_deferred_commit_urgent() -> None:
    harness = SchedulerHarness(budget=64)
    assert harness.submit(prompt(1, 8), 7) is not None
    for _ in range(3):
        harness.step()
        while harness.answer():
            pass
    outcomes: list[Outcome] = []
    for _ in range(4):
        # Nothing is answered: the answer's first block is being committed when the stream ends.
        seen = len(harness.unsent)
        harness.step()
        outcomes += harness.unsent[seen:]
    assert [one.may_wait for outcome in outcomes for one in outcome.commits] == [True]
    assert sum(outcome.hurry for outcome in outcomes) == 1
    harness.finish()
    harness.check_answers()


def test_one_preemption_is_waited_for_before_the_next() -> None:
    harness = SchedulerHarness(slots=16, budget=48, max_num_seqs=4)
    for seed in range(4):
        assert harness.submit(prompt(seed, 11), 40) is not None
    run_steps(harness, 4)
    # All sixteen slots are leased, each stream has filled its four blocks and needs a fifth, and the last commits are
    # unanswered. The preempted stream's memory is on its way, which must suffice.
    for _ in range(8):
        harness.step()
        while harness.unsent and not harness.unsent[0].commits:
            harness.answer()
    assert states(harness) == [SequenceState.RUNNING] * 3 + [SequenceState.CLOSING]
    harness.finish()
    harness.check_answers()


def test_waiting_sequences_are_preempted_before_running_ones() -> None:
    harness = SchedulerHarness(slots=8, budget=16, max_num_seqs=1)
    running, waiting = harness.submit(prompt(1, 11), 12), harness.submit(prompt(2, 15), 2)
    while SequenceState.RESUMING not in states(harness):
        harness.step()
        harness.answer()
    assert states(harness) == [SequenceState.RUNNING, SequenceState.RESUMING]
    harness.finish()
    assert running is not None
    assert waiting is not None
    end = harness.records[waiting].end
    assert end is not None
    assert end.progress is not None
    assert end.progress.preemptions == 1
    harness.check_answers()


def test_a_decode_waits_for_a_pending_lease() -> None:
    harness = SchedulerHarness(slots=40)
    seq_id = harness.submit(prompt(1, 8), 40)
    for _ in range(12):
        harness.step()
    assert harness.preemptions == 0
    assert states(harness) == [SequenceState.RUNNING]
    assert not harness.step().scheduled, "it ran without a slot"
    run_steps(harness, 3)
    assert seq_id is not None
    assert len(harness.records[seq_id].token_ids) > 5
    harness.finish()
    harness.check_answers()


def test_a_sequence_that_never_fits_fails_instead_of_looping() -> None:
    harness = SchedulerHarness(slots=4)
    seq_id = harness.submit(prompt(1, 8), 40)
    harness.finish()
    assert seq_id is not None
    end = harness.records[seq_id].end
    assert end is not None
    assert end.ending is not None
    assert end.ending.error is not None


def test_a_lost_commit_race_swaps_the_block_and_frees_its_own_slot() -> None:
    harness = SchedulerHarness()
    # Both before anything is committed: two sequences write the same blocks.
    ids = [harness.submit(prompt(5, 14), 12) for _ in range(2)]
    harness.step()
    harness.step()
    while harness.answer():
        pass
    tables = [harness.scheduler.sequences[i].table()[:3].tolist() for i in ids if i is not None]
    assert tables[0] == tables[1]
    harness.finish()
    harness.check_answers()
    assert harness.ledger.status().committed_blocks == 25 // BLOCK


def test_a_refused_commit_does_not_stop_a_stream_but_fails_a_prefill_range() -> None:
    harness = SchedulerHarness(budget=64)
    stream, prefill_range = harness.submit(prompt(1, 10), 20), harness.submit(prompt(2, 16), 0, chunks=(8, 16))
    assert stream is not None
    assert prefill_range is not None
    harness.step()
    for order in harness.unsent[0].commits:
        harness.scheduler.committed(order.seq_id, (), "somebody broke it", harness.now)
    harness.unsent[0].commits.clear()
    harness.finish()
    end = harness.records[prefill_range].end
    assert end is not None
    assert end.ending is not None
    assert end.ending.error is not None
    assert not harness.records[prefill_range].chunks
    assert harness.records[stream].token_ids == greedy(prompt(1, 10), 20)
    assert harness.ledger.status().committed_blocks == 0


def test_a_step_computes_as_many_chunks_as_fit() -> None:
    """A prefill worker with a budget of several chunks computes and acknowledges them in one step."""
    harness = SchedulerHarness(slots=100, budget=40)
    prefill_range = harness.submit(prompt(2, 64), 0, chunks=(16, 32, 48, 64))
    assert prefill_range is not None
    harness.now = 1.0
    plan = harness.scheduler.schedule(harness.now)
    assert [chunk.count for chunk in plan.scheduled] == [40]
    sampled, harness.now = harness.run_plan(plan), 2.0
    harness.receive(harness.scheduler.commit(plan, sampled, harness.now))
    harness.finish()
    chunks = harness.records[prefill_range].chunks
    assert [(chunk.index, chunk.end_tokens) for chunk in chunks] == [(0, 16), (1, 32), (2, 48), (3, 64)]
    assert [chunk.started_s == 1.0 for chunk in chunks] == [True, True, True, False]
    assert [chunk.computed_s == 2.0 for chunk in chunks] == [True, True, False, False]


def test_a_failed_step_fails_its_sequences_only() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    first, second = harness.submit(prompt(1, 10), 5), harness.submit(prompt(2, 10), 5)
    plan = harness.scheduler.schedule(0.0)
    harness.receive(harness.scheduler.fail_step(plan, Internal("it broke"), 0.0))
    harness.finish()
    assert first is not None
    assert second is not None
    end = harness.records[first].end
    assert end is not None
    assert end.ending is not None
    assert isinstance(end.ending.error, Internal)
    assert harness.records[second].token_ids == greedy(prompt(2, 10), 5)


@pytest.mark.parametrize("steps", range(6))
def test_cancel_frees_within_one_step(steps: int) -> None:
    harness = SchedulerHarness(slots=12, budget=8)
    ids = [harness.submit(prompt(seed, 12), 30) for seed in range(3)]
    run_steps(harness, steps)
    for seq_id in ids:
        assert seq_id is not None
        harness.cancel(seq_id)
        harness.cancel(seq_id)
    harness.settle()
    assert harness.scheduler.sequences == {}


def test_a_ticket_granted_to_a_cancelled_stream_is_released() -> None:
    harness = SchedulerHarness(slots=16, budget=16)
    for seed in range(3):
        harness.submit(prompt(seed, 8), 40)
    while SequenceState.RESUMING not in states(harness):
        harness.step()
        harness.answer()
    newest = max(harness.scheduler.sequences)
    harness.cancel(newest)
    harness.finish()
    harness.check_answers()


def test_the_budget_must_hold_all_decodes() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        Scheduler(blocks=BlockManager(4), max_num_batched_tokens=8, max_num_seqs=9)
