"""Defines a compiled grammar, and a matcher, which is a place in one, over llguidance."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from threading import Lock
from typing import TYPE_CHECKING, Any

from pillion.kernels.step import UInt32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# llguidance counts fuel for what a grammar's lexer adds; each unit stands for about this much memory (3 to 23 bytes).
BYTES_OF_FUEL = 24
# The fuel that a grammar has spent is read after this many of its masks: after more, where its lexer has not grown.
MIN_UNREAD_MASKS, MAX_UNREAD_MASKS = 16, 1024
# At most this many bytes of forced text are turned into tokens at once, because that holds the interpreter's lock;
# longer text is cut.
MAX_FORCED_BYTES = 2048
# Tokens that reach into this many bytes before the cut are left for the next time, as further text could change them.
_CUT_BYTES = 64
# These expressions find in an error of llguidance the fuel that a matcher has spent; the token does not exist, and is
# used to cause an error.
_FUEL, _NO_TOKEN = re.compile(r'"lexer_cost": (\d+)'), 2**31 - 1
# This expression matches a special token in the bytes that a grammar forces.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")


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


class SharedLexer:
    """Measures the lexer that the matchers of one compilation share, which grows with their masks. llguidance does not
    tell its size; the fuel that a matcher has spent is read after some of its masks, for the others' too. It belongs to
    the holder of the grammar's lock, but for reading ``num_bytes``, about how much memory it takes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._unread = 0
        self._next = MIN_UNREAD_MASKS

    def looked(self, matcher: TokenMatcher) -> None:
        """Notes that a matcher of this lexer has computed a mask."""
        self._unread += 1
        if self._unread < self._next:
            return
        grown = matcher.fuel_since() * self._unread
        self.num_bytes += BYTES_OF_FUEL * grown
        self._unread, self._next = 0, MIN_UNREAD_MASKS if grown else min(2 * self._next, MAX_UNREAD_MASKS)


class TokenMatcher:
    """Represents a place in a compiled grammar, by an LLMatcher of llguidance. Only ``fill`` may take long, and lets
    other threads run."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, lexer: SharedLexer, known_fuel: int = 0) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._lexer = lexer
        self._known_fuel = known_fuel
        # This counts the masks that were computed since the matcher's spent fuel was last read.
        self._masks = 0

    def copy(self) -> TokenMatcher:
        """Returns a matcher at the same place, which moves independently of this one."""
        return TokenMatcher(self._matcher.deep_copy(), self._tokenizer, self._lexer, self._known_fuel)

    def fuel(self) -> int:
        """Returns the fuel that the matcher has spent so far on the lexer that it shares; 0 where the library does not
        tell."""
        probe = self._matcher.deep_copy()
        probe.consume_token(_NO_TOKEN)
        found = _FUEL.search(probe.get_error())
        self._known_fuel = int(found[1]) if found else 0
        return self._known_fuel

    def fuel_since(self) -> int:
        """Returns the fuel that the matcher has spent on each mask since the last call of this method, rounded up."""
        known, masks = self._known_fuel, self._masks
        self._masks = 0
        return -(-(self.fuel() - known) // max(masks, 1))

    def consume(self, token: int) -> bool:
        """Moves over a token. Returns False if the grammar refuses it; the matcher is of no use any more then."""
        return self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Returns the tokens that have to follow, as far as the grammar leaves no choice."""
        text = self._matcher.compute_ff_bytes()
        if len(text) <= MAX_FORCED_BYTES or not self._tokenizer.is_canonical:
            return self._matcher.compute_ff_tokens() if text else []
        return self._cut(text[:MAX_FORCED_BYTES])

    def _cut(self, text: bytes) -> list[int]:
        """Returns the tokens of a forced text that goes on, as far as further text cannot change them."""
        special = _SPECIAL.match(text)
        if special:
            return [int(special[1])]
        marker = text.find(b"\xff")
        if marker >= 0:
            return self._tokenizer.tokenize_bytes(text[:marker])
        tokens = self._tokenizer.tokenize_bytes(text)
        left = 0
        while tokens and left < _CUT_BYTES:
            left += len(self._tokenizer.decode_bytes([tokens.pop()]))
        return tokens

    def allows(self, token: int) -> bool:
        """Returns whether the grammar takes this token next; the matcher does not move."""
        return self._matcher.validate_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Moves back over the last ``count`` tokens. The matchers of some grammars cannot, and are of no use then."""
        self._matcher.rollback(count)

    def stopped(self) -> bool:
        """Returns whether nothing but the answer's end can follow."""
        return self._matcher.is_stopped()

    def error(self) -> str:
        """Says why the matcher is of no use any more; "" while it is of use."""
        return first_line(self._matcher.get_error())

    def fill(self, bits: UInt32, draft_tokens: Seq[int]) -> None:
        """Writes the mask of this place into bits[0], and those after each draft token into the rows below."""
        if draft_tokens:
            # The library's type stubs leave this method out.
            masks: Any = self._matcher
            masks.unsafe_compute_mask_ptr_with_draft_token(bits.ctypes.data, bits[0].nbytes, [*draft_tokens])
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits[0].nbytes)
        self._masks += 1
        self._lexer.looked(self)


def first_line(error: str) -> str:
    """Returns the first line of an error of llguidance."""
    return error.strip().partition("\n")[0]
