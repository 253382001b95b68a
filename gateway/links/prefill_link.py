"""Calls to a prefill worker: each runs one prefill range, acknowledged chunk by chunk.

created --> alive --health watch fails, or reports NOT_SERVING--> not alive --SERVING--> alive
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pillion.errors import Unavailable
from pillion.net import rpc
from pillion.observability import telemetry
from pillion.tasks import end_tasks
from pillion.v1 import prefill_pb2_grpc
from pillion.v1.prefill_pb2 import DESCRIPTOR, ChunkAck, RunPrefillRequest
from pillion.wire.common import hello_to_pb
from pillion.wire.errors import said_by_server
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

RECONNECT_DELAY_S = 0.05


class PrefillBroken(Unavailable):
    """The connection to a prefill worker broke during a prefill range, i.e. the worker itself did not refuse it."""


class PrefillLink:
    """A gateway's connection to one prefill worker.

    Attributes:
        alive: True if prefill ranges can be sent: the worker reports so, or was not reached yet.
    """

    def __init__(self, record: ComponentRecord, gateway_id: str) -> None:
        self.component_id = record.component_id
        self.address = record.address
        self._gateway_id = gateway_id
        self._channel = rpc.open_channel(record.address)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._calls: dict[Any, None] = {}
        self.alive = True
        self._upkeep = asyncio.create_task(self._keep_watched(), name=f"health of {self.component_id}")

    async def run_prefill(
        self, request: RunPrefillRequest, timeout_s: float | None, on_queued: Callable[[int], None]
    ) -> AsyncIterator[ChunkAck]:
        """Send a prefill range to the worker, and yield the acknowledgements of its chunks in order. Leaving the
        iteration cancels the call. ``on_queued`` is called with the range's queue position while it waits, and with 0
        when it begins. Raises PillionError; PrefillBroken if the connection is lost."""
        request.hello.CopyFrom(hello_to_pb(self._gateway_id))
        call = self._stub.RunPrefill(request, timeout=timeout_s, metadata=telemetry.inject())
        self._calls[call] = None
        try:
            async for message in call:
                if message.HasField("queued"):
                    on_queued(message.queued.position)
                else:
                    yield message
        except grpc.aio.AioRpcError as error:
            raised = rpc.from_rpc_error(error)
            broke = isinstance(raised, Unavailable) and not said_by_server(error)
            raise PrefillBroken(raised.message) if broke else raised from None
        except asyncio.CancelledError as error:
            raise rpc.closed_under(error) from None
        finally:
            self._calls.pop(call, None)
            call.cancel()

    async def aclose(self) -> None:
        """Cancel the running prefill ranges, whose iterations raise Unavailable."""
        await end_tasks(self._upkeep)
        # Closing the channel alone would not end calls to a paused worker.
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()

    async def _keep_watched(self) -> None:
        """Watch the worker's health, and watch again after the stream has ended with the worker."""
        while True:
            request = health_pb2.HealthCheckRequest(service=DESCRIPTOR.services_by_name["Prefill"].full_name)
            # Wait for a worker that was not alive; else fail at once if it does not answer.
            call = self._health.Watch(request, wait_for_ready=not self.alive)
            try:
                async for reply in call:
                    self.alive = reply.status == health_pb2.HealthCheckResponse.SERVING
                    if not self.alive:
                        break
            except Exception as error:  # noqa: BLE001  (whatever the error, the worker may come back)
                log.debug("the health of %s is unknown: %s", self.component_id, error)
            finally:
                self.alive = False
                call.cancel()
            await asyncio.sleep(RECONNECT_DELAY_S)
