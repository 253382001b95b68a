"""A gateway's session at a KV node. Its end releases all of its tickets, so a lost gateway pins nothing.

    connecting --OpenSession's first event--> alive --session ends--> connecting ...    any state --aclose--> closed

Releases are sent in batches in the background, and retried until the node answers or their session has ended.
"""

from __future__ import annotations

import asyncio
import logging

from pillion.errors import PillionError
from pillion.gateway.links.defects import Defects
from pillion.gateway.request.events import TicketHold
from pillion.kvstore.client.node_client import NodeClient
from pillion.tasks import at_most, end_tasks
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

RECONNECT_DELAY_S = 0.2
RELEASE_RETRY_DELAY_S = 0.1
MAX_RELEASES_PER_CALL = 1024


class NodeLink:
    """A gateway's connection to one KV node.

    Attributes:
        alive: True while a session is open.
        epoch: epoch of the current session, or of the last one.
    """

    def __init__(self, record: ComponentRecord, gateway_id: str) -> None:
        self.node_id = record.node_id
        self.address = record.address
        self.client = NodeClient(record.address, gateway_id)
        self.alive, self.epoch = False, 0
        self._releases: list[TicketHold] = []
        self._defects = Defects(f"the session at KV node {self.node_id}")
        self._releasing: asyncio.Task[None] | None = None
        self._upkeep = asyncio.create_task(self._keep_session(), name=f"session at {self.node_id}")

    def release(self, hold: TicketHold) -> None:
        """Release a ticket in the background. Never raises or waits."""
        self._releases.append(hold)
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release_all(), name=f"releases at {self.node_id}")

    async def aclose(self) -> None:
        """Send the pending releases, then end the session."""
        if self._releasing is not None:
            await at_most(1.0, self._releasing)
        await end_tasks(self._upkeep)
        await self.client.aclose()

    async def _keep_session(self) -> None:
        while True:
            try:
                await self._hold_session()
            except PillionError as error:
                log.debug("no session at KV node %s: %s", self.node_id, error.message)
            except Exception as error:  # noqa: BLE001  (if this task ended, the gateway could open no more tickets)
                self._defects.note(error)
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _hold_session(self) -> None:
        session = await self.client.open_session(wait_for_node=True)
        try:
            self.alive, self.epoch = True, session.epoch
            await session.closed()
            log.warning("session at KV node %s ended", self.node_id)
        finally:
            self.alive = False
            await session.aclose()

    async def _release_all(self) -> None:
        while self._releases:
            self._releases = [hold for hold in self._releases if self.alive and hold.epoch == self.epoch]
            batch = self._releases[:MAX_RELEASES_PER_CALL]
            if not batch:
                return
            try:
                await self.client.release(self.epoch, [hold.ticket_id for hold in batch])
            except PillionError as error:
                log.debug("release at KV node %s failed: %s", self.node_id, error.message)
                await asyncio.sleep(RELEASE_RETRY_DELAY_S)
                continue
            except Exception as error:  # noqa: BLE001  (unreleased tickets would stay until the session ends)
                self._defects.note(error)
                await asyncio.sleep(RELEASE_RETRY_DELAY_S)
                continue
            del self._releases[: len(batch)]
