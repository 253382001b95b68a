"""Prefill.RunSpan: a span in, one acknowledgement per committed chunk out. No policy: see
pillion.prefill_service.span.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from pillion.engine.worker.worker import Worker
from pillion.errors import Overloaded
from pillion.observability import telemetry
from pillion.prefill_service.span import SpanRun
from pillion.prefill_service.span_validation import check_span
from pillion.v1 import prefill_pb2, prefill_pb2_grpc
from pillion.wire.common import check_hello
from pillion.wire.prefill import ack_to_pb, span_from_pb

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """``max_spans`` bounds what waits or runs on the worker."""

    def __init__(self, worker: Worker, max_spans: int) -> None:
        self._worker = worker
        self._max_spans = max_spans
        self._live: set[SpanRun] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """For :func:`pillion.net.rpc.start_server`."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    def finish(self) -> None:
        """Nothing: spans that ran on are cancelled with their calls."""

    async def RunSpan(  # noqa: N802
        self, request: prefill_pb2.RunSpanRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.ChunkAck]:
        """See prefill.proto."""
        check_hello(request.hello)
        worker = self._worker
        worker.check_open()
        span = span_from_pb(request)
        check_span(
            span,
            block_size=worker.block_size,
            vocab_size=worker.model.backend.vocab_size,
            max_model_len=worker.max_model_len,
        )
        if len(self._live) >= self._max_spans:
            raise Overloaded(f"{worker.component_id} has {self._max_spans} spans (--max-waiting-spans)")
        run = SpanRun(worker, span, telemetry.extract(_metadata(context)))
        self._live.add(run)
        # Both: the callback hears of an end while an acknowledgement is on its way out, aclosing of all others.
        context.add_done_callback(_ignoring(run.cancel))
        try:
            async with aclosing(run.acks()) as acks:
                async for ack in acks:
                    yield ack_to_pb(ack)
        finally:
            self._live.discard(run)


def _ignoring(call: Callable[[], None]) -> Any:
    return lambda *_: call()


def _metadata(context: grpc.aio.ServicerContext[Any, Any]) -> list[tuple[str, str]]:
    return [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
