"""A decode worker as a part: what ``pillion decode`` and tests start and stop."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from decode_service.servicer import SERVICE_NAME, DecodeServicer
from engine.loading import BackendFactory, torch_backend
from engine.worker import Worker
from pillion.config import DecodeFlags
from pillion.errors import ConfigError
from pillion.rpc import RunningServer, start_server

log = logging.getLogger("pillion.decode")

# Time in which connections may take the last deltas.
LAST_WORDS_S = 0.5


@dataclass(slots=True)
class DecodePart:
    """A running decode worker."""

    worker: Worker
    servicer: DecodeServicer
    server: RunningServer

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.server.address

    async def wait_failed(self) -> str:
        """Returns why it died by itself; never, while it lives."""
        return await self.worker.wait_failed()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Takes no more streams, gives the running ones ``grace_s`` seconds, then ends."""
        await self.worker.drain(grace_s)
        self.servicer.finish()
        await self.server.stop(LAST_WORDS_S)
        await self.worker.close()


async def start_decode(flags: DecodeFlags, *, backend_factory: BackendFactory = torch_backend) -> DecodePart:
    """Start a decode worker. Raises ConfigError for what cannot work."""
    worker = await Worker.start(
        flags,
        "decode",
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        backend_factory=backend_factory,
    )
    servicer = DecodeServicer(worker, flags.max_num_seqs + flags.max_waiting_seqs)
    try:
        server = await start_server(flags.listen, [(SERVICE_NAME, servicer.add_to)])
    except OSError as error:
        await worker.close()
        raise ConfigError(str(error)) from None
    except BaseException:
        await worker.close()
        raise
    worker.announce(server.address)
    log.info("%s serves at %s", worker.part_id, server.address)
    return DecodePart(worker, servicer, server)
