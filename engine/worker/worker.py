"""A worker of either service: a model over a mapped pool, attached to a KV node in one epoch after another.

    start:   prepare and load the model -> attach to the node, which maps the pool -> bind, warm up -> first WorkerEpoch
             (a standby loads and warms up before its turn to attach)
    live:    servicer --run, cancel--> WorkerEpoch --outcomes--> listeners (tokens, chunks) and the node (orders)
    fenced:  the WorkerEpoch ends: no emission, no commit, every listener gets Unavailable, new work is refused
               -> its last step has ended -> reattach: the node frees the epoch's slots and pins -> new epoch
               -> new WorkerEpoch over the same pool, model and attachment -> back in the registry: live
    node died, pool survives: like fenced, but attaching to the node's next process
    end:     close() by the process; or fail(): the node died, refuses a new epoch, or the step thread died

A worker that was only paused (SIGSTOP, then SIGCONT) passes through *fenced* without loading anything again (I4). A
failed worker neither emits nor commits; its process exits and is restarted, and the node frees its slots when the
attach socket closes. The time from *fenced* to *live* is bounded, except for a step that hangs: then the parent process
kills the worker (FENCE_KILL_AFTER_S).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from pillion._version import VERSION
from pillion.config import WorkerFlags
from pillion.engine.adapters.adapter_loader import AdapterLoader
from pillion.engine.backends.backend import gives_vectors
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.drafts.worker_drafts import WorkerDrafts
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.engine.scheduling.block_chain import AdoptedTicket
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.sequence import Sequence, SequenceProgress
from pillion.engine.scheduling.step_plan import StepPlan
from pillion.engine.worker.worker_epoch import SequenceListener, WorkerEpoch, new_epoch
from pillion.engine.worker.worker_telemetry import StepMeter, load_readings
from pillion.errors import FieldViolation, InvalidRequest, PillionError, Unavailable
from pillion.host.adapter_folders import is_adapter_digest
from pillion.kernels.step import RowMasks
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.memory.memory import until_over
from pillion.observability import metric_catalog
from pillion.observability.metrics import Meters, Reading
from pillion.tasks import at_most
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.worker")

ATTACH_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 2.0
# Tokens of the warm-up step, enough to read all weights and run all kernels. Larger steps allocate memory on first use,
# in milliseconds; warming up with one would take longer than the rest of a forked worker's start.
WARM_UP_TOKENS = 16


class StartTurn(Protocol):
    """A process's turn to join the cluster: at once, or later for a standby."""

    @property
    def waiting(self) -> bool:
        """True while the process's turn has not come."""

    def wait(self) -> float:
        """Block until the turn has come; return the total seconds that this process has waited."""


class _AtOnce:
    """Turn of a process that is not a standby."""

    waiting = False

    def wait(self) -> float:
        """Return at once."""
        return 0.0


AT_ONCE = _AtOnce()


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Parts of a worker besides its model. Without a feature, its parts are None.

    Attributes:
        make_scheduler: returns an epoch's scheduler, given the pool's slots.
        grammars: compiler of requests' grammars.
        step_masks: returns the grammar masks of a step.
        drafts: speculative decoding.
        make_adapters: returns the loader of adapters.
    """

    make_scheduler: Callable[[int], Scheduler]
    grammars: GrammarCompiler | None
    step_masks: Callable[[StepPlan], RowMasks | None] | None
    drafts: WorkerDrafts | None
    make_adapters: Callable[[NodeClient, Meters], AdapterLoader] | None

    def close(self) -> None:
        """Stop the threads of grammars and drafts. Idempotent."""
        for part in (self.grammars, self.drafts):
            if part is not None:
                part.close()


class Worker:
    """A decode or prefill worker without its gRPC service; created by :meth:`start`.

    Read-only attributes: ``model``, ``component_id``, ``node``, ``attachment``, ``meters``, and ``epoch``, which is
    replaced after each fence.
    """

    def __init__(
        self,
        flags: WorkerFlags,
        role: str,
        component_id: str,
        model: LoadedModel,
        attachment: Attachment,
        parts: WorkerParts,
    ) -> None:
        self.flags = flags
        self.role = role
        self.component_id = component_id
        self.model = model
        self._parts = parts
        self.block_size = flags.block_size
        self.draining = False
        self._closed = False
        self.attachment = attachment
        self.node = NodeClient(attachment.node_address, self.component_id)
        self._address = ""
        self._ids = itertools.count(1)
        self._start_s = 0.0
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reattaching: asyncio.Task[None] | None = None
        self._node_gone = asyncio.Event()
        self.meters = Meters()
        self._meter = StepMeter(self.meters)
        make_adapters, grammars = parts.make_adapters, parts.grammars
        self._adapters = None if make_adapters is None else make_adapters(self.node, self.meters)
        self.epoch = self._make_epoch(attachment.epoch)
        if grammars is not None:
            grammars.mask_threads.wake = lambda: self.epoch.wake()
            grammars.on_compiled = self.meters.distribution(metric_catalog.GRAMMAR_COMPILE).observe
        self.meters.watch(lambda: load_readings(self.epoch.load, self.epoch.max_num_seqs))
        self.meters.watch(self._partial_block_readings)
        if model.ranks is not None:
            self.meters.watch(model.ranks.readings)

    @classmethod
    async def start(
        cls,
        flags: WorkerFlags,
        role: str,
        model: LoadedModel,
        parts: WorkerParts,
        *,
        max_step_tokens: int,
        turn: StartTurn,
        began_s: float,
    ) -> Worker:
        """Attach and run, with steps of at most ``max_step_tokens`` tokens. No other process notices the worker before
        its ``turn``. ``began_s``: monotonic time at which the process started. On failure the caller closes model and
        parts.

        Raises ConfigError for unusable flags, Unavailable if no node answers.
        """
        async with contextlib.AsyncExitStack() as undo:
            warm_up = partial(_warm_up, model, parts.drafts, min(max_step_tokens, WARM_UP_TOKENS))
            if warm := turn.waiting:
                await asyncio.to_thread(warm_up)
            waited_s = await asyncio.to_thread(turn.wait)
            component_id = flags.component_id or f"{role}-{os.getpid()}"
            attachment = await asyncio.to_thread(_attach, flags.attach_socket, component_id, role, model)
            undo.callback(attachment.close)
            worker = cls(flags, role, component_id, model, attachment, parts)
            undo.push_async_callback(worker._abandon)
            await asyncio.to_thread(worker._bind)
            if not warm:
                # This may take long, but the node expects heartbeats only after the first one.
                await asyncio.to_thread(warm_up)
            undo.pop_all()
        worker._begin(time.monotonic() - began_s - waited_s)
        return worker

    def _begin(self, start_s: float) -> None:
        """Begin the first epoch, after a start that took ``start_s``."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.attachment.fileno(), self._on_node_gone)
        if self.model.ranks is not None:
            self.model.ranks.watch(lambda reason: loop.call_soon_threadsafe(self.fail, reason))
        self._start_s = start_s
        self.epoch.start()

    async def _abandon(self) -> None:
        """Release the worker's own resources after a failed start."""
        if self._adapters is not None:
            self._adapters.close()
        await self.node.aclose()

    def _bind(self) -> None:
        """Bind model and drafts to the attached pool."""
        self.model.bind_pool(self.attachment)
        if self._parts.drafts is not None:
            self._parts.drafts.bind_pool(self.attachment)

    def _partial_block_readings(self) -> Iterator[Reading]:
        if self._partial_blocks is not None:
            yield metric_catalog.PARTIAL_BLOCKS, (), self._partial_blocks.kept_blocks

    def _make_epoch(self, number: int) -> WorkerEpoch:
        scheduler = self._parts.make_scheduler(self.attachment.num_slots)
        self._partial_blocks = scheduler.partial_blocks
        return WorkerEpoch(
            self.flags,
            self.model,
            self.node,
            number,
            scheduler,
            describe=self.describe,
            on_lost=self._epoch_lost,
            on_fail=self._epoch_failed,
            meter=self._meter,
            load_adapter=None if self._adapters is None else self._adapters.load,
            step_masks=self._parts.step_masks,
        )

    def announce(self, address: str) -> None:
        """Announce this worker at ``address`` in the registry from now on."""
        self._address = address
        self.epoch.heartbeats.announce()

    def describe(self) -> ComponentRecord:
        """Return the registry's record for a heartbeat."""
        prepared, epoch, load = self.model.prepared, self.epoch, self.epoch.load
        return ComponentRecord(
            component_id=self.component_id,
            role=self.role,
            address=self._address,
            version=VERSION,
            model=next(iter(self.flags.served_model_name), prepared.name),
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
            **msgspec.structs.asdict(load),
            **self._meter.totals(),
            core_lending_table=self.flags.core_lending_table if self.model.core_share else "",
            core_share=self.model.core_share,
            max_loras=0 if (adapters := self.model.backend.adapters) is None else adapters.max_adapters,
            max_lora_rank=self.flags.max_lora_rank if self.flags.enable_lora else 0,
            block_bytes=self.model.backend.layout.block_bytes,
            state_pages=self.model.backend.layout.state_pages,
            working_pages=self.model.backend.layout.working_pages,
            gives_vectors=self.gives_vectors,
        )

    @property
    def max_model_len(self) -> int:
        """Max tokens of a sequence: the model's limit, or the pool's capacity if less."""
        allowed = self.flags.max_model_len or self.model.prepared.max_model_len
        # Both sequences of a split prompt, which share its ticket, have states.
        state_slots = 2 * self.model.backend.layout.working_pages
        return min(allowed, (self.attachment.num_slots - state_slots) * self.block_size)

    def blocks_of(self, tokens: int) -> int:
        """Return the number of slots for a sequence of ``tokens`` tokens: its blocks, including the next token's, and
        its states."""
        return tokens // self.block_size + 1 + self.model.backend.layout.working_pages

    @property
    def gives_vectors(self) -> bool:
        """True if the worker can return vectors of texts."""
        return gives_vectors(self.model.backend)

    def check_open(self) -> None:
        """Raise Unavailable if no new work is accepted."""
        if self.draining or self._failure.done():
            raise Unavailable(f"{self.component_id} is stopping")
        if self.epoch.over:
            raise Unavailable(f"{self.component_id} is taking a new epoch at its KV node")

    async def compiled(self, grammar: str, answer: Seq[int], stop_token_ids: frozenset[int]) -> GrammarState:
        """Return a request's compiled grammar in the state after ``answer``. Raises InvalidRequest if the worker has no
        grammars, or the grammar does not compile or does not match the answer."""
        if self._parts.grammars is None:
            raise InvalidRequest(f"grammars are not supported by {self.component_id}; its log says why")
        return await asyncio.wrap_future(self._parts.grammars.start(grammar, answer, stop_token_ids))

    async def _bring_adapter(self, digest: str) -> None:
        """Return once an adapter's files are on this machine. Raises InvalidRequest for an invalid digest; NotFound,
        Unavailable or Overloaded if another worker should be tried."""
        if not is_adapter_digest(digest):
            raise InvalidRequest.of(FieldViolation("adapter", "the 64 hexadecimal digits of a digest are needed"))
        if self._adapters is None:
            raise Unavailable(f"{self.component_id} runs no adapters (--enable-lora)")
        if digest not in self.epoch.load.adapters:
            await self._adapters.fetch(digest)

    async def run_sequence(
        self,
        adapter: str,
        hold: Callable[[WorkerEpoch], Awaitable[tuple[AdoptedTicket, bytes]]],
        begin: Callable[[AdoptedTicket], tuple[Sequence, Mapping[int, SequenceListener]]],
        wanted: Callable[[], bool],
    ) -> tuple[SequenceProgress, AdoptedTicket] | None:
        """Start a sequence, and return its progress and its ticket, or None if ``wanted`` turns False meanwhile. Do not
        cancel this call, because an adopted ticket must be released. Raises what the arguments raise.

        Args:
            adapter: digest of the adapter, whose files are fetched first; "" for none.
            hold: adopts or opens the ticket in an epoch; returns it and the hash of its chain's last block.
            begin: returns the sequence for a ticket, and the listeners, by seq_id, of it and its parallel samples.
            wanted: returns whether the sequence is still needed.
        """
        if adapter:
            await self._bring_adapter(adapter)
        if not wanted():
            return None
        epoch = self.epoch
        ticket, last_hash = await hold(epoch)
        progress = None
        try:
            if wanted():
                sequence, listeners = begin(ticket)
                progress = epoch.add(sequence, listeners, last_hash)
        finally:
            if progress is None:
                epoch.tickets.release_ticket(ticket)
        return None if progress is None else (progress, ticket)

    def next_id(self) -> int:
        """Return a new seq_id; ids are in the order of arrival."""
        return next(self._ids)

    def _epoch_failed(self, reason: str) -> None:
        """Handle a failure of the epoch: end the worker too, unless its node has died and will be restarted."""
        (self._epoch_lost if self._survives_node() and self.attachment.node_gone else self.fail)(reason)

    def _survives_node(self) -> bool:
        """Return whether this worker can continue with its node's next process: if a keeper keeps the pool, and there
        are no other ranks, which would still use the old connection."""
        return bool(self.attachment.pool_id) and self.model.ranks is None

    def _epoch_lost(self, reason: str) -> None:
        """End the epoch, and begin to get a new one."""
        if self.epoch.over:
            return
        log.warning("%s stops its work and asks for a new epoch: %s", self.component_id, reason)
        self.epoch.end(Unavailable(f"{self.component_id} lost its epoch: {reason}"))
        if not self.draining:
            self._reattaching = asyncio.create_task(self._reattach(), name="new epoch")

    async def _reattach(self) -> None:
        """Replace the ended epoch by a new one; end the worker if there is none."""
        old, began_s = self.epoch, time.monotonic()
        try:
            await old.heartbeats.leave(self.component_id)
            await old.close()
            fresh = self._make_epoch(await self._next_number(old.number))
        except Exception as error:  # noqa: BLE001  (a defect must end the process, too)
            self._reattaching = None
            self.fail(f"no new epoch: {error.message if isinstance(error, PillionError) else repr(error)}")
            return
        self._reattaching, self.epoch = None, fresh
        fresh.start()
        if self._address and not self.draining:
            fresh.heartbeats.announce()
        log.info("%s serves again under a new epoch, %.1f s later", self.component_id, time.monotonic() - began_s)

    async def _next_number(self, old: int) -> int:
        """Return a new epoch of the node, or of its next process. No step of the ``old`` epoch may be in flight."""
        if not self._node_gone.is_set():
            asking = asyncio.create_task(new_epoch(self.node, old))
            gone = asyncio.create_task(self._node_gone.wait())
            try:
                await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and not (asking.exception() is not None and self._awaits_next_node()):
                    return asking.result()
            finally:
                asking.cancel()
                gone.cancel()
                await asyncio.wait({asking, gone})
        given_up = threading.Event()
        renewing = asyncio.to_thread(self.attachment.renew, self.flags.attach_socket, ATTACH_TIMEOUT_S, given_up)
        await until_over(renewing, given_up.set)
        self._node_gone.clear()
        asyncio.get_running_loop().add_reader(self.attachment.fileno(), self._on_node_gone)
        await self.node.reopen(self.attachment.node_address)
        return self.attachment.epoch

    def _awaits_next_node(self) -> bool:
        """Return whether the node has died and the worker waits for its next process."""
        if not self._node_gone.is_set() and self._survives_node() and self.attachment.node_gone:
            self._on_node_gone()
        return self._node_gone.is_set()

    @property
    def failed(self) -> bool:
        """True if the worker has failed."""
        return self._failure.done()

    async def wait_failed(self) -> str:
        """Wait until the worker fails; return the reason."""
        return await asyncio.shield(self._failure)

    def fail(self, reason: str) -> None:
        """End the worker: nothing is emitted or committed any more, and every listener gets Unavailable."""
        if self._failure.done():
            return
        log.error("%s cannot continue: %s", self.component_id, reason)
        self._failure.set_result(reason)
        self._stop_reattaching()
        self.epoch.end(Unavailable(f"{self.component_id} died: {reason}"))

    def _stop_reattaching(self) -> None:
        if self._reattaching is not None:
            self._reattaching.cancel()

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, and wait for running sequences until ``grace_s`` seconds after this call."""
        self.draining = True
        end_s = asyncio.get_running_loop().time() + grace_s
        await self.epoch.heartbeats.leave(self.component_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self.epoch.idle.wait()

    async def close(self) -> None:
        """Cancel the remaining sequences, send the last orders, and detach. Idempotent."""
        if self._closed:
            return
        self._closed = self.draining = True
        self._stop_reattaching()
        if self._reattaching is not None:
            # Its thread may be renewing the attachment.
            await asyncio.wait([self._reattaching])
        for seq_id in tuple(self.epoch.listeners):
            self.epoch.cancel(seq_id)
        if not self.epoch.over:
            await at_most(DRAIN_TIMEOUT_S, self.epoch.settled())
        await self.epoch.close()
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self.attachment.fileno())
        await self.node.aclose()
        self.model.backend.close()
        self._parts.close()
        if self._adapters is not None:
            self._adapters.close()
        self.attachment.close()

    def _on_node_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.attachment.fileno())
        if self._survives_node():
            self._node_gone.set()
            self._epoch_lost("the KV node went away")
        else:
            self.fail("the KV node went away")


def _attach(socket_path: str, component_id: str, role: str, model: LoadedModel) -> Attachment:
    """Attach a worker that runs ``model`` to its node. Raises what :func:`attach` raises."""
    layout = model.backend.layout
    rows, row_heads = layout.rows_and_pieces
    return attach(
        socket_path,
        component_id=component_id,
        role=role,
        block_bytes=layout.block_bytes,
        namespace=model.namespace().hex(),
        kv_rows=rows,
        kv_heads=row_heads,
        block_tokens=layout.block_size,
        has_states=layout.state_pages > 0,
        processes=1 + len(model.ranks.pids()) if model.ranks is not None else 1,
        timeout_s=ATTACH_TIMEOUT_S,
        map_device=model.map_device,
    )


def _warm_up(model: LoadedModel, drafts: WorkerDrafts | None, tokens: int) -> None:
    """Run a step of ``tokens`` tokens on model and drafts, so that steps up to this size find everything in memory."""
    model.backend.warm_up(tokens)
    if drafts is not None:
        drafts.warm_up(tokens)
