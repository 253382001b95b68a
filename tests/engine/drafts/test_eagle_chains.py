"""Chains of an EAGLE head: states of the right positions, separate entries, slots reclaimed first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.drafts import eagle_chains
from pillion.engine.drafts.draft_chains import PAUSE_S, DraftShape
from tests.engine.scheduling.test_properties import ANSWER, ARRIVE, CANCEL, LOAD, SHAPES, STEP, play
from tests.support.examples import examples
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend
from tests.support.fake_head import FakeHead
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt

DRAFT_TOKENS = 3


def heading(budget: int = 64) -> Callable[[npt.NDArray[np.int64]], tuple[DraftShape, FakeHead]]:
    shape = DraftShape(bytes(32), BLOCK, VOCAB_SIZE, 10_000, DRAFT_TOKENS, budget, reads_states=True)

    def over(pool: npt.NDArray[np.int64]) -> tuple[DraftShape, FakeHead]:
        head = FakeHead(FakeBackend(BLOCK))
        head.bind_pool(memoryview(pool).cast("B"), len(pool))
        return shape, head

    return over


def head_of(harness: SchedulerHarness) -> FakeHead:
    chains = harness.draft_chains
    assert isinstance(chains, eagle_chains.EagleChains)
    assert isinstance(chains._passes, FakeHead)
    return chains._passes


def test_a_good_head_saves_steps_from_the_first_token_on() -> None:
    harness = SchedulerHarness(slots=80, budget=64, draft=heading())
    harness.submit(prompt(1, 21), 40)
    # 40 steps without drafts. Draft tokens do not grow the table, so some steps have fewer than three.
    assert harness.run_all() <= 22
    assert head_of(harness).contexts[0] >= 21
    # Its blocks cannot be found: the second prompt's states begin after its cached prefix.
    harness.submit(prompt(1, 21), 12)
    before = len(head_of(harness).contexts)
    harness.run_all()
    assert head_of(harness).contexts[before] < 20
    assert harness.draft_hits == 0


def test_wrong_draft_tokens_change_nothing() -> None:
    harness = SchedulerHarness(slots=80, budget=64, draft=heading())
    harness.submit(prompt(1, 21), 20, seed=5, parallel_seeds=(0, 6))
    harness.run_all()
    assert head_of(harness).drafted


def test_wrong_draft_tokens_cost_no_context() -> None:
    harness = SchedulerHarness(slots=80, budget=64, draft=heading())
    harness.submit(prompt(1, 21), 20, seed=5)
    harness.run_all()
    contexts = head_of(harness).contexts
    assert len(contexts) > 1
    assert contexts[0] >= 21
    assert contexts == sorted(set(contexts))


def test_a_prompt_of_several_steps_is_read() -> None:
    harness = SchedulerHarness(slots=200, budget=16, max_num_seqs=3, draft=heading(16))
    harness.submit(prompt(1, 90), 30)
    harness.submit(prompt(2, 6), 30)
    harness.run_all()
    head = head_of(harness)
    assert max(head.first_passes) <= 16 + 3 * (DRAFT_TOKENS + 1)
    assert max(head.contexts) > 90


def test_the_oldest_states_are_dropped_if_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_chains, "MAX_STATES_TOKENS", 20)
    harness = SchedulerHarness(slots=200, budget=64, draft=heading())
    harness.submit(prompt(1, 90), 40)
    harness.run_all()
    assert 10 <= head_of(harness).contexts[0] <= 22


def test_head_slots_are_freed_before_a_stream_is_preempted() -> None:
    harness = SchedulerHarness(slots=20, budget=32, draft=heading())
    harness.submit(prompt(1, 15), 25)
    harness.submit(prompt(2, 15), 25)
    harness.run_all()
    assert head_of(harness).drafted
    assert harness.preemptions == 0


def test_a_recall_closes_chains_which_restart_later() -> None:
    harness = SchedulerHarness(slots=200, budget=32, draft=heading())
    harness.submit(prompt(1, 15), 200)
    for _ in range(8):
        harness.answered_step()
    head = head_of(harness)
    assert head.contexts[-1] > 15
    harness.scheduler.recall(1, harness.now)
    harness.scheduler.check_integrity()
    drafted = head.drafted
    harness.step()
    assert head.drafted == drafted
    harness.now += PAUSE_S
    harness.step()
    assert 0 < head.contexts[-1] < 15
    harness.run_all()


def test_a_failed_pass_ends_drafting_only_for_its_sequences() -> None:
    harness = SchedulerHarness(slots=60, budget=32, draft=heading())
    harness.submit(prompt(1, 15), 30)
    head = head_of(harness)
    head.failing = True
    harness.run_all()
    assert len(head.first_passes) == 1
    head.failing = False
    harness.submit(prompt(2, 15), 30)
    harness.run_all()
    assert head.drafted


@settings(max_examples=examples(100))
@given(
    SHAPES,
    st.lists(st.one_of(ARRIVE, ARRIVE, STEP, STEP, ANSWER, LOAD, CANCEL, st.just(("recall", 2))), max_size=40),
    st.integers(4, 30),
)
def test_any_request_history_gives_the_right_answers(
    shape: tuple[int, int, int], events: list[tuple[object, ...]], most_tokens: int
) -> None:
    slots, budget, seqs = shape
    slots = max(slots, 17)
    harness = SchedulerHarness(
        slots=slots, budget=max(budget, seqs), max_num_seqs=seqs, max_loras=2, draft=heading(most_tokens)
    )
    for event in events:
        if event[0] == "recall":
            harness.scheduler.recall(2, harness.now)
            harness.now += PAUSE_S / 3
        else:
            play(harness, [event])
    harness.finish()
    harness.check_answers()
