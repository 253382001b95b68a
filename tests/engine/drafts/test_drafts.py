"""Drafts: right ones save steps, wrong ones cost only themselves, and no answer changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.drafts.draft_control import DraftControl
from pillion.engine.drafts.lookup_drafters import NGramDrafter
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.draft_tokens import Drafter
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.kernels.step import Int32
from tests.support.drafts import speculate, speculative
from tests.support.examples import examples
from tests.support.fake_grammar import number_of
from tests.support.scheduler_harness import ADAPTER_SHIFT, GREEDY, SchedulerHarness, answer, prompt


class OracleDrafter:
    """Drafts the right tokens, except at every ``wrong``-th position."""

    def __init__(self, wrong: int = 0) -> None:
        self.wrong = wrong

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[Int32]:
        return [self._propose(sequence, most) for sequence, most in wanted]

    def seconds_per_token(self, sequences: int) -> float:
        return 0.0

    def sequence_finished(self, sequence: Sequence) -> None:
        """Keep nothing."""

    def _propose(self, sequence: Sequence, most: int) -> Int32:
        assert sequence.sampling is not None
        tokens = sequence.tokens(0, sequence.num_tokens).tolist()
        end = sequence.prompt_tokens
        followed = sequence.grammar
        grammar = None if followed is None else number_of(followed)
        shift = ADAPTER_SHIFT * int(sequence.adapter or 0)
        seed, known = int(sequence.sampling.seed or 0) + shift, len(tokens) - end
        drafted = np.array(answer(tokens[:end], seed, known + most, grammar=grammar)[known:], dtype=np.int32)
        if self.wrong:
            drafted[(np.arange(len(drafted)) + len(tokens)) % self.wrong == 0] += 1
        return drafted


def test_right_draft_tokens_save_steps() -> None:
    plain, drafting = SchedulerHarness(budget=32), SchedulerHarness(budget=32, drafter=OracleDrafter())
    for harness in (plain, drafting):
        harness.submit(prompt(1, 9), 33)
    assert plain.run_all() == 33
    assert drafting.run_all() <= 12
    assert len(drafting.records[1].token_ids) == 33


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_wrong_draft_tokens_change_nothing(wrong: int) -> None:
    harness = SchedulerHarness(budget=32, drafter=OracleDrafter(wrong))
    harness.submit(prompt(1, 9), 20, seed=3, parallel_seeds=(4,))
    harness.submit(prompt(2, 6), 20)
    assert harness.run_all() <= 45
    assert harness.records[1].token_ids == answer(prompt(1, 9), 3, 20)


def test_draft_tokens_leave_room_for_prompt_tails() -> None:
    harness = SchedulerHarness(slots=200, budget=18, max_num_seqs=4, drafter=OracleDrafter())
    first = harness.submit(prompt(1, 9), 60)
    harness.step()
    while harness.answer():
        pass
    harness.submit(prompt(2, 100), 4)
    plan = harness.step()
    assert [chunk.sequence.seq_id for chunk in plan.scheduled] == [first, 2]
    assert plan.num_tokens == 18
    assert plan.scheduled[1].count >= 16
    harness.finish()
    harness.check_answers()


def test_draft_tokens_do_not_starve_a_prompt_that_runs_whole() -> None:
    harness = SchedulerHarness(slots=400, budget=68, max_num_seqs=6, drafter=OracleDrafter(), max_whole_tokens=64)
    for seed in range(5):
        harness.submit(prompt(seed, 3 + seed), 40)
    for _ in range(3):
        harness.step()
        while harness.answer():
            pass
    late = harness.submit(prompt(2, 60), 2)
    assert late in [chunk.sequence.seq_id for chunk in harness.step().scheduled]
    harness.finish()
    harness.check_answers()


def test_a_stop_within_draft_tokens_ends_the_answer() -> None:
    tokens = answer(prompt(1, 9), 0, 12)
    at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    harness = SchedulerHarness(budget=32, drafter=OracleDrafter())
    harness.submit(prompt(1, 9), 40, stop=frozenset({tokens[at]}))
    harness.run_all()
    assert harness.records[1].token_ids == tokens[: at + 1]


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 16)), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(17, 40),
)
def test_random_draft_tokens_do_not_change_answers(
    requests: list[tuple[int, int, int]], wrong: int, slots: int
) -> None:
    harness = SchedulerHarness(slots=slots, budget=12, max_num_seqs=3, drafter=OracleDrafter(wrong))
    for seed, length, most in requests:
        harness.submit(prompt(seed, length), most)
        harness.step()
    harness.finish()
    harness.check_answers()


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence(
        AdoptedTicket(1, (), tuple(range(100))),
        4,
        0.0,
        seq_id=1,
        token_ids=np.array(tokens, dtype=np.int32),
        parent_hash=bytes(32),
        prompt_tokens=len(tokens),
        sampling=replace(GREEDY, max_tokens=50),
        max_model_len=1000,
    )


NGRAM = NGramDrafter(speculative(16))


def looked_up(drafter: Drafter, text: list[int], most: int) -> list[int]:
    (drafted,) = drafter.draft([(sequence_of(text), most)])
    return drafted.tolist()


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], [4, 5, 9, 1]),
        # The longer match wins, and the later one of equal length.
        ([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], [30, 8, 1, 2]),
        ([1, 2, 30, 1, 2, 40, 1, 2], [40, 1, 2]),
        # One common token is not enough.
        ([1, 2, 3, 9, 3], []),
        ([1, 2, 3], []),
        ([5], []),
        # A match may overlap its continuation.
        ([6, 6, 6, 6], [6]),
    ],
)
def test_prompt_lookup(text: list[int], drafted: list[int]) -> None:
    assert looked_up(NGRAM, text, 4) == drafted
    assert looked_up(NGRAM, text, 2) == drafted[:2]


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_drafts_followed_the_same_tokens_earlier_in_the_text(text: list[int], most: int) -> None:
    drafted = looked_up(NGRAM, text, most)
    assert len(drafted) <= most
    if drafted:
        pair = text[-2:]
        places = [i for i in range(2, len(text)) if text[i - 2 : i] == pair]
        assert any(text[i : i + len(drafted)] == drafted for i in places)


class Eager(OracleDrafter):
    """Drafts more tokens than allowed."""

    def _propose(self, sequence: Sequence, most: int) -> Int32:
        return np.zeros(most + 3, dtype=np.int32)


def test_drafts_are_bounded() -> None:
    sequence = sequence_of([1, 2, 3])
    sequence.num_computed = 2
    assert sequence.draft_capacity > 5
    (chunk,) = speculate(Eager(), DraftControl(5), StepCost(), [ScheduledChunk(sequence, 2, 1, 1)], 100)
    assert chunk.count == chunk.samples == 1 + 5
