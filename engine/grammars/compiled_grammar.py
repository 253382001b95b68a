"""Defines what a compiled grammar, and a matcher, which is a place in one, can do."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from threading import Lock
from typing import Protocol

from pillion.kernels.step import UInt32


class TokenMatcher(Protocol):
    """Represents a place in a compiled grammar; compiler.py has the implementation. Only ``fill`` may take long, and
    lets other threads run."""

    def copy(self) -> TokenMatcher:
        """Returns a matcher at the same place, which moves independently of this one."""

    def consume(self, token: int) -> bool:
        """Moves over a token. Returns False if the grammar refuses it; the matcher is of no use any more then."""

    def forced(self) -> list[int]:
        """Returns the tokens that have to follow, as far as the grammar leaves no choice."""

    def allows(self, token: int) -> bool:
        """Returns whether the grammar takes this token next; the matcher does not move."""

    def rollback(self, count: int) -> None:
        """Moves back over the last ``count`` tokens. The matchers of some grammars cannot, and are of no use then."""

    def stopped(self) -> bool:
        """Returns whether nothing but the answer's end can follow."""

    def error(self) -> str:
        """Says why the matcher is of no use any more; "" while it is of use."""

    def fill(self, bits: UInt32, draft_tokens: Seq[int]) -> None:
        """Writes the mask of this place into bits[0], and those after each draft token into the rows below."""


class CompiledGrammar:
    """Represents a grammar that all answers with it share.

    Matchers of one grammar share its lexer behind a mutex, for which a thread would wait while it holds the
    interpreter's lock. So a user of a matcher of the grammar holds a lock of ours, and the step thread does not wait
    for it.

    Attributes:
        start: the matcher that is copied for each answer, and never moved.
        spent: whether one of its matchers has met an error, such as a limit of the lexer that they share: it is of no
            use for new answers.
        slow: whether its last mask took so long that steps do not wait for the next one.
        vocab_words: words of a mask, ceil(vocabulary / 32).
        takes_draft_tokens: whether its matchers can move back.
    """

    def __init__(self, start: TokenMatcher, vocab_size: int, *, takes_draft_tokens: bool = True) -> None:
        self.start = start
        self.takes_draft_tokens = takes_draft_tokens
        self.spent = self.slow = False
        self.vocab_words = -(-vocab_size // 32)
        self._lock = Lock()
        self._wake: Callable[[], None] | None = None

    def lock(self) -> None:
        """Waits for the grammar's lock and takes it. The step thread never calls this method."""
        self._lock.acquire()

    def try_lock(self, wake: Callable[[], None] | None = None) -> bool:
        """Takes the grammar's lock if it is free, and returns whether it was; if not, ``wake`` is called when it
        becomes free."""
        if self._lock.acquire(blocking=False):
            return True
        if wake is None:
            return False
        self._wake = wake
        # The thread that held the lock may have released it before ``wake`` was registered.
        return self._lock.acquire(blocking=False)

    def unlock(self) -> None:
        self._lock.release()
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()
