"""Holds the parts of a simulated fleet that all gateways share: the workers and nodes that live, and the index over the
nodes (I9).
"""

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
    """Lists the workers that the registry has listed since ``changed_s``: by role, and by node."""

    changed_s: float
    of_role: dict[str, list[ComponentRecord]]
    on_node: dict[str, list[ComponentRecord]]


class TalkOfGateways:
    """The exchange of gateways by Redis: the load that each has under way on each component
    (SharedLoads)."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, str], UnderWay] = {}
        self._amounts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def tell(self, gateway: int, component_id: str, own: OwnLoad) -> None:
        """Note the load that a gateway says that it has under way on a component."""
        before, now = self._told.get((gateway, component_id), UnderWay(0, 0)), own.of(component_id)
        self._amounts[component_id] += now.amount - before.amount
        self._tokens[component_id] += now.tokens - before.tokens
        self._told[gateway, component_id] = now

    def others(self, gateway: int, component_id: str) -> UnderWay:
        """Return the load that the other gateways have said that they have under way on a component."""
        mine = self._told.get((gateway, component_id), UnderWay(0, 0))
        return UnderWay(self._amounts[component_id] - mine.amount, self._tokens[component_id] - mine.tokens)


@dataclass(slots=True, kw_only=True)
class FleetSite:
    """The part of a fleet that gateways share. Only the world (:mod:`lab.fleets.world`) changes it.

    Attributes:
        block_size: tokens of a KV block.
        call_s: seconds of a call between two components.
        block_s: seconds that a block takes from one node to another, after a call.
        sharing: whether gateways tell each other what they have under way.
        rosters: of now and of a moment ago, the oldest first; a gateway sees that of its last look at the registry.
        running: requests in each gateway.
    """

    clock: Clock
    block_size: int
    call_s: float
    block_s: float
    sharing: bool
    index: PrefixIndex = field(default_factory=PrefixIndex)
    talk: TalkOfGateways = field(default_factory=TalkOfGateways)
    workers: dict[str, SimWorker] = field(default_factory=dict)
    stores: dict[str, NodeStore] = field(default_factory=dict)
    nodes: dict[str, ComponentRecord] = field(default_factory=dict)
    rosters: list[Roster] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)

    def roster(self, seen_s: float) -> Roster:
        """Return the workers that the registry listed at the time ``seen_s``."""
        return next((one for one in reversed(self.rosters) if one.changed_s <= seen_s), self.rosters[0])

    def list_workers(self, records: list[ComponentRecord], keep_s: float) -> None:
        """Make the registry list these workers from now on, and forgets what it listed longer ago than ``keep_s``."""
        of_role: dict[str, list[ComponentRecord]] = {"prefill": [], "decode": []}
        on_node: dict[str, list[ComponentRecord]] = {}
        for record in records:
            of_role[record.role].append(record)
            on_node.setdefault(record.node_id, []).append(record)
        now = self.clock.now
        self.rosters.append(Roster(now, of_role, on_node))
        while len(self.rosters) > 1 and self.rosters[1].changed_s < now - keep_s:
            del self.rosters[0]
