"""Learns how long a step takes from the steps just run, and the token budget that keeps to a target.

The model is linear in what a step does: a constant, tokens (products with the weights), sequences, KV read (each
sequence's context once) and query-key pairs (a chunk's attention). Its weights, none of them negative, are fitted to
relative errors by least squares over some twenty steps with a chunk and some twenty without one; each kind fades by
itself, so that the price of a chunk is not forgotten while only decodes run. Faster changes, when other programs load
the machine, are in a factor beside the fit: the median of measured over predicted time in the last few steps. So a
change is followed within three steps, and a hiccup of one or two steps is ignored. Sarathi-Serve profiles this curve
offline and keeps one constant; here the machine that serves is the one that is measured. Sans-IO (I9).

A step on borrowed cores (:mod:`pillion.host.core_lending_table`) teaches the fit what it would have taken on the
worker's own: what others lend changes from step to step, and is in the factor like any other change of speed. The
planner is told the cost on own cores, and who shares cores with whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import add, mul

from pillion.config import AUTO
from pillion.engine.scheduling.step_model import (
    LINE_STEP_TOKENS,
    MIN_TAIL_TOKENS,
    StepModel,
    seconds_beside,
    seconds_for_line,
)
from pillion.engine.scheduling.step_plan import ScheduledChunk

# What the cost of a step depends on, in the order of SCALES and divided by them. A fit has so few numbers that plain
# Python is several times as fast as calls of a library, and a fit comes between two steps, when all cores wait.
Features = tuple[float, ...]

# When a step is added to the fit, the weight of earlier steps of its kind is multiplied by this.
FADING = 0.95
# Predictions are multiplied by the median ratio of measured to predicted time over this many last steps.
RECENT_STEPS = 5
# The features of a step's cost are divided by these numbers, so that their weights are of similar size: 1, tokens,
# sequences, KV tokens read, query-key pairs.
SCALES = (1.0, 16.0, 16.0, 16_384.0, 65_536.0)
# Each fit of the step's cost is pulled towards the weights of the fit before by this share of what its steps weigh.
# Weights that these steps leave open stay as they were; at first they are shared out among features by their size, and
# that of a pair follows from that of a token by the model's shape, where it is known.
INERTIA = 0.1
_TOKENS, _PAIRS = 1, 4
# After FIRST_FITS steps, of those without a chunk only each PLAIN_FIT_STEPS-th is followed by a fit: they are alike,
# and the factor follows each of them.
FIRST_FITS, PLAIN_FIT_STEPS = 40, 4
# A step that took longer or shorter than expected by more than this factor teaches the fit no more than that.
MAX_SURPRISE = 2.0
# Beside streams, a step has at most MAX_GROWTH times the tokens of the largest one measured, and FIRST_STEP_TOKENS at
# first: so step sizes that were never measured are approached step by step. Where a device's speed is known, the first
# steps may have FIRST_STEP_SHARE of the budget, if what is expected of them fits the target.
MAX_GROWTH = 2
FIRST_STEP_TOKENS = 64
FIRST_STEP_SHARE = 1 / 8
# A step that is to take no longer than others has at least this share of the most tokens, because each step reads all
# weights.
LEAST_EVEN_SHARE = 0.25
# With the target "auto", and while few prompts wait, a step with a prompt tail may take AUTO_TARGET_STEPS times as long
# as a step that only runs the same decodes.
AUTO_TARGET_STEPS = 2.5
# Where a budget is chosen by what steps cost, a step that delays no stream takes at most LONGEST_STEP_S: so long a
# prompt waits that comes just after another one's step has begun. The budget is a power of 2 within these bounds
# (docs/decisions/scheduling.md has what each costs).
LONGEST_STEP_S = 0.3
LEAST_SUITABLE_TOKENS, MOST_SUITABLE_TOKENS = 512, 8192


def features(scheduled: Seq[ScheduledChunk]) -> Features:
    """Returns what the cost of a step depends on, in the order of SCALES and scaled. Each row whose logits are needed
    counts like a sequence, because the rows of draft tokens come in addition to those of their sequences."""
    tokens = rows = reads = 0
    pairs = 0.0
    for chunk in scheduled:
        start, count = chunk.start, chunk.count
        tokens += count
        rows += chunk.samples or 1
        reads += start + count
        pairs += count * (start + (count + 1) / 2)
    return 1.0, tokens / SCALES[1], rows / SCALES[2], reads / SCALES[3], pairs / SCALES[4]


class TailRoom:
    """Says what is left for prompt tails in a step: at most ``tokens`` tokens together, and as many as take ``left_s``
    by a cost ``model``, each tail priced where it begins; but ``least_tokens`` at least, however late the step is.
    Without a model, tokens alone count."""

    def __init__(self, tokens: int, least_tokens: int = 0, left_s: float = 0.0, model: StepModel | None = None) -> None:
        self.tokens = tokens
        self._least_tokens = least_tokens
        self._left_s = left_s
        self._model = model

    def at(self, start: int) -> int:
        """Returns how many tokens of a prompt tail that begins at ``start`` fit."""
        if self._model is None:
            return self.tokens
        fitting = self._model.tail_tokens(self._left_s - self._model.chunk_s(start), start, self.tokens)
        return min(self.tokens, max(fitting, self._least_tokens))

    def take(self, start: int, count: int) -> None:
        """Notes that the step computes ``count`` tokens of a prompt tail that begins at ``start``."""
        self.tokens -= count
        self._least_tokens = max(0, self._least_tokens - count)
        if self._model is not None:
            middle = start + (count + 1) / 2
            self._left_s -= self._model.chunk_s(start) + count * self._model.tail_token_s(middle)


class StepCost:
    """Predicts the seconds of a step. ``fading`` is the weight of a step when the next one of its kind is added.
    ``expected`` is what the device's speed lets expect before any step was measured, None where it is not known.
    ``pair_tokens`` is the cost of a query-key pair in tokens by the model's shape
    (:func:`pillion.engine.models.model_work.pair_tokens`), and 0 where it is not known. It sets the price of pairs
    until a chunk late in a prompt was measured."""

    def __init__(self, fading: float = FADING, expected: StepModel | None = None, pair_tokens: float = 0.0) -> None:
        self._fading = fading
        # A fit is pulled by how far each weight has moved, for pairs by how far their ratio to tokens has.
        ratio = pair_tokens * SCALES[_PAIRS] / SCALES[_TOKENS]
        self._inertia = [[float(row == column) for column in range(len(SCALES))] for row in range(len(SCALES))]
        self._inertia[_TOKENS][_TOKENS] += ratio * ratio
        self._inertia[_TOKENS][_PAIRS] = self._inertia[_PAIRS][_TOKENS] = -ratio
        self.expects = expected is not None
        self._weights: list[float] = [0.0] * len(SCALES) if expected is None else list(map(mul, expected, SCALES))
        # These are the fit's sums over steps without a chunk, and over those with one.
        self._sums = _FitSums(), _FitSums()
        # Each of the last steps has two ratios to the fitted time: that of its measured time, and that of the time it
        # would have taken on the worker's own cores. The factors are the ratios' medians.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._factor = self._own_factor = 1.0
        self.steps = 0

    def predict(self, found: Features) -> float:
        """Returns the seconds of a step with these features; 0.0 before any was seen, where nothing is expected."""
        return self._factor * _dot(self._weights, found)

    @property
    def model(self) -> StepModel:
        """Gives the cost of a step on the cores that the worker has now."""
        return StepModel._make(self._unscaled(self._factor))

    def row_seconds(self, context: float) -> float:
        """Returns the seconds of one more row with logits, a draft token, after ``context`` tokens of a sequence that
        is in the step."""
        model = self.model
        return model.tail_token_s(context) + model.sequence_s

    def weights_s(self) -> tuple[float, ...]:
        """Returns the seconds of a step, and of each token, sequence, KV token read and query-key pair, on the worker's
        own cores; empty before any step."""
        if not self.steps:
            return ()
        return tuple(self._unscaled(self._own_factor))

    def _unscaled(self, factor: float) -> Iterator[float]:
        return (factor * weight / scale for weight, scale in zip(self._weights, SCALES, strict=True))

    def observe(self, found: Features, seconds: float, borrowed_s: float = 0.0) -> None:
        """Notes the seconds of a step with these features, which would have taken ``borrowed_s`` more on own cores."""
        if seconds <= 0:
            return
        expected = self._own_factor * _dot(self._weights, found)
        learnt = own_s = seconds + borrowed_s
        if self.steps >= RECENT_STEPS and expected > 0:
            learnt = min(max(own_s, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        # A step with more tokens than sequences and drafts has a chunk. The features are divided by the time that the
        # step took, so that short steps count as much as long ones.
        has_chunk = found[1] > found[2]
        self._sums[has_chunk].add([one / learnt for one in found], self._fading)
        if has_chunk or self.steps < FIRST_FITS or self.steps % PLAIN_FIT_STEPS == 0:
            self._fit()
        self.steps += 1
        plain = _dot(self._weights, found)
        if plain > 0:
            self._recent.append((seconds / plain, own_s / plain))
            middle = len(self._recent) // 2
            self._factor, self._own_factor = (sorted(kind)[middle] for kind in zip(*self._recent, strict=True))

    def _fit(self) -> None:
        """Fits the weights to the sums of both kinds, pulled towards what they were."""
        one, other = self._sums
        squares = [list(map(add, *rows)) for rows in zip(one.squares, other.squares, strict=True)]
        products = list(map(add, one.products, other.products))
        pull = INERTIA * sum(row[place] for place, row in enumerate(squares))
        for place, inertia in enumerate(self._inertia):
            products[place] += pull * _dot(inertia, self._weights)
            squares[place] = [square + pull * own for square, own in zip(squares[place], inertia, strict=True)]
        self._weights = _not_negative(squares, products)

    def seconds_beside(
        self,
        decodes: Seq[ScheduledChunk],
        target_steps: float,
        waiting: int,
        streams: int,
        start: int,
        most: int,
        line: Iterable[tuple[int, int]],
    ) -> float:
        """Returns the seconds that a step may take which has tokens of a prompt tail at ``start``, at most ``most``,
        beside ``decodes`` and a ``line`` of tails (:mod:`pillion.engine.scheduling.step_model`)."""
        model, plain_s = self.model, self.predict(features(decodes))
        chunk_s = model.chunk_s(start)

        def with_tail_s(tokens: int) -> float:
            return plain_s + chunk_s + tokens * model.tail_token_s(start + tokens / 2)

        fair_s = seconds_beside(plain_s, target_steps, waiting, streams, model.step_s + chunk_s, with_tail_s(most))
        most_s = with_tail_s(min(most, LINE_STEP_TOKENS))
        return max(fair_s, seconds_for_line(plain_s, target_steps, model.line_s(line), most_s))

    def room(self, seconds: float, decodes: Seq[ScheduledChunk], tokens: int, least_tokens: int) -> TailRoom:
        """Returns what is left for prompt tails beside ``decodes`` in a step of ``seconds``."""
        return TailRoom(tokens, least_tokens, seconds - self.predict(features(decodes)), self.model)


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    total: float = sum(map(mul, one, other))
    return total


class _FitSums:
    """Holds the sums of a fit by least squares over steps of one kind: of the products of any two features, and of each
    feature."""

    __slots__ = ("products", "squares")

    def __init__(self) -> None:
        self.squares = [[0.0] * len(SCALES) for _ in SCALES]
        self.products = [0.0] * len(SCALES)

    def add(self, row: list[float], fading: float) -> None:
        """Adds a step's features, over the time that it took; what was added before counts ``fading`` times as much."""
        self.products = [old * fading + new for old, new in zip(self.products, row, strict=True)]
        self.squares = [
            [old * fading + one * new for old, new in zip(olds, row, strict=True)]
            for one, olds in zip(row, self.squares, strict=True)
        ]


def _not_negative(squares: list[list[float]], products: list[float]) -> list[float]:
    """Solves squares @ weights = products with weights >= 0: negative ones are dropped, and the rest solved again."""
    kept = list(range(len(products)))
    while True:
        found = _solved([[squares[row][column] for column in kept] for row in kept], [products[row] for row in kept])
        weights = [0.0] * len(products)
        for place, weight in zip(kept, found, strict=True):
            weights[place] = weight
        if min(found, default=0.0) >= 0:
            return weights
        kept = [place for place in kept if weights[place] > 0]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves matrix @ x = right for a symmetric positive definite matrix, by Gaussian elimination, which needs no
    pivots there. Both arguments are used up."""
    size = len(right)
    for place in range(size):
        own, value = matrix[place], right[place]
        for below in range(place + 1, size):
            factor = matrix[below][place] / own[place]
            if factor:
                matrix[below] = [one - factor * other for one, other in zip(matrix[below], own, strict=True)]
                right[below] -= factor * value
    for place in reversed(range(size)):
        known = _dot(matrix[place][place + 1 :], right[place + 1 :])
        right[place] = (right[place] - known) / matrix[place][place]
    return right


def suitable_tokens(cost: StepModel, target_itl_ms: float | str = AUTO) -> int:
    """Returns the budget of a worker on a GPU whose steps cost this, by the value of --target-itl-ms; "auto" where a
    worker has no streams. With a target the budget only bounds the steps that delay no stream; without one (0) it is
    all that streams are protected by, and so takes as long as a step with a prompt tail does by default."""
    longest_s = LONGEST_STEP_S if target_itl_ms == AUTO else max(LONGEST_STEP_S, float(target_itl_ms) / 1000)
    if not target_itl_ms:
        longest_s = AUTO_TARGET_STEPS * cost.step_s
    most = cost.tail_tokens(longest_s - cost.step_s, 0, MOST_SUITABLE_TOKENS)
    return max(LEAST_SUITABLE_TOKENS, 1 << max(0, most.bit_length() - 1))


class TokenBudget:
    """Says how many tokens a step may take: ``max_tokens``, or, beside streams and with a target, what the cost model
    says (I5).

    The target is ``target_s`` seconds, or ``target_steps`` times the duration of a step that only runs the decodes
    beside the prompt tail; 0 means that there is no such target. A decode is never held back, and a prompt tail gets
    MIN_TAIL_TOKENS of each step at least, and all of ``max_tokens`` where no stream runs whose tokens it could delay.
    Steps are measured with and without a target, because the planner uses their ``cost`` and the largest size measured.
    The target bounds all prompt tails of a step together, each priced where it begins: one that begins late in a long
    prompt costs more for each token than a short prompt before it. ``expected`` and ``pair_tokens`` are those of
    :class:`StepCost`. Where steps shall be ``even``, because the stages of a pipeline wait for the longest of those
    under way, a prompt's later tokens are fewer in a step than its first ones: as many as take no longer, but at least
    LEAST_EVEN_SHARE of ``max_tokens``.
    """

    def __init__(
        self,
        max_tokens: int,
        target_s: float = 0.0,
        target_steps: float = 0.0,
        expected: StepModel | None = None,
        *,
        even: bool = False,
        pair_tokens: float = 0.0,
    ) -> None:
        self.max_tokens = max_tokens
        self.even = even
        self.target_s = target_s
        self.target_steps = target_steps
        self.cost = StepCost(expected=expected, pair_tokens=pair_tokens)
        self.largest_step_tokens = 0
        # For each running step this has its features, when it began, and whether it teaches the fit.
        self._running: deque[tuple[Features, float, bool]] = deque()

    def room(
        self,
        decodes: Seq[ScheduledChunk],
        start: int,
        waiting: int = 1,
        *,
        streams: int = 0,
        least_tokens: int = MIN_TAIL_TOKENS,
        line: Iterable[tuple[int, int]] = (),
    ) -> TailRoom:
        """Returns what is left for prompt tails beside ``decodes``; the first of ``waiting`` tails begins at ``start``.

        A caller that asks for a draft model's chunks passes ``waiting`` 0. ``streams`` is the number of running
        streams, where some have no chunk in this step, such as one whose mask is late. ``least_tokens`` are granted
        however late the decodes are. ``line`` has the tokens start .. end of the tails that may
        lengthen the step (:meth:`SchedulerQueues.line`).
        """
        used = sum(chunk.count for chunk in decodes)
        most = self.max_tokens - used
        streams = max(streams, len(decodes))
        # No target limits a prompt tail while no stream runs, and one in plain steps never limits a draft model, which
        # works for the streams.
        if (waiting and not streams) or not (self.target_s or (self.target_steps and waiting)):
            return self._even_room(most) if self.even else TailRoom(most)
        first = max(FIRST_STEP_TOKENS, int(self.max_tokens * FIRST_STEP_SHARE) if self.cost.expects else 0)
        tokens = min(most, max(max(first, MAX_GROWTH * self.largest_step_tokens) - used, least_tokens))
        if not (self.cost.steps or self.cost.expects):
            return TailRoom(tokens)
        seconds = self.target_s or self.cost.seconds_beside(
            decodes, self.target_steps, waiting, streams, start, most, line
        )
        return self.cost.room(seconds, decodes, tokens, least_tokens)

    def _even_room(self, most: int) -> TailRoom:
        """Returns the room of a step that takes as long as one with ``max_tokens`` at the beginning of a prompt."""
        cost = self.cost
        if not (cost.steps or cost.expects):
            return TailRoom(most)
        # A prompt's first tokens take just these seconds, whatever is lost by rounding.
        seconds = cost.model.range_s(0, self.max_tokens, self.max_tokens) * (1 + 1e-6)
        return cost.room(seconds, (), most, int(self.max_tokens * LEAST_EVEN_SHARE))

    def begin(self, scheduled: Seq[ScheduledChunk], now: float, in_flight: int = 0) -> None:
        """Notes that a step of these chunks starts after ``in_flight`` others; younger steps than those never began. A
        step that scores a prompt teaches nothing, because its rows of logits are not among the features."""
        if scheduled:
            while len(self._running) > in_flight:
                self._running.pop()
            self._running.append((features(scheduled), now, not any(chunk.scores for chunk in scheduled)))

    def end(self, now: float, borrowed_s: float = 0.0, *, ok: bool = True) -> float:
        """Notes that the oldest step has ended, and the next one runs from now. On the worker's own cores the step
        would have taken ``borrowed_s`` more. A step that was not ``ok`` teaches nothing. Returns the seconds that it
        took; 0.0 where it never began."""
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
