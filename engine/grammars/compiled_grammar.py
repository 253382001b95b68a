"""A grammar that is compiled, and what a matcher, a place in it, can do."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from threading import Lock
from typing import Protocol

from pillion.engine.sampling.sampling_rows import UInt32


class TokenMatcher(Protocol):
    """A compiled grammar and a place in it; compiler.py has the real one. Only ``fill`` may take long, and lets other
    threads run."""

    def copy(self) -> TokenMatcher:
        """A matcher at the same place, to be moved on its own."""

    def consume(self, token: int) -> bool:
        """Move behind a token. False: the grammar refuses it, and the matcher is of no use any more."""

    def forced(self) -> list[int]:
        """The next tokens, where there is no choice."""

    def allows(self, token: int) -> bool:
        """Whether it may be moved behind this token."""

    def rollback(self, count: int) -> None:
        """Move back over the last ``count`` tokens. The matchers of some grammars cannot, and are of no use then."""

    def stopped(self) -> bool:
        """Whether only the end can follow."""

    def error(self) -> str:
        """Why the matcher is of no use any more; "" while it is."""

    def fill(self, bits: UInt32, guesses: Seq[int]) -> None:
        """Write the mask of this place into bits[0], and those behind each guess into the rows below."""


class CompiledGrammar:
    """A grammar at its begin, shared by its answers.

    Matchers of one grammar share its lexer behind a mutex, for which a thread would wait with the interpreter's lock in
    its hands. So whoever uses a matcher of the grammar holds a lock of ours, and the step thread does not wait for it.

    Attributes:
        start: copied for each answer, and never moved.
        spent: whether one of its matchers has met an error, such as a limit of the lexer that they share: it is of no
            use for new answers.
        slow: whether its last mask took so long that steps do not wait for the next one.
        vocab_words: words of a mask, ceil(vocabulary / 32).
        takes_guesses: whether its matchers can move back.
    """

    def __init__(self, start: TokenMatcher, vocab_size: int, *, takes_guesses: bool = True) -> None:
        self.start = start
        self.takes_guesses = takes_guesses
        self.spent = self.slow = False
        self.vocab_words = -(-vocab_size // 32)
        self._lock = Lock()
        self._wake: Callable[[], None] | None = None

    def lock(self) -> None:
        """Wait for the lock; not on the step thread."""
        self._lock.acquire()

    def try_lock(self, wake: Callable[[], None] | None = None) -> bool:
        """Whether the lock was free; if not, ``wake`` is called when it is."""
        if self._lock.acquire(blocking=False):
            return True
        if wake is None:
            return False
        self._wake = wake
        # Whoever held it may have let go of it before that.
        return self._lock.acquire(blocking=False)

    def unlock(self) -> None:
        self._lock.release()
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()
