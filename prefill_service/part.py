"""A prefill worker as a part: what ``pillion prefill`` and tests start and stop."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.loading import BackendFactory, torch_backend
from engine.worker import Worker
from pillion.config import PrefillFlags
from pillion.errors import ConfigError
from pillion.rpc import RunningServer, start_server
from prefill_service.servicer import SERVICE_NAME, PrefillServicer

log = logging.getLogger("pillion.prefill")


@dataclass(slots=True)
class PrefillPart:
    """A running prefill worker."""

    worker: Worker
    server: RunningServer

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.server.address

    async def wait_failed(self) -> str:
        """Returns why it died by itself; never, while it lives."""
        return await self.worker.wait_failed()

    async def stop(self, grace_s: float = 2.0) -> None:
        """Takes no more spans, gives the running ones ``grace_s`` seconds, then ends."""
        await self.worker.drain(grace_s)
        await self.server.stop(0.0)
        await self.worker.close()


async def start_prefill(flags: PrefillFlags, *, backend_factory: BackendFactory = torch_backend) -> PrefillPart:
    """Start a prefill worker. Raises ConfigError for what cannot work."""
    worker = await Worker.start(
        flags,
        "prefill",
        max_num_batched_tokens=flags.max_num_batched_prefill_tokens,
        max_num_seqs=min(flags.max_waiting_spans, flags.max_num_batched_prefill_tokens),
        backend_factory=backend_factory,
    )
    servicer = PrefillServicer(worker, flags.max_waiting_spans)
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
    return PrefillPart(worker, server)
