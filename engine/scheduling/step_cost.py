"""The duration of a step, learned from the steps just run, and the token budget that meets a target.

The model is linear in what a step does: a constant, tokens (products with the weights), sequences, KV read (each
sequence's context once) and query-key pairs (a chunk's attention). Its non-negative weights are fitted to relative
errors by least squares over some twenty steps with a chunk and some twenty without; each kind fades separately, so that
the price of a chunk is kept while only decodes run. Faster changes, when other programs load the machine, are in a
correction factor: the median of measured over predicted time in the last few steps. So a change is followed within
three steps, and a hiccup of one or two steps is ignored. Sarathi-Serve profiles this curve offline; here it is measured
on the serving machine. Sans-IO (I9).

A step on borrowed cores (:mod:`pillion.host.core_lending_table`) enters the fit with the time that it would have taken
on the worker's own cores; the effect of borrowed cores, whose number changes from step to step, is in the correction
factor. The planner gets the cost on own cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import add, mul

from pillion.config import AUTO
from pillion.engine.scheduling.step_model import (
    MIN_TAIL_TOKENS,
    QUEUE_STEP_TOKENS,
    StepModel,
    seconds_beside,
    seconds_for_queue,
)
from pillion.engine.scheduling.step_plan import ScheduledChunk

# Inputs of the cost model, divided by SCALES. At this size plain Python is several times as fast as NumPy, and a fit
# runs between two steps, while all cores wait.
Features = tuple[float, ...]

# Weight of earlier steps of a kind when one is added to the fit.
FADING = 0.95
# Last steps whose median ratio of measured to predicted time corrects predictions.
RECENT_STEPS = 5
# Divisors of the features, so that their weights are of similar size: 1, tokens, sequences, KV tokens read, query-key
# pairs.
SCALES = (1.0, 16.0, 16.0, 16_384.0, 65_536.0)
# Regularization towards the last weights, relative to the steps' total weight, so that weights that the steps do not
# determine stay. The ratio of a pair's weight to a token's stays at the model's, if known.
INERTIA = 0.1
_TOKENS, _PAIRS = 1, 4
# After FIRST_FITS steps, of the steps without a chunk only every PLAIN_FIT_STEPS-th triggers a fit: they are alike, and
# the correction factor is updated every step.
FIRST_FITS, PLAIN_FIT_STEPS = 40, 4
# Outliers enter the fit as at most this factor above or below their prediction.
MAX_SURPRISE = 2.0
# Limits of a step with streams, while larger steps are unmeasured: MAX_GROWTH times the tokens of the largest measured
# step, FIRST_STEP_TOKENS at first or, with a known device speed, FIRST_STEP_SHARE of the budget.
MAX_GROWTH = 2
FIRST_STEP_TOKENS = 64
FIRST_STEP_SHARE = 1 / 8
# Min tokens of an even step, as a share of max_tokens, because each step reads all weights.
MIN_EVEN_SHARE = 0.25
# Target "auto", while few prompts wait: duration of a step with a prompt tail over that of its decodes alone.
AUTO_TARGET_STEPS = 2.5
# Max duration of a step without streams, for a budget chosen by cost: the wait of a prompt that arrives just after a
# step began. The budget is a power of 2 within these bounds (docs/decisions/scheduling.md).
LONGEST_STEP_S = 0.3
MIN_SUITABLE_TOKENS, MAX_SUITABLE_TOKENS = 512, 8192


def features(scheduled: Seq[ScheduledChunk]) -> Features:
    """Return a step's inputs of the cost model: 1, tokens, rows with logits (at least one per sequence), KV tokens read
    and query-key pairs, divided by SCALES."""
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
    """Room for prompt tails in a step: at most ``tokens`` tokens together and, with a cost ``model``, ``left_s``
    seconds, each tail priced at its start; but ``min_tokens`` tokens in any case."""

    def __init__(self, tokens: int, min_tokens: int = 0, left_s: float = 0.0, model: StepModel | None = None) -> None:
        self.tokens = tokens
        self._min_tokens = min_tokens
        self._left_s = left_s
        self._model = model

    def at(self, start: int) -> int:
        """Return the max tokens of a prompt tail that begins at position ``start``."""
        if self._model is None:
            return self.tokens
        fitting = self._model.tail_tokens(self._left_s - self._model.chunk_s(start), start, self.tokens)
        return min(self.tokens, max(fitting, self._min_tokens))

    def take(self, start: int, count: int) -> None:
        """Subtract ``count`` tokens of a prompt tail that begins at position ``start``."""
        self.tokens -= count
        self._min_tokens = max(0, self._min_tokens - count)
        if self._model is not None:
            middle = start + (count + 1) / 2
            self._left_s -= self._model.chunk_s(start) + count * self._model.tail_token_s(middle)


class StepCost:
    """Predicts the seconds of a step.

    Args:
        fading: factor on the weight of earlier steps of a kind, with or without a chunk, per further step.
        expected: the cost by the device's speed, before any step was measured; None if unknown.
        pair_tokens: cost of one query-key pair relative to one token's, by the model's shape
            (:func:`pillion.engine.models.model_work.pair_tokens`), assumed until a chunk late in a prompt was measured;
            0 if unknown.
    """

    def __init__(self, fading: float = FADING, expected: StepModel | None = None, pair_tokens: float = 0.0) -> None:
        self._fading = fading
        # Quadratic form of the regularization: changes of weights; for pairs, of their ratio to tokens.
        ratio = pair_tokens * SCALES[_PAIRS] / SCALES[_TOKENS]
        self._inertia = [[float(row == column) for column in range(len(SCALES))] for row in range(len(SCALES))]
        self._inertia[_TOKENS][_TOKENS] += ratio * ratio
        self._inertia[_TOKENS][_PAIRS] = self._inertia[_PAIRS][_TOKENS] = -ratio
        self.expects = expected is not None
        self._weights: list[float] = [0.0] * len(SCALES) if expected is None else list(map(mul, expected, SCALES))
        self._sums = _FitSums(), _FitSums()
        # Per recent step: measured time, and time on own cores, over the fitted time. The factors are the medians.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._factor = self._own_factor = 1.0
        self.steps = 0

    def predict(self, inputs: Features) -> float:
        """Return the seconds of a step with these features; 0.0 before any step without an expected cost."""
        return self._factor * _dot(self._weights, inputs)

    @property
    def model(self) -> StepModel:
        """The cost of a step on the worker's current cores, borrowed ones included."""
        return StepModel._make(self._unscaled(self._factor))

    def row_seconds(self, context: float) -> float:
        """Return the seconds of a further row with logits, a draft token, that attends to ``context`` keys."""
        model = self.model
        return model.tail_token_s(context) + model.sequence_s

    def weights_s(self) -> tuple[float, ...]:
        """Return the weights of :class:`StepModel` on the worker's own cores; empty before any step."""
        if not self.steps:
            return ()
        return tuple(self._unscaled(self._own_factor))

    def _unscaled(self, factor: float) -> Iterator[float]:
        return (factor * weight / scale for weight, scale in zip(self._weights, SCALES, strict=True))

    def observe(self, inputs: Features, seconds: float, borrowed_s: float = 0.0) -> None:
        """Record a step's ``seconds``; on the worker's own cores it would have taken ``borrowed_s`` more."""
        if seconds <= 0:
            return
        expected = self._own_factor * _dot(self._weights, inputs)
        clipped_s = own_s = seconds + borrowed_s
        if self.steps >= RECENT_STEPS and expected > 0:
            clipped_s = min(max(own_s, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        # A step with more tokens than rows with logits has a chunk. Features are divided by the step's time, so that
        # short steps count like long ones.
        has_chunk = inputs[1] > inputs[2]
        self._sums[has_chunk].add([value / clipped_s for value in inputs], self._fading)
        if has_chunk or self.steps < FIRST_FITS or self.steps % PLAIN_FIT_STEPS == 0:
            self._fit()
        self.steps += 1
        fitted_s = _dot(self._weights, inputs)
        if fitted_s > 0:
            self._recent.append((seconds / fitted_s, own_s / fitted_s))
            middle = len(self._recent) // 2
            self._factor, self._own_factor = (sorted(ratios)[middle] for ratios in zip(*self._recent, strict=True))

    def _fit(self) -> None:
        """Fit the weights to the sums over both kinds of steps, regularized towards the last weights."""
        plain, chunked = self._sums
        squares = [list(map(add, *rows)) for rows in zip(plain.squares, chunked.squares, strict=True)]
        products = list(map(add, plain.products, chunked.products))
        pull = INERTIA * sum(row[index] for index, row in enumerate(squares))
        for index, inertia in enumerate(self._inertia):
            products[index] += pull * _dot(inertia, self._weights)
            squares[index] = [square + pull * weight for square, weight in zip(squares[index], inertia, strict=True)]
        self._weights = _solve_non_negative(squares, products)

    def seconds_beside(
        self,
        decodes: Seq[ScheduledChunk],
        target_steps: float,
        waiting: int,
        streams: int,
        start: int,
        max_tail_tokens: int,
        queue: Iterable[tuple[int, int]],
    ) -> float:
        """Return the max seconds of a step with ``decodes`` and a prompt tail that begins at position ``start``, with a
        target of ``target_steps`` decode-only steps, while ``waiting`` prompts wait and the tails of ``queue`` may
        lengthen the step (:mod:`pillion.engine.scheduling.step_model`)."""
        model, plain_s = self.model, self.predict(features(decodes))
        chunk_s = model.chunk_s(start)

        def with_tail_s(tokens: int) -> float:
            return plain_s + chunk_s + tokens * model.tail_token_s(start + tokens / 2)

        longest_s = with_tail_s(max_tail_tokens)
        fair_s = seconds_beside(plain_s, target_steps, waiting, streams, model.step_s + chunk_s, longest_s)
        queue_step_s = with_tail_s(min(max_tail_tokens, QUEUE_STEP_TOKENS))
        return max(fair_s, seconds_for_queue(plain_s, target_steps, model.queue_s(queue), queue_step_s))

    def room(self, seconds: float, decodes: Seq[ScheduledChunk], tokens: int, min_tokens: int) -> TailRoom:
        """Return the room for prompt tails in a step of ``seconds`` with ``decodes``."""
        return TailRoom(tokens, min_tokens, seconds - self.predict(features(decodes)), self.model)


def _dot(a: Iterable[float], b: Iterable[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


class _FitSums:
    """Sums of a least squares fit over steps of one kind: products of features, and features."""

    __slots__ = ("products", "squares")

    def __init__(self) -> None:
        self.squares = [[0.0] * len(SCALES) for _ in SCALES]
        self.products = [0.0] * len(SCALES)

    def add(self, row: list[float], fading: float) -> None:
        """Add a step's features, divided by its time, after multiplying the sums by ``fading``."""
        self.products = [old * fading + new for old, new in zip(self.products, row, strict=True)]
        self.squares = [
            [old * fading + left * right for old, right in zip(olds, row, strict=True)]
            for left, olds in zip(row, self.squares, strict=True)
        ]


def _solve_non_negative(squares: list[list[float]], products: list[float]) -> list[float]:
    """Solve squares @ weights = products for weights >= 0: solve, fix negative weights at 0, and repeat."""
    kept = list(range(len(products)))
    while True:
        solution = _solve([[squares[row][column] for column in kept] for row in kept], [products[row] for row in kept])
        weights = [0.0] * len(products)
        for index, weight in zip(kept, solution, strict=True):
            weights[index] = weight
        if min(solution, default=0.0) >= 0:
            return weights
        kept = [index for index in kept if weights[index] > 0]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve matrix @ x = right for a symmetric positive definite matrix, by Gaussian elimination without pivots.
    Overwrites both arguments."""
    size = len(right)
    for row in range(size):
        pivot, value = matrix[row], right[row]
        for below in range(row + 1, size):
            factor = matrix[below][row] / pivot[row]
            if factor:
                matrix[below] = [entry - factor * above for entry, above in zip(matrix[below], pivot, strict=True)]
                right[below] -= factor * value
    for row in reversed(range(size)):
        known = _dot(matrix[row][row + 1 :], right[row + 1 :])
        right[row] = (right[row] - known) / matrix[row][row]
    return right


def suitable_tokens(cost: StepModel, target_itl_ms: float | str = AUTO) -> int:
    """Return the token budget of a worker on a GPU whose steps have this cost, for a value of --target-itl-ms; "auto"
    for a worker without streams. With a target, the budget only limits steps without streams. Without one (0) nothing
    else protects the streams: a full step with an empty context takes AUTO_TARGET_STEPS times an empty one."""
    longest_s = LONGEST_STEP_S if target_itl_ms == AUTO else max(LONGEST_STEP_S, float(target_itl_ms) / 1000)
    if not target_itl_ms:
        longest_s = AUTO_TARGET_STEPS * cost.step_s
    tokens = cost.tail_tokens(longest_s - cost.step_s, 0, MAX_SUITABLE_TOKENS)
    return max(MIN_SUITABLE_TOKENS, 1 << max(0, tokens.bit_length() - 1))


class TokenBudget:
    """Max tokens of a step: ``max_tokens`` or, with running streams and a target duration, by the cost model (I5).

    Decodes are never left out. Prompt tails get MIN_TAIL_TOKENS per step in any case, and all of ``max_tokens`` if no
    stream runs. Steps are measured with and without a target, for the planner and for ``largest_step_tokens``. The
    target limits all prompt tails of a step together, each priced at its start: later tokens of a long prompt cost
    more.

    Args:
        target_s, target_steps: target duration in seconds, or as a multiple of a decode-only step's; 0 for none.
        expected, pair_tokens: those of :class:`StepCost`.
        even: True if a prompt's later steps may take no longer than its first, because the stages of a pipeline wait
            for the longest step in flight. They have at least MIN_EVEN_SHARE of ``max_tokens``.
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
        self._running: deque[tuple[Features, float, bool]] = deque()

    def room(
        self,
        decodes: Seq[ScheduledChunk],
        start: int,
        waiting: int = 1,
        *,
        streams: int = 0,
        min_tokens: int = MIN_TAIL_TOKENS,
        queue: Iterable[tuple[int, int]] = (),
    ) -> TailRoom:
        """Return the room for prompt tails in a step with ``decodes``.

        Args:
            start: position where the first tail begins.
            waiting: number of prompt tails; 0 asks for the room of draft tokens.
            streams: running streams, some of which may have no chunk in this step (e.g. late masks).
            min_tokens: tokens granted even if the decodes alone miss the target.
            queue: (first position, end) of the tails that may lengthen the step.
        """
        used = sum(chunk.count for chunk in decodes)
        left = self.max_tokens - used
        streams = max(streams, len(decodes))
        # Without streams no target applies. Draft tokens serve the streams themselves, so only a target in seconds
        # limits them.
        if (waiting and not streams) or not (self.target_s or (self.target_steps and waiting)):
            return self._even_room(left) if self.even else TailRoom(left)
        first = max(FIRST_STEP_TOKENS, int(self.max_tokens * FIRST_STEP_SHARE) if self.cost.expects else 0)
        tokens = min(left, max(max(first, MAX_GROWTH * self.largest_step_tokens) - used, min_tokens))
        if not (self.cost.steps or self.cost.expects):
            return TailRoom(tokens)
        seconds = self.target_s or self.cost.seconds_beside(
            decodes, self.target_steps, waiting, streams, start, left, queue
        )
        return self.cost.room(seconds, decodes, tokens, min_tokens)

    def _even_room(self, left: int) -> TailRoom:
        """Return the room of a step as long as one with ``max_tokens`` at the beginning of a prompt, of which ``left``
        tokens are not used."""
        cost = self.cost
        if not (cost.steps or cost.expects):
            return TailRoom(left)
        # The tolerance keeps rounding from cutting the first step.
        seconds = cost.model.range_s(0, self.max_tokens, self.max_tokens) * (1 + 1e-6)
        return cost.room(seconds, (), left, int(self.max_tokens * MIN_EVEN_SHARE))

    def begin(self, scheduled: Seq[ScheduledChunk], now: float, in_flight: int = 0) -> None:
        """Record the start of a step of these chunks, while ``in_flight`` steps have not ended; steps recorded after
        those were never launched. A step that scores a prompt does not enter the fit, whose features do not count its
        rows of logits."""
        if scheduled:
            while len(self._running) > in_flight:
                self._running.pop()
            self._running.append((features(scheduled), now, not any(chunk.scores for chunk in scheduled)))

    def end(self, now: float, borrowed_s: float = 0.0, *, ok: bool = True) -> float:
        """Record the end of the oldest step and the start of the next, and return the seconds in between; 0.0 without a
        step. On its own cores the worker would have taken ``borrowed_s`` more. A failed step (not ``ok``) does not
        enter the fit."""
        if not self._running:
            return 0.0
        inputs, began, is_fitted = self._running.popleft()
        if ok and is_fitted:
            self.cost.observe(inputs, now - began, borrowed_s)
            self.largest_step_tokens = max(self.largest_step_tokens, round(inputs[1] * SCALES[1]))
        if self._running:
            inputs, _, is_fitted = self._running[0]
            self._running[0] = inputs, now, is_fitted
        return now - began
