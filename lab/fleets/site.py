"""State of a simulated fleet shared by all gateways: live workers and nodes, and the index over the nodes (I9)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lab.fleets.clock import Clock
from lab.fleets.prefix_store import NodeStore, PrefixIndex
from lab.fleets.sim_worker import SimWorker
from pillion.gateway.links.load_exchange import OwnLoad
from pillion.kvstore.index.shared_loads import UnderWay
from pillion.wire.registry import ComponentRecord


@dataclass(frozen=True, slots=True)
class Roster:
    """The registry's workers since ``changed_s``, by role and by node."""

    changed_s: float
    of_role: dict[str, list[ComponentRecord]]
    on_node: dict[str, list[ComponentRecord]]


class ReportedLoads:
    """The load that each gateway has reported per component by Redis (SharedLoads)."""

    def __init__(self) -> None:
        self._loads: dict[tuple[int, str], UnderWay] = {}
        self._amounts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def record(self, gateway: int, component_id: str, own: OwnLoad) -> None:
        """Record a gateway's load on a component."""
        before, now = self._loads.get((gateway, component_id), UnderWay(0, 0)), own.of(component_id)
        self._amounts[component_id] += now.amount - before.amount
        self._tokens[component_id] += now.tokens - before.tokens
        self._loads[gateway, component_id] = now

    def others(self, gateway: int, component_id: str) -> UnderWay:
        """Return the load of all other gateways on a component."""
        mine = self._loads.get((gateway, component_id), UnderWay(0, 0))
        return UnderWay(self._amounts[component_id] - mine.amount, self._tokens[component_id] - mine.tokens)


@dataclass(slots=True, kw_only=True)
class FleetSite:
    """The part of a fleet that gateways share, changed only by the world (:mod:`lab.fleets.world`).

    Attributes:
        block_size: tokens of a KV block.
        call_s: seconds of a call between two components.
        block_s: seconds to transfer a block between nodes, after a call.
        sharing: gateways report their load to each other.
        rosters: the registry now and a moment ago, oldest first; a gateway sees that of its last look.
        running: requests by gateway.
    """

    clock: Clock
    block_size: int
    call_s: float
    block_s: float
    sharing: bool
    index: PrefixIndex = field(default_factory=PrefixIndex)
    reported: ReportedLoads = field(default_factory=ReportedLoads)
    workers: dict[str, SimWorker] = field(default_factory=dict)
    stores: dict[str, NodeStore] = field(default_factory=dict)
    nodes: dict[str, ComponentRecord] = field(default_factory=dict)
    rosters: list[Roster] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)

    def roster(self, seen_s: float) -> Roster:
        """Return the registry's workers at ``seen_s``."""
        return next((one for one in reversed(self.rosters) if one.changed_s <= seen_s), self.rosters[0])

    def list_workers(self, records: list[ComponentRecord], keep_s: float) -> None:
        """Set the registry's workers, and drop rosters that ended more than ``keep_s`` ago."""
        of_role: dict[str, list[ComponentRecord]] = {"prefill": [], "decode": []}
        on_node: dict[str, list[ComponentRecord]] = {}
        for record in records:
            of_role[record.role].append(record)
            on_node.setdefault(record.node_id, []).append(record)
        now = self.clock.now
        self.rosters.append(Roster(now, of_role, on_node))
        while len(self.rosters) > 1 and self.rosters[1].changed_s < now - keep_s:
            del self.rosters[0]
