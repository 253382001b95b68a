"""A worker with its gRPC server as a part: what commands and tests start and stop. Both services are made of it.

serve --> announced in the registry --stop--> drained --> last words --> server ended --> worker closed
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
LAST_WORDS_S = 0.5


class WorkerServicer(Protocol):
    """A servicer around a worker."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """For :func:`pillion.net.rpc.start_server`."""

    def finish(self) -> None:
        """The worker has drained: say what there is to say, then end what clients keep open."""


class WorkerServer:
    """A running worker that serves at ``address``."""

    def __init__(self, worker: Worker, service: WorkerServicer, server: RunningServer) -> None:
        self.worker = worker
        self.meters = worker.meters
        self._service = service
        self._server = server

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._server.address

    async def wait_failed(self) -> str:
        """Returns why it died by itself; never, while it lives."""
        return await self.worker.wait_failed()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Takes no more work, gives what runs ``grace_s`` seconds, then ends."""
        await self.worker.drain(grace_s)
        self._service.finish()
        await self._server.stop(LAST_WORDS_S)
        await self.worker.close()


async def serve(worker: Worker, listen: str, service_name: str, service: WorkerServicer) -> WorkerServer:
    """Serve and announce the worker. Raises ConfigError, with the worker closed, where ``listen`` is taken."""
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
        # Names may have to be looked up.
        address = await asyncio.to_thread(advertised, flags.advertise, server.address, flags.redis_url)
    except BaseException:
        await server.stop(0.0)
        await worker.close()
        raise
    worker.announce(address)
    log.info("%s serves at %s", worker.component_id, server.address)
    return WorkerServer(worker, service, server)
