"""Any order of arrivals, lengths, priorities, parallel samples, cancels and slow answers, tiny pools: budget exact,
nobody starves, nothing leaks, and every stream says what it would say alone, whatever happened to it.

Every step's plan is checked in :class:`SchedulerHarness`; every slot after every step and every answer.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.drafts.lookup_drafters import SuffixDrafter
from pillion.engine.scheduling.draft_tokens import Drafter
from tests.engine.drafts.test_drafts import OracleDrafter
from tests.support.drafts import speculative
from tests.support.examples import examples
from tests.support.scheduler_harness import SchedulerHarness, prompt

FLOW = st.sampled_from([0, 0, 1, 2, 3])
ARRIVE = st.tuples(
    st.just("arrive"),
    st.integers(0, 3),
    st.integers(1, 40),
    st.integers(0, 24),
    st.integers(-1, 1),
    st.integers(0, 5),
    st.sampled_from([0, 0, 0, 1, 3]),
    # The grammar's number, or -1 for none.
    st.sampled_from([-1, -1, 0, 1, 2]),
    st.sampled_from([0, 0, 1]),
    # The adapter's number; 3 fails to load.
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    FLOW,
)
PUNCTUAL = st.sampled_from([1.0, 0.7])
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 30))
STEP = st.tuples(st.just("step"), st.integers(1, 6))
ANSWER = st.tuples(st.just("answer"), st.integers(1, 4))
LOAD = st.tuples(st.sampled_from(["load", "load", "preload"]), st.integers(1, 3))
# Streams of one tenant that run or wait at the start.
CROWD = st.integers(0, 5)
SHAPES = st.tuples(st.integers(12, 60), st.integers(4, 24), st.integers(1, 4))


def begin_with(harness: SchedulerHarness, crowd: int) -> None:
    """Start one tenant's streams."""
    harness.flood(1, crowd, tokens=30)
    for _ in range(crowd + 1 if crowd else 0):
        harness.answered_step()


def play(harness: SchedulerHarness, events: list[tuple[object, ...]]) -> None:
    for kind, *arguments in events:
        numbers = [number for number in arguments if isinstance(number, int)]
        if kind == "arrive":
            kind_of_text, length, most, priority, seed, parallel_samples, grammar, scored, adapter, flow = numbers
            harness.submit(
                prompt(kind_of_text, length),
                most,
                priority=priority,
                seed=seed,
                grammar=None if grammar < 0 else grammar,
                parallel_seeds=tuple(seed + 1 + number for number in range(parallel_samples if most else 0)),
                scored=bool(scored),
                adapter=adapter if harness.max_loras else 0,
                flow=flow,
            )
        elif kind == "cancel" and harness.records:
            # Ends already decided are reported first, before their owner could cancel.
            harness.receive_flush()
            line_up = [i for i, s in harness.records.items() if s.end is None and not s.cancelled]
            if line_up:
                harness.cancel(line_up[numbers[0] % len(line_up)])
        elif kind == "step":
            for _ in range(numbers[0]):
                harness.step()
        elif kind == "load":
            harness.load(numbers[0])
        elif kind == "preload" and harness.max_loras:
            harness.expect_adapter(numbers[0])
        elif kind == "answer":
            for _ in range(numbers[0]):
                harness.answer()


@settings(max_examples=examples(200))
@given(
    SHAPES,
    st.lists(st.one_of(ARRIVE, ARRIVE, STEP, STEP, ANSWER, LOAD, CANCEL), max_size=40),
    st.none() | st.integers(0, 3).map(OracleDrafter) | st.builds(SuffixDrafter, st.just(speculative(4, "suffix"))),
    st.booleans(),
    PUNCTUAL,
    st.integers(0, 2),
    st.sampled_from([0.0, 0.005, 0.5]),
    CROWD,
)
def test_any_request_history_gives_the_right_answers(
    shape: tuple[int, int, int],
    events: list[tuple[object, ...]],
    drafter: Drafter | None,
    whole_prompts: bool,
    punctual: float,
    max_loras: int,
    token_s: float,
    crowd: int,
) -> None:
    slots, budget, max_num_seqs = shape
    # 17 blocks of its own can always serve the longest sequence of ARRIVE, 64 tokens.
    harness = SchedulerHarness(
        slots=max(slots, 17),
        budget=64 + budget if whole_prompts else max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        drafter=drafter,
        max_whole_tokens=64 if whole_prompts else 0,
        punctual=punctual,
        max_loras=max_loras,
        token_s=token_s,
    )
    harness.broken_adapters = {3}
    begin_with(harness, crowd)
    play(harness, events)
    harness.finish()
    harness.check_answers()


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 9))
def test_prefill_ranges_of_any_chunks_are_acknowledged_in_order(lengths: list[int], budget: int, answers: int) -> None:
    harness = SchedulerHarness(slots=64, budget=budget, max_num_seqs=min(budget, 3))
    ends = tuple(4 * sum(lengths[: index + 1]) for index in range(len(lengths)))
    first = harness.submit(prompt(1, ends[-1]), 0, chunks=ends)
    harness.submit(prompt(2, ends[-1]), 0, chunks=ends)
    for _ in range(answers):
        harness.step()
        harness.answer()
    harness.finish()
    for record in harness.records.values():
        assert [chunk.end_tokens for chunk in record.chunks] == list(ends)
        assert all(chunk.started_s <= chunk.computed_s for chunk in record.chunks)
        assert record.end is not None
    assert first is not None
    again = harness.submit([*prompt(1, ends[-1]), 5], 3)
    assert again is not None
    harness.finish()
    assert harness.records[again].end.progress.tail_tokens == 1  # type: ignore[union-attr]
    harness.check_answers()
