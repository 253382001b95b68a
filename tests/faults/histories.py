"""What a client saw of a request, and whether it may have seen that: the checker of all runs with faults.

A history is right where the request ended once, with what an undisturbed cluster answers: tokens, text, log
probabilities, reasons and counts. A pause is no fault of an answer; it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from pillion import Client, Delta
from pillion.errors import PillionError
from pillion.types import TokenLogprob

# How far log probabilities that are computed anew may be from the first ones.
LOGPROB_TOLERANCE = 1e-3

Ask = Callable[[Client, str], Iterator[Delta]]


@dataclass(slots=True)
class AnswerHistory:
    """One answer of a request: everything that came, in order."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    after_the_end: int = 0


@dataclass(slots=True)
class RequestHistory:
    """One request. ``pause_s`` is the longest time between two deltas, or before the first one; ``error`` is what the
    client raised, empty where it raised nothing."""

    answers: dict[int, AnswerHistory] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    usages: list[tuple[int, int]] = field(default_factory=list)
    error: str = ""
    pause_s: float = 0.0
    replays: int = 0

    def take(self, delta: Delta) -> None:
        """One more message."""
        answer = self.answers.setdefault(delta.index, AnswerHistory())
        if answer.reasons and (delta.token_ids or delta.text or delta.finish_reason):
            answer.after_the_end += 1
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            answer.reasons.append(delta.finish_reason.value)
        self.prompt_logprobs += delta.prompt_logprobs
        if delta.usage is not None:
            self.usages.append((delta.usage.prompt_tokens, delta.usage.completion_tokens))
        if delta.timings is not None:
            self.replays = delta.timings.replays


def read_history(client: Client, ask: Ask, salt: str) -> RequestHistory:
    """Ask, and read the whole answer. It raises nothing that the client raises."""
    history, last_s = RequestHistory(), time.monotonic()
    try:
        for delta in ask(client, salt):
            history.take(delta)
            now = time.monotonic()
            history.pause_s, last_s = max(history.pause_s, now - last_s), now
    except PillionError as error:
        history.error = f"{type(error).__name__}: {error.message}"
    return history


def complaints(expected: RequestHistory, got: RequestHistory) -> list[str]:
    """What is wrong with a history, beside that of the same request to an undisturbed cluster."""
    if got.error:
        return [f"the stream was lost: {got.error}"]
    wrong = []
    if got.answers.keys() != expected.answers.keys():
        wrong.append(f"answers {sorted(got.answers)} instead of {sorted(expected.answers)}")
    for index in got.answers.keys() & expected.answers.keys():
        wrong += [f"answer {index}: {what}" for what in _answer(expected.answers[index], got.answers[index])]
    if got.usages != expected.usages:
        wrong.append(f"usage {got.usages} instead of {expected.usages}")
    if not _alike(expected.prompt_logprobs, got.prompt_logprobs):
        wrong.append("the prompt's log probabilities are others")
    return wrong


def _answer(expected: AnswerHistory, got: AnswerHistory) -> Iterator[str]:
    if len(got.reasons) != 1 or got.after_the_end:
        yield f"it ended {len(got.reasons)} times, and {got.after_the_end} messages came after its end"
    if got.token_ids != expected.token_ids:
        pairs = zip(expected.token_ids, got.token_ids, strict=False)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        lengths = f"{len(got.token_ids)} tokens instead of {len(expected.token_ids)}"
        yield f"{lengths}, the first other one at {place}"
    if got.text != expected.text:
        yield "another text"
    if got.reasons[:1] != expected.reasons[:1]:
        yield f"it ended by {got.reasons} instead of {expected.reasons}"
    if not _alike(expected.logprobs, got.logprobs):
        yield "other log probabilities"


def _alike(expected: list[TokenLogprob], got: list[TokenLogprob]) -> bool:
    if [one.token_id for one in expected] != [one.token_id for one in got]:
        return False
    return bool(_values(got) == pytest.approx(_values(expected), abs=LOGPROB_TOLERANCE))


def _values(found: list[TokenLogprob]) -> list[float]:
    """The log probabilities of the tokens and of the most likely ones in their places, whose order may be another one
    where two are alike."""
    return [value for one in found for value in (one.logprob, *one.top_logprobs)]
