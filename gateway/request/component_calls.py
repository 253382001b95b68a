"""The calls that one answer makes to other components. Each reports its outcome as an event; none decides anything."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
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
from pillion.gateway.links.prefill_link import SpanBroken
from pillion.gateway.planning.cluster_snapshot import ClusterSnapshot
from pillion.gateway.planning.planner import RequestPlan, make_plan
from pillion.gateway.request import events as ev
from pillion.gateway.request.assigned_load import AssignedLoad
from pillion.gateway.request.events import Action, Event, TicketHold
from pillion.gateway.request.job import BlockHashChain, Job
from pillion.gateway.request.remote_span import RemoteSpan, make_span, open_ticket
from pillion.gateway.request.request_telemetry import BroughtTokens
from pillion.gateway.scaling.worker_needs import PlannedPrompt
from pillion.grammar_limits import GRAMMAR_FAULT
from pillion.kvstore.hashing import chain_hashes, request_root
from pillion.observability import telemetry
from pillion.v1.decode_pb2 import DecodeError, Fork, Submit
from pillion.v1.prefill_pb2 import ChunkAck
from pillion.wire.decode import DecodeDelta
from pillion.wire.public import sampling_to_pb

log = logging.getLogger("pillion.gateway")

# How long a request that was in the step of a lost worker waits for news of that worker's KV node, before it counts as
# one that the worker may have died of: a node takes its workers along, and is missed a moment later, or before.
VERDICT_MS = 300
# Longest wait for KV memory of a request without a deadline.
MAX_ADMISSION_WAIT_S = 120.0
# What fits the field: 49 days. A deadline behind that is the gateway's alone to keep.
MAX_TIMEOUT_MS = 2**32 - 1
# The hashes of a longer prompt are made on a thread: they take more than 2 ms.
LONG_CHAIN_TOKENS = 2**15
# Fields that an error of a grammar names, where it cannot be said which of them is at fault.
MAX_NAMED_FIELDS = 8
# Errors that another component or a new ticket may avoid.
_RETRYABLE = (Unavailable, NotFound, Conflict, Cancelled, Internal, DeadlineExceeded)
# What a component says that is on its way back: it stops, takes a new epoch, or has lost what it held.
_AWAY = (Unavailable, Conflict, Cancelled)

# Work that outlives its request for a moment: asyncio itself keeps no strong reference to a task.
_background: set[asyncio.Task[None]] = set()


class ComponentCalls:
    """One answer's calls. At most one look-up, ticket call, fetch or span is under way, and at most one decode stream.

    ``seed`` is the answer's own; ``post`` takes events, ``broken`` takes an exception that no call should raise.
    ``chain`` has the hashes of the latest attempt's whole blocks.
    """

    def __init__(
        self,
        job: Job,
        seed: int,
        cluster: Cluster,
        span: trace.Span,
        post: Callable[[Event], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self._job = job
        self._seed = seed
        self._cluster = cluster
        self._span = span
        self._post = post
        self._broken = broken
        self._work: asyncio.Task[None] | None = None
        self.chain = BlockHashChain()
        self.load = AssignedLoad(cluster.load)
        self._stream: tuple[str, int] | None = None
        self._adopted = False
        self._begun = False
        # Whether the worker has told that a step computes the stream's prompt.
        self._in_step = False
        # The ticket that the stream was submitted with.
        self._hold: TicketHold | None = None
        # What the latest attempt brought of the prompt.
        self.brought_tokens = BroughtTokens()

    # ---- started by actions ---------------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        """Begins or ends the work that an action calls for; the action names the events that are posted in answer."""
        match action:
            case ev.LookUp():
                self.load.assign({})
                self._spawn(self._look_up(action))
            case ev.OpenTicket():
                self.load.assign_plan(action.plan)
                self._spawn(self._open_ticket(action))
            case ev.Fetch():
                self._spawn(self._fetch(action))
            case ev.RunSpan():
                self._begun = False
                self.load.assign_plan(action.plan)
                self._spawn(self._run_span(action))
            case ev.StopWork(after_ms=after_ms):
                if self._work is not None and after_ms:
                    asyncio.get_running_loop().call_later(after_ms / 1000, self._work.cancel)
                elif self._work is not None:
                    self._work.cancel()
                self._work = None
            case ev.CancelDecode():
                self._cancel_decode()
            case ev.ReleaseTicket(hold):
                # In the background, until the node has taken the release or the session is over.
                try:
                    self._cluster.node(hold.node_id).release(hold)
                except Unavailable:
                    log.debug("KV node %s went away with the ticket it was to release", hold.node_id)

    def submit(self, action: ev.SubmitDecode, followers: Sequence[ComponentCalls]) -> None:
        """Posts TicketAdopted, TokensSampled, then DecodeFinished; or DecodeLost. ``followers`` are the calls of the
        answers that ``action.forks`` names."""
        job, attempt, worker = self._job, action.attempt, action.plan.decode.component_id
        left_s = job.left_s()
        submit = Submit(
            request_id=job.request_id,
            attempt=attempt,
            ticket_id=action.hold.ticket_id,
            root_hash=self.chain.root,
            token_ids=action.token_ids,
            prompt_tokens=len(job.prompt),
            sampling=sampling_to_pb(replace(job.resolved.sampling, seed=self._seed)),
            stop_token_ids=job.resolved.stop_token_ids,
            max_tokens=job.resolved.max_tokens,
            timeout_ms=0 if left_s is None else min(MAX_TIMEOUT_MS, max(1, int(left_s * 1000))),
            traceparent=telemetry.traceparent(trace.set_span_in_context(self._span)),
            priority=job.priority,
            forks=[Fork(seed=follower._seed) for follower in followers],
            awaited_blocks=action.awaited_blocks,
            scored_tokens=action.scored_tokens,
            grammar=job.grammar,
            adapter=job.adapter,
        )
        streams = (self, *followers)
        for stream in streams:
            stream._adopted = stream._begun = stream._in_step = False
            stream._hold = action.hold
        for follower in followers:
            follower.load.assign({worker: (1, 0)})
        # Beside a span under way, what the prefill worker has yet to compute stays assigned to it.
        self.load.assign_plan(action.plan, 0 if action.awaited_blocks else action.plan.split_tokens)
        try:
            keys = self._cluster.decode(worker).submit(submit, [partial(one._on_delta, attempt) for one in streams])
        except PillionError as error:
            self._failed_at(worker)
            self._post(ev.DecodeLost(attempt, error, True, self._patience_s(error, action.hold)))
        else:
            for stream, key in zip(streams, keys, strict=True):
                stream._stream = (worker, key)

    def _cancel_decode(self) -> None:
        """Tells the decode worker, if it still runs something for this answer."""
        self.load.assign({})
        if self._stream is None:
            return
        (worker, key), self._stream = self._stream, None
        try:
            self._cluster.decode(worker).cancel(key)
        except Unavailable:
            log.debug("decode worker %s went away with the stream it was to cancel", worker)

    # ---- the work -------------------------------------------------------------------------------------------------

    async def _look_up(self, action: ev.LookUp) -> None:
        if action.after_ms:
            await asyncio.sleep(action.after_ms / 1000)
        job, cluster = self._job, self._cluster
        whole: Served | None = None
        try:
            with telemetry.child("plan", self._span) as span:
                if action.attempt == 1:
                    served = await cluster.served_soon(job.model, job.fingerprint, job.adapter_rank)
                else:
                    served = cluster.served(job.model, job.fingerprint, job.adapter_rank)
                whole = None if cluster.lacks_node(served) else served
                decided = await self._plan(action, served, span)
        except PillionError as error:
            # What served the model may be lost while the index answers. Nobody has waited for its return then.
            lost = whole is not None and cluster.lacks_node(whole)
            patience_s = cluster.return_wait_s(job.model, job.adapter_rank)
            self._post(ev.PlanFailed(action.attempt, error, retryable=lost, patience_s=patience_s))
        else:
            self._post(ev.PlanMade(action.attempt, decided))

    async def _make_chain(self, action: ev.LookUp, served: Served) -> bool:
        """Hashes the prompt's whole blocks; returns whether some of them may be cached."""
        job = self._job
        # Nothing behind the chain is found, pinned, fetched or left to a prefill worker.
        last = len(action.token_ids) - 1 if action.unscored_from is None else action.unscored_from
        whole = last // served.block_size * served.block_size
        root = request_root(served.namespace, job.adapter, job.cache_salt, short_text=job.short_text)
        hashed = (root, action.token_ids[:whole], served.block_size)
        long = whole > LONG_CHAIN_TOKENS
        hashes = await asyncio.to_thread(chain_hashes, *hashed) if long else chain_hashes(*hashed)
        self.chain = BlockHashChain(root, hashes)
        # Under a salt of its own a request can only meet itself, in a later attempt.
        return bool(self.chain.hashes) and (job.options.prefix_caching or action.attempt > 1)

    async def _plan(self, action: ev.LookUp, served: Served, span: trace.Span) -> RequestPlan:
        job, cluster = self._job, self._cluster
        known = await self._make_chain(action, served)
        with telemetry.tracer().start_as_current_span("lookup"):
            hits = await cluster.index.longest_prefix(self.chain.hashes) if known else ()
        unknown = len(action.token_ids) - served.block_size * max((hit.blocks for hit in hits), default=0)
        blocks = {hit.node_id: hit.blocks for hit in hits}
        components = cluster.candidates(served, job.text_tokens, blocks, job.spread, job.adapter)
        far = await cluster.far_hits(self.chain.hashes, blocks, components) if known else {}
        mates = cluster.board_mates(components)
        sent_load, sent_tokens = await cluster.under_way((*components, *mates))
        now = time.monotonic()
        snapshot = ClusterSnapshot(
            model=job.model,
            prompt_tokens=len(action.token_ids),
            hits=blocks,
            far_hits=far,
            components=components,
            policy=job.options.policy,
            block_size=served.block_size,
            chunk_tokens=job.options.chunk_tokens,
            answered_tokens=len(action.token_ids) - len(job.prompt),
            board_mates=mates,
            sent_load=sent_load,
            sent_tokens=sent_tokens,
            fetch_block_s=cluster.fetch_pace.block_s(now),
            bucket_block_s=cluster.bucket_pace.block_s(now),
            demand_per_s=cluster.demand_per_s(),
            demand_tokens=cluster.demand.mean_tokens,
            sticky_choice=cluster.sticky_choices.of(job.model, unknown),
            index_available=cluster.index.available,
            avoid=action.avoid,
            spread=job.spread,
            unscored_from=action.unscored_from,
            adapter=job.adapter,
            own_adapters=cluster.sent_adapters.workers(job.adapter, now),
        )
        decided = make_plan(snapshot)
        if job.adapter:
            workers = {decided.decode.component_id}
            if decided.prefill is not None and decided.chunks:
                workers.add(decided.prefill.component_id)
            cluster.sent_adapters.note(job.adapter, workers, time.monotonic())
        if action.attempt == 1:
            computed = decided.prompt_tokens - decided.cached_tokens
            cluster.demand.note(time.monotonic(), bool(decided.chunks), computed)
            if not job.background:
                prompt = PlannedPrompt(decided.cached_tokens, decided.split_tokens, decided.prompt_tokens)
                cluster.forecaster.planned(job.model, prompt)
        if decided.dial is not None and decided.cached_blocks < decided.limit_blocks:
            cluster.sticky_choices.note(job.model, unknown, bool(decided.chunks))
        span.set_attributes(
            {
                "pillion.attempt": action.attempt,
                "pillion.hit_blocks": snapshot.hits.get(decided.node_id, 0),
                "pillion.sources": [source.node_id for source in decided.sources],
                "pillion.index_available": cluster.index.available,
                "pillion.split_tokens": decided.split_tokens,
                "pillion.reason": decided.reason,
                "pillion.decode_worker": decided.decode.component_id,
                "pillion.prefill_worker": decided.prefill.component_id if decided.prefill else "",
            }
        )
        return decided

    async def _open_ticket(self, action: ev.OpenTicket) -> None:
        job, node_id, total_blocks = self._job, action.plan.node_id, action.plan.total_blocks
        wait_s = job.wait_s(MAX_ADMISSION_WAIT_S)
        try:
            link, hashes = self._cluster.node(node_id), self.chain.hashes
            hold, pinned = await open_ticket(link, job, action, hashes, total_blocks, wait_s, self._span)
        except DeadlineExceeded:
            late = Overloaded(f"no KV memory came free at {node_id} within {wait_s:.0f} s", retry_after_ms=1000)
            self._post(ev.TicketLost(action.attempt, late, retryable=False))
        except PillionError as error:
            self._post(
                ev.TicketLost(action.attempt, error, isinstance(error, _RETRYABLE), self._patience_s(error, None))
            )
        else:
            self._post(ev.TicketGranted(action.attempt, hold, pinned))

    async def _fetch(self, action: ev.Fetch) -> None:
        hashes, pinned = self.chain.first(action.wanted.blocks), action.plan.cached_blocks
        with trace.use_span(self._span):
            bounds_s = [bound_s for bound_s in (self._job.left_s(), action.wanted.limit_s) if bound_s is not None]
            brought = await self._cluster.fetch_blocks(
                action.hold, hashes, action.wanted.source_node_ids, pinned, min(bounds_s, default=None)
            )
        blocks = BroughtTokens(brought.fetched_blocks, brought.restored_blocks, brought.bucket_blocks)
        self.brought_tokens = BroughtTokens._make(count * action.plan.block_size for count in blocks)
        self._post(ev.BlocksFetched(action.attempt, brought.blocks))

    async def _run_span(self, action: ev.RunSpan) -> None:
        job, worker = self._job, action.plan.prefill
        assert worker is not None

        in_step = False

        def acked(ack: ChunkAck) -> None:
            nonlocal in_step
            in_step = True
            if not self._begun:
                self.load.assign_plan(action.plan, ack.end_tokens)
            self._post(ev.ChunkAcked(action.attempt, ack))

        def queued(position: int) -> None:
            nonlocal in_step
            in_step = in_step or not position
            self._still_queued(action.attempt, position)

        try:
            with trace.use_span(self._span):
                if action.plan.remote:
                    end_tokens = await RemoteSpan(self._cluster, job, self.chain, action, acked, queued).run()
                else:
                    # On the decode worker's own node a chunk needs no fetch.
                    end_tokens = action.plan.cached_tokens
                    span = make_span(job, self.chain, action, action.hold.ticket_id, action.plan.cached_blocks)
                    link = self._cluster.prefill(worker.component_id)
                    async for ack in link.run_span(span, job.left_s(), queued):
                        end_tokens = ack.end_tokens
                        acked(ack)
        except PillionError as error:
            if isinstance(error, Unavailable):
                self._cluster.view.suspect(worker.component_id, time.monotonic())
                self._cluster.view.refused(worker.component_id)
            self._failed_at(worker.component_id)
            retryable, broke = isinstance(error, (*_RETRYABLE, Overloaded)), isinstance(error, SpanBroken)
            killed = ""
            if broke and in_step:
                await asyncio.sleep(VERDICT_MS / 1000)
                killed = worker.component_id if self._cluster.node_lives(worker.node_id) else ""
            patience_s = self._patience_s(error, action.hold, broke)
            self._post(ev.SpanLost(action.attempt, error, retryable, patience_s, killed))
        else:
            self._post(ev.SpanEnded(action.attempt, end_tokens))

    def _on_delta(self, attempt: int, delta: DecodeDelta) -> None:
        try:
            if not self._adopted and delta.error is None:
                self._adopted = True
                self._post(ev.TicketAdopted(attempt))
            if delta.prompt_logprobs:
                self._post(ev.PromptScored(attempt, delta.prompt_logprobs))
            if delta.token_ids:
                if not self._begun and self._stream is not None:
                    # The first token shows that the prompt is computed.
                    self._begun = True
                    self.load.assign({self._stream[0]: (1, 0)})
                self._post(ev.TokensSampled(attempt, delta.token_ids, delta.timings, delta.logprobs))
            if delta.finish_reason is not None:
                self._post(ev.DecodeFinished(attempt, delta.finish_reason, delta.timings))
            elif delta.queued is not None:
                self._in_step = self._in_step or not delta.queued
                self._still_queued(attempt, delta.queued)
            elif delta.error is not None:
                error = self._error_of(delta.error)
                if self._stream is not None:
                    self._failed_at(self._stream[0])
                    if isinstance(error, Unavailable):
                        self._cluster.view.refused(self._stream[0])
                if self._suspected(delta):
                    later = partial(self._lose_stream, attempt, delta, error)
                    asyncio.get_running_loop().call_later(VERDICT_MS / 1000, later)
                else:
                    self._lose_stream(attempt, delta, error)
        except Exception as error:  # noqa: BLE001  (a defect must end its request, not the connection of all)
            self._broken(error)

    def _suspected(self, delta: DecodeDelta) -> bool:
        """Whether a connection broke in a step with the stream. A stream that had tokens of this attempt was in many
        steps before, so that another one's prompt is rather to blame, where there was another one."""
        return bool(delta.broken) and (delta.broken == 1 if self._begun else self._in_step)

    def _lose_stream(self, attempt: int, delta: DecodeDelta, error: PillionError) -> None:
        assert delta.error is not None
        killed = ""
        if self._suspected(delta) and self._stream is not None and self._hold is not None:
            # Without its node a worker ends, too.
            killed = self._stream[0] if self._cluster.holds(self._hold) else ""
        patience_s = self._patience_s(error, self._hold, bool(delta.broken))
        self._post(ev.DecodeLost(attempt, error, delta.error.retryable, patience_s, killed))

    def _patience_s(self, error: PillionError, hold: TicketHold | None, broke: bool = False) -> float:
        """How long the request waits for what ended a call with ``error``, because it is merely away; 0.0 where the
        call counts as an attempt, as one does that ``broke`` in the middle. ``hold``: the ticket that the call worked
        under; None: it asked for one."""
        if hold is None:
            # A session that is over, and a node without a pool yet, are both on their way back.
            away = isinstance(error, (*_AWAY, NotFound))
        else:
            # With its node's last life everything that was under the ticket is gone.
            away = (isinstance(error, _AWAY) and not broke) or not self._cluster.holds(hold)
        return self._cluster.return_wait_s(self._job.model, self._job.adapter_rank) if away else 0.0

    def _error_of(self, error: DecodeError) -> PillionError:
        """A worker's error as the client gets it, which knows its own fields alone."""
        fields, text = self._job.grammar_fields, error.message
        if fields and error.code == InvalidRequest.code and text.startswith(GRAMMAR_FAULT):
            return InvalidRequest.of(*(FieldViolation(field, text) for field in fields[:MAX_NAMED_FIELDS]))
        return BY_CODE.get(error.code, Internal)(text)

    def _failed_at(self, component_id: str) -> None:
        """What was sent to the worker does not show that it has the request's adapter: perhaps it cannot have it."""
        if self._job.adapter:
            self._cluster.sent_adapters.forget(self._job.adapter, component_id)

    def _still_queued(self, attempt: int, position: int) -> None:
        if position:
            self._span.add_event("queued", {"pillion.attempt": attempt, "pillion.position": position})
        self._post(ev.StillQueued(attempt, position))

    # ---- small things ---------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work = task
        _background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        _background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken(error)
