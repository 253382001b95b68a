"""A worker's side of the attach socket: maps the pool of a KV node.

kvstore/node/attach_server.py is the node's side, and documents the protocol.

    attach --> mapped, running --node has ended--> running steps end --renew, same pool--> running
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
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from pillion._version import STATES_PROTOCOL
from pillion.errors import ConfigError, PillionError, Unavailable
from pillion.kvstore.memory.head_shares import MAX_SHARDS
from pillion.kvstore.memory.memory import HOST
from pillion.kvstore.memory.segment import lock_place, map_shared, reopened
from pillion.net.private_socket import close_all, peer_gone, receive_line
from pillion.wire.attach import (
    DETACHED,
    MAX_LINE_BYTES,
    MAX_PROCESSES,
    PROCESSES,
    AttachHello,
    AttachReply,
    RegionHello,
    attach_reply_from_line,
)
from pillion.wire.json_lines import line_to_bytes

CONNECT_RETRY_S = 0.05
RENEW_PAUSE_S = 0.1


class MappedDevice(Protocol):
    """Device memory mapped by this process.

    Attributes:
        divided: True if each block is divided over several GPUs.
    """

    divided: bool

    def close(self) -> None:
        """Unmap the memory, which must be unused. Idempotent."""


# Maps the device memory of a node's descriptors; the last argument is its size in bytes. Raises ConfigError.
MapDevice = Callable[[Sequence[int], AttachReply, int], MappedDevice]


class SharedMemory:
    """A node's memory mapped by this process, and the connection that must stay open while it is used.

    Attributes:
        mapped: the mapping.
        memory: the bytes, writable; empty for device memory.
    """

    def __init__(self, sock: socket.socket, mapped: mmap.mmap | MappedDevice) -> None:
        self._sock = sock
        self.mapped = mapped
        self.memory = memoryview(mapped) if isinstance(mapped, mmap.mmap) else memoryview(b"")

    def unmap(self) -> None:
        with contextlib.suppress(BufferError):
            # Tensors that use the memory keep it mapped until they are freed; the caller must not use them.
            self.memory.release()
            self.mapped.close()


class Attachment(SharedMemory):
    """A worker's mapped pool, and its connection to the KV node, by whose end the node detects the worker's death.
    Created by :func:`attach`.

    Attributes:
        epoch: identifies the worker at the node; void once the worker or the node has ended.
        node_id, node_address: the node, and the address of its gRPC service.
        pool_id: identifies a pool that outlives its node; empty otherwise.
        num_slots, block_bytes: shape of the pool; slot s is at bytes s * block_bytes .. (s + 1) * block_bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        memory_fds: Sequence[int],
        reply: AttachReply,
        block_bytes: int,
        map_device: MapDevice | None = None,
        *,
        hello: AttachHello | None = None,
        has_states: bool = False,
    ) -> None:
        """Map the memory of ``memory_fds``, and keep duplicates of the descriptors.

        ``map_device`` maps GPU memory, None for a CPU worker. ``hello`` is the request that ``reply`` answers, None in
        processes that did not send it. If the pool outlives its node, the process that sent it locks its place in a
        file by which a restarted node finds users of the pool: the pool's own file for host memory, else an additional
        last descriptor. Raises ConfigError.
        """
        place = reply.epoch if hello is not None and reply.pool_id else 0
        has_lock_fd = bool(place) and reply.memory_kind != HOST
        if len(memory_fds) != max(1, len(reply.shards)) + has_lock_fd:
            raise ConfigError("the KV node answered without its memory")
        locked = [_lock_own_place(memory_fds[-1], place)] if place else []
        self._place_fds = locked if has_lock_fd else []
        self._memory_fds = (
            locked if place and not has_lock_fd else [os.dup(fd) for fd in memory_fds[: len(memory_fds) - has_lock_fd]]
        )
        try:
            size_bytes = reply.num_slots * block_bytes
            super().__init__(sock, _map_pool(self._memory_fds, reply, size_bytes, map_device))
        except BaseException:
            self._close_memory()
            raise
        self._reply, self._hello, self._has_states, self._place = reply, hello, has_states, place
        self.epoch = reply.epoch
        self.node_id = reply.node_id
        self.node_address = reply.node_address
        self.num_slots = reply.num_slots
        self.block_bytes = block_bytes
        self.pool_id = reply.pool_id

    @property
    def node_gone(self) -> bool:
        """True once the node has closed the connection."""
        return peer_gone(self._sock)

    def renew(self, socket_path: str, timeout_s: float, given_up: threading.Event) -> None:
        """Attach the mapped pool to the restarted node; block for up to ``timeout_s``, or until another thread sets
        ``given_up``. The worker must not use the pool during the call. It replaces ``epoch``, ``node_address`` and the
        connection.

        Raises ConfigError if the node refuses or has another pool, and Unavailable if it does not answer or
        ``given_up`` was set.
        """
        assert self._hello is not None, "only the process that attached may renew"
        hello = msgspec.structs.replace(self._hello, pool_id=self.pool_id, place=self._place)
        failure = f"cannot attach again to the KV node at --attach-socket {socket_path}"
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(0.001, until_s - time.monotonic())
                with asked(failure, socket_path, hello, left_s, given_up) as (sock, line, _):
                    reply = _admitted(line, hello, self._has_states)
                break
            except Unavailable:
                if time.monotonic() + RENEW_PAUSE_S >= until_s or given_up.wait(RENEW_PAUSE_S):
                    raise
        sock.setblocking(False)
        self._sock.close()
        self._sock, self._reply = sock, reply
        self.epoch, self.node_address = reply.epoch, reply.node_address

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the node ends, for ``loop.add_reader``."""
        return self._sock.fileno()

    @property
    def pool(self) -> memoryview | MappedDevice:
        """The pool's memory in the form that backends expect."""
        return self.memory if isinstance(self.mapped, mmap.mmap) else self.mapped

    def handed_over(self) -> tuple[bytes, list[int]]:
        """Return the arguments of :meth:`joined` in another process of this worker: bytes, and descriptors to send,
        which this attachment still owns."""
        return line_to_bytes(self._reply), [*self._memory_fds, self._sock.fileno()]

    def name_processes(self, pids: Sequence[int]) -> None:
        """Register the worker's other processes with the node before they map GPU memory: the worker's slots are not
        reused before all of them have exited (I4). Raises ConfigError if that is impossible, Unavailable if the node
        has ended."""
        if len(pids) > MAX_PROCESSES:
            raise ConfigError(f"a worker on a GPU may have {MAX_PROCESSES} other processes, not {len(pids)}")
        pidfds: list[int] = []
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(_pidfd(pid))
            socket.send_fds(self._sock, [PROCESSES], pidfds)
        except OSError as error:
            raise Unavailable(f"the KV node is gone: {error.strerror}") from None
        finally:
            for pidfd in pidfds:
                os.close(pidfd)

    @classmethod
    def joined(
        cls, line: bytes, descriptors: Sequence[int], block_bytes: int, map_device: MapDevice | None = None
    ) -> Attachment:
        """Create the attachment in another process of the worker, from what :meth:`handed_over` returned; the caller
        still owns the descriptors. For the node, the worker ends once all its processes have closed the connection
        (I4). Raises ConfigError if the memory cannot be mapped."""
        *memory_fds, connection = descriptors
        sock, reply = socket.socket(fileno=os.dup(connection)), attach_reply_from_line(line)
        return cls(sock, memory_fds, reply, block_bytes, map_device)

    def close(self) -> None:
        """Unmap the memory and detach from the node. No step may run, because the node reuses the slots at once."""
        self.unmap()
        with contextlib.suppress(OSError):
            self._sock.send(DETACHED)
        self._sock.close()
        self._close_memory()

    def _close_memory(self) -> None:
        # The lock is released last: it shows that this process may use the pool.
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
    has_states: bool = False,
    map_device: MapDevice | None = None,
) -> Attachment:
    """Attach to the node that listens at ``socket_path``; block for up to ``timeout_s``, also for a node that does not
    listen yet.

    Args:
        kv_rows, kv_heads: rows of a block and KV heads of a row, by which a node may divide blocks over GPUs.
        block_tokens: tokens per block, for followers of the node's blocks.
        processes: number of processes of the worker that use the pool.
        has_states: True for hybrid models.
        map_device: maps a pool in GPU memory; None for a CPU worker.

    Raises ConfigError if the node refuses, and Unavailable if it is absent, does not answer or ends meanwhile, so that
    a restarted worker may succeed; both with a single-line message.
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
    with asked(f"cannot attach to the KV node at --attach-socket {socket_path}", socket_path, hello, timeout_s) as (
        sock,
        line,
        fds,
    ):
        reply = _admitted(line, hello, has_states)
        attachment = Attachment(sock, fds, reply, block_bytes, map_device, hello=hello, has_states=has_states)
    sock.setblocking(False)
    return attachment


def _admitted(line: bytes, hello: AttachHello, has_states: bool) -> AttachReply:
    """Decode the node's answer to ``hello``. Raises ConfigError if the node refuses the worker, if it has another pool
    than the mapped one, or if the model has states and the node's version would treat their pages as blocks."""
    reply = attach_reply_from_line(line)
    if reply.error or (hello.pool_id and reply.pool_id != hello.pool_id):
        reason = reply.error or "its pool is another one"
        raise ConfigError(f"the KV node refused {hello.component_id}: {reason}")
    if has_states and reply.protocol < STATES_PROTOCOL:
        raise ConfigError(
            f"{reply.node_id} is Pillion {reply.version} and speaks protocol {reply.protocol}, in which nodes keep no"
            f" states of hybrid models ({STATES_PROTOCOL} does): upgrade KV nodes before the workers of such a model"
        )
    return reply


def _pidfd(pid: int) -> int:
    """Return a pidfd. Raises ProcessLookupError if the process has ended, ConfigError if pidfds are not supported."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise ConfigError(f"this worker's processes cannot be registered with the KV node: {error.strerror}") from None


def _lock_own_place(descriptor: int, place: int) -> int:
    """Reopen a pool's file and lock byte ``place`` of it, by which a restarted node detects that this process uses the
    pool; return the descriptor. Raises ConfigError."""
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
def asked(
    failure: str,
    socket_path: str,
    hello: AttachHello | RegionHello,
    timeout_s: float,
    given_up: threading.Event | None = None,
) -> Iterator[tuple[socket.socket, bytes, list[int]]]:
    """Send ``hello``, and yield the connection, the node's answer and its descriptors. Waits up to ``timeout_s``, or
    until ``given_up`` is set.

    The descriptors are closed at the end of the block, and after an error the connection too. Raises Unavailable, with
    a single-line message that begins with ``failure``, if the connection fails, also inside the block; other
    PillionErrors become ConfigErrors.
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


def _map_pool(
    fds: Sequence[int], reply: AttachReply, size_bytes: int, map_device: MapDevice | None
) -> mmap.mmap | MappedDevice:
    if reply.memory_kind == HOST:
        return map_shared(fds[0], size_bytes)
    if map_device is None:
        raise ConfigError("this worker computes on the CPU, but the pool of its KV node is in GPU memory")
    return map_device(fds, reply, size_bytes)


def _connect(sock: socket.socket, socket_path: str, give_up_s: float, given_up: threading.Event) -> None:
    """Connect to the node. Wait for a node that does not listen yet, since components may start in any order."""
    while True:
        try:
            return sock.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= give_up_s or given_up.wait(CONNECT_RETRY_S):
                raise


def _await_answer(sock: socket.socket, give_up_s: float, given_up: threading.Event) -> None:
    """Wait until the socket is readable. Raises TimeoutError, and Unavailable if ``given_up`` is set."""
    answer = select.poll()
    answer.register(sock, select.POLLIN)
    while not answer.poll(CONNECT_RETRY_S * 1000):
        if given_up.is_set():
            raise Unavailable("this process stops")
        if time.monotonic() >= give_up_s:
            raise TimeoutError
