"""The gateway's view of the cluster: the registry's last answer, corrected by its own connections. Sans-IO (I9).

A worker that its KV node has fenced cannot continue its work (I4), though its connections stay open: a paused process
(SIGSTOP, a frozen container) keeps its sockets, which keepalive would detect after about 40 seconds. The node detects
it after ``heartbeat_timeout_ms`` and lists it in its registry record.

In a large cluster each request is planned with a limited number of workers, chosen in rotation.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.types import WORKERS
from pillion.wire.registry import FOREIGN, ComponentRecord

log = logging.getLogger("pillion.gateway")

SUSPECT_S = 2.0
# Age of a heartbeat above which a component counts as stalled; heartbeats come every second.
STALL_MS = 2000


class ClusterView:
    """Component records by id. Times are monotonic seconds.

    A record that vanished stays for ``grace_s``: after a flush of Redis, live components register again within a
    heartbeat, and broken connections reveal dead ones sooner. While the registry accepts no heartbeats, the gateway
    keeps the records of components with open connections.

    Attributes:
        grace_s: time for which a vanished record stays.
        fenced: workers that the registry lists as fenced; a worker that has returned stays listed for a moment.
        version: grows with every answer of the registry.
        topology_version: grows when a component appears, disappears or moves.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.fenced: frozenset[str] = frozenset()
        self.version = 0
        self.topology_version = 0
        self._records: dict[str, ComponentRecord] = {}
        self._received_s: dict[str, float] = {}
        self._outdated: set[str] = set()
        self._stalls: dict[str, tuple[float, float]] = {}
        # Ids by role and model, and by node. Dictionaries serve as ordered sets.
        self._groups: dict[tuple[str, str], dict[str, None]] = {}
        self._on_node: dict[str, dict[str, None]] = {}
        self._answer: dict[str, ComponentRecord] = {}
        self._foreign: dict[str, ComponentRecord] = {}
        self._answered_s = 0.0
        self._vanished: dict[str, float] = {}
        self._kept_s: dict[str, float] = {}
        self._suspects: dict[str, float] = {}

    def update(self, records: Sequence[ComponentRecord], now: float) -> frozenset[str]:
        """Apply the registry's answer, and return the workers that are newly fenced. A record that is the same object
        as in the last answer is skipped."""
        answer = {record.component_id: record for record in records}
        for component_id, record in answer.items():
            if self._answer.get(component_id) is record:
                continue
            if abs(record.protocol - PROTOCOL) <= 1:
                self._apply(record, now)
                self._foreign.pop(component_id, None)
                continue
            self._foreign[component_id] = record
            if component_id in self._records:
                self._forget(component_id)
            if component_id not in self._answer:
                log.warning("%s is not used: it speaks protocol %d, not %d", component_id, record.protocol, PROTOCOL)
        for component_id in self._foreign.keys() - answer.keys():
            del self._foreign[component_id]
        for component_id in self._records.keys() - answer.keys():
            listed_s = self._vanished.setdefault(component_id, self._answered_s)
            if now - max(listed_s, self._kept_s.get(component_id, listed_s)) > self.grace_s:
                self._forget(component_id)
        self._vanished = {name: s for name, s in self._vanished.items() if name in self._records and name not in answer}
        self._kept_s = {name: s for name, s in self._kept_s.items() if name in self._records}
        self._suspects = {component_id: until for component_id, until in self._suspects.items() if now < until}
        self._answer, self._answered_s, self.version = answer, now, self.version + 1
        nodes = (node for node in self.of("kvnode") if node.component_id in answer)
        before, self.fenced = self.fenced, frozenset(name for node in nodes for name in node.fenced_components)
        return self.fenced - before

    def keep(self, component_ids: Iterable[str], now: float) -> None:
        """Keep known records for ``grace_s`` from now on, whatever the registry says. Stale ones, except those of
        gateways, are reset to idle."""
        self.version += 1
        for component_id in component_ids:
            record = self._records.get(component_id)
            if record is not None:
                self._kept_s[component_id] = now
                if component_id not in self._outdated and self._age_ms(record, now) > self.grace_s * 1000:
                    self._records[component_id] = record.outdated()
                    self._outdated.add(component_id)

    def suspect(self, component_id: str, now: float) -> None:
        """Exclude a component from plans for SUSPECT_S, after a call failed as if it were dead."""
        self._suspects[component_id] = now + SUSPECT_S

    def note_refusal(self, component_id: str) -> None:
        """Record that a component refused a call or was unreachable. If it has left the registry, its record is dropped
        at once, unless :meth:`keep` keeps it."""
        if component_id in self._vanished and component_id not in self._kept_s:
            self.version += 1
            self._forget(component_id)

    def trusts(self, component_id: str, now: float) -> bool:
        """Return whether no call to the component has failed recently."""
        return now >= self._suspects.get(component_id, now)

    def last_stall(self, component_id: str, now: float) -> tuple[float, float] | None:
        """Return begin and end of the component's current or last stall; None if it had none."""
        return self._stall_until(component_id, now) or self._stalls.get(component_id)

    def _stall_until(self, component_id: str, end_s: float) -> tuple[float, float] | None:
        record = self._records.get(component_id)
        lasts_ms = 0 if record is None else self._age_ms(record, end_s)
        return (end_s - lasts_ms / 1000, end_s) if lasts_ms >= STALL_MS else None

    def __iter__(self) -> Iterator[ComponentRecord]:
        """Yield the records of all components, unordered."""
        return iter(self._records.values())

    def records(self) -> tuple[ComponentRecord, ...]:
        """Return the records of all components, by id."""
        return tuple(record for _, record in sorted(self._records.items()))

    def foreign(self) -> tuple[ComponentRecord, ...]:
        """Return the records with an incompatible protocol, by id, marked as such."""
        return tuple(
            replace(
                record,
                role=FOREIGN,
                trouble=f"it is not used: it speaks protocol {record.protocol}, not {PROTOCOL}",
            )
            for _, record in sorted(self._foreign.items())
        )

    def versions(self) -> Counter[tuple[str, int, bool]]:
        """Count components by version, protocol, and whether they are used."""
        used = Counter((record.version, record.protocol, True) for record in self)
        return used + Counter((record.version, record.protocol, False) for record in self._foreign.values())

    def of(self, role: str, model: str = "") -> list[ComponentRecord]:
        """Return the records of a role; of workers, those of a model. The order is stable."""
        return [self._records[component_id] for component_id in self._groups.get((role, model), ())]

    def models(self) -> list[str]:
        """Return the models that decode workers serve."""
        return [model for role, model in self._groups if role == "decode"]

    def node(self, node_id: str) -> ComponentRecord | None:
        """Return the record of a KV node, whose component id is its node id."""
        record = self._records.get(node_id)
        return record if record is not None and record.role == "kvnode" else None

    def on_node(self, node_id: str) -> list[ComponentRecord]:
        """Return the records of a KV node and of its workers."""
        return [self._records[component_id] for component_id in self._on_node.get(node_id, ())]

    def aged(self, now: float) -> tuple[ComponentRecord, ...]:
        """Return all records by id, with the current age of their heartbeats."""
        return tuple(self.aged_one(record, now) for record in self.records())

    def aged_one(self, record: ComponentRecord, now: float) -> ComponentRecord:
        """Return a record with the current age of its heartbeat."""
        return replace(record, heartbeat_age_ms=self._age_ms(record, now))

    def _age_ms(self, record: ComponentRecord, now: float) -> int:
        return record.heartbeat_age_ms + int((now - self._received_s.get(record.component_id, now)) * 1000)

    def _apply(self, record: ComponentRecord, now: float) -> None:
        beat_s = now - record.heartbeat_age_ms / 1000
        if (stall := self._stall_until(record.component_id, beat_s)) is not None:
            self._stalls[record.component_id] = stall
        old = record.heartbeat_age_ms > self.grace_s * 1000
        self._store(record.outdated() if old else record)
        self._received_s[record.component_id] = now
        if old:
            self._outdated.add(record.component_id)
        elif self._outdated:
            self._outdated.discard(record.component_id)

    def _store(self, record: ComponentRecord) -> None:
        component_id = record.component_id
        old = self._records.get(component_id)
        if old is None or not (
            old.address == record.address
            and old.node_id == record.node_id
            and old.model == record.model
            and old.role == record.role
        ):
            self._forget(component_id)
            self._groups.setdefault(_group(record), {})[component_id] = None
            self._on_node.setdefault(record.node_id, {})[component_id] = None
            self.topology_version += 1
        self._records[component_id] = record

    def _forget(self, component_id: str) -> None:
        record = self._records.pop(component_id, None)
        if record is None:
            return
        self.topology_version += 1
        self._received_s.pop(component_id, None)
        self._stalls.pop(component_id, None)
        self._outdated.discard(component_id)
        self._groups[_group(record)].pop(component_id)
        self._on_node[record.node_id].pop(component_id)
        if not self._groups[_group(record)]:
            del self._groups[_group(record)]
        if not self._on_node[record.node_id]:
            del self._on_node[record.node_id]


def _group(record: ComponentRecord) -> tuple[str, str]:
    """Return a record's role and model. KV nodes have no model."""
    return record.role, record.model if record.role in WORKERS else ""


# Max workers per role for planning one request. If there are more, half of them are chosen by cached prefix. The others
# rotate, so that gateways do not all choose the worker that is least loaded by the same heartbeat.
MAX_CANDIDATES = 32
# Max of these chosen because they have the request's adapter.
MAX_READY = 8
# Rotation between consecutive requests; a prime, so that every worker gets its turn.
ROTATION_STEP = 7919


def choose_workers(
    workers: Sequence[ComponentRecord],
    workers_near_prefix: Callable[[], Iterable[ComponentRecord]],
    spread: int,
    fits: Callable[[ComponentRecord], bool],
    is_ready: Callable[[ComponentRecord], bool] | None = None,
) -> list[ComponentRecord]:
    """Choose workers of a role that can serve a request. Of more than MAX_CANDIDATES, these are workers whose node has
    a long prefix of the prompt, then workers with the request's adapter, then others in rotation.

    Args:
        workers: all workers of the role and model, in a stable order.
        workers_near_prefix: returns the workers on nodes with a prefix of the prompt, longest prefix first.
        spread: a number that differs between requests.
        fits: returns whether a worker can serve the request now.
        is_ready: returns whether a worker has the request's adapter; None if the request has none.
    """
    if len(workers) <= MAX_CANDIDATES:
        return list(filter(fits, workers))
    first = spread * ROTATION_STEP % len(workers)
    rotated = [*workers[first:], *workers[:first]]
    ready = filter(is_ready, rotated) if is_ready is not None else iter(())
    near = itertools.islice(workers_near_prefix(), MAX_CANDIDATES // 2)
    ordered = itertools.chain(near, itertools.islice(ready, MAX_READY), rotated)
    chosen: dict[str, ComponentRecord] = {}
    for worker in ordered:
        if worker.component_id not in chosen and fits(worker):
            chosen[worker.component_id] = worker
            if len(chosen) == MAX_CANDIDATES:
                break
    return list(chosen.values())


def choose_by_hits(
    choose: Callable[[str, Sequence[str]], list[ComponentRecord]], hits: Mapping[str, int], spread: int
) -> tuple[list[ComponentRecord], list[ComponentRecord], list[str]]:
    """Return decode workers and prefill workers that can serve a request, and the ids of their nodes and of all nodes
    with cached blocks. All three are empty if no decode worker can serve the request.

    Args:
        choose: returns the workers of a role that can serve the request, those on the given nodes first
            (:func:`choose_workers`).
        hits: cached blocks of the prompt on each node, by node id.
        spread: a number that differs between requests.
    """
    names = sorted(hits)
    first = spread % len(names) if names else 0
    best = sorted((*names[first:], *names[:first]), key=lambda node_id: -hits[node_id])
    decodes = choose("decode", best)
    if not decodes:
        return [], [], []
    near = list(dict.fromkeys(one.node_id for one in decodes))
    prefills = choose("prefill", near)
    return decodes, prefills, list(dict.fromkeys((*near, *(one.node_id for one in prefills), *best)))
