"""Assembly of a worker: its model, the features that its flags enable, and its connection to a KV node.

model, ranks, stages, lent cores   engine/load_model.py
grammars                           on decode workers, if llguidance is usable
speculative decoding               --speculative-config
adapters                           --enable-lora
partial blocks                     on decode workers
recurrent states                   in hybrid models
standby                            waits for its turn after loading
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from pillion.config import WorkerFlags
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
from pillion.host.adapter_folders import STORE_BYTES
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
    partial_block_percent: int = 0,
    backend_factory: BackendFactory,
    turn: StartTurn,
) -> Worker:
    """Load a model, assemble the worker, attach it to its KV node and run it. No other process notices the worker
    before its ``turn``. Raises ConfigError for invalid flags, Unavailable if no node answers."""
    began_s = time.monotonic()
    model = await asyncio.to_thread(backend_factory, flags, thread_count(flags))
    max_len = flags.max_model_len or model.prepared.max_model_len
    if model.whole_texts:
        # A step must fit the longest text, which is never chunked.
        max_num_batched_tokens = max(max_num_batched_tokens, max_len + max_num_seqs)
    limited = partial(
        Scheduler,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        target_itl_s=target_itl_ms / 1000,
        target_itl_steps=target_itl_steps,
        max_whole_tokens=0 if flags.enable_chunked_prefill and not model.whole_texts else max_len,
        max_scored_rows=scored_rows(model.backend.vocab_size),
        even_steps=flags.pipeline_parallel_size > 1,
        expected_cost=model.expected_cost,
        pair_tokens=model.pair_tokens,
    )
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(model.backend.close)
        # Construct a scheduler only to validate the flags early.
        limited(blocks=BlockManager(flags.block_size))
        grammars = await asyncio.to_thread(_load_grammars, model) if role == "decode" else None
        if grammars is not None:
            undo.callback(grammars.close)
        drafts = await asyncio.to_thread(load_drafts, flags, model, max_num_batched_tokens, backend_factory, turn.wait)
        if drafts is not None:
            undo.callback(drafts.close)
        if flags.enable_lora:
            # Before attaching: the node's pool takes the remaining memory of a GPU.
            targets = listed_targets(flags.lora_target_modules)
            await asyncio.to_thread(model.backend.bind_adapters, flags.max_loras, flags.max_lora_rank, targets)
        parts = WorkerParts(
            make_scheduler=partial(_make_scheduler, limited, model, flags, partial_block_percent, grammars, drafts),
            grammars=grammars,
            step_masks=None if grammars is None else StepMasks.of,
            drafts=drafts,
            make_adapters=partial(_adapter_loader, flags, model) if flags.enable_lora else None,
        )
        worker = await Worker.start(
            flags, role, model, parts, max_step_tokens=max_num_batched_tokens, turn=turn, began_s=began_s
        )
        undo.pop_all()
    return worker


def _make_scheduler(
    limited: Callable[..., Scheduler],
    model: LoadedModel,
    flags: WorkerFlags,
    partial_block_percent: int,
    grammars: GrammarCompiler | None,
    drafts: WorkerDrafts | None,
    pool_slots: int,
) -> Scheduler:
    """Return the scheduler of an epoch over a pool of ``pool_slots`` slots. ``limited``: Scheduler with the
    worker's limits bound."""
    blocks, pages = BlockManager(flags.block_size), model.backend.layout.state_pages
    # KV of a partial block is useless without the state at its end.
    percent = 0 if pages else partial_block_percent
    return limited(
        blocks=blocks,
        partial_blocks=PartialBlocks(pool_slots * percent // 100, blocks.free_slots) if percent else None,
        states=States(pages, blocks) if pages else None,
        grammars=None if grammars is None else Grammars(blocks.free_slots),
        drafts=None if drafts is None else drafts.draft_tokens(blocks),
        adapters=AdapterSlots(flags.max_loras, blocks.in_flight) if flags.enable_lora else None,
    )


def _load_grammars(model: LoadedModel) -> GrammarCompiler | None:
    """Return the worker's grammar compiler; None, with a warning, if llguidance is unusable."""
    prepared = model.prepared
    try:
        return GrammarCompiler.load(prepared.folder, model.backend.vocab_size, prepared.eos_token_ids)
    except (ImportError, OSError, ValueError) as error:
        log.warning("grammars are not supported here: %s", error)
        return None


def _adapter_loader(flags: WorkerFlags, model: LoadedModel, node: NodeClient, meters: Meters) -> AdapterLoader:
    """Return the adapter loader of a worker whose backend has adapter slots."""
    process = AdapterProcess(model.adapter_reader(flags.max_lora_rank, listed_targets(flags.lora_target_modules)))
    return AdapterLoader(process, model.backend, STORE_BYTES, node, meters)
