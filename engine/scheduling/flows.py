"""Decides whose sequence a worker serves next, where it has sequences of several tenants; sans-IO (I9).

A flow is what the worker has of one tenant, whom it knows by an opaque key and a weight
(:class:`pillion.priority.Flow`). Each flow has a counter: tokens that it was served, over its weight. The next sequence
is of the flow with the smallest counter, and within a flow the first in place. A generated token counts OUTPUT_COST
times one of a prompt, and of a prompt what was computed here, so a long one is no debt before it has had its steps. A
flow that had nothing waiting begins at the counter of those that wait, so nobody saves up. This is the Virtual Token
Counter, by which gateways order what waits there (:mod:`pillion.gateway.admission.turns`), too.

Between flows, priority decides only at its ends: what is more urgent than usual, for which a tenant needs a permission,
goes before what came within PRIORITY_AGING_S of it for each level, and what is in the background goes after what does.

A worker without a second flow keeps no counter, so the order is that of the queues alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pillion.engine.scheduling.sequence import Sequence, SequenceState
from pillion.priority import MAX_PRIORITY

# The worker remembers the counters of this many flows that have no sequence on it while others have some.
MAX_ABSENT_FLOWS = 1024
Place = tuple[float, int]


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
        return [key for key, account in self.accounts.items() if account.waiting and not account.running]

    def joined(self, sequence: Sequence, started: Iterable[Sequence]) -> None:
        """Counts a sequence that has joined the queues. ``started`` are those in the queues that have begun."""
        flow = sequence.spec.flow
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
        account = self.accounts[sequence.spec.flow.key]
        change = 1 if sequence.state is SequenceState.RUNNING else -1
        account.running += change
        account.waiting -= change

    def left(self, sequence: Sequence) -> None:
        """Counts a sequence out that is about to leave the queues, and charges its tokens to its flow."""
        key = sequence.spec.flow.key
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
            key = sequence.spec.flow.key
            found[key] += sequence.uncharged_tokens / self.accounts[key].weight
        return found

    def in_turn(
        self,
        tails: Iterable[Sequence],
        counters: Mapping[bytes, float],
        order: Callable[[Sequence], Place],
        most: int,
    ) -> list[Sequence]:
        """Returns the prompt tails in the order of service: all that have begun, and the first ``most`` of the others.
        Within each flow they keep their order, in which they come."""
        lines: dict[bytes, deque[Sequence]] = {}
        for sequence in tails:
            lines.setdefault(sequence.spec.flow.key, deque()).append(sequence)
        heaps: tuple[list[tuple[float, int, Place, bytes]], ...] = ([], [], [])
        for key, line in lines.items():
            heaps[_rank(line[0])].append((counters[key], self.accounts[key].running, order(line[0]), key))
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
                heapq.heappush(heaps[_rank(line[0])], (counter, running + 1, order(line[0]), key))
        return found

    def _lift(self, key: bytes, counters: Mapping[bytes, float]) -> None:
        """Makes a flow that begins to wait as late as those that wait already, or, where none does, as those that
        run."""
        account = self.accounts[key]
        others = {name: one for name, one in self.accounts.items() if name != key}
        waiting = [counters[name] for name, one in others.items() if one.waiting]
        level = min(waiting) if waiting else max(counters[name] for name in others)
        if level > counters[key]:
            account.counter = level - (counters[key] - account.counter)

    def check_integrity(self, queued: Seq[Sequence]) -> None:
        """Raises AssertionError where the accounts contradict the sequences that are in the queues."""
        counted: dict[bytes, list[int]] = {}
        for sequence in queued:
            count = counted.setdefault(sequence.spec.flow.key, [0, 0])
            count[sequence.state is not SequenceState.RUNNING] += 1
        found = {key: [account.running, account.waiting] for key, account in self.accounts.items()}
        assert found == counted, f"flows {found} have other sequences than the queues: {counted}"
        assert len(self.absent) <= MAX_ABSENT_FLOWS, "too many flows are remembered"
        assert not self.absent.keys() & self.accounts.keys(), "a flow is here and away"
        assert self.accounts or not self.absent, "somebody owes something to nobody"


def in_background(sequence: Sequence) -> bool:
    """Returns whether nobody waits for the sequence, which is a batch's."""
    return sequence.spec.priority >= MAX_PRIORITY


def _rank(sequence: Sequence) -> int:
    """Returns 0 for what is more urgent than usual, 1 for what is usual, and 2 for what is in the background."""
    return 0 if sequence.spec.priority < 0 else 1 + in_background(sequence)
