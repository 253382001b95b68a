"""Assembly of a prefill worker: the worker of :func:`pillion.engine.assemble_worker.start_worker`, and two services:
Prefill.RunPrefill for prefill ranges, and Decode.Connect for texts to embed.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pillion.config import MAX_WAITING_PREFILLS, PrefillFlags
from pillion.engine.assemble_worker import start_worker
from pillion.engine.backends.devices import with_budgets
from pillion.engine.backends.loaded_model import BackendFactory
from pillion.engine.load_model import load_model
from pillion.engine.streams.stream_servicer import DecodeServicer
from pillion.engine.streams.stream_session import StreamLimits
from pillion.engine.worker.worker import AT_ONCE, StartTurn
from pillion.engine.worker.worker_server import Service, WorkerServer, serve
from pillion.prefill_service.prefill_servicer import SERVICE_NAME, PrefillServicer
from pillion.v1 import prefill_pb2_grpc


async def start_prefill(
    flags: PrefillFlags, *, backend_factory: BackendFactory = load_model, turn: StartTurn = AT_ONCE
) -> WorkerServer:
    """Start a prefill worker, which serves when its ``turn`` comes. Raises ConfigError for flags that cannot work."""
    flags = await asyncio.to_thread(with_budgets, flags)
    # Without chunked prefill, a step has one range, and each stage of a pipeline a step in flight.
    chunked_seqs = min(MAX_WAITING_PREFILLS, flags.max_num_batched_prefill_tokens)
    worker = await start_worker(
        flags,
        "prefill",
        max_num_batched_tokens=flags.max_num_batched_prefill_tokens,
        max_num_seqs=chunked_seqs if flags.enable_chunked_prefill else flags.pipeline_parallel_size,
        backend_factory=backend_factory,
        turn=turn,
    )
    servicer = PrefillServicer(worker, MAX_WAITING_PREFILLS)
    services = [Service(SERVICE_NAME, partial(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer))]
    if worker.gives_vectors:
        # Texts to embed need no decode worker, whose streams they would delay.
        limits = StreamLimits(MAX_WAITING_PREFILLS, "the most that may wait or run", vectors_alone=True)
        services.append(DecodeServicer(worker, limits).service)
    return await serve(worker, *services)
