"""A worker with its gRPC server: the component that commands and tests start and stop, for both services.

serve --> announced in the registry --stop--> drained --> last messages --> server ended --> worker closed
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import grpc

from pillion.engine.worker.worker import Worker
from pillion.errors import ConfigError
from pillion.kvstore.index.advertise import advertised
from pillion.net.rpc import RunningServer, internal_credentials, start_server

log = logging.getLogger("pillion.worker")

# Time in which open connections may take the last messages.
LAST_MESSAGES_S = 0.5


class WorkerServicer(Protocol):
    """A gRPC servicer around a worker."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server; called by :func:`pillion.net.rpc.start_server`."""

    def finish(self) -> None:
        """The worker has drained: send the last messages, then end the connections that clients keep open."""


class WorkerServer:
    """A running worker that serves at ``address``."""

    def __init__(self, worker: Worker, service: WorkerServicer, server: RunningServer) -> None:
        self.worker = worker
        self.meters = worker.meters
        self._service = service
        self._server = server

    @property
    def address(self) -> str:
        """The address that the server listens at."""
        return self._server.address

    async def wait_failed(self) -> str:
        """Returns why the worker died by itself; never returns while it lives."""
        return await self.worker.wait_failed()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Take no more work, give running sequences ``grace_s`` seconds, then end."""
        await self.worker.drain(grace_s)
        self._service.finish()
        await self._server.stop(LAST_MESSAGES_S)
        await self.worker.close()


async def serve(worker: Worker, listen: str, service_name: str, service: WorkerServicer) -> WorkerServer:
    """Serve and announce the worker. Raises ConfigError, with the worker closed, where ``listen`` is in use."""
    try:
        credentials = internal_credentials(listen)
        server = await start_server(listen, [(service_name, service.add_to)], credentials=credentials)
    except OSError as error:
        await worker.close()
        raise ConfigError(str(error)) from None
    except BaseException:
        await worker.close()
        raise
    flags = worker.flags
    try:
        # In a thread, because host names may have to be looked up.
        address = await asyncio.to_thread(advertised, flags.advertise, server.address, flags.redis_url)
    except BaseException:
        await server.stop(0.0)
        await worker.close()
        raise
    worker.announce(address)
    log.info("%s serves at %s", worker.component_id, server.address)
    return WorkerServer(worker, service, server)
