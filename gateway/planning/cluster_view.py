"""The gateway's picture of the cluster: the registry's last word, and what its own connections know better (I9)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.wire.registry import ComponentRecord

# A part whose call just failed is left out for so long; a live one is missed no longer than that.
SUSPECT_S = 2.0


class ClusterView:
    """Parts by id. ``now`` is monotonic, in seconds.

    A record that vanished stays for ``grace_s``: an emptied Redis forgets parts that live, and they announce themselves
    again within a heartbeat. A part that is really gone is known by its broken connection before that.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._records: dict[str, tuple[ComponentRecord, float]] = {}
        self._suspects: dict[str, float] = {}

    def update(self, records: Sequence[ComponentRecord], now: float) -> None:
        """The registry's answer. Not called while the registry is away: the last view stands."""
        for record in records:
            # The rule for version skew: a neighbour in protocol is a peer, others are invisible.
            if abs(record.protocol - PROTOCOL) <= 1:
                self._records[record.component_id] = (record, now)
        named = {record.component_id for record in records}
        self._records = {
            component_id: (record, seen)
            for component_id, (record, seen) in self._records.items()
            if component_id in named or now - seen <= self._grace_s
        }
        self._suspects = {component_id: until for component_id, until in self._suspects.items() if now < until}

    def suspect(self, component_id: str, now: float) -> None:
        """A call to it failed as calls to the dead do."""
        self._suspects[component_id] = now + SUSPECT_S

    def records(self) -> tuple[ComponentRecord, ...]:
        """Everything known, by id."""
        return tuple(record for _, (record, _) in sorted(self._records.items()))

    def trusted(self, now: float) -> tuple[ComponentRecord, ...]:
        """What is known, without the suspects."""
        return tuple(r for r in self.records() if now >= self._suspects.get(r.component_id, now))

    def aged(self, now: float) -> tuple[ComponentRecord, ...]:
        """Everything known; the heartbeat's age includes the time since the registry told it."""
        return tuple(
            replace(record, heartbeat_age_ms=record.heartbeat_age_ms + int((now - seen) * 1000))
            for _, (record, seen) in sorted(self._records.items())
        )
