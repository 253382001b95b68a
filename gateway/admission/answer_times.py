"""Predicts how long a request of a model will take once it has its turn, from the last answers. Sans-IO (I9).

    seconds = what the planner's step model says for the prompt and those  * how many times as long first tokens took
              that have gone to the workers and have no token yet            lately
            + what it says for each token beside the other streams         * how many times as long tokens took lately

The step model (:mod:`pillion.engine.scheduling.step_model`) knows how a step grows with the number of streams and with
a prompt's length, and the last answers know everything else: the prompts between the tokens, cached prefixes, other
loads. So a prediction follows the number of streams at once, before an answer beside as many has ended.

An answer may have fewer tokens than its client allows. Half of the answers had no more than the *usual* tokens, where
those that were cut short count as longer than they are: this is the estimate of Kaplan and Meier ("Nonparametric
estimation from incomplete observations", 1958).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pillion.engine.scheduling.step_model import StepModel
from pillion.gateway.planning.plan_cost import ASSUMED_POSITION, ASSUMED_STEP_TOKENS, DEFAULT_MODEL

# Predictions rest on at most so many answers, none of which ended longer ago than KEPT_S. With fewer than MIN_ANSWERS
# nothing is predicted.
MAX_ANSWERS = 64
MIN_ANSWERS = 3
KEPT_S = 60.0
# As long as nobody knows how long answers become by themselves, a client's own bound is believed up to so many times
# the longest one.
FAR_LONGER = 16


class DecodeFleet(NamedTuple):
    """Describes the decode workers of a model: the step model of the median one, how many there are, and how many
    streams other gateways have there."""

    model: StepModel = DEFAULT_MODEL
    workers: int = 1
    others: int = 0

    def prompt_s(self, tokens: int, before: int) -> float:
        """Returns the seconds until a prompt is computed after so many tokens of others, which all workers share, if
        workers computed nothing else."""
        return self.model.range_s(0, max(1, tokens + before // self.workers), ASSUMED_STEP_TOKENS)

    def token_s(self, running: float) -> float:
        """Returns the seconds of a token while this gateway has so many streams at the workers."""
        streams = max(1, round((running + self.others) / self.workers))
        return self.model.plain_s(streams, streams * ASSUMED_POSITION)


class ServedRequest(NamedTuple):
    """Describes a request that had its turn and has ended.

    Attributes:
        tokens_before: the tokens of the prompts that were at the workers before it.
        beside: how many answers had slots meanwhile, on the average.
        begun_s, first_s, ended_s: when its turn came, when it had its first token (0.0: never), and when it ended.
        tokens: those of an answer.
        ended_itself: whether the model ended the answer, and no bound did.
        late: whether its deadline was over.
    """

    prompt_tokens: int
    tokens_before: int
    beside: float
    begun_s: float
    first_s: float
    ended_s: float
    tokens: int
    ended_itself: bool
    late: bool


class PastAnswer(NamedTuple):
    """Describes an answer that has ended at ``at_s``: how many times as long as predicted its first token took, and
    each further one (0.0: it has none); its tokens, and whether it ended by itself."""

    at_s: float
    first_factor: float
    token_factor: float
    tokens: int
    ended_itself: bool


class LatePace(NamedTuple):
    """Holds the medians of the last answers: of both factors, and their usual tokens, with the most that any had; the
    usual tokens are 0 where more than half of the answers were cut short before."""

    first_factor: float
    token_factor: float
    usual_tokens: int
    most_tokens: int

    @classmethod
    def of(cls, answers: Iterable[PastAnswer]) -> LatePace:
        """Computes the medians of some answers, of which there is at least one."""
        by_length = sorted(answers, key=lambda one: (one.tokens, not one.ended_itself))
        token_factors = [one.token_factor for one in by_length if one.token_factor]
        return cls(
            statistics.median(one.first_factor for one in by_length),
            statistics.median(token_factors) if token_factors else 0.0,
            _usual_tokens(by_length),
            by_length[-1].tokens,
        )

    def answer_tokens(self, allowed: int) -> int:
        """Returns how many tokens an answer is expected to have whose client allows so many."""
        if self.usual_tokens:
            return min(allowed, self.usual_tokens)
        return allowed if allowed <= FAR_LONGER * self.most_tokens else self.most_tokens


class AnswerTimes:
    """Predicts the times of one model's requests. ``fleet`` describes its workers now; times are monotonic, in
    seconds."""

    def __init__(self, fleet: Callable[[], DecodeFleet] = DecodeFleet) -> None:
        self._fleet = fleet
        self._answers: deque[PastAnswer] = deque(maxlen=MAX_ANSWERS)
        self._pace: LatePace | None = None

    def ended(self, served: ServedRequest) -> None:
        """Notes a request that had its turn and has ended."""
        if not (served.first_s or served.late):
            # A request without a token tells nothing, unless that is because it took too long.
            return
        fleet, first_s = self._fleet(), served.first_s or served.ended_s
        expected_s, prompt_s = fleet.token_s(served.beside), fleet.prompt_s(served.prompt_tokens, served.tokens_before)
        token_factor = 0.0
        if served.tokens > 1 and expected_s > 0:
            token_factor = (served.ended_s - first_s) / (served.tokens - 1) / expected_s
        first_factor = (first_s - served.begun_s) / prompt_s if prompt_s > 0 else 0.0
        self._answers.append(PastAnswer(served.ended_s, first_factor, token_factor, served.tokens, served.ended_itself))
        self._pace = None

    def seconds(self, prompt_tokens: int, tokens_before: int, beside: int, allowed_tokens: int, now_s: float) -> float:
        """Returns how long a request will take that begins now; 0.0 where nothing is known.

        Args:
            prompt_tokens, tokens_before: the tokens of its prompt, and of those that are at the workers before it.
            beside: how many answers will have slots, its own included.
            allowed_tokens: the most tokens that each of its answers may have.
            now_s: the time.
        """
        pace, fleet = self._late_pace(now_s), self._fleet()
        if pace is None:
            return 0.0
        token_s = pace.token_factor * fleet.token_s(beside)
        tokens = pace.answer_tokens(allowed_tokens)
        return pace.first_factor * fleet.prompt_s(prompt_tokens, tokens_before) + (tokens - 1) * token_s

    def _late_pace(self, now_s: float) -> LatePace | None:
        while self._answers and self._answers[0].at_s < now_s - KEPT_S:
            self._answers.popleft()
            self._pace = None
        if len(self._answers) < MIN_ANSWERS:
            return None
        self._pace = self._pace or LatePace.of(self._answers)
        return self._pace


def _usual_tokens(by_length: list[PastAnswer]) -> int:
    longer, left = 1.0, len(by_length)
    for one in by_length:
        if one.ended_itself:
            longer *= 1 - 1 / left
            if longer <= 0.5:
                return one.tokens
        left -= 1
    return 0
