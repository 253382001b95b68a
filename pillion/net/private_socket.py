"""Unix sockets that only one user's processes can reach (0600 in a folder of 0700), and lines with attached
descriptors."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path

from pillion.errors import ConfigError

PROBE_TIMEOUT_S = 5.0


def listen_private(path: str, backlog: int, what: str) -> socket.socket:
    """Return a listening socket at ``path``. ``what`` describes its purpose in errors.

    Replaces the socket file of a dead process. Raises ConfigError for an unusable path, or one at which another process
    listens.
    """
    folder = Path(path).parent
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear_stale(path)
        sock.bind(path)
        # No peer can connect before listen(), so permissions are never wider.
        os.chmod(path, 0o600)
        sock.listen(backlog)
    except (ConfigError, OSError) as error:
        sock.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot {what} on {path}: {error.strerror or error}") from None
    return sock


def receive_line(sock: socket.socket, max_line_bytes: int, max_descriptors: int) -> tuple[bytes, list[int]]:
    """Return one line, and the attached descriptors, which the caller closes. The socket's timeout applies to the whole
    line. Raises TimeoutError, ConnectionError if the connection ends first or the line is too long, and OSError."""
    line, descriptors, timeout_s = b"", [], sock.gettimeout()
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while not line.endswith(b"\n"):
            if until_s is not None:
                sock.settimeout(_left_s(until_s))
            chunk, received, _, _ = socket.recv_fds(sock, max_line_bytes - len(line), max_descriptors)
            descriptors += received
            if not chunk or len(line) + len(chunk) >= max_line_bytes:
                raise ConnectionError("the connection ended without an answer")
            line += chunk
    except BaseException:
        close_all(descriptors)
        raise
    finally:
        sock.settimeout(timeout_s)
    return line, descriptors


def _left_s(until_s: float) -> float:
    """Return the seconds left until a monotonic time. Raises TimeoutError if it has passed."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no complete line came in time")
    return left_s


def peer_gone(sock: socket.socket) -> bool:
    """Return whether the peer has ended a non-blocking connection, on which it sends nothing more."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def close_all(descriptors: list[int]) -> None:
    """Close descriptors and empty the list."""
    while descriptors:
        os.close(descriptors.pop())


def _clear_stale(path: str) -> None:
    """Remove the socket of a dead process. Raises ConfigError if a process still listens there."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"another process serves {path}")
