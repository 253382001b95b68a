"""A worker's side of the attach socket: the mapped pool of a KV node, and memory regions that processes share.

kvstore/node/attach_server.py is the other side and draws the protocol.

    attach --> mapped, at work --the node is gone--> every step ends --renew, the same pool--> at work
                                                                         '--another pool--> the worker exits
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.kvstore.memory.cuda_segment import DeviceMapping, map_device
from pillion.kvstore.memory.memory import HOST, address_of
from pillion.kvstore.memory.segment import lock_place, map_shared, reopened
from pillion.kvstore.memory.shards import MAX_SHARDS
from pillion.net.private_socket import close_all, peer_gone, receive_line
from pillion.wire.attach import (
    DETACHED,
    MAX_LINE_BYTES,
    MAX_PROCESSES,
    PROCESSES,
    AttachedShard,
    AttachHello,
    AttachReply,
    RegionFilled,
    RegionHello,
    RegionReply,
    attach_reply_from_line,
    line_to_bytes,
    region_reply_from_line,
)

CONNECT_RETRY_S = 0.05
# The pause behind a node that ended before it had answered a worker that attaches again.
RENEW_PAUSE_S = 0.1


class PoolShards:
    """A pool that is divided over GPUs: each shard has the pieces of some KV heads of every slot. A process maps those
    that it uses, for kernels of its first GPU.

    Attributes:
        shares: the KV heads of each shard.
    """

    def __init__(self, descriptors: Sequence[int], shards: Sequence[AttachedShard]) -> None:
        """``descriptors``: of each shard; they stay the caller's, and open until :meth:`close`."""
        self.shares = tuple(range(shard.first_head, shard.first_head + shard.heads) for shard in shards)
        self._descriptors, self._shards = descriptors, shards
        self._mapped: dict[int, DeviceMapping] = {}

    def shard(self, index: int) -> DeviceMapping:
        """Returns the mapping of a shard. Raises ConfigError where this process's GPU cannot reach it."""
        if index not in self._mapped:
            shard = self._shards[index]
            fd = self._descriptors[index]
            self._mapped[index] = map_device(fd, shard.mapped_bytes, shard.device_uuid, reader_index=0)
        return self._mapped[index]

    def close(self) -> None:
        """Unmaps what was mapped; nothing uses it any more. Idempotent."""
        while self._mapped:
            self._mapped.popitem()[1].close()


class SharedMemory:
    """Memory of a node that this process has mapped, and the connection that stands for its use.

    Attributes:
        memory: the bytes, writable; empty where the memory is on GPUs.
        device_memory: the mapping of a GPU's memory, else None.
        shards: a pool that is divided over GPUs, else None.
    """

    def __init__(self, sock: socket.socket, mapped: mmap.mmap | DeviceMapping | PoolShards) -> None:
        self._sock = sock
        self._mapped = mapped
        self.device_memory = mapped if isinstance(mapped, DeviceMapping) else None
        self.shards = mapped if isinstance(mapped, PoolShards) else None
        self.memory = memoryview(mapped) if isinstance(mapped, mmap.mmap) else memoryview(b"")

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):
            # Tensors over the memory keep it mapped until they go; the caller promises not to use them.
            self.memory.release()
            self._mapped.close()


class Attachment(SharedMemory):
    """The mapped pool; its connection stands for the worker's life. Made by :func:`attach`.

    Attributes:
        epoch: names the worker at the node; void once either side ends.
        node_id, node_address: the node, and the address of its gRPC service.
        pool_id: names a pool that outlives its node; empty for another one.
        num_slots, block_bytes: shape of the pool; slot s is at bytes s * block_bytes .. (s + 1) * block_bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        memory_fds: Sequence[int],
        reply: AttachReply,
        block_bytes: int,
        place: int = 0,
        block_tokens: int = 0,
    ) -> None:
        """Maps the memory behind ``memory_fds``, but for that of shards, and keeps duplicates of them. With ``place``,
        the file of the places is opened anew and locked there: that of memory on the host, or the one that comes behind
        memory on GPUs. Raises ConfigError."""
        apart = bool(place) and reply.memory_kind != HOST
        if len(memory_fds) != max(1, len(reply.shards)) + apart:
            raise ConfigError("the KV node answered without its memory")
        locked = [_own_place(memory_fds[-1], place)] if place else []
        self._place_fds = locked if apart else []
        self._memory_fds = (
            locked if place and not apart else [os.dup(fd) for fd in memory_fds[: len(memory_fds) - apart]]
        )
        try:
            super().__init__(sock, _map_pool(self._memory_fds, reply, reply.num_slots * block_bytes))
        except BaseException:
            self._close_memory()
            raise
        self._reply, self._place = reply, place
        self.epoch = reply.epoch
        self.node_id = reply.node_id
        self.node_address = reply.node_address
        self.num_slots = reply.num_slots
        self.block_bytes = block_bytes
        # Said again when the worker attaches to the node's next life.
        self._block_tokens = block_tokens
        self.pool_id = reply.pool_id
        self._kv_rows = self._kv_heads = 0

    @property
    def node_gone(self) -> bool:
        """Whether the node's end can be seen by now."""
        return peer_gone(self._sock)

    def renew(
        self,
        socket_path: str,
        component_id: str,
        role: str,
        namespace: str,
        timeout_s: float,
        given_up: threading.Event,
    ) -> None:
        """Attaches to the next life of the node, whose end was seen, over the pool that is mapped; blocks for up to
        ``timeout_s`` and waits for that node, or until another thread sets ``given_up``. Nothing of this worker uses
        the pool meanwhile. Afterwards ``epoch``, ``node_address`` and the connection are new.

        Raises ConfigError if the node refuses or has another pool, and Unavailable if it does not answer, or was given
        up.
        """
        hello = AttachHello(
            component_id=component_id,
            role=role,
            block_bytes=self.block_bytes,
            namespace=namespace,
            block_tokens=self._block_tokens,
            kv_rows=self._kv_rows,
            kv_heads=self._kv_heads,
            takes_place=True,
            pool_id=self.pool_id,
            place=self._place,
        )
        failure = f"cannot attach again to the KV node at --attach-socket {socket_path}"
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(0.001, until_s - time.monotonic())
                with _asked(failure, socket_path, hello, left_s, given_up) as (sock, line, _):
                    reply = attach_reply_from_line(line)
                    if reply.error or reply.pool_id != self.pool_id:
                        reason = reply.error or "its pool is another one"
                        raise ConfigError(f"the KV node refused {component_id}: {reason}")
                break
            except Unavailable:
                # A node that dies before it has answered is followed by yet another one.
                if time.monotonic() + RENEW_PAUSE_S >= until_s or given_up.wait(RENEW_PAUSE_S):
                    raise
        sock.setblocking(False)
        self._sock.close()
        self._sock, self._reply = sock, reply
        self.epoch, self.node_address = reply.epoch, reply.node_address

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the node is gone; for ``loop.add_reader``."""
        return self._sock.fileno()

    @property
    def pool(self) -> memoryview | DeviceMapping | PoolShards:
        """The pool's memory, in the form in which a backend takes it."""
        return self.shards or self.device_memory or self.memory

    def handed_over(self) -> tuple[bytes, list[int]]:
        """What another process of this worker needs for :meth:`joined`: bytes, and descriptors to send along. They stay
        this attachment's."""
        return line_to_bytes(self._reply), [*self._memory_fds, self._sock.fileno()]

    def name_processes(self, pids: Sequence[int]) -> None:
        """Tells the node of the worker's other processes, before they map a GPU's memory: it reuses no slot before all
        of them have exited (I4). Raises ConfigError where it could not, and Unavailable where it is gone."""
        if len(pids) > MAX_PROCESSES:
            raise ConfigError(f"a worker on a GPU may have {MAX_PROCESSES} other processes, not {len(pids)}")
        pidfds: list[int] = []
        try:
            for pid in pids:
                # A process that has ended already writes nothing.
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(_pidfd(pid))
            socket.send_fds(self._sock, [PROCESSES], pidfds)
        except OSError as error:
            raise Unavailable(f"the KV node is gone: {error.strerror}") from None
        finally:
            for pidfd in pidfds:
                os.close(pidfd)

    @classmethod
    def joined(cls, line: bytes, descriptors: Sequence[int], block_bytes: int) -> Attachment:
        """The attachment of another process of the same worker, by what that one handed over; the descriptors stay the
        caller's. As long as either process holds the connection, the node sees no end of the worker (I4). Raises
        ConfigError where the memory cannot be mapped."""
        *memory_fds, connection = descriptors
        return cls(socket.socket(fileno=os.dup(connection)), memory_fds, attach_reply_from_line(line), block_bytes)

    def close(self) -> None:
        """Tells the node that this process uses the pool no more. No step may run: slots are reused at once."""
        self._unmap()
        with contextlib.suppress(OSError):
            self._sock.send(DETACHED)
        self._sock.close()
        self._close_memory()

    def _close_memory(self) -> None:
        # The place last: it says that nothing is mapped any more.
        close_all(self._memory_fds)
        close_all(self._place_fds)


def attach(
    socket_path: str,
    *,
    component_id: str,
    role: str,
    block_bytes: int,
    timeout_s: float,
    namespace: str = "",
    kv_rows: int = 0,
    kv_heads: int = 0,
    block_tokens: int = 0,
    processes: int = 1,
) -> Attachment:
    """Attaches to the node behind ``socket_path``; blocks for up to ``timeout_s`` and waits for the node if need be.

    ``kv_rows``, ``kv_heads``: rows of a block and pieces in a row, by which a node may divide blocks over GPUs.
    ``block_tokens``: tokens of a block, which the node tells those who follow its blocks.
    ``processes``: how many processes of the worker will use the pool.

    Raises, in one line, ConfigError if the node refuses, and Unavailable if it does not answer, ends meanwhile or does
    not exist: a worker that is started once more may find it again.
    """
    hello = AttachHello(
        component_id=component_id,
        role=role,
        block_bytes=block_bytes,
        namespace=namespace,
        kv_rows=kv_rows,
        kv_heads=kv_heads,
        block_tokens=block_tokens,
        takes_place=True,
        processes=processes,
    )
    with _asked(f"cannot attach to the KV node at --attach-socket {socket_path}", socket_path, hello, timeout_s) as (
        sock,
        line,
        fds,
    ):
        reply = attach_reply_from_line(line)
        if reply.error:
            raise ConfigError(f"the KV node refused {component_id}: {reply.error}")
        place = reply.epoch if reply.pool_id else 0
        attachment = Attachment(sock, fds, reply, block_bytes, place, block_tokens)
        attachment._kv_rows, attachment._kv_heads = kv_rows, kv_heads
    sock.setblocking(False)
    return attachment


def _pidfd(pid: int) -> int:
    """A descriptor of a process. Raises ProcessLookupError where it has ended, and ConfigError where the system gives
    none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise ConfigError(f"the KV node cannot learn of this worker's processes: {error.strerror}") from None


def _own_place(descriptor: int, place: int) -> int:
    """Opens a pool's file anew and locks a place of it, by which the node's next life knows that this process uses it.
    Raises ConfigError."""
    try:
        own = reopened(descriptor)
    except OSError as error:
        raise ConfigError(f"cannot open the KV pool: {error.strerror}") from None
    try:
        lock_place(own, place)
    except OSError as error:
        os.close(own)
        raise ConfigError(f"cannot lock a place of the KV pool: {error.strerror}") from None
    return own


@contextlib.contextmanager
def _asked(
    failure: str,
    socket_path: str,
    hello: AttachHello | RegionHello,
    timeout_s: float,
    given_up: threading.Event | None = None,
) -> Iterator[tuple[socket.socket, bytes, list[int]]]:
    """Sends ``hello`` and yields the connection, the node's answer and the descriptors that came with it. All of that
    takes ``timeout_s`` at most, and ends soon when ``given_up`` is set.

    The descriptors are closed in the end, as a mapping holds the memory; after an error the connection is closed too.
    Raises, in one line, Unavailable where the connection fails, here or inside the block, and ConfigError for any other
    failure.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    until_s, given_up = time.monotonic() + timeout_s, given_up or threading.Event()
    try:
        sock.settimeout(timeout_s)
        _connect(sock, socket_path, until_s, given_up)
        sock.sendall(line_to_bytes(hello))
        _await_answer(sock, until_s, given_up)
        line, fds = receive_line(sock, MAX_LINE_BYTES, MAX_SHARDS + 1)
        yield sock, line, fds
    except OSError as error:
        sock.close()
        reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise Unavailable(f"{failure}: {reason}") from None
    except BaseException as error:
        sock.close()
        if isinstance(error, PillionError) and not isinstance(error, ConfigError | Unavailable):
            raise ConfigError(error.message) from None
        raise
    finally:
        close_all(fds)


def _map_pool(fds: Sequence[int], reply: AttachReply, size_bytes: int) -> mmap.mmap | DeviceMapping | PoolShards:
    """Maps the pool behind the node's descriptors; of a divided one nothing yet. Raises ConfigError."""
    if not reply.shards:
        return _map_memory(fds[0], reply, size_bytes)
    heads = max(shard.first_head + shard.heads for shard in reply.shards)
    for shard in reply.shards:
        if shard.mapped_bytes * heads < size_bytes * shard.heads:
            raise ConfigError(
                f"the KV node shares {shard.mapped_bytes} bytes on a GPU, {size_bytes * shard.heads // heads} were"
                " promised"
            )
    return PoolShards(fds, reply.shards)


def _map_memory(fd: int, reply: AttachReply | RegionReply, size_bytes: int) -> mmap.mmap | DeviceMapping:
    """Maps the memory behind the node's descriptor, at least ``size_bytes``. Raises ConfigError."""
    if reply.memory_kind == HOST:
        return map_shared(fd, size_bytes)
    if reply.mapped_bytes < size_bytes:
        raise ConfigError(f"the KV node shares {reply.mapped_bytes} bytes, {size_bytes} were promised")
    return map_device(fd, reply.mapped_bytes, reply.device_uuid)


def _connect(sock: socket.socket, socket_path: str, give_up_s: float, given_up: threading.Event) -> None:
    """Connects. Components may start in any order, so a node that does not listen yet is waited for."""
    while True:
        try:
            return sock.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= give_up_s or given_up.wait(CONNECT_RETRY_S):
                raise


def _await_answer(sock: socket.socket, give_up_s: float, given_up: threading.Event) -> None:
    """Returns when something can be read. Raises TimeoutError, and Unavailable where the caller has given up."""
    answer = select.poll()
    answer.register(sock, select.POLLIN)
    while not answer.poll(CONNECT_RETRY_S * 1000):
        if given_up.is_set():
            raise Unavailable("this process stops")
        if time.monotonic() >= give_up_s:
            raise TimeoutError


class Region(SharedMemory):
    """A mapped region. Made by :func:`share_region`.

    Attributes:
        address, size_bytes: its place; on a GPU this is no pointer that the host could follow.
        must_fill: this process has to write every byte and then to call :meth:`filled`; others wait for that.
    """

    def __init__(
        self, sock: socket.socket, mapped: mmap.mmap | DeviceMapping, size_bytes: int, *, must_fill: bool
    ) -> None:
        super().__init__(sock, mapped)
        self.size_bytes = size_bytes
        self.must_fill = must_fill
        self.address = mapped.address if isinstance(mapped, DeviceMapping) else address_of(self.memory)

    def filled(self) -> None:
        """Tells the node that every write has ended. Raises Unavailable if the node is gone: a process that is started
        again may find its next life."""
        if self.must_fill:
            self.must_fill = False
            try:
                self._sock.sendall(line_to_bytes(RegionFilled(filled_bytes=self.size_bytes)))
            except OSError as error:
                raise Unavailable(f"the KV node is gone: {error.strerror}") from None

    def close(self) -> None:
        """Ends the use of the region. If it was not filled, another process fills it. Idempotent."""
        self._unmap()
        self._sock.close()


def share_region(
    socket_path: str, key: str, size_bytes: int, timeout_s: float, *, component_id: str = "", device_uuid: str = ""
) -> Region:
    """Maps the region ``key`` (64 hexadecimal digits) of the node behind ``socket_path``: to be filled, or to be read.

    Blocks for up to ``timeout_s`` while another process fills it. ``device_uuid``: the GPU on which a node with a pool
    on GPUs has the region; each of them has its own.

    Raises, in one line, ConfigError if the node refuses or has no memory, and Unavailable if it does not answer, ends
    meanwhile or does not exist.
    """
    hello = RegionHello(
        component_id=component_id or f"process-{os.getpid()}",
        region_key=key,
        size_bytes=size_bytes,
        device_uuid=device_uuid,
    )
    with _asked(f"no region from the KV node at {socket_path}", socket_path, hello, timeout_s) as (sock, line, fds):
        reply = region_reply_from_line(line)
        if reply.error or len(fds) != 1:
            raise ConfigError(f"the KV node shares no region: {reply.error or 'no memory came with its answer'}")
        mapped = _map_memory(fds[0], reply, size_bytes)
    sock.setblocking(True)
    return Region(sock, mapped, size_bytes, must_fill=reply.state == "fill")
