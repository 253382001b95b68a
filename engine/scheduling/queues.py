"""Holds the three queues of a scheduler, and decides the order in which it serves them.

    running    has one of the max_num_seqs places of a step: a decode, or a prompt tail that has begun
    preempted  was running, or is a sibling of a sequence that was: it has a new ticket and waits to run
    waiting    has a ticket and has not begun

Preempted and waiting sequences that a feature keeps waiting are passed over.

Decodes come first, always. Prompt tails are served by their place in line, whether they have begun or not: by arrival,
later for each level of less urgency and for each second of their own work (:func:`pillion.priority.prompt_order`). So a
short prompt overtakes a long one between two steps, and nobody is overtaken for ever. Only streams that were preempted,
whose readers wait in the middle of an answer, go before others that came within PRIORITY_AGING_S of them.

The victim, when memory is out, is the newest of the least urgent sequences, whatever queue it is in. Only the head, the
first in queue order, is spared while there is another: the order of a request never changes and later requests have
larger ones, so every request becomes the head at last, and the head gets on (I5). A sequence that is RESUMING holds no
memory and is in none of these queues, but in the node's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_cost import TokenBudget
from pillion.priority import PRIORITY_AGING_S

_QUEUED = (SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.WAITING)


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.prompt_order, sequence.seq_id


def _able(queue: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in queue if not sequence.kept_waiting)


class SchedulerQueues:
    """Holds the scheduler's three queues. Each is sorted by prompt order; ``max_num_seqs`` bounds ``running``. A
    sequence is in one queue or in none."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._queues = dict(zip(_QUEUED, (self.running, self.preempted, self.waiting), strict=True))

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.running, self.preempted, self.waiting)

    @property
    def free_seqs(self) -> int:
        return self.max_num_seqs - len(self.running)

    def join(self, sequence: Sequence) -> None:
        insort(self._queues[sequence.state], sequence, key=_place)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue, if it is in one; it is called before the sequence's state changes."""
        queue = self._queues.get(sequence.state)
        if queue is not None:
            at = bisect_left(queue, _place(sequence), key=_place)
            if at < len(queue) and queue[at] is sequence:
                del queue[at]

    def start_running(self, sequence: Sequence) -> None:
        self.leave(sequence)
        sequence.start_running()
        self.join(sequence)

    def prompt_tails(self) -> list[Sequence]:
        """Returns sequences with prompt left to launch, in the order of service; of those that are queued and not kept
        waiting, as many as may start."""
        begun = [s for s in self.running if not s.decoding and s.next_start < s.num_tokens]
        free = self.free_seqs
        if not begun and not (free and (self.preempted or self.waiting)):
            return []
        tails = [*begun, *islice(_able(self.preempted), free), *islice(_able(self.waiting), free)]

        def order(sequence: Sequence) -> tuple[float, int]:
            resumes = sequence.state is SequenceState.PREEMPTED
            return sequence.prompt_order - PRIORITY_AGING_S * resumes, sequence.seq_id

        tails.sort(key=order)
        return tails

    def positions(self) -> dict[int, int]:
        """Returns the place in line of each sequence that waits to run, from 1, by seq_id; 0 where its prompt is being
        computed."""
        line = {sequence.seq_id: place for place, sequence in enumerate(chain(self.preempted, self.waiting), 1)}
        return line | {sequence.seq_id: 0 for sequence in self.running if not sequence.decoding}

    def load(self, budget: TokenBudget) -> dict[str, Any]:
        """Returns how many sequences and tokens are queued and what the ``budget`` has learnt of steps, by the names of
        :attr:`Outcome.load`."""
        queued = (*self.preempted, *self.waiting)
        waiting_tokens = sum(s.left_to_compute for s in queued)
        contexts = [s.num_computed for s in self.running if s.decoding]
        return {
            "running_requests": len(self.running),
            "waiting_requests": len(queued),
            "waiting_tokens": waiting_tokens,
            "queued_tokens": waiting_tokens + sum(s.left_to_compute for s in self.running if not s.decoding),
            "decoding_requests": len(contexts),
            "context_tokens": sum(contexts),
            "step_cost_s": budget.cost.weights_s(),
            "largest_step_tokens": budget.largest_step_tokens,
        }

    def victim(self) -> Sequence:
        """Returns the sequence that gives up its memory. Raises ValueError when all queues are empty."""
        candidates = list(self)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=lambda s: (s.queue_order, s.seq_id)))
        return max(candidates, key=lambda s: (s.spec.priority, s.seq_id))

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """Raises AssertionError where a queue is out of order or holds a sequence that is not its own."""
        known = {id(sequence) for sequence in alive}
        for state, queue in self._queues.items():
            assert queue == sorted(queue, key=_place), f"the {state.value} queue is out of order"
            assert all(s.state is state and id(s) in known for s in queue), f"a stranger in the {state.value} queue"
        assert len(self.running) <= self.max_num_seqs, "more sequences run than max_num_seqs"
