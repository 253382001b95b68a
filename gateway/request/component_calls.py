"""Calls to other components for one answer. Outcomes are posted as events. Decides whether a request may have killed a
lost worker, and how long to wait for lost components.

A prefill range may run on a prefill worker of another node. Its blocks are then fetched to the decode worker's node
while later chunks are computed.

    ticket at the prefill worker's node --> fetch the cached prefix --> compute a chunk --> compute a chunk --> ...
                                                                             |                   |
    ticket at the decode worker's node  <----- fetch the computed blocks, one fetch at a time ---+

The ticket at the prefill worker's node ends with the range. A lost prefill worker raises; blocks that cannot be fetched
only end the range early (I1), since the decode worker computes missing blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opentelemetry import trace

from pillion.errors import (
    BY_CODE,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PillionError,
    Unavailable,
)
from pillion.gateway.links.cluster import Cluster, Served
from pillion.gateway.links.decode_link import DecodeDelta
from pillion.gateway.links.load_exchange import AssignedLoad
from pillion.gateway.links.node_link import NodeLink
from pillion.gateway.links.prefill_link import PrefillBroken
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot
from pillion.gateway.planning.planner import PrefixSource, RequestPlan, chunks_between, plan_fetch
from pillion.gateway.request import events as ev
from pillion.gateway.request.admitted_request import AdmittedRequest, BlockHashChain
from pillion.gateway.request.events import Action, Event, TicketHold
from pillion.gateway.request.request_telemetry import BroughtTokens
from pillion.gateway.request.validation import answer_seed
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes, request_root
from pillion.kvstore.index.index import PrefixHits
from pillion.observability import telemetry
from pillion.rules.grammar_limits import GRAMMAR_FAULT
from pillion.v1.decode_pb2 import DecodeError, Sibling, Submit
from pillion.v1.prefill_pb2 import ChunkAck, RunPrefillRequest
from pillion.wire.common import flow_to_pb, write_pooling, write_sampling


def run_range(
    cluster: Cluster,
    admitted: AdmittedRequest,
    chain: BlockHashChain,
    token_ids: Sequence[int],
    action: ev.RunPrefill,
    ticket_id: int,
    start_blocks: int,
    on_queued: Callable[[int], None],
) -> AsyncIterator[ChunkAck]:
    """Send the prefill range of ``token_ids`` from block ``start_blocks`` to the plan's split to the plan's prefill
    worker; the earlier blocks are pinned by the ticket. Yields and raises as PrefillLink.run_prefill does."""
    plan = action.plan
    assert plan.prefill is not None
    start_tokens = start_blocks * plan.block_size
    request = RunPrefillRequest(
        request_id=admitted.request_id,
        attempt=action.attempt,
        ticket_id=ticket_id,
        parent_hash=chain.before(start_blocks),
        start_tokens=start_tokens,
        token_ids=token_ids[start_tokens : plan.split_tokens],
        chunk_tokens=chunks_between(plan, start_blocks, plan.split_blocks),
        priority=admitted.priority,
        text_tokens=admitted.text_tokens,
        adapter=admitted.adapter,
        kept_tokens=admitted.kept_tokens,
        flow=flow_to_pb(admitted.flow),
    )
    return cluster.prefill(plan.prefill.component_id).run_prefill(request, admitted.left_s(), on_queued)


async def open_ticket(
    link: NodeLink,
    admitted: AdmittedRequest,
    action: ev.OpenTicket | ev.RunPrefill,
    hashes: bytes,
    total_blocks: int,
    wait_s: float,
    parent: trace.Span,
    resume: bool,
) -> tuple[TicketHold, int]:
    """Open a ticket for ``action``'s attempt; return it, and the number of pinned leading blocks. With ``resume`` the
    request precedes new prompts in the node's queue for memory.

    Raises PillionError; DeadlineExceeded if no memory becomes free within ``wait_s``. If the call is cancelled or times
    out, the node client releases the ticket.
    """
    with telemetry.child("kv.pin", parent) as span:
        epoch = link.epoch
        ticket = await link.client.open_ticket(
            epoch,
            hashes,
            total_blocks,
            resume=resume,
            timeout_s=wait_s,
            priority=admitted.priority,
            expected_blocks=min(len(hashes) // HASH_BYTES, action.plan.hinted_blocks(link.node_id)),
            state_pages=action.plan.states.one,
            known_blocks=min(len(hashes) // HASH_BYTES, action.plan.known_blocks),
            flow=admitted.flow,
        )
        span.set_attribute("pillion.pinned_blocks", ticket.pinned_blocks)
    return TicketHold(link.node_id, epoch, ticket.ticket_id), ticket.pinned_blocks


@dataclass(eq=False)
class RemotePrefill:
    """A prefill range on a prefill worker of another node than the decode worker's. ``on_chunk`` is called with each
    chunk whose blocks have reached the decode worker's node."""

    _cluster: Cluster
    _admitted: AdmittedRequest
    _chain: BlockHashChain
    _token_ids: Sequence[int]
    _action: ev.RunPrefill
    _on_chunk: Callable[[ChunkAck], None]
    _on_queued: Callable[[int], None]

    def __post_init__(self) -> None:
        assert self._action.plan.prefill is not None
        self._worker = self._action.plan.prefill
        # Leading blocks at the decode worker's node, and at the prefill worker's node.
        self._local = self._action.plan.cached_blocks
        self._remote = 0
        # In a model with states, the blocks at the last fetch: blocks before the range's end may not count as fetched,
        # because no state follows them.
        self._tried = 0
        # Chunks that are computed and not yet at the decode worker's node.
        self._acked: deque[ChunkAck] = deque()
        self._progress = asyncio.Event()

    async def run(self) -> int:
        """Run the range; return the number of leading tokens whose KV the decode worker's node has then. Raises
        PillionError if the prefill worker or its node is lost or refuses."""
        granted = await self._open_ticket()
        if granted is not None:
            hold, pinned_blocks = granted
            try:
                await self._run(hold, pinned_blocks)
            finally:
                # A lost node has released the ticket already.
                with contextlib.suppress(Unavailable):
                    self._cluster.node(hold.node_id).release(hold)
        return self._local * self._action.plan.block_size

    async def _open_ticket(self) -> tuple[TicketHold, int] | None:
        """Open the ticket at the prefill worker's node; return None if no memory becomes free in time."""
        split, wait_s = self._action.plan.split_blocks, self._admitted.wait_s(ev.MAX_REMOTE_ADMISSION_WAIT_S)
        link, hashes = self._cluster.node(self._worker.node_id), self._chain.first(split)
        try:
            return await open_ticket(
                link,
                self._admitted,
                self._action,
                hashes,
                split + 1 + self._action.plan.states.running,
                wait_s,
                trace.get_current_span(),
                self._action.attempt > 1,
            )
        except (Overloaded, DeadlineExceeded):
            return None

    async def _run(self, hold: TicketHold, pinned_blocks: int) -> None:
        self._remote = await self._fetch_prefix(hold, pinned_blocks)
        computing = asyncio.create_task(self._compute(hold), name=f"prefill range of {self._admitted.request_id}")
        computing.add_done_callback(lambda _: self._progress.set())
        try:
            await self._fetch_computed(computing)
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    async def _fetch_prefix(self, hold: TicketHold, pinned_blocks: int) -> int:
        """Fetch cached blocks that the prefill worker's node lacks from the decode worker's node or other nodes. Return
        the number of leading blocks at the prefill worker's node."""
        plan = self._action.plan
        others = [source for source in plan.sources if source.node_id != plan.node_id]
        sources = sorted([PrefixSource(plan.node_id, self._local), *others], key=lambda source: -source.blocks)
        wanted = plan_fetch(sources, hold.node_id, pinned_blocks, plan.split_blocks)
        if wanted is None:
            return pinned_blocks
        hashes = self._chain.first(wanted.blocks)
        names, left_s = wanted.source_node_ids, self._admitted.left_s()
        return (await self._cluster.fetch_blocks(hold, hashes, names, pinned_blocks, left_s)).blocks

    async def _compute(self, hold: TicketHold) -> None:
        plan = self._action.plan
        if self._remote >= plan.split_blocks:
            return
        asked = self._cluster, self._admitted, self._chain, self._token_ids, self._action
        async for ack in run_range(*asked, hold.ticket_id, self._remote, self._on_queued):
            self._acked.append(ack)
            self._remote = max(self._remote, min(ack.end_tokens // plan.block_size, plan.split_blocks))
            self._progress.set()

    async def _fetch_computed(self, computing: asyncio.Task[None]) -> None:
        """Fetch blocks to the decode worker's node as they are computed, until all are fetched or a fetch brings none.
        Raises the error that ended ``computing``."""
        while True:
            computed = computing.done()
            if self._remote > max(self._local, self._tried):
                if not await self._fetch_once():
                    return
            elif computed:
                break
            else:
                await self._progress.wait()
                self._progress.clear()
        computing.result()

    async def _fetch_once(self) -> bool:
        """Fetch the blocks computed so far to the decode worker's node. Return whether any were fetched, or may count
        once a later state is computed."""
        action, before = self._action, self._local
        if action.plan.states.one:
            self._tried = self._remote
        hashes = self._chain.first(self._remote)
        sources, left_s = (self._worker.node_id,), self._admitted.left_s()
        self._local = (await self._cluster.fetch_blocks(action.hold, hashes, sources, before, left_s)).blocks
        while self._acked and self._acked[0].end_tokens <= self._local * action.plan.block_size:
            self._on_chunk(self._acked.popleft())
        return self._local > before or 0 < self._tried < action.plan.split_blocks


log = logging.getLogger("pillion.gateway")

# Delay before a request is blamed for a worker that died in its step: a worker also exits when its KV node dies, and
# that loss may be detected a moment later.
BLAME_DELAY_MS = 300
MAX_ADMISSION_WAIT_S = 120.0
# Length above which prompts are hashed on a thread, since they would stall the event loop for more than 2 ms.
LONG_CHAIN_TOKENS = 2**15
_RETRYABLE = (Unavailable, NotFound, Conflict, Cancelled, Internal, DeadlineExceeded)
# Errors of a component that will return: it is restarting, gets a new epoch, or has lost its state.
_AWAY = (Unavailable, Conflict, Cancelled)

# Tasks that outlive their requests for a moment: asyncio itself keeps no strong reference.
_background: set[asyncio.Task[None]] = set()


async def chain_of(admitted: AdmittedRequest, token_ids: Sequence[int], served: Served) -> BlockHashChain:
    """Return the hashes of the whole blocks of a request's leading tokens."""
    whole = len(token_ids) // served.block_size * served.block_size
    root = request_root(served.namespace, admitted.adapter, admitted.cache_salt, short_text=admitted.short_text)
    hashed = (root, token_ids[:whole], served.block_size)
    long = whole > LONG_CHAIN_TOKENS
    return BlockHashChain(root, await asyncio.to_thread(chain_hashes, *hashed) if long else chain_hashes(*hashed))


@dataclass(slots=True, eq=False)
class ComponentCalls:
    """The calls to components for answer ``index`` of a request: at most one look-up, ticket call, fetch or prefill
    range at a time, and at most one decode stream.

    Attributes:
        _tokens: returns the tokens that the current attempt starts from.
        _post: called with each event.
        _on_bug: called with an exception that no call should raise.
        chain: hashes of the latest attempt's whole blocks.
    """

    _admitted: AdmittedRequest
    _index: int
    _tokens: Callable[[], tuple[int, ...]]
    _cluster: Cluster
    _span: trace.Span
    _post: Callable[[Event], None]
    _on_bug: Callable[[BaseException], None]
    load: AssignedLoad
    chain: BlockHashChain = field(default_factory=BlockHashChain)
    brought_tokens: BroughtTokens = field(default_factory=BroughtTokens)
    _work: asyncio.Task[None] | None = None
    _stream: tuple[str, int] | None = None
    _begun: bool = False
    # True once the worker has reported that a step computes the stream's prompt.
    _in_step: bool = False
    # The stream's ticket; id 0 if the worker opens it.
    _hold: TicketHold | None = None

    def perform(self, action: Action) -> None:
        """Perform an action; its class documents the events that are posted."""
        match action:
            case ev.LookUp():
                self.load.assign({})
                self._spawn(self._look_up(action))
            case ev.OpenTicket():
                self.load.assign_plan(action.plan)
                self._spawn(self._open_ticket(action))
            case ev.Fetch():
                self._spawn(self._fetch(action))
            case ev.RunPrefill():
                self._begun = False
                self.load.assign_plan(action.plan)
                self._spawn(self._run_prefill(action))
            case ev.StopWork():
                self._stop_work(action.after_ms)
            case ev.CancelDecode():
                self._cancel_decode()
            case ev.ReleaseTicket():
                self._release(action.hold)

    def submit(self, action: ev.SubmitDecode, followers: Sequence[ComponentCalls]) -> None:
        """Submit the stream; posts TicketAdopted, TokensSampled, then DecodeFinished; or DecodeLost. ``followers`` are
        the calls of ``action.parallel_samples``."""
        admitted, attempt, plan = self._admitted, action.attempt, action.plan
        worker, left_s = plan.decode.component_id, admitted.left_s()
        submit = Submit(
            request_id=admitted.request_id,
            attempt=attempt,
            root_hash=self.chain.root,
            token_ids=self._tokens(),
            prompt_tokens=len(admitted.prompt),
            # At most 49 days, the field's maximum; the gateway alone enforces a later deadline.
            timeout_ms=0 if left_s is None else min(2**32 - 1, max(1, int(left_s * 1000))),
            traceparent=telemetry.traceparent(trace.set_span_in_context(self._span)),
            priority=admitted.priority,
            siblings=[Sibling(seed=follower._seed()) for follower in followers],
            awaited_blocks=action.awaited_blocks,
            scored_tokens=action.scored_tokens,
            grammar=admitted.grammar.text,
            adapter=admitted.adapter,
            kept_tokens=admitted.kept_tokens,
            flow=flow_to_pb(admitted.flow),
        )
        write_sampling(submit, replace(admitted.sampling, seed=self._seed()))
        if admitted.pooling is not None:
            write_pooling(submit, admitted.pooling)
        if action.hold is None:
            submit.block_hashes, submit.expected_blocks = self.chain.hashes, plan.cached_blocks
            submit.known_blocks = plan.known_blocks
        else:
            submit.ticket_id = action.hold.ticket_id
        streams = (self, *followers)
        for stream in streams:
            stream._begun = stream._in_step = False
        for follower in followers:
            follower.load.assign({worker: (1, 0)})
        # While the prefill range runs beside the stream, what it has yet to compute stays assigned to its worker.
        self.load.assign_plan(plan, 0 if action.awaited_blocks else plan.split_tokens)
        try:
            for stream in streams:
                # The worker's own ticket ends with this session's node as well.
                stream._hold = action.hold or TicketHold(plan.node_id, self._cluster.node(plan.node_id).epoch, 0)
            keys = self._cluster.decode(worker).submit(submit, [partial(one._on_delta, attempt) for one in streams])
        except PillionError as error:
            self._forget_adapter(worker)
            self._post(ev.DecodeLost(attempt, error, True, self._wait_limit_s(error, action.hold)))
        else:
            for stream, key in zip(streams, keys, strict=True):
                stream._stream = (worker, key)

    def _seed(self) -> int:
        return answer_seed(self._admitted.sampling.seed or 0, self._index)

    def _stop_work(self, after_ms: int) -> None:
        if self._work is not None and after_ms:
            asyncio.get_running_loop().call_later(after_ms / 1000, self._work.cancel)
        elif self._work is not None:
            self._work.cancel()
        self._work = None

    def _release(self, hold: TicketHold) -> None:
        """Release a ticket in the background, retried until the node answers or the session ends."""
        try:
            self._cluster.node(hold.node_id).release(hold)
        except Unavailable:
            log.debug("KV node %s was lost before a ticket was released", hold.node_id)

    def _cancel_decode(self) -> None:
        self.load.assign({})
        if self._stream is None:
            return
        (worker, key), self._stream = self._stream, None
        try:
            self._cluster.decode(worker).cancel(key)
        except Unavailable:
            log.debug("worker %s was lost before a stream was cancelled", worker)

    async def _look_up(self, action: ev.LookUp) -> None:
        if action.after_ms:
            await asyncio.sleep(action.after_ms / 1000)
        admitted, cluster = self._admitted, self._cluster
        with_node: Served | None = None
        try:
            with telemetry.child("plan", self._span) as span:
                if action.attempt == 1:
                    served = await cluster.served_soon(admitted.model, admitted.fingerprint, admitted.adapter_rank)
                else:
                    served = cluster.served(admitted.model, admitted.fingerprint, admitted.adapter_rank)
                with_node = None if cluster.lacks_node(served) else served
                plan = await self._plan(action, served, span)
        except PillionError as error:
            # Retry if the model's components were lost during the look-up: the request has not waited for them yet.
            lost = with_node is not None and cluster.lacks_node(with_node)
            patience_s = cluster.return_wait_s(admitted.model, admitted.adapter_rank)
            self._post(ev.PlanFailed(action.attempt, error, retryable=lost, patience_s=patience_s))
        else:
            self._post(ev.PlanMade(action.attempt, plan))

    async def _make_chain(self, action: ev.LookUp, token_ids: tuple[int, ...], served: Served) -> bool:
        """Hash the whole blocks that may be cached or prefilled; return whether to look them up."""
        admitted = self._admitted
        # Later blocks must be computed by the decode worker.
        last = len(token_ids) - 1 if action.unscored_from is None else action.unscored_from
        self.chain = await chain_of(admitted, token_ids[:last], served)
        return bool(self.chain.hashes) and (admitted.options.prefix_caching or action.attempt > 1)

    async def _plan(self, action: ev.LookUp, served: Served, span: trace.Span) -> RequestPlan:
        admitted, cluster, token_ids = self._admitted, self._cluster, self._tokens()
        looked_up = await self._make_chain(action, token_ids, served)
        with telemetry.tracer().start_as_current_span("lookup"):
            prefixes = await cluster.hits(served, self.chain.hashes) if looked_up else PrefixHits([])
        hits = {hit.node_id: hit.blocks for hit in prefixes.hits}
        components = cluster.candidates(served, admitted.text_tokens, hits, admitted.spread, admitted.adapter)
        if forced := admitted.options.node_id:
            components = tuple(one for one in components if one.node_id == forced)
            if not components:
                raise NotFound(f"no worker of model {admitted.model!r} is at the KV node {forced!r}")
        bucket_hits: dict[str, int] = {}
        if looked_up:
            bucket_hits = await cluster.bucket_hits(self.chain.hashes, hits, components, served.states.one)
        sent_load, sent_tokens = await cluster.under_way(components)
        snapshot = ClusterSnapshot(
            model=admitted.model,
            prompt_tokens=len(token_ids),
            hits=hits,
            bucket_hits=bucket_hits,
            components=components,
            policy=admitted.options.policy,
            block_size=served.block_size,
            chunk_tokens=admitted.options.chunk_tokens,
            answered_tokens=len(token_ids) - len(admitted.prompt),
            sent_load=sent_load,
            sent_tokens=sent_tokens,
            index_available=cluster.index_available,
            avoid=action.avoid,
            spread=admitted.spread,
            unscored_from=action.unscored_from,
            adapter=admitted.adapter,
            states=served.states,
            known_blocks=prefixes.known_blocks,
            text_workers=frozenset() if admitted.pooling is None else cluster.text_workers(components),
        )
        plan = cluster.routes.plan(snapshot, time.monotonic())
        if span.is_recording():
            self._describe(span, action.attempt, plan, hits)
        return plan

    def _describe(self, span: trace.Span, attempt: int, plan: RequestPlan, hits: Mapping[str, int]) -> None:
        """Add a plan to its span; ``hits`` are the prompt's leading blocks according to the index, by node id."""
        span.set_attributes(
            {
                "pillion.attempt": attempt,
                "pillion.hit_blocks": hits.get(plan.node_id, 0),
                "pillion.sources": [source.node_id for source in plan.sources],
                "pillion.index_available": self._cluster.index_available,
                "pillion.split_tokens": plan.split_tokens,
                "pillion.reason": plan.reason,
                "pillion.decode_worker": plan.decode.component_id,
                "pillion.prefill_worker": plan.prefill.component_id if plan.prefill else "",
            }
        )

    async def _open_ticket(self, action: ev.OpenTicket) -> None:
        admitted, node_id, total_blocks = self._admitted, action.plan.node_id, action.plan.total_blocks
        wait_s = admitted.wait_s(MAX_ADMISSION_WAIT_S)
        try:
            link, hashes = self._cluster.node(node_id), self.chain.hashes
            hold, pinned = await open_ticket(
                link, admitted, action, hashes, total_blocks, wait_s, self._span, action.resume
            )
        except DeadlineExceeded:
            late = Overloaded(f"no KV memory came free at {node_id} within {wait_s:.0f} s", retry_after_ms=1000)
            self._post(ev.TicketLost(action.attempt, late, retryable=False))
        except PillionError as error:
            self._post(
                ev.TicketLost(action.attempt, error, isinstance(error, _RETRYABLE), self._wait_limit_s(error, None))
            )
        else:
            self._post(ev.TicketGranted(action.attempt, hold, pinned))

    async def _fetch(self, action: ev.Fetch) -> None:
        hashes, pinned = self.chain.first(action.wanted.blocks), action.plan.cached_blocks
        with trace.use_span(self._span):
            limits_s = [limit_s for limit_s in (self._admitted.left_s(), action.wanted.limit_s) if limit_s is not None]
            reply = await self._cluster.fetch_blocks(
                action.hold, hashes, action.wanted.source_node_ids, pinned, min(limits_s, default=None)
            )
        blocks = BroughtTokens(reply.fetched_blocks, reply.restored_blocks, reply.bucket_blocks)
        self.brought_tokens = BroughtTokens._make(count * action.plan.block_size for count in blocks)
        self._post(ev.BlocksFetched(action.attempt, reply.blocks))

    async def _run_prefill(self, action: ev.RunPrefill) -> None:
        admitted, worker, token_ids = self._admitted, action.plan.prefill, self._tokens()
        assert worker is not None
        in_step = False

        def on_ack(ack: ChunkAck) -> None:
            nonlocal in_step
            in_step = True
            if not self._begun:
                self.load.assign_plan(action.plan, ack.end_tokens)
            self._post(ev.ChunkAcked(action.attempt, ack))

        def on_queued(position: int) -> None:
            nonlocal in_step
            in_step = in_step or not position
            self._post_queued(action.attempt, position)

        try:
            with trace.use_span(self._span):
                if action.plan.remote:
                    remote = RemotePrefill(self._cluster, admitted, self.chain, token_ids, action, on_ack, on_queued)
                    end_tokens = await remote.run()
                else:
                    end_tokens = action.plan.cached_tokens
                    asked = self._cluster, admitted, self.chain, token_ids, action
                    async for ack in run_range(*asked, action.hold.ticket_id, action.plan.cached_blocks, on_queued):
                        end_tokens = ack.end_tokens
                        on_ack(ack)
        except PillionError as error:
            if isinstance(error, Unavailable):
                self._cluster.view.suspect(worker.component_id, time.monotonic())
                self._cluster.view.note_refusal(worker.component_id)
            self._forget_adapter(worker.component_id)
            retryable, broke = isinstance(error, (*_RETRYABLE, Overloaded)), isinstance(error, PrefillBroken)
            killed = ""
            if broke and in_step:
                await asyncio.sleep(BLAME_DELAY_MS / 1000)
                killed = worker.component_id if self._cluster.node_lives(worker.node_id) else ""
            patience_s = self._wait_limit_s(error, action.hold, broke and in_step)
            self._post(ev.PrefillLost(action.attempt, error, retryable, patience_s, killed))
        else:
            self._post(ev.PrefillEnded(action.attempt, end_tokens))

    def _on_delta(self, attempt: int, delta: DecodeDelta) -> None:
        try:
            # A single delta may have all of these, e.g. a queue position, a token and an error: post them in order.
            if delta.pinned_blocks is not None:
                self._post(ev.TicketAdopted(attempt, delta.pinned_blocks))
            if delta.queued is not None:
                self._in_step = self._in_step or not delta.queued
                self._post_queued(attempt, delta.queued)
            if delta.prompt_logprobs:
                self._post(ev.PromptScored(attempt, delta.prompt_logprobs))
            if delta.token_ids:
                if not self._begun and self._stream is not None:
                    self._begun = True
                    self.load.assign({self._stream[0]: (1, 0)})
                self._post(ev.TokensSampled(attempt, delta.token_ids, delta.timings, delta.logprobs))
            if delta.finish_reason is not None:
                self._post(ev.DecodeFinished(attempt, delta.finish_reason, delta.timings, delta.vector))
            elif delta.error is not None:
                self._on_error(attempt, delta, self._error_of(delta.error))
        except Exception as error:  # noqa: BLE001  (a bug must end this request, not the worker's connection)
            self._on_bug(error)

    def _on_error(self, attempt: int, delta: DecodeDelta, error: PillionError) -> None:
        if self._stream is not None:
            self._forget_adapter(self._stream[0])
            if isinstance(error, Unavailable):
                self._cluster.view.note_refusal(self._stream[0])
        if self._suspected(delta):
            later = partial(self._lose_stream, attempt, delta, error)
            asyncio.get_running_loop().call_later(BLAME_DELAY_MS / 1000, later)
        else:
            self._lose_stream(attempt, delta, error)

    def _suspected(self, delta: DecodeDelta) -> bool:
        """Return whether a connection broke in a step with the stream. A stream with tokens of this attempt has
        survived steps, so it is suspected only if it was the only stream: otherwise another stream's prompt is likelier
        the cause."""
        return bool(delta.broken) and (delta.broken == 1 if self._begun else self._in_step)

    def _lose_stream(self, attempt: int, delta: DecodeDelta, error: PillionError) -> None:
        assert delta.error is not None
        killed = ""
        if self._suspected(delta) and self._stream is not None and self._hold is not None:
            # A lost node ends its workers, so then the request is not the cause.
            killed = self._stream[0] if self._cluster.holds(self._hold) else ""
        broke = bool(delta.broken) and (self._begun or self._in_step)
        patience_s = self._wait_limit_s(error, self._hold, broke)
        self._post(ev.DecodeLost(attempt, error, delta.error.retryable, patience_s, killed))

    def _wait_limit_s(self, error: PillionError, hold: TicketHold | None, broke: bool = False) -> float:
        """Return AttemptLoss.patience_s: how long the request waits for a component whose call ended with ``error``;
        0.0 if the component is not expected to return, or if the call ``broke`` midway. ``hold`` is the call's ticket,
        None for a call that requested one."""
        if hold is None:
            away = isinstance(error, (*_AWAY, NotFound))
        else:
            # A restarted node has lost the ticket, so the call could not succeed.
            away = (isinstance(error, _AWAY) and not broke) or not self._cluster.holds(hold)
        return self._cluster.return_wait_s(self._admitted.model, self._admitted.adapter_rank) if away else 0.0

    def _error_of(self, error: DecodeError) -> PillionError:
        """Convert a worker's error; one about the grammar names the client's fields that the grammar was made from."""
        fields, text = self._admitted.grammar.fields, error.message
        if fields and error.code == InvalidRequest.code and text.startswith(GRAMMAR_FAULT):
            return InvalidRequest.of(*(FieldViolation(field, text) for field in fields[:8]))
        if error.retry_after_ms:
            return Overloaded(text, error.retry_after_ms)
        return BY_CODE.get(error.code, Internal)(text)

    def _forget_adapter(self, component_id: str) -> None:
        """Forget that a worker has the request's adapter, since it may have failed to load it."""
        if self._admitted.adapter:
            self._cluster.routes.sent_adapters.forget(self._admitted.adapter, component_id)

    def _post_queued(self, attempt: int, position: int) -> None:
        """Post a queue position, 0 for none; add it to the span."""
        if position:
            self._span.add_event("queued", {"pillion.attempt": attempt, "pillion.position": position})
        self._post(ev.StillQueued(attempt, position))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work = task
        _background.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        _background.discard(task)
        if not task.cancelled():
            error = task.exception()
        else:
            # After a cancellation by the request itself, ``_work`` is None or a new task.
            error = Internal("a call of the request was cancelled unexpectedly") if task is self._work else None
        if error is not None:
            self._on_bug(error)
