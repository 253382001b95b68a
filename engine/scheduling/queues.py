"""The scheduler's three queues, and the order in which they are served.

    running    in one of the max_num_seqs places of a step: a decode, or a prompt tail that has begun
    preempted  waits to run again, with a new ticket or, if it gave its place to another tenant, with its old one; or is
               a parallel sample that has not run yet
    waiting    has a ticket and has not begun

Preempted and waiting sequences are skipped while their adapter is not ready.

Decodes always come first. Prompt tails of one tenant are ordered by arrival, whether they have begun or not, later per
level of lower urgency and per second of their own work (:func:`pillion.rules.priority.prompt_order`). So a short prompt
overtakes a long one between two steps, and none is overtaken for ever. Preempted streams, whose readers wait in the
middle of an answer, go before others that came within PRIORITY_AGING_S of them.

Between tenants, shares decide. A flow is a tenant as the worker sees it, by an opaque key and a weight
(:class:`pillion.rules.priority.Flow`). Each flow has a counter: its served tokens over its weight. The next sequence is
of the flow with the smallest counter, and within a flow the first in order. A generated token counts OUTPUT_COST times
a prompt token; cached prompt tokens are free. A flow that starts to wait begins at the smallest counter of the waiting
flows, so idle time earns no credit. This is the Virtual Token Counter, which orders waiting requests in gateways as
well (:mod:`pillion.gateway.admission.turns`).

Between flows, only priorities above normal and background count. Sequences of more than normal urgency, for which a
tenant needs permission, go before those that came up to PRIORITY_AGING_S earlier per level; background work goes last.

With a single flow there is no counter, and the queues' order decides.

If a tenant without a running sequence waits and no place is free, the tenant with the largest counter frees one of its
places, unless it has only one. The newest of its least urgent decodes is left out of further steps, and preempted once
the launched steps have retired. It keeps its slots, so nothing is recomputed, and no tenant waits for the end of
another's answer. Background sequences free their places first, and claim none.

When memory is short, the victim is, of all queues, among the least urgent sequences the newest of the tenant with the
largest counter. Only the head, the first in queue order, is spared unless it is alone: a request's order never changes
and later requests have larger ones, so every request becomes the head at last, and the head makes progress (I5). A
RESUMING sequence has no memory, and is only in the node's queue.
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

# Max flows without queued sequences whose counters are kept; they are all dropped when no flow has any.
MAX_ABSENT_FLOWS = 1024
SortKey = tuple[float, int]
_QUEUED = (SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.WAITING)


def _queue_order(sequence: Sequence) -> SortKey:
    return sequence.prompt_order, sequence.seq_id


def _service_order(sequence: Sequence) -> SortKey:
    """Return the sort key of a prompt tail in a step: preempted streams go before those that came up to
    PRIORITY_AGING_S earlier."""
    resumes = sequence.state is SequenceState.PREEMPTED
    return sequence.prompt_order - PRIORITY_AGING_S * resumes, sequence.seq_id


def _with_adapter(queue: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield the sequences that do not wait for an adapter."""
    return (sequence for sequence in queue if not sequence.awaits_adapter)


def _in_background(sequence: Sequence) -> bool:
    """Return whether the sequence is a batch's, for which no client waits."""
    return sequence.priority >= MAX_PRIORITY


@dataclass(slots=True)
class FlowAccount:
    """One flow: its weight, its charged tokens over that weight, and its number of running and of waiting sequences."""

    weight: float = 1.0
    counter: float = 0.0
    running: int = 0
    waiting: int = 0


class Flows:
    """The accounts of all flows with a queued sequence, and the counters of flows that had one, both by flow key."""

    def __init__(self) -> None:
        self.accounts: dict[bytes, FlowAccount] = {}
        self.absent: dict[bytes, float] = {}

    @property
    def several(self) -> bool:
        return len(self.accounts) > 1

    @property
    def not_running(self) -> list[bytes]:
        """Keys of the flows without a running sequence."""
        return [key for key, account in self.accounts.items() if not account.running]

    def join(self, sequence: Sequence, started: Iterable[Sequence]) -> None:
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
            self._raise_counter(flow.key, self.counters(started))
        account.waiting += 1

    def move(self, sequence: Sequence) -> None:
        """Count a queued sequence that has started to run, or to wait again."""
        account = self.accounts[sequence.flow.key]
        change = 1 if sequence.state is SequenceState.RUNNING else -1
        account.running += change
        account.waiting -= change

    def leave(self, sequence: Sequence) -> None:
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
            # Counters only matter between flows that compete for the worker.
            self.absent.clear()
            return
        self.absent[key] = account.counter
        if len(self.absent) > MAX_ABSENT_FLOWS:
            del self.absent[min(self.absent, key=self.absent.__getitem__)]

    def counters(self, started: Iterable[Sequence]) -> dict[bytes, float]:
        """Return each flow's counter, with the uncharged tokens of its ``started`` sequences."""
        counters = {key: account.counter for key, account in self.accounts.items()}
        for sequence in started:
            key = sequence.flow.key
            counters[key] += sequence.uncharged_tokens / self.accounts[key].weight
        return counters

    def order_tails(
        self,
        tails: Iterable[Sequence],
        counters: Mapping[bytes, float],
        max_new: int,
    ) -> list[Sequence]:
        """Return the prompt tails in the order of service, without changing the order within a flow: all that have
        begun, and at most ``max_new`` that have not."""
        queues: dict[bytes, deque[Sequence]] = {}
        for sequence in tails:
            queues.setdefault(sequence.flow.key, deque()).append(sequence)
        heaps: tuple[list[tuple[float, int, SortKey, bytes]], ...] = ([], [], [])
        for key, queue in queues.items():
            heap = heaps[rank_of(queue[0].priority)]
            heap.append((counters[key], self.accounts[key].running, _service_order(queue[0]), key))
        for heap in heaps:
            heapq.heapify(heap)
        ordered: list[Sequence] = []
        while any(heaps):
            # A heap has one rank's flows, smallest counter first. Of the heads, the one first in service order wins.
            heap = min((heap for heap in heaps if heap), key=lambda heap: heap[0][2])
            counter, running, _, key = heapq.heappop(heap)
            queue, weight = queues[key], self.accounts[key].weight
            sequence = queue.popleft()
            has_begun = sequence.state is SequenceState.RUNNING
            if has_begun or max_new:
                max_new -= not has_begun
                ordered.append(sequence)
                counter += sequence.left_to_compute / weight
            if queue:
                heap = heaps[rank_of(queue[0].priority)]
                heapq.heappush(heap, (counter, running + 1, _service_order(queue[0]), key))
        return ordered

    def _raise_counter(self, key: bytes, counters: Mapping[bytes, float]) -> None:
        """Raise the counter of a flow that starts to wait to the smallest one of waiting flows or, without any, to the
        largest one of all flows."""
        account = self.accounts[key]
        waiting = [counters[other] for other, account in self.accounts.items() if account.waiting]
        level = min(waiting) if waiting else max(counters.values())
        if level > counters[key]:
            account.counter = level - (counters[key] - account.counter)

    def check_integrity(self, queued: Seq[Sequence]) -> None:
        """Raise AssertionError if the accounts contradict the queued sequences."""
        counted: dict[bytes, list[int]] = {}
        for sequence in queued:
            count = counted.setdefault(sequence.flow.key, [0, 0])
            count[sequence.state is not SequenceState.RUNNING] += 1
        accounts = {key: [account.running, account.waiting] for key, account in self.accounts.items()}
        assert accounts == counted, f"accounts {accounts} differ from the queues' {counted}"
        assert len(self.absent) <= MAX_ABSENT_FLOWS, "too many absent flows"
        assert not self.absent.keys() & self.accounts.keys(), "a flow has an account and is absent"
        assert self.accounts or not self.absent, "absent flows without any present one"


class SchedulerQueues:
    """The three queues, each sorted by prompt order; ``max_num_seqs`` limits ``running``.

    Attributes:
        flows: the shares of tenants.
        yielding: running sequences that free their places, with the number of the launched step that each waits for.
            Until it retires, they and their successors are both in ``running``, but never in one step.
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
        insort(self._queues[sequence.state], sequence, key=_queue_order)
        self.flows.join(sequence, chain(self.running, self.preempted))

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue, if any; called before its state changes."""
        if self._remove(sequence):
            self.flows.leave(sequence)

    def start_running(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.start_running()
        insort(self.running, sequence, key=_queue_order)
        self.flows.move(sequence)

    def _remove(self, sequence: Sequence) -> bool:
        """Remove a sequence from its queue; return False if it is in none."""
        queue = self._queues.get(sequence.state)
        if queue is None:
            return False
        index = bisect_left(queue, _queue_order(sequence), key=_queue_order)
        if index == len(queue) or queue[index] is not sequence:
            return False
        del queue[index]
        self.yielding.pop(sequence, None)
        return True

    def to_decode(self) -> tuple[Sequence, ...]:
        """Return the running sequences, except those that free their places."""
        if not self.yielding:
            return tuple(self.running)
        return tuple(sequence for sequence in self.running if sequence not in self.yielding)

    def make_way(self, in_flight: InFlightSteps) -> None:
        """Free one place for each waiting tenant without a running sequence, as far as tenants with several places, or
        background sequences, can give them up."""
        while self.yielding and len(self.running) < self.max_num_seqs + len(self.yielding):
            self.yielding.popitem()
        if self.flows.several and (self.waiting or self.preempted):
            self._choose_yielding(in_flight.last_launched)
        for sequence, last_step in tuple(self.yielding.items()):
            if in_flight.has_retired(last_step):
                self._remove(sequence)
                sequence.give_way()
                insort(self.preempted, sequence, key=_queue_order)
                self.flows.move(sequence)

    def _choose_yielding(self, last_step: int) -> None:
        """Choose the sequences that free their places once step number ``last_step`` has retired."""
        flows, not_running = self.flows, self.flows.not_running
        if not not_running or self.free_seqs >= len(not_running):
            return
        may_start = {s.flow.key for s in _with_adapter(chain(self.preempted, self.waiting)) if not _in_background(s)}
        counters = flows.counters(chain(self.running, self.preempted))
        claims = sorted((key for key in not_running if key in may_start), key=counters.__getitem__)
        running = Counter(sequence.flow.key for sequence in self.to_decode())

        def yield_order(sequence: Sequence) -> tuple[bool, float, int, int]:
            return _in_background(sequence), counters[sequence.flow.key], sequence.priority, sequence.seq_id

        for key in claims[self.free_seqs :]:
            decodes = (sequence for sequence in self.to_decode() if sequence.decoding and sequence.may_give_way)
            candidates = [s for s in decodes if running[s.flow.key] > 1 or _in_background(s)]
            chosen = max(candidates, key=yield_order, default=None)
            if chosen is None or (counters[chosen.flow.key] < counters[key] and not _in_background(chosen)):
                return
            self.yielding[chosen] = last_step
            running[chosen.flow.key] -= 1

    def prompt_tails(self) -> list[Sequence]:
        """Return, in the order of service, the running sequences with prompt tokens left to launch, and the sequences
        that may start in the free places."""
        begun = [s for s in self.running if not s.decoding and s.next_start < s.num_tokens and s not in self.yielding]
        free = self.free_seqs
        if not begun and not (free and (self.preempted or self.waiting)):
            return []
        if self.flows.several:
            queued = _with_adapter(chain(self.preempted, self.waiting)) if free else ()
            return self._order_by_flow([*begun, *queued], 2 * free)
        tails = [*begun, *islice(_with_adapter(self.preempted), free), *islice(_with_adapter(self.waiting), free)]
        tails.sort(key=_service_order)
        return tails

    def lengthening_tails(self, prompt_tails: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Return (first position, end) of the prompt tails that may lengthen steps: all but background requests' or, if
        several tenants share the worker, none, since one's prompts must not slow another's streams."""
        if self.flows.several:
            return []
        return [(tail.next_start, tail.num_tokens) for tail in prompt_tails if not _in_background(tail)]

    def _order_by_flow(self, sequences: list[Sequence], max_new: int) -> list[Sequence]:
        counters = self.flows.counters(chain(self.running, self.preempted))
        return self.flows.order_tails(sorted(sequences, key=_service_order), counters, max_new)

    def positions(self) -> dict[int, int]:
        """Return the position of each sequence that waits to run, from 1, by seq_id; 0 while its prompt is computed."""
        queued = [*self.preempted, *self.waiting]
        if self.flows.several:
            queued = self._order_by_flow(queued, len(queued))
        positions = {sequence.seq_id: position for position, sequence in enumerate(queued, 1)}
        return positions | {sequence.seq_id: 0 for sequence in self.running if not sequence.decoding}

    def load(self, budget: TokenBudget) -> dict[str, Any]:
        """Return :attr:`Outcome.load`: queued sequences and tokens, and the step cost measured by ``budget``."""
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
        counters = self.flows.counters(chain(self.running, self.preempted))
        return max(candidates, key=lambda s: (s.priority, counters[s.flow.key], s.seq_id))

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """Raise AssertionError if a queue is out of order, or contains a sequence that is in another state or not in
        ``alive``."""
        known = {id(sequence) for sequence in alive}
        for state, queue in self._queues.items():
            assert queue == sorted(queue, key=_queue_order), f"the {state.value} queue is out of order"
            assert all(s.state is state and id(s) in known for s in queue), f"a wrong sequence is {state.value}"
        assert self.free_seqs >= 0, "more sequences run than max_num_seqs"
        running = {id(sequence) for sequence in self.running}
        assert all(id(sequence) in running for sequence in self.yielding), "a yielding sequence does not run"
        self.flows.check_integrity(tuple(self))
