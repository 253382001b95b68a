"""Prefill.RunPrefill of a prefill worker: a prefill range in, an acknowledgement per committed chunk out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from pillion.engine.worker.worker import Worker
from pillion.errors import Overloaded
from pillion.observability import telemetry
from pillion.prefill_service.prefill_run import PrefillRun, check_range
from pillion.v1 import prefill_pb2, prefill_pb2_grpc
from pillion.wire.common import check_hello

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Runs prefill ranges; at most ``max_prefills`` wait or run on the worker."""

    def __init__(self, worker: Worker, max_prefills: int) -> None:
        self._worker = worker
        self._max_prefills = max_prefills
        self._live: set[PrefillRun] = set()

    async def RunPrefill(  # noqa: N802
        self, request: prefill_pb2.RunPrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.ChunkAck]:
        """See prefill.proto."""
        check_hello(request.hello)
        worker = self._worker
        worker.check_open()
        check_range(request, worker)
        if len(self._live) >= self._max_prefills:
            raise Overloaded(f"{worker.component_id} has {self._max_prefills} prefill ranges already")
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        run = PrefillRun(worker, telemetry.extract(metadata))
        self._live.add(run)
        # If the call ends while an ack is being sent, only this callback notices; otherwise aclosing does.
        context.add_done_callback(lambda *_: run.cancel())  # type: ignore[arg-type]  # the stubs name its arguments
        try:
            async with aclosing(run.acks(request)) as acks:
                async for ack in acks:
                    yield ack
        finally:
            self._live.discard(run)
