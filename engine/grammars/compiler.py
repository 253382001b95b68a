"""Compilation of grammars by llguidance for a model's tokenizer, and their cache.

Loading the tokenizer holds the GIL for a second or more, so a worker does it before it serves. Compilation releases the
GIL and runs at low priority. Limits bound memory and time of any grammar: the worst mask within them takes some tens of
milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from pillion.engine.grammars.compiled_grammar import (
    BYTES_OF_FUEL,
    CompiledGrammar,
    SharedLexer,
    TokenMatcher,
    first_line,
)
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.engine.grammars.mask_threads import MaskThreads
from pillion.errors import BrokenGrammar, InvalidRequest
from pillion.host.cores import lower_priority
from pillion.rules.grammar_limits import GRAMMAR_FAULT, PARSER_LIMITS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_COMPILED_GRAMMARS = 64
MAX_COMPILED_BYTES = 64 * 2**20
COMPILE_THREADS = 2
# Max answers with a compilation of their own, made when the shared one has met a limit.
MAX_OWN_GRAMMARS = 8
# Tokens of an answer to replay between pauses of REPLAY_PAUSE_S, which release the grammar's lock and the GIL. Python
# itself would release the GIL only after 5 ms.
REPLAYED_TOKENS = 32
REPLAY_PAUSE_S = 1e-4


def read_tokenizer(path: Path, vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    """Return llguidance's tokenizer for a tokenizer.json; the last one is cached until the file changes, also for forks
    of this process. Starts no thread. Raises like :meth:`GrammarCompiler.load`."""
    changed = path.stat()
    return _read_tokenizer(path, (changed.st_mtime_ns, changed.st_size, changed.st_ino), vocab_size, end_ids)


@lru_cache(maxsize=1)
def _read_tokenizer(path: Path, changed: tuple[int, ...], vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=[*end_ids] or None)


def read_ahead(text: str) -> None:
    """Load a tokenizer for forks of this process; ``text`` is JSON, [path, vocabulary size, EOS ids]. Errors are
    ignored, since the fork that needs the tokenizer reports them."""
    path, vocab_size, end_ids = json.loads(text)
    with suppress(ImportError, OSError, ValueError):
        read_tokenizer(Path(path), vocab_size, tuple(end_ids))


def line_to_read_ahead(folder: Path, vocab_size: int, end_ids: Seq[int]) -> str:
    """Return the line "MODULE:FUNCTION=TEXT" with which a fork server loads a model's tokenizer in advance, because
    that takes longer than all else in a decode worker's start."""
    text = json.dumps([str(folder / "tokenizer.json"), vocab_size, [end for end in end_ids if end < vocab_size]])
    return f"{__name__}:read_ahead={text}"


class GrammarCompiler:
    """Compiler of one model's grammars, which makes the states of answers. Thread-safe.

    Attributes:
        mask_threads: threads that compute the masks of all states.
        on_compiled: called with the seconds of each compilation.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        self.mask_threads = MaskThreads()
        self.on_compiled: Callable[[float], None] = lambda seconds: None
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._executor = ThreadPoolExecutor(COMPILE_THREADS, "pillion-grammar", lower_priority)
        self._compiled: OrderedDict[bytes, tuple[CompiledGrammar, SharedLexer]] = OrderedDict()
        self._own: WeakSet[CompiledGrammar] = WeakSet()
        self._lock = Lock()

    @classmethod
    def load(cls, folder: Path, vocab_size: int, end_ids: Seq[int]) -> GrammarCompiler:
        """Read a model's tokenizer. Raises ImportError without llguidance, OSError without a tokenizer, and ValueError
        for one that llguidance does not support."""
        ends = tuple(end for end in end_ids if end < vocab_size)
        return cls(read_tokenizer(folder / "tokenizer.json", vocab_size, ends), vocab_size, ends)

    def start(self, text: str, answer: Seq[int], stop_token_ids: frozenset[int]) -> Future[GrammarState]:
        """Compile the grammar ``text``, unless cached, and make the state of an answer with these tokens, in the
        background. The future raises InvalidRequest if the grammar does not compile or rejects the answer."""
        return self._executor.submit(self._start, text, answer, stop_token_ids)

    def close(self) -> None:
        """Stop the threads, each after its work. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.mask_threads.close()

    def _start(self, text: str, answer: Seq[int], stop_token_ids: frozenset[int]) -> GrammarState:
        ends = tuple(end for end in self._end_ids if end not in stop_token_ids)
        state = self._at(text, self._compile(text), answer, ends)
        if state.broken:
            # Another answer may have exhausted the shared compilation.
            state = self._at(text, self._compile(text, own=True), answer, ends)
        if state.broken:
            # Part of the answer was generated with this grammar; unless the answer does not match it, the client is not
            # to blame.
            fault = BrokenGrammar if answer and "doesn't satisfy the grammar" not in state.broken else InvalidRequest
            raise fault(f"{GRAMMAR_FAULT} cannot be followed: {state.broken}")
        return state

    def _at(self, text: str, compiled: CompiledGrammar, answer: Seq[int], ends: tuple[int, ...]) -> GrammarState:
        """Return the state of an answer with these tokens, in one compilation."""
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
        """Replay an answer in a compilation of its own, in the background; return None if too many answers have one."""
        with suppress(RuntimeError):  # The compiler is closed.
            if len(self._own) < MAX_OWN_GRAMMARS:
                return self._executor.submit(lambda: self._at(text, self._compile(text, own=True), answer, ends))
        return None

    def _compile(self, text: str, *, own: bool = False) -> CompiledGrammar:
        """Compile a grammar. The result is cached and shared unless ``own``, which makes one for a single answer."""
        key = hashlib.sha256(text.encode()).digest()
        if not own:
            with self._lock:
                cached = self._find_cached(key)
                if cached is not None:
                    self._trim()
                    return cached
        from llguidance import LLMatcher, LLParserLimits

        began_s = time.monotonic()
        # Verbose errors include the spent fuel.
        limits = LLParserLimits(**{**PARSER_LIMITS, "verbose_errors": True})
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"{GRAMMAR_FAULT} does not compile: {first_line(matcher.get_error())}")
        seconds = time.monotonic() - began_s
        lexer = SharedLexer()
        start = TokenMatcher(matcher, self._tokenizer, lexer)
        lexer.num_bytes = len(text) + BYTES_OF_FUEL * start.fuel()
        compiled = CompiledGrammar(start, self._vocab_size, takes_draft_tokens=self._can_go_back(start.copy()))
        with self._lock:
            self.on_compiled(seconds)
            if own:
                self._own.add(compiled)
                return compiled
            cached = self._find_cached(key)
            if cached is not None:
                return cached
            self._compiled[key] = compiled, lexer
            self._compiled.move_to_end(key)
            self._trim()
        return compiled

    def _find_cached(self, key: bytes) -> CompiledGrammar | None:
        """Return the cached grammar and mark it as used; None if missing, or if one of its matchers has failed."""
        compiled, _ = self._compiled.get(key, (None, None))
        if compiled is None or compiled.spent:
            return None
        self._compiled.move_to_end(key)
        return compiled

    def _trim(self) -> None:
        """Evict least recently used grammars down to the limits, but never the last one."""
        cached_bytes = sum(lexer.num_bytes for _, lexer in self._compiled.values())
        while len(self._compiled) > 1 and (
            len(self._compiled) > MAX_COMPILED_GRAMMARS or cached_bytes > MAX_COMPILED_BYTES
        ):
            _, (_, lexer) = self._compiled.popitem(last=False)
            cached_bytes -= lexer.num_bytes

    def _can_go_back(self, matcher: TokenMatcher) -> bool:
        """Return whether a matcher at the grammar's start can roll back a token, which "stop" and "max_tokens" rules
        prevent."""
        bits = np.zeros((1, -(-self._vocab_size // 32)), np.uint32)
        matcher.fill(bits, ())
        first = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0]
        matcher.consume(int(first))
        matcher.rollback(1)
        return not matcher.error()
