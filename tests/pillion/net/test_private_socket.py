"""Lines over private sockets: limited in time and length, and nothing that came with them is left open."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from pillion.net.private_socket import peer_gone, receive_line


@contextlib.contextmanager
def dribbling(sock: socket.socket):
    """Send a byte, never a line's end, each time that the reader has taken the last one."""
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.001):
            sock.send(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_an_endless_line_times_out() -> None:
    near, far = socket.socketpair()
    with near, far, dribbling(far):
        near.settimeout(0.05)
        with pytest.raises(TimeoutError):
            receive_line(near, 2**20, 1)
        assert near.gettimeout() == 0.05


def test_a_line_keeps_its_descriptors_however_it_is_split() -> None:
    near, far = socket.socketpair()
    with near, far:
        for piece in (b"on", b"e\n"):
            socket.send_fds(far, [piece], [far.fileno()])
        line, descriptors = receive_line(near, 10, 2)
        assert line == b"one\n"
        assert [os.fstat(one).st_ino for one in descriptors] == [os.fstat(far.fileno()).st_ino] * 2
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("sent", [b"short", b"much too long for a line"])
def test_malformed_lines_leak_no_descriptor(sent: bytes) -> None:
    near, far = socket.socketpair()
    reader, writer = os.pipe()
    with near, open(reader, "rb") as came:
        with far:
            socket.send_fds(far, [sent], [writer])
        os.close(writer)
        with pytest.raises(ConnectionError):
            receive_line(near, 10, 1)
        assert came.read() == b"", "the pipe has a writer still"


def test_a_closed_peer_is_detected() -> None:
    near, far = socket.socketpair()
    with near:
        near.setblocking(False)
        with far:
            assert not peer_gone(near)
        assert peer_gone(near)
