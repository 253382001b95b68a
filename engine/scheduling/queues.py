"""The scheduler's three queues, and the order in which they are served.

    running    has one of the max_num_seqs places of a step: a decode, or a prompt tail that has begun
    preempted  was running, or is a parallel sample of a sequence that was: it has a ticket, a new one or the one kept
               when it gave its place to another tenant, and waits to run
    waiting    has a ticket and has not begun

Preempted and waiting sequences are skipped while their adapter is not ready.

Decodes always come first. Prompt tails of one tenant are ordered by arrival, whether they have begun or not, later per
level of lower urgency and per second of their own work (:func:`pillion.rules.priority.prompt_order`). So a short prompt
overtakes a long one between two steps, and none is overtaken for ever. Preempted streams, whose readers wait in the
middle of an answer, go before others that came within PRIORITY_AGING_S of them.

Between tenants, shares decide. A flow is a tenant as the worker sees it, by an opaque key and a weight
(:class:`pillion.rules.priority.Flow`). Each flow has a counter: its served tokens over its weight. The next sequence is
of the flow with the smallest counter, and within a flow the first in order. A generated token counts OUTPUT_COST times
a prompt's; of a prompt, only what was computed here counts, when its steps run. A flow that starts to wait begins at
the counter of those that wait, so none saves up. This is the Virtual Token Counter, which orders waiting requests in
gateways as well (:mod:`pillion.gateway.admission.turns`).

Between flows, priority decides only at its ends: higher urgency than normal, which a tenant needs permission for, goes
before what came within PRIORITY_AGING_S of it per level, and background work goes last.

With a single flow there is no counter, and the queues' order decides.

If a tenant without a place waits and none is free, the tenant with most in proportion to its weight frees one of its
places, unless it has only one. The newest of its least urgent decodes then runs in no further step, and is preempted
once the launched steps have ended. It keeps its slots, so nothing is recomputed, and no tenant waits for the end of
another's answer. Background sequences free their places first, and take none.

When memory is out, the victim is the newest sequence of the tenant with most among the least urgent ones, whatever its
queue. Only the head, the first in queue order, is spared while there is another: a request's order never changes and
later requests have larger ones, so every request becomes the head at last, and the head makes progress (I5). A RESUMING
sequence holds no memory and is only in the node's queue.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.engine.scheduling.step_cost import TokenBudget
from pillion.rules.priority import MAX_PRIORITY, PRIORITY_AGING_S, rank_of

# Flows without a sequence whose counters are kept while others have some.
MAX_ABSENT_FLOWS = 1024
Place = tuple[float, int]
_QUEUED = (SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.WAITING)


def _place(sequence: Sequence) -> Place:
    return sequence.prompt_order, sequence.seq_id


def _service_order(sequence: Sequence) -> Place:
    """Return the order of a prompt tail in a step: preempted streams go first."""
    resumes = sequence.state is SequenceState.PREEMPTED
    return sequence.prompt_order - PRIORITY_AGING_S * resumes, sequence.seq_id


def _able(queue: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in queue if not sequence.awaits_adapter)


def _in_background(sequence: Sequence) -> bool:
    """Return whether the sequence is a batch's, for which no client waits."""
    return sequence.priority >= MAX_PRIORITY


@dataclass(slots=True)
class FlowAccount:
    """One flow: its ``weight``, its ``counter`` of charged tokens, and its running and waiting sequences."""

    weight: float = 1.0
    counter: float = 0.0
    running: int = 0
    waiting: int = 0


class Flows:
    """The accounts of all flows with a queued sequence, by key, and the counters of absent ones."""

    def __init__(self) -> None:
        self.accounts: dict[bytes, FlowAccount] = {}
        self.absent: dict[bytes, float] = {}

    @property
    def several(self) -> bool:
        return len(self.accounts) > 1

    @property
    def placeless(self) -> list[bytes]:
        """Keys of the waiting flows without a running sequence."""
        return [key for key, account in self.accounts.items() if not account.running]

    def joined(self, sequence: Sequence, started: Iterable[Sequence]) -> None:
        """Count a sequence that joined the queues. ``started`` are the queued sequences that have begun."""
        flow = sequence.flow
        account = self.accounts.get(flow.key)
        if account is None:
            account = self.accounts[flow.key] = FlowAccount(counter=self.absent.pop(flow.key, 0.0))
        account.weight = flow.weight
        if sequence.state is SequenceState.RUNNING:
            account.running += 1
            return
        if not account.waiting and self.several:
            self._lift(flow.key, self.counters(started))
        account.waiting += 1

    def moved(self, sequence: Sequence) -> None:
        """Count a sequence that has begun to run, or waits again, without leaving the queues."""
        account = self.accounts[sequence.flow.key]
        change = 1 if sequence.state is SequenceState.RUNNING else -1
        account.running += change
        account.waiting -= change

    def left(self, sequence: Sequence) -> None:
        """Remove a sequence that is about to leave the queues, and charge its tokens to its flow."""
        key = sequence.flow.key
        account = self.accounts[key]
        account.counter += sequence.take_charge() / account.weight
        if sequence.state is SequenceState.RUNNING:
            account.running -= 1
        else:
            account.waiting -= 1
        if account.running or account.waiting:
            return
        del self.accounts[key]
        if not self.accounts:
            # No flow waited for another, so none owes anything.
            self.absent.clear()
            return
        self.absent[key] = account.counter
        if len(self.absent) > MAX_ABSENT_FLOWS:
            del self.absent[min(self.absent, key=self.absent.__getitem__)]

    def counters(self, started: Iterable[Sequence]) -> dict[bytes, float]:
        """Return each flow's counter, plus what its sequences that have begun were served and not yet charged."""
        found = {key: account.counter for key, account in self.accounts.items()}
        for sequence in started:
            key = sequence.flow.key
            found[key] += sequence.uncharged_tokens / self.accounts[key].weight
        return found

    def in_turn(
        self,
        tails: Iterable[Sequence],
        counters: Mapping[bytes, float],
        most: int,
    ) -> list[Sequence]:
        """Return the prompt tails in the order of service: all that have begun, and the first ``most`` of the others.
        Each flow keeps the given order."""
        lines: dict[bytes, deque[Sequence]] = {}
        for sequence in tails:
            lines.setdefault(sequence.flow.key, deque()).append(sequence)
        heaps: tuple[list[tuple[float, int, Place, bytes]], ...] = ([], [], [])
        for key, line in lines.items():
            heap = heaps[rank_of(line[0].priority)]
            heap.append((counters[key], self.accounts[key].running, _service_order(line[0]), key))
        for heap in heaps:
            heapq.heapify(heap)
        found: list[Sequence] = []
        while any(heaps):
            # Per rank the flow served least, and of these the one whose sequence is first.
            heap = min((one for one in heaps if one), key=lambda one: one[0][2])
            counter, running, _, key = heapq.heappop(heap)
            line, weight = lines[key], self.accounts[key].weight
            sequence = line.popleft()
            begun = sequence.state is SequenceState.RUNNING
            if begun or most:
                most -= not begun
                found.append(sequence)
                counter += sequence.left_to_compute / weight
            if line:
                heap = heaps[rank_of(line[0].priority)]
                heapq.heappush(heap, (counter, running + 1, _service_order(line[0]), key))
        return found

    def _lift(self, key: bytes, counters: Mapping[bytes, float]) -> None:
        """Raise the counter of a flow that starts to wait to that of those that wait or, if none, run."""
        account = self.accounts[key]
        waiting = [counters[name] for name, one in self.accounts.items() if one.waiting]
        level = min(waiting) if waiting else max(counters.values())
        if level > counters[key]:
            account.counter = level - (counters[key] - account.counter)

    def check_integrity(self, queued: Seq[Sequence]) -> None:
        """Raise AssertionError if the accounts contradict the queued sequences."""
        counted: dict[bytes, list[int]] = {}
        for sequence in queued:
            count = counted.setdefault(sequence.flow.key, [0, 0])
            count[sequence.state is not SequenceState.RUNNING] += 1
        found = {key: [account.running, account.waiting] for key, account in self.accounts.items()}
        assert found == counted, f"flows {found} have other sequences than the queues: {counted}"
        assert len(self.absent) <= MAX_ABSENT_FLOWS, "too many flows are remembered"
        assert not self.absent.keys() & self.accounts.keys(), "a flow is here and away"
        assert self.accounts or not self.absent, "somebody owes something to nobody"


class SchedulerQueues:
    """The three queues, each sorted by prompt order; ``max_num_seqs`` limits ``running``.

    Attributes:
        flows: the shares of tenants.
        yielding: running sequences that free their places, with the launched step that each waits for. Until then they
            and their successors are both in ``running``, but never in one step.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._queues = dict(zip(_QUEUED, (self.running, self.preempted, self.waiting), strict=True))
        self.flows = Flows()
        self.yielding: dict[Sequence, int] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.running, self.preempted, self.waiting)

    @property
    def free_seqs(self) -> int:
        return self.max_num_seqs - len(self.running) + len(self.yielding)

    def join(self, sequence: Sequence) -> None:
        insort(self._queues[sequence.state], sequence, key=_place)
        self.flows.joined(sequence, chain(self.running, self.preempted))

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue, if any; called before its state changes."""
        if self._take_out(sequence):
            self.flows.left(sequence)

    def start_running(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        sequence.start_running()
        insort(self.running, sequence, key=_place)
        self.flows.moved(sequence)

    def _take_out(self, sequence: Sequence) -> bool:
        queue = self._queues.get(sequence.state)
        if queue is None:
            return False
        at = bisect_left(queue, _place(sequence), key=_place)
        if at == len(queue) or queue[at] is not sequence:
            return False
        del queue[at]
        self.yielding.pop(sequence, None)
        return True

    def to_decode(self) -> tuple[Sequence, ...]:
        """Return the running sequences but those that free their places."""
        if not self.yielding:
            return tuple(self.running)
        return tuple(sequence for sequence in self.running if sequence not in self.yielding)

    def make_way(self, in_flight: InFlightSteps) -> None:
        """Free a place of tenants with several for each tenant that waits without any."""
        while self.yielding and len(self.running) < self.max_num_seqs + len(self.yielding):
            self.yielding.popitem()
        if self.flows.several and (self.waiting or self.preempted):
            self._claim_places(in_flight.last_launched)
        for sequence, last_step in tuple(self.yielding.items()):
            if in_flight.has_landed(last_step):
                self._take_out(sequence)
                sequence.give_way()
                insort(self.preempted, sequence, key=_place)
                self.flows.moved(sequence)

    def _claim_places(self, last_step: int) -> None:
        """Choose the sequences that free their places."""
        flows, placeless = self.flows, self.flows.placeless
        if not placeless or self.free_seqs >= len(placeless):
            return
        able = {s.flow.key for s in _able(chain(self.preempted, self.waiting)) if not _in_background(s)}
        counters = flows.counters(chain(self.running, self.preempted))
        claims = sorted((key for key in placeless if key in able), key=counters.__getitem__)
        places = Counter(sequence.flow.key for sequence in self.to_decode())

        def had(sequence: Sequence) -> tuple[bool, float, int, int]:
            return _in_background(sequence), counters[sequence.flow.key], sequence.priority, sequence.seq_id

        for key in claims[self.free_seqs :]:
            decodes = (sequence for sequence in self.to_decode() if sequence.decoding and sequence.may_give_way)
            givers = [one for one in decodes if places[one.flow.key] > 1 or _in_background(one)]
            giver = max(givers, key=had, default=None)
            if giver is None or (counters[giver.flow.key] < counters[key] and not _in_background(giver)):
                return
            self.yielding[giver] = last_step
            places[giver.flow.key] -= 1

    def prompt_tails(self) -> list[Sequence]:
        """Return sequences with prompt left to launch, in the order of service; of the queued ones, those that may
        start."""
        begun = [s for s in self.running if not s.decoding and s.next_start < s.num_tokens and s not in self.yielding]
        free = self.free_seqs
        if not begun and not (free and (self.preempted or self.waiting)):
            return []
        if self.flows.several:
            return self._in_turn([*begun, *(_able(chain(self.preempted, self.waiting)) if free else ())], 2 * free)
        tails = [*begun, *islice(_able(self.preempted), free), *islice(_able(self.waiting), free)]
        tails.sort(key=_service_order)
        return tails

    def line(self, prompt_tails: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Return the tokens start .. end of the prompt tails that may lengthen steps: none of background requests, and
        none if several tenants share the worker, since one's prompts must not slow another's streams."""
        if self.flows.several:
            return []
        return [(tail.next_start, tail.num_tokens) for tail in prompt_tails if not _in_background(tail)]

    def _in_turn(self, sequences: list[Sequence], most: int) -> list[Sequence]:
        counters = self.flows.counters(chain(self.running, self.preempted))
        return self.flows.in_turn(sorted(sequences, key=_service_order), counters, most)

    def positions(self) -> dict[int, int]:
        """Return the position of each sequence that waits to run, from 1, by seq_id; 0 while its prompt is computed."""
        queued = [*self.preempted, *self.waiting]
        if self.flows.several:
            queued = self._in_turn(queued, len(queued))
        line = {sequence.seq_id: place for place, sequence in enumerate(queued, 1)}
        return line | {sequence.seq_id: 0 for sequence in self.running if not sequence.decoding}

    def load(self, budget: TokenBudget) -> dict[str, Any]:
        """Return the queued sequences and tokens, and what the ``budget`` has learned of steps, as
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
        """Return the sequence to preempt for memory. Raises ValueError if all queues are empty."""
        candidates = list(self)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=lambda s: (s.queue_order, s.seq_id)))
        had = self.flows.counters(chain(self.running, self.preempted))
        return max(candidates, key=lambda s: (s.priority, had[s.flow.key], s.seq_id))

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """Raise AssertionError if a queue is out of order or contains a sequence of another state."""
        known = {id(sequence) for sequence in alive}
        for state, queue in self._queues.items():
            assert queue == sorted(queue, key=_place), f"the {state.value} queue is out of order"
            assert all(s.state is state and id(s) in known for s in queue), f"a stranger in the {state.value} queue"
        assert self.free_seqs >= 0, "more sequences run than max_num_seqs"
        running = {id(sequence) for sequence in self.running}
        assert all(id(sequence) in running for sequence in self.yielding), "a place is given up that nobody has"
        self.flows.check_integrity(tuple(self))
