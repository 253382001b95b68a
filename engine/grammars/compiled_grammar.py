"""Compiled grammars of llguidance, and matchers, each of which is a position in one."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from threading import Lock
from typing import TYPE_CHECKING, Any

from pillion.kernels.step import UInt32

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Max bytes that a grammar's lexer grows per unit of llguidance's fuel (measured: 3 to 23).
BYTES_OF_FUEL = 24
# Range of the number of masks between two readings of a grammar's spent fuel; it doubles while the lexer does not grow.
MIN_UNREAD_MASKS, MAX_UNREAD_MASKS = 16, 1024
# Max bytes of forced text tokenized at once, with the GIL held; longer text is cut.
MAX_FORCED_BYTES = 2048
_FUEL = re.compile(r'"lexer_cost": (\d+)')
# A special token's id in a forced text.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")


class CompiledGrammar:
    """Grammar shared by all answers that use it.

    Matchers of one grammar share its lexer behind llguidance's mutex, on which a thread would wait with the GIL held.
    Therefore users of a matcher acquire this class's lock before, for which the step thread never waits.

    Attributes:
        start: matcher at the grammar's start, copied for each answer.
        spent: True if a matcher met an error, such as a limit of the shared lexer: unusable for new answers.
        slow: True if its last mask took longer than steps wait.
        vocab_words: words of a mask, ceil(vocabulary / 32).
        takes_draft_tokens: True if its matchers can roll back.
    """

    def __init__(self, start: TokenMatcher, vocab_size: int, *, takes_draft_tokens: bool = True) -> None:
        self.start = start
        self.takes_draft_tokens = takes_draft_tokens
        self.spent = self.slow = False
        self.vocab_words = -(-vocab_size // 32)
        self._lock = Lock()
        self._wake: Callable[[], None] | None = None

    def lock(self) -> None:
        """Acquire the grammar's lock. Never call it on the step thread."""
        self._lock.acquire()

    def try_lock(self, wake: Callable[[], None] | None = None) -> bool:
        """Acquire the grammar's lock if it is free and return True; else return False, and call ``wake`` when it is
        released."""
        if self._lock.acquire(blocking=False):
            return True
        if wake is None:
            return False
        self._wake = wake
        # The lock may have been released before ``wake`` was stored.
        return self._lock.acquire(blocking=False)

    def unlock(self) -> None:
        self._lock.release()
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


class SharedLexer:
    """Estimate of the size of the lexer that the matchers of a compilation share, which grows with their masks.
    llguidance does not expose it, so the fuel spent by a matcher is read after some masks and extrapolated. Guarded by
    the grammar's lock, except for reading ``num_bytes``, the estimated size."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._unread = 0
        self._next = MIN_UNREAD_MASKS

    def count_mask(self, matcher: TokenMatcher) -> None:
        """Count a mask computed by a matcher of this lexer."""
        self._unread += 1
        if self._unread < self._next:
            return
        fuel = matcher.fuel_since() * self._unread
        self.num_bytes += BYTES_OF_FUEL * fuel
        self._unread, self._next = 0, MIN_UNREAD_MASKS if fuel else min(2 * self._next, MAX_UNREAD_MASKS)


class TokenMatcher:
    """Position in a compiled grammar, an LLMatcher of llguidance. Only ``fill`` may take long, and releases the GIL."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, lexer: SharedLexer, known_fuel: int = 0) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._lexer = lexer
        self._known_fuel = known_fuel
        self._masks = 0

    def copy(self) -> TokenMatcher:
        """Return an independent matcher at the same position."""
        return TokenMatcher(self._matcher.deep_copy(), self._tokenizer, self._lexer, self._known_fuel)

    def fuel(self) -> int:
        """Return the matcher's fuel spent on the shared lexer; 0 if the library does not expose it."""
        probe = self._matcher.deep_copy()
        # An invalid token provokes an error, whose text includes the fuel.
        probe.consume_token(2**31 - 1)
        match = _FUEL.search(probe.get_error())
        self._known_fuel = int(match[1]) if match else 0
        return self._known_fuel

    def fuel_since(self) -> int:
        """Return the fuel per mask since the last call, rounded up."""
        known, masks = self._known_fuel, self._masks
        self._masks = 0
        return -(-(self.fuel() - known) // max(masks, 1))

    def consume(self, token: int) -> bool:
        """Advance over a token. Return False if the grammar rejects it; the matcher is then unusable."""
        return self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Return the next tokens that have no alternative; of a long forced text, the first ones."""
        text = self._matcher.compute_ff_bytes()
        if len(text) <= MAX_FORCED_BYTES or not self._tokenizer.is_canonical:
            return self._matcher.compute_ff_tokens() if text else []
        return self._cut(text[:MAX_FORCED_BYTES])

    def _cut(self, text: bytes) -> list[int]:
        """Return the tokens at the beginning of a forced text, those that its continuation cannot change."""
        special = _SPECIAL.match(text)
        if special:
            return [int(special[1])]
        marker = text.find(b"\xff")
        if marker >= 0:
            return self._tokenizer.tokenize_bytes(text[:marker])
        tokens = self._tokenizer.tokenize_bytes(text)
        # Further text could change the tokens of the last bytes.
        dropped_bytes = 0
        while tokens and dropped_bytes < 64:
            dropped_bytes += len(self._tokenizer.decode_bytes([tokens.pop()]))
        return tokens

    def allows(self, token: int) -> bool:
        """Return whether the grammar allows this token next, without advancing."""
        return self._matcher.validate_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Roll back the last ``count`` tokens. Matchers of some grammars cannot, and are then unusable."""
        self._matcher.rollback(count)

    def stopped(self) -> bool:
        """Return whether only the answer's end can follow."""
        return self._matcher.is_stopped()

    def error(self) -> str:
        """Return why the matcher is unusable, or ""."""
        return first_line(self._matcher.get_error())

    def fill(self, bits: UInt32, draft_tokens: Seq[int]) -> None:
        """Write the mask of this position to bits[0], and the mask after each draft token to the next rows."""
        if draft_tokens:
            masks: Any = self._matcher
            masks.unsafe_compute_mask_ptr_with_draft_token(bits.ctypes.data, bits[0].nbytes, [*draft_tokens])
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits[0].nbytes)
        self._masks += 1
        self._lexer.count_mask(self)


def first_line(error: str) -> str:
    return error.strip().partition("\n")[0]
