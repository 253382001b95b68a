"""Holds the gateway's view of the cluster: the registry's last answer, and what its own connections know better (I9).

A worker that its KV node has fenced cannot go on with what runs on it (I4), though its connections stand: a paused
process (SIGSTOP, a frozen container) keeps its sockets, and keepalive would find it after some 40 seconds. The node
finds it after ``heartbeat_timeout_ms`` and names it in its registry record.

Where there are very many workers, one request is planned with a bounded number of them, which take turns. The planner
gets a ClusterSnapshot: the split policy, and the cluster as it is when the request is planned.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction

from msgspec.structs import replace

from pillion._version import PROTOCOL
from pillion.config import parse_split_policy
from pillion.gateway.planning.plan_cost import FetchCost, unmeasured
from pillion.types import WORKERS
from pillion.wire.registry import FOREIGN, ComponentRecord

log = logging.getLogger("pillion.gateway")

# A component whose call just failed is left out for this long; a live one is missed no longer than that.
SUSPECT_S = 2.0
# Time without a heartbeat after which a component counts as standing still; heartbeats come every second.
STILL_MS = 2000


class ClusterView:
    """Keeps records of components by id. ``now`` is monotonic, in seconds.

    A record that vanished stays for ``grace_s``: an emptied Redis forgets live components, which announce themselves
    again within a heartbeat. Where a component is really gone, its broken connection shows that sooner. While the
    registry takes no heartbeats, the gateway holds the records of components that its connections show to live.

    Attributes:
        grace_s: how long a record that vanished stays.
        fenced: workers that the registry names as fenced. A worker that has come back is still named for a moment.
        version: grows with every answer of the registry.
        places: grows when a component comes, goes or moves.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.fenced: frozenset[str] = frozenset()
        self.version = 0
        self.places = 0
        self._records: dict[str, ComponentRecord] = {}
        # These say when each record was taken, and which were taken without their load because they are old.
        self._taken_s: dict[str, float] = {}
        self._outdated: set[str] = set()
        # Begin and end of each component's last time without heartbeats.
        self._still_s: dict[str, tuple[float, float]] = {}
        # Ids stand by role and model, and by node. A dictionary serves as a set that keeps its order.
        self._groups: dict[tuple[str, str], dict[str, None]] = {}
        self._on_node: dict[str, dict[str, None]] = {}
        self._answer: dict[str, ComponentRecord] = {}
        # The records of the last answer that are not used, because their protocol is too far from this gateway's.
        self._foreign: dict[str, ComponentRecord] = {}
        self._answered_s = 0.0
        # These say when records that vanished were last listed, and when records were last held.
        self._vanished: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._suspects: dict[str, float] = {}

    def update(self, records: Sequence[ComponentRecord], now: float) -> frozenset[str]:
        """Takes the registry's answer; while the registry is away there is no answer, and the last view stands. A
        record that is the same object as in the last answer is not looked at again. Returns the workers that are fenced
        and were not fenced in the last answer."""
        answer = {record.component_id: record for record in records}
        for component_id, record in answer.items():
            if self._answer.get(component_id) is record:
                continue
            # Components whose protocol version is at most one away from this gateway's are used; others are ignored.
            if abs(record.protocol - PROTOCOL) <= 1:
                self._take(record, now)
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
        """Keeps known records for ``grace_s`` from now on, whatever the registry says; old records lose their load."""
        self.version += 1
        for component_id in component_ids:
            record = self._records.get(component_id)
            if record is not None:
                self._held[component_id] = now
                if component_id not in self._outdated and self._age_ms(record, now) > self.grace_s * 1000:
                    self._records[component_id] = record.outdated()
                    self._outdated.add(component_id)

    def suspect(self, component_id: str, now: float) -> None:
        """Leaves a component out of plans for SUSPECT_S, because a call to it failed as calls to a dead process do."""
        self._suspects[component_id] = now + SUSPECT_S

    def refused(self, component_id: str) -> None:
        """Notes that a component refused a call, or was not reached. A component that has left the registry is then no
        longer kept for ``grace_s``, unless it is held because the registry takes no heartbeats."""
        if component_id in self._vanished and component_id not in self._held:
            self.version += 1
            self._forget(component_id)

    def trusts(self, component_id: str, now: float) -> bool:
        """Returns whether no call to the component has failed a moment ago."""
        return now >= self._suspects.get(component_id, now)

    def stood_still(self, component_id: str, now: float) -> tuple[float, float] | None:
        """Returns begin and end of the component's last time without heartbeats, which may last; None where it had
        none."""
        return self._still_until(component_id, now) or self._still_s.get(component_id)

    def _still_until(self, component_id: str, end_s: float) -> tuple[float, float] | None:
        record = self._records.get(component_id)
        lasts_ms = 0 if record is None else self._age_ms(record, end_s)
        return (end_s - lasts_ms / 1000, end_s) if lasts_ms >= STILL_MS else None

    def __iter__(self) -> Iterator[ComponentRecord]:
        """Yields the records of all components, in no order."""
        return iter(self._records.values())

    def records(self) -> tuple[ComponentRecord, ...]:
        """Returns the records of all components, by id."""
        return tuple(record for _, record in sorted(self._records.items()))

    def foreign(self) -> tuple[ComponentRecord, ...]:
        """Returns the records that are not used because of their protocol, by id; each says so."""
        return tuple(
            replace(
                record,
                role=FOREIGN,
                trouble=f"it is not used: it speaks protocol {record.protocol}, not {PROTOCOL}",
            )
            for _, record in sorted(self._foreign.items())
        )

    def versions(self) -> Counter[tuple[str, int, bool]]:
        """Counts components by version, protocol, and whether they are used."""
        used = Counter((record.version, record.protocol, True) for record in self)
        return used + Counter((record.version, record.protocol, False) for record in self._foreign.values())

    def of(self, role: str, model: str = "") -> list[ComponentRecord]:
        """Returns the records of a role; of workers, those of a model. Their order stays the same from poll to poll."""
        return [self._records[component_id] for component_id in self._groups.get((role, model), ())]

    def models(self) -> list[str]:
        """Returns the models that decode workers serve."""
        return [model for role, model in self._groups if role == "decode"]

    def node(self, node_id: str) -> ComponentRecord | None:
        """Returns the record of a KV node, whose component id is its node id."""
        record = self._records.get(node_id)
        return record if record is not None and record.role == "kvnode" else None

    def on_node(self, node_id: str) -> list[ComponentRecord]:
        """Returns the records of a KV node and of its workers."""
        return [self._records[component_id] for component_id in self._on_node.get(node_id, ())]

    def aged(self, now: float) -> tuple[ComponentRecord, ...]:
        """Returns all records, by id; the heartbeat's age includes the time since the registry answered."""
        return tuple(self.aged_one(record, now) for record in self.records())

    def aged_one(self, record: ComponentRecord, now: float) -> ComponentRecord:
        """Returns a record of the view with its heartbeat's age as it is now."""
        return replace(record, heartbeat_age_ms=self._age_ms(record, now))

    def _age_ms(self, record: ComponentRecord, now: float) -> int:
        return record.heartbeat_age_ms + int((now - self._taken_s.get(record.component_id, now)) * 1000)

    def _take(self, record: ComponentRecord, now: float) -> None:
        beat_s = now - record.heartbeat_age_ms / 1000
        if (still := self._still_until(record.component_id, beat_s)) is not None:
            self._still_s[record.component_id] = still
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
        self._still_s.pop(component_id, None)
        self._outdated.discard(component_id)
        self._groups[_group(record)].pop(component_id)
        self._on_node[record.node_id].pop(component_id)
        if not self._groups[_group(record)]:
            del self._groups[_group(record)]
        if not self._on_node[record.node_id]:
            del self._on_node[record.node_id]


def _group(record: ComponentRecord) -> tuple[str, str]:
    """Returns the group of a component's record, its role and model. A gateway serves several models, and a KV node
    knows none."""
    return record.role, record.model if record.role in WORKERS else ""


# One request is planned with at most this many workers of a role. Where there are more, half of the chosen ones are
# those whose nodes have most of its prompt; the others take turns, so that several gateways do not all choose the same
# least loaded worker by its heartbeat.
MAX_CANDIDATES = 32
# Where there are more workers, this many may be chosen because they have the request's adapter.
MAX_READY = 8
# Among very many workers, the choices for two requests begin this many workers apart. The number is prime, so that
# every worker is chosen in time.
TURN = 7919


def choose_workers(
    everyone: Sequence[ComponentRecord],
    beside: Callable[[], Iterable[ComponentRecord]],
    spread: int,
    fits: Callable[[ComponentRecord], bool],
    is_ready: Callable[[ComponentRecord], bool] | None = None,
) -> list[ComponentRecord]:
    """Chooses workers of a role that can serve a request: all of them, or of many those ``beside`` most of the prompt,
    those that have its adapter, and those whose turn it is.

    Args:
        everyone: all workers of the role and model, in an order that stays.
        beside: returns the workers on the nodes that have most of the prompt, the best node's first.
        spread: any number that differs from request to request.
        fits: whether a worker can serve the request now.
        is_ready: whether a worker has the request's adapter; None where the request has none.
    """
    if len(everyone) <= MAX_CANDIDATES:
        return list(filter(fits, everyone))
    first = spread * TURN % len(everyone)
    turned = [*everyone[first:], *everyone[:first]]
    ready = filter(is_ready, turned) if is_ready is not None else iter(())
    near = itertools.islice(beside(), MAX_CANDIDATES // 2)
    workers = itertools.chain(near, itertools.islice(ready, MAX_READY), turned)
    chosen: dict[str, ComponentRecord] = {}
    for worker in workers:
        if worker.component_id not in chosen and fits(worker):
            chosen[worker.component_id] = worker
            if len(chosen) == MAX_CANDIDATES:
                break
    return list(chosen.values())


def choose_by_hits(
    choose: Callable[[str, Sequence[str]], list[ComponentRecord]], hits: Mapping[str, int], spread: int
) -> tuple[list[ComponentRecord], list[ComponentRecord], list[str]]:
    """Chooses decode workers, prefill workers on their nodes, and these nodes with those that have cached blocks;
    nothing where no decode worker can serve the request.

    Args:
        choose: returns the workers of a role that can serve the request, those on the given nodes before others
        (:func:`choose_workers`).
        hits: blocks of the prompt on each node, by node id.
        spread: any number that differs from request to request.
    """
    names = sorted(hits)
    first = spread % len(names) if names else 0
    # The nodes that have the most come first; nodes that have equally many blocks take turns.
    best = sorted((*names[first:], *names[:first]), key=lambda node_id: -hits[node_id])
    decodes = choose("decode", best)
    if not decodes:
        return [], [], []
    near = list(dict.fromkeys(one.node_id for one in decodes))
    prefills = choose("prefill", near)
    return decodes, prefills, list(dict.fromkeys((*near, *(one.node_id for one in prefills), *best)))


# Loading an adapter is taken to cost a request this time.
ADAPTER_LOAD_S = 0.1


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """Says how much of a prompt prefill workers compute.

    Attributes:
        name: the value of ``--split-policy``.
        share: share of the whole uncached blocks that prefill workers compute, rounded down to blocks; None where
            predictions decide (:mod:`pillion.gateway.planning.split_decision`).
        most_tokens: the split is at no later token; None: wherever the share puts it.
    """

    name: str
    share: Fraction | None
    most_tokens: int | None = None

    def split_blocks(self, cached_blocks: int, limit_blocks: int, block_size: int) -> int:
        """Returns the number of blocks before the split, in [cached_blocks, limit_blocks]; without a share, that is
        ``limit_blocks``."""
        if self.most_tokens is not None:
            limit_blocks = max(cached_blocks, min(limit_blocks, self.most_tokens // block_size))
        return limit_blocks if self.share is None else cached_blocks + int((limit_blocks - cached_blocks) * self.share)


def parse_policy(text: str) -> SplitPolicy:
    """Returns the policy that ``--split-policy`` names. Raises ConfigError."""
    return SplitPolicy(text, parse_split_policy(text))


# The class is not frozen: RoutePlanner fills in what it remembers, because a copy of it would cost a tenth of a plan.
@dataclass(slots=True, kw_only=True)
class ClusterSnapshot:
    """Holds what the planner knows of a request and of the cluster when it decides.

    Attributes:
        prompt_tokens: the prompt's tokens, N; on a replay, those of prompt and answer so far.
        answered_tokens: how many of these are the answer's.
        hits: blocks that the index believes to be on each node, by node id.
        far_hits: blocks that each node can have with those of a bucket, by node id; none where no bucket has more.
        components: the usable components: nodes, and workers of this request's model and namespace.
        block_size: tokens per block.
        chunk_tokens: most tokens of one chunk.
        sent_load: tokens (prefill) and streams (decode) that gateways have under way, by component id: this one, and
            the others as far as it knows. Heartbeats are up to a second old, and lack these.
        sent_tokens: prompt tokens that gateways have sent to each component and that are not computed yet, by component
            id.
        fetch_costs: what a fetch from one node to another costs, by their ids; None for a pair never measured.
        fetch_block_s: seconds that a block takes to come between such a pair; 0.0 if no pair was measured.
        bucket_block_s: seconds that a block takes to come from a bucket; 0.0 if that was never measured.
        index_available: whether the index could be asked for ``hits``.
        avoid: components that failed this request before; used only where there is no other.
        spread: any number that differs from request to request; it settles ties.
        unscored_from: the first position of the prompt whose log probability is asked: the decode worker computes it
            and all after it, whatever is cached. None: no log probability is asked.
        adapter: digest of the request's adapter; "" for the model alone.
        own_adapters: workers that this gateway has lately sent requests with this adapter, by component id.
        state_pages, working_pages: slots of a state, and of those of a running sequence; 0 for a model without them.
        known_blocks: blocks of the prompt that some node has, with or without a state after them; 0 for a model without
            states.
        text_workers: prefill workers that may compute the whole request, by component id, because it ends with a
            vector; none where it generates.
    """

    model: str
    prompt_tokens: int
    hits: Mapping[str, int]
    components: Sequence[ComponentRecord]
    policy: SplitPolicy
    block_size: int
    chunk_tokens: int
    answered_tokens: int = 0
    far_hits: Mapping[str, int] = field(default_factory=dict)
    sent_load: Mapping[str, int] = field(default_factory=dict)
    sent_tokens: Mapping[str, int] = field(default_factory=dict)
    fetch_costs: Callable[[str, str], FetchCost | None] = unmeasured
    fetch_block_s: float = 0.0
    bucket_block_s: float = 0.0
    index_available: bool = True
    avoid: frozenset[str] = frozenset()
    spread: int = 0
    unscored_from: int | None = None
    adapter: str = ""
    own_adapters: Set[str] = frozenset()
    state_pages: int = 0
    working_pages: int = 0
    known_blocks: int = 0
    text_workers: Set[str] = frozenset()

    @property
    def limit_blocks(self) -> int:
        """Gives the largest number of blocks that may be found in a cache, or left to a prefill worker, because nobody
        needs their logits."""
        last = self.prompt_tokens - 1 if self.unscored_from is None else self.unscored_from
        return last // self.block_size

    def live_nodes(self) -> frozenset[str]:
        """Returns the KV nodes that did not fail this request."""
        return frozenset(one.node_id for one in self.components if one.role == "kvnode") - self.avoid

    def adapter_wait_s(self, component: ComponentRecord) -> float:
        """Gives roughly how long a request waits for its adapter on a worker: it is longer where sequences wait for
        other adapters there."""
        if not self.adapter or self.adapter in component.adapters or component.component_id in self.own_adapters:
            return 0.0
        return ADAPTER_LOAD_S * (1 + component.adapter_waits)

    def prefill_workers(self, node_ids: Set[str]) -> list[ComponentRecord]:
        """Returns the prefill workers on these nodes that did not fail this request."""
        prefills = (one for one in self.components if one.role == "prefill" and one.node_id in node_ids)
        return [one for one in prefills if one.component_id not in self.avoid]
