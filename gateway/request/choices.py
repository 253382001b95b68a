"""Several answers to one prompt (I9): a machine for each, and what they have to tell each other.

                 SubmitDecode: forks for all that follow          first token
    answer 0 -------------------------------------------> Joined ------------> Parted     answer 1, 2, ...
             -------------------------------------------> Unjoined
                 a loss before the first token

One prompt, one plan, one ticket, one prefill: the first answer's. The others follow it until it has a token, and stand
for themselves from then on: each is replayed by itself, with the prompt and its own tokens. An answer that fails for
good fails the request, and the others are cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pillion.gateway.request import events as ev
from pillion.gateway.request.events import Action, Event
from pillion.gateway.request.request_machine import RequestMachine, State
from pillion.types import Timings, TokenLogprob, Usage

# What is to be done, and for which answer.
Todo = tuple[int, Action]


class Choices:
    """One request's answers by index. All begin with the first one's work; there is at most one Fail."""

    def __init__(self, machines: Sequence[RequestMachine]) -> None:
        self.machines = tuple(machines)

    def start(self) -> list[Todo]:
        """The first answer's look-up; the others follow."""
        return [(index, action) for index, machine in enumerate(self.machines) for action in machine.start()]

    def handle(self, index: int, event: Event, now: float) -> list[Todo]:
        """What happened to one answer."""
        if len(self.machines) == 1:
            # Most requests have one answer, which has nobody to tell; this runs for every token.
            return [(0, action) for action in self.machines[0].handle(event, now)]
        return self._settle(self._tell(index, event, now), now)

    def handle_all(self, event: Event, now: float) -> list[Todo]:
        """What happened to the whole request: Cancelled or DeadlinePassed."""
        todos = [todo for index in range(len(self.machines)) for todo in self._tell(index, event, now)]
        return self._settle(todos, now)

    def usage(self) -> Usage:
        """The prompt once, and all that was generated, for whichever answer."""
        first = self.machines[0].usage()
        return replace(first, completion_tokens=sum(len(machine.emitted) for machine in self.machines))

    def timings(self, now: float) -> Timings:
        """The first answer's, and the time until the last one's end."""
        return replace(
            self.machines[0].timings(now), total_ms=max(machine.timings(now).total_ms for machine in self.machines)
        )

    def _tell(self, index: int, event: Event, now: float) -> list[Todo]:
        actions = self.machines[index].handle(event, now)
        if index:
            return [(index, action) for action in actions]
        return [todo for action in actions for todo in self._lead(action, now)]

    def _lead(self, action: Action, now: float) -> list[Todo]:
        """What the first answer does, and what follows from it for those that still follow."""
        following = tuple(n for n, machine in enumerate(self.machines) if machine.state is State.FOLLOWING)
        news: Event
        match action:
            case ev.SubmitDecode():
                action = replace(action, forks=following)
                news = ev.Joined(action.attempt, action.plan)
            case ev.LookUp():
                news = ev.Unjoined(action.attempt)
            case ev.Emit() | ev.Finish():
                news = ev.Parted()
            case _:
                return [(0, action)]
        return [(0, action), *((n, told) for n in following for told in self.machines[n].handle(news, now))]

    def _settle(self, todos: list[Todo], now: float) -> list[Todo]:
        """Lets one failure end all answers, and be told once."""
        failures = [todo for todo in todos if isinstance(todo[1], ev.Fail)]
        if not failures:
            return todos
        rest = [todo for todo in todos if not isinstance(todo[1], ev.Fail)]
        for index in range(len(self.machines)):
            left = self.machines[index].handle(ev.Cancelled(), now)
            rest += [(index, action) for action in left if not isinstance(action, ev.Fail)]
        return [*rest, failures[0]]


def best(logprobs: Sequence[Sequence[TokenLogprob]], count: int) -> list[int]:
    """Indexes of the ``count`` answers with the highest mean log probability of a token, best first; ties by index.

    OpenAI's ``best_of``. An answer without tokens is the last choice.
    """

    def mean(answer: Sequence[TokenLogprob]) -> float:
        return sum(said.logprob for said in answer) / len(answer) if answer else -float("inf")

    return sorted(range(len(logprobs)), key=lambda index: -mean(logprobs[index]))[:count]
