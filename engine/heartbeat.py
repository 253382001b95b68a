"""Signs of life: to the KV node, which fences a silent worker (I4), and to the registry, where gateways find it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine.node_line import describe as describe_error
from kvstore.client import NodeClient
from kvstore.index import Registry
from pillion.config import WorkerFlags
from pillion.errors import DeadlineExceeded, PillionError, Unavailable
from pillion.wire.registry import PartRecord

log = logging.getLogger("pillion.worker")


class Heartbeat:
    """Beats every ``heartbeat_ms`` while :meth:`run` runs.

    Args:
        describe: what the registry is told; asked once per beat, and only while ``announcing``.
        on_fail: called with a reason, once, when the worker may not go on.
        on_recall: the node would like so many slots of the stock back.
    """

    def __init__(
        self,
        flags: WorkerFlags,
        node: NodeClient,
        epoch: int,
        *,
        describe: Callable[[], PartRecord],
        on_fail: Callable[[str], None],
        on_recall: Callable[[int], None],
    ) -> None:
        self.announcing = False
        self._period_s = flags.heartbeat_ms / 1000
        self._timeout_s = flags.heartbeat_timeout_ms / 1000
        self._node = node
        self._epoch = epoch
        self._describe = describe
        self._on_fail = on_fail
        self._on_recall = on_recall
        self._registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms) if flags.redis_url else None
        self._registry_answers = True
        self._announced = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled, or until the worker may not go on."""
        await asyncio.gather(self._beat_node(), self._beat_registry())

    def announce(self) -> None:
        """Serve: tell the registry from now on."""
        self.announcing = True
        self._announced.set()

    async def leave(self, part_id: str) -> None:
        """Take the worker out of the registry."""
        self.announcing = False
        if self._registry is not None:
            try:
                await self._registry.leave(part_id)
            except PillionError as error:
                log.info("the registry does not answer: %s", error.message)

    async def close(self) -> None:
        """Close the registry's connection."""
        if self._registry is not None:
            await self._registry.aclose()

    async def _beat_node(self) -> None:
        heard = time.monotonic()
        while True:
            try:
                reply = await self._node.heartbeat(self._epoch)
            except (Unavailable, DeadlineExceeded) as error:
                # The node may be busy for a moment; its end is seen on the attach socket, not here.
                if time.monotonic() - heard > self._timeout_s:
                    self._on_fail(describe_error(error))
                    return
            except PillionError as error:
                self._on_fail(describe_error(error))
                return
            else:
                heard = time.monotonic()
                if reply.fenced:
                    self._on_fail("the KV node fenced this worker after a silence")
                    return
                if reply.recall_blocks:
                    self._on_recall(reply.recall_blocks)
            await asyncio.sleep(self._period_s)

    async def _beat_registry(self) -> None:
        if self._registry is None:
            return
        await self._announced.wait()
        while self.announcing:
            try:
                await self._registry.beat(self._describe())
                answers = True
            except PillionError as error:
                answers = False
                if self._registry_answers:
                    log.warning("the registry does not answer, gateways may lose sight of us: %s", error.message)
            self._registry_answers = answers
            await asyncio.sleep(self._period_s)
