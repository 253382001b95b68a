"""Attaching with real processes: shared memory, refusals, and death as the only proof that slots are reusable (I4)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from pillion._version import PROTOCOL, STATES_PROTOCOL
from pillion.errors import ConfigError, Conflict, Unavailable
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.node import attach_server
from pillion.kvstore.node.attach_server import AttachServer
from pillion.wire.attach import MAX_LINE_BYTES, PROCESSES, AttachHello, AttachReply, RegionHello
from tests.support.pools import make_pool

BLOCK_BYTES = 4096
POOL_BYTES = 64 * BLOCK_BYTES

# Attaches, leases through the parent's pool by epoch, writes into slot 3, and then waits for the parent's end.
CHILD = """
import sys
from pillion.kvstore.client.attachment import attach
a = attach(sys.argv[1], component_id="child", role="decode", block_bytes=4096, timeout_s=60)
a.memory[3 * 4096 : 3 * 4096 + 5] = b"hello"
print(a.epoch, a.num_slots, a.node_id, flush=True)
sys.stdin.readline()
# The worker's end is played as the kernel plays it for a process that dies: it closes one descriptor after the other.
a._sock.close()
sys.stdin.read()
"""


async def no_regions(sock: socket.socket, hello: RegionHello) -> None:
    raise AssertionError("no test here asks for a region")


async def test_processes_without_a_pidfd_never_count_as_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops descriptors that do not fit; then no exit is a proof (I4)."""
    monkeypatch.setattr(attach_server, "MAX_PROCESSES", 1)
    near, far = socket.socketpair()
    near.setblocking(False)
    pidfds = [os.pidfd_open(os.getpid()) for _ in range(2)]
    found: list[int] = []
    try:
        socket.send_fds(far, [PROCESSES], pidfds)
        async with asyncio.timeout(WITHIN_S):
            assert not await attach_server.until_end(near, found)
        assert len(found) == 2
        assert found[1] < 0
    finally:
        for descriptor in (*pidfds, *found[:1]):
            os.close(descriptor)
        near.close()
        far.close()


class AttachNode:
    """The node's side without gRPC."""

    def __init__(self, folder: str) -> None:
        self.exit_is_proof = False
        self.protocol = PROTOCOL
        self.path = f"{folder}/sub/attach.sock"
        self.pool = make_pool(POOL_BYTES)
        self.segment = Segment(POOL_BYTES)
        self.server = AttachServer(
            self.path,
            lambda: [self.segment.fileno()],
            self.admit,
            self.pool.ended,
            self.pool.fence,
            no_regions,
            exit_is_proof=lambda: self.exit_is_proof,
        )

    async def admit(self, hello: AttachHello) -> AttachReply:
        epoch, num_slots = self.pool.attach(hello)
        return AttachReply(
            node_id="n", node_address="unix:nowhere", epoch=epoch, num_slots=num_slots, protocol=self.protocol
        )


@pytest.fixture
async def node() -> AsyncIterator[AttachNode]:
    with tempfile.TemporaryDirectory(prefix="pillion-") as folder:
        made = AttachNode(folder)
        made.server.start()
        try:
            yield made
        finally:
            await made.server.stop()
            made.segment.close()
            made.pool.check_integrity()
            assert not pathlib.Path(made.path).exists()  # noqa: ASYNC240


@contextlib.contextmanager
def child(path: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", CHILD, path], stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_killed_worker_frees_its_slots(node: AttachNode) -> None:
    with child(node.path) as process:
        assert process.stdout is not None
        words = (await asyncio.to_thread(process.stdout.readline)).split()
        epoch = int(words[0])
        assert words[1:] == ["64", "n"]
        assert node.pool.lease(epoch, 5)
        with map_shared(node.segment.fileno(), POOL_BYTES) as mapped:
            assert mapped[3 * BLOCK_BYTES :][:5] == b"hello", "the same memory in both processes"
        process.send_signal(signal.SIGSTOP)
        node.pool.ledger.fence(epoch)
        assert node.pool.status().quarantined_blocks == 5, "asleep, not dead: nobody may reuse its slots"
        process.kill()
        await until("the slots to be free", lambda: node.pool.status().free_blocks == 64)
    assert epoch not in node.pool.ledger.holders


async def leased_by(process: subprocess.Popen[str], node: AttachNode) -> int:
    """Lease five slots to the child; return its epoch."""
    assert process.stdout is not None
    epoch = int((await asyncio.to_thread(process.stdout.readline)).split()[0])
    assert len(node.pool.lease(epoch, 5)) == 5
    return epoch


def end_socket(process: subprocess.Popen[str]) -> None:
    """Make the child close its attach socket and live on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")
@pytest.mark.parametrize("number_known", [True, False])
async def test_only_the_exit_frees_slots_that_a_device_may_still_write(
    node: AttachNode, monkeypatch: pytest.MonkeyPatch, number_known: bool
) -> None:
    """The kernel identifies the process even if its id means nothing here, as in another PID namespace."""
    node.exit_is_proof = True
    if not number_known:
        monkeypatch.setattr(os, "pidfd_open", unknown_process)
        if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 5):
            pytest.skip("needs Linux 6.5")
    with child(node.path) as process:
        await leased_by(process, node)
        end_socket(process)
        await until("the epoch to be fenced", lambda: node.pool.status().quarantined_blocks == 5)
        node.pool.check_integrity()
        process.kill()
        await until("the slots to be free", lambda: node.pool.status().free_blocks == 64)


async def test_slots_of_an_unobservable_worker_stay_allocated(
    node: AttachNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing replaces the proof, and the same worker, restarted, is not mistaken for the lost one."""
    node.exit_is_proof = True
    monkeypatch.setattr(attach_server, "_pidfd_of", lambda sock: attach_server.UNSEEN_PROCESS)
    with child(node.path) as process:
        epoch = await leased_by(process, node)
        process.kill()
        await until("the epoch to be fenced", lambda: node.pool.status().quarantined_blocks == 5)
        assert node.pool.status().fenced_components == ["child"]
    assert "cannot see its process" in caplog.text
    assert "shareProcessNamespace" in caplog.text
    with child(node.path) as again:
        fresh = await leased_by(again, node)
        assert fresh != epoch
        status = node.pool.status()
        assert (status.quarantined_blocks, status.leased_blocks, status.free_blocks) == (5, 5, 54)
        assert not status.fenced_components
        node.pool.check_integrity()


def unknown_process(pid: int) -> int:
    raise OSError("a process of another PID namespace")


async def test_the_worker_notices_that_the_node_exited(node: AttachNode) -> None:
    attachment = await asyncio.to_thread(
        attach, node.path, component_id="w", role="decode", block_bytes=BLOCK_BYTES, timeout_s=WITHIN_S
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(attachment.fileno(), ended.set)
    await loop_turns()
    assert not ended.is_set()
    await node.server.stop()
    async with asyncio.timeout(WITHIN_S):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(attachment.fileno())
    attachment.memory[0] = 1  # still mapped: no crash in the middle of a step
    attachment.close()
    assert not node.pool.ledger.holders


async def test_closing_ends_the_epoch(node: AttachNode) -> None:
    attachment = await asyncio.to_thread(
        attach, node.path, component_id="w", role="decode", block_bytes=BLOCK_BYTES, timeout_s=WITHIN_S
    )
    assert (attachment.num_slots, len(attachment.memory)) == (64, POOL_BYTES)
    node.pool.lease(attachment.epoch, 3)
    view = attachment.memory[:16]  # a tensor, say, that outlives the attachment
    attachment.close()
    await until("the slots to be free", lambda: node.pool.status().free_blocks == 64)
    assert bytes(view) == bytes(16)


@pytest.mark.parametrize(
    ("block_bytes", "why"),
    [(2 * BLOCK_BYTES, "restart the node"), (POOL_BYTES + 1, "--kv-pool-bytes"), (0, "at least one byte")],
)
async def test_refusals_are_one_line(node: AttachNode, block_bytes: int, why: str) -> None:
    if block_bytes == 2 * BLOCK_BYTES:
        node.pool.attach(AttachHello(component_id="first", role="prefill", block_bytes=BLOCK_BYTES))
    with pytest.raises(ConfigError, match=why) as caught:
        await asyncio.to_thread(
            attach, node.path, component_id="w", role="decode", block_bytes=block_bytes, timeout_s=WITHIN_S
        )
    assert "\n" not in caught.value.message


async def test_a_foreign_protocol_is_rejected(node: AttachNode) -> None:
    hello = b'{"protocol":%d,"component_id":"w","role":"x","block_bytes":1}\n' % (PROTOCOL + 2)
    reply = await asyncio.to_thread(speak, node.path, hello)
    assert b"upgrade one version at a time" in reply


async def test_a_worker_with_states_rejects_a_node_without_states(node: AttachNode) -> None:
    """Such a node would mistake a state for blocks. Workers of other models use it."""

    async def attached(*, has_states: bool) -> None:
        words = {"component_id": "w", "role": "decode", "block_bytes": BLOCK_BYTES, "timeout_s": WITHIN_S}
        worker = await asyncio.to_thread(attach, node.path, **words, has_states=has_states)
        worker.close()
        await until("the worker's end", lambda: not node.pool.ledger.holders)

    for protocol in (STATES_PROTOCOL - 1, STATES_PROTOCOL):
        node.protocol = protocol
        await attached(has_states=False)
    await attached(has_states=True)
    node.protocol = STATES_PROTOCOL - 1
    with pytest.raises(ConfigError, match=r"n is Pillion .* speaks protocol 7.*upgrade KV nodes before the workers"):
        await attached(has_states=True)
    await until("the worker's end", lambda: not node.pool.ledger.holders)


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"component_id":1,"role":"x","block_bytes":1}\n', b"x" *
    MAX_LINE_BYTES,
     b'{"component_id":"w","role":"x","block_bytes":true}\n'],
)  # fmt: skip
async def test_malformed_messages_are_rejected(node: AttachNode, line: bytes) -> None:
    assert b'"error":"' in await asyncio.to_thread(speak, node.path, line)
    assert not node.pool.ledger.holders


def nothing(epoch: int) -> None:
    pass


async def nobody(hello: AttachHello) -> AttachReply:
    raise Conflict("nobody is admitted")


def speak(path: str, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(WITHIN_S)
        sock.connect(path)
        sock.sendall(line)
        sock.shutdown(socket.SHUT_WR)
        return sock.recv(MAX_LINE_BYTES)


async def test_the_socket_is_private_and_not_taken_over(node: AttachNode) -> None:
    assert stat.S_IMODE(os.stat(node.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(pathlib.Path(node.path).parent).st_mode) == 0o700
    with pytest.raises(ConfigError, match="another process serves"):
        AttachServer(node.path, list, node.admit, nothing, nothing, no_regions).start()


async def test_stale_sockets_are_replaced_and_files_are_not() -> None:
    with tempfile.TemporaryDirectory(prefix="pillion-") as folder:
        path, precious = f"{folder}/a.sock", pathlib.Path(folder, "a.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(path)
        server = AttachServer(path, list, nobody, nothing, nothing, no_regions)
        server.start()
        await server.stop()
        precious.write_text("precious")  # noqa: ASYNC240
        with pytest.raises(ConfigError, match="not a socket"):
            server.start()
        assert precious.read_text() == "precious"  # noqa: ASYNC240


def test_attaching_fails_without_a_node(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Unavailable, match="cannot attach"):
        attach(str(tmp_path / "none"), component_id="w", role="decode", block_bytes=1, timeout_s=0.2)


def test_a_node_that_exits_before_its_reply_is_not_a_config_error(tmp_path: pathlib.Path) -> None:
    """A supervisor gives up a cluster with invalid flags, but this worker can start when its node is back."""
    path = str(tmp_path / "a.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        ending = threading.Thread(target=lambda: listening.accept()[0].close())
        ending.start()
        with pytest.raises(Unavailable):
            attach(path, component_id="w", role="decode", block_bytes=1, timeout_s=WITHIN_S)
        ending.join()


def test_the_segment_has_no_name_and_cannot_be_truncated() -> None:
    segment = Segment(POOL_BYTES)
    with pytest.raises(ConfigError, match="are needed"):
        map_shared(segment.fileno(), POOL_BYTES + 1)
    if sys.platform == "linux":
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fileno(), 0)
        assert not any("pillion-kv-pool" in name for name in os.listdir("/dev/shm"))
    segment.close()
    segment.close()
    with pytest.raises(ConfigError):
        Segment(0)
