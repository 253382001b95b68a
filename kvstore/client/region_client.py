"""A process's side of shared regions: memory at its KV node that everybody who names the same key maps."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time

from pillion.errors import ConfigError, PillionError
from pillion.kvstore.memory.cuda_segment import DeviceMapping
from pillion.kvstore.memory.memory import address_of
from pillion.kvstore.node.attach import connect, map_memory, receive_line
from pillion.wire.kvnode import RegionFilled, RegionHello, line_to_bytes, region_reply_from_line


class Region:
    """Mapped memory and the connection that stands for its use. Made by :func:`share_region`.

    Attributes:
        address, size_bytes: where it is; on a GPU no pointer that the host could follow.
        device_memory: the mapping where it is on a GPU, else None.
        memory: its bytes where it is on the host, else empty.
        must_fill: this process is to write every byte, and then to say :meth:`filled`; others wait for that.
    """

    def __init__(
        self, sock: socket.socket, mapped: mmap.mmap | DeviceMapping, size_bytes: int, *, must_fill: bool
    ) -> None:
        self._sock = sock
        self._mapped = mapped
        self.size_bytes = size_bytes
        self.must_fill = must_fill
        self.device_memory = mapped if isinstance(mapped, DeviceMapping) else None
        self.memory = memoryview(b"") if isinstance(mapped, DeviceMapping) else memoryview(mapped)
        self.address = mapped.address if isinstance(mapped, DeviceMapping) else address_of(self.memory)

    def filled(self) -> None:
        """Every byte is written, and on a GPU all that wrote is over. Raises ConfigError where the node is gone."""
        if self.must_fill:
            self.must_fill = False
            try:
                self._sock.sendall(line_to_bytes(RegionFilled(filled_bytes=self.size_bytes)))
            except OSError as error:
                raise ConfigError(f"the KV node is gone: {error.strerror}") from None

    def close(self) -> None:
        """This process uses the region no more. One that was not filled is another one's to fill. Idempotent."""
        with contextlib.suppress(BufferError):
            # Tensors over host memory keep it mapped until they go.
            self.memory.release()
            self._mapped.close()
        self._sock.close()


def share_region(socket_path: str, key: str, size_bytes: int, timeout_s: float, *, component_id: str = "") -> Region:
    """The region ``key`` (64 hexadecimal digits) of the node behind ``socket_path``; blocks for up to ``timeout_s``
    while another process fills it. To be filled by this process, or ready to be read.

    Raises ConfigError, in one line, if the node refuses, has no memory, does not answer or does not exist.
    """
    hello = RegionHello(component_id=component_id or f"process-{os.getpid()}", region_key=key, size_bytes=size_bytes)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        try:
            sock.settimeout(timeout_s)
            connect(sock, socket_path, time.monotonic() + timeout_s)
            sock.sendall(line_to_bytes(hello))
            line, fds = receive_line(sock)
            reply = region_reply_from_line(line)
            if reply.error or len(fds) != 1:
                raise ConfigError(f"the KV node shares no region: {reply.error or 'no memory came with its answer'}")
            mapped = map_memory(fds[0], reply, size_bytes)
        except OSError as error:
            words = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise ConfigError(f"no region from the KV node at {socket_path}: {words}") from None
        except PillionError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(error.message) from None
        finally:
            for fd in fds:
                os.close(fd)
        undo.pop_all()
    sock.setblocking(True)
    return Region(sock, mapped, size_bytes, must_fill=reply.state == "fill")
