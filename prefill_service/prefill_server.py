"""Runs a prefill worker as a component, and its service Prefill.RunPrefill: a prefill range in, an acknowledgement for
each committed chunk out. Its service Decode.Connect takes texts that end with a vector, and computes them whole.

``pillion prefill`` and tests call :func:`start_prefill`. What happens to a prefill range is in
:mod:`pillion.prefill_service.prefill_run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from pillion.config import PrefillFlags
from pillion.engine.assemble_worker import load_model
from pillion.engine.backends.devices import with_budgets
from pillion.engine.backends.loaded_model import BackendFactory
from pillion.engine.start_worker import start_worker
from pillion.engine.streams.stream_servicer import DecodeServicer
from pillion.engine.streams.stream_session import StreamLimits
from pillion.engine.worker.worker import AT_ONCE, StartTurn, Worker
from pillion.engine.worker.worker_server import Service, WorkerServer, serve
from pillion.errors import Overloaded
from pillion.observability import telemetry
from pillion.prefill_service.prefill_run import PrefillRun, check_range
from pillion.v1 import prefill_pb2, prefill_pb2_grpc
from pillion.wire.common import check_hello

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


async def start_prefill(
    flags: PrefillFlags, *, backend_factory: BackendFactory = load_model, turn: StartTurn = AT_ONCE
) -> WorkerServer:
    """Start a prefill worker, which takes part when its ``turn`` comes. Raises ConfigError for flags that cannot
    work."""
    flags = await asyncio.to_thread(with_budgets, flags)
    # Without chunks a prefill range runs alone, so nothing needs to fit beside it; the stages of a pipeline have one
    # each.
    chunked_seqs = min(flags.max_waiting_prefills, flags.max_num_batched_prefill_tokens)
    worker = await start_worker(
        flags,
        "prefill",
        max_num_batched_tokens=flags.max_num_batched_prefill_tokens,
        max_num_seqs=chunked_seqs if flags.enable_chunked_prefill else flags.pipeline_parallel_size,
        backend_factory=backend_factory,
        turn=turn,
    )
    servicer = PrefillServicer(worker, flags.max_waiting_prefills)
    services = [Service(SERVICE_NAME, partial(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer))]
    if worker.gives_vectors:
        # A text that ends with a vector needs nothing of a decode worker, whose streams it would delay.
        limits = StreamLimits(flags.max_waiting_prefills, "--max-waiting-prefills", vectors_alone=True)
        services.append(DecodeServicer(worker, limits).service)
    return await serve(worker, *services)


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Runs prefill ranges; ``max_prefills`` bounds those that wait or run on the worker."""

    def __init__(self, worker: Worker, max_prefills: int) -> None:
        self._worker = worker
        self._max_prefills = max_prefills
        self._live: set[PrefillRun] = set()

    async def RunPrefill(  # noqa: N802
        self, request: prefill_pb2.RunPrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.ChunkAck]:
        """Serves the call that prefill.proto describes."""
        check_hello(request.hello)
        worker = self._worker
        worker.check_open()
        check_range(request, worker)
        if len(self._live) >= self._max_prefills:
            raise Overloaded(f"{worker.component_id} has {self._max_prefills} prefill ranges (--max-waiting-prefills)")
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        run = PrefillRun(worker, telemetry.extract(metadata))
        self._live.add(run)
        # Two ways to notice the call's end: the callback while an acknowledgement is sent, aclosing otherwise.
        context.add_done_callback(lambda *_: run.cancel())  # type: ignore[arg-type]  # the stubs name its arguments
        try:
            async with aclosing(run.acks(request)) as acks:
                async for ack in acks:
                    yield ack
        finally:
            self._live.discard(run)
