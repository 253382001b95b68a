"""States of any history of sequences: each step reads the state of exactly the tokens before it, whether it was
computed or found, and all slots come back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.drafts.draft_chains import DraftPasses, DraftShape
from pillion.engine.drafts.lookup_drafters import SuffixDrafter
from pillion.engine.scheduling.draft_tokens import Drafter
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import StepPlan
from pillion.kernels.step import Sampled, StepBatch
from tests.engine.drafts.test_draft_chains import drafting
from tests.engine.drafts.test_drafts import OracleDrafter
from tests.engine.drafts.test_eagle_chains import head_of, heading
from tests.engine.scheduling.test_ahead import EVENTS, SPAN
from tests.engine.scheduling.test_ahead import play as play_ahead
from tests.engine.scheduling.test_properties import ANSWER, ARRIVE, CANCEL, LOAD, PUNCTUAL, SHAPES, STEP, play
from tests.support.ahead_harness import AheadHarness
from tests.support.drafts import speculative
from tests.support.examples import examples
from tests.support.fake_backend import kv_of
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt

MakeDraft = Callable[[], Callable[[npt.NDArray[np.int64]], tuple[DraftShape, DraftPasses]]]


class StateHarness(SchedulerHarness):
    """A harness whose model has a state: its number of tokens, and a number that depends on each of them."""

    def __init__(self, pages: int, **options: object) -> None:
        super().__init__(state_pages=pages, **options)  # type: ignore[arg-type]

    def run_plan(self, plan: StepPlan) -> Sampled:
        if plan.scheduled:
            assert plan.states is not None
            written: list[int] = plan.states.writes.reshape(-1).tolist()
            assert len(set(written)) == len(written), "two states in one slot"
            assert not set(written) & set(plan.states.reads.reshape(-1).tolist()), "a state is read and written"
            for chunk, reads, writes in zip(plan.scheduled, plan.states.reads, plan.states.writes, strict=True):
                tokens = chunk.sequence.tokens(0, chunk.start + chunk.count).tolist()
                assert (reads < 0).all() == (chunk.start == 0)
                if chunk.start:
                    assert self.pool[reads].tolist() == self.state(tokens[: chunk.start], len(reads))
                self.pool[writes] = self.state(tokens, len(writes))
        return super().run_plan(plan)

    def _held_up(self, sequence: Sequence) -> bool:
        return super()._held_up(sequence) or self.ends_at_a_place(sequence)

    @staticmethod
    def state(tokens: list[int], pages: int) -> list[list[int]]:
        """Return the pages' content after these tokens."""
        number = 0
        for token in tokens:
            number = (number * 31 + token + 1) % 1_000_003
        return [[len(tokens), number, page, 0] for page in range(pages)]


class StatesAhead(AheadHarness):
    """A worker that launches steps before those before them have landed, whose model has a state of what all tokens
    before have written. Each step finds what the one before has left, and no slot of a step under way is anybody
    else's."""

    def __init__(self, pages: int, **options: object) -> None:
        super().__init__(state_pages=pages, **options)  # type: ignore[arg-type]
        self.device.beside = self._carry

    def _held_up(self, sequence: Sequence) -> bool:
        return super()._held_up(sequence) or self.ends_at_a_place(sequence)

    def _carry(self, batch: StepBatch) -> None:
        """Run with the tokens known to the device before the step writes its own KV."""
        assert batch.states is not None
        starts, written = batch.query_starts, batch.states.writes
        assert len({*written.flat}) == written.size, "two states in one slot"
        assert not {*written.flat} & {*batch.states.reads.flat}, "a state is read and written"
        for sequence, (reads, writes) in enumerate(zip(batch.states.reads, written, strict=True)):
            rows = slice(starts[sequence], starts[sequence + 1])
            before = np.arange(batch.positions[rows][0])
            known = self.pool[batch.block_tables[sequence][before // BLOCK], before % BLOCK].tolist()
            assert (reads < 0).all() == (not known)
            if known:
                assert self.pool[reads].tolist() == StateHarness.state(known, len(reads))
            added = kv_of(batch.token_ids[rows], batch.positions[rows]).tolist()
            self.pool[writes] = StateHarness.state(known + added, len(writes))


@settings(max_examples=examples(80))
@given(
    SHAPES,
    st.lists(
        st.one_of(SPAN, SPAN, STEP, STEP, ANSWER, st.tuples(st.sampled_from(["scribble", "refuse"]))), max_size=60
    ),
    st.integers(0, 99),
    st.integers(1, 3),
    st.integers(2, 5),
)
def test_any_prefill_range_history_in_a_pipeline(
    shape: tuple[int, int, int], events: list[tuple[object, ...]], draws: int, pages: int, stages: int
) -> None:
    slots, budget, max_num_seqs = shape
    harness = StatesAhead(
        pages,
        slots=max(slots, 17 + 3 * pages),
        budget=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        draws=draws,
        max_in_flight=stages,
    )
    for kind, *arguments in events:
        play_ahead(harness, str(kind), [number for number in arguments if isinstance(number, int)])
    harness.refuse_commits = 0
    harness.finish()
    harness.check_answers()


@settings(max_examples=examples(120))
@given(
    SHAPES,
    EVENTS,
    st.integers(0, 99),
    PUNCTUAL,
    st.none() | st.integers(0, 3).map(OracleDrafter),
    st.integers(1, 3),
)
def test_any_request_history_with_a_step_in_flight(
    shape: tuple[int, int, int],
    events: list[tuple[object, ...]],
    draws: int,
    punctual: float,
    drafter: OracleDrafter | None,
    pages: int,
) -> None:
    """Streams and prefill ranges, drafts and grammars, preempted, cancelled and failed while a step is under way."""
    slots, budget, max_num_seqs = shape
    harness = StatesAhead(
        pages,
        slots=max(slots, 17 + 3 * pages),
        budget=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        draws=draws,
        punctual=punctual,
        drafter=drafter,
    )
    for kind, *arguments in events:
        play_ahead(harness, str(kind), [number for number in arguments if isinstance(number, int)])
    harness.breaks, harness.refuse_commits = "", 0
    harness.finish()
    harness.check_answers()


def test_a_stream_with_a_state_never_waits() -> None:
    """Each step continues from the state that the previous one writes."""
    harness = StatesAhead(2, slots=80, budget=4)
    harness.submit(prompt(1, 9), 33, seed=2)
    harness.finish()
    harness.check_answers()
    assert (harness.launches, harness.device.resolved, harness.void_rows) == (3 + 32, 32, 0)


def test_a_step_on_a_token_whose_mask_was_late_leaves_no_state() -> None:
    """The token is recomputed from the state before it, or from an older one if that was overwritten; the running
    step's state after another token is unused."""
    for draws in range(20):
        harness = StatesAhead(1, slots=80, draws=draws, budget=8 + draws, punctual=0.6)
        for seed in (1, 2):
            harness.submit(prompt(seed, 3), 24, grammar=seed, seed=seed)
        harness.finish()
        harness.check_answers()


def test_steps_ahead_store_a_state_at_the_branch_point() -> None:
    """The second text leaves it for the third, although more steps than states are under way."""
    harness, found = StatesAhead(2, slots=300, budget=4, max_in_flight=5), []
    for seed in (1, 2, 3):
        number = harness.submit([*prompt(1, 18), *prompt(seed, 48)[18:]], 0, chunks=(48,))
        assert number is not None
        found.append(harness.scheduler.sequences[number].num_computed)
        harness.finish()
    assert found == [0, 0, 16]


@settings(max_examples=examples(120))
@given(
    SHAPES,
    st.lists(st.one_of(ARRIVE, ARRIVE, STEP, STEP, ANSWER, LOAD, CANCEL), max_size=40),
    st.none()
    | st.integers(0, 3).map(OracleDrafter)
    | st.builds(SuffixDrafter, st.just(speculative(4, "suffix")))
    | st.sampled_from([drafting, heading]),
    st.booleans(),
    PUNCTUAL,
    st.integers(1, 3),
)
def test_any_request_history_gives_the_right_answers(
    shape: tuple[int, int, int],
    events: list[tuple[object, ...]],
    draft_tokens: Drafter | MakeDraft | None,
    whole_prompts: bool,
    punctual: float,
    pages: int,
) -> None:
    slots, budget, max_num_seqs = shape
    harness = StateHarness(
        pages,
        slots=max(slots, 17 + 3 * pages),
        budget=64 + budget if whole_prompts else max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        drafter=None if callable(draft_tokens) else draft_tokens,
        draft=draft_tokens() if callable(draft_tokens) else None,
        max_whole_tokens=64 if whole_prompts else 0,
        punctual=punctual,
    )
    play(harness, events)
    harness.finish()
    harness.check_answers()


def test_a_wrong_draft_token_is_computed_again_from_the_state_before_it() -> None:
    """Valid tokens are computed twice, and each answer is that of the model alone."""
    harness = StateHarness(2, drafter=OracleDrafter(2))
    harness.submit(prompt(1, 9), 20)
    starts: list[int] = []
    while harness.scheduler.sequences:
        starts += [chunk.start for chunk in harness.answered_step().scheduled]
    harness.settle()
    harness.check_answers()
    assert len(set(starts)) < len(starts)


def test_a_wrong_draft_token_costs_a_head_no_context() -> None:
    """A head does not get a state again if the model recomputes its token."""
    harness = StateHarness(2, slots=80, budget=64, draft=heading())
    harness.submit(prompt(1, 21), 20, seed=5)
    harness.run_all()
    contexts = head_of(harness).contexts
    assert len(contexts) > 1
    assert contexts[0] >= 21
    assert contexts == sorted(set(contexts))


def resumed_at(slots: int) -> int:
    """Return after how many tokens a preempted stream resumes, in a pool for less than two streams."""
    harness = StateHarness(2, slots=slots, max_num_seqs=2)
    for seed in (1, 2):
        harness.submit(prompt(seed, 9), 24)
    starts: list[int] = []
    while harness.scheduler.sequences:
        scheduled = harness.answered_step().scheduled
        starts += [chunk.start for chunk in scheduled if chunk.sequence.progress.preemptions]
    harness.settle()
    harness.check_answers()
    assert harness.preemptions > 0
    return starts[0]


def test_a_preempted_sequence_resumes_from_its_last_whole_blocks_state() -> None:
    """If the pool has no room for it, the sequence restarts from the empty state."""
    assert [resumed_at(slots) for slots in (20, 26)] == [0, 28]


def test_the_next_turn_continues_from_the_state_after_its_history() -> None:
    harness = StateHarness(2, slots=80)
    first = harness.submit(prompt(1, 18), 9, parallel_seeds=(3,))
    harness.run_all()
    assert first is not None
    text = [*prompt(1, 18), *harness.records[first].token_ids]
    # The last token has no state, and a block has four.
    for tokens, known in (([*text, 5, 6], 24), ([*text[:23], 9], 16), ([*text[:17], 9], 16), ([*text[:16]], 0)):
        number = harness.submit(tokens, 4)
        assert number is not None
        assert harness.scheduler.sequences[number].num_computed == known
        harness.run_all()


def test_parallel_samples_continue_from_the_prompts_last_whole_block_state() -> None:
    """They read their parent's state there, and write their own."""
    harness = StateHarness(2, slots=200)
    harness.submit(prompt(1, 42), 6, parallel_seeds=(3, 4))
    first: dict[int, int] = {}
    while harness.scheduler.sequences:
        for chunk in harness.answered_step().scheduled:
            first.setdefault(chunk.sequence.seq_id, chunk.start)
    harness.settle()
    harness.check_answers()
    assert first == {1: 0, 2: 40, 3: 40}


def test_a_state_is_kept_where_a_prompt_ends_before_its_answer_does() -> None:
    harness = StateHarness(2, slots=80)
    harness.submit(prompt(1, 18), 30)
    for _ in range(6):
        harness.answered_step()
    number = harness.submit(prompt(1, 21), 3)
    assert number is not None
    assert harness.scheduler.sequences[number].num_computed == 16
    harness.run_all()


def test_unread_states_are_evicted_in_a_small_pool() -> None:
    """In a pool for one sequence, unread states are evicted."""
    harness = StateHarness(2, slots=20)
    for seed in range(5):
        assert harness.submit(prompt(seed, 17), 5) is not None
        harness.run_all()
    assert harness.ledger.committed_ever > 20
    assert harness.ledger.num_slots * BLOCK == harness.pool.size


def test_the_second_text_stores_a_branch_point_state_for_the_third() -> None:
    """Three texts with a common prompt: the second finds no state there, and keeps one."""
    harness = StateHarness(2, slots=120)
    shared = prompt(1, 26)
    found = []
    for seed in (2, 3, 4):
        number = harness.submit([*shared, *prompt(seed, 9)], 4)
        assert number is not None
        found.append(harness.scheduler.sequences[number].num_computed)
        harness.run_all()
    assert found == [0, 0, 24]


def test_a_prefill_range_stores_a_state_at_the_branch_point() -> None:
    harness = StateHarness(2, slots=120)
    shared = prompt(1, 26)
    found = []
    for seed in (2, 3, 4):
        number = harness.submit([*shared, *prompt(seed, 10)], 0, chunks=(16, 36))
        assert number is not None
        found.append(harness.scheduler.sequences[number].num_computed)
        harness.run_all()
    assert found == [0, 0, 24]
