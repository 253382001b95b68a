"""Partial blocks of answers: the next turn copies matching tokens, memory pressure wins, and nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt


def harness_of(most: int = 2, **shape: int) -> SchedulerHarness:
    return SchedulerHarness(partial_blocks=most, **shape)


def run_all(harness: SchedulerHarness) -> int:
    """Run until idle; return the number of computed tokens."""
    ran = 0
    while harness.busy():
        harness.load(2)
        ran += harness.step().num_tokens
        while harness.answer():
            pass
        harness.receive_flush()
    return ran


def ask(harness: SchedulerHarness, tokens: list[int], most: int, **options: int) -> tuple[int, int]:
    """Compute one answer; return its number and that of computed tokens."""
    number = harness.submit(tokens, most, **options)
    assert number is not None
    return number, run_all(harness)


@pytest.mark.parametrize("length", [1, 5, 6, 7, 8])
def test_the_next_turn_computes_only_new_tokens(length: int) -> None:
    harness = harness_of()
    first, ran = ask(harness, prompt(1, length), 6)
    assert ran == length + 5
    history = prompt(1, length) + harness.records[first].token_ids
    _, ran = ask(harness, history + prompt(2, 3), 4)
    # The answer's last token has no KV yet; other answers end with a block, so nothing is copied.
    assert ran == 1 + 3 + 3
    assert harness.copies == ((length + 5) % BLOCK > 0)
    harness.settle()
    harness.check_answers()


def test_only_matching_tokens_are_copied() -> None:
    harness = harness_of()
    first, _ = ask(harness, prompt(1, 5), 7)
    history = prompt(1, 5) + harness.records[first].token_ids
    # 11 tokens have KV, the last 3 of them in a partial block; 2 of these match.
    _, ran = ask(harness, [*history[:10], 96, 96, 96], 2)
    assert (ran, harness.copies) == (3 + 1, 1)
    # The prompt's last token is computed for its logits.
    _, ran = ask(harness, history[:10], 2)
    assert (ran, harness.copies) == (1 + 1, 2)
    # A prompt that differs before the block reuses none of it.
    _, ran = ask(harness, [*history[:8], 96, 95], 2)
    assert (ran, harness.copies) == (2 + 1, 2)
    harness.settle()
    harness.check_answers()


def test_a_scored_prompt_is_computed_whole() -> None:
    harness = harness_of()
    ask(harness, prompt(1, 3), 1)
    _, ran = ask(harness, prompt(1, 3), 1, scored=1)
    assert (ran, harness.copies) == (3, 0)
    _, ran = ask(harness, prompt(1, 3), 1)
    assert (ran, harness.copies) == (1, 1)
    harness.settle()
    harness.check_answers()


def test_an_adapter_matches_only_its_own_partial_blocks() -> None:
    harness = SchedulerHarness(partial_blocks=2, max_loras=2)
    first, _ = ask(harness, prompt(1, 3), 3, adapter=1)
    history = prompt(1, 3) + harness.records[first].token_ids
    ask(harness, history, 3, adapter=2)
    ask(harness, history, 3)
    assert harness.copies == 0
    ask(harness, history, 3, adapter=1)
    assert harness.copies == 1
    harness.settle()
    harness.check_answers()


def test_several_turns_may_follow_one_answer() -> None:
    harness = harness_of(max_num_seqs=4, budget=16)
    first, _ = ask(harness, prompt(1, 6), 6)
    history = prompt(1, 6) + harness.records[first].token_ids
    for last in range(3):
        assert harness.submit([*history, last], 2) is not None
    assert run_all(harness) == 3 * (2 + 1)
    assert harness.copies == 3
    harness.settle()
    harness.check_answers()


def test_partial_blocks_are_limited_and_evicted_lru() -> None:
    harness = harness_of(most=2)
    histories = []
    for number in (1, 2, 3):
        first, _ = ask(harness, prompt(number, 5), 2)
        histories.append(prompt(number, 5) + harness.records[first].token_ids)
    assert harness.partial_blocks.kept_blocks == 2
    for history, copied in zip(reversed(histories), (1, 2, 2), strict=True):
        ask(harness, history, 1)
        assert harness.copies == copied


def test_partial_blocks_are_freed_before_a_preemption() -> None:
    harness = harness_of(most=8, slots=12, max_num_seqs=2)
    for number in range(4):
        ask(harness, prompt(number, 5), 1)
    assert harness.partial_blocks.kept_blocks == 4
    # It needs nearly all slots. The node recalls those that it lacks, and the growing decode takes the rest before it
    # is preempted.
    assert harness.submit(prompt(9, 36), 9) is None
    harness.scheduler.recall(2, harness.now)
    harness.receive_flush()
    while harness.answer():
        pass
    assert harness.partial_blocks.kept_blocks == 2
    assert harness.submit(prompt(9, 36), 9) is not None
    run_all(harness)
    assert harness.preemptions == 0
    harness.settle()
    harness.check_answers()


def test_a_turn_cancelled_before_its_copy_leaks_nothing() -> None:
    harness = harness_of()
    first, _ = ask(harness, prompt(1, 6), 6)
    history = prompt(1, 6) + harness.records[first].token_ids
    gone = harness.submit(history, 3)
    assert gone is not None
    # Promised slots are kept, however short memory is.
    harness.scheduler.recall(60, harness.now)
    harness.scheduler.check_integrity()
    harness.cancel(gone)
    harness.receive_flush()
    _, ran = ask(harness, history, 3)
    assert (ran, harness.copies) == (1 + 2, 1)
    harness.settle()
    harness.check_answers()


TURN = st.tuples(st.just("turn"), st.integers(0, 9), st.integers(0, 30), st.integers(0, 9), st.integers(0, 12))
EVENTS = st.one_of(
    st.tuples(st.just("first"), st.integers(0, 2), st.integers(1, 20), st.integers(0, 12), st.sampled_from([0, 0, 2])),
    *[TURN] * 3,
    *[st.tuples(st.just("step"), st.integers(1, 8))] * 3,
    st.tuples(st.just("answer"), st.integers(1, 4)),
    st.tuples(st.just("recall"), st.integers(1, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


def play(harness: SchedulerHarness, events: list[tuple[object, ...]]) -> None:
    for kind, *arguments in events:
        numbers = [number for number in arguments if isinstance(number, int)]
        records = list(harness.records.values())
        if kind == "first":
            text, length, most, parallel_samples = numbers
            harness.submit(
                prompt(text, length), most, parallel_seeds=tuple(range(1, 1 + parallel_samples if most else 1))
            )
        elif kind == "turn" and records:
            # A conversation continues, perhaps after a part of its answer, with other words.
            which, kept, new, most = numbers
            before = records[which % len(records)]
            text = (before.prompt + before.token_ids)[: len(before.prompt) + kept] + prompt(5 + new % 2, new)
            if len(text) <= 40:
                harness.submit(text, most)
        elif kind == "step":
            for _ in range(numbers[0]):
                harness.step()
        elif kind == "answer":
            for _ in range(numbers[0]):
                harness.answer()
        elif kind == "recall":
            harness.scheduler.recall(numbers[0], harness.now)
        elif kind == "cancel":
            harness.receive_flush()
            left = [i for i, one in harness.records.items() if one.end is None and not one.cancelled]
            if left:
                harness.cancel(left[numbers[0] % len(left)])


@settings(max_examples=examples(150))
@given(st.integers(17, 60), st.integers(4, 24), st.integers(1, 4), st.integers(0, 4), st.lists(EVENTS, max_size=40))
def test_random_conversations_get_the_right_answers(
    slots: int, budget: int, seqs: int, most: int, events: list[tuple[object, ...]]
) -> None:
    harness = harness_of(most, slots=slots, budget=max(budget, seqs), max_num_seqs=seqs)
    play(harness, events)
    harness.finish()
    harness.check_answers()
