"""How long a step takes, learned from the steps just run, and the token budget that keeps to a target.

The model is linear in what a step does: a constant, tokens (products with the weights), sequences, KV read (each
sequence's context once) and query-key pairs (a chunk's attention). Its weights, none of them negative, are fitted to
relative errors by least squares over some twenty steps with a chunk and some twenty without one; each kind fades by
itself, so that the price of a chunk is not forgotten while only decodes run. Faster changes, when other programs load
the machine, are in a factor beside the fit: the median of measured over predicted time in the last few steps. So a
change is followed within three steps, and a hiccup of one or two steps is ignored. Sarathi-Serve profiles this curve
offline and keeps one constant; here the machine that serves is the one that is measured. Sans-IO (I9).

A step on borrowed cores (:mod:`pillion.core_board`) teaches the fit what it would have taken on the worker's own: what
others lend changes from step to step, and is in the factor like any other change of speed. The planner is told the cost
on own cores, and who shares cores with whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from pillion.engine.scheduling.step_plan import SequencePiece

Float64 = npt.NDArray[np.float64]

# Weight of a step in the fit when the next one of its kind is added.
FADING = 0.95
# Steps whose median is the factor.
RECENT_STEPS = 5
# Features are divided by these, so that weights are of one size: 1, tokens, sequences, KV tokens read, query-key pairs.
SCALES = np.array([1.0, 16.0, 16.0, 16_384.0, 65_536.0])
# Pull towards the weights before, as a share of what the steps in the fit weigh. Weights that these steps leave open
# stay as they were; at first they are shared out among features by their size.
INERTIA = 0.1
_IDENTITY = np.eye(len(SCALES))
# A step that took longer or shorter than expected by more than this factor teaches the fit no more than that.
MAX_SURPRISE = 2.0
# With a target, a step has at most MAX_GROWTH times the tokens of the largest one measured, and FIRST_STEP_TOKENS at
# first: step sizes that were never measured are approached, not guessed.
MAX_GROWTH = 2
FIRST_STEP_TOKENS = 64
# However late the decodes are, a prompt tail gets this much of each step, so that it is never starved.
MIN_TAIL_TOKENS = 16
# With the target "auto", a step with a prompt tail takes as long as so many plain steps, of its decodes alone.
AUTO_TARGET_STEPS = 2.5
# Where more than this many prompts wait for each decode, they limit the throughput: then a step with the target "auto"
# may be longer, until at least this share of what the largest step would get done in the same time is done.
WAITING_PER_DECODE = 0.5
LEAST_THROUGHPUT = 0.9


def features(pieces: Seq[SequencePiece]) -> Float64:
    """float64 [5], what the cost of a step depends on, in the order of SCALES and scaled. A row whose logits are needed
    counts like a sequence: guesses have some beside that of their sequence."""
    ends = [piece.start + piece.count for piece in pieces]
    pairs = sum(piece.count * (piece.start + (piece.count + 1) / 2) for piece in pieces)
    tokens = sum(piece.count for piece in pieces)
    rows = sum(piece.samples or 1 for piece in pieces)
    found: Float64 = np.array([1.0, tokens, rows, sum(ends), pairs]) / SCALES
    return found


class StepCost:
    """Predicts the seconds of a step. ``fading`` is the weight of a step when the next one of its kind is added."""

    def __init__(self, fading: float = FADING) -> None:
        self._fading = fading
        self._weights: Float64 = np.zeros(len(SCALES))
        # The fit's sums over steps without a chunk, and over those with one.
        self._squares: Float64 = np.zeros((2, len(SCALES), len(SCALES)))
        self._products: Float64 = np.zeros((2, len(SCALES)))
        # Measured over fitted time of the last steps, as they were and as on own cores; and the medians.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._factor = self._own_factor = 1.0
        self.steps = 0

    def predict(self, found: Float64) -> float:
        """Seconds of a step with these features; 0.0 before any was seen."""
        return self._factor * float(self._weights @ found)

    def row_seconds(self, context: float) -> float:
        """Seconds of one more row with logits, a guess, behind ``context`` tokens of a sequence that is in the step."""
        _, tokens, rows, reads, pairs = self._factor * self._weights / SCALES
        return float(tokens + rows + reads + pairs * context)

    def weights_s(self) -> tuple[float, ...]:
        """Seconds of a step, and of each token, sequence, KV token read and query-key pair, on the worker's own cores;
        empty before any step."""
        return tuple((self._own_factor * self._weights / SCALES).tolist()) if self.steps else ()

    def observe(self, found: Float64, seconds: float, borrowed_s: float = 0.0) -> None:
        """A step with these features took so long, and would have taken ``borrowed_s`` more on own cores."""
        if seconds <= 0:
            return
        expected = self._own_factor * float(self._weights @ found)
        learnt = own_s = seconds + borrowed_s
        if self.steps >= RECENT_STEPS and expected > 0:
            learnt = min(max(own_s, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        # Divided by the time it took, so that short steps count as much as long ones.
        row = found / learnt
        # More tokens than sequences and guesses: a chunk.
        kind = int(found[1] > found[2])
        self._squares[kind] = self._squares[kind] * self._fading + row[:, None] * row
        self._products[kind] = self._products[kind] * self._fading + row
        squares, products = self._squares[0] + self._squares[1], self._products[0] + self._products[1]
        pull = INERTIA * squares.trace()
        self._weights = _not_negative(squares + pull * _IDENTITY, products + pull * self._weights)
        self.steps += 1
        plain = float(self._weights @ found)
        if plain > 0:
            self._recent.append((seconds / plain, own_s / plain))
            middle = len(self._recent) // 2
            self._factor, self._own_factor = (sorted(kind)[middle] for kind in zip(*self._recent, strict=True))

    def seconds_for_throughput(self, share: float, decodes: Seq[SequencePiece], start: int, most: int) -> float:
        """Seconds of the shortest step that gets ``share`` of the work done that one with ``most`` tokens of a tail at
        ``start`` gets done in the same time. What a step costs by itself, and each piece of a tail, is no work."""
        step, tokens, sequences, reads, pairs = self._factor * self._weights / SCALES
        fixed = step + sequences + reads * start
        longest = self.predict(features(decodes)) + sequences + reads * start
        longest += most * (tokens + reads + pairs * (start + most / 2))
        return float(fixed / (1 - share * (1 - fixed / longest))) if longest > fixed > 0 else 0.0

    def tokens_within(self, seconds: float, decodes: Seq[SequencePiece], start: int, most: int) -> int:
        """Most tokens, 0 to ``most``, of a tail at ``start`` that fit beside ``decodes`` in a step of ``seconds``."""
        base = self.predict(features(decodes))
        tokens, sequences, reads, pairs = (self._factor * self._weights / SCALES)[1:]
        left = seconds - base - sequences - reads * start
        # reads * c + tokens * c + pairs * c * (start + c / 2) = left, for c.
        linear = tokens + reads + pairs * start
        if left <= 0:
            return 0
        if pairs * left * 2 > 1e-9 * linear * linear:
            count = (np.sqrt(linear * linear + 2 * pairs * left) - linear) / pairs
        else:
            count = left / linear if linear > 0 else most
        return int(min(count, most))


def _not_negative(squares: Float64, products: Float64) -> Float64:
    """Solves squares @ weights = products with weights >= 0: negative ones are dropped, and the rest solved again."""
    weights: Float64 = np.asarray(np.linalg.solve(squares, products), np.float64)
    while weights.min() < 0:
        kept = np.flatnonzero(weights > 0)
        weights = np.zeros(len(products))
        if len(kept):
            weights[kept] = np.linalg.solve(squares[kept[:, None], kept], products[kept])
    return weights


class TokenBudget:
    """Tokens that a step may take: ``max_tokens``, or, with a target, what the cost model says (I5).

    The target is ``target_s`` seconds, or ``target_steps`` plain steps of the decodes beside the prompt tail; 0: none.
    A decode is never held back, and a prompt tail gets MIN_TAIL_TOKENS of each step at least. ``cost`` learns with and
    without a target, because the planner uses it, and the largest step measured.
    """

    def __init__(self, max_tokens: int, target_s: float = 0.0, target_steps: float = 0.0) -> None:
        self.max_tokens = max_tokens
        self.target_s = target_s
        self.target_steps = target_steps
        self.cost = StepCost()
        self.largest_step_tokens = 0
        # Of each step under way: its features, when it began, and whether it teaches the fit.
        self._running: deque[tuple[Float64, float, bool]] = deque()

    def left(
        self,
        decodes: Seq[SequencePiece],
        start: int,
        waiting: int = 1,
        *,
        streams: int = 0,
        least_tokens: int = MIN_TAIL_TOKENS,
    ) -> int:
        """Tokens for prompt tails beside ``decodes``; the first of ``waiting`` tails begins at position ``start``.

        Where the tokens are for drafts, no tail waits. ``streams``: how many run, where some have no piece in this
        step, such as one whose mask is late. ``least_tokens`` are granted however late the decodes are.
        """
        used = sum(piece.count for piece in decodes)
        most = self.max_tokens - used
        streams = max(streams, len(decodes))
        # A number of plain steps holds back nobody's tail where no stream runs, and no draft: those serve the streams.
        if not self.target_s and not (self.target_steps and streams and waiting):
            return most
        fitting = max(FIRST_STEP_TOKENS, MAX_GROWTH * self.largest_step_tokens) - used
        if self.cost.steps:
            crowded = waiting > WAITING_PER_DECODE * streams
            seconds = self.target_s or self._seconds_beside(decodes, start, crowded, most)
            fitting = min(fitting, self.cost.tokens_within(seconds, decodes, start, most))
        return min(most, max(fitting, least_tokens))

    def _seconds_beside(self, decodes: Seq[SequencePiece], start: int, crowded: bool, most: int) -> float:
        seconds = self.target_steps * self.cost.predict(features(decodes))
        if not crowded:
            return seconds
        return max(seconds, self.cost.seconds_for_throughput(LEAST_THROUGHPUT, decodes, start, most))

    def begin(self, pieces: Seq[SequencePiece], now: float, in_flight: int = 0) -> None:
        """A step of these pieces starts behind ``in_flight`` others. Younger steps than those never began. One that
        scores a prompt teaches nothing: its rows of logits are not among the features."""
        if pieces:
            while len(self._running) > in_flight:
                self._running.pop()
            self._running.append((features(pieces), now, not any(piece.scores for piece in pieces)))

    def end(self, now: float, borrowed_s: float = 0.0, *, ok: bool = True) -> float:
        """The oldest step has ended, and the next one runs from now. On own cores it would have taken ``borrowed_s``
        more. A step that was not ``ok`` teaches nothing. Returns the seconds that it took; 0.0 where it never began."""
        if not self._running:
            return 0.0
        found, began, teaches = self._running.popleft()
        if ok and teaches:
            self.cost.observe(found, now - began, borrowed_s)
            self.largest_step_tokens = max(self.largest_step_tokens, round(found[1] * SCALES[1]))
        if self._running:
            found, _, teaches = self._running[0]
            self._running[0] = found, now, teaches
        return now - began
