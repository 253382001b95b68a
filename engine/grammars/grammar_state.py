"""One answer's position in its grammar.

    take(tokens) --> not followed yet --follow--> [forced tokens | free choice] --place_masks--> MaskJob
                                                        |
                                                        '--> complete, or failed

The position is a pure function of the answer's tokens, so that a parallel sample, a preempted stream, and a replay on
another worker get the same masks. Therefore the grammar is asked for forced tokens only after a freely chosen token,
and after the last token of a forced run. The result is a run: the next tokens are these, even if the grammar would
allow others within the run. Replayed tokens are divided into the same runs, because replay begins at the answer's
start.

The matcher is positioned after the forced run, so that the next mask can be computed together with the run.

A matcher is used by one thread at a time: by a pending mask job, else by the step thread, which never waits.

A matcher that reports an error is unusable. Mostly it met a limit that it shares with the matchers of other answers.
The answer is then replayed in a compilation of its own, and fails only if it meets the limit again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future

import numpy as np

from pillion.engine.grammars.compiled_grammar import CompiledGrammar
from pillion.engine.grammars.mask_threads import MASK_LIMIT_MS, MaskJob, MaskThreads
from pillion.errors import BrokenGrammar, PillionError
from pillion.kernels.step import UInt32
from pillion.rules.grammar_limits import GRAMMAR_FAULT

# Min tokens of an answer between two replays in a compilation of its own; with fewer, its request fails.
MIN_RENEWED_TOKENS = 256


class GrammarState:
    """One answer's position in its grammar. Only the step thread uses it.

    Args:
        grammar: the answer's grammar.
        threads: compute the masks.
        passing_ends: EOS tokens that do not end this stream; allowed only if no other token is.
        renew: replays an answer's tokens in a compilation of its own, in the background; returns None if it cannot.

    Attributes:
        num_tokens: number of tokens passed to :meth:`take`.
        forced: next tokens without an alternative.
        completes: True if the answer is complete after the forced tokens.
        failure: why the request fails; None while it can continue.
        broken: why the matcher is unusable, or "".
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        threads: MaskThreads,
        passing_ends: tuple[int, ...] = (),
        renew: Callable[[Seq[int]], Future[GrammarState] | None] = lambda answer: None,
    ) -> None:
        self._grammar = grammar
        self._threads = threads
        self._passing_ends = passing_ends
        self._renew = renew
        # The answer so far; the future of its replay in another compilation; its length at the last replay.
        self._answer = array("i")
        self._renewal: Future[GrammarState] | None = None
        self._renewed_at = -MIN_RENEWED_TOKENS
        self.broken = ""
        self._matcher = grammar.start.copy()
        self._unfollowed: list[int] = []
        self._job: MaskJob | None = None
        self._job_for: tuple[tuple[int, ...], int] = ((), 0)
        # _followed: the attributes below are those after all tokens. _asked: the matcher was asked for forced tokens.
        self._followed = self._asked = False
        self.num_tokens = 0
        self.forced: tuple[int, ...] = ()
        self.completes = False
        self.failure: PillionError | None = None

    @property
    def may_run_ahead(self) -> bool:
        """True if a step may be launched before the stream's last token is known. That gains nothing before a longer
        forced run or the end, or with slow masks."""
        # A forced run of two does not matter: the launched step chooses its first token, the next step its second.
        return not (self.completes or self._grammar.slow or len(self.forced) > 2 or self.failure or self._renewal)

    def sample(self) -> GrammarState:
        """Return the state of another answer with the same grammar, at its start."""
        return GrammarState(self._grammar, self._threads, self._passing_ends, self._renew)

    def take(self, tokens: Seq[int]) -> None:
        """Append tokens to the answer."""
        self.num_tokens += len(tokens)
        self._unfollowed += tokens
        self._answer.extend(tokens)
        if tokens:
            self._followed = False

    def follow(self) -> bool:
        """Advance over all appended tokens without waiting, and update the attributes. Return False if that is not
        possible now; the step loop will then be woken to retry."""
        if not (self._job_is_over() and self._is_usable()):
            return False
        if not self._followed and self.failure is None:
            if not self._grammar.try_lock(self._threads.wake):
                return False
            try:
                self.move()
            finally:
                self._grammar.unlock()
            if not self._is_usable():
                return False
        if self._grammar.slow and self._job is None and not (self.completes or self.failure or self.forced):
            # Skip the stream until its slow mask is computed, so that no step waits for it.
            self._start_job((), 1)
            return self._job_is_over()
        return True

    def count_fitting(self, draft_tokens: Seq[int]) -> int:
        """Return the length of the longest prefix of the draft tokens that the grammar allows, and after which a token
        is freely chosen."""
        if self.forced or self.broken or not self._grammar.takes_draft_tokens or not self._grammar.try_lock():
            return 0
        matcher, consumed, fitting = self._matcher, 0, 0
        try:
            for token in draft_tokens:
                if not (matcher.allows(token) and matcher.consume(token)):
                    break
                consumed += 1
                if matcher.stopped():
                    # The last token of a complete answer must be chosen by the step.
                    break
                fitting += 1
                if matcher.forced():
                    break
            if consumed:
                matcher.rollback(consumed)
            return fitting
        finally:
            self._grammar.unlock()

    def place_masks(self, proposed: Seq[int], positions: int) -> MaskJob:
        """Start, or return, the job that computes the masks of the last ``positions`` of 1 + len(proposed) positions:
        after the answer, and after each proposed token. These are forced tokens, or draft tokens that fit."""
        self.follow()
        if not self._followed:
            # Another thread has the grammar's lock, and no step may wait for it: the masks are late.
            late = MaskJob(self._grammar, self._matcher, self._no_bits(positions), positions, (), ())
            late.error = "another thread uses the grammar"
            late.finish()
            return late
        if self._job is not None and self._job_for == (tuple(proposed), positions):
            return self._job
        return self._start_job(proposed, positions)

    def move(self, limit: int | None = None) -> bool:
        """Advance over up to ``limit`` appended tokens, with the grammar's lock held by the caller. Return whether all
        are consumed."""
        self._job = None
        matcher = self._matcher
        count = len(self._unfollowed) if limit is None else min(limit, len(self._unfollowed))
        for index, token in enumerate(self._unfollowed[:count], self.num_tokens - len(self._unfollowed)):
            self._find_forced()
            if self.forced:
                if token == self.forced[0]:
                    self.forced = self.forced[1:]
                    self._asked = bool(self.forced)
                    continue
                # Another version of Pillion divided the answer into other runs; the tokens win.
                matcher.rollback(len(self.forced))
                self.forced = ()
            if not matcher.consume(token):
                self._break(f"token {index} of the answer, {token}, does not follow it: {matcher.error()}")
                return True
            self._asked = False
        del self._unfollowed[:count]
        if self._unfollowed:
            return False
        self._find_forced()
        self._followed = True
        self.completes = matcher.stopped()
        if matcher.error():
            self._break(matcher.error())
        return True

    def _find_forced(self) -> None:
        """Ask the matcher for a run of forced tokens, and advance it over the run. A no-op within a run, or if it was
        asked at this position."""
        if self.forced or self._asked:
            return
        self._asked = True
        self.forced = tuple(self._matcher.forced())
        for token in self.forced:
            self._matcher.consume(token)

    def _start_job(self, proposed: Seq[int], positions: int) -> MaskJob:
        """Start the mask job of :meth:`place_masks`. Masks of forced tokens are written at once."""
        bits = self._no_bits(positions)
        first = 1 + len(proposed) - positions
        known = self.forced[first : len(proposed) + 1]
        for row, token in zip(bits, known, strict=False):
            row[token // 32] = 1 << token % 32
        # Draft tokens never follow a forced run, so the first unknown mask is that of the matcher's position.
        draft_tokens = () if self.forced else tuple(proposed)
        job = MaskJob(self._grammar, self._matcher, bits, len(known), draft_tokens, self._passing_ends)
        self._job, self._job_for = job, (tuple(proposed), positions)
        if len(known) < positions:
            self._threads.put(job)
        else:
            job.finish()
        return job

    def _no_bits(self, places: int) -> UInt32:
        # np.zeros releases the GIL, and a mask thread that acquires it delays the step. A bytearray does not.
        words = self._grammar.vocab_words
        return np.frombuffer(bytearray(4 * places * words), np.uint32).reshape(places, words)

    def _job_is_over(self) -> bool:
        """Return whether no mask job is pending. The last job's error or excessive delay becomes the failure."""
        job = self._job
        if job is None or job.is_over(self._threads):
            if job is not None and job.error and not self.broken:
                self._break(job.error)
            return True
        if job.is_slow(MASK_LIMIT_MS):
            self._fail(f"its choice of the next token took longer than {MASK_LIMIT_MS} ms")
            return True
        return False

    def _break(self, reason: str) -> None:
        """Mark matcher and grammar as failed; later answers get a new compilation."""
        self._grammar.spent = True
        self.broken = reason
        self._job, self._followed = None, False
        self.forced, self.completes = (), False

    def _is_usable(self) -> bool:
        """Return True if the matcher is usable or the request has failed; start or await a replay otherwise."""
        if not self.broken or self.failure is not None:
            return True
        if self._renewal is None:
            new_tokens = self.num_tokens - self._renewed_at
            self._renewal = self._renew(self._answer[:]) if new_tokens >= MIN_RENEWED_TOKENS else None
            if self._renewal is None:
                self._fail(self.broken)
                return True
            self._renewed_at = self.num_tokens
            self._unfollowed.clear()
            self._renewal.add_done_callback(lambda _: self._threads.wake())
        if not self._renewal.done():
            return False
        renewal, self._renewal = self._renewal, None
        try:
            new = renewal.result()
        except Exception as error:  # noqa: BLE001  (fails this request and no step)
            self._fail(str(error) or repr(error))
            return True
        self._grammar, self._matcher, self.broken = new._grammar, new._matcher, new.broken
        self.forced, self.completes, self._asked = new.forced, new.completes, new._asked
        self._followed = not (self._unfollowed or self.broken)
        if self.broken:
            self._fail(self.broken)
        return True

    def _fail(self, reason: str) -> None:
        self.failure = BrokenGrammar(f"{GRAMMAR_FAULT} cannot be followed: {reason}")
