"""Parallel samples: one computed prompt, shared blocks, copies where they diverge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.parallel_samples import copy_partial_block
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import ParallelSampleSpec, Sequence, SequenceState
from pillion.kernels.step import Sampled
from tests.support.fake_backend import greedy
from tests.support.scheduler_harness import BLOCK, GREEDY, ROOT, SchedulerHarness, answer, prompt, states


def computed(harness: SchedulerHarness) -> int:
    """Run one step with its answers; return its number of tokens."""
    tokens = harness.step().num_tokens
    while harness.answer():
        pass
    return tokens


@pytest.mark.parametrize("length", [1, 3, 8, 10, 11])
def test_one_prefill_serves_all_parallel_samples(length: int) -> None:
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    harness.submit(prompt(1, length), 9, parallel_seeds=(5, 6, 7))
    ran = 0
    while harness.scheduler.sequences:
        ran += computed(harness)
        harness.receive_flush()
    harness.settle()
    harness.check_answers()
    assert [record.token_ids for record in harness.records.values()] == [
        answer(prompt(1, length), s, 9) for s in (0, 5, 6, 7)
    ]
    # The prompt once, and of each answer all but its last token.
    assert ran == length + 4 * 8
    assert harness.copies == (3 if length % BLOCK else 0)


def test_all_first_tokens_come_in_the_same_step() -> None:
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    harness.submit(prompt(1, 10), 9, parallel_seeds=(5, 6))
    harness.step()
    assert [len(record.token_ids) for record in harness.records.values()] == [1, 1, 1]
    assert states(harness) == [SequenceState.RUNNING, SequenceState.RESUMING, SequenceState.RESUMING]


def test_whole_blocks_are_shared_and_the_partial_one_is_not() -> None:
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    harness.submit(prompt(1, 10), 30, parallel_seeds=(5, 6))
    for _ in range(3):
        computed(harness)
    tables = [s.table().tolist() for s in harness.scheduler.sequences.values()]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    harness.finish()
    harness.check_answers()


def test_an_orphaned_parallel_sample_recomputes_the_partial_block() -> None:
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    first = harness.submit(prompt(1, 10), 9, parallel_seeds=(5,))
    assert first is not None
    harness.step()
    harness.cancel(first)
    harness.finish()
    assert harness.copies == 0
    harness.check_answers()


def test_a_first_token_that_stops_is_an_answer() -> None:
    stop = frozenset({(greedy(prompt(1, 10), 1)[0] + 5) % 97})
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    harness.submit(prompt(1, 10), 9, stop=stop, parallel_seeds=(5, 6))
    harness.finish()
    assert len(harness.records[2].token_ids) == 1
    assert harness.records[2].end is not None
    harness.check_answers()


def test_a_parallel_sample_that_is_cancelled_before_it_begins_never_does() -> None:
    harness = SchedulerHarness(budget=4, max_num_seqs=4)
    harness.submit(prompt(1, 10), 9, parallel_seeds=(5, 6))
    computed(harness)
    harness.cancel(2)
    harness.finish()
    assert harness.records[2].token_ids == []
    assert len(harness.records[3].token_ids) == 9
    harness.check_answers()


def test_parallel_samples_outgrow_a_small_pool_by_turns() -> None:
    harness = SchedulerHarness(slots=14, budget=16, max_num_seqs=4)
    harness.submit(prompt(1, 10), 24, parallel_seeds=(5, 6, 7))
    harness.finish()
    assert harness.preemptions > 0
    harness.check_answers()


def test_more_answers_than_slots() -> None:
    harness = SchedulerHarness(slots=100, budget=8, max_num_seqs=2)
    harness.submit(prompt(1, 10), 12, parallel_seeds=(5, 6, 7, 8))
    harness.finish()
    harness.check_answers()


def test_a_parallel_sample_that_has_begun_is_not_delayed_by_a_long_prompt() -> None:
    harness = SchedulerHarness(slots=200, budget=16, max_num_seqs=4)
    harness.submit(prompt(1, 10), 30, parallel_seeds=(5,))
    harness.step()
    harness.submit(prompt(2, 300), 4)
    computed(harness)
    for _ in range(10):
        before = len(harness.records[2].token_ids)
        computed(harness)
        assert len(harness.records[2].token_ids) == before + 1
    harness.finish()
    harness.check_answers()


def test_nothing_is_copied_from_a_parent_without_its_blocks() -> None:
    harness = SchedulerHarness(budget=16, max_num_seqs=4)
    first = harness.submit(prompt(1, 10), 30, parallel_seeds=(5,))
    assert first is not None
    harness.step()
    while harness.answer():
        pass
    parent, child = harness.scheduler.sequences[first], harness.scheduler.sequences[2]
    assert child.state is SequenceState.PREEMPTED
    for state in (SequenceState.CLOSING, SequenceState.RESUMING):
        parent.state, kept = state, parent.state
        assert copy_partial_block(parent, child) is None
        parent.state = kept
    # Nor from one that resumed and has not recomputed its prompt.
    parent.num_computed, kept_tokens = 8, parent.num_computed
    assert copy_partial_block(parent, child) is None
    parent.num_computed = kept_tokens
    assert copy_partial_block(parent, child) is not None


def test_parallel_samples_of_a_two_step_prompt_recompute_nothing() -> None:
    harness = SchedulerHarness(slots=100, budget=16, max_num_seqs=4)
    harness.submit(prompt(1, 30), 9, parallel_seeds=(5, 6, 7))
    ran, hurried = 0, False
    while harness.scheduler.sequences:
        # The node answers during the next step, so the parallel samples begin while a step is running.
        late = len(harness.unsent)
        ran += harness.step().num_tokens
        hurried = hurried or any(outcome.hurry for outcome in harness.unsent[late:])
        for _ in range(late):
            harness.answer()
        harness.receive_flush()
    harness.settle()
    harness.check_answers()
    assert ran == 30 + 4 * 8
    assert hurried, "the parallel samples waited until other orders went to the node"


def test_a_parallel_sample_is_not_more_urgent_than_its_request() -> None:
    harness = SchedulerHarness(slots=200, budget=32, max_num_seqs=2)
    harness.submit(prompt(1, 10), 8, priority=1, parallel_seeds=(5, 6, 7))
    computed(harness)
    urgent = harness.submit(prompt(2, 6), 4, priority=-1)
    assert urgent in [chunk.sequence.seq_id for chunk in harness.step().scheduled]
    harness.finish()
    harness.check_answers()


def stream(seq_id: int, length: int, slots: range, parallel_samples: tuple[ParallelSampleSpec, ...] = ()) -> Sequence:
    return Sequence(
        AdoptedTicket(seq_id, (), tuple(slots)),
        BLOCK,
        0.0,
        seq_id=seq_id,
        token_ids=np.array(prompt(seq_id, length), dtype=np.int32),
        parent_hash=ROOT,
        prompt_tokens=length,
        sampling=replace(GREEDY, max_tokens=50),
        max_model_len=1000,
        parallel_samples=parallel_samples,
    )


@pytest.mark.parametrize("recall", [0, 8])
@pytest.mark.parametrize("victim", ["parallel_sample", "parent"])
def test_a_step_copies_only_slots_that_it_still_owns(recall: int, victim: str) -> None:
    """A decode takes memory from the parallel sample or its parent in the very step that would start the sample."""
    scheduler = Scheduler(blocks=BlockManager(BLOCK), max_num_batched_tokens=64, max_num_seqs=4)
    scheduler.add(stream(1, 6, range(10, 12)), 0.0)
    scheduler.add(stream(2, 11, range(20, 24), (ParallelSampleSpec(3, 5),)), 0.0)
    if victim == "parent":
        parent = scheduler.sequences[2]
        parent.priority = 1
        parent.queue_order = 5.0
    outcomes = []
    for step in range(4):
        now = step / 100
        for outcome in outcomes:
            # The node refuses everything until the last parallel sample's ticket.
            for order in outcome.commits:
                scheduler.committed(order.seq_id, (), "no", now)
            if outcome.lease_blocks:
                scheduler.granted((), now)
        if step == 3:
            child = scheduler.sequences[3]
            child.priority = 0 if victim == "parent" else child.priority
            scheduler.resumed(3, AdoptedTicket(9, (30, 31), (32, 33)), now)
        scheduler.recall(recall, now)
        plan = scheduler.schedule(now)
        outcomes = [scheduler.flush(now)]
        owned = {slot for sequence in scheduler.sequences.values() for slot in sequence.owned_slots()}
        for source, target in plan.copies:
            assert {source, target} <= owned
            assert not {source, target} & set(outcomes[0].returned_slots)
        if plan.scheduled:
            tokens = sum(chunk.samples + len(chunk.parallel_seeds) for chunk in plan.scheduled)
            outcomes.append(scheduler.commit(plan, Sampled((1,) * tokens), now))
    assert any(s.progress.preemptions for s in scheduler.sequences.values()), "nobody was preempted"
