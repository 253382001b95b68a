"""Holds the three queues of a scheduler, and decides the order in which it serves them.

    running    has one of the max_num_seqs places of a step: a decode, or a prompt tail that has begun
    preempted  was running, or is a parallel sample of a sequence that was: it has a ticket, a new one or the one that
               it kept when it gave its place to another tenant, and waits to run
    waiting    has a ticket and has not begun

Preempted and waiting sequences whose adapter is not there are passed over.

Decodes come first, always. Prompt tails of one tenant are served by their place in line, whether they have begun or
not: by arrival, later for each level of less urgency and for each second of their own work
(:func:`pillion.rules.priority.prompt_order`). So a short prompt overtakes a long one between two steps, and nobody is
overtaken for ever. Only streams that were preempted, whose readers wait in the middle of an answer, go before others
that came within PRIORITY_AGING_S of them.

Between tenants shares decide. A flow is what the worker has of one tenant, whom it knows by an opaque key and a weight
(:class:`pillion.rules.priority.Flow`). Each flow has a counter: tokens that it was served, over its weight. The next
sequence is of the flow with the smallest counter, and within a flow the first in place. A generated token counts
OUTPUT_COST times one of a prompt, and of a prompt what was computed here, so a long one is no debt before it has had
its steps. A flow that had nothing waiting begins at the counter of those that wait, so nobody saves up. This is the
Virtual Token Counter, by which gateways order what waits there (:mod:`pillion.gateway.admission.turns`), too.

Between flows, priority decides only at its ends: what is more urgent than usual, for which a tenant needs a permission,
goes before what came within PRIORITY_AGING_S of it for each level, and what is in the background goes after what does.

A worker without a second flow keeps no counter, so the order is that of the queues alone.

Where a tenant waits that has no place, and none is free, the tenant that had most in proportion to its weight gives up
one of its places, as long as it has others. The newest of its least urgent decodes is in no further step then, and
waits among the preempted ones as soon as the launched steps have ended. It keeps all that it holds, so nothing is
computed again. So nobody waits until another tenant's answer ends. What is in the background gives up its place first,
and takes none.

The victim, when memory is out, is of the least urgent sequences, among them of the tenant that had most, and there the
newest, whatever queue it is in. Only the head, the first in queue order, is spared while there is another: the order of
a request never changes and later requests have larger ones, so every request becomes the head at last, and the head
gets on (I5). A sequence that is RESUMING holds no memory and is in none of these queues, but in the node's.
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

# The worker remembers the counters of this many flows that have no sequence on it while others have some.
MAX_ABSENT_FLOWS = 1024
Place = tuple[float, int]
_QUEUED = (SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.WAITING)


def _place(sequence: Sequence) -> Place:
    return sequence.prompt_order, sequence.seq_id


def _service_order(sequence: Sequence) -> Place:
    """Returns the place of a prompt tail in a step, where streams that were preempted go before others."""
    resumes = sequence.state is SequenceState.PREEMPTED
    return sequence.prompt_order - PRIORITY_AGING_S * resumes, sequence.seq_id


def _able(queue: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in queue if not sequence.awaits_adapter)


def _in_background(sequence: Sequence) -> bool:
    """Returns whether nobody waits for the sequence, which is a batch's."""
    return sequence.priority >= MAX_PRIORITY


@dataclass(slots=True)
class FlowAccount:
    """Describes one flow: its ``weight``, its ``counter`` as far as its sequences' tokens were charged, and how many of
    its sequences run, and wait to run."""

    weight: float = 1.0
    counter: float = 0.0
    running: int = 0
    waiting: int = 0


class Flows:
    """Holds the accounts of all flows that have a sequence in a worker's queues, by their keys, and the counters of
    those that had one."""

    def __init__(self) -> None:
        self.accounts: dict[bytes, FlowAccount] = {}
        self.absent: dict[bytes, float] = {}

    @property
    def several(self) -> bool:
        return len(self.accounts) > 1

    @property
    def placeless(self) -> list[bytes]:
        """Gives the keys of the flows that wait and have no sequence that runs."""
        return [key for key, account in self.accounts.items() if not account.running]

    def joined(self, sequence: Sequence, started: Iterable[Sequence]) -> None:
        """Counts a sequence that has joined the queues. ``started`` are those in the queues that have begun."""
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
        """Counts a sequence that has begun to run, or that waits again, without leaving the queues."""
        account = self.accounts[sequence.flow.key]
        change = 1 if sequence.state is SequenceState.RUNNING else -1
        account.running += change
        account.waiting -= change

    def left(self, sequence: Sequence) -> None:
        """Counts a sequence out that is about to leave the queues, and charges its tokens to its flow."""
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
            # Nobody waited for anybody else, so nobody owes anything.
            self.absent.clear()
            return
        self.absent[key] = account.counter
        if len(self.absent) > MAX_ABSENT_FLOWS:
            del self.absent[min(self.absent, key=self.absent.__getitem__)]

    def counters(self, started: Iterable[Sequence]) -> dict[bytes, float]:
        """Returns each flow's counter now, with what its sequences that have begun were served and not yet charged."""
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
        """Returns the prompt tails in the order of service: all that have begun, and the first ``most`` of the others.
        Within each flow they keep their order, in which they come."""
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
            # Of each rank the flow that was served least, and of the ranks the one whose sequence has the first place.
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
        """Makes a flow that begins to wait as late as those that wait already, or, where none does, as those that
        run."""
        account = self.accounts[key]
        waiting = [counters[name] for name, one in self.accounts.items() if one.waiting]
        level = min(waiting) if waiting else max(counters.values())
        if level > counters[key]:
            account.counter = level - (counters[key] - account.counter)

    def check_integrity(self, queued: Seq[Sequence]) -> None:
        """Raises AssertionError where the accounts contradict the sequences that are in the queues."""
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
    """Holds the scheduler's three queues. Each is sorted by prompt order; ``max_num_seqs`` bounds ``running``. A
    sequence is in one queue or in none. ``flows`` has the shares of tenants; ``yielding`` has those running sequences
    that give up their places, and the number of the launched step that each of them waits for: until then both they
    and those that have their places are in ``running``, but never in one step."""

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
        """Takes a sequence out of its queue, if it is in one; it is called before the sequence's state changes."""
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
        """Returns the running sequences without those that give up their places."""
        if not self.yielding:
            return tuple(self.running)
        return tuple(sequence for sequence in self.running if sequence not in self.yielding)

    def make_way(self, in_flight: InFlightSteps) -> None:
        """Has tenants that have more than one place give one up for each tenant that waits without any."""
        while self.yielding and len(self.running) < self.max_num_seqs + len(self.yielding):
            # A place has come free meanwhile.
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
        """Chooses the sequences that give up their places."""
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
        """Returns sequences with prompt left to launch, in the order of service; of those that are queued and not kept
        waiting, as many as may start."""
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
        """Returns the tokens start .. end of the prompt tails that may lengthen steps: none of background requests, and
        none where several tenants share the worker, since one's prompts must not slow another's streams."""
        if self.flows.several:
            return []
        return [(tail.next_start, tail.num_tokens) for tail in prompt_tails if not _in_background(tail)]

    def _in_turn(self, sequences: list[Sequence], most: int) -> list[Sequence]:
        counters = self.flows.counters(chain(self.running, self.preempted))
        return self.flows.in_turn(sorted(sequences, key=_service_order), counters, most)

    def positions(self) -> dict[int, int]:
        """Returns the place in line of each sequence that waits to run, from 1, by seq_id; 0 where its prompt is being
        computed."""
        queued = [*self.preempted, *self.waiting]
        if self.flows.several:
            queued = self._in_turn(queued, len(queued))
        line = {sequence.seq_id: place for place, sequence in enumerate(queued, 1)}
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
        had = self.flows.counters(chain(self.running, self.preempted))
        return max(candidates, key=lambda s: (s.priority, had[s.flow.key], s.seq_id))

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """Raises AssertionError where a queue is out of order or holds a sequence that is not its own."""
        known = {id(sequence) for sequence in alive}
        for state, queue in self._queues.items():
            assert queue == sorted(queue, key=_place), f"the {state.value} queue is out of order"
            assert all(s.state is state and id(s) in known for s in queue), f"a stranger in the {state.value} queue"
        assert self.free_seqs >= 0, "more sequences run than max_num_seqs"
        running = {id(sequence) for sequence in self.running}
        assert all(id(sequence) in running for sequence in self.yielding), "a place is given up that nobody has"
        self.flows.check_integrity(tuple(self))
