"""The gateway's view of the cluster: the registry's last answer, corrected by its own connections. Sans-IO (I9).

A worker that its KV node has fenced cannot continue its work (I4), though its connections stay open: a paused process
(SIGSTOP, a frozen container) keeps its sockets, which keepalive would detect after about 40 seconds. The node detects
it after ``heartbeat_timeout_ms`` and lists it in its registry record.

In a large cluster each request is planned with a limited number of workers, chosen in turn. The planner gets a
ClusterSnapshot: the split policy, and the cluster at the time of planning.
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

SUSPECT_S = 2.0
# Age of a heartbeat above which a component counts as stalled; heartbeats come every second.
STILL_MS = 2000


class ClusterView:
    """Component records by id. Times are monotonic seconds.

    A record that vanished stays for ``grace_s``: after a flush of Redis, live components register again within a
    heartbeat, and broken connections reveal dead ones sooner. While the registry takes no heartbeats, the gateway holds
    the records of components with open connections.

    Attributes:
        grace_s: time for which a vanished record stays.
        fenced: workers that the registry lists as fenced. One that has come back stays listed for a moment.
        version: grows with every answer of the registry.
        places: grows when a component appears, disappears or moves.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.fenced: frozenset[str] = frozenset()
        self.version = 0
        self.places = 0
        self._records: dict[str, ComponentRecord] = {}
        self._taken_s: dict[str, float] = {}
        self._outdated: set[str] = set()
        self._still_s: dict[str, tuple[float, float]] = {}
        # Ids by role and model, and by node. Dictionaries serve as ordered sets.
        self._groups: dict[tuple[str, str], dict[str, None]] = {}
        self._on_node: dict[str, dict[str, None]] = {}
        self._answer: dict[str, ComponentRecord] = {}
        self._foreign: dict[str, ComponentRecord] = {}
        self._answered_s = 0.0
        self._vanished: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._suspects: dict[str, float] = {}

    def update(self, records: Sequence[ComponentRecord], now: float) -> frozenset[str]:
        """Apply the registry's answer, and return the workers that are newly fenced. A record that is the same object
        as in the last answer is skipped."""
        answer = {record.component_id: record for record in records}
        for component_id, record in answer.items():
            if self._answer.get(component_id) is record:
                continue
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
        """Keep known records for ``grace_s`` from now on, whatever the registry says. Stale ones, except those of
        gateways, are reset to idle."""
        self.version += 1
        for component_id in component_ids:
            record = self._records.get(component_id)
            if record is not None:
                self._held[component_id] = now
                if component_id not in self._outdated and self._age_ms(record, now) > self.grace_s * 1000:
                    self._records[component_id] = record.outdated()
                    self._outdated.add(component_id)

    def suspect(self, component_id: str, now: float) -> None:
        """Exclude a component from plans for SUSPECT_S, after a call failed as if it were dead."""
        self._suspects[component_id] = now + SUSPECT_S

    def refused(self, component_id: str) -> None:
        """Record that a component refused a call or was unreachable. If it has left the registry, its record is dropped
        at once, unless it is held."""
        if component_id in self._vanished and component_id not in self._held:
            self.version += 1
            self._forget(component_id)

    def trusts(self, component_id: str, now: float) -> bool:
        """Return whether no call to the component has failed recently."""
        return now >= self._suspects.get(component_id, now)

    def last_stall(self, component_id: str, now: float) -> tuple[float, float] | None:
        """Return begin and end of the component's last stall, which may last; None if it had none."""
        return self._still_until(component_id, now) or self._still_s.get(component_id)

    def _still_until(self, component_id: str, end_s: float) -> tuple[float, float] | None:
        record = self._records.get(component_id)
        lasts_ms = 0 if record is None else self._age_ms(record, end_s)
        return (end_s - lasts_ms / 1000, end_s) if lasts_ms >= STILL_MS else None

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
    """Return a record's role and model. KV nodes have no model."""
    return record.role, record.model if record.role in WORKERS else ""


# Limit on workers per role for planning one request. If there are more, half of the choice is by cached prefix; the
# rest rotates, so that gateways do not all choose the least loaded worker by the same heartbeat.
MAX_CANDIDATES = 32
MAX_READY = 8
# Distance between the starting points of two requests; prime, so that every worker is chosen in time.
TURN = 7919


def choose_workers(
    everyone: Sequence[ComponentRecord],
    beside: Callable[[], Iterable[ComponentRecord]],
    spread: int,
    fits: Callable[[ComponentRecord], bool],
    is_ready: Callable[[ComponentRecord], bool] | None = None,
) -> list[ComponentRecord]:
    """Choose workers of a role that can serve a request: all of them, or, if there are many, those ``beside`` most of
    the prompt, those with its adapter, and some in rotation.

    Args:
        everyone: all workers of the role and model, in a stable order.
        beside: returns the workers on the nodes that have most of the prompt, best first.
        spread: a number that differs between requests.
        fits: whether a worker can serve the request now.
        is_ready: whether a worker has the request's adapter; None if the request has none.
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
    """Choose decode workers, prefill workers on their nodes, and these nodes with those that have cached blocks;
    nothing if no decode worker can serve the request.

    Args:
        choose: returns the workers of a role that can serve the request, those on the given nodes first
            (:func:`choose_workers`).
        hits: blocks of the prompt on each node, by node id.
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


ADAPTER_LOAD_S = 0.1


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How much of a prompt prefill workers compute.

    Attributes:
        name: the value of ``--split-policy``.
        share: share of the uncached whole blocks for prefill workers, rounded down; None to decide by predictions
            (:mod:`pillion.gateway.planning.split_decision`).
        most_tokens: limit on the split's position; None for no limit.
    """

    name: str
    share: Fraction | None
    most_tokens: int | None = None

    def split_blocks(self, cached_blocks: int, limit_blocks: int, block_size: int) -> int:
        """Return the number of blocks before the split, in [cached_blocks, limit_blocks]; ``limit_blocks`` without a
        share."""
        if self.most_tokens is not None:
            limit_blocks = max(cached_blocks, min(limit_blocks, self.most_tokens // block_size))
        return limit_blocks if self.share is None else cached_blocks + int((limit_blocks - cached_blocks) * self.share)


def parse_policy(text: str) -> SplitPolicy:
    """Parse a value of ``--split-policy``. Raises ConfigError."""
    return SplitPolicy(text, parse_split_policy(text))


@dataclass(frozen=True, slots=True)
class StatePages:
    """Slots of a hybrid model's states: of ``one`` state, and of a ``running`` sequence's; 0 for other models."""

    one: int = 0
    running: int = 0


NO_STATES = StatePages()


# Not frozen: RoutePlanner fills in fields, as a copy would cost a tenth of a plan.
@dataclass(slots=True, kw_only=True)
class ClusterSnapshot:
    """The planner's input: a request, and the cluster at the time of the decision.

    Attributes:
        prompt_tokens: the prompt's tokens, N; on a replay, those of prompt and answer so far.
        answered_tokens: how many of these are the answer's.
        hits: blocks on each node by the index, by node id.
        far_hits: blocks that each node can have with those of a bucket, by node id; empty if no bucket has more.
        components: usable components: nodes, and workers of this request's model and namespace.
        block_size: tokens per block.
        chunk_tokens: maximum tokens per chunk.
        sent_load: tokens (prefill) and streams (decode) in progress by component id, of this gateway and of others as
            far as reported. Heartbeats are up to a second old, and lack these.
        sent_tokens: prompt tokens that gateways have sent to each component and that are not computed yet.
        fetch_costs: cost of a fetch from one node to another, by their ids; None for a pair never measured.
        fetch_block_s: seconds per block fetched between unmeasured pairs; 0.0 if no pair was measured.
        bucket_block_s: seconds per block fetched from a bucket; 0.0 if never measured.
        index_available: whether the index was available for ``hits``.
        avoid: components that failed this request before; used only if there is no other.
        spread: a number that differs between requests; breaks ties.
        unscored_from: first prompt position with a requested log probability; the decode worker computes it and all
            after it, cached or not. None: no log probability requested.
        adapter: digest of the request's adapter; "" for none.
        own_adapters: workers to which this gateway has lately sent this adapter, by component id.
        states: slots of the model's states.
        known_blocks: blocks of the prompt that any node has, with or without a state after them; 0 for a model without
            states.
        text_workers: prefill workers that may compute the whole request, which ends with a vector, by component id;
            empty if it generates.
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
    states: StatePages = NO_STATES
    known_blocks: int = 0
    text_workers: Set[str] = frozenset()

    @property
    def limit_blocks(self) -> int:
        """Limit on blocks that may be cached or left to a prefill worker, since their logits are not needed."""
        last = self.prompt_tokens - 1 if self.unscored_from is None else self.unscored_from
        return last // self.block_size

    def live_nodes(self) -> frozenset[str]:
        """Return the KV nodes that did not fail this request."""
        return frozenset(one.node_id for one in self.components if one.role == "kvnode") - self.avoid

    def adapter_wait_s(self, component: ComponentRecord) -> float:
        """Estimate how long a request waits for its adapter on a worker: longer if sequences wait for other adapters
        there."""
        if not self.adapter or self.adapter in component.adapters or component.component_id in self.own_adapters:
            return 0.0
        return ADAPTER_LOAD_S * (1 + component.adapter_waits)

    def prefill_workers(self, node_ids: Set[str]) -> list[ComponentRecord]:
        """Return the prefill workers on these nodes that did not fail this request."""
        prefills = (one for one in self.components if one.role == "prefill" and one.node_id in node_ids)
        return [one for one in prefills if one.component_id not in self.avoid]
