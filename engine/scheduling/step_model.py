"""Computes what a step costs, as one formula: a worker's fit of it bounds its steps, and makes the planner's prices.

    seconds = step + tokens * token + sequences * sequence + KV tokens read * read + query-key pairs * pair

:mod:`pillion.engine.scheduling.step_cost` fits the five numbers to real steps and publishes them with heartbeats;
:mod:`pillion.gateway.planning.plan_cost` prices routes with the numbers of every worker. Sans-IO (I9), and without
numpy, whose calls would take longer than the formula: a gateway prices a few routes for each request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# However late the decodes are, a prompt tail gets this many tokens of each step, so that it is never starved.
MIN_TAIL_TOKENS = 16
# With a target in plain steps, a step may be longer where prompts wait. Then the prompts' time in a step is to that of
# the decodes as BACKLOG_WEIGHT times the number of waiting prompts is to the number of streams. The first prompt counts
# as half a prompt, because half of it is left on the average. A step is never longer than is needed to do the share
# LEAST_THROUGHPUT of the work that the largest step would do in the same time.
BACKLOG_WEIGHT = 16.0
LEAST_THROUGHPUT = 0.94
# A line of prompts lengthens steps in proportion to the seconds that it takes; LINE_S seconds get the target. The
# limits are MOST_LINE_STEPS plain steps, beyond which the line gains at most a fifth, and LINE_STEP_TOKENS prompt
# tokens, vLLM's default chunk beside decodes.
LINE_S = 0.5
MOST_LINE_STEPS = 6.0
LINE_STEP_TOKENS = 2048


class StepModel(NamedTuple):
    """Holds the seconds of a step, and of each token, sequence, KV token read and query-key pair in it."""

    step_s: float
    token_s: float
    sequence_s: float
    read_s: float
    pair_s: float

    def at_speed(self, speed: float) -> StepModel:
        """Returns the model of the same steps on cores that are ``speed`` times as fast together."""
        return StepModel._make([weight_s / speed for weight_s in self])

    def plain_s(self, streams: int, context_tokens: int) -> float:
        """Returns the seconds of a step that decodes one token of each stream; together they read
        ``context_tokens``."""
        return self.step_s + streams * (self.token_s + self.sequence_s) + context_tokens * (self.read_s + self.pair_s)

    def chunk_s(self, start: int) -> float:
        """Returns the seconds that a chunk of a prompt tail adds to a step besides those of its tokens: for one more
        sequence, and for reading the KV before ``start``."""
        return self.sequence_s + self.read_s * start

    def tail_token_s(self, position: float) -> float:
        """Returns the seconds that each token of a prompt tail adds to a step, if it attends to ``position`` keys."""
        return self.token_s + self.read_s + self.pair_s * position

    def tail_tokens(self, left_s: float, start: int, most: int) -> int:
        """Returns the most tokens, 0 to ``most``, of a prompt tail at ``start`` that take ``left_s`` seconds."""
        # This solves linear * c + pairs * c * c / 2 = left_s for c tokens.
        linear, pairs = self.tail_token_s(start), self.pair_s
        if left_s <= 0:
            return 0
        if pairs * left_s * 2 > 1e-9 * linear * linear:
            count = (math.sqrt(linear * linear + 2 * pairs * left_s) - linear) / pairs
        else:
            count = left_s / linear if linear > 0 else most
        return int(min(count, most))

    def line_s(self, tails: Iterable[tuple[int, int]]) -> float:
        """Returns the seconds that the tokens start .. end of several prompt tails take, without the longest tail: one
        long prompt is no line."""
        each = [(end - start) * self.tail_token_s((start + end) / 2) for start, end in tails]
        return sum(each) - max(each, default=0.0)

    def range_s(self, start: int, end: int, step_tokens: int) -> float:
        """Returns the seconds of computing the tokens start .. end alone, ``step_tokens`` in each step: every step
        reads the KV before it again."""
        tokens = end - start
        if tokens <= 0:
            return 0.0
        steps = -(-tokens // step_tokens)
        reads = steps * start + tokens * (steps + 1) / 2
        pairs = tokens * (start + (tokens + 1) / 2)
        fixed = steps * (self.step_s + self.sequence_s)
        return fixed + tokens * self.token_s + reads * self.read_s + pairs * self.pair_s


def seconds_beside(
    plain_s: float, target_steps: float, waiting: float, streams: int, fixed_s: float, longest_s: float
) -> float:
    """Returns the seconds that a step with a prompt tail may take beside ``streams``, while ``waiting`` prompts wait,
    this one included: ``target_steps`` times ``plain_s``, or longer, as BACKLOG_WEIGHT and LEAST_THROUGHPUT say.

    ``plain_s`` is what a step takes that only decodes the streams, and ``longest_s`` what the largest step would take.
    ``fixed_s``, what a step costs by itself and each chunk of a tail, is no work. To share time by the number of those
    who want it maximizes the sum of the logarithms of what all get (Kelly's proportional fairness, 1997)."""
    target_s = target_steps * plain_s
    fair_s = plain_s * (1 + BACKLOG_WEIGHT * (waiting - 0.5) / streams)
    if fair_s <= target_s or not longest_s > fixed_s > 0:
        return target_s
    enough_s = fixed_s / (1 - LEAST_THROUGHPUT * (1 - fixed_s / longest_s))
    return max(target_s, min(fair_s, enough_s))


def seconds_for_line(plain_s: float, target_steps: float, line_s: float, longest_s: float) -> float:
    """Returns the seconds that a step beside streams may take for a line of prompts that takes ``line_s`` seconds:
    ``target_steps`` plain steps for LINE_S, and in proportion, up to MOST_LINE_STEPS plain steps and ``longest_s``."""
    return min(plain_s * min(target_steps * line_s / LINE_S, MOST_LINE_STEPS), longest_s)
