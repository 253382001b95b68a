"""Invariants of a simulated cluster, checked while it runs and when it is idle.

    each step        reads and writes only its worker's slots, within its token budget (I4, I5)
    its tokens       are emitted before the worker can have been fenced (I4)
    every few events ledgers (I4) and schedulers are consistent; no sequence computes for long without a reader (I8),
                     and no wait exceeds the named limits; each distinct cluster state is counted
    idle             no request, stream, ticket, pin, promise, wait or share of a load remains anywhere (I7, I8)

The model and the clients check tokens and KV (I1, I2, I3, I6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lab.simulator.lives import Life
from lab.simulator.virtual_loop import PROCESS, Process, ProcessState, VirtualLoop
from pillion.engine.scheduling.sequence import SequenceState
from pillion.engine.worker.tickets import MEMORY_WAIT_S
from pillion.errors import PillionError
from pillion.gateway.request.request_machine import RequestState
from pillion.kvstore.client.node_client import CALL_TIMEOUT_S, OPEN_TICKET_TIMEOUT_S

# Events between two checks of the whole cluster.
EVENTS_BETWEEN_LOOKS = 100
# Steps that a sequence may run without a reader: those in flight, and the next one, already planned. Latency of
# messages is added.
STEPS_OF_ORPHANS = 3
ORPHAN_SLACK_S = 0.1
# Limit of a call's wait for memory at a node: as long as its caller, a gateway or decode worker, waits, plus the
# latency of its cancellation.
LONGEST_TICKET_WAIT_S = max(OPEN_TICKET_TIMEOUT_S, MEMORY_WAIT_S) + CALL_TIMEOUT_S


class Checker:
    """Checks the components in ``lives`` while they run; ``runners`` are all requests of all gateways. ``find`` is
    called with each violation.

    ``node_of`` returns a worker's node; ``careful``: check after every event.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        lives: Mapping[str, Life],
        runners: list[Any],
        find: Callable[[str], None],
        node_of: Callable[[str], str],
        step_tokens: int,
        *,
        careful: bool,
    ) -> None:
        self.states: set[int] = set()
        self._loop = loop
        self._lives = lives
        self._runners = runners
        self._find = find
        self._node_of = node_of
        self._step_tokens = step_tokens
        self._between = 1 if careful else EVENTS_BETWEEN_LOOKS
        self._turn = 0
        # By worker: (process, seq_id) of sequences without a reader, and since when.
        self._orphans: dict[str, dict[tuple[int, int], float]] = {}

    def begin(self) -> None:
        self._loop.next_look, self._loop.look = self._loop.events, self._look

    # Checks at each step:

    def watch_step(self, life: Life, process: Process, tokens: int, reads: set[int], writes: set[int]) -> None:
        """Check, at the start and end of a worker's step, that the worker owns the slots that the step reads and
        writes."""
        if tokens > self._step_tokens:
            self._find(f"{life.name}: a step of {tokens} tokens, {self._step_tokens} are allowed")
        if life.process is not process or life.component is None:
            return
        link = life.component.worker.attachment.link
        node = self._lives[self._node_of(life.name)]
        if node.process is not link.point.process or not node.runs:
            # Its KV node is gone, so no other worker can own these slots.
            return
        ledger = node.component.pool.ledger
        own = [holder.leased for holder in ledger.holders.values() if holder.name == life.name]
        if foreign := writes.difference(*own):
            self._find(f"{life.name} writes to slots {sorted(foreign)}, which are not leased to it")
        if read := reads.difference(*own):
            for block in ledger.tree.by_hash.values():
                if block.slot in read and block.ref_count:
                    read.discard(block.slot)
                    if not read:
                        return
            self._find(f"{life.name} reads slots {sorted(read)}, which nobody pins")

    def watch_tokens(self, epoch: int) -> None:
        """Check that the worker of the current process may emit tokens under ``epoch``: its node must not have fenced
        it (I4)."""
        process = PROCESS.get()
        life = self._lives[process.name]
        node = self._lives[self._node_of(life.name)]
        if life.process is not process or life.component is None or not node.runs:
            return
        if node.process is life.component.worker.attachment.link.point.process:
            holder = node.component.pool.ledger.holders.get(epoch)
            if holder is None or holder.fenced:
                self._find(f"{life.name} hands tokens on under epoch {epoch}, which its node has fenced")

    # Checks every few events:

    def _look(self) -> int:
        """Check one component, or all; return the number of the next event to check after."""
        self._turn += 1
        lives = list(self._lives.values())
        for life in lives if self._between == 1 else (lives[self._turn % len(lives)],):
            if life.runs:
                for trouble in (*_books(life), *self._waits(life)):
                    self._find(trouble)
        self.states.add(hash(self._state()))
        return self._loop.events + self._between

    def _waits(self, life: Life) -> Iterator[str]:
        """Yield a finding for each sequence that has run, and each call that has waited, for too long."""
        now = self._loop.time()
        if life.role == "kvnode":
            for waiter in life.component.pool.waiting._by_key.values():
                if now - waiter.asked_s > LONGEST_TICKET_WAIT_S:
                    yield f"{life.name}: a call has waited for memory for {now - waiter.asked_s:.1f} s"
        elif life.is_worker and life.costs is not None and life.process is not None:
            epoch = life.component.worker.epoch
            # A worker begins no step under a finished epoch, so skip its sequences.
            running = () if epoch.over else epoch._steps.scheduler.sequences.items()
            orphans = {
                (life.process.number, seq_id)
                for seq_id, sequence in running
                if seq_id not in epoch.listeners and sequence.state is SequenceState.RUNNING
            }
            paused = life.process.state is ProcessState.PAUSED
            known = self._orphans.setdefault(life.name, {})
            self._orphans[life.name] = since_s = {key: now if paused else known.get(key, now) for key in orphans}
            most_s = STEPS_OF_ORPHANS * life.costs.longest_s + ORPHAN_SLACK_S
            for (_, seq_id), began_s in since_s.items():
                if now - began_s > most_s:
                    yield f"{life.name} has run sequence {seq_id} for {now - began_s:.2f} s, and nobody listens to it"

    def _state(self) -> tuple[Any, ...]:
        """Return the cluster's state without numbers that only grow, to count distinct states."""
        components = tuple(_component_state(life) for life in self._lives.values())
        requests = sorted(
            (machine.state.value, machine.attempt, machine._prefill_open, machine._stream_open, machine.hold is None)
            for runner in self._runners
            if not runner.ended
            for machine in runner._samples.machines
        )
        return components, tuple(requests)

    # Checks when idle:

    def troubles(self) -> list[str]:
        """Return findings: what remains although every request has ended, and inconsistent ledgers."""
        found: list[str] = []
        for life in self._lives.values():
            if not life.runs:
                found.append(f"{life.name} does not run")
                continue
            found += (*_books(life), *_left(life), *(self._leases(life) if life.role == "kvnode" else ()))
        for runner in self._runners:
            open_ = [m.state for m in runner._samples.machines if m.state is not RequestState.DONE]
            if open_ and runner.owner.alive:
                found.append(f"{runner.admitted.request_id} is {open_[0].value} at a gateway that has nobody to tell")
        return found

    def _leases(self, node: Life) -> Iterator[str]:
        """Yield a finding for leased slots that are neither free nor owned by a feature of a worker, and for fenced
        holders."""
        free = {}
        for life in self._lives.values():
            if life.is_worker and life.runs:
                epoch = life.component.worker.epoch
                scheduler = epoch._steps.scheduler
                chains = [chain.owned_slots() for chain in scheduler.side_chains()]
                free[epoch.number] = set().union(scheduler.free_slots.slots, *chains)
        for holder in node.component.pool.ledger.holders.values():
            lost = set(holder.leased) - free.get(holder.epoch, set())
            if lost:
                yield f"{node.name}: slots {sorted(lost)} are leased to {holder.name} and free nowhere"
            if holder.fenced:
                yield f"{node.name}: {holder.name} is fenced still"


def _books(life: Life) -> Iterator[str]:
    """Yield inconsistencies of a component's own accounts."""
    try:
        if life.role == "kvnode":
            life.component.pool.check_integrity()
        elif life.is_worker and not life.component.worker.epoch._steps.in_step:
            life.component.worker.epoch._steps.scheduler.check_integrity()
    except (PillionError, AssertionError) as error:
        yield f"{life.name}: {error}"


def _left(life: Life) -> Iterator[str]:
    """Yield a finding for everything that an idle component still holds."""
    if life.role == "kvnode":
        status = life.component.pool.status()
        for name in ("tickets", "pinned_blocks", "reserved_blocks", "quarantined_blocks", "waiting_tickets"):
            if getattr(status, name):
                yield f"{life.name}: {getattr(status, name)} {name.replace('_', ' ')} are left"
        if life.component.pool.chain_waits:
            yield f"{life.name}: {life.component.pool.chain_waits} calls wait for chains"
    elif life.is_worker:
        epoch = life.component.worker.epoch
        if epoch.over:
            yield f"{life.name} is without an epoch"
        if epoch.listeners:
            yield f"{life.name}: {len(epoch.listeners)} listeners are left"
        if epoch._steps.scheduler.sequences:
            yield f"{life.name}: {len(epoch._steps.scheduler.sequences)} sequences are left"
        if epoch.tickets._in_use:
            yield f"{life.name}: {len(epoch.tickets._in_use)} tickets are in use"
        if epoch.held_back:
            yield f"{life.name}: {epoch.held_back} outcomes are held back"
    else:
        gateway = life.component.gateway
        gateway.admission.check_integrity()
        if gateway.admission.requests or gateway.admission.waiting:
            yield f"{life.name}: {gateway.admission.requests} requests are admitted still"
        if gateway.cluster.load.by_component or gateway.cluster.load.tokens:
            yield f"{life.name}: a load is left: {dict(gateway.cluster.load.by_component)}"


def _component_state(life: Life) -> tuple[Any, ...]:
    process = life.process
    if process is None or life.component is None:
        return (process is not None,)
    paused = process.state is ProcessState.PAUSED
    if life.role == "kvnode":
        ledger = life.component.pool.ledger
        waiting = len(life.component.pool.waiting)
        fenced = sum(holder.fenced for holder in ledger.holders.values())
        return paused, min(waiting, 2), fenced, min(len(ledger.tickets), 4), ledger.unreserved == 0
    if life.is_worker:
        epoch = life.component.worker.epoch
        sequences = epoch._steps.scheduler.sequences.values()
        states = tuple(sorted({sequence.state.value for sequence in sequences}))
        return paused, epoch.over, epoch.held_back > 0, min(len(epoch.listeners), 3), states
    return paused, len(life.component.cluster.view.fenced)
