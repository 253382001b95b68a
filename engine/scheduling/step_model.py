"""The cost of a step as one formula. A worker fits it to its steps and limits them by it; planners price routes by it.

    seconds = step + tokens * token + sequences * sequence + KV tokens read * read + query-key pairs * pair

:mod:`pillion.engine.scheduling.step_cost` fits the five numbers to real steps and publishes them with heartbeats;
:mod:`pillion.gateway.planning.plan_cost` prices routes with them. Sans-IO (I9), and without numpy, whose calls would
take longer than the formula: a gateway prices a few routes per request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# Prompt tokens per step even if decodes alone miss the target, so that prompts never starve.
MIN_TAIL_TOKENS = 16
# With a target in plain (decode-only) steps, a step may be longer while prompts wait: the prompts' time in a step is to
# the decodes' as BACKLOG_WEIGHT times the waiting prompts is to the streams. The first prompt counts half, because half
# of it is left on average. A step is never longer than needed for MIN_THROUGHPUT of the largest step's throughput.
BACKLOG_WEIGHT = 16.0
MIN_THROUGHPUT = 0.94
# A queue of prompts lengthens steps in proportion to its seconds: the target at QUEUE_S. Limits: MAX_QUEUE_STEPS plain
# steps, beyond which the queue gains at most a fifth, and QUEUE_STEP_TOKENS prompt tokens, vLLM's default chunk.
QUEUE_S = 0.5
MAX_QUEUE_STEPS = 6.0
QUEUE_STEP_TOKENS = 2048


class StepModel(NamedTuple):
    """Seconds of a step, and of each token, sequence, KV token read and query-key pair in it."""

    step_s: float
    token_s: float
    sequence_s: float
    read_s: float
    pair_s: float

    def at_speed(self, speed: float) -> StepModel:
        """Return the cost of the same steps on cores that together are ``speed`` times as fast."""
        return StepModel._make([weight_s / speed for weight_s in self])

    def plain_s(self, streams: int, context_tokens: int) -> float:
        """Return the seconds of a step that decodes one token for each of ``streams``, which read ``context_tokens`` KV
        tokens together."""
        return self.step_s + streams * (self.token_s + self.sequence_s) + context_tokens * (self.read_s + self.pair_s)

    def chunk_s(self, start: int) -> float:
        """Return the seconds that a chunk of a prompt tail adds to a step, without its tokens': a sequence, and the KV
        before position ``start`` read."""
        return self.sequence_s + self.read_s * start

    def tail_token_s(self, position: float) -> float:
        """Return the seconds that each token of a prompt tail adds to a step, if it attends to ``position`` keys."""
        return self.token_s + self.read_s + self.pair_s * position

    def tail_tokens(self, left_s: float, start: int, limit: int) -> int:
        """Return the number of tokens of a prompt tail from position ``start`` on, at most ``limit``, that a chunk
        computes in ``left_s`` seconds, without :meth:`chunk_s`."""
        linear, pairs = self.tail_token_s(start), self.pair_s
        if left_s <= 0:
            return 0
        if pairs * left_s * 2 > 1e-9 * linear * linear:
            count = (math.sqrt(linear * linear + 2 * pairs * left_s) - linear) / pairs
        else:
            count = left_s / linear if linear > 0 else limit
        return int(min(count, limit))

    def queue_s(self, tails: Iterable[tuple[int, int]]) -> float:
        """Return the seconds to compute prompt tails, given as (first position, end), without the longest: one long
        prompt is no queue."""
        seconds = [(end - start) * self.tail_token_s((start + end) / 2) for start, end in tails]
        return sum(seconds) - max(seconds, default=0.0)

    def range_s(self, start: int, end: int, step_tokens: int) -> float:
        """Return the seconds to compute the tokens ``start`` .. ``end`` of a sequence in steps of ``step_tokens``
        tokens with nothing else; every step reads the KV before it again."""
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
    """Return the max seconds of a step with a prompt tail and ``streams`` decodes, while ``waiting`` prompts wait, this
    one included: ``target_steps`` times ``plain_s``, or more by BACKLOG_WEIGHT and MIN_THROUGHPUT.

    ``plain_s`` is the time of a decode-only step, ``longest_s`` that of the largest step, ``fixed_s`` the overhead of a
    step and of a tail's chunk, which is independent of the tokens. Dividing time by the number of claimants maximizes
    the sum of the logarithms of their shares (Kelly's proportional fairness, 1997)."""
    target_s = target_steps * plain_s
    fair_s = plain_s * (1 + BACKLOG_WEIGHT * (waiting - 0.5) / streams)
    if fair_s <= target_s or not longest_s > fixed_s > 0:
        return target_s
    enough_s = fixed_s / (1 - MIN_THROUGHPUT * (1 - fixed_s / longest_s))
    return max(target_s, min(fair_s, enough_s))


def seconds_for_queue(plain_s: float, target_steps: float, queue_s: float, longest_s: float) -> float:
    """Return the max seconds of a step with streams while prompts of ``queue_s`` seconds wait: ``target_steps`` times
    ``plain_s`` at QUEUE_S, in proportion, up to MAX_QUEUE_STEPS times ``plain_s`` and ``longest_s``."""
    return min(plain_s * min(target_steps * queue_s / QUEUE_S, MAX_QUEUE_STEPS), longest_s)
