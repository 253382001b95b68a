"""A draft model's blocks beside those of sequences: drafts read their own KV, their slots are reclaimed first, and none
leaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.drafts.draft_chains import PAUSE_S, DraftChain, DraftPlan, DraftShape
from pillion.engine.drafts.draft_model import DraftModel
from pillion.engine.scheduling.step_plan import StepPlan
from pillion.kernels.step import Int32, Sampled
from tests.engine.drafts.test_draft_control import ROW_S, TimedHarness
from tests.engine.scheduling.test_properties import ANSWER, ARRIVE, CANCEL, LOAD, SHAPES, STEP, play
from tests.support.examples import examples
from tests.support.fake_backend import VOCAB_SIZE, FakeBackend, greedy
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt

DRAFT_TOKENS = 3
Pool = npt.NDArray[np.int64]


class CheckedPasses:
    """A draft model with the fake model's arithmetic. Checks that its drafts are those of its whole text, so that each
    KV row that it reads belongs to that text. Seeds shift the main model's tokens and make drafts wrong.

    ``failing``: passes fail from now on. ``first_passes``: the tokens of each plan's first pass. Each pass takes
    ``pass_s``, plus ``seconds_to_read`` per token of the first; ``drafted_s`` is their sum.
    """

    seconds_to_read = pass_s = 0.0

    def __init__(self, pool: Pool) -> None:
        backend = FakeBackend(BLOCK)
        backend.bind_pool(memoryview(pool).cast("B"), len(pool))
        self.model = DraftModel(backend, backend.layout.block_bytes, VOCAB_SIZE)
        self.failing = False
        self.first_passes: list[int] = []
        self.drafted = 0
        self.last_run_s = self.drafted_s = 0.0

    def seconds_per_token(self, sequences: int) -> float:
        return self.pass_s

    def run(self, plan: DraftPlan) -> list[Int32] | None:
        self.first_passes.append(sum(chunk.count for chunk in plan.scheduled))
        passes = max(1, *(chunk.draft_tokens for chunk in plan.scheduled))
        self.last_run_s = self.seconds_to_read * plan.num_tokens + self.pass_s * passes
        self.drafted_s += self.last_run_s
        if self.failing:
            return None
        draft_tokens = self.model.run(plan)
        assert draft_tokens is not None
        for chunk, found in zip(plan.scheduled, draft_tokens, strict=True):
            text = chunk.chain.sequence.tokens(0, chunk.chain.sequence.num_tokens).tolist()
            assert len(found) == chunk.draft_tokens
            sampling = chunk.chain.sequence.sampling
            if sampling is not None and not sampling.frequency_penalty:
                assert found.tolist() == greedy(text, chunk.draft_tokens), (
                    "a draft token came of other KV than that of its text"
                )
            self.drafted += len(found)
        return draft_tokens


def drafting(
    budget: int = 64, longest: int = 10_000, draft_tokens: int = DRAFT_TOKENS
) -> Callable[[Pool], tuple[DraftShape, CheckedPasses]]:
    shape = DraftShape(b"\3" * 32, BLOCK, VOCAB_SIZE, longest, draft_tokens, budget)
    return lambda pool: (shape, CheckedPasses(pool))


def passes_of(harness: SchedulerHarness) -> CheckedPasses:
    passes = harness.draft_chains._passes
    assert isinstance(passes, CheckedPasses)
    return passes


def test_drafts_stop_at_the_last_possible_token() -> None:
    """Drafts of several blocks need no slots beyond the answer's last possible token."""
    harness = SchedulerHarness(slots=80, budget=64, draft=drafting(draft_tokens=4 * BLOCK))
    for length in (2, 5, 3 * BLOCK, 40):
        harness.submit(prompt(1, 21), length)
    harness.run_all()


def test_a_good_draft_saves_steps_and_its_blocks_are_reused() -> None:
    harness = SchedulerHarness(slots=80, budget=64, draft=drafting())
    harness.submit(prompt(1, 21), 40)
    # 40 steps without drafts. Draft tokens do not grow the table, so some steps have fewer than three.
    assert harness.run_all() <= 24
    assert harness.draft_hits == 0
    harness.submit(prompt(1, 21), 12)
    harness.run_all()
    assert harness.draft_hits == 5


def test_a_wrong_draft_changes_nothing() -> None:
    harness = SchedulerHarness(slots=80, budget=64, draft=drafting())
    harness.submit(prompt(1, 21), 20, seed=5, parallel_seeds=(0, 6))
    harness.run_all()
    assert passes_of(harness).drafted


def test_a_prompt_is_read_within_the_budget() -> None:
    harness = SchedulerHarness(slots=200, budget=16, max_num_seqs=3, draft=drafting(16))
    harness.submit(prompt(1, 90), 30)
    harness.submit(prompt(2, 6), 30)
    passes, plans = passes_of(harness), []
    while harness.scheduler.sequences:
        before = len(passes.first_passes)
        plans.append(harness.step())
        drafted = sum(passes.first_passes[before:])
        # A step also brings a draft token's own few tokens.
        assert plans[-1].num_tokens + drafted <= 16 + 3 * (DRAFT_TOKENS + 1)
        while harness.answer():
            pass
        harness.receive_flush()
    assert max(passes.first_passes) > DRAFT_TOKENS + 1
    assert passes.drafted > 5
    harness.settle()
    harness.check_answers()


def test_no_step_runs_ahead_while_a_draft_catches_up() -> None:
    harness = SchedulerHarness(slots=200, budget=16, max_num_seqs=3, draft=drafting(16))
    harness.submit(prompt(1, 60), 30)
    scheduler, passes = harness.scheduler, passes_of(harness)
    for _ in range(40):
        asked = len(passes.first_passes)
        harness.answered_step()
        if asked > 0 and not passes.drafted:
            # The requested draft token has not arrived, so the next step asks again.
            assert not scheduler.may_run_ahead
    assert passes.drafted
    harness.run_all()


def test_drafts_wait_while_prompts_fill_the_steps() -> None:
    harness = SchedulerHarness(slots=200, budget=16, max_num_seqs=3, draft=drafting(16))
    harness.submit(prompt(1, 40), 60)
    for _ in range(3):
        harness.step()
    harness.submit(prompt(2, 160), 4)
    while harness.answer():
        pass
    passes = passes_of(harness)
    plan = harness.step()
    assert plan.num_tokens == 16
    assert sum(passes.first_passes) <= DRAFT_TOKENS + 1, "a prompt gave way to a draft"
    harness.run_all()


def test_draft_slots_are_freed_before_a_stream_is_preempted() -> None:
    harness = SchedulerHarness(slots=20, budget=32, draft=drafting())
    harness.submit(prompt(1, 15), 25)
    harness.submit(prompt(2, 15), 25)
    harness.run_all()
    assert passes_of(harness).drafted
    assert harness.preemptions == 0


def test_a_recall_closes_drafts_and_drafting_pauses() -> None:
    harness = SchedulerHarness(slots=200, budget=32, draft=drafting())
    harness.submit(prompt(1, 15), 200)
    for _ in range(8):
        harness.answered_step()
    chains, passes = harness.draft_chains, passes_of(harness)
    assert len(chains.chains) == 1
    assert passes.drafted
    harness.scheduler.recall(1, harness.now)
    harness.scheduler.check_integrity()
    drafted = passes.drafted
    while harness.now < PAUSE_S / 2:
        harness.answered_step()
    assert not chains.chains
    assert passes.drafted == drafted
    harness.now += PAUSE_S
    harness.run_all()
    assert passes.drafted > drafted


def test_a_failed_pass_ends_drafting_only_for_its_sequences() -> None:
    harness = SchedulerHarness(slots=60, budget=32, draft=drafting())
    harness.submit(prompt(1, 15), 30)
    passes = passes_of(harness)
    passes.failing = True
    harness.run_all()
    assert len(passes.first_passes) == 1
    passes.failing = False
    harness.submit(prompt(2, 15), 30)
    harness.run_all()
    assert passes.drafted


def test_texts_unreadable_by_the_draft_model_are_not_drafted() -> None:
    harness = SchedulerHarness(slots=60, budget=32, draft=drafting(longest=20))
    harness.submit(prompt(1, 15), 30)
    harness.run_all()
    passes = passes_of(harness)
    assert 0 < passes.drafted <= 5 * DRAFT_TOKENS
    harness.submit([1, 2, 300], 8)
    plans = len(passes.first_passes)
    harness.run_all()
    assert len(passes.first_passes) == plans


@pytest.mark.parametrize(
    ("came", "kept"),
    # An expected token is recomputed for its logits; the last draft token has no KV; a grammar forced others.
    [([], 9), ([4], 9), ([4, 5], 10), ([4, 5, 6, 1], 11), ([4, 9], 10), ([9, 5, 6], 9), ([8], 9)],
)
def test_expected_tokens_stay_computed(came: list[int], kept: int) -> None:
    harness = SchedulerHarness(slots=60, budget=32, draft=drafting())
    harness.submit(prompt(1, 9), 30)
    (sequence,) = harness.scheduler.sequences.values()
    chain = DraftChain(-1, sequence, drafting()(harness.pool)[0])
    chain.advance(9, np.array([4, 5, 6], np.int32))
    for token in came:
        sequence.append(token)
    chain.settle()
    assert chain.num_computed == kept
    assert len(chain.draft_tokens) == (0 if came else 3)


@settings(max_examples=examples(150))
@given(
    SHAPES,
    st.lists(st.one_of(ARRIVE, ARRIVE, STEP, STEP, ANSWER, LOAD, CANCEL, st.just(("recall", 2))), max_size=40),
    st.integers(4, 30),
)
def test_any_request_history_gives_the_right_answers(
    shape: tuple[int, int, int], events: list[tuple[object, ...]], most_tokens: int
) -> None:
    slots, budget, seqs = shape
    # 17 blocks of its own can always serve the longest sequence of ARRIVE.
    harness = SchedulerHarness(
        slots=max(slots, 17),
        budget=max(budget, seqs),
        max_num_seqs=seqs,
        max_loras=2,
        draft=drafting(most_tokens),
    )
    for event in events:
        if event[0] == "recall":
            harness.scheduler.recall(2, harness.now)
            harness.now += PAUSE_S / 3
        else:
            play(harness, [event])
    harness.finish()
    harness.check_answers()


class DraftingHarness(TimedHarness):
    """A machine whose steps and passes take time. ``read_s``: the draft model's time to read a token."""

    def __init__(self, pass_s: float, read_s: float, row_s: float = ROW_S) -> None:
        super().__init__(None, row_s, draft=drafting(256))
        self.passes = passes_of(self)
        self.passes.pass_s, self.passes.seconds_to_read = pass_s, read_s

    def run_plan(self, plan: StepPlan) -> Sampled:
        self.now += self.draft_chains.drafting_s
        return super().run_plan(plan)


def staggered_s(harness: TimedHarness, prompt_tokens: int, answer_tokens: int, every: int) -> float:
    """Return the machine's seconds for 30 requests that arrive at intervals of steps, at most 16 at once. The draft
    model drafts half of the answers right, the others never."""
    steps, waiting = 0, [prompt(seed % 4, prompt_tokens + seed % 3) for seed in range(30)]
    while waiting or harness.scheduler.sequences:
        if waiting and steps % every == 0 and len(harness.scheduler.sequences) < 16:
            harness.submit(waiting.pop(), answer_tokens, seed=5 * (len(waiting) % 2))
        harness.step()
        steps += 1
        while harness.answer():
            pass
        harness.receive_flush()
    harness.settle()
    harness.check_answers()
    return harness.now - 0.01 * steps


@pytest.mark.parametrize("answer_tokens", [6, 12, 40])
def test_single_streams_are_hardly_slower_with_a_draft_model(answer_tokens: int) -> None:
    plain, harness = TimedHarness(None), DraftingHarness(0.004, 0.0005)
    assert staggered_s(harness, 100, answer_tokens, 3) < staggered_s(plain, 100, answer_tokens, 3) / 0.97


def test_prompts_of_short_streams_are_not_read_by_the_draft_model() -> None:
    read = []
    for answer_tokens in (8, 150):
        harness = DraftingHarness(0.001, 0.001)
        harness.submit(prompt(1, 90), answer_tokens)
        harness.run_all()
        read.append(sum(count for count in harness.passes.first_passes if count > 2 * DRAFT_TOKENS))
    assert read[0] == 0
    assert read[1] >= 90
