"""Attach socket: passes the pool's memory to workers, and detects their death.

    worker                                   node
      | -- connect to the Unix socket ------> |
      | -- AttachHello, one JSON line ------> |  first worker: block_bytes fixes the size of a slot
      | <-- AttachReply + descriptors ------- |  one, or one for each shard (or AttachReply with an error, then the end)
      |        ... mapped, running ...        |  the reply says whether this is host memory or a GPU's
      | -- PROCESSES + descriptors ---------> |  with a GPU's memory: the other processes of a worker of several ranks
      | ========= connection ends ==========> |  proof that the worker maps nothing any more (I4); with a GPU's memory
                                                 only its processes' exit is proof (PeerProcess), and until then the
                                                 epoch is fenced
      | <======== connection ends =========== |  the node has ended: the worker exits; or, with a pool that outlives the
                                                 node, finishes its step and connects to the restarted node

A connection that begins with RegionHello gets memory outside the pool (kvstore/gpu/region_server.py).
kvstore/client/attachment.py is the worker's side, pillion/wire/attach.py has the messages.

The socket file is 0600 in a 0700 directory: a process that may connect may read and write all KV. Only file descriptors
and lines of JSON are exchanged, so nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable

from pillion.errors import Overloaded, PillionError
from pillion.net.private_socket import listen_private
from pillion.tasks import OwnTasks, end_tasks
from pillion.wire.attach import (
    DETACHED,
    MAX_LINE_BYTES,
    MAX_PROCESSES,
    AttachHello,
    AttachReply,
    RegionHello,
    hello_from_line,
)
from pillion.wire.json_lines import line_to_bytes

log = logging.getLogger("pillion.kvnode")

HELLO_TIMEOUT_S = 5.0
MAX_ATTACHMENTS = 256
LISTEN_BACKLOG = 64
# Values of PeerProcess.descriptor: a process whose exit cannot be observed; this process, or one that has exited.
UNSEEN_PROCESS, _GONE = -1, -2


class AttachServer:
    """Listening attach socket, and all connections to it.

    Args:
        memory_fds: returns the pool's descriptor, or one per shard; called after a worker was admitted.
        admit: returns the reply to a hello. Raises PillionError to refuse.
        ended: called once per admitted epoch, when its worker's death is proven.
        fence: called with an epoch whose worker's connection has ended while its exit is not proven.
        serve_region: serves a connection for a region until its end. Raises PillionError to refuse.
        exit_is_proof: returns whether only the worker's exit is proof of its death, if its connection ended without
            DETACHED.
        answering: called before an answer is sent, with :attr:`PeerProcess.descriptor` of the worker; returns
            additional descriptors for the answer.
    """

    def __init__(
        self,
        path: str,
        memory_fds: Callable[[], list[int]],
        admit: Callable[[AttachHello], Awaitable[AttachReply]],
        ended: Callable[[int], None],
        fence: Callable[[int], None],
        serve_region: Callable[[socket.socket, RegionHello], Awaitable[None]],
        exit_is_proof: Callable[[], bool] = lambda: False,
        answering: Callable[[AttachHello, AttachReply, int], Awaitable[list[int]]] | None = None,
    ) -> None:
        self._path = path
        self._memory_fds = memory_fds
        self._admit = admit
        self._ended = ended
        self._fence = fence
        self._serve_region = serve_region
        self._exit_is_proof = exit_is_proof
        self._answering = answering
        self._server: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections = OwnTasks()

    def start(self) -> None:
        """Start listening. Raises ConfigError if the path cannot be used."""
        self._server = listen_private(self._path, LISTEN_BACKLOG, "listen for workers")
        self._server.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._server), name="attach-accept")

    async def stop(self) -> None:
        """Close all connections, by which workers notice the node's end."""
        await end_tasks(self._accepting)
        # Stop listening first, so that a worker that reconnects at once does not reach this node again.
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        await end_tasks(*self._connections)

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError as error:
                # E.g. out of descriptors.
                log.warning("cannot accept an attachment: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            self._connections.begin(self._serve(sock), "attach")

    async def _serve(self, sock: socket.socket) -> None:
        epoch, peer = 0, PeerProcess(sock)
        try:
            hello = await self._read_hello(sock)
            if isinstance(hello, RegionHello):
                return await self._serve_region(sock, hello)
            epoch = await self._greet(sock, hello, peer.descriptor) if hello is not None else 0
            if epoch:
                log.info("epoch %016x attached", epoch)
                detached = await until_end(sock, peer.others if self._exit_is_proof() else None)
                if self._exit_is_proof():
                    if not detached:
                        self._fence(epoch)
                        if peer.descriptor == UNSEEN_PROCESS:
                            log.error(
                                "the worker of epoch %016x has closed its socket, and this node cannot see its process,"
                                " which is in another PID namespace. Its slots stay in quarantine until this node"
                                " restarts. Let node and workers share a PID namespace (Kubernetes:"
                                " shareProcessNamespace), or use Linux 6.5 or newer",
                                epoch,
                            )
                        await peer.wait_exit()
                    for pidfd in peer.others:
                        await _readable(pidfd)
        except (OSError, PillionError) as error:
            log.debug("attach connection failed: %s", error)
        finally:
            # Before closing: a peer that sees the connection closed may rely on free slots.
            if epoch:
                self._ended(epoch)
            peer.close()
            sock.close()

    async def _read_hello(self, sock: socket.socket) -> AttachHello | RegionHello | None:
        """Read the first line of a connection; return its message, or None if the connection was refused."""
        try:
            if len(self._connections) > MAX_ATTACHMENTS:
                raise Overloaded(f"{MAX_ATTACHMENTS} workers are attached already")
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = hello_from_line(await read_line(sock))
        except (PillionError, TimeoutError) as error:
            _refuse(sock, error.message if isinstance(error, PillionError) else "no hello in time")
            return None
        return hello

    async def _greet(self, sock: socket.socket, hello: AttachHello, process: int) -> int:
        """Answer a worker; return its epoch, or 0 if it was refused. An epoch whose answer cannot be sent ends at
        once."""
        try:
            reply = await self._admit(hello)
        except PillionError as error:
            _refuse(sock, error.message)
            return 0
        try:
            more = await self._answering(hello, reply, process) if self._answering is not None else []
            socket.send_fds(sock, [line_to_bytes(reply)], [*self._memory_fds(), *more])
        except (OSError, PillionError, asyncio.CancelledError):
            self._ended(reply.epoch)
            raise
        return reply.epoch


class PeerProcess:
    """Process at the other end of a Unix socket. ``others`` are pidfds of further processes that it named. Its creator
    must close it.

    A dying process closes its files after its memory is unmapped and its threads have ended. So for host memory, the
    end of the connection proves that nothing is mapped any more. A GPU is another open file: after the socket is
    closed, a launched kernel may still write to the pool. The process's exit is reported only after all its files are
    closed.

    Attributes:
        descriptor: pidfd of the process, closed with this object; UNSEEN_PROCESS if its exit cannot be observed,
            another negative number if it is this process or has exited.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.descriptor = _pidfd_of(sock)
        self.others: list[int] = []

    async def wait_exit(self) -> None:
        """Wait for the process's exit, forever if that cannot be observed. Returns at once if the peer is this
        process."""
        if self.descriptor != _GONE:
            await _readable(self.descriptor)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for pidfd in (self.descriptor, *self.others):
            if pidfd >= 0:
                os.close(pidfd)
        self.others.clear()
        self.descriptor = UNSEEN_PROCESS


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor is readable; forever for a negative number."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    if descriptor >= 0:
        loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        if descriptor >= 0:
            loop.remove_reader(descriptor)


def _pidfd_of(sock: socket.socket) -> int:
    """Return a pidfd of the process at the other end, or UNSEEN_PROCESS or _GONE."""
    if not hasattr(os, "pidfd_open"):
        return UNSEEN_PROCESS
    # SO_PEERCRED gives 0 for a process outside of this PID namespace.
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid == os.getpid():
        return _GONE
    # SO_PEERPIDFD (Linux 6.5), missing in Python's socket module: a pidfd of the peer in any PID namespace.
    with contextlib.suppress(OSError):
        (pidfd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, 77, struct.calcsize("i")))
        return int(pidfd)
    try:
        return os.pidfd_open(pid) if pid > 0 else UNSEEN_PROCESS
    except ProcessLookupError:
        return _GONE
    except OSError:
        return UNSEEN_PROCESS


def _refuse(sock: socket.socket, reason: str) -> None:
    log.warning("refused a worker: %s", reason)
    sock.send(line_to_bytes(AttachReply(error=reason)))


async def read_line(sock: socket.socket) -> bytes:
    """Return the bytes up to a newline, the connection's end, or MAX_LINE_BYTES."""
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
        chunk = await loop.sock_recv(sock, MAX_LINE_BYTES - len(line))
        if not chunk:
            break
        line += chunk
    return line


async def until_end(sock: socket.socket, processes: list[int] | None = None) -> bool:
    """Wait for the connection's end; return whether the worker's last message was DETACHED.

    The descriptors of PROCESSES messages are appended to ``processes``, for the caller to close; other messages are
    ignored. With more than MAX_PROCESSES, or if this process is out of descriptors, return False before the end; in the
    latter case UNSEEN_PROCESS is appended to ``processes``.
    """
    last, pidfds = b"", [] if processes is None else processes
    limit = 0 if processes is None else MAX_PROCESSES
    with contextlib.suppress(ConnectionError):
        while len(pidfds) <= limit and UNSEEN_PROCESS not in pidfds:
            try:
                chunk, descriptors, flags, _ = socket.recv_fds(sock, MAX_LINE_BYTES, limit)
            except BlockingIOError:
                await _readable(sock.fileno())
                continue
            if not chunk:
                break
            pidfds += descriptors
            if limit and flags & socket.MSG_CTRUNC:
                log.error(
                    "the node has too many open files to watch all processes of a worker: its slots stay in quarantine"
                    " until the node restarts"
                )
                pidfds.append(UNSEEN_PROCESS)
            last = (last + chunk)[-len(DETACHED) :]
    return last == DETACHED and len(pidfds) <= limit and UNSEEN_PROCESS not in pidfds
