"""Puts a worker together: its model, what it has beside it as its flags say, and its place at a KV node.

the model                          engine/load_model.py
grammars                           on decode workers, where llguidance can be used
draft tokens                       --speculative-config
adapters                           --enable-lora
partial blocks                     --partial-block-percent, on decode workers
states                             models whose layers carry one from token to token
ranks, stages, lent cores          engine/load_model.py, too
standbys                           the turn for which a loaded worker waits
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from pillion.config import DecodeFlags, WorkerFlags
from pillion.engine.adapters.adapter_loader import AdapterLoader
from pillion.engine.adapters.adapter_process import AdapterProcess
from pillion.engine.adapters.adapter_targets import listed_targets
from pillion.engine.backends.cpu.cpu_loading import thread_count
from pillion.engine.backends.loaded_model import BackendFactory, LoadedModel
from pillion.engine.drafts.worker_drafts import WorkerDrafts, load_drafts
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.engine.grammars.step_masks import StepMasks
from pillion.engine.scheduling.adapter_slots import AdapterSlots
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.grammars import Grammars
from pillion.engine.scheduling.partial_blocks import PartialBlocks
from pillion.engine.scheduling.scheduler import Scheduler, scored_rows
from pillion.engine.scheduling.states import States
from pillion.engine.worker.worker import StartTurn, Worker, WorkerParts
from pillion.kvstore.client.node_client import NodeClient
from pillion.observability.metrics import Meters

log = logging.getLogger("pillion.worker")


async def start_worker(
    flags: WorkerFlags,
    role: str,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    target_itl_ms: float = 0.0,
    target_itl_steps: float = 0.0,
    backend_factory: BackendFactory,
    turn: StartTurn,
) -> Worker:
    """Load a model, makes what the worker has beside it, attaches and runs. Nothing that others can see is done before
    the process's ``turn``.

    Raises ConfigError for flags that cannot work, Unavailable when no node answers.
    """
    began_s = time.monotonic()
    model = await asyncio.to_thread(backend_factory, flags, thread_count(flags))
    longest = flags.max_model_len or model.prepared.max_model_len
    if model.whole_texts:
        # A step holds at least the longest text, which nobody may cut.
        max_num_batched_tokens = max(max_num_batched_tokens, longest + max_num_seqs)
    limits = partial(
        Scheduler,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        target_itl_s=target_itl_ms / 1000,
        target_itl_steps=target_itl_steps,
        max_whole_tokens=0 if flags.enable_chunked_prefill and not model.whole_texts else longest,
        max_scored_rows=scored_rows(model.backend.vocab_size),
        even_steps=flags.pipeline_parallel_size > 1,
        expected_cost=model.expected_cost,
        pair_tokens=model.pair_tokens,
    )
    async with contextlib.AsyncExitStack() as undo:
        # Where the start fails, this ends the backend's threads and the processes of other ranks.
        undo.callback(model.backend.close)
        # The scheduler refuses bad flags before anything is held.
        limits(blocks=BlockManager(flags.block_size))
        grammars = await asyncio.to_thread(_load_grammars, model) if role == "decode" else None
        if grammars is not None:
            undo.callback(grammars.close)
        drafts = await asyncio.to_thread(load_drafts, flags, model, max_num_batched_tokens, backend_factory, turn.wait)
        if drafts is not None:
            undo.callback(drafts.close)
        if flags.enable_lora:
            # On a GPU the node's pool takes the memory that is left.
            targets = listed_targets(flags.lora_target_modules)
            await asyncio.to_thread(model.backend.bind_adapters, flags.max_loras, flags.max_lora_rank, targets)
        parts = WorkerParts(
            make_scheduler=partial(_make_scheduler, limits, model, flags, grammars, drafts),
            grammars=grammars,
            step_masks=None if grammars is None else StepMasks.of,
            drafts=drafts,
            make_adapters=partial(_adapter_loader, flags, model) if flags.enable_lora else None,
        )
        worker = await Worker.start(
            flags, role, model, parts, most_tokens=max_num_batched_tokens, turn=turn, began_s=began_s
        )
        undo.pop_all()
    return worker


def _make_scheduler(
    limits: Callable[..., Scheduler],
    model: LoadedModel,
    flags: WorkerFlags,
    grammars: GrammarCompiler | None,
    drafts: WorkerDrafts | None,
    pool_slots: int,
) -> Scheduler:
    """Make the scheduler of one epoch over a pool of so many slots, and what it has beside its sequences."""
    blocks, pages = BlockManager(flags.block_size), model.backend.layout.state_pages
    # Prefill ranges end with whole blocks, and a text cannot go on from keys and values alone where there are states.
    percent = flags.partial_block_percent if isinstance(flags, DecodeFlags) and not pages else 0
    return limits(
        blocks=blocks,
        partial_blocks=PartialBlocks(pool_slots * percent // 100, blocks.free_slots) if percent else None,
        states=States(pages, blocks) if pages else None,
        grammars=None if grammars is None else Grammars(blocks.free_slots),
        drafts=None if drafts is None else drafts.draft_tokens(blocks),
        adapters=AdapterSlots(flags.max_loras, blocks.in_flight) if flags.enable_lora else None,
    )


def _load_grammars(model: LoadedModel) -> GrammarCompiler | None:
    """Load what compiles a worker's grammars; returns None, and logs a line, where llguidance cannot be used."""
    prepared = model.prepared
    try:
        return GrammarCompiler.load(prepared.folder, model.backend.vocab_size, prepared.eos_token_ids)
    except (ImportError, OSError, ValueError) as error:
        log.warning("answers cannot follow grammars here: %s", error)
        return None


def _adapter_loader(flags: WorkerFlags, model: LoadedModel, node: NodeClient, meters: Meters) -> AdapterLoader:
    """Make what brings adapters to a worker whose backend has slots for them."""
    process = AdapterProcess(model.adapter_reader(flags.max_lora_rank, listed_targets(flags.lora_target_modules)))
    return AdapterLoader(process, model.backend, flags.lora_store_bytes, node, meters)
