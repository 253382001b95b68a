"""Runs several answers to one prompt (I9): each has a state machine, and what happens to the first one causes events
for the others.

    answer 0, the leader                                         answers 1, 2, ..., which follow
    SubmitDecode, with a sibling for each follower           -->  LeaderSubmitted
    LookUp, OpenTicket, after a loss before the first token  -->  LeaderRetried
    Emit, its first token                                    -->  LeaderStarted

There is one plan, one ticket and one prefill: the leader's. The others follow the leader until it has a token. From
then on each is replayed by itself, with the prompt and its own tokens. An answer that fails for good fails the request,
and the others are cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from pillion.gateway.request import events as ev
from pillion.gateway.request.events import Action, Event
from pillion.gateway.request.request_machine import RequestMachine, RequestState
from pillion.types import Timings, TokenLogprob, Usage

# An action comes with the index of its answer.
AnswerAction = tuple[int, Action]


class ParallelSamples:
    """Holds the state machines of one request's answers by index. Of all the actions they return, at most one is
    Fail."""

    def __init__(self, machines: Sequence[RequestMachine]) -> None:
        self.machines = tuple(machines)

    def start(self) -> list[AnswerAction]:
        """Returns the first actions: the look-up of the first answer, the leader."""
        return [(index, action) for index, machine in enumerate(self.machines) for action in machine.start()]

    def handle(self, index: int, event: Event, now: float) -> list[AnswerAction]:
        """Returns the actions that an event of one answer calls for."""
        if len(self.machines) == 1:
            # Most requests have one answer and no followers; this runs for every token.
            return [(0, action) for action in self.machines[0].handle(event, now)]
        return self._settle(self._handle_one(index, event, now), now)

    def handle_all(self, event: Event, now: float) -> list[AnswerAction]:
        """Returns the actions that an event of the whole request calls for: RequestCancelled or DeadlinePassed."""
        actions = [one for index in range(len(self.machines)) for one in self._handle_one(index, event, now)]
        return self._settle(actions, now)

    def usage(self) -> Usage:
        """Counts the tokens so far: the prompt once, and what was generated for all answers."""
        first, *others = (machine.usage() for machine in self.machines)
        return sum((replace(one, prompt_tokens=0, cached_tokens=0) for one in others), first)

    def timings(self, now: float) -> Timings:
        """Returns the leader's timings, with the time until the last answer's end, and all answers' guesses."""
        found = [machine.timings(now) for machine in self.machines]
        return replace(
            found[0],
            total_ms=max(one.total_ms for one in found),
            guessed_tokens=sum(one.guessed_tokens for one in found),
            accepted_tokens=sum(one.accepted_tokens for one in found),
        )

    def _handle_one(self, index: int, event: Event, now: float) -> list[AnswerAction]:
        actions = self.machines[index].handle(event, now)
        if index:
            return [(index, action) for action in actions]
        return [one for action in actions for one in self._lead(action, now)]

    def _lead(self, action: Action, now: float) -> list[AnswerAction]:
        """Returns an action of the leader, and the actions that follow from it for the answers that have no token
        yet."""
        following = tuple(n for n, machine in enumerate(self.machines) if machine.state is RequestState.FOLLOWING)
        caused: Event
        match action:
            case ev.SubmitDecode():
                action = structs.replace(action, siblings=following)
                caused = ev.LeaderSubmitted(action.attempt, action.plan)
            case ev.LookUp() | ev.OpenTicket():
                caused = ev.LeaderRetried(action.attempt)
            case ev.Emit() | ev.Finish():
                caused = ev.LeaderStarted()
            case _:
                return [(0, action)]
        return [(0, action), *((n, its) for n in following for its in self.machines[n].handle(caused, now))]

    def _settle(self, actions: list[AnswerAction], now: float) -> list[AnswerAction]:
        """Lets one failure end all answers, and keeps the first Fail alone."""
        failures = [one for one in actions if isinstance(one[1], ev.Fail)]
        if not failures:
            return actions
        rest = [one for one in actions if not isinstance(one[1], ev.Fail)]
        for index in range(len(self.machines)):
            left = self.machines[index].handle(ev.RequestCancelled(), now)
            rest += [(index, action) for action in left if not isinstance(action, ev.Fail)]
        return [*rest, failures[0]]


def rank_answers(logprobs: Sequence[Sequence[TokenLogprob]], count: int) -> list[int]:
    """Returns the indexes of the ``count`` answers with the highest mean log probability of a token, best first; ties
    by index.

    This is OpenAI's ``best_of``. An answer without tokens comes last.
    """

    def mean(answer: Sequence[TokenLogprob]) -> float:
        return sum(token.logprob for token in answer) / len(answer) if answer else -float("inf")

    return sorted(range(len(logprobs)), key=lambda index: -mean(logprobs[index]))[:count]
