"""The data plane with NIXL and UCX: this node reads the other's slots one-sided, many blocks per transfer.

A read, on the agent's thread:

    queued --> parts of it posted, one after the other --> done
                 |-- an error, or the peer was forgotten --> failed
                 +-- no part done for too long --> the peer is cut off --> failed once NIXL says that it is over

One thread owns the agent and makes every call to it; the agent needs no lock then, and the event loop never waits for
it. NIXL's own progress thread stays off: it spins, and would burn a core of an idle node. The thread looks at the
network seldom while nothing happens, and often while reads are under way. Over TCP the *source's* UCX has to answer, so
a reader nudges it with notifications as long as it reads, and a nudged source looks often as well.

What ends a read for sure: through process_vm_readv (UCX "cma", same host) the copy is made by this thread itself and is
over when the call returns. Over the network the peer's endpoint is closed by force, which completes its requests with
an error, and what arrives later finds neither connection nor request. A transfer that NIXL still calls active then is
waited for: the read does not end, and its slots stay busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvstore.grpc_plane import MAX_READS, READ_TIMEOUT_S, check_slots
from kvstore.nixl_agent import NixlAgent
from kvstore.plane import BlockStream, PeerPool
from pillion.errors import PillionError, Unavailable

log = logging.getLogger("pillion.kvnode")

# Longest time without a finished part of a read.
STALL_TIMEOUT_S = 2.0
# One part of a read: readers take turns after so much.
MAX_PART_BYTES = 4 * 2**20
# Sources that are remembered.
MAX_REMOTES = 256
# How often the agent's thread looks when nothing happens, when its memory is being read, when it reads.
IDLE_POLL_S = 0.005
SERVING_POLL_S = 50e-6
READING_POLL_S = 20e-6
# A reader's notifications, and how long one keeps the source awake.
NUDGE_INTERVAL_S = 0.05
AWAKE_S = 0.2


@dataclass(slots=True)
class _Remote:
    """A source that the agent knows. ``cut``: its endpoint is closed; it lives on until its reads are over."""

    pool: PeerPool
    agent_name: str
    blocks: Any
    cut: bool = False
    reads: int = 0
    nudged_s: float = 0.0


@dataclass(slots=True)
class _Read:
    """One call of :meth:`NixlPlane.read`. ``at``: blocks that are here; ``size``: blocks of the part under way."""

    source: PeerPool
    remote: tuple[int, ...]
    local: tuple[int, ...]
    deadline_s: float
    over: Future[None] = field(default_factory=Future)
    peer: _Remote | None = None
    handle: Any = None
    at: int = 0
    size: int = 0
    stalled_s: float = 0.0
    failure: str = ""
    stuck: bool = False


class NixlPlane:
    """See :class:`kvstore.plane.DataPlane`. Making one takes about a second: not on the event loop's thread.

    Args:
        memory: the pool's mapping; ``num_slots`` blocks of ``block_bytes`` from its beginning are registered once.
        stall_timeout_s: longest time without a finished part of a read; the source is given up then.
    """

    name = "nixl"

    def __init__(
        self, memory: mmap.mmap, num_slots: int, block_bytes: int, *, stall_timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        self._pool_bytes = num_slots * block_bytes
        self._block_bytes = block_bytes
        self._part_blocks = max(1, MAX_PART_BYTES // block_bytes)
        self._stall_timeout_s = stall_timeout_s
        self._agent = NixlAgent(memory, num_slots, block_bytes)
        self.nixl_metadata: bytes = self._agent.metadata
        self.pool_address: int = self._agent.address
        # Touched by the agent's thread alone.
        self._remotes: dict[str, _Remote] = {}
        self._reads: list[_Read] = []
        self._awake_until_s = 0.0
        # Between the threads. Bounded by MAX_READS, and by forget(), which is called as seldom as peers are lost.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    async def read(
        self, source: PeerPool, stream: BlockStream, ticket_id: int, remote: tuple[int, ...], local: tuple[int, ...]
    ) -> None:
        """A caller that is cancelled still waits for the end: its slots are being written to."""
        check_slots(source, self._block_bytes, remote, local, self._pool_bytes)
        if not source.nixl_metadata:
            raise Unavailable(f"{source.node_id} has no NIXL")
        if self._closing or self._under_way >= MAX_READS:
            raise Unavailable(f"{self._under_way} reads are under way already, at most {MAX_READS} may be")
        read = _Read(source, remote, local, time.monotonic() + READ_TIMEOUT_S)
        self._under_way += 1
        self._inbox.put(lambda: self._reads.append(read))
        over = asyncio.wrap_future(read.over)
        cancelled = False
        while not over.done():
            try:
                await asyncio.wait([over])
            except asyncio.CancelledError:
                cancelled = True
        self._under_way -= 1
        if cancelled:
            over.exception()
            raise asyncio.CancelledError
        over.result()

    def forget(self, node_id: str) -> None:
        """Cuts the source off: its reads under way fail soon."""
        self._inbox.put(lambda: self._cut(self._remotes.get(node_id)))

    def close(self) -> None:
        """Ends the thread, and with it the registration of the memory."""
        if not self._closing:
            self._closing = True
            self._inbox.put(lambda: None)
            self._thread.join()
            self._agent.close()

    # -- the agent's thread

    def _run(self) -> None:
        while not self._closing or self._reads:
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=self._pause_s())()
            now = time.monotonic()
            if self._agent.was_nudged():
                self._awake_until_s = now + AWAKE_S
            for read in list(self._reads):
                self._advance(read, now)

    def _pause_s(self) -> float:
        if any(read.handle is None for read in self._reads):
            return 0.0
        if self._reads:
            return IDLE_POLL_S if all(read.stuck for read in self._reads) else READING_POLL_S
        return SERVING_POLL_S if time.monotonic() < self._awake_until_s else IDLE_POLL_S

    def _advance(self, read: _Read, now: float) -> None:
        """One look at one read."""
        if read.peer is None:
            self._begin(read, now)
        elif read.handle is not None:
            self._poll(read, now)
        if read.handle is None and not read.failure and read.at < len(read.local):
            self._post(read)
        if read.handle is None and (read.failure or read.at == len(read.local)):
            self._end(read)

    def _begin(self, read: _Read, now: float) -> None:
        try:
            read.peer = self._meet(read.source)
        except Exception as error:  # noqa: BLE001  (NIXL's errors have no common root but Exception)
            read.failure = _words(error)
            return
        read.peer.reads += 1
        read.stalled_s = now + self._stall_timeout_s
        self._nudge(read.peer, now)

    def _post(self, read: _Read) -> None:
        assert read.peer is not None
        if read.peer.cut:
            read.failure = "it was given up"
            return
        until = read.at + self._part_blocks
        local, remote = read.local[read.at : until], read.remote[read.at : until]
        try:
            read.handle, done = self._agent.post(local, read.peer.blocks, remote)
        except Exception as error:  # noqa: BLE001
            read.failure = _words(error)
            self._cut(read.peer)
            return
        read.size = len(local)
        if done:
            self._part_done(read, time.monotonic())

    def _poll(self, read: _Read, now: float) -> None:
        peer = read.peer
        assert peer is not None
        try:
            state = self._agent.state(read.handle)
        except Exception as error:  # noqa: BLE001
            state, read.failure = "ERR", read.failure or _words(error)
        if state == "DONE":
            self._part_done(read, now)
        elif state == "ERR":
            read.failure = read.failure or "the transfer failed"
            self._agent.release(read.handle)
            read.handle = None
            self._cut(peer)
        elif now > min(read.stalled_s, read.deadline_s) and not read.failure:
            read.failure = "it does not answer"
            self._cut(peer)
        elif read.failure and not read.stuck and now > read.stalled_s + self._stall_timeout_s:
            read.stuck = True
            log.warning("a transfer from %s does not end: its slots stay busy", read.source.node_id)
        elif not peer.cut and now > peer.nudged_s + NUDGE_INTERVAL_S:
            self._nudge(peer, now)

    def _part_done(self, read: _Read, now: float) -> None:
        self._agent.release(read.handle)
        read.handle = None
        read.at += read.size
        read.stalled_s = now + self._stall_timeout_s
        if now > read.deadline_s and read.at < len(read.local):
            read.failure = "it is too slow"

    def _end(self, read: _Read) -> None:
        self._reads.remove(read)
        if read.peer is not None:
            read.peer.reads -= 1
            self._drop_if_over(read.peer)
        if read.failure:
            read.over.set_exception(Unavailable(f"{read.source.node_id}: {read.failure}"))
        else:
            read.over.set_result(None)

    def _meet(self, pool: PeerPool) -> _Remote:
        known = self._remotes.get(pool.node_id)
        if known is not None and known.pool == pool:
            return known
        self._cut(known)
        if len(self._remotes) >= MAX_REMOTES:
            self._cut(next(iter(self._remotes.values())))
        agent_name, blocks = self._agent.add(pool)
        met = self._remotes[pool.node_id] = _Remote(pool, agent_name, blocks)
        return met

    def _cut(self, peer: _Remote | None) -> None:
        if peer is None or peer.cut:
            return
        peer.cut = True
        if self._remotes.get(peer.pool.node_id) is peer:
            del self._remotes[peer.pool.node_id]
        self._agent.disconnect(peer.agent_name)
        self._drop_if_over(peer)

    def _drop_if_over(self, peer: _Remote) -> None:
        if peer.cut and not peer.reads and peer.blocks is not None:
            self._agent.release(peer.blocks)
            peer.blocks = None

    def _nudge(self, peer: _Remote, now: float) -> None:
        peer.nudged_s = now
        self._agent.nudge(peer.agent_name)


def _words(error: Exception) -> str:
    return error.message if isinstance(error, PillionError) else repr(error)
