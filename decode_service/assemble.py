"""Assembly of a decode worker: the worker of :func:`pillion.engine.assemble_worker.start_worker`, and its service,
Decode.Connect.
"""

from __future__ import annotations

import asyncio

from pillion.config import AUTO, MAX_WAITING_SEQS, DecodeFlags
from pillion.engine.assemble_worker import start_worker
from pillion.engine.backends.devices import with_budgets
from pillion.engine.backends.loaded_model import BackendFactory
from pillion.engine.load_model import load_model
from pillion.engine.scheduling.partial_blocks import PARTIAL_BLOCK_PERCENT
from pillion.engine.scheduling.step_cost import AUTO_TARGET_STEPS
from pillion.engine.streams.stream_servicer import DecodeServicer
from pillion.engine.streams.stream_session import StreamLimits
from pillion.engine.worker.worker import AT_ONCE, StartTurn
from pillion.engine.worker.worker_server import WorkerServer, serve


async def start_decode(
    flags: DecodeFlags,
    *,
    backend_factory: BackendFactory = load_model,
    turn: StartTurn = AT_ONCE,
    partial_block_percent: int = PARTIAL_BLOCK_PERCENT,
) -> WorkerServer:
    """Start a decode worker, which attaches to its KV node and serves when its ``turn`` comes. Raises ConfigError for
    invalid flags."""
    flags = await asyncio.to_thread(with_budgets, flags)
    auto = flags.target_itl_ms == AUTO
    worker = await start_worker(
        flags,
        "decode",
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        target_itl_ms=0.0 if auto else float(flags.target_itl_ms),
        target_itl_steps=AUTO_TARGET_STEPS if auto else 0.0,
        partial_block_percent=partial_block_percent,
        backend_factory=backend_factory,
        turn=turn,
    )
    limits = StreamLimits(flags.max_num_seqs + MAX_WAITING_SEQS, f"--max-num-seqs + {MAX_WAITING_SEQS}")
    return await serve(worker, DecodeServicer(worker, limits).service)
