"""A worker, which both services share: a model over a mapped pool, and its place at a KV node, epoch by epoch.

    start:   prepare and load the model -> attach to the node (the pool is mapped) -> bind, warm up -> first WorkerEpoch
             a process that stands by has loaded and warmed up before its turn to attach comes
    live:    servicer --adopt, add, cancel--> WorkerEpoch --outcomes--> listeners (tokens, chunks) and the node (orders)
    fenced:  the WorkerEpoch ends: no emission, no commit, every listener gets Unavailable, new work is refused
               -> its last step has ended -> "drained" to the node, which frees what the epoch held -> new epoch
               -> a fresh WorkerEpoch over the same pool, model and attachment -> back in the registry: live
    its node is gone, and the pool outlives it: the same, with the node's next life instead of "drained"
    end:     stop() by the process; or fail(): the node went away, gives no new epoch, or the step thread died

A worker that was only paused (SIGSTOP, then SIGCONT) goes through *fenced* and loads nothing again (I4). A worker that
failed neither emits nor commits any more; its process exits and is started again. The node frees what it held when the
attach socket ends. The time from *fenced* to *live* is bounded here, except for a step that does not end: the process's
parent kills it then (``--fence-kill-after-s``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Protocol

from pillion.adapter_folders import is_adapter_digest
from pillion.config import WorkerFlags
from pillion.engine.adapters.adapter_process import AdapterProcess
from pillion.engine.backends.draft_loading import load_draft
from pillion.engine.backends.draft_model import DraftModel
from pillion.engine.backends.loading import BackendFactory, LoadedModel, load_model, thread_count
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.engine.scheduling.draft_control import DraftControl
from pillion.engine.scheduling.lookup_drafters import make_lookup_drafter
from pillion.engine.scheduling.scheduler import Scheduler, scored_rows
from pillion.engine.worker.adapter_loader import AdapterLoader
from pillion.engine.worker.step_meter import StepMeter, load_readings, rank_readings
from pillion.engine.worker.worker_epoch import WorkerEpoch, new_epoch
from pillion.errors import FieldViolation, InvalidRequest, PillionError, Unavailable
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.memory.memory import until_over
from pillion.observability import metric_catalog
from pillion.observability.metrics import Meters
from pillion.speculative_config import NO_SPECULATION, SpeculativeConfig
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.worker")

ATTACH_TIMEOUT_S = 30.0
# Longest time that stopping waits for the node to answer the last orders.
DRAIN_TIMEOUT_S = 2.0
# So few tokens have a worker read all weights and run all kernels once. Larger steps take their memory when they come,
# which costs milliseconds; to run one at each start would cost more than all else that a forked worker does.
WARM_UP_TOKENS = 16


class StartTurn(Protocol):
    """When a process may take part: at once, or, where it stands by, when its turn comes."""

    @property
    def waiting(self) -> bool:
        """Whether it has not come yet."""

    def wait(self) -> float:
        """Blocks until it has come; returns for how many seconds this process has waited in all."""


class _AtOnce:
    """The turn of a process that stands by for nobody."""

    waiting = False

    def wait(self) -> float:
        """Returns at once."""
        return 0.0


AT_ONCE = _AtOnce()


class Worker:
    """A decode or prefill worker without its service; made by :meth:`start`.

    Attributes are for reading: ``model``, ``component_id``, ``node``, ``attachment``, ``meters``, ``grammars``, which
    is None where no grammar can be followed, ``adapters``, which is None where there are none, and ``epoch``, which is
    replaced when the worker was fenced.
    """

    def __init__(
        self,
        flags: WorkerFlags,
        role: str,
        component_id: str,
        model: LoadedModel,
        attachment: Attachment,
        make_scheduler: Callable[[], Scheduler],
        grammars: GrammarCompiler | None,
        draft: DraftModel | None = None,
    ) -> None:
        self.flags = flags
        self.grammars = grammars
        self.role = role
        self.component_id = component_id
        self.model = model
        self._draft = draft
        self.block_size = flags.block_size
        self.draining = False
        self._closed = False
        self.attachment = attachment
        self._make_scheduler = make_scheduler
        self.node = NodeClient(attachment.node_address, self.component_id)
        self._address = ""
        self._ids = itertools.count(1)
        self._start_s = 0.0
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._returning: asyncio.Task[None] | None = None
        self._node_gone = asyncio.Event()
        self.meters = Meters()
        self._meter = StepMeter(self.meters)
        self.adapters = self._make_loader() if flags.enable_lora else None
        self.epoch = self._make_epoch(attachment.epoch)
        if grammars is not None:
            grammars.mask_threads.wake = lambda: self.epoch.wake()
            grammars.on_compiled = self.meters.distribution(metric_catalog.GRAMMAR_COMPILE).observe
        self.meters.watch(lambda: load_readings(self.epoch.load, self.epoch.max_num_seqs))
        if model.ranks is not None:
            self.meters.watch(partial(rank_readings, model.ranks))

    @classmethod
    async def start(
        cls,
        flags: WorkerFlags,
        role: str,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        target_itl_ms: float = 0.0,
        target_itl_steps: float = 0.0,
        speculative_config: SpeculativeConfig = NO_SPECULATION,
        follows_grammars: bool = False,
        backend_factory: BackendFactory = load_model,
        turn: StartTurn = AT_ONCE,
    ) -> Worker:
        """Load, attach and run; ``follows_grammars``, if the model and this installation allow it. Nothing that others
        can see is done before the process's ``turn``.

        Raises ConfigError for what cannot work, Unavailable when no node answers.
        """
        began_s = time.monotonic()
        model = await asyncio.to_thread(backend_factory, flags, thread_count(flags))
        longest = flags.max_model_len or model.prepared.max_model_len
        make_scheduler = partial(
            Scheduler,
            block_size=flags.block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            target_itl_s=target_itl_ms / 1000,
            target_itl_steps=target_itl_steps,
            max_whole_tokens=0 if flags.enable_chunked_prefill else longest,
            drafter=make_lookup_drafter(speculative_config),
            draft_control=DraftControl.of(speculative_config),
            max_scored_rows=scored_rows(model.backend.vocab_size),
            max_loras=flags.max_loras if flags.enable_lora else 0,
        )
        async with contextlib.AsyncExitStack() as undo:
            # Threads, and the processes of other ranks, end where the start fails.
            undo.callback(model.backend.close)
            draft = None
            if speculative_config.model:
                if speculative_config.method == "eagle3":
                    # The memory of a head's weights is each process's own.
                    await asyncio.to_thread(turn.wait)
                load = partial(load_draft, most_tokens=max_num_batched_tokens, load=backend_factory)
                draft = await asyncio.to_thread(load, flags, speculative_config, model, thread_count(flags))
                undo.callback(draft[1].backend.close)
                make_scheduler = partial(make_scheduler, draft_model=draft)
            # Flags that it refuses are refused before anything is held.
            make_scheduler()
            grammars = await asyncio.to_thread(load_grammars, model) if follows_grammars else None
            if flags.enable_lora:
                # Before the node makes the pool, which on a GPU takes the memory that is left.
                await asyncio.to_thread(model.backend.bind_adapters, flags.max_loras, flags.max_lora_rank)
            warm_up = partial(_warm_up, model, draft and draft[1], min(max_num_batched_tokens, WARM_UP_TOKENS))
            if warm := turn.waiting:
                await asyncio.to_thread(warm_up)
            held_s = await asyncio.to_thread(turn.wait)
            component_id = flags.component_id or f"{role}-{os.getpid()}"
            attachment = await asyncio.to_thread(_attach, flags.attach_socket, component_id, role, model)
            undo.callback(attachment.close)
            worker = cls(flags, role, component_id, model, attachment, make_scheduler, grammars, draft and draft[1])
            undo.push_async_callback(worker._abandon)
            await asyncio.to_thread(worker._bind)
            if not warm:
                # This may take long: the node counts a silence from the first heartbeat on.
                await asyncio.to_thread(warm_up)
            undo.pop_all()
        worker._begin(time.monotonic() - began_s - held_s)
        return worker

    def _begin(self, start_s: float) -> None:
        """Take part from now on, at the end of a start that took ``start_s``."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.attachment.fileno(), self._on_node_gone)
        if self.model.ranks is not None:
            self.model.ranks.watch(lambda reason: loop.call_soon_threadsafe(self.fail, reason))
        self._start_s = start_s
        self.epoch.start()

    async def _abandon(self) -> None:
        """End what this object has begun, where its start fails."""
        for begun in (self.grammars, self.adapters):
            if begun is not None:
                begun.close()
        await self.node.aclose()

    def _bind(self) -> None:
        self.model.bind_pool(self.attachment)
        if self._draft is not None:
            self._draft.bind_pool(self.attachment.pool, self.attachment.num_slots)

    def _make_loader(self) -> AdapterLoader:
        process = AdapterProcess(self.model.adapter_reader(self.flags.max_lora_rank))
        return AdapterLoader(process, self.model.backend, self.flags.store_limits, self.node, self.meters)

    def _make_epoch(self, number: int) -> WorkerEpoch:
        return WorkerEpoch(
            self.flags,
            self.model,
            self.node,
            number,
            self._make_scheduler(),
            describe=self.describe,
            on_lost=self._epoch_lost,
            on_fail=self._epoch_failed,
            meter=self._meter,
            adapters=self.adapters,
        )

    def announce(self, address: str) -> None:
        """Have the registry list this worker at ``address`` from now on."""
        self._address = address
        self.epoch.heartbeats.announce()

    def describe(self) -> ComponentRecord:
        """What a heartbeat writes to the registry."""
        prepared, epoch, load = self.model.prepared, self.epoch, self.epoch.load
        return ComponentRecord(
            component_id=self.component_id,
            role=self.role,
            address=self._address,
            model=self.flags.served_model_name or prepared.name,
            fingerprint=prepared.fingerprint,
            namespace=self.model.namespace().hex(),
            block_size_tokens=self.block_size,
            max_model_len_tokens=self.max_model_len,
            vocab_size=self.model.backend.vocab_size,
            node_id=self.attachment.node_id,
            kernels=self.model.operators,
            start_s=round(self._start_s, 3),
            tensor_parallel_size=self.flags.tensor_parallel_size,
            free_seqs=max(0, epoch.max_num_seqs - load.running_requests - load.waiting_requests),
            max_step_tokens=epoch.max_step_tokens,
            target_itl_ms=epoch.target_s * 1000,
            target_itl_steps=epoch.target_steps,
            **{field.name: getattr(load, field.name) for field in fields(load)},
            **self._meter.totals(),
            core_board=self.flags.core_board if self.model.core_share else "",
            core_share=self.model.core_share,
            max_loras=self.model.backend.max_adapters,
            max_lora_rank=self.flags.max_lora_rank if self.adapters is not None else 0,
            block_bytes=self.model.backend.layout.block_bytes,
        )

    # What servicers call.

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence: what the model allows, and what the pool can hold of one."""
        allowed = self.flags.max_model_len or self.model.prepared.max_model_len
        return min(allowed, self.attachment.num_slots * self.block_size)

    def check_open(self) -> None:
        """Raises Unavailable when no new work is taken."""
        if self.draining or self._failure.done():
            raise Unavailable(f"{self.component_id} is stopping")
        if self.epoch.over:
            raise Unavailable(f"{self.component_id} is taking a new epoch at its KV node")

    async def bring_adapter(self, digest: str) -> None:
        """Returns when the files of a request's adapter are on this machine, at once for the model alone. Raises
        InvalidRequest for what is no digest, and NotFound, Unavailable or Overloaded where another worker may do."""
        if not digest:
            return
        if not is_adapter_digest(digest):
            raise InvalidRequest.of(FieldViolation("adapter", "the 64 hexadecimal digits of a digest are needed"))
        if self.adapters is None:
            raise Unavailable(f"{self.component_id} runs no adapters (--enable-lora)")
        if digest not in self.epoch.load.adapters:
            await self.adapters.bring(digest)

    def next_id(self) -> int:
        """A new seq_id: the place in the order of arrival."""
        return next(self._ids)

    # Fenced, and back.

    def _epoch_failed(self, reason: str) -> None:
        """The epoch cannot go on, and neither can the worker, unless its node is gone and will come back."""
        (self._epoch_lost if self._may_follow() and self.attachment.node_gone else self.fail)(reason)

    def _may_follow(self) -> bool:
        """Whether this worker can go on with its node's next life. Other ranks would stand for the old connection."""
        return bool(self.attachment.pool_id) and self.model.ranks is None

    def _epoch_lost(self, reason: str) -> None:
        if self.epoch.over:
            return
        log.warning("%s stops its work and asks for a new epoch: %s", self.component_id, reason)
        self.epoch.end(Unavailable(f"{self.component_id} lost its epoch: {reason}"))
        if not self.draining:
            self._returning = asyncio.create_task(self._return(), name="new epoch")

    async def _return(self) -> None:
        old, began_s = self.epoch, time.monotonic()
        try:
            await old.heartbeats.leave(self.component_id)
            await old.close()
            fresh = self._make_epoch(await self._next_number(old.number))
        except Exception as error:  # noqa: BLE001  (a defect must end the process, too)
            self._returning = None
            self.fail(f"no new epoch: {error.message if isinstance(error, PillionError) else repr(error)}")
            return
        self._returning, self.epoch = None, fresh
        fresh.start()
        if self._address and not self.draining:
            fresh.heartbeats.announce()
        log.info("%s serves again under a new epoch, %.1f s later", self.component_id, time.monotonic() - began_s)

    async def _next_number(self, old: int) -> int:
        """A new epoch of the node, or of its next life. No step of the ``old`` one runs any more."""
        if not self._node_gone.is_set():
            asking = asyncio.create_task(new_epoch(self.node, old))
            gone = asyncio.create_task(self._node_gone.wait())
            try:
                await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and not (asking.exception() is not None and self._follows_node()):
                    return asking.result()
            finally:
                asking.cancel()
                gone.cancel()
                await asyncio.wait({asking, gone})
        given_up = threading.Event()
        renewing = asyncio.to_thread(
            self.attachment.renew,
            self.flags.attach_socket,
            self.component_id,
            self.role,
            self.model.namespace().hex(),
            ATTACH_TIMEOUT_S,
            given_up,
        )
        await until_over(renewing, given_up.set)
        self._node_gone.clear()
        asyncio.get_running_loop().add_reader(self.attachment.fileno(), self._on_node_gone)
        await self.node.reopen(self.attachment.node_address)
        return self.attachment.epoch

    def _follows_node(self) -> bool:
        """Whether the node's end can be seen, so that its next life is to be asked."""
        if not self._node_gone.is_set() and self._may_follow() and self.attachment.node_gone:
            self._on_node_gone()
        return self._node_gone.is_set()

    # Life and death.

    @property
    def failed(self) -> bool:
        """Whether the worker has died by itself."""
        return self._failure.done()

    async def wait_failed(self) -> str:
        """Returns why the worker died by itself; never returns while it lives."""
        return await asyncio.shield(self._failure)

    def fail(self, reason: str) -> None:
        """End the worker: nothing is emitted or committed from now on, and every listener gets Unavailable."""
        if self._failure.done():
            return
        log.error("%s cannot go on: %s", self.component_id, reason)
        self._failure.set_result(reason)
        self._stop_returning()
        self.epoch.end(Unavailable(f"{self.component_id} died: {reason}"))

    def _stop_returning(self) -> None:
        if self._returning is not None:
            self._returning.cancel()

    async def drain(self, grace_s: float) -> None:
        """Take no more work, and give the sequences that run up to ``grace_s`` seconds from now on.

        A registry that answers late takes nothing from the time of whoever waits for the worker's end."""
        self.draining = True
        end_s = asyncio.get_running_loop().time() + grace_s
        await self.epoch.heartbeats.leave(self.component_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self.epoch.idle.wait()

    async def close(self) -> None:
        """Cancel the sequences that are left, send the node the last orders, and detach. Idempotent."""
        if self._closed:
            return
        self._closed = self.draining = True
        self._stop_returning()
        if self._returning is not None:
            # Its thread may be making a new connection of the attachment.
            await asyncio.wait([self._returning])
        for seq_id in tuple(self.epoch.listeners):
            self.epoch.cancel(seq_id)
        if not self.epoch.over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.epoch.settled(), DRAIN_TIMEOUT_S)
        await self.epoch.close()
        if self.grammars is not None:
            self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self.attachment.fileno())
        await self.node.aclose()
        self.model.backend.close()
        if self._draft is not None:
            self._draft.backend.close()
        self.attachment.close()

    def _on_node_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.attachment.fileno())
        if self._may_follow():
            self._node_gone.set()
            self._epoch_lost("the KV node went away")
        else:
            self.fail("the KV node went away")


def _attach(socket_path: str, component_id: str, role: str, model: LoadedModel) -> Attachment:
    """Attaches a worker that runs ``model``. Raises as :func:`attach` does."""
    layout = model.backend.layout
    return attach(
        socket_path,
        component_id=component_id,
        role=role,
        block_bytes=layout.block_bytes,
        namespace=model.namespace().hex(),
        kv_rows=2 * layout.num_layers,
        kv_heads=layout.num_kv_heads,
        block_tokens=layout.block_size,
        processes=1 + len(model.ranks.pids()) if model.ranks is not None else 1,
        timeout_s=ATTACH_TIMEOUT_S,
    )


def _warm_up(model: LoadedModel, draft: DraftModel | None, tokens: int) -> None:
    """Has steps of up to so many tokens find everything in memory; a larger one has its buffers grow."""
    model.backend.warm_up(tokens)
    if draft is not None:
        draft.backend.warm_up(tokens)


def load_grammars(model: LoadedModel) -> GrammarCompiler | None:
    """What compiles grammars for a model; None, and a line in the log, where that cannot be."""
    prepared, backend = model.prepared, model.backend
    try:
        return GrammarCompiler.load(prepared.folder, backend.vocab_size, prepared.eos_token_ids)
    except (ImportError, OSError, ValueError) as error:
        log.warning("answers cannot follow grammars here: %s", error)
        return None
