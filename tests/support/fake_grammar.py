"""A grammar of numbers for the scheduler's tests: the allowed tokens are a hash of the answer so far.

Implemented twice: as a matcher for the product's GrammarState, and as :func:`choices`, which walks an answer from its
beginning. Both use :func:`place`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random

from pillion.engine.grammars.compiled_grammar import CompiledGrammar, TokenMatcher
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.engine.grammars.mask_threads import MaskJob, MaskThreads
from pillion.kernels.step import UInt32
from tests.support.fake_backend import VOCAB_SIZE


def place(kind: int, answer: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the forced run after an answer, and the choices if nothing is forced; neither if it is complete."""
    hashed = zlib.crc32(bytes([kind, *answer]))
    if len(answer) > 3 and hashed % 19 == 0:
        return [], []
    if hashed % 3 == 0:
        return [(hashed >> 4 * at) % VOCAB_SIZE for at in range(1, 2 + hashed % 7)], []
    return [], list(range(hashed % 5, VOCAB_SIZE, 7))


def choices(kind: int, answer: Sequence[int]) -> list[int]:
    """Return the allowed tokens by the rule of runs: one forced token, several choices, or none if the answer is
    complete."""
    run: list[int] = []
    for end in range(len(answer) + 1):
        free: list[int] = []
        if not run:
            run, free = place(kind, answer[:end])
            run = list(run)
        if end == len(answer):
            return run[:1] or free
        assert answer[end] in (run[:1] or free), "the answer does not follow the rule"
        del run[:1]
    raise AssertionError


class NumberMatcher(TokenMatcher):
    """A position in the grammar of numbers."""

    def __init__(self, kind: int, answer: Sequence[int] = ()) -> None:
        self.kind = kind
        self.answer = list(answer)

    def copy(self) -> NumberMatcher:
        return NumberMatcher(self.kind, self.answer)

    def consume(self, token: int) -> bool:
        self.answer.append(token)
        return True

    def forced(self) -> list[int]:
        return place(self.kind, self.answer)[0]

    def allows(self, token: int) -> bool:
        return token in place(self.kind, self.answer)[1]

    def rollback(self, count: int) -> None:
        del self.answer[len(self.answer) - count :]

    def stopped(self) -> bool:
        return place(self.kind, self.answer) == ([], [])

    def error(self) -> str:
        return ""

    def fill(self, bits: UInt32, draft_tokens: Sequence[int]) -> None:
        for row, count in zip(bits, range(len(draft_tokens) + 1), strict=True):
            run, free = place(self.kind, [*self.answer, *draft_tokens[:count]])
            for token in run[:1] or free:
                row[token // 32] |= 1 << token % 32


class LateThreads(MaskThreads):
    """Computes masks only on request: the ``punctual`` ones at once, by ``draws``, the others later."""

    def __init__(self, punctual: float, draws: Random) -> None:
        super().__init__()
        self.punctual = punctual
        self._draws = draws
        self._waiting: list[MaskJob] = []
        self.late = 0

    def put(self, job: MaskJob) -> None:
        self._waiting.append(job)
        if self._draws.random() < self.punctual:
            self.catch_up()
        else:
            self.late += 1

    def add_thread_if_busy(self) -> None:
        pass

    def wake_later(self) -> None:
        pass

    def catch_up(self) -> None:
        """Compute the pending masks."""
        for job in self._waiting:
            job.run()
            job.grammar.slow = self._draws.random() > self.punctual
        self._waiting.clear()


class NumberGrammars:
    """Grammars by number."""

    def __init__(self, threads: LateThreads) -> None:
        self.threads = threads
        self._compiled: dict[int, CompiledGrammar] = {}

    def start(self, kind: int, answer: Sequence[int] = ()) -> GrammarState:
        """Return the state of an answer so far."""
        compiled = self._compiled.setdefault(kind, CompiledGrammar(NumberMatcher(kind), VOCAB_SIZE))
        state = GrammarState(compiled, self.threads)
        state.take(answer)
        state.move()
        return state


def number_of(grammar: GrammarState) -> int:
    """Return the number of a grammar of NumberGrammars."""
    matcher = grammar._grammar.start
    assert isinstance(matcher, NumberMatcher)
    return matcher.kind
