"""The gateway's view of the cluster: the registry's last answer, and what its own connections know better (I9).

A worker that its KV node has fenced cannot go on with what runs on it (I4), though its connections stand: a paused
process (SIGSTOP, a frozen container) keeps its sockets, and keepalive would find it after some 40 seconds. The node
finds it after ``heartbeat_timeout_ms`` and names it in its registry record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.types import WORKERS
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

# A component whose call just failed is left out for so long; a live one is missed no longer than that.
SUSPECT_S = 2.0


class ClusterView:
    """Records of components by id. ``now`` is monotonic, in seconds.

    A record that vanished stays for ``grace_s``: an emptied Redis forgets live components, which announce themselves
    again within a heartbeat. A component that is really gone is known by its broken connection before that. While the
    registry takes no heartbeats, the gateway holds the records of components that its connections show to live.

    Attributes:
        grace_s: how long that is.
        fenced: workers that the registry names as fenced. One that has come back is named a moment too long.
        version: grows with every answer of the registry.
        places: grows when a component comes, goes or moves.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.fenced: frozenset[str] = frozenset()
        self.version = 0
        self.places = 0
        self._records: dict[str, ComponentRecord] = {}
        # When each was taken, and those that were taken without their load because they are old.
        self._taken_s: dict[str, float] = {}
        self._outdated: set[str] = set()
        # Ids by role and model, and by node: a dictionary is a set that keeps its order.
        self._groups: dict[tuple[str, str], dict[str, None]] = {}
        self._on_node: dict[str, dict[str, None]] = {}
        self._answer: dict[str, ComponentRecord] = {}
        self._answered_s = 0.0
        # When records that vanished were last listed, and when records were last held.
        self._vanished: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._suspects: dict[str, float] = {}

    def update(self, records: Sequence[ComponentRecord], now: float) -> frozenset[str]:
        """Takes the registry's answer; while the registry is away there is none, and the last view stands. A record
        that is the same object as in the last answer is not looked at again. Returns the workers that are fenced and
        were not fenced in the last answer."""
        answer = {record.component_id: record for record in records}
        for component_id, record in answer.items():
            if self._answer.get(component_id) is record:
                continue
            # The rule for version skew: a neighbour in protocol is a peer, others are invisible.
            if abs(record.protocol - PROTOCOL) <= 1:
                self._take(record, now)
            elif component_id not in self._answer:
                log.warning("%s is not used: it speaks protocol %d, not %d", component_id, record.protocol, PROTOCOL)
        for component_id in self._records.keys() - answer.keys():
            listed_s = self._vanished.setdefault(component_id, self._answered_s)
            if now - max(listed_s, self._held.get(component_id, listed_s)) > self.grace_s:
                self._forget(component_id)
        self._vanished = {name: s for name, s in self._vanished.items() if name in self._records and name not in answer}
        self._held = {name: s for name, s in self._held.items() if name in self._records}
        self._suspects = {component_id: until for component_id, until in self._suspects.items() if now < until}
        self._answer, self._answered_s, self.version = answer, now, self.version + 1
        nodes = (node for node in self.of("kvnode") if node.component_id in answer)
        before, self.fenced = self.fenced, frozenset(name for node in nodes for name in node.fenced_components)
        return self.fenced - before

    def hold(self, component_ids: Iterable[str], now: float) -> None:
        """Keeps known records for ``grace_s`` from now on, whatever the registry says; old ones without their load."""
        self.version += 1
        for component_id in component_ids:
            record = self._records.get(component_id)
            if record is not None:
                self._held[component_id] = now
                if component_id not in self._outdated and self._age_ms(record, now) > self.grace_s * 1000:
                    self._records[component_id] = record.outdated()
                    self._outdated.add(component_id)

    def suspect(self, component_id: str, now: float) -> None:
        """Leaves a component out for SUSPECT_S: a call to it failed as calls to a dead process do."""
        self._suspects[component_id] = now + SUSPECT_S

    def refused(self, component_id: str) -> None:
        """A call to a component was refused, or did not reach it. One that has left the registry is not kept for the
        grace any more; one that is held, because the registry takes no heartbeats, is."""
        if component_id in self._vanished and component_id not in self._held:
            self.version += 1
            self._forget(component_id)

    def trusts(self, component_id: str, now: float) -> bool:
        """Whether no call to the component has failed a moment ago."""
        return now >= self._suspects.get(component_id, now)

    def __iter__(self) -> Iterator[ComponentRecord]:
        """All records, in no order."""
        return iter(self._records.values())

    def records(self) -> tuple[ComponentRecord, ...]:
        """All records, by id."""
        return tuple(record for _, record in sorted(self._records.items()))

    def of(self, role: str, model: str = "") -> list[ComponentRecord]:
        """The records of a role; of workers, those of a model. They keep their order from look to look."""
        return [self._records[component_id] for component_id in self._groups.get((role, model), ())]

    def models(self) -> list[str]:
        """Models that decode workers serve."""
        return [model for role, model in self._groups if role == "decode"]

    def node(self, node_id: str) -> ComponentRecord | None:
        """The record of a KV node, whose component id is its node id."""
        record = self._records.get(node_id)
        return record if record is not None and record.role == "kvnode" else None

    def on_node(self, node_id: str) -> list[ComponentRecord]:
        """The records of a KV node and of its workers."""
        return [self._records[component_id] for component_id in self._on_node.get(node_id, ())]

    def aged(self, now: float) -> tuple[ComponentRecord, ...]:
        """All records, by id; the heartbeat's age includes the time since the registry answered."""
        return tuple(self.aged_one(record, now) for record in self.records())

    def aged_one(self, record: ComponentRecord, now: float) -> ComponentRecord:
        """A record of the view with its heartbeat's age as it is now."""
        return replace(record, heartbeat_age_ms=self._age_ms(record, now))

    def _age_ms(self, record: ComponentRecord, now: float) -> int:
        return record.heartbeat_age_ms + int((now - self._taken_s.get(record.component_id, now)) * 1000)

    def _take(self, record: ComponentRecord, now: float) -> None:
        old = record.heartbeat_age_ms > self.grace_s * 1000
        self._put(record.outdated() if old else record)
        self._taken_s[record.component_id] = now
        if old:
            self._outdated.add(record.component_id)
        elif self._outdated:
            self._outdated.discard(record.component_id)

    def _put(self, record: ComponentRecord) -> None:
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
            self.places += 1
        self._records[component_id] = record

    def _forget(self, component_id: str) -> None:
        record = self._records.pop(component_id, None)
        if record is None:
            return
        self.places += 1
        self._taken_s.pop(component_id, None)
        self._outdated.discard(component_id)
        self._groups[_group(record)].pop(component_id)
        self._on_node[record.node_id].pop(component_id)
        if not self._groups[_group(record)]:
            del self._groups[_group(record)]
        if not self._on_node[record.node_id]:
            del self._on_node[record.node_id]


def _group(record: ComponentRecord) -> tuple[str, str]:
    """A gateway serves several models, and a KV node knows none."""
    return record.role, record.model if record.role in WORKERS else ""
