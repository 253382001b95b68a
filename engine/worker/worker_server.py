"""A worker with its gRPC server: the component that commands and tests start and stop, for both services.

serve --> announced in the registry --stop--> drained --> last messages --> server ended --> worker closed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import grpc

from pillion.engine.worker.worker import Worker
from pillion.errors import ConfigError
from pillion.kvstore.index.advertise import advertised, follow_address
from pillion.net.rpc import RunningServer, internal_credentials, start_server

log = logging.getLogger("pillion.worker")

# Time for open connections to deliver their last messages.
LAST_MESSAGES_S = 0.5


class Service(NamedTuple):
    """A gRPC service of a worker. ``add_to`` registers its servicer with a server. ``finish``, called once the worker
    has drained, sends the last messages of open connections and ends these."""

    name: str
    add_to: Callable[[grpc.aio.Server], None]
    finish: Callable[[], None] = lambda: None


class WorkerServer:
    """A running worker that serves at ``address``."""

    def __init__(self, worker: Worker, server: RunningServer, services: Sequence[Service], address: str) -> None:
        """Announce the worker at ``address``, which other machines can reach."""
        worker.announce(address)
        self.worker = worker
        self.meters = worker.meters
        self.address = server.address
        self.wait_failed = worker.wait_failed
        self._server = server
        self._services = services
        flags = worker.flags
        following = follow_address(address, flags.advertise, server.address, flags.redis_url, self._moved)
        self._following = asyncio.create_task(following, name="following the address")

    async def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new work, allow running sequences ``grace_s`` seconds, then end the worker and its server."""
        self._following.cancel()
        await self.worker.drain(grace_s)
        for service in self._services:
            service.finish()
        # A failed worker sends no last messages: clients notice the closed connection, and its successor may be
        # waiting.
        await self._server.stop(0.0 if self.worker.failed else LAST_MESSAGES_S)
        await self.worker.close()

    def _moved(self, address: str) -> None:
        log.warning("%s is at %s now", self.worker.component_id, address)
        self.worker.announce(address)


async def serve(worker: Worker, *services: Service) -> WorkerServer:
    """Serve and announce the worker. Raises ConfigError, with the worker closed, if its address is in use."""
    flags = worker.flags
    async with AsyncExitStack() as undo:
        undo.push_async_callback(worker.close)
        try:
            credentials = internal_credentials(flags.listen)
            server = await start_server(
                flags.listen, [(service.name, service.add_to) for service in services], credentials=credentials
            )
        except OSError as error:
            raise ConfigError(str(error)) from None
        undo.push_async_callback(server.stop, 0.0)
        address = await asyncio.to_thread(advertised, flags.advertise, server.address, flags.redis_url)
        undo.pop_all()
    log.info("%s serves at %s", worker.component_id, server.address)
    return WorkerServer(worker, server, services, address)
