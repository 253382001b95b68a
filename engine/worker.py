"""What both services share on asyncio's side: a model over a mapped pool, its step thread, and its word with the node.

    start:  prepare and load the model -> attach to the node (the pool is mapped) -> bind, warm up -> step thread
    live:   servicer --adopt, add, cancel--> step thread --outcomes--> owners (tokens, chunks) and node line (orders)
    end:    stop() by the process, or fail(): the node went away, fenced this epoch, or the step thread died

A worker that failed neither emits nor commits any more; its process exits and is started again. Whatever it held, the
node frees when the attach socket ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from opentelemetry.context import Context

from engine.batching import build_batch, build_sampling
from engine.heartbeat import Heartbeat
from engine.loading import BackendFactory, LoadedModel, load_model, thread_count
from engine.ngram import NGramDrafter
from engine.node_line import NodeLine, describe
from engine.plan import ChunkDone, CommitOrder, Load, Outcome, ResumeOrder, Sampled, StepPlan, Update
from engine.sampler import sample
from engine.scheduler import Scheduler
from engine.sequence import Ending, Holding, Sequence, SequenceSpec
from engine.spans import record
from engine.step_loop import StepLoop
from engine.tickets import Tickets
from kvstore.attach import Attachment, attach
from kvstore.client import NodeClient
from pillion.config import WorkerFlags
from pillion.errors import NotFound, PillionError, Unavailable
from pillion.wire.kvnode import CommitResult
from pillion.wire.registry import PartRecord

log = logging.getLogger("pillion.worker")

ATTACH_TIMEOUT_S = 30.0
# Longest time that stopping waits for the node to hear the last orders.
DRAIN_TIMEOUT_S = 2.0
SETTLE_POLL_S = 0.01
# A step of a huge budget would make the start long; what it still has to allocate, it allocates when it comes.
MAX_WARM_UP_TOKENS = 512


class Owner(Protocol):
    """Who gets the news of a sequence, on asyncio's thread. ``trace`` is the parent of its spans."""

    trace: Context

    def on_update(self, update: Update) -> None: ...
    def on_chunk(self, chunk: ChunkDone) -> None: ...


class Worker:
    """Made by :meth:`start`. Attributes are for reading: ``model``, ``part_id``, ``load``, ``owners``, ``tickets``."""

    def __init__(
        self, flags: WorkerFlags, role: str, model: LoadedModel, attachment: Attachment, scheduler: Scheduler
    ) -> None:
        self.flags = flags
        self.role = role
        self.part_id = flags.part_id or f"{role}-{os.getpid()}"
        self.model = model
        self.block_size = flags.block_size
        self.load = Load()
        self.owners: dict[int, Owner] = {}
        self.draining = False
        self._closed = False
        self._attachment = attachment
        self._epoch = attachment.epoch
        self._node = NodeClient(attachment.node_address, self.part_id)
        self._scheduler = scheduler
        self._address = ""
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._steps = StepLoop(scheduler, self._run, on_outcome=self._on_outcome, on_death=self.fail)
        self.tickets = Tickets(self._node, self._epoch, tell=self._steps.tell, fail=self.fail)
        self._heartbeat = Heartbeat(
            flags,
            self._node,
            self._epoch,
            describe=self._describe,
            on_fail=self.fail,
            on_recall=lambda blocks: self._steps.tell(Scheduler.recall, blocks),
        )
        self._line = NodeLine(
            self._node,
            self._epoch,
            on_committed=self._on_committed,
            on_released=self.tickets.released,
            on_granted=lambda slots: self._steps.tell(Scheduler.granted, slots),
            on_resume=self._on_resume,
        )

    @classmethod
    async def start(
        cls,
        flags: WorkerFlags,
        role: str,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        target_itl_ms: float = 0.0,
        num_speculative_tokens: int = 0,
        backend_factory: BackendFactory = load_model,
    ) -> Worker:
        """Load, attach and run. Raises ConfigError for what cannot work, Unavailable when no node answers."""
        model = await asyncio.to_thread(backend_factory, flags, thread_count(flags))
        longest = flags.max_model_len or model.prepared.max_model_len
        scheduler = Scheduler(
            block_size=flags.block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            target_itl_s=target_itl_ms / 1000,
            max_whole_tokens=0 if flags.enable_chunked_prefill else longest,
            drafter=NGramDrafter(num_speculative_tokens) if num_speculative_tokens else None,
        )
        attachment = await asyncio.to_thread(
            attach,
            flags.attach_socket,
            part_id=flags.part_id or f"{role}-{os.getpid()}",
            role=role,
            block_bytes=model.backend.layout.block_bytes,
            timeout_s=ATTACH_TIMEOUT_S,
        )
        worker = cls(flags, role, model, attachment, scheduler)
        try:
            await asyncio.to_thread(worker._bind, max_num_batched_tokens)
        except BaseException:
            await worker._node.aclose()
            attachment.close()
            raise
        asyncio.get_running_loop().add_reader(attachment.fileno(), worker._node_gone)
        worker._steps.start()
        worker._spawn(worker._serve_line())
        worker._spawn(worker._heartbeat.run())
        return worker

    def _bind(self, max_tokens: int) -> None:
        self.model.backend.bind_pool(self._attachment.memory, self._attachment.num_slots)
        self.model.backend.warm_up(min(max_tokens, MAX_WARM_UP_TOKENS))

    def announce(self, address: str) -> None:
        """From now on the registry says that this worker serves at ``address``."""
        self._address = address
        self._heartbeat.announce()

    def _describe(self) -> PartRecord:
        prepared = self.model.prepared
        return PartRecord(
            part_id=self.part_id,
            role=self.role,
            address=self.flags.advertise or self._address,
            model=self.flags.served_model_name or prepared.name,
            fingerprint=prepared.fingerprint,
            namespace=self.model.namespace().hex(),
            block_size_tokens=self.block_size,
            max_model_len_tokens=self.max_model_len,
            vocab_size=self.model.backend.vocab_size,
            node_id=self._attachment.node_id,
            kernels=self.model.operators,
            running_requests=self.load.running,
            waiting_requests=self.load.waiting,
            waiting_tokens=self.load.waiting_tokens,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of %s died", self.part_id, exc_info=error)
            self.fail(f"a task died: {error!r}")

    # What servicers call.

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence: what the model allows, and what the pool can hold of one."""
        said = self.flags.max_model_len or self.model.prepared.max_model_len
        return min(said, self._attachment.num_slots * self.block_size)

    def check_open(self) -> None:
        """Raises Unavailable when no new work is taken."""
        if self.draining or self._failure.done():
            raise Unavailable(f"{self.part_id} is stopping")

    def make(self, spec: SequenceSpec, holding: Holding, tail_hash: bytes) -> Sequence:
        """The sequence for :meth:`add`, of a ticket that :attr:`tickets` adopted.

        Raises NotFound, and lets go of the holding, if the ticket's chain holds other tokens than ``spec`` says: nobody
        ever reads KV of another prompt.
        """
        chain, first = len(holding.chain_slots), spec.start_tokens // self.block_size
        sequence = Sequence(spec, holding, self.block_size, time.monotonic())
        if chain > first:
            fits = sequence.left_to_compute >= (0 if sequence.is_span else 1)
            fits = fits and sequence.block_hashes(chain - 1, chain) == tail_hash
        else:
            fits = not tail_hash or tail_hash == spec.parent_hash
        if not fits:
            self.tickets.let_go(holding)
            raise NotFound("the ticket's chain is not of these tokens: plan again")
        return sequence

    def next_id(self) -> int:
        """A seq_id: the place in the order of arrival."""
        return next(self._ids)

    def add(self, sequence: Sequence, owner: Owner, forks: Mapping[int, Owner] | None = None) -> None:
        """Run it. ``owner`` hears of it until an update has an ending; ``forks``, by seq_id, hear of its forks."""
        if self._failure.done():
            raise Unavailable(self._failure.result())
        self.owners[sequence.seq_id] = owner
        self.owners.update(forks or {})
        self._deserted.clear()
        self._steps.tell(Scheduler.add, sequence)

    def cancel(self, seq_id: int) -> None:
        """Nobody wants it any more; its owner hears nothing further. Unknown ids are ignored (I8)."""
        if self._forget(seq_id) is None:
            return
        self.tickets.stop_resuming(seq_id)
        self._steps.tell(Scheduler.cancel, seq_id)

    def _forget(self, seq_id: int) -> Owner | None:
        owner = self.owners.pop(seq_id, None)
        if not self.owners:
            self._deserted.set()
        return owner

    # Life and death.

    async def wait_failed(self) -> str:
        """Returns why the worker died by itself; never, when it did not."""
        return await asyncio.shield(self._failure)

    def fail(self, reason: str) -> None:
        """It may not go on: nothing is emitted or committed from now on, and every owner hears so."""
        if self._failure.done():
            return
        log.error("%s cannot go on: %s", self.part_id, reason)
        self._failure.set_result(reason)
        self._steps.halt()
        self._cancel_tasks()
        for seq_id in tuple(self.owners):
            owner = self._forget(seq_id)
            if owner is None:
                # A fork that went with its stream.
                continue
            owner.on_update(Update(seq_id=seq_id, ending=Ending(error=Unavailable(f"{self.part_id} died: {reason}"))))

    async def drain(self, grace_s: float) -> None:
        """Take no more work, and give what is there up to ``grace_s`` seconds."""
        self.draining = True
        await self._heartbeat.leave(self.part_id)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deserted.wait(), grace_s)

    async def close(self) -> None:
        """Cancel what is left, let the node hear the last orders, and detach. Idempotent."""
        if self._closed:
            return
        self._closed = self.draining = True
        for seq_id in tuple(self.owners):
            self.cancel(seq_id)
        if not self._failure.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled(), DRAIN_TIMEOUT_S)
        await self._steps.stop()
        tasks = self._cancel_tasks()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self._attachment.fileno())
        await self._heartbeat.close()
        await self._node.aclose()
        self.model.backend.close()
        self._attachment.close()

    async def _settled(self) -> None:
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

        self._steps.tell(ask)
        return await count

    def _cancel_tasks(self) -> tuple[asyncio.Task[None], ...]:
        current = asyncio.current_task()
        tasks = tuple(task for task in self._tasks if task is not current)
        for task in tasks:
            task.cancel()
        return tasks

    def _node_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._attachment.fileno())
        self.fail("the KV node went away")

    # The step thread's side.

    def _run(self, plan: StepPlan) -> Sampled:
        backend = self.model.backend
        if plan.copies:
            backend.copy_blocks(*zip(*plan.copies, strict=True))
        return sample(backend.forward(build_batch(plan, self.block_size)), build_sampling(plan))

    def _on_outcome(self, outcome: Outcome) -> None:
        if self._failure.done():
            return
        self.load = outcome.load
        # First of all, so that no slot depends on what an owner does.
        self._line.put(outcome)
        for chunk in outcome.chunks:
            owner = self.owners.get(chunk.seq_id)
            if owner is not None:
                owner.on_chunk(chunk)
        for update in outcome.updates:
            owner = self.owners.get(update.seq_id)
            if owner is not None:
                if update.ending is not None:
                    self._forget(update.seq_id)
                owner.on_update(update)

    # The node's side.

    def _on_resume(self, order: ResumeOrder) -> None:
        self._spawn(self._resume(order))

    async def _resume(self, order: ResumeOrder) -> None:
        # Asked in the task: a cancel that came before its first step found nothing in the node's line to take out.
        if order.seq_id in self.owners:
            await self.tickets.resume(order)

    async def _serve_line(self) -> None:
        try:
            await self._line.run()
        except PillionError as error:
            self.fail(describe(error))

    def _on_committed(self, order: CommitOrder, result: CommitResult) -> None:
        owner = self.owners.get(order.seq_id)
        if owner is not None:
            said: dict[str, int | str] = {"pillion.blocks": len(order.slots), "pillion.refusal": result.refusal}
            record("kv.commit", owner.trace, order.ordered_s, time.monotonic(), said)
        self._steps.tell(Scheduler.committed, order.seq_id, result.slots, result.refusal)
        if owner is not None and not result.refusal:
            for chunk in order.chunks:
                owner.on_chunk(chunk)
