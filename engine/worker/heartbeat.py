"""A worker's heartbeats to the KV node, which fences a silent worker (I4), and to the registry, which gateways read.

heartbeat --reply: not fenced--> EpochTerm renewed as of the heartbeat's start --heartbeat_timeout_ms--> lapsed
    ^-------------- every heartbeat_ms, lapsed or not -------------------------------------------------'
heartbeat --reply: fenced--> on_lost            heartbeat --no reply for heartbeat_timeout_ms--> on_fail
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from pillion.config import WorkerFlags
from pillion.engine.worker.node_updates import describe_failure
from pillion.errors import Conflict, DeadlineExceeded, PillionError, Unavailable
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.index.registry import Registry
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.worker")


class EpochTerm:
    """A worker's right to emit, valid until the node could have fenced it for silence (I4).

    The node counts from the receipt of a heartbeat, the worker from the start of sending it, so the term always lapses
    before the node fences. A process that was paused finds it lapsed at once. ``clock`` returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self.clock = clock
        self._renewed_s = -math.inf

    def renew(self, asked_s: float) -> None:
        """Record the acknowledgement of a heartbeat begun at ``asked_s``."""
        self._renewed_s = asked_s

    def valid(self) -> bool:
        """Return whether the node cannot have fenced this worker yet."""
        return self.clock() - self._renewed_s <= self._timeout_s


@dataclass(eq=False)
class Heartbeats:
    """Sender of an epoch's heartbeats, one per ``heartbeat_ms`` to the node and to the registry.

    Attributes:
        term: renewed by the node's replies.
        describe: returns the registry's record; called per heartbeat while the worker is announced and may emit.
        on_lost: called once, when the epoch is fenced.
        on_fail: called once with a reason, when the node refuses heartbeats or is silent for too long.
        on_renewed: called when the term is renewed.
        on_recall: called with the number of free slots that the node recalls.
    """

    flags: WorkerFlags
    node: NodeClient
    epoch: int
    term: EpochTerm
    _: KW_ONLY
    describe: Callable[[], ComponentRecord]
    on_lost: Callable[[PillionError], None]
    on_fail: Callable[[str], None]
    on_renewed: Callable[[], None]
    on_recall: Callable[[int], None]

    def __post_init__(self) -> None:
        flags = self.flags
        self._registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms) if flags.redis_url else None
        self._announcing = asyncio.Event()

    async def run(self) -> None:
        """Send heartbeats until cancelled; those to the node end with the epoch."""
        await asyncio.gather(self._beat_node(), self._beat_registry())

    def announce(self) -> None:
        """Begin to send heartbeats to the registry."""
        self._announcing.set()

    async def leave(self, component_id: str) -> None:
        """End the registry's heartbeats and remove the worker's record. Does not raise if the registry is down."""
        self._announcing.clear()
        if self._registry is not None:
            try:
                await self._registry.leave(component_id)
            except PillionError as error:
                log.info("the registry does not answer: %s", error.message)

    async def close(self) -> None:
        if self._registry is not None:
            await self._registry.aclose()

    async def _beat_node(self) -> None:
        # Time at which this process noticed the first missing reply. The heartbeat's start would include time in which
        # the process itself was paused.
        silent_since_s: float | None = None
        while True:
            asked_s = self.term.clock()
            try:
                reply = await self.node.heartbeat(self.epoch)
            except (Unavailable, DeadlineExceeded) as error:
                # The node may only be busy: its death shows on the attach socket.
                now = self.term.clock()
                silent_since_s = now if silent_since_s is None else silent_since_s
                if now - silent_since_s > self.flags.heartbeat_timeout_ms / 1000:
                    self.on_fail(describe_failure(error))
                    return
            except PillionError as error:
                self.on_fail(describe_failure(error))
                return
            else:
                silent_since_s = None
                if reply.fenced:
                    self.on_lost(Conflict("fenced after missed heartbeats"))
                    return
                self.term.renew(asked_s)
                self.on_renewed()
                if reply.recall_blocks:
                    self.on_recall(reply.recall_blocks)
            await asyncio.sleep(self.flags.heartbeat_ms / 1000)

    async def _beat_registry(self) -> None:
        if self._registry is None:
            return
        await self._announcing.wait()
        available = True
        while self._announcing.is_set():
            # Do not announce a worker that may be fenced: after a pause, the node's reply comes first.
            if self.term.valid():
                try:
                    await self._registry.heartbeat(self.describe())
                    available = True
                except PillionError as error:
                    if available:
                        log.warning(
                            "the registry takes no heartbeats; gateways that know this worker continue with it, others"
                            " do not find it: %s",
                            error.message,
                        )
                    available = False
            await asyncio.sleep(self.flags.heartbeat_ms / 1000)
