"""What lives as long as one epoch of a worker: scheduler and step thread, tickets, the node's line, signs of life.

    serving --the node was silent, or we slept: the lease has lapsed--> holding back what it would say
       |    <--the node answers: not fenced---------------------------------'      |
       |                                                                           | the node answers: fenced,
       +--- a call without an answer, or refused ---------+------------------------+
                                                          v
    ended: nothing is emitted or committed, every owner has heard Unavailable --all steps have landed--> closed

Closed, nothing here touches the pool any more, and the worker may say so (:func:`new_epoch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from opentelemetry.context import Context

from pillion.config import WorkerFlags
from pillion.engine.backends.backend import InFlightStep
from pillion.engine.backends.batching import build_batch, build_sampling
from pillion.engine.backends.loading import LoadedModel
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Ending, Sequence
from pillion.engine.scheduling.step_plan import (
    ChunkDone,
    CommitOrder,
    Outcome,
    ResumeOrder,
    SchedulerLoad,
    StepPlan,
    Update,
)
from pillion.engine.worker.heartbeat import Heartbeat, Lease
from pillion.engine.worker.node_updates import NodeUpdates, describe
from pillion.engine.worker.step_loop import StepLoop
from pillion.engine.worker.step_meter import StepMeter
from pillion.engine.worker.step_spans import record, record_step, shared
from pillion.engine.worker.tickets import Tickets
from pillion.errors import Cancelled, Conflict, DeadlineExceeded, PillionError, Unavailable
from pillion.kvstore.client.node_client import NodeClient
from pillion.observability import telemetry
from pillion.wire.kvnode import CommitResult
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.worker")

SETTLE_POLL_S = 0.01
# A node that does not answer, or has not fenced us yet, is asked for a new epoch again, so many times in all.
MAX_REATTACH_TRIES = 6
REATTACH_RETRY_S = 1.0
# Ends an epoch, not the worker: fenced, or a call whose outcome nobody knows.
_SURVIVABLE = (Conflict, Cancelled, Unavailable, DeadlineExceeded)


class SequenceListener(Protocol):
    """Who gets the news of a sequence, on asyncio's thread. ``trace`` is the parent of its spans."""

    trace: Context

    def on_update(self, update: Update) -> None: ...
    def on_chunk(self, chunk: ChunkDone) -> None: ...


class WorkerEpoch:
    """One epoch's work. Attributes are for reading: ``number``, ``listeners``, ``load``, ``tickets``, ``heartbeat``,
    and what a step may hold: ``max_num_seqs`` sequences, ``max_step_tokens`` tokens, as many as fit into ``target_s``
    (0: any).

    Args:
        scheduler: a fresh one.
        describe: what the registry is told.
        on_lost: called with a reason, maybe more than once, when the epoch cannot go on but the worker can.
        on_fail: called with a reason, maybe more than once, when the worker cannot go on.
        meter: counts the steps.
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
    ) -> None:
        self.number = number
        self.listeners: dict[int, SequenceListener] = {}
        self.load = SchedulerLoad()
        self.max_num_seqs = scheduler.queues.max_num_seqs
        self.max_step_tokens = scheduler.budget.max_tokens
        self.target_s = scheduler.budget.target_s
        self.over = False
        self.deserted = asyncio.Event()
        self.deserted.set()
        self._block_size = flags.block_size
        self._model = model
        self._on_lost = on_lost
        self._on_fail = on_fail
        self._meter = meter
        self._traced = telemetry.recording()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        lease = Lease(flags.heartbeat_timeout_ms / 1000)
        self._steps = StepLoop(
            scheduler,
            self._launch,
            ahead=model.backend.runs_ahead and scheduler.may_run_ahead,
            on_outcome=self._on_outcome,
            on_death=on_fail,
            on_step=self._stepped,
            may_publish=lease.held,
        )
        self.tickets = Tickets(node, number, post_event=self._steps.post_event, lost=self._judge)
        self.heartbeat = Heartbeat(
            flags,
            node,
            number,
            lease,
            describe=describe,
            on_lost=self._judge,
            on_fail=on_fail,
            on_renewed=self._steps.publish,
            on_recall=lambda blocks: self._steps.post_event(Scheduler.recall, blocks),
        )
        self._line = NodeUpdates(
            node,
            number,
            on_committed=self._on_committed,
            on_released=self.tickets.released,
            on_granted=lambda slots: self._steps.post_event(Scheduler.granted, slots),
            on_resume=self._on_resume,
        )

    def start(self) -> None:
        """Begin: steps, the node's line, heartbeats."""
        self._steps.start()
        self._spawn(self._serve_line())
        self._spawn(self.heartbeat.run())

    # Work.

    def add(self, sequence: Sequence, listener: SequenceListener, forks: Mapping[int, SequenceListener]) -> None:
        """Run it. ``listener`` hears of it until an update has an ending; ``forks``, by seq_id, hear of its forks."""
        self.listeners[sequence.seq_id] = listener
        self.listeners.update(forks)
        self.deserted.clear()
        self._steps.post_event(Scheduler.add, sequence)

    def cancel(self, seq_id: int) -> None:
        """Nobody wants it any more; its owner hears nothing further. Unknown ids are ignored (I8)."""
        if self._forget(seq_id) is None:
            return
        self.tickets.stop_resuming(seq_id)
        self._steps.post_event(Scheduler.cancel, seq_id)

    def _forget(self, seq_id: int) -> SequenceListener | None:
        listener = self.listeners.pop(seq_id, None)
        if not self.listeners:
            self.deserted.set()
        return listener

    # The end.

    def end(self, error: PillionError) -> None:
        """Nothing is emitted or committed from now on, and every owner hears ``error``. Idempotent."""
        if self.over:
            return
        self.over = True
        self._steps.halt()
        self.tickets.retire()
        self._cancel_tasks()
        for seq_id in tuple(self.listeners):
            listener = self._forget(seq_id)
            if listener is None:
                # A fork that went with its stream.
                continue
            listener.on_update(Update(seq_id=seq_id, ending=Ending(error=error)))

    async def close(self) -> None:
        """Returns when all steps under way have landed, however long that takes: they may store to the pool until then.
        Idempotent."""
        await self._steps.stop()
        await asyncio.gather(*self._cancel_tasks(), return_exceptions=True)
        await self.heartbeat.close()

    async def settled(self) -> None:
        """Returns when no sequence is left and the node has heard everything."""
        while await self._count():  # noqa: ASYNC110  (what is awaited lives in another thread)
            await asyncio.sleep(SETTLE_POLL_S)
        # Outcomes come in order: what was decided before the count has been read once a second one is here.
        await self._count()
        await self._line.drained()

    async def _count(self) -> int:
        loop = asyncio.get_running_loop()
        count: asyncio.Future[int] = loop.create_future()

        def ask(scheduler: Scheduler, now: float) -> None:
            loop.call_soon_threadsafe(answer, scheduler.num_sequences)

        def answer(number: int) -> None:
            if not count.done():
                count.set_result(number)

        self._steps.post_event(ask)
        return await count

    def _judge(self, error: PillionError) -> None:
        """A call to the node failed: the end of the epoch, or of the worker."""
        if not self.over:
            (self._on_lost if isinstance(error, _SURVIVABLE) else self._on_fail)(describe(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the worker died", exc_info=error)
            self._on_fail(f"a task died: {error!r}")

    def _cancel_tasks(self) -> tuple[asyncio.Task[None], ...]:
        current = asyncio.current_task()
        tasks = tuple(task for task in self._tasks if task is not current)
        for task in tasks:
            task.cancel()
        return tasks

    # The step thread's side.

    def _stepped(self, plan: StepPlan, seconds: float, *, ok: bool) -> None:
        tokens = self._meter.ran(plan, seconds, ok=ok)
        if self._traced and shared(plan):
            now_s, seq_ids = time.monotonic(), [piece.sequence.seq_id for piece in plan.pieces]
            with contextlib.suppress(RuntimeError):
                # Before the outcome, so that nobody has left yet.
                self._loop.call_soon_threadsafe(self._record_step, now_s - seconds, now_s, tokens, seq_ids)

    def _record_step(self, start_s: float, end_s: float, tokens: dict[str, int], seq_ids: list[int]) -> None:
        listeners = (self.listeners.get(seq_id) for seq_id in seq_ids)
        record_step(start_s, end_s, tokens, [listener.trace for listener in listeners if listener is not None])

    def _launch(self, plan: StepPlan) -> InFlightStep:
        batch, rows = build_batch(plan, self._block_size), build_sampling(plan)
        return self._model.backend.launch(batch, plan.copies, rows)

    def _on_outcome(self, outcome: Outcome) -> None:
        if self.over:
            return
        self.load = outcome.load
        self._meter.heard(outcome)
        # First of all, so that no slot depends on what an owner does.
        self._line.put(outcome)
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

    # The node's side.

    def _on_resume(self, order: ResumeOrder) -> None:
        self._spawn(self._resume(order))

    async def _resume(self, order: ResumeOrder) -> None:
        # Asked in the task: a cancel that came before its first step found nothing in the node's line to take out.
        if order.seq_id in self.listeners:
            await self.tickets.resume(order)

    async def _serve_line(self) -> None:
        try:
            await self._line.run()
        except PillionError as error:
            self._judge(error)

    def _on_committed(self, order: CommitOrder, result: CommitResult) -> None:
        listener = self.listeners.get(order.seq_id)
        if listener is not None:
            said: dict[str, int | str] = {"pillion.blocks": len(order.slots), "pillion.refusal": result.refusal}
            record("kv.commit", listener.trace, order.ordered_s, time.monotonic(), said)
        self._steps.post_event(Scheduler.committed, order.seq_id, result.slots, result.refusal)
        if listener is not None and not result.refusal:
            for chunk in order.chunks:
                listener.on_chunk(chunk)


async def new_epoch(node: NodeClient, old: int, fenced_after_s: float) -> int:
    """A new epoch for the word that nothing of the ``old`` one is in use any more.

    A node that has not fenced the old one (a call's answer was lost, nothing worse) does so after ``fenced_after_s`` of
    silence. Raises Unavailable after MAX_REATTACH_TRIES, NotFound where the old epoch is void.
    """
    for _ in range(MAX_REATTACH_TRIES):
        try:
            return await node.reattach(old)
        except Conflict:
            await asyncio.sleep(fenced_after_s)
        except (Unavailable, DeadlineExceeded):
            # If it was heard all the same, the next try finds the old epoch void, and the worker ends.
            await asyncio.sleep(REATTACH_RETRY_S)
    raise Unavailable(f"the KV node gave no new epoch in {MAX_REATTACH_TRIES} tries")
