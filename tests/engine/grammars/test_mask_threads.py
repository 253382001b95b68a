"""Slow and endless masks: who waits for them, with a fake grammar."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from lab.testbed.conditions import WITHIN_S, result_of, wait_for
from pillion.engine.grammars import mask_threads
from pillion.engine.grammars.compiled_grammar import CompiledGrammar
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.engine.grammars.mask_threads import MAX_MASK_THREADS, MAX_QUEUED_MASKS, MaskJob, MaskThreads
from pillion.kernels.step import UInt32
from tests.support.fake_backend import VOCAB_SIZE
from tests.support.fake_grammar import NumberMatcher, place
from tests.support.grammars import follow

FREE = next(kind for kind in range(9) if place(kind, [])[1])


class GatedMatcher(NumberMatcher):
    """Computes masks while ``gate`` is open; ``begun`` counts them."""

    gate: threading.Event
    begun = 0

    def copy(self) -> GatedMatcher:
        return held(self.gate, self.answer)

    def fill(self, bits: UInt32, draft_tokens: Sequence[int]) -> None:
        GatedMatcher.begun += 1
        assert self.gate.wait(WITHIN_S), f"waited {WITHIN_S:g} s for the test to open the gate"
        super().fill(bits, draft_tokens)


def held(gate: threading.Event, answer: Sequence[int] = ()) -> GatedMatcher:
    matcher = GatedMatcher(FREE, answer)
    matcher.gate = gate
    return matcher


def check_that_all_come(masks: Sequence[MaskJob]) -> None:
    came = [each.wait(WITHIN_S) for each in masks]
    assert all(came), f"waited {WITHIN_S:g} s for each of {len(masks)} steps' masks; those that came: {came}"


class Woken:
    """Counts wake-ups of the step loop."""

    def __init__(self) -> None:
        self.times = threading.Semaphore(0)

    def __call__(self) -> None:
        self.times.release()

    def wait(self) -> None:
        assert self.times.acquire(timeout=WITHIN_S), f"waited {WITHIN_S:g} s for the step loop to be woken"


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no mask be overdue on a stalled machine."""
    monkeypatch.setattr(mask_threads, "MASK_LIMIT_MS", 1000 * WITHIN_S)
    monkeypatch.setattr("pillion.engine.grammars.grammar_state.MASK_LIMIT_MS", 1000 * WITHIN_S)


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def threads(woken: Woken) -> Iterator[MaskThreads]:
    made = MaskThreads(woken)
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    GatedMatcher.begun = 0
    yield made
    made.set()


def state_of(matcher: NumberMatcher, threads: MaskThreads) -> GrammarState:
    state = GrammarState(CompiledGrammar(matcher, VOCAB_SIZE), threads)
    assert state.follow()
    return state


def test_a_late_mask_is_not_waited_for_and_wakes_the_loop(
    threads: MaskThreads, woken: Woken, gate: threading.Event
) -> None:
    state = state_of(held(gate), threads)
    masks = state.place_masks((), 1)
    assert not masks.wait(0.01)
    assert not state.follow(), "the matcher is in use"
    gate.set()
    woken.wait()
    wait_for("the mask", lambda: state.follow())
    assert state.failure is None
    again = state.place_masks((), 1)
    assert again is masks, "a mask that was late is used when it is there"
    allowed = np.flatnonzero(np.unpackbits(again.bits[0].view(np.uint8), bitorder="little"))
    assert allowed.tolist() == place(FREE, [])[1]


def test_a_late_mask_does_not_delay_others(threads: MaskThreads, woken: Woken, gate: threading.Event) -> None:
    late = state_of(held(gate), threads)
    late.place_masks((), 1)
    wait_for("the first job's begin", lambda: GatedMatcher.begun)
    others = [state_of(NumberMatcher(FREE), threads) for _ in range(20)]
    masks = [other.place_masks((), 1) for other in others]
    # The step that lacks masks has another thread started.
    wait_for("another thread", lambda: not late.follow() and masks[-1].wait(0))
    check_that_all_come(masks)
    for other in others:
        follow(other)


def test_late_masks_of_one_grammar_take_one_thread(threads: MaskThreads, gate: threading.Event) -> None:
    grammar = CompiledGrammar(held(gate), VOCAB_SIZE)
    parallel_samples = [GrammarState(grammar, threads) for _ in range(MAX_MASK_THREADS + 2)]
    assert all(sample.follow() for sample in parallel_samples)
    masks = [sample.place_masks((), 1) for sample in parallel_samples]
    wait_for("the first job's begin", lambda: GatedMatcher.begun)
    other = state_of(NumberMatcher(FREE), threads)
    mask = other.place_masks((), 1)
    wait_for("another grammar's mask", lambda: not parallel_samples[0].follow() and mask.wait(0))
    assert GatedMatcher.begun == 1
    gate.set()
    check_that_all_come(masks)


def test_a_mask_that_never_arrives_fails_only_its_request(
    threads: MaskThreads, woken: Woken, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(mask_threads, "MASK_LIMIT_MS", 30)
    monkeypatch.setattr("pillion.engine.grammars.grammar_state.MASK_LIMIT_MS", 30)
    monkeypatch.setattr(mask_threads, "time", SimpleNamespace(monotonic=lambda: now_s))
    endless = state_of(held(gate), threads)
    endless.place_masks((), 1)
    wait_for("its begin", lambda: GatedMatcher.begun)
    other = state_of(NumberMatcher(FREE), threads)
    assert not endless.follow()
    woken.wait()
    assert not endless.follow(), "its time is not over by the clock"
    now_s += 0.031
    assert endless.follow()
    assert "took longer than 30 ms" in str(endless.failure)
    check_that_all_come([other.place_masks((), 1)])


def test_a_grammar_whose_masks_are_slow_asks_for_them_ahead(
    threads: MaskThreads, woken: Woken, gate: threading.Event
) -> None:
    """No step waits for the next mask: the stream is scheduled once it is ready."""
    state = state_of(held(gate), threads)
    state._grammar.slow = True
    state.take([place(FREE, [])[1][0]])
    gate.set()
    if not state.follow():
        woken.wait()
        wait_for("the mask", lambda: state.follow())
    assert state.forced or GatedMatcher.begun == 1


def test_a_parallel_sample_starts_at_the_beginning_of_the_answer(threads: MaskThreads, gate: threading.Event) -> None:
    gate.set()
    state = state_of(held(gate), threads)
    state.take([place(FREE, [])[1][0]])
    assert state.follow()
    child = state.sample()
    assert child.follow()
    assert child.num_tokens == 0
    check_that_all_come([child.place_masks((), 1)])


def test_masks_not_yet_started_are_not_waited_for(threads: MaskThreads, gate: threading.Event) -> None:
    grammar = CompiledGrammar(held(gate), VOCAB_SIZE)
    state, sample = GrammarState(grammar, threads), GrammarState(grammar, threads)
    assert sample.follow()
    state.take([place(FREE, [])[1][0]])
    sample.place_masks((), 1)
    wait_for("the parallel sample's begin", lambda: GatedMatcher.begun)
    # Another thread holds the grammar until the gate opens, longer than this wait.
    masks = state.place_masks((), 1)
    with ThreadPoolExecutor(1) as waiting:
        assert result_of("the wait's end", waiting.submit(masks.wait, 2 * WITHIN_S)) is False


def test_a_long_mask_queue_starts_more_threads(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads.os, "cpu_count", lambda: 3)
    threads = MaskThreads()
    monkeypatch.setattr(mask_threads.MaskJob, "is_slow", lambda self, limit_ms=0: False)
    states = [state_of(held(gate), threads) for _ in range(4 * MAX_QUEUED_MASKS)]
    masks = [state.place_masks((), 1) for state in states]
    wait_for("three threads", lambda: GatedMatcher.begun == 3)
    assert threads._threads == 3
    gate.set()
    check_that_all_come(masks)
    threads.close()
