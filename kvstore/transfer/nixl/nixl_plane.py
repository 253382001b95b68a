"""Data plane with NIXL and UCX: this node reads other nodes' slots one-sided, many blocks per transfer.

A source, at its first read:  unknown --probe--> one-sided | streamed (no one-sided path: its blocks come by gRPC)

A read, on the agent's thread:

    queued --> parts of it posted, one after the other --> done
                 |-- UCX reports an error --> failed
                 +-- no part done for too long --> failing --> failed, once UCX reports the part's end

One thread owns the agent and makes all calls to it, so the agent needs no lock and the event loop never waits for it.
NIXL's own progress thread stays off: it spins, and would burn a core of an idle node. The thread polls the network
rarely when idle, and often while reads are in flight.

Only true one-sided reads are used: process_vm_readv on one host (UCX "cma"), RDMA between hosts. UCX can emulate them
over TCP, but then a dying reader aborts its source's process, and a stopped source's bytes arrive after the read was
abandoned (both seen with NIXL 1.5.1). So emulation is off (UCX_PROTO_EMULATION_ENABLE=n), and a source without a
one-sided path is read by :class:`pillion.kvstore.exchange.plane.DataPlane`.

Nothing writes to a read's slots after it has ended: "cma" copies inside this thread's own calls, and nothing is posted
before a probe, into separate memory, has shown that the connection works. An abandoned RDMA transfer is awaited until
UCX reports its end; its slots stay busy until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pillion.errors import PillionError, Unavailable
from pillion.kvstore.exchange.plane import MAX_READS, READ_TIMEOUT_S, DataPlane, StreamBlocks, check_slots, node_id_of
from pillion.kvstore.memory.memory import PoolMemory, until_over
from pillion.kvstore.transfer.nixl.nixl_agent import NixlAgent
from pillion.v1.kvplane_pb2 import MeetReply

log = logging.getLogger("pillion.kvnode")

# Timeout of a part of a read, and of a source's probe.
STALL_TIMEOUT_S = 2.0
MAX_PART_BYTES = 4 * 2**20
CLOSE_TIMEOUT_S = 5.0
# Time after a failed probe until the source is probed again.
PROBE_AGAIN_S = 60.0
MAX_REMOTES = 256
IDLE_POLL_S = 0.005
BUSY_POLL_S = 20e-6


@dataclass(slots=True)
class _Remote:
    """A source known to the agent.

    Attributes:
        agent_name: its agent; "" until added.
        blocks: its slots as NIXL's list; None if they have to be streamed.
        probe: the probe's handle while it is in flight, until at most ``probe_until_s``.
        probe_again_s: time from which a streamed source is probed again.
        cut: True once removed; it is disconnected after its last read.
    """

    pool: MeetReply
    agent_name: str = ""
    blocks: Any = None
    probe: Any = None
    probe_until_s: float = 0.0
    probe_again_s: float = 0.0
    reads: int = 0
    cut: bool = False


@dataclass(slots=True)
class _Read:
    """One read, which the agent's thread posts part after part.

    Attributes:
        result: True once everything was read; False if the blocks have to be streamed.
        at: number of blocks read.
        size: number of blocks of the part in flight.
    """

    source: MeetReply
    remote: tuple[int, ...]
    local: tuple[int, ...]
    deadline_s: float
    result: Future[bool] = field(default_factory=Future)
    peer: _Remote | None = None
    handle: Any = None
    at: int = 0
    size: int = 0
    stalled_s: float = 0.0
    failure: str = ""
    warned: bool = False


class NixlPlane(DataPlane):
    """Reads blocks by NIXL if source and reader can. The constructor takes about a second: do not call it on the event
    loop. A read fails when none of its parts finishes for ``stall_timeout_s``."""

    name = "nixl"

    def __init__(self, memory: PoolMemory, *, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        super().__init__(memory)
        self._part_blocks = max(1, MAX_PART_BYTES // memory.block_bytes)
        self._stall_timeout_s = stall_timeout_s
        self._agent = NixlAgent(memory)
        self.nixl_metadata = self._agent.metadata
        self.pool_address = self._agent.address
        # Only used by the agent's thread.
        self._remotes: dict[str, _Remote] = {}
        self._reads: list[_Read] = []
        # Calls for the agent's thread: at most MAX_READS reads, plus one forget() per lost peer. Not the C queue: its
        # get() may block forever if the timeout passes before it waits (CPython 3.11), which stalled all reads until
        # the next one.
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._reads_in_flight = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    async def read(
        self,
        source: MeetReply,
        stream: StreamBlocks,
        ticket_id: int,
        remote: tuple[int, ...],
        local: tuple[int, ...],
    ) -> None:
        check_slots(source, self._memory, remote, local)
        if self._closing or self._reads_in_flight >= MAX_READS:
            raise Unavailable(f"{self._reads_in_flight} reads are already in progress, at most {MAX_READS} are allowed")
        self._reads_in_flight += 1
        try:
            if not source.nixl_metadata or not await self._one_sided(source, remote, local):
                await super().read(source, stream, ticket_id, remote, local)
        finally:
            self._reads_in_flight -= 1

    def forget(self, node_id: str) -> None:
        """Make the next read start with a probe again."""
        self._inbox.put(lambda: self._cut(self._remotes.get(node_id)))

    def close(self) -> None:
        """Stop the thread and deregister the memory. A transfer that does not end prevents both."""
        if self._closing:
            return
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("a transfer does not end: the pool stays registered until this process ends")
            return
        self._agent.close()

    async def _one_sided(self, source: MeetReply, remote: tuple[int, ...], local: tuple[int, ...]) -> bool:
        """Read one-sided; return False, with nothing changed, if the source's blocks have to be streamed."""
        read = _Read(source, remote, local, time.monotonic() + READ_TIMEOUT_S)
        self._inbox.put(lambda: self._reads.append(read))
        return await until_over(asyncio.wrap_future(read.result))

    # Methods below run on the agent's thread.

    def _run(self) -> None:
        with self._memory.on_device():
            while not self._closing or self._reads:
                with contextlib.suppress(queue.Empty):
                    self._inbox.get(timeout=self._pause_s())()
                self._agent.progress()
                now = time.monotonic()
                for read in list(self._reads):
                    self._advance(read, now)

    def _pause_s(self) -> float:
        if any(read.handle is None and not (read.peer and read.peer.probe) for read in self._reads):
            return 0.0
        return BUSY_POLL_S if any(not read.failure for read in self._reads) else IDLE_POLL_S

    def _advance(self, read: _Read, now: float) -> None:
        """Advance one read without blocking."""
        try:
            peer = read.peer or self._start_read(read, now)
            if peer.probe is not None:
                self._poll_probe(peer, now)
            elif read.handle is not None:
                self._poll(read, now)
            elif peer.blocks is not None and not read.failure:
                self._post(read, peer, now)
        except Exception as error:  # noqa: BLE001  (NIXL's errors have no common root but Exception)
            self._fail(read, error)
        if read.handle is None and (read.failure or self._is_complete(read)):
            self._end(read)

    @staticmethod
    def _is_complete(read: _Read) -> bool:
        """Return whether all parts were read, or the source's blocks have to be streamed."""
        peer = read.peer
        if peer is None or peer.probe is not None:
            return False
        return peer.blocks is None or read.at == len(read.local)

    def _start_read(self, read: _Read, now: float) -> _Remote:
        read.stalled_s = now + self._stall_timeout_s
        peer = self._remotes.get(node_id_of(read.source))
        if peer is None or peer.pool != read.source or (peer.blocks is None and now > peer.probe_again_s):
            self._cut(peer)
            peer = self._meet(read.source, now)
        read.peer = peer
        peer.reads += 1
        return peer

    def _post(self, read: _Read, peer: _Remote, now: float) -> None:
        until = read.at + self._part_blocks
        local, remote = read.local[read.at : until], read.remote[read.at : until]
        read.size = len(local)
        read.handle, done = self._agent.post(local, peer.blocks, remote)
        if done:
            self._part_done(read, now)

    def _poll(self, read: _Read, now: float) -> None:
        state = self._agent.state(read.handle)
        if state == "DONE":
            self._part_done(read, now)
        elif state == "ERR":
            raise Unavailable("the transfer failed")
        elif not read.failure and now > min(read.stalled_s, read.deadline_s):
            read.failure = "it does not answer"
        elif read.failure and not read.warned and now > read.stalled_s + self._stall_timeout_s:
            read.warned = True
            log.warning("a transfer from %s does not end: its slots stay busy", node_id_of(read.source))

    def _part_done(self, read: _Read, now: float) -> None:
        self._agent.release(read.handle)
        read.handle = None
        read.stalled_s = now + self._stall_timeout_s
        read.at += read.size
        if now > read.deadline_s and read.at < len(read.local):
            read.failure = "it is too slow"

    def _fail(self, read: _Read, error: Exception) -> None:
        if read.handle is not None:
            self._agent.release(read.handle)
            read.handle = None
        read.failure = read.failure or _message(error)
        self._cut(read.peer)

    def _end(self, read: _Read) -> None:
        self._reads.remove(read)
        peer = read.peer
        if peer is not None:
            peer.reads -= 1
            self._disconnect_if_unused(peer)
        if read.failure:
            read.result.set_exception(Unavailable(f"{node_id_of(read.source)}: {read.failure}"))
        else:
            read.result.set_result(peer is not None and read.at == len(read.local))

    def _meet(self, pool: MeetReply, now: float) -> _Remote:
        """Add a source to the agent and send the probe."""
        if len(self._remotes) >= MAX_REMOTES:
            self._cut(next(iter(self._remotes.values())))
        peer = self._remotes[node_id_of(pool)] = _Remote(pool)
        peer.probe_until_s = now + self._stall_timeout_s
        try:
            peer.agent_name, peer.blocks = self._agent.add(pool)
            peer.probe, done = self._agent.probe(peer.agent_name, pool)
            if done:
                self._end_probe(peer, "")
        except Exception as error:  # noqa: BLE001
            self._end_probe(peer, _message(error))
        return peer

    def _poll_probe(self, peer: _Remote, now: float) -> None:
        try:
            state = self._agent.state(peer.probe)
        except Exception as error:  # noqa: BLE001
            self._end_probe(peer, _message(error))
            return
        if state == "DONE":
            self._end_probe(peer, "")
        elif state == "ERR" or now > peer.probe_until_s:
            # Late bytes of a probe are harmless: they go to separate memory.
            self._end_probe(peer, "it does not answer")

    def _end_probe(self, peer: _Remote, reason: str) -> None:
        """End a probe. ``reason``: why it failed, "" on success. After a failure the source's blocks are streamed,
        which fails as well if the source is lost."""
        if peer.probe is not None:
            self._agent.release(peer.probe)
            peer.probe = None
        if reason:
            log.info("blocks of node %s come by gRPC, NIXL finds no way to it: %s", node_id_of(peer.pool), reason)
            peer.probe_again_s = time.monotonic() + PROBE_AGAIN_S
            if peer.blocks is not None:
                self._release_list(peer)
                self._agent.disconnect(peer.agent_name)

    def _cut(self, peer: _Remote | None) -> None:
        if peer is None or peer.cut:
            return
        peer.cut = True
        if self._remotes.get(node_id_of(peer.pool)) is peer:
            del self._remotes[node_id_of(peer.pool)]
        self._disconnect_if_unused(peer)

    def _disconnect_if_unused(self, peer: _Remote) -> None:
        if peer.cut and not peer.reads and peer.blocks is not None:
            self._release_list(peer)
            # The agent may have been re-added; NIXL identifies agents by name.
            if not any(other.agent_name == peer.agent_name for other in self._remotes.values()):
                self._agent.disconnect(peer.agent_name)

    def _release_list(self, peer: _Remote) -> None:
        self._agent.release(peer.blocks)
        peer.blocks = None


def _message(error: Exception) -> str:
    return error.message if isinstance(error, PillionError) else repr(error)
