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
from pillion.gateway.admission.permit import AdmissionPermit
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

    def prompt_s(self, tokens: int) -> float:
        """Returns the seconds in which a worker computes a prompt alone."""
        return self.model.range_s(0, max(1, tokens), ASSUMED_STEP_TOKENS)

    def token_s(self, running: float) -> float:
        """Returns the seconds of a token while this gateway has so many streams at the workers."""
        streams = max(1, round((running + self.others) / self.workers))
        return self.model.plain_s(streams, streams * ASSUMED_POSITION)


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
        # These requests have had their turn, and had neither ended nor a token when they were last looked at.
        self._prompts: dict[int, AdmissionPermit] = {}

    def began(self, permit: AdmissionPermit, running: int, now_s: float) -> None:
        """Notes that a request had its turn, with which ``running`` answers have slots."""
        permit.begun_s, permit.beside, permit.prompt_s = now_s, running, self._prompt_s(permit)
        self._prompts[permit.number] = permit

    def ended(self, permit: AdmissionPermit, running: int, now_s: float) -> None:
        """Notes a request that had its turn and has ended, while ``running`` answers have slots."""
        self._prompts.pop(permit.number, None)
        late, first_s = permit.deadline_s is not None and now_s >= permit.deadline_s, permit.first_token_s()
        if not permit.allowed_tokens or not (first_s or late):
            # A request without a token tells nothing, unless that is because it took too long.
            return
        fleet, tokens = self._fleet(), -(-permit.generated_tokens // permit.answers)
        first_s = first_s or now_s
        factor = 0.0
        if tokens > 1:
            expected_s = fleet.token_s((permit.beside + running) / 2)
            factor = (now_s - first_s) / (tokens - 1) / expected_s if expected_s > 0 else 0.0
        first_factor = (first_s - permit.begun_s) / permit.prompt_s if permit.prompt_s > 0 else 0.0
        self._answers.append(PastAnswer(now_s, first_factor, factor, tokens, permit.ended_itself))
        self._pace = None

    def seconds(self, permit: AdmissionPermit, running: int, now_s: float) -> float:
        """Returns how long a request will take beside ``running`` answers; 0.0 where nothing is known, for a request
        that generates nothing, and for one that would be alone: it takes no place from another one, and shows how long
        an answer takes now."""
        pace, fleet = self._late_pace(now_s), self._fleet()
        if pace is None or not permit.allowed_tokens or not running:
            return 0.0
        token_s = pace.token_factor * fleet.token_s(running + permit.answers)
        tokens = pace.answer_tokens(permit.allowed_tokens)
        return pace.first_factor * self._prompt_s(permit) + (tokens - 1) * token_s

    def _prompt_s(self, permit: AdmissionPermit) -> float:
        """Returns the seconds until the workers alone would have computed a prompt after those that wait there."""
        fleet = self._fleet()
        self._prompts = {number: one for number, one in self._prompts.items() if not one.first_token_s()}
        before = sum(one.tokens for one in self._prompts.values())
        return fleet.prompt_s(permit.tokens + before // fleet.workers)

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
