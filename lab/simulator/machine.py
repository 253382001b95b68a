"""A simulated machine: memory that a KV node shares with workers, and the attach socket.

    worker: attach --hello--> node: AttachPoint --epoch, memory--> SimAttachment
    the worker's process ends  --> the node sees that its epoch is over (the proof of I4)
    the node's process ends    --> the worker's descriptor becomes readable
    a keeper has the pool      --> the worker attaches again to the node's next life, after its last step

It replaces only Unix sockets, mapped segments and their locks: admission, fencing and recovery of pools are decided by
the production classes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from msgspec.structs import replace

from lab.simulator.disks import SimDisk
from lab.simulator.sim_threads import SimThread, SimThreadPool
from lab.simulator.virtual_loop import PROCESS, Process, VirtualLoop
from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.kvstore.client.attachment import CONNECT_RETRY_S, RENEW_PAUSE_S
from pillion.kvstore.memory.domain import HostDomain
from pillion.kvstore.memory.memory import HostMemory, PoolMemory
from pillion.kvstore.memory.shards import Shards
from pillion.kvstore.pool_survival.keeper_client import KeeperDescriptors
from pillion.kvstore.pool_survival.owned_segment import OwnedSegment
from pillion.wire.attach import AttachHello, AttachReply

# Latency until the other end of a socket sees a process's end.
MAX_NOTICE_S = 0.005


class SimSegment(OwnedSegment):
    """A segment of ``machine``, which is set while a world runs; its descriptor is a number.

    Attributes:
        places: processes with a lock on one of its places, as users of a pool have.
    """

    machine: ClassVar[Machine]

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self.size_bytes = size_bytes
        self.places: dict[int, Process] = {}
        self._owner: Process | None = None
        self._fd = self.machine.descriptor()
        self.machine.segments[self._fd] = self

    @classmethod
    def from_descriptor(cls, descriptor: int) -> SimSegment:
        return cls.machine.segments[descriptor]

    def own(self) -> bool:
        if self._owner is not None and self._owner.alive and self._owner is not PROCESS.get():
            return False
        self._owner = PROCESS.get()
        return True

    def users(self) -> set[int]:
        return {place for place, process in self.places.items() if process.alive}

    def words(self) -> memoryview:
        """Replace :func:`pillion.kvstore.pool_survival.surviving_pool.table_words`."""
        return memoryview(self.data).cast("Q")

    def close(self) -> None:
        """Do nothing: a process that maps the memory keeps it."""


class SimKeeper:
    """Replaces :class:`pillion.kvstore.pool_survival.keeper_client.PoolKeeper`; its keeper never dies. ``kept``:
    segments by node."""

    def __init__(self, kept: dict[str, tuple[int, ...]]) -> None:
        self._kept = kept
        self._lost = True

    def take(self, name: str) -> KeeperDescriptors | None:
        """Return the segments that an earlier life of the node passed to the keeper."""
        found = self._kept.get(name)
        return None if found is None else _NumberDescriptors(list(found), [])

    def keep(self, name: str, memories: Sequence[int], processes: Sequence[tuple[int, int]] = ()) -> None:
        """Store a node's segments, so that they outlive it."""
        self._kept[name], self._lost = tuple(memories), False

    def lost(self) -> bool:
        """Return whether the keeper lacks the pool, which must be passed again."""
        return self._lost

    def close(self) -> None:
        """Do nothing."""


class _NumberDescriptors(KeeperDescriptors):
    def close(self) -> None:
        """Do nothing: segments are numbers, not descriptors."""


class SimDomain(HostDomain):
    """Represents the host memory of the simulation."""

    def __init__(self, flags: Any, machine: Machine) -> None:
        super().__init__(flags)
        self._machine = machine

    def segment(self, size_bytes: int, shard: int = 0) -> Any:
        return SimSegment(size_bytes)

    def memory(self, segments: Sequence[Any], num_slots: int, division: Shards) -> PoolMemory:
        (segment,) = segments
        return HostMemory(segment.data, num_slots, division.block_bytes)


class Machine:
    """Files and memory of the machine on which all processes of a world run."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.points: dict[str, AttachPoint] = {}
        self.segments: dict[int, SimSegment] = {}
        # Descriptors of the keeper's pools, by KV node.
        self.kept: dict[str, tuple[int, ...]] = {}
        # By KV node.
        self.disks: dict[str, SimDisk] = {}
        self.threads: list[SimThread] = []
        self._numbers = itertools.count(100)

    def close(self) -> None:
        """End all threads and remove the disks."""
        for thread in self.threads:
            thread.kill()
        for disk in self.disks.values():
            disk.remove()

    def thread_pool(self, workers: int, name: str = "") -> SimThreadPool:
        return SimThreadPool(self.loop, self.threads, workers)

    def descriptor(self) -> int:
        """Return a number that stands for a descriptor which may become readable."""
        return next(self._numbers)

    def open_domain(self, flags: Any) -> SimDomain:
        """Replace :func:`pillion.kvstore.assemble.open_domain`."""
        return SimDomain(flags, self)

    def attach(self, socket_path: str, **hello: Any) -> Coroutine[Any, Any, SimAttachment]:
        """Replace :func:`pillion.kvstore.client.attachment.attach`, called on a thread, which waits."""
        timeout_s = hello.pop("timeout_s")
        # Simulated nodes are of this version, support states, and have host memory.
        del hello["has_states"], hello["map_device"]
        return self._attach(socket_path, AttachHello(**hello, takes_place=True), timeout_s)

    async def _attach(self, path: str, hello: AttachHello, timeout_s: float) -> SimAttachment:
        reply, link, segment = await self.greeted(path, hello, timeout_s)
        if reply.error or segment is None:
            raise ConfigError(f"the KV node refused {hello.component_id}: {reply.error}")
        return SimAttachment(self, hello, reply, link, segment)

    async def greeted(
        self, path: str, hello: AttachHello, timeout_s: float
    ) -> tuple[AttachReply, Link, SimSegment | None]:
        """Wait for the node's answer to the worker. Raises Unavailable."""
        until_s = time.monotonic() + timeout_s
        while (point := self.points.get(path)) is None or not point.process.alive:
            if time.monotonic() >= until_s:
                raise Unavailable(f"cannot attach to the KV node at --attach-socket {path}: no such file")
            await asyncio.sleep(CONNECT_RETRY_S)
        worker = PROCESS.get()
        answer: asyncio.Future[tuple[AttachReply, Link, SimSegment | None]] = self.loop.create_future()
        self.loop.post(point.process, point.greet, hello, worker, answer)
        point.on_end(answer)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the KV node at {path} does not answer") from None


@dataclass(slots=True, eq=False)
class Link:
    """Represents the connection of an attachment: ``fd`` is the worker's end."""

    fd: int
    worker: Process
    point: AttachPoint
    epoch: int = 0
    over: bool = False


class AttachPoint:
    """Replaces :class:`pillion.kvstore.node.attach_server.AttachServer`, with the same arguments."""

    def __init__(
        self,
        machine: Machine,
        path: str,
        memory_fds: Callable[[], list[int]],
        admit: Callable[[AttachHello], Awaitable[AttachReply]],
        ended: Callable[[int], None],
    ) -> None:
        self.process = PROCESS.get()
        self._machine = machine
        self._path = path
        self._memory_fds = memory_fds
        self._admit = admit
        self._ended = ended
        self._links: list[Link] = []
        self._unanswered: list[asyncio.Future[Any]] = []

    def start(self) -> None:
        """Listen for workers. Raises ConfigError if another process listens at the path."""
        there = self._machine.points.get(self._path)
        if there is not None and there.process.alive:
            raise ConfigError(f"another KV node serves {self._path}")
        self._machine.points[self._path] = self
        self.process.on_death.append(self._hang_up)

    async def stop(self) -> None:
        """Close all connections, by which workers see that the node is gone."""
        if self._machine.points.get(self._path) is self:
            del self._machine.points[self._path]
        for link in self._links:
            self._end(link)
        self._hang_up()

    def on_end(self, answer: asyncio.Future[Any]) -> None:
        """Refuse, at the node's end, a worker without an answer."""
        self._unanswered.append(answer)

    def greet(self, hello: AttachHello, worker: Process, answer: asyncio.Future[Any]) -> None:
        """Answer a worker that has connected; runs in the node's process."""
        self._machine.loop.create_task(self._greet(hello, worker, answer))

    async def _greet(self, hello: AttachHello, worker: Process, answer: asyncio.Future[Any]) -> None:
        link = Link(self._machine.descriptor(), worker, self)
        segment: SimSegment | None = None
        try:
            reply = await self._admit(hello)
            link.epoch = reply.epoch
            (descriptor,) = self._memory_fds()
            segment = self._machine.segments[descriptor]
        except PillionError as error:
            reply = AttachReply(error=error.message)
        if link.epoch:
            self._links.append(link)
            if worker.alive and not answer.done():
                worker.on_death.append(lambda: self.left(link))
            else:
                self.left(link)
        if not answer.done():
            answer.set_result((reply, link, segment))

    def left(self, link: Link) -> None:
        """Notify the node, a moment later, that a worker no longer maps its memory."""
        loop, random = self._machine.loop, self._machine.random
        loop.post_at(loop.time() + random.random() * MAX_NOTICE_S, self.process, self._end, link)

    def _end(self, link: Link) -> None:
        if not link.over:
            link.over = True
            self._ended(link.epoch)

    def _hang_up(self) -> None:
        """Close the node's side of all connections."""
        for link in self._links:
            if link.worker.alive:
                self._machine.loop.readable(link.fd)
        for answer in self._unanswered:
            if not answer.done():
                answer.set_exception(Unavailable("the KV node ended the connection without an answer"))


class SimAttachment:
    """A mapped pool, with the methods that workers use of
    :class:`pillion.kvstore.client.attachment.Attachment`."""

    device_memory = None

    def __init__(
        self, machine: Machine, hello: AttachHello, reply: AttachReply, link: Link, segment: SimSegment
    ) -> None:
        self.epoch = reply.epoch
        self.node_id = reply.node_id
        self.node_address = reply.node_address
        self.num_slots = reply.num_slots
        self.block_bytes = hello.block_bytes
        self.pool_id = reply.pool_id
        self.memory = self.pool = memoryview(segment.data)
        self.link = link
        self._machine, self._hello, self._segment = machine, hello, segment
        self._place = reply.epoch if reply.pool_id else 0
        if self._place:
            segment.places[self._place] = PROCESS.get()

    @property
    def node_gone(self) -> bool:
        return not self.link.point.process.alive

    def renew(self, socket_path: str, timeout_s: float, given_up: threading.Event) -> Coroutine[Any, Any, None]:
        """Replace :meth:`pillion.kvstore.client.attachment.Attachment.renew`, called on a thread, which waits."""
        return self._renew(socket_path, timeout_s, given_up)

    async def _renew(self, path: str, timeout_s: float, given_up: threading.Event) -> None:
        hello = replace(self._hello, pool_id=self.pool_id, place=self._place)
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                reply, link, _ = await self._machine.greeted(path, hello, until_s - time.monotonic())
                break
            except Unavailable:
                if given_up.is_set() or time.monotonic() + RENEW_PAUSE_S >= until_s:
                    raise
            await asyncio.sleep(RENEW_PAUSE_S)
        if reply.error or reply.pool_id != self.pool_id:
            raise ConfigError(f"the KV node refused {hello.component_id}: {reply.error or 'its pool is another one'}")
        self.link, self.epoch, self.node_address = link, reply.epoch, reply.node_address

    def fileno(self) -> int:
        return self.link.fd

    def close(self) -> None:
        """End the worker's use of the pool."""
        self._segment.places.pop(self._place, None)
        self.link.point.left(self.link)
