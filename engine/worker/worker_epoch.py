"""One epoch of a worker: its scheduler and step thread, tickets, node updates and heartbeats.

    serving --heartbeats unanswered, or process paused: the term lapsed--> outcomes held back
       |    <--reply: not fenced-------------------------------------------'      |
       |                                                                          | reply: fenced
       +--- a call failed, or got no reply ---------------+-----------------------+
                                                          v
    ended: nothing is emitted or committed, every listener got Unavailable --all steps have ended--> closed

A closed epoch no longer accesses the pool, so the worker may ask the node for a new one (:func:`new_epoch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from opentelemetry.context import Context

from pillion.config import WorkerFlags
from pillion.engine.backends.backend import InFlightStep, PackedAdapter, bound_adapters
from pillion.engine.backends.batching import build_sampling, build_step_batch
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.scheduling.block_chain import ChunkDone
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Ending, Sequence, SequenceProgress
from pillion.engine.scheduling.step_plan import (
    CommitOrder,
    Outcome,
    ResumeOrder,
    StepPlan,
    Update,
)
from pillion.engine.worker.heartbeat import EpochTerm, Heartbeats
from pillion.engine.worker.node_updates import NodeUpdates, describe_failure
from pillion.engine.worker.step_loop import StepLoop
from pillion.engine.worker.tickets import Tickets
from pillion.engine.worker.worker_telemetry import StepMeter, StepUse, record, record_step
from pillion.errors import Cancelled, Conflict, DeadlineExceeded, Internal, NotFound, PillionError, Unavailable
from pillion.kernels.step import RowMasks, SamplingRows
from pillion.kvstore.client.node_client import NodeClient
from pillion.observability import telemetry
from pillion.v1.kvnode_pb2 import CommitRunResult
from pillion.wire.registry import ComponentRecord, WorkerLoad

log = logging.getLogger("pillion.worker")

T = TypeVar("T")

SETTLE_POLL_S = 0.01
# Interval of heartbeats to the caller of a waiting stream or prefill range.
QUEUE_HEARTBEAT_MS = 20_000
MAX_REATTACH_TRIES = 6
REATTACH_RETRY_S = 1.0


class SequenceListener(Protocol):
    """Receiver of a sequence's updates, on the event loop. ``trace``: parent of the sequence's spans."""

    trace: Context

    def on_begun(self) -> None:
        """Handle the start of the first step of the sequence's prompt."""

    def on_update(self, update: Update) -> None: ...
    def on_chunk(self, chunk: ChunkDone) -> None: ...


class WorkerEpoch:
    """One epoch of a worker. Read-only attributes: ``number``, ``listeners``, ``load``, ``tickets``, ``heartbeats``,
    and a step's limits: ``max_num_seqs`` sequences, ``max_step_tokens`` tokens, ``target_s`` seconds or
    ``target_steps`` decode-only steps (0: no target).

    Args:
        scheduler: an unused one.
        describe: returns the registry's record.
        on_lost: called with a reason, possibly several times, if the epoch cannot continue but the worker can.
        on_fail: called with a reason, possibly several times, if the worker cannot continue.
        meter: counts steps, over all epochs.
        load_adapter: loads an adapter by digest for the scheduler; None without --enable-lora.
        step_masks: returns the grammar masks of a step; None if the worker compiles no grammars.
    """

    def __init__(
        self,
        flags: WorkerFlags,
        model: LoadedModel,
        node: NodeClient,
        number: int,
        scheduler: Scheduler,
        *,
        describe: Callable[[], ComponentRecord],
        on_lost: Callable[[str], None],
        on_fail: Callable[[str], None],
        meter: StepMeter,
        load_adapter: Callable[[str], Awaitable[PackedAdapter]] | None = None,
        step_masks: Callable[[StepPlan], RowMasks | None] | None = None,
    ) -> None:
        self.number = number
        self.listeners: dict[int, SequenceListener] = {}
        self.load = WorkerLoad()
        self.max_num_seqs = scheduler.queues.max_num_seqs
        self.max_step_tokens = scheduler.budget.max_tokens
        self.target_s, self.target_steps = scheduler.budget.target_s, scheduler.budget.target_steps
        self._end_error: PillionError | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._block_size = flags.block_size
        self._model = model
        self._on_lost = on_lost
        self._on_fail = on_fail
        self._meter = meter
        self._read_adapter, self._step_masks = load_adapter, step_masks
        self._traced = telemetry.recording()
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._cancels_tasks = False
        term = EpochTerm(flags.heartbeat_timeout_ms / 1000, time.monotonic)
        self._steps = StepLoop(
            scheduler,
            self._launch,
            self._choose,
            max_in_flight=model.backend.max_steps_in_flight,
            on_outcome=self._on_outcome,
            on_death=on_fail,
            on_step=self._on_step,
            may_publish=term.valid,
        )
        self.tickets = Tickets(node, number, post_event=self._steps.post_event, on_lost=self._end_after)
        self.heartbeats = Heartbeats(
            flags,
            node,
            number,
            term,
            describe=describe,
            on_lost=self._end_after,
            on_fail=on_fail,
            on_renewed=self._steps.publish,
            on_recall=lambda blocks: self._steps.post_event(Scheduler.recall, blocks),
        )
        self._updates = NodeUpdates(
            node,
            number,
            tickets=self.tickets,
            post_event=self._steps.post_event,
            on_committed=self._on_committed,
            on_resume=self.resume,
            on_chain=lambda order: self._spawn(self.tickets.open_chain(order)),
        )

    def start(self) -> None:
        """Start the step thread, the node updates and the heartbeats."""
        self._steps.start()
        self._spawn(self._send_updates())
        self._spawn(self.heartbeats.run())

    def add(
        self,
        sequence: Sequence,
        listeners: Mapping[int, SequenceListener],
        last_hash: bytes,
    ) -> SequenceProgress:
        """Queue a sequence that has a ticket; ``last_hash``: of the last block of the ticket's chain. ``listeners``, by
        seq_id, get the updates of the sequence and of its parallel samples, up to the ending.

        Raises NotFound if the chain does not match the sequence's tokens, since KV of another prompt must never be
        read, lacks a state, or contains tokens that are yet to be scored; Unavailable if the epoch has ended.
        """
        chain, first = sequence.num_committed, sequence.start_tokens // self._block_size
        if chain > first:
            fits = sequence.left_to_compute >= (0 if sequence.is_prefill else 1)
            fits = fits and sequence.block_hashes(chain - 1, chain) == last_hash
        else:
            fits = not last_hash or last_hash == sequence.parent_hash
        # A chain without its state cannot be continued.
        fits = fits and (bool(sequence.state_slots) or not (chain and self._model.backend.layout.state_pages))
        unscored = sequence.unscored_from
        if not fits or (unscored is not None and sequence.num_computed > unscored):
            raise NotFound("the ticket's chain has other tokens, no state, or tokens yet to be scored: plan again")
        if self._end_error is not None:
            raise self._end_error
        self.listeners.update(listeners)
        self.idle.clear()
        self._steps.post_event(Scheduler.add, sequence)
        return sequence.progress

    def expect_adapter(self, digest: str) -> None:
        """Announce that a sequence with this adapter will follow, so that it can be loaded."""
        self._steps.post_event(Scheduler.expect_adapter, digest)

    def cancel(self, seq_id: int) -> None:
        """End a sequence; its listener gets no more updates. Unknown ids are ignored (I8)."""
        if self._forget(seq_id) is None:
            return
        self.tickets.stop_waiting(seq_id)
        self._steps.post_event(Scheduler.cancel, seq_id)

    def wake(self) -> None:
        """Wake the step thread because a late mask is ready. Thread-safe."""
        self._steps.post_event(lambda scheduler, now: None)

    def _forget(self, seq_id: int) -> SequenceListener | None:
        listener = self.listeners.pop(seq_id, None)
        if not self.listeners:
            self.idle.set()
        return listener

    @property
    def held_back(self) -> int:
        """Number of outcomes held back because the term has lapsed."""
        return self._steps.held_back

    @property
    def over(self) -> bool:
        return self._end_error is not None

    def end(self, error: PillionError) -> None:
        """End the epoch: nothing is emitted or committed from now on, and every listener gets ``error``. Idempotent."""
        if self._end_error is not None:
            return
        self._end_error = error
        self._steps.halt()
        self.tickets.retire()
        self._cancel_tasks()
        for seq_id in tuple(self.listeners):
            listener = self._forget(seq_id)
            if listener is not None:
                listener.on_update(Update(seq_id=seq_id, ending=Ending(error=error)))

    async def close(self) -> None:
        """Wait for all steps in flight, without a timeout, because they may write to the pool until they end; then stop
        the heartbeats. Idempotent."""
        await self._steps.stop()
        await asyncio.gather(*self._cancel_tasks(), return_exceptions=True)
        await self.heartbeats.close()

    async def settled(self) -> None:
        """Return once no sequence is left and the node has replied to all orders."""
        while await self._count_sequences():  # noqa: ASYNC110  (what is awaited lives in another thread)
            await asyncio.sleep(SETTLE_POLL_S)
        # Outcomes arrive in order, so after a second count all outcomes from before the first have arrived.
        await self._count_sequences()
        await self._updates.drained()

    async def positions(self) -> dict[int, int]:
        """Return the queue positions, by seq_id, of sequences that do not decode yet (Scheduler.positions). Sequences
        that wait for memory at the node come last.

        The step thread answers between two steps, so an answer shows that it is alive. Returns {} after
        QUEUE_HEARTBEAT_MS without one.
        """
        try:
            async with asyncio.timeout(QUEUE_HEARTBEAT_MS / 1000):
                queued = await self._ask(Scheduler.positions)
                return {seq_id: at for at, seq_id in enumerate(self.tickets.waiting, len(queued) + 1)} | queued
        except TimeoutError:
            return {}

    async def _count_sequences(self) -> int:
        return await self._ask(lambda scheduler: len(scheduler.sequences))

    async def _ask(self, read: Callable[[Scheduler], T]) -> T:
        """Call ``read`` on the step thread, between two steps, and return its result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def ask(scheduler: Scheduler, now: float) -> None:
            loop.call_soon_threadsafe(answer, read(scheduler))

        def answer(value: T) -> None:
            if not result.done():
                result.set_result(value)

        self._steps.post_event(ask)
        return await result

    def _end_after(self, error: PillionError) -> None:
        """End the epoch, or the worker, after a failed call to the node."""
        if not self.over:
            survivable = isinstance(error, Conflict | Cancelled | Unavailable | DeadlineExceeded)
            (self._on_lost if survivable else self._on_fail)(describe_failure(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        # Report a task that was cancelled by mistake: its waiters would wait forever.
        cancelled = Internal("cancelled unexpectedly") if not self._cancels_tasks else None
        error = cancelled if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the worker died", exc_info=error)
            self._on_fail(f"a task died: {error!r}")

    def _cancel_tasks(self) -> tuple[asyncio.Task[None], ...]:
        """Cancel all tasks except the running one, and return them."""
        self._cancels_tasks = True
        current = asyncio.current_task()
        tasks = tuple(task for task in self._tasks if task is not current)
        for task in tasks:
            task.cancel()
        return tasks

    def _on_step(self, plan: StepPlan, seconds: float, ok: bool) -> None:
        tokens = self._meter.count_step(plan, seconds, ok)
        # Only steps with prompt tokens get a span, since they may delay their decodes.
        if self._traced and (tokens[StepUse.TAIL] or tokens[StepUse.PREFILL]):
            now_s, seq_ids = time.monotonic(), [chunk.sequence.seq_id for chunk in plan.scheduled]
            with contextlib.suppress(RuntimeError):
                # Posted before the outcome, so that no listener has left yet.
                self._loop.call_soon_threadsafe(self._record_step, now_s - seconds, now_s, tokens, seq_ids)

    def _record_step(self, start_s: float, end_s: float, tokens: dict[str, int], seq_ids: list[int]) -> None:
        listeners = (self.listeners.get(seq_id) for seq_id in seq_ids)
        record_step(start_s, end_s, tokens, [listener.trace for listener in listeners if listener is not None])

    def _launch(self, plan: StepPlan) -> InFlightStep:
        backend = self._model.backend
        sequences = (chunk.sequence for chunk in plan.scheduled)
        begun = [seq.seq_id for seq in sequences if seq.progress.tail_steps == 1 and not seq.progress.first_token_s]
        if begun:
            # Report before the step runs, so that a request that crashes this process can be identified.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._report_begun, begun)
        for slot, packed in plan.placements:
            bound_adapters(backend.adapters).place(slot, packed)
        batch = build_step_batch(plan, self._block_size)
        return backend.launch(batch, plan.copies, None if plan.awaits_tokens else self._sampling_rows(plan))

    def _report_begun(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            listener = self.listeners.get(seq_id)
            if listener is not None:
                listener.on_begun()

    def _choose(self, plan: StepPlan, step: InFlightStep) -> None:
        step.choose(self._sampling_rows(plan))

    def _sampling_rows(self, plan: StepPlan) -> SamplingRows:
        masks = None
        if any(chunk.sequence.grammar is not None for chunk in plan.scheduled):
            assert self._step_masks is not None
            masks = self._step_masks(plan)
        return build_sampling(plan, masks)

    def _on_outcome(self, outcome: Outcome) -> None:
        if self.over:
            return
        self.load = WorkerLoad(**outcome.load)
        self._meter.count_outcome(outcome)
        # Orders first, so that no slot is lost if a listener raises.
        self._updates.put(outcome)
        for digest in outcome.adapter_orders:
            self._spawn(self._load_adapter(digest))
        for chunk in outcome.chunks:
            listener = self.listeners.get(chunk.seq_id)
            if listener is not None:
                listener.on_chunk(chunk)
        for update in outcome.updates:
            listener = self.listeners.get(update.seq_id)
            if listener is not None:
                if update.ending is not None:
                    self._forget(update.seq_id)
                listener.on_update(update)

    async def _load_adapter(self, digest: str) -> None:
        assert self._read_adapter is not None
        try:
            packed = await self._read_adapter(digest)
        except PillionError as error:
            self._steps.post_event(Scheduler.adapter_failed, digest, error)
        else:
            self._steps.post_event(Scheduler.adapter_loaded, digest, packed)

    def resume(self, order: ResumeOrder) -> None:
        """Start to open a new ticket for a preempted sequence."""
        self._spawn(self._resume(order))

    async def _resume(self, order: ResumeOrder) -> None:
        # A cancellation before this task started had no wait to end.
        if order.seq_id in self.listeners:
            await self.tickets.resume(order)

    async def _send_updates(self) -> None:
        try:
            await self._updates.run()
        except PillionError as error:
            self._end_after(error)

    def _on_committed(self, order: CommitOrder, result: CommitRunResult) -> None:
        listener = self.listeners.get(order.seq_id)
        if listener is not None:
            attributes: dict[str, int | str] = {"pillion.blocks": len(order.slots), "pillion.refusal": result.refusal}
            record("kv.commit", listener.trace, order.ordered_s, time.monotonic(), attributes)
        self._steps.post_event(Scheduler.committed, order.seq_id, result.slots, result.refusal)
        if listener is not None and not result.refusal:
            for chunk in order.chunks:
                listener.on_chunk(chunk)


async def new_epoch(node: NodeClient, old: int) -> int:
    """Get a new epoch from the node, which frees all slots and pins of the ``old`` one; they must be unused.

    Retries are idempotent. Raises Unavailable after MAX_REATTACH_TRIES, NotFound if the old epoch is void.
    """
    for _ in range(MAX_REATTACH_TRIES):
        try:
            return await node.reattach(old)
        except (Unavailable, DeadlineExceeded):
            await asyncio.sleep(REATTACH_RETRY_S)
    raise Unavailable(f"no new epoch from the KV node in {MAX_REATTACH_TRIES} tries")
