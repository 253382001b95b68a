"""A remote prefill range with two random nodes and a random worker, in memory: correct events, no leaks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.testbed.admitted import admitted_request
from lab.testbed.conditions import loop_turns
from pillion.errors import Conflict, NotFound, Overloaded, PillionError, Unavailable
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot, parse_policy
from pillion.gateway.planning.planner import RequestPlan, make_plan, replan
from pillion.gateway.planning.route_planner import RoutePlanner
from pillion.gateway.request import events as ev
from pillion.gateway.request.admitted_request import BlockHashChain, GatewayOptions
from pillion.gateway.request.component_calls import RemotePrefill
from pillion.v1.kvnode_pb2 import OpenTicketReply, PrefetchReply
from pillion.v1.prefill_pb2 import ChunkAck, RunPrefillRequest
from pillion.wire.registry import ComponentRecord
from tests.support.examples import examples

BLOCK = 4
ERRORS = (Unavailable("gone"), NotFound("ticket"), Overloaded("full"), Conflict("fenced"))


@dataclass
class PrefillWorld:
    """Both nodes and the worker. ``draw`` draws events; ``blocks`` is the number of blocks under each node's ticket."""

    draw: Callable[[Any], Any]
    blocks: dict[str, int]
    held: set[tuple[str, int]] = field(default_factory=set)
    released: list[tuple[str, int]] = field(default_factory=list)
    fetching: set[str] = field(default_factory=set)
    numbers: Any = field(default_factory=lambda: itertools.count(10))
    routes: RoutePlanner = field(default_factory=RoutePlanner)
    # The real fetch, which uses only the node and the planner's paces.
    fetch_blocks = Cluster.fetch_blocks

    def node(self, node_id: str) -> ModelNode:
        if self.draw(st.integers(0, 20)) == 0:
            self.held = {hold for hold in self.held if hold[0] != node_id}
            raise Unavailable(f"KV node {node_id} is gone")
        return ModelNode(self, node_id)

    def prefill(self, component_id: str) -> PrefillWorld:
        assert component_id == "prefill-1"
        return self

    async def pause(self) -> None:
        """Yield to the loop some times, then maybe raise."""
        await loop_turns(self.draw(st.integers(0, 4)))
        if self.draw(st.integers(0, 12)) == 0:
            raise self.draw(st.sampled_from(ERRORS))

    def check(self, node_id: str, ticket_id: int) -> None:
        assert (node_id, ticket_id) not in self.released
        if (node_id, ticket_id) not in self.held:
            raise NotFound("no such ticket")

    async def run_prefill(
        self, prefill_range: RunPrefillRequest, timeout_s: float | None, _: object
    ) -> AsyncIterator[ChunkAck]:
        self.check("kv-1", prefill_range.ticket_id)
        assert prefill_range.start_tokens == self.blocks["kv-1"] * BLOCK
        assert prefill_range.chunk_tokens
        assert sum(prefill_range.chunk_tokens) == len(prefill_range.token_ids)
        end = prefill_range.start_tokens
        for index, tokens in enumerate(prefill_range.chunk_tokens):
            await self.pause()
            self.check("kv-1", prefill_range.ticket_id)
            end += tokens
            self.blocks["kv-1"] = end // BLOCK
            yield ChunkAck(chunk_index=index, end_tokens=end, queue_ms=0, compute_ms=0)


@dataclass
class ModelNode:
    """One node, as the gateway's link and its client."""

    world: PrefillWorld
    node_id: str
    epoch: int = 5

    @property
    def client(self) -> ModelNode:
        return self

    async def open_ticket(self, epoch: int, hashes: bytes, total_blocks: int, **_: Any) -> OpenTicketReply:
        assert (self.node_id, total_blocks) == ("kv-1", len(hashes) // 32 + 1)
        await self.world.pause()
        ticket = OpenTicketReply(
            ticket_id=next(self.world.numbers), pinned_blocks=min(self.world.blocks["kv-1"], len(hashes) // 32)
        )
        self.world.held.add((self.node_id, ticket.ticket_id))
        return ticket

    async def prefetch(
        self, epoch: int, ticket_id: int, hashes: bytes, sources: Sequence[str], *, timeout_s: float
    ) -> PrefetchReply:
        world, asked = self.world, len(hashes) // 32
        world.check(self.node_id, ticket_id)
        assert self.node_id not in world.fetching, "one fetch at a time"
        world.fetching.add(self.node_id)
        try:
            await world.pause()
            there = max(world.blocks[name] for name in sources)
            here = world.blocks[self.node_id]
            assert asked > here
            came = world.draw(st.integers(here, max(here, min(asked, there)))) if world.draw(st.booleans()) else there
            world.blocks[self.node_id] = max(here, min(asked, there, came))
            return PrefetchReply(blocks=world.blocks[self.node_id])
        finally:
            world.fetching.discard(self.node_id)

    def release(self, hold: ev.TicketHold) -> None:
        self.world.released.append((hold.node_id, hold.ticket_id))
        self.world.held.discard((hold.node_id, hold.ticket_id))


def planned(tokens: int, cached: int) -> RequestPlan:
    components = (
        ComponentRecord(component_id="kv-0", role="kvnode", address="x", node_id="kv-0"),
        ComponentRecord(component_id="kv-1", role="kvnode", address="x", node_id="kv-1"),
        ComponentRecord(component_id="decode-0", role="decode", address="x", node_id="kv-0"),
        ComponentRecord(component_id="prefill-1", role="prefill", address="x", node_id="kv-1"),
    )
    snapshot = ClusterSnapshot(model="toy", prompt_tokens=tokens, hits={"kv-0": cached}, components=components,
                      policy=parse_policy("disaggregated"), block_size=BLOCK, chunk_tokens=8)  # fmt: skip
    return replan(make_plan(snapshot), cached)


OPTIONS = GatewayOptions(
    policy=parse_policy("disaggregated"), chunk_tokens=8, max_attempts=1, max_inflight_requests=1,
    max_inflight_tokens=1, prefix_caching=True,
)  # fmt: skip
JOB = admitted_request(options=OPTIONS)


@given(st.data())
@settings(max_examples=examples(300))
def test_remote_prefill_invariants_hold_in_any_order_of_events(data: st.DataObject) -> None:
    def draw(strategy: Any) -> Any:
        return data.draw(strategy)

    tokens, cached = draw(st.integers(5, 60)), draw(st.integers(0, 6))
    decided = planned(tokens, cached)
    if not decided.chunks:
        return
    world = PrefillWorld(draw, {"kv-0": decided.cached_blocks, "kv-1": draw(st.integers(0, decided.split_blocks))})
    world.held.add(("kv-0", 1))
    hashes = b"".join(bytes([n]) * 32 for n in range(decided.limit_blocks))
    acks: list[ChunkAck] = []

    def acked(ack: ChunkAck) -> None:
        assert ack.end_tokens <= world.blocks["kv-0"] * BLOCK, "a chunk counts once the decode worker's node has it"
        acks.append(ack)

    async def run() -> int | BaseException:
        action = ev.RunPrefill(1, decided, ev.TicketHold("kv-0", 5, 1))
        assert decided.prefill is not None
        chain, given = BlockHashChain(b"root", hashes), tuple(range(tokens))
        prefill_range = RemotePrefill(world, JOB, chain, given, action, acked, print)  # type: ignore[arg-type]
        task = asyncio.create_task(prefill_range.run())
        patience = draw(st.integers(0, 30) | st.none())
        await loop_turns(patience or 0)
        if patience is not None:
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1, "nothing goes on"
        return outcome

    outcome = asyncio.run(run())
    assert {hold for hold in world.held if hold[0] == "kv-1"} == set()
    assert len(world.released) == len(set(world.released))
    assert ("kv-0", 1) not in world.released, "the attempt's own ticket is the machine's"
    assert not world.fetching
    assert [ack.chunk_index for ack in acks] == list(range(len(acks)))
    if isinstance(outcome, int):
        assert outcome == world.blocks["kv-0"] * BLOCK
        assert decided.cached_tokens <= outcome <= decided.split_tokens
        assert not acks or acks[-1].end_tokens <= outcome
    else:
        assert isinstance(outcome, PillionError | asyncio.CancelledError)
