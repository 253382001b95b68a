"""The duration of a step, learned from the steps just run, and the token budget that meets a target.

The model is linear in what a step does: a constant, tokens (products with the weights), sequences, KV read (each
sequence's context once) and query-key pairs (a chunk's attention). Its non-negative weights are fitted to relative
errors by least squares over some twenty steps with a chunk and some twenty without; each kind fades separately, so that
the price of a chunk is kept while only decodes run. Faster changes, when other programs load the machine, are in a
factor beside the fit: the median of measured over predicted time in the last few steps. So a change is followed within
three steps, and a hiccup of one or two steps is ignored. Sarathi-Serve profiles this curve offline; here it is measured
on the serving machine. Sans-IO (I9).

A step on borrowed cores (:mod:`pillion.host.core_lending_table`) enters the fit with its time on the worker's own
cores: the cores lent change from step to step, and are in the factor. The planner gets the cost on own cores, and who
shares cores with whom.
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

# What a step's cost depends on, in the order of SCALES and divided by them. A fit has so few numbers that plain Python
# is several times as fast as library calls, and it runs between two steps, when all cores wait.
Features = tuple[float, ...]

# Weight of earlier steps of a kind when one is added to the fit.
FADING = 0.95
# Last steps whose median ratio of measured to predicted time corrects predictions.
RECENT_STEPS = 5
# Divisors of the features, so that their weights are of similar size: 1, tokens, sequences, KV tokens read, query-key
# pairs.
SCALES = (1.0, 16.0, 16.0, 16_384.0, 65_536.0)
# Regularization towards the last weights, relative to the steps' weight. Weights that the steps do not determine stay;
# initially they are spread over features by size, and a pair's follows from a token's by the model's shape, if known.
INERTIA = 0.1
_TOKENS, _PAIRS = 1, 4
# After FIRST_FITS steps, refit only every PLAIN_FIT_STEPS-th step without a chunk: these are alike, and the factor is
# updated every step.
FIRST_FITS, PLAIN_FIT_STEPS = 40, 4
# Max factor by which a measured step may differ from its prediction in the fit.
MAX_SURPRISE = 2.0
# Beside streams, a step has at most MAX_GROWTH times the tokens of the largest measured one, and FIRST_STEP_TOKENS at
# first: unmeasured sizes are approached step by step. With a known device speed, the first steps may have
# FIRST_STEP_SHARE of the budget, if their expected time meets the target.
MAX_GROWTH = 2
FIRST_STEP_TOKENS = 64
FIRST_STEP_SHARE = 1 / 8
# Min share of max_tokens for an even step, because each step reads all weights.
MIN_EVEN_SHARE = 0.25
# Target "auto", while few prompts wait: duration of a step with a prompt tail over that of its decodes alone.
AUTO_TARGET_STEPS = 2.5
# Max duration of a step that delays no stream, for a budget chosen by cost: the wait of a prompt that arrives just
# after a step began. The budget is a power of 2 within these bounds (docs/decisions/scheduling.md).
LONGEST_STEP_S = 0.3
MIN_SUITABLE_TOKENS, MAX_SUITABLE_TOKENS = 512, 8192


def features(scheduled: Seq[ScheduledChunk]) -> Features:
    """Return what a step's cost depends on, in the order of SCALES and scaled. Each row with logits counts like a
    sequence, because draft tokens' rows come in addition to their sequences'."""
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
    """Room for prompt tails in a step: at most ``tokens`` tokens together, and those that take ``left_s`` by a cost
    ``model``, each tail priced at its start; but at least ``least_tokens``. Without a model, only tokens count."""

    def __init__(self, tokens: int, least_tokens: int = 0, left_s: float = 0.0, model: StepModel | None = None) -> None:
        self.tokens = tokens
        self._least_tokens = least_tokens
        self._left_s = left_s
        self._model = model

    def at(self, start: int) -> int:
        """Return the tokens of a prompt tail at ``start`` that fit."""
        if self._model is None:
            return self.tokens
        fitting = self._model.tail_tokens(self._left_s - self._model.chunk_s(start), start, self.tokens)
        return min(self.tokens, max(fitting, self._least_tokens))

    def take(self, start: int, count: int) -> None:
        """Take the room of ``count`` tokens of a prompt tail at ``start``."""
        self.tokens -= count
        self._least_tokens = max(0, self._least_tokens - count)
        if self._model is not None:
            middle = start + (count + 1) / 2
            self._left_s -= self._model.chunk_s(start) + count * self._model.tail_token_s(middle)


class StepCost:
    """Predicts the seconds of a step.

    Args:
        fading: weight of a step when the next one of its kind is added.
        expected: the cost by the device's speed, before any step was measured; None if unknown.
        pair_tokens: cost of a query-key pair in tokens by the model's shape
            (:func:`pillion.engine.models.model_work.pair_tokens`), the price of pairs until a chunk late in a prompt
            was measured; 0 if unknown.
    """

    def __init__(self, fading: float = FADING, expected: StepModel | None = None, pair_tokens: float = 0.0) -> None:
        self._fading = fading
        # A fit is pulled by each weight's move, for pairs by the move of their ratio to tokens.
        ratio = pair_tokens * SCALES[_PAIRS] / SCALES[_TOKENS]
        self._inertia = [[float(row == column) for column in range(len(SCALES))] for row in range(len(SCALES))]
        self._inertia[_TOKENS][_TOKENS] += ratio * ratio
        self._inertia[_TOKENS][_PAIRS] = self._inertia[_PAIRS][_TOKENS] = -ratio
        self.expects = expected is not None
        self._weights: list[float] = [0.0] * len(SCALES) if expected is None else list(map(mul, expected, SCALES))
        self._sums = _FitSums(), _FitSums()
        # Of each recent step: measured time, and time on own cores, over the fitted time. The factors are the medians.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._factor = self._own_factor = 1.0
        self.steps = 0

    def predict(self, found: Features) -> float:
        """Return the seconds of a step with these features; 0.0 before any step, if nothing is expected."""
        return self._factor * _dot(self._weights, found)

    @property
    def model(self) -> StepModel:
        """The cost of a step on the worker's current cores."""
        return StepModel._make(self._unscaled(self._factor))

    def row_seconds(self, context: float) -> float:
        """Return the seconds of one more row with logits, a draft token, after ``context`` tokens of a sequence in the
        step."""
        model = self.model
        return model.tail_token_s(context) + model.sequence_s

    def weights_s(self) -> tuple[float, ...]:
        """Return the seconds of a step, and of each token, sequence, KV token read and query-key pair, on the worker's
        own cores; empty before any step."""
        if not self.steps:
            return ()
        return tuple(self._unscaled(self._own_factor))

    def _unscaled(self, factor: float) -> Iterator[float]:
        return (factor * weight / scale for weight, scale in zip(self._weights, SCALES, strict=True))

    def observe(self, found: Features, seconds: float, borrowed_s: float = 0.0) -> None:
        """Record a step's seconds, to which its time on own cores adds ``borrowed_s``."""
        if seconds <= 0:
            return
        expected = self._own_factor * _dot(self._weights, found)
        learnt = own_s = seconds + borrowed_s
        if self.steps >= RECENT_STEPS and expected > 0:
            learnt = min(max(own_s, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        # A step with more tokens than sequences and drafts has a chunk. Features are divided by the step's time, so
        # that short steps count like long ones.
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
        """Fit the weights to the sums of both kinds, pulled towards the last ones."""
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
        """Return the seconds of a step with tokens of a prompt tail at ``start``, at most ``most``, beside ``decodes``
        and a ``line`` of tails (:mod:`pillion.engine.scheduling.step_model`)."""
        model, plain_s = self.model, self.predict(features(decodes))
        chunk_s = model.chunk_s(start)

        def with_tail_s(tokens: int) -> float:
            return plain_s + chunk_s + tokens * model.tail_token_s(start + tokens / 2)

        fair_s = seconds_beside(plain_s, target_steps, waiting, streams, model.step_s + chunk_s, with_tail_s(most))
        most_s = with_tail_s(min(most, LINE_STEP_TOKENS))
        return max(fair_s, seconds_for_line(plain_s, target_steps, model.line_s(line), most_s))

    def room(self, seconds: float, decodes: Seq[ScheduledChunk], tokens: int, least_tokens: int) -> TailRoom:
        """Return the room for prompt tails beside ``decodes`` in a step of ``seconds``."""
        return TailRoom(tokens, least_tokens, seconds - self.predict(features(decodes)), self.model)


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    total: float = sum(map(mul, one, other))
    return total


class _FitSums:
    """Sums of a least squares fit over steps of one kind: products of features, and features."""

    __slots__ = ("products", "squares")

    def __init__(self) -> None:
        self.squares = [[0.0] * len(SCALES) for _ in SCALES]
        self.products = [0.0] * len(SCALES)

    def add(self, row: list[float], fading: float) -> None:
        """Add a step's features, over its time; earlier ones fade by ``fading``."""
        self.products = [old * fading + new for old, new in zip(self.products, row, strict=True)]
        self.squares = [
            [old * fading + one * new for old, new in zip(olds, row, strict=True)]
            for one, olds in zip(row, self.squares, strict=True)
        ]


def _not_negative(squares: list[list[float]], products: list[float]) -> list[float]:
    """Solve squares @ weights = products with weights >= 0: negative ones are dropped, and the rest solved again."""
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
    """Solve matrix @ x = right for a symmetric positive definite matrix, by Gaussian elimination without pivots.
    Overwrites both arguments."""
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
    """Return the budget of a worker on a GPU with this cost, by the value of --target-itl-ms; "auto" for a worker
    without streams. With a target the budget only limits steps that delay no stream; without one (0) it alone protects
    streams, and is a default step with a prompt tail."""
    longest_s = LONGEST_STEP_S if target_itl_ms == AUTO else max(LONGEST_STEP_S, float(target_itl_ms) / 1000)
    if not target_itl_ms:
        longest_s = AUTO_TARGET_STEPS * cost.step_s
    most = cost.tail_tokens(longest_s - cost.step_s, 0, MAX_SUITABLE_TOKENS)
    return max(MIN_SUITABLE_TOKENS, 1 << max(0, most.bit_length() - 1))


class TokenBudget:
    """Max tokens of a step: ``max_tokens`` or, beside streams and with a target, by the cost model (I5).

    The target is ``target_s`` seconds, or ``target_steps`` times the duration of a step with only its decodes; 0: no
    such target. A decode is never delayed; a prompt tail gets at least MIN_TAIL_TOKENS per step, and all of
    ``max_tokens`` if no stream runs. Steps are measured with and without a target, for the planner and for the largest
    measured size. The target limits all prompt tails of a step together, each priced at its start: later tokens of a
    long prompt cost more. ``expected`` and ``pair_tokens`` are those of :class:`StepCost`. If steps are to be ``even``,
    because the stages of a pipeline wait for the longest one under way, a prompt's later steps have fewer tokens,
    taking no longer than its first, but at least MIN_EVEN_SHARE of ``max_tokens``.
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
        least_tokens: int = MIN_TAIL_TOKENS,
        line: Iterable[tuple[int, int]] = (),
    ) -> TailRoom:
        """Return the room for prompt tails beside ``decodes``; the first of ``waiting`` tails begins at ``start``.

        ``waiting`` is 0 for a draft model's chunks. ``streams`` counts running streams, some of which may have no chunk
        in this step (e.g. late masks). ``least_tokens`` are granted however late the decodes are. ``line`` has the
        tokens start .. end of the tails that may lengthen the step (:meth:`SchedulerQueues.line`).
        """
        used = sum(chunk.count for chunk in decodes)
        most = self.max_tokens - used
        streams = max(streams, len(decodes))
        # Without streams no target applies, and one in plain steps never to a draft model, which works for the streams.
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
        """Return the room of a step as long as one with ``max_tokens`` at the beginning of a prompt."""
        cost = self.cost
        if not (cost.steps or cost.expects):
            return TailRoom(most)
        seconds = cost.model.range_s(0, self.max_tokens, self.max_tokens) * (1 + 1e-6)
        return cost.room(seconds, (), most, int(self.max_tokens * MIN_EVEN_SHARE))

    def begin(self, scheduled: Seq[ScheduledChunk], now: float, in_flight: int = 0) -> None:
        """Record the start of a step of these chunks after ``in_flight`` others; younger steps never began. A step that
        scores a prompt does not enter the fit, whose features lack its rows of logits."""
        if scheduled:
            while len(self._running) > in_flight:
                self._running.pop()
            self._running.append((features(scheduled), now, not any(chunk.scores for chunk in scheduled)))

    def end(self, now: float, borrowed_s: float = 0.0, *, ok: bool = True) -> float:
        """Record the end of the oldest step and the start of the next. On own cores the step would have taken
        ``borrowed_s`` more. A step that was not ``ok`` does not enter the fit. Return its seconds; 0.0 if it never
        began."""
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
