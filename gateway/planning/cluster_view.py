"""The gateway's view of the cluster: the registry's last answer, and what its own connections know better (I9).

A worker that its KV node has fenced cannot go on with what runs on it (I4), though its connections stand: a paused
process (SIGSTOP, a frozen container) keeps its sockets, and keepalive would find it after some 40 seconds. The node
finds it after ``heartbeat_timeout_ms`` and names it in its registry record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.wire.registry import ComponentRecord

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
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._records: dict[str, tuple[ComponentRecord, float]] = {}
        self._held: dict[str, float] = {}
        self._suspects: dict[str, float] = {}
        self.fenced: frozenset[str] = frozenset()

    def update(self, records: Sequence[ComponentRecord], now: float) -> frozenset[str]:
        """Takes the registry's answer; while the registry is away there is none, and the last view stands. Returns the
        workers that are fenced and were not fenced in the last answer."""
        oldest_ms = self.grace_s * 1000
        records = [record if record.heartbeat_age_ms <= oldest_ms else record.outdated() for record in records]
        for record in records:
            # The rule for version skew: a neighbour in protocol is a peer, others are invisible.
            if abs(record.protocol - PROTOCOL) <= 1:
                self._records[record.component_id] = (record, now)
        named = {record.component_id for record in records}
        self._records = {
            component_id: (record, seen)
            for component_id, (record, seen) in self._records.items()
            if component_id in named or now - max(seen, self._held.get(component_id, seen)) <= self.grace_s
        }
        self._held = {component_id: held for component_id, held in self._held.items() if component_id in self._records}
        self._suspects = {component_id: until for component_id, until in self._suspects.items() if now < until}
        before = self.fenced
        self.fenced = frozenset(component_id for record in records for component_id in record.fenced_components)
        return self.fenced - before

    def hold(self, component_ids: Iterable[str], now: float) -> None:
        """Keeps known records for ``grace_s`` from now on, whatever the registry says."""
        self._held.update(dict.fromkeys(component_ids, now))

    def suspect(self, component_id: str, now: float) -> None:
        """Leaves a component out for SUSPECT_S: a call to it failed as calls to a dead process do."""
        self._suspects[component_id] = now + SUSPECT_S

    def records(self) -> tuple[ComponentRecord, ...]:
        """All records, by id."""
        return tuple(record for _, (record, _) in sorted(self._records.items()))

    def trusted(self, now: float) -> tuple[ComponentRecord, ...]:
        """All records but those of suspects, by id."""
        return tuple(r for r in self.records() if now >= self._suspects.get(r.component_id, now))

    def aged(self, now: float) -> tuple[ComponentRecord, ...]:
        """All records, by id; the heartbeat's age includes the time since the registry answered."""
        return tuple(
            replace(record, heartbeat_age_ms=record.heartbeat_age_ms + int((now - seen) * 1000))
            for _, (record, seen) in sorted(self._records.items())
        )
