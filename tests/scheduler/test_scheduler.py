"""The scheduler's promises, one scene each."""

from __future__ import annotations

import pytest

from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import SequenceState
from pillion.errors import ConfigError, Internal
from pillion.types import FinishReason
from tests.support.fake_backend import greedy
from tests.support.scheduler_line import BLOCK, SchedulerLine, prompt, states


def run_steps(line: SchedulerLine, count: int) -> None:
    for _ in range(count):
        line.step()
        while line.answer():
            pass


def test_a_step_is_decodes_then_prompt_tails_filled_exactly() -> None:
    line = SchedulerLine(budget=16, max_num_seqs=4)
    first = line.submit(prompt(1, 10), 20)
    line.step()
    second, third = line.submit(prompt(2, 11), 20), line.submit(prompt(3, 30), 20)
    plan = line.step()
    # One decode, a short prompt tail whole, and of the long one what is left, cut in the middle of a block.
    assert [(piece.sequence.seq_id, piece.count) for piece in plan.pieces] == [(first, 1), (second, 11), (third, 4)]
    assert [piece.samples for piece in plan.pieces] == [True, True, False]
    plan = line.step()
    assert [(piece.sequence.seq_id, piece.count) for piece in plan.pieces] == [(first, 1), (second, 1), (third, 14)]
    line.finish()
    line.check_answers()


def test_a_long_prompt_never_delays_a_decode() -> None:
    line = SchedulerLine(slots=200, budget=8, max_num_seqs=4)
    first = line.submit(prompt(1, 5), 60)
    run_steps(line, 1)
    line.submit(prompt(2, 300), 4)
    for _ in range(40):
        assert line.step().pieces[0].sequence.seq_id == first
        while line.answer():
            pass
    line.finish()
    line.check_answers()


def test_no_more_run_than_max_num_seqs_and_the_line_is_fifo() -> None:
    line = SchedulerLine(budget=32, max_num_seqs=2)
    ids = [line.submit(prompt(seed, 6), 5) for seed in range(5)]
    line.step()
    assert states(line) == [SequenceState.RUNNING] * 2 + [SequenceState.WAITING] * 3
    line.finish()
    ends = [(said.end.progress.ended_s, i) for i, said in line.said.items() if said.end and said.end.progress]
    assert [i for _, i in sorted(ends)] == ids


def test_generated_text_is_committed_too() -> None:
    line = SchedulerLine()
    first = line.submit(prompt(1, 10), 11)
    line.finish()
    assert first is not None
    tokens = prompt(1, 10) + line.said[first].token_ids
    # 20 tokens have their KV, the 21st has none: five blocks.
    assert line.ledger.status().committed_blocks == 20 // BLOCK
    again = line.submit([*tokens, 1], 3)
    assert again is not None
    line.finish()
    progress = line.said[again].end.progress  # type: ignore[union-attr]
    assert progress is not None
    assert progress.tail_tokens == 2
    line.check_answers()


def test_a_stop_id_ends_the_stream_and_is_reported() -> None:
    tokens = greedy(prompt(4, 9), 8)
    line = SchedulerLine()
    seq_id = line.submit(prompt(4, 9), 50, stop=frozenset({tokens[5]}))
    assert seq_id is not None
    line.finish()
    said = line.said[seq_id]
    assert said.token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert said.end is not None
    assert said.end.ending is not None
    assert said.end.ending.reason is FinishReason.STOP


def test_the_newest_gives_way_and_says_the_same() -> None:
    line = SchedulerLine(slots=16, budget=16, max_num_seqs=4)
    for seed in range(3):
        assert line.submit(prompt(seed, 8), 40) is not None
    run_steps(line, 30)
    assert [s for s in states(line) if s is SequenceState.RESUMING], "nobody was preempted"
    assert states(line)[0] is SequenceState.RUNNING
    line.finish()
    assert line.preemptions > 0
    oldest = line.said[1].end
    assert oldest is not None
    assert oldest.progress is not None
    assert oldest.progress.preemptions == 0
    line.check_answers()


def test_one_preemption_is_waited_for_before_the_next() -> None:
    line = SchedulerLine(slots=16, budget=48, max_num_seqs=4)
    for seed in range(4):
        assert line.submit(prompt(seed, 11), 40) is not None
    run_steps(line, 4)
    # All sixteen slots are leased, each stream has filled its four blocks and needs a fifth, and the last commits are
    # not answered: the memory of the one that gives way is on its way, and that has to do.
    for _ in range(8):
        line.step()
        while line.unheard and not line.unheard[0].commits:
            line.answer()
    assert states(line) == [SequenceState.RUNNING] * 3 + [SequenceState.CLOSING]
    line.finish()
    line.check_answers()


def test_who_only_waits_gives_way_before_who_runs() -> None:
    line = SchedulerLine(slots=8, budget=16, max_num_seqs=1)
    running, waiting = line.submit(prompt(1, 11), 12), line.submit(prompt(2, 15), 2)
    while SequenceState.RESUMING not in states(line):
        line.step()
        line.answer()
    assert states(line) == [SequenceState.RUNNING, SequenceState.RESUMING]
    line.finish()
    assert running is not None
    assert waiting is not None
    end = line.said[waiting].end
    assert end is not None
    assert end.progress is not None
    assert end.progress.preemptions == 1
    line.check_answers()


def test_a_decode_waits_for_the_lease_under_way() -> None:
    line = SchedulerLine(slots=40)
    seq_id = line.submit(prompt(1, 8), 40)
    for _ in range(12):
        line.step()
    assert line.preemptions == 0
    assert states(line) == [SequenceState.RUNNING]
    assert not line.step().pieces, "it ran without a slot"
    run_steps(line, 3)
    assert seq_id is not None
    assert len(line.said[seq_id].token_ids) > 5
    line.finish()
    line.check_answers()


def test_what_never_fits_fails_instead_of_looping() -> None:
    line = SchedulerLine(slots=4)
    seq_id = line.submit(prompt(1, 8), 40)
    line.finish()
    assert seq_id is not None
    end = line.said[seq_id].end
    assert end is not None
    assert end.ending is not None
    assert end.ending.error is not None


def test_a_lost_race_swaps_the_table_and_returns_the_own_slot() -> None:
    line = SchedulerLine()
    # Both before anything is committed: two sequences write the same blocks.
    ids = [line.submit(prompt(5, 14), 12) for _ in range(2)]
    line.step()
    line.step()
    while line.answer():
        pass
    tables = [line.scheduler.sequences[i].table()[:3].tolist() for i in ids if i is not None]
    assert tables[0] == tables[1]
    line.finish()
    line.check_answers()
    assert line.ledger.status().committed_blocks == 25 // BLOCK


def test_a_refused_commit_does_not_stop_a_stream_but_fails_a_span() -> None:
    line = SchedulerLine(budget=64)
    stream, span = line.submit(prompt(1, 10), 20), line.submit(prompt(2, 16), 0, chunks=(8, 16))
    assert stream is not None
    assert span is not None
    line.step()
    for order in line.unheard[0].commits:
        line.scheduler.committed(order.seq_id, (), "somebody broke it", line.now)
    line.unheard[0].commits.clear()
    line.finish()
    end = line.said[span].end
    assert end is not None
    assert end.ending is not None
    assert end.ending.error is not None
    assert not line.said[span].chunks
    assert line.said[stream].token_ids == greedy(prompt(1, 10), 20)
    assert line.ledger.status().committed_blocks == 0


def test_a_failed_step_fails_its_sequences_only() -> None:
    line = SchedulerLine(max_num_seqs=1)
    first, second = line.submit(prompt(1, 10), 5), line.submit(prompt(2, 10), 5)
    plan = line.scheduler.schedule(0.0)
    line.hear(line.scheduler.fail_step(plan, Internal("it broke"), 0.0))
    line.finish()
    assert first is not None
    assert second is not None
    end = line.said[first].end
    assert end is not None
    assert end.ending is not None
    assert isinstance(end.ending.error, Internal)
    assert line.said[second].token_ids == greedy(prompt(2, 10), 5)


@pytest.mark.parametrize("steps", range(6))
def test_cancel_frees_within_one_step(steps: int) -> None:
    line = SchedulerLine(slots=12, budget=8)
    ids = [line.submit(prompt(seed, 12), 30) for seed in range(3)]
    run_steps(line, steps)
    for seq_id in ids:
        assert seq_id is not None
        line.cancel(seq_id)
        line.cancel(seq_id)
    line.settle()
    assert line.scheduler.sequences == {}


def test_a_ticket_that_comes_for_a_cancelled_stream_is_let_go() -> None:
    line = SchedulerLine(slots=16, budget=16)
    for seed in range(3):
        line.submit(prompt(seed, 8), 40)
    while SequenceState.RESUMING not in states(line):
        line.step()
        line.answer()
    newest = max(line.scheduler.sequences)
    line.cancel(newest)
    line.finish()
    line.check_answers()


def test_the_budget_must_hold_all_decodes() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        Scheduler(block_size=4, max_num_batched_tokens=8, max_num_seqs=9)
