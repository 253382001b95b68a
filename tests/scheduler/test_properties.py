"""Any order of arrivals, lengths, priorities, forks, cancels and slow answers, tiny pools: budget exact, nobody
starves, nothing leaks, and every stream says what it would say alone, whatever happened to it.

Every step's plan is checked in :class:`SchedulerLine`; every slot after every step and every answer.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.test_drafts import Oracle
from tests.support.scheduler_line import SchedulerLine, prompt

ARRIVE = st.tuples(
    st.just("arrive"),
    st.integers(0, 3),
    st.integers(1, 40),
    st.integers(1, 24),
    st.integers(-1, 1),
    st.integers(0, 5),
    st.sampled_from([0, 0, 0, 1, 3]),
)
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 30))
STEP = st.tuples(st.just("step"), st.integers(1, 6))
ANSWER = st.tuples(st.just("answer"), st.integers(1, 4))
SHAPES = st.tuples(st.integers(12, 60), st.integers(4, 24), st.integers(1, 4))


def play(line: SchedulerLine, events: list[tuple[object, ...]]) -> None:
    for kind, *said in events:
        numbers = [number for number in said if isinstance(number, int)]
        if kind == "arrive":
            kind_of_text, length, most, priority, seed, forks = numbers
            line.submit(
                prompt(kind_of_text, length),
                most,
                priority=priority,
                seed=seed,
                fork_seeds=tuple(seed + 1 + number for number in range(forks)),
            )
        elif kind == "cancel" and line.said:
            line_up = [i for i, s in line.said.items() if s.end is None and not s.cancelled]
            if line_up:
                line.cancel(line_up[numbers[0] % len(line_up)])
        elif kind == "step":
            for _ in range(numbers[0]):
                line.step()
        elif kind == "answer":
            for _ in range(numbers[0]):
                line.answer()


@settings(max_examples=200, deadline=None)
@given(
    SHAPES,
    st.lists(st.one_of(ARRIVE, ARRIVE, STEP, STEP, ANSWER, CANCEL), max_size=40),
    st.none() | st.integers(0, 3).map(Oracle),
    st.booleans(),
)
def test_any_history(
    shape: tuple[int, int, int], events: list[tuple[object, ...]], drafter: Oracle | None, whole_prompts: bool
) -> None:
    slots, budget, max_num_seqs = shape
    # The longest sequence of ARRIVE has 64 tokens; with its own 17 blocks a pool can always serve one.
    line = SchedulerLine(
        slots=max(slots, 17),
        budget=64 + budget if whole_prompts else max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        drafter=drafter,
        max_whole_tokens=64 if whole_prompts else 0,
    )
    play(line, events)
    line.finish()
    line.check_answers()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 9))
def test_spans_of_any_chunks_are_acknowledged_in_order(lengths: list[int], budget: int, answers: int) -> None:
    line = SchedulerLine(slots=64, budget=budget, max_num_seqs=min(budget, 3))
    ends = tuple(4 * sum(lengths[: index + 1]) for index in range(len(lengths)))
    first = line.submit(prompt(1, ends[-1]), 0, chunks=ends)
    line.submit(prompt(2, ends[-1]), 0, chunks=ends)
    for _ in range(answers):
        line.step()
        line.answer()
    line.finish()
    for said in line.said.values():
        assert [chunk.end_tokens for chunk in said.chunks] == list(ends)
        assert all(chunk.started_s <= chunk.computed_s for chunk in said.chunks)
        assert said.end is not None
    assert first is not None
    again = line.submit([*prompt(1, ends[-1]), 5], 3)
    assert again is not None
    line.finish()
    assert line.said[again].end.progress.tail_tokens == 1  # type: ignore[union-attr]
    line.check_answers()
