"""Attaching: how a worker gets the pool's memory, and how the node learns of its death.

    worker                                   node
      | -- connect to the Unix socket ------> |
      | -- AttachHello, one JSON line ------> |  first worker: block_bytes fixes the size of a slot
      | <-- AttachReply + descriptor -------- |  (or AttachReply with an error, then the end)
      |        ... mapped, at work ...        |  of host memory, or of a GPU's: the reply says which
      | ============== the end =============> |  proof that the worker maps nothing any more (I4); for a GPU's memory
                                                 the exit of its process is (pillion.kvstore.node.peer_process)
      | <============= the end ============== |  the node is gone, and so is every block: the worker exits

Whoever says RegionHello instead gets a shared region (:mod:`pillion.kvstore.node.region_server`).

The socket file is 0600 in a 0700 directory: who may connect may read and write all KV. Nothing but file descriptors
and two lines of JSON travels here, so there is nothing to unpickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pillion.errors import ConfigError, InvalidRequest, Overloaded, PillionError
from pillion.kvstore.memory.cuda_segment import DeviceMapping, map_device
from pillion.kvstore.memory.memory import HOST
from pillion.kvstore.memory.segment import map_shared
from pillion.kvstore.node.peer_process import FAREWELL, PeerProcess
from pillion.wire.kvnode import (
    AttachHello,
    AttachReply,
    RegionHello,
    RegionReply,
    attach_reply_from_line,
    hello_from_line,
    line_to_bytes,
)

log = logging.getLogger("pillion.kvnode")

MAX_LINE_BYTES = 4096
HELLO_TIMEOUT_S = 5.0
MAX_ATTACHMENTS = 256
LISTEN_BACKLOG = 64
CONNECT_RETRY_S = 0.05


class Attachment:
    """A worker's side: the mapped pool and the connection that stands for its life.

    Attributes:
        epoch: the worker's name at the node, void once either side ends.
        node_id, node_address: the node, and where its gRPC service is.
        num_slots, block_bytes: shape of the pool; slot s is bytes s * block_bytes .. (s + 1) * block_bytes.
        memory: the pool, writable, num_slots * block_bytes long; empty where the pool is on a GPU.
        device_memory: the pool where it is on a GPU: at ``device_memory.address`` of the device that this process
            counts as ``device_memory.device_index`` (torch's cuda:N); None where it is on the host.
    """

    def __init__(
        self, sock: socket.socket, mapped: mmap.mmap | DeviceMapping, reply: AttachReply, block_bytes: int
    ) -> None:
        self._sock = sock
        self._mapped = mapped
        self.epoch = reply.epoch
        self.node_id = reply.node_id
        self.node_address = reply.node_address
        self.num_slots = reply.num_slots
        self.block_bytes = block_bytes
        self.device_memory = mapped if isinstance(mapped, DeviceMapping) else None
        self.memory = memoryview(b"") if isinstance(mapped, DeviceMapping) else memoryview(mapped)

    def fileno(self) -> int:
        """Becomes readable when the node is gone; for ``loop.add_reader``."""
        return self._sock.fileno()

    def close(self) -> None:
        """Says that this process uses the pool no more. Call it only when no step can run: slots are reused at once."""
        with contextlib.suppress(BufferError):
            # Tensors over the memory keep it mapped until they go; the promise not to use it is the caller's.
            self.memory.release()
            self._mapped.close()
        with contextlib.suppress(OSError):
            self._sock.send(FAREWELL)
        self._sock.close()


def attach(
    socket_path: str, *, component_id: str, role: str, block_bytes: int, timeout_s: float, namespace: str = ""
) -> Attachment:
    """Attach to the node behind ``socket_path``; blocks for up to ``timeout_s``, waiting for the node if need be.

    Raises ConfigError, in one line, if the node refuses, does not answer or does not exist.
    """
    hello = AttachHello(component_id=component_id, role=role, block_bytes=block_bytes, namespace=namespace)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    fds: list[int] = []
    try:
        connect(sock, socket_path, time.monotonic() + timeout_s)
        sock.sendall(line_to_bytes(hello))
        line, fds = receive_line(sock)
        reply = attach_reply_from_line(line)
        if reply.error:
            raise ConfigError(f"the KV node refused {component_id}: {reply.error}")
        if len(fds) != 1:
            raise ConfigError("the KV node answered without its memory")
        mapped = map_memory(fds[0], reply, reply.num_slots * block_bytes)
    except OSError as error:
        sock.close()
        words = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConfigError(f"cannot attach to the KV node at {socket_path}: {words}") from None
    except PillionError as error:
        sock.close()
        raise error if isinstance(error, ConfigError) else ConfigError(error.message) from None
    finally:
        # The mapping holds the memory; the descriptor has done its work.
        for fd in fds:
            os.close(fd)
    sock.setblocking(False)
    return Attachment(sock, mapped, reply, block_bytes)


def map_memory(fd: int, reply: AttachReply | RegionReply, size_bytes: int) -> mmap.mmap | DeviceMapping:
    """What the node's descriptor stands for, at least ``size_bytes``. Raises ConfigError."""
    if reply.memory_kind == HOST:
        return map_shared(fd, size_bytes)
    if reply.mapped_bytes < size_bytes:
        raise ConfigError(f"the KV node shares {reply.mapped_bytes} bytes, {size_bytes} were promised")
    return map_device(fd, reply.mapped_bytes, reply.device_uuid)


def connect(sock: socket.socket, socket_path: str, give_up_s: float) -> None:
    """Parts may start in any order, so a node that does not listen yet is waited for."""
    while True:
        try:
            return sock.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() >= give_up_s:
                raise
        time.sleep(CONNECT_RETRY_S)


def receive_line(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One line and the descriptors that came with it, the caller's to close. Raises ConfigError, OSError."""
    line, fds = b"", []
    while not line.endswith(b"\n"):
        part, received, _, _ = socket.recv_fds(sock, MAX_LINE_BYTES - len(line), 1)
        fds += received
        if not part or len(line) + len(part) >= MAX_LINE_BYTES:
            for fd in fds:
                os.close(fd)
            raise ConfigError("the KV node ended the connection without an answer")
        line += part
    return line, fds


class AttachServer:
    """The node's side.

    Args:
        memory_fd: the pool's descriptor, asked for when somebody was admitted.
        admit: turns a hello into a reply. Raises PillionErrors to refuse.
        ended: hears of the end of an epoch's connection, exactly once for every one admitted.
        serve_region: has a connection that wants a region, until its end. Raises PillionErrors to refuse.
        exit_is_proof: whether a worker that says nothing is waited for until its process is gone.
    """

    def __init__(
        self,
        path: str,
        memory_fd: Callable[[], int],
        admit: Callable[[AttachHello], Awaitable[AttachReply]],
        ended: Callable[[int], None],
        serve_region: Callable[[socket.socket, RegionHello], Awaitable[None]] | None = None,
        exit_is_proof: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = path
        self._memory_fd = memory_fd
        self._admit = admit
        self._ended = ended
        self._serve_region = serve_region
        self._exit_is_proof = exit_is_proof
        self._server: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Binds and accepts. Raises ConfigError if the path cannot be used."""
        self._server = _listen(self._path)
        self._accepting = asyncio.create_task(self._accept(self._server), name="attach-accept")

    async def stop(self) -> None:
        """Ends all connections, which tells workers that the node is gone."""
        tasks = [task for task in (self._accepting, *self._connections) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError as error:
                # Out of descriptors, say: the socket stays, the next attempt may work.
                log.warning("cannot accept an attachment: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            task = asyncio.create_task(self._serve(sock), name="attach")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        epoch, peer = 0, PeerProcess(sock)
        try:
            hello = await self._hear(sock)
            if isinstance(hello, RegionHello):
                assert self._serve_region is not None
                return await self._serve_region(sock, hello)
            epoch = await self._greet(sock, hello) if hello is not None else 0
            if epoch:
                log.info("epoch %016x attached", epoch)
                if not await until_end(sock) and self._exit_is_proof():
                    await peer.gone()
        except (OSError, PillionError) as error:
            log.debug("attach connection failed: %s", error)
        finally:
            # The books first: who sees the connection closed may rely on the slots being back.
            if epoch:
                self._ended(epoch)
            peer.close()
            sock.close()

    async def _hear(self, sock: socket.socket) -> AttachHello | RegionHello | None:
        """The hello; None where there was none that can be answered well."""
        try:
            if len(self._connections) > MAX_ATTACHMENTS:
                raise Overloaded(f"{MAX_ATTACHMENTS} workers are attached already")
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = hello_from_line(await read_line(sock))
            if isinstance(hello, RegionHello) and self._serve_region is None:
                raise InvalidRequest("this KV node shares no regions")
        except (PillionError, TimeoutError) as error:
            _refuse(sock, error.message if isinstance(error, PillionError) else "no hello in time")
            return None
        return hello

    async def _greet(self, sock: socket.socket, hello: AttachHello) -> int:
        """Answers, and returns the epoch, 0 for a refusal. One whose answer does not arrive is ended at once."""
        try:
            reply = await self._admit(hello)
        except PillionError as error:
            _refuse(sock, error.message)
            return 0
        try:
            # One small line into an empty socket buffer: it goes at once or the peer is gone.
            socket.send_fds(sock, [line_to_bytes(reply)], [self._memory_fd()])
        except (OSError, PillionError):
            self._ended(reply.epoch)
            raise
        return reply.epoch


def _refuse(sock: socket.socket, words: str) -> None:
    log.warning("refused a worker: %s", words)
    sock.send(line_to_bytes(AttachReply(error=words)))


async def read_line(sock: socket.socket) -> bytes:
    """Up to its end, the connection's end, or MAX_LINE_BYTES."""
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
        part = await loop.sock_recv(sock, MAX_LINE_BYTES - len(line))
        if not part:
            break
        line += part
    return line


async def until_end(sock: socket.socket) -> bool:
    """Whether the worker said that it has detached; nothing else is heard: the connection only stands for its life."""
    loop, last = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while part := await loop.sock_recv(sock, MAX_LINE_BYTES):
            last = (last + part)[-len(FAREWELL) :]
    return last == FAREWELL


def _listen(path: str) -> socket.socket:
    folder = Path(path).parent
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear_stale(path)
        sock.bind(path)
        # Nobody can connect before listen(), so there is no moment with wider permissions.
        os.chmod(path, 0o600)
        sock.listen(LISTEN_BACKLOG)
    except (ConfigError, OSError) as error:
        sock.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot listen for workers on {path}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def _clear_stale(path: str) -> None:
    """Removes the socket of a node that died without cleaning up; refuses to take a living one's place."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"{path} is there and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(HELLO_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"another KV node serves {path}")
