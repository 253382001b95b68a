"""A prefill worker as a component, and its service Prefill.RunSpan: a span in, an acknowledgement per committed chunk.

``pillion prefill`` and tests call :func:`start_prefill`. What happens to a span is in
:mod:`pillion.prefill_service.span`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from pillion.config import PrefillFlags
from pillion.engine.backends.loading import BackendFactory, load_model
from pillion.engine.worker.worker import AT_ONCE, StartTurn, Worker
from pillion.engine.worker.worker_server import WorkerServer, serve
from pillion.errors import Overloaded
from pillion.observability import telemetry
from pillion.prefill_service.span import SpanRun, check_span
from pillion.v1 import prefill_pb2, prefill_pb2_grpc
from pillion.wire.common import check_hello

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


async def start_prefill(
    flags: PrefillFlags, *, backend_factory: BackendFactory = load_model, turn: StartTurn = AT_ONCE
) -> WorkerServer:
    """Start a prefill worker, which takes part when its ``turn`` comes. Raises ConfigError for flags that cannot
    work."""
    # Without chunks a span runs alone: nothing needs to fit beside it.
    chunked_seqs = min(flags.max_waiting_spans, flags.max_num_batched_prefill_tokens)
    worker = await Worker.start(
        flags,
        "prefill",
        max_num_batched_tokens=flags.max_num_batched_prefill_tokens,
        max_num_seqs=chunked_seqs if flags.enable_chunked_prefill else 1,
        backend_factory=backend_factory,
        turn=turn,
    )
    servicer = PrefillServicer(worker, flags.max_waiting_spans)
    return await serve(worker, SERVICE_NAME, partial(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer))


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Runs spans; ``max_spans`` bounds those that wait or run on the worker."""

    def __init__(self, worker: Worker, max_spans: int) -> None:
        self._worker = worker
        self._max_spans = max_spans
        self._live: set[SpanRun] = set()

    async def RunSpan(  # noqa: N802
        self, request: prefill_pb2.RunSpanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.ChunkAck]:
        """See prefill.proto."""
        check_hello(request.hello)
        worker = self._worker
        worker.check_open()
        check_span(request, worker)
        if len(self._live) >= self._max_spans:
            raise Overloaded(f"{worker.component_id} has {self._max_spans} spans (--max-waiting-spans)")
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        run = SpanRun(worker, request, telemetry.extract(metadata))
        self._live.add(run)
        # Two ways to notice the call's end: the callback while an acknowledgement is sent, aclosing otherwise.
        context.add_done_callback(lambda *_: run.cancel())  # type: ignore[arg-type]  # the stubs name its arguments
        try:
            async with aclosing(run.acks()) as acks:
                async for ack in acks:
                    yield ack
        finally:
            self._live.discard(run)
