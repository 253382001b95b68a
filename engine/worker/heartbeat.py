"""A worker's heartbeats to the KV node, which fences a silent worker (I4), and to the registry, which gateways read.

asked --node answers: not fenced--> EpochTerm renewed, from the moment of asking --heartbeat_timeout_ms--> lapsed
  ^------------- every heartbeat_ms, lapsed or not ----------------------------------------------------'
asked --node answers: fenced--> on_lost         asked --node does not answer for too long--> on_fail
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

    The node counts from the receipt of a heartbeat, the worker from the start of sending it: so the term lapses first.
    A paused process finds it lapsed when it wakes, before any answer of the node. ``clock`` returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self.clock = clock
        self._renewed_s = -math.inf

    def renew(self, asked_s: float) -> None:
        """Record the acknowledgement of a heartbeat begun at ``asked_s``."""
        self._renewed_s = asked_s

    def held(self) -> bool:
        """Return whether the node cannot have fenced this worker yet."""
        return self.clock() - self._renewed_s <= self._timeout_s


@dataclass(eq=False)
class Heartbeats:
    """Sends heartbeats every ``heartbeat_ms`` while :meth:`run` runs.

    Attributes:
        term: renewed by heartbeats.
        describe: makes the registry's record; called once per heartbeat while the worker is announced and may emit.
        on_lost: called once, when the epoch is fenced.
        on_fail: called once with a reason, when the worker cannot continue.
        on_renewed: called when the term is renewed.
        on_recall: called with the number of free slots that the node asks for.
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
        """Send heartbeats until cancelled, or until the epoch is over."""
        await asyncio.gather(self._beat_node(), self._beat_registry())

    def announce(self) -> None:
        self._announcing.set()

    async def leave(self, component_id: str) -> None:
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
        # When this process noticed the first missing answer: time that it slept through proves nothing about the node.
        missing_s: float | None = None
        while True:
            asked_s = self.term.clock()
            try:
                reply = await self.node.heartbeat(self.epoch)
            except (Unavailable, DeadlineExceeded) as error:
                # The node may be busy for a moment; its end shows on the attach socket.
                now = self.term.clock()
                missing_s = now if missing_s is None else missing_s
                if now - missing_s > self.flags.heartbeat_timeout_ms / 1000:
                    self.on_fail(describe_failure(error))
                    return
            except PillionError as error:
                self.on_fail(describe_failure(error))
                return
            else:
                missing_s = None
                if reply.fenced:
                    self.on_lost(Conflict("fenced after a silence"))
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
        answers = True
        while self._announcing.is_set():
            # Do not announce a worker that may not emit. After a pause, ask the node first.
            if self.term.held():
                try:
                    await self._registry.heartbeat(self.describe())
                    answers = True
                except PillionError as error:
                    if answers:
                        log.warning(
                            "the registry takes no heartbeat; gateways that know this worker go on with it, others do"
                            " not find it: %s",
                            error.message,
                        )
                    answers = False
            await asyncio.sleep(self.flags.heartbeat_ms / 1000)
