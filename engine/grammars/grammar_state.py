"""Keeps one answer's place in its grammar.

    take(tokens) --> not followed yet --follow--> [forced tokens | free choice] --place_masks--> MaskJob
                                                        |
                                                        '--> complete, or failed

The place is a pure function of the answer's tokens, so that a parallel sample, a preempted stream, and a replay on
another worker meet the same masks. Forced tokens keep to a rule for that reason: after a token that was chosen freely,
and after the last one of a forced run, the grammar is asked which tokens are forced. Its answer is a run, and the next
tokens are these, whatever the grammar would say in the middle of the run. Replayed tokens are cut into the same runs,
because they are followed from the answer's begin.

The matcher stands after the forced run, so that the mask of the place there can be computed while the run itself is.

A matcher is used by one thread at a time: by a mask job that is not over, else by the step thread, which never waits.

A matcher that meets an error is of no use any more, and mostly that is a limit of what it shares with the matchers of
other answers. So the answer is followed anew from its begin, in a compilation of its own, and fails only where its own
tokens meet the limit again. No mask of a matcher with an error is ever used.
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

# After an answer was followed anew because of an error, a further error lets it be followed anew only this many tokens
# later.
MIN_RENEWED_TOKENS = 256


class GrammarState:
    """Represents one answer's place in its grammar. Only the step thread uses it.

    Args:
        grammar: the grammar that the answer follows.
        threads: compute the masks.
        passing_ends: end tokens that do not end this stream; they are chosen only where nothing else can be.
        renew: begins to follow an answer of these tokens from its begin, in a compilation that no other answer has;
            None where that cannot be.

    Attributes:
        num_tokens: how many tokens of the answer the grammar was given.
        forced: the next tokens, where the grammar leaves no choice.
        completes: whether the answer is complete after the forced tokens, and only its end can follow.
        failure: why the request cannot go on; None while it can.
        broken: why its matcher is of no use any more; "" while it is of use.
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
        # These are the answer so far; the future that follows it anew in another compilation; and how long the answer
        # was when that was last begun.
        self._answer = array("i")
        self._renewal: Future[GrammarState] | None = None
        self._renewed_at = -MIN_RENEWED_TOKENS
        self.broken = ""
        self._matcher = grammar.start.copy()
        self._unfollowed: list[int] = []
        # These are the masks that were asked for last, and for which drafts and how many places.
        self._job: MaskJob | None = None
        self._job_for: tuple[tuple[int, ...], int] = ((), 0)
        # These say whether the attributes below hold after all taken tokens, and whether the grammar was asked which
        # tokens are forced after the matcher.
        self._followed = self._asked = False
        self.num_tokens = 0
        self.forced: tuple[int, ...] = ()
        self.completes = False
        self.failure: PillionError | None = None

    @property
    def may_run_ahead(self) -> bool:
        """Says whether a step may be launched with the next token before that token is known. Nothing is won by that
        where a run of forced tokens or the end follows, or where masks are late."""
        # A forced run of two tokens does not keep steps from running ahead: the launched step chooses the first, the
        # next step the second.
        return not (self.completes or self._grammar.slow or len(self.forced) > 2 or self.failure or self._renewal)

    def sample(self) -> GrammarState:
        """Returns the place of another answer that begins with this one's grammar."""
        return GrammarState(self._grammar, self._threads, self._passing_ends, self._renew)

    def take(self, tokens: Seq[int]) -> None:
        """Notes that these tokens were appended to the answer."""
        self.num_tokens += len(tokens)
        self._unfollowed += tokens
        self._answer.extend(tokens)
        if tokens:
            self._followed = False

    def follow(self) -> bool:
        """Moves on to after all taken tokens, if that is possible without waiting; the class's attributes hold
        afterwards. Returns False if it is not possible; the step loop is woken when another try is worth it."""
        if not (self._job_is_over() and self._is_whole()):
            return False
        if not self._followed and self.failure is None:
            if not self._grammar.try_lock(self._threads.wake):
                return False
            try:
                self.move()
            finally:
                self._grammar.unlock()
            if not self._is_whole():
                return False
        if self._grammar.slow and self._job is None and not (self.completes or self.failure or self.forced):
            # A step would have to wait for this mask, so the stream is passed over until the mask is there.
            self._start_job((), 1)
            return self._job_is_over()
        return True

    def count_fitting(self, draft_tokens: Seq[int]) -> int:
        """Returns how many of the drafted next tokens are worth a try, counted from the first one: the grammar allows
        them, and another choice follows them."""
        if self.forced or self.broken or not self._grammar.takes_draft_tokens or not self._grammar.try_lock():
            return 0
        matcher, consumed, fitting = self._matcher, 0, 0
        try:
            for token in draft_tokens:
                if not (matcher.allows(token) and matcher.consume(token)):
                    break
                consumed += 1
                if matcher.stopped():
                    # Nothing is chosen after a complete answer: its last token is chosen, not drafted.
                    break
                fitting += 1
                if matcher.forced():
                    # In the middle of a forced run only the run's own tokens may follow.
                    break
            if consumed:
                matcher.rollback(consumed)
            return fitting
        finally:
            self._grammar.unlock()

    def place_masks(self, drafts: Seq[int], places: int) -> MaskJob:
        """Returns masks of the last ``places`` of 1 + len(drafts) places: after the taken tokens, and after each of the
        drafts, which begin with forced tokens or are draft tokens that fit."""
        self.follow()
        if not self._followed:
            # Another thread uses the grammar, so no thread can begin to compute these masks in time for the step, and
            # no step is to wait for them.
            late = MaskJob(self._grammar, self._matcher, self._no_bits(places), places, (), ())
            late.error = "another thread uses the grammar"
            late.finish()
            return late
        if self._job is not None and self._job_for == (tuple(drafts), places):
            return self._job
        return self._start_job(drafts, places)

    def move(self, most: int | None = None) -> bool:
        """Moves the grammar over tokens that the answer has taken and that the grammar has not followed yet: over
        ``most`` of them, or over all. The caller holds the grammar's lock. Returns whether no such token is left."""
        self._job = None
        matcher = self._matcher
        count = len(self._unfollowed) if most is None else min(most, len(self._unfollowed))
        for place, token in enumerate(self._unfollowed[:count], self.num_tokens - len(self._unfollowed)):
            self._find_forced()
            if self.forced:
                if token == self.forced[0]:
                    self.forced = self.forced[1:]
                    self._asked = bool(self.forced)
                    continue
                # Another version of Pillion has cut forced runs differently when it wrote this answer, and tokens are
                # the truth.
                matcher.rollback(len(self.forced))
                self.forced = ()
            if not matcher.consume(token):
                self._break(f"token {place} of the answer, {token}, does not follow it: {matcher.error()}")
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
        """Asks the grammar for a run of forced tokens, unless there is one; the matcher then stands after it."""
        if self.forced or self._asked:
            return
        self._asked = True
        self.forced = tuple(self._matcher.forced())
        for token in self.forced:
            self._matcher.consume(token)

    def _start_job(self, drafts: Seq[int], places: int) -> MaskJob:
        """Begins to compute masks of some places; those of forced tokens are known."""
        bits = self._no_bits(places)
        first = 1 + len(drafts) - places
        known = self.forced[first : len(drafts) + 1]
        for row, token in zip(bits, known, strict=False):
            row[token // 32] = 1 << token % 32
        # No draft token stands after a forced run, so the first place without a known mask is the matcher's own.
        draft_tokens = () if self.forced else tuple(drafts)
        job = MaskJob(self._grammar, self._matcher, bits, len(known), draft_tokens, self._passing_ends)
        self._job, self._job_for = job, (tuple(drafts), places)
        if len(known) < places:
            self._threads.put(job)
        else:
            job.finish()
        return job

    def _no_bits(self, places: int) -> UInt32:
        # np.zeros releases the interpreter's lock, and a mask thread that takes it then delays the step. A bytearray
        # holds zeros, too, and its making keeps the lock.
        words = self._grammar.vocab_words
        return np.frombuffer(bytearray(4 * places * words), np.uint32).reshape(places, words)

    def _job_is_over(self) -> bool:
        """Returns whether no mask job has to be waited for. The last job's error, or its delay, becomes the failure."""
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
        """Notes that the matcher has met an error; later answers get a new compilation of the grammar."""
        self._grammar.spent = True
        self.broken = reason
        self._job, self._followed = None, False
        self.forced, self.completes = (), False

    def _is_whole(self) -> bool:
        """Returns whether the matcher is of use, or the request has failed; if not, it is followed anew meanwhile."""
        if not self.broken or self.failure is not None:
            return True
        if self._renewal is None:
            further = self.num_tokens - self._renewed_at
            self._renewal = self._renew(self._answer[:]) if further >= MIN_RENEWED_TOKENS else None
            if self._renewal is None:
                self._fail(self.broken)
                return True
            self._renewed_at = self.num_tokens
            # The new state already has these tokens.
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
