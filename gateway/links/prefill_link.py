"""Calls to prefill workers: each runs one span, which is acknowledged chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from pillion.net import rpc
from pillion.observability import telemetry
from pillion.v1 import prefill_pb2_grpc
from pillion.v1.prefill_pb2 import ChunkAck, RunSpanRequest
from pillion.wire.common import hello_to_pb
from pillion.wire.registry import ComponentRecord


class PrefillLink:
    """One prefill worker's channel; it connects with the first call and again when needed."""

    def __init__(self, record: ComponentRecord, gateway_id: str) -> None:
        self.component_id = record.component_id
        self.address = record.address
        self._gateway_id = gateway_id
        self._channel = rpc.open_channel(record.address)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._calls: set[Any] = set()

    @property
    def alive(self) -> bool:
        """Whether a span runs on it."""
        return bool(self._calls)

    async def run_span(self, request: RunSpanRequest, timeout_s: float | None) -> AsyncIterator[ChunkAck]:
        """Yields the acknowledgements in order; adds the hello to the request. Leaving the iteration cancels the call.
        Raises PillionError."""
        request.hello.CopyFrom(hello_to_pb(self._gateway_id))
        call = self._stub.RunSpan(request, timeout=timeout_s, metadata=telemetry.inject())
        self._calls.add(call)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None
        except asyncio.CancelledError as error:
            raise rpc.closed_under(error) from None
        finally:
            self._calls.discard(call)
            call.cancel()

    async def aclose(self) -> None:
        """Cancels the spans under way, whose iterations raise Unavailable."""
        # Closing the channel alone would let them wait for a worker that is paused and never answers.
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()
