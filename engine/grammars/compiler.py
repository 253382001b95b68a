"""llguidance: a model's tokenizer as it needs it, and grammars that are compiled once and kept.

Loading the tokenizer holds the interpreter's lock for a second or more, so a worker does that before it serves. The
compilation of a grammar lets other threads run, and gives way to them. The limits bound memory and time of a grammar,
whatever is in it: the worst mask within them takes some tens of milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from pillion.cores import give_way
from pillion.engine.grammars.compiled_grammar import CompiledGrammar
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.engine.grammars.mask_threads import MaskThreads
from pillion.engine.sampling.sampling_rows import UInt32
from pillion.errors import InvalidRequest
from pillion.grammar_limits import GRAMMAR_FAULT, PARSER_LIMITS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept, those that were used last.
MAX_COMPILED_GRAMMARS = 64
# About how much memory they may take.
MAX_COMPILED_BYTES = 64 * 2**20
# Memory of a lexer for each unit of the fuel that llguidance counts for what it adds to one: 3 to 23 bytes.
BYTES_OF_FUEL = 24
# After how many masks of a grammar the next one's fuel is read: more, where its lexer has not grown.
MIN_UNREAD_MASKS, MAX_UNREAD_MASKS = 16, 1024
# Grammars that are compiled at once.
COMPILE_THREADS = 2
# Forced text that is turned into tokens at once, with the interpreter's lock held; longer text is cut.
MAX_FORCED_BYTES = 2048
# Tokens that reach into so many bytes before the cut are left for the next time: further text could change them.
_CUT_BYTES = 64
# Compilations that single answers have for themselves, because a limit was met in one that they shared.
MAX_OWN_GRAMMARS = 8
# Tokens of an answer so far that are followed at once. Then others get the grammar and the interpreter's lock, which a
# thread that waits for it gets only from one that sleeps, or after 5 ms.
REPLAYED_TOKENS = 32
REPLAY_PAUSE_S = 1e-4
# What an error of llguidance's says of the fuel that a matcher has spent, and a token that is none, for an error.
_FUEL, _NO_TOKEN = re.compile(r'"lexer_cost": (\d+)'), 2**31 - 1
# A special token in forced bytes.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")


def read_tokenizer(path: Path, vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    """A tokenizer as llguidance needs it; the one that was read last is kept, also for forks of this process, until its
    file changes. It starts no thread. Raises as :meth:`GrammarCompiler.load` does."""
    changed = path.stat()
    return _read_tokenizer(path, (changed.st_mtime_ns, changed.st_size, changed.st_ino), vocab_size, end_ids)


@lru_cache(maxsize=1)
def _read_tokenizer(path: Path, changed: tuple[int, ...], vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=[*end_ids] or None)


def read_ahead(text: str) -> None:
    """Reads the tokenizer of JSON's [path, vocabulary's size, ids of ends] for forks of this process. What cannot be
    read is left to who needs it, and says why."""
    path, vocab_size, end_ids = json.loads(text)
    with suppress(ImportError, OSError, ValueError):
        read_tokenizer(Path(path), vocab_size, tuple(end_ids))


class GrammarCompiler:
    """Makes the states of answers for one model. Safe to use from several threads.

    ``mask_threads`` compute the masks of all of them.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        self.mask_threads = MaskThreads()
        # Called with the seconds that a grammar took to compile; may be replaced.
        self.on_compiled: Callable[[float], None] = lambda seconds: None
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._executor = ThreadPoolExecutor(COMPILE_THREADS, "pillion-grammar", give_way)
        self._compiled: OrderedDict[bytes, tuple[CompiledGrammar, _SharedLexer]] = OrderedDict()
        self._own: WeakSet[CompiledGrammar] = WeakSet()
        self._lock = Lock()

    @classmethod
    def load(cls, folder: Path, vocab_size: int, end_ids: Seq[int]) -> GrammarCompiler:
        """Reads a prepared model's tokenizer. Raises ImportError without llguidance, OSError without a tokenizer, and
        ValueError for one that llguidance cannot use."""
        ends = tuple(end for end in end_ids if end < vocab_size)
        return cls(read_tokenizer(folder / "tokenizer.json", vocab_size, ends), vocab_size, ends)

    def start(self, text: str, answer: Seq[int], stop_token_ids: frozenset[int]) -> Future[GrammarState]:
        """The state of an answer that has these tokens already. It takes as long as compiling the grammar, if that is
        not in the cache. InvalidRequest: the grammar does not compile, or does not allow the answer."""
        return self._executor.submit(self._start, text, answer, stop_token_ids)

    def close(self) -> None:
        """End the threads, each when its work is done. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.mask_threads.close()

    def _start(self, text: str, answer: Seq[int], stop_token_ids: frozenset[int]) -> GrammarState:
        ends = tuple(end for end in self._end_ids if end not in stop_token_ids)
        state = self._at(text, self._compile(text), answer, ends)
        if state.broken:
            # A limit may have been met by other answers.
            state = self._at(text, self._compile(text, own=True), answer, ends)
        if state.broken:
            raise InvalidRequest(f"{GRAMMAR_FAULT} cannot be followed: {state.broken}")
        return state

    def _at(self, text: str, compiled: CompiledGrammar, answer: Seq[int], ends: tuple[int, ...]) -> GrammarState:
        """The state of an answer that has these tokens already."""
        state = GrammarState(compiled, self.mask_threads, ends, partial(self._renew, text, ends))
        state.take(answer)
        moved = False
        while not moved:
            compiled.lock()
            try:
                moved = state.move(REPLAYED_TOKENS)
            finally:
                compiled.unlock()
            if not moved:
                time.sleep(REPLAY_PAUSE_S)
        return state

    def _renew(self, text: str, ends: tuple[int, ...], answer: Seq[int]) -> Future[GrammarState] | None:
        """Begins to follow an answer in a compilation of its own. None where too many have one."""
        with suppress(RuntimeError):  # It is closed.
            if len(self._own) < MAX_OWN_GRAMMARS:
                return self._executor.submit(lambda: self._at(text, self._compile(text, own=True), answer, ends))
        return None

    def _compile(self, text: str, *, own: bool = False) -> CompiledGrammar:
        """A grammar as all answers share it, or as one alone has it."""
        key = hashlib.sha256(text.encode()).digest()
        if not own:
            with self._lock:
                found = self._kept(key)
                if found is not None:
                    self._trim()
                    return found
        from llguidance import LLMatcher, LLParserLimits

        began_s = time.monotonic()
        # What an error then says has the fuel that was spent.
        limits = LLParserLimits(**{**PARSER_LIMITS, "verbose_errors": True})
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"{GRAMMAR_FAULT} does not compile: {_first_line(matcher.get_error())}")
        seconds = time.monotonic() - began_s
        lexer = _SharedLexer()
        start = _LibraryMatcher(matcher, self._tokenizer, lexer)
        lexer.num_bytes = len(text) + BYTES_OF_FUEL * start.fuel()
        compiled = CompiledGrammar(start, self._vocab_size, takes_guesses=self._can_go_back(start.copy()))
        with self._lock:
            self.on_compiled(seconds)
            if own:
                self._own.add(compiled)
                return compiled
            found = self._kept(key)
            if found is not None:
                return found
            self._compiled[key] = compiled, lexer
            self._compiled.move_to_end(key)
            self._trim()
        return compiled

    def _kept(self, key: bytes) -> CompiledGrammar | None:
        """A grammar that is kept and of use, now as the one that was used last."""
        compiled, _ = self._compiled.get(key, (None, None))
        if compiled is None or compiled.spent:
            return None
        self._compiled.move_to_end(key)
        return compiled

    def _trim(self) -> None:
        """Let go of those that were used longest ago, down to the bounds; but not of the last one."""
        left_bytes = sum(lexer.num_bytes for _, lexer in self._compiled.values())
        while len(self._compiled) > 1 and (
            len(self._compiled) > MAX_COMPILED_GRAMMARS or left_bytes > MAX_COMPILED_BYTES
        ):
            _, (_, lexer) = self._compiled.popitem(last=False)
            left_bytes -= lexer.num_bytes

    def _can_go_back(self, matcher: _LibraryMatcher) -> bool:
        """Whether a matcher at the grammar's begin can move over a token and back, which rules with "stop" and
        "max_tokens" do not allow."""
        bits = np.zeros((1, -(-self._vocab_size // 32)), np.uint32)
        matcher.fill(bits, ())
        first = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0]
        matcher.consume(int(first))
        matcher.rollback(1)
        return not matcher.error()


class _SharedLexer:
    """What the matchers of one compilation share, and which grows with what they look at. llguidance does not tell its
    size; of some masks the fuel is read that their matcher has spent, for the others' too. Belongs to whoever holds the
    grammar's lock, but for reading ``num_bytes``, about how much memory it takes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._unread = 0
        self._next = MIN_UNREAD_MASKS

    def looked(self, matcher: _LibraryMatcher) -> None:
        """A matcher has computed a mask."""
        self._unread += 1
        if self._unread < self._next:
            return
        grown = matcher.fuel_since() * self._unread
        self.num_bytes += BYTES_OF_FUEL * grown
        self._unread, self._next = 0, MIN_UNREAD_MASKS if grown else min(2 * self._next, MAX_UNREAD_MASKS)


class _LibraryMatcher:
    """Implements :class:`pillion.engine.grammars.compiled_grammar.TokenMatcher` over an LLMatcher."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, lexer: _SharedLexer, known_fuel: int = 0) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._lexer = lexer
        self._known_fuel = known_fuel
        # Masks since its fuel was read.
        self._masks = 0

    def copy(self) -> _LibraryMatcher:
        return _LibraryMatcher(self._matcher.deep_copy(), self._tokenizer, self._lexer, self._known_fuel)

    def fuel(self) -> int:
        """What it has spent so far, on the lexer that it shares; 0 where the library does not tell."""
        probe = self._matcher.deep_copy()
        probe.consume_token(_NO_TOKEN)
        found = _FUEL.search(probe.get_error())
        self._known_fuel = int(found[1]) if found else 0
        return self._known_fuel

    def fuel_since(self) -> int:
        """What it has spent on each mask since this was asked last, rounded up."""
        known, masks = self._known_fuel, self._masks
        self._masks = 0
        return -(-(self.fuel() - known) // max(masks, 1))

    def consume(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        text = self._matcher.compute_ff_bytes()
        if len(text) <= MAX_FORCED_BYTES or not self._tokenizer.is_canonical:
            return self._matcher.compute_ff_tokens() if text else []
        return self._cut(text[:MAX_FORCED_BYTES])

    def _cut(self, text: bytes) -> list[int]:
        """The tokens of a forced text that goes on, as far as what follows cannot change them."""
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
        return self._matcher.validate_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def stopped(self) -> bool:
        return self._matcher.is_stopped()

    def error(self) -> str:
        return _first_line(self._matcher.get_error())

    def fill(self, bits: UInt32, guesses: Seq[int]) -> None:
        if guesses:
            # Its stubs leave this one out.
            masks: Any = self._matcher
            masks.unsafe_compute_mask_ptr_with_draft_token(bits.ctypes.data, bits[0].nbytes, [*guesses])
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits[0].nbytes)
        self._masks += 1
        self._lexer.looked(self)


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0]
