"""The keeper's rules, over socket pairs: whose pools it keeps, for how long, and what it refuses."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections.abc import Iterator

import pytest

from lab.testbed.conditions import WITHIN_S
from pillion.kvstore.pool_survival import keeper_process
from pillion.kvstore.pool_survival.keeper_client import PoolKeeper
from pillion.kvstore.pool_survival.keeper_messages import (
    MAX_KEEPER_LINE_BYTES,
    MIN_KEPT_MEMORIES,
    KeeperHello,
    KeeperReply,
    keeper_reply_from_line,
)
from pillion.kvstore.pool_survival.keeper_process import KEPT_WITHOUT_NODE_S, KeeperServer
from pillion.net.private_socket import close_all, peer_gone, receive_line
from pillion.wire.json_lines import line_to_bytes
from tests.support.node_lives import running_keeper


class KeeperCalls:
    """Requests of nodes to a keeper, one after the other in one thread."""

    def __init__(self) -> None:
        self.server = KeeperServer()
        self.nodes: list[socket.socket] = []

    def ask(
        self, action: str, name: str = "kv-a", content: bytes = b"", memories: int = MIN_KEPT_MEMORIES
    ) -> tuple[KeeperReply, socket.socket, bytes]:
        """Return the reply, the node's connection, and the content of the memory that came with the reply."""
        node, served = socket.socketpair()
        self.nodes.append(node)
        node.settimeout(WITHIN_S)
        sent = [os.memfd_create("kept") for _ in range(memories)] if action == "keep" else []
        for descriptor in sent:
            os.pwrite(descriptor, content, 0)
        socket.send_fds(node, [line_to_bytes(KeeperHello(action=action, name=name, memories=len(sent)))], sent)
        close_all(sent)
        self.server.serve(served)
        line, got = receive_line(node, MAX_KEEPER_LINE_BYTES, memories)
        found = os.pread(got[0], 100, 0) if got else b""
        close_all(got)
        node.setblocking(False)
        return keeper_reply_from_line(line), node, found

    def kept(self, name: str = "kv-a") -> bytes:
        return self.ask("take", name)[2]


@pytest.fixture
def calls() -> Iterator[KeeperCalls]:
    if not hasattr(os, "memfd_create"):
        pytest.skip("memory without a name is Linux's")
    made = KeeperCalls()
    with contextlib.closing(made.server):
        yield made
    for node in made.nodes:
        node.close()


def test_a_running_nodes_name_is_reserved(calls: KeeperCalls) -> None:
    reply, first, _ = calls.ask("keep", content=b"first")
    assert reply.kept
    reply, second, _ = calls.ask("keep", content=b"second")
    assert not reply.kept
    assert "another node named kv-a is running" in reply.error
    assert peer_gone(second)
    assert not peer_gone(first)
    assert "another node" in calls.ask("drop")[0].error
    assert calls.kept() == b"first"
    first.close()
    assert calls.ask("keep", content=b"second")[0].kept
    assert calls.kept() == b"second"


def test_the_total_number_of_descriptors_is_limited(calls: KeeperCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each pool's memories, and its node's connection.
    monkeypatch.setattr(keeper_process, "MAX_KEPT_DESCRIPTORS", 7)
    assert calls.ask("keep", memories=3)[0].kept
    reply, refused, _ = calls.ask("keep", "kv-b", memories=3)
    assert (reply.kept, "holds at most 7" in reply.error) == (False, True)
    assert peer_gone(refused)
    assert calls.ask("keep", "kv-b", memories=2)[0].kept
    # What takes the place of a node's own descriptors needs no further ones.
    calls.nodes[0].close()
    assert calls.ask("keep", memories=3)[0].kept


def test_a_keeper_survives_running_out_of_descriptors(short_folder: str) -> None:
    path, content = f"{short_folder}/keeper.sock", os.memfd_create("kept")
    with running_keeper(path) as process:
        keeper = PoolKeeper(path)
        keeper.keep("kv-a", [content, content])
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (0, before[1]))
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            probe.send(line_to_bytes(KeeperHello(action="take", name="kv-a")))
            ready, _, _ = select.select([probe], [], [], keeper_process.ACCEPT_PAUSE_S)
            assert not ready, "it could accept nothing"
            assert process.poll() is None
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            probe.settimeout(WITHIN_S)
            line, got = receive_line(probe, MAX_KEEPER_LINE_BYTES, MIN_KEPT_MEMORIES)
        assert (keeper_reply_from_line(line).kept, len(got)) == (True, 2)
        close_all([content, *got])
        assert not keeper.lost()
        keeper.close()


def test_a_pool_without_a_node_is_dropped_in_the_end(calls: KeeperCalls) -> None:
    gone, alive = (calls.ask("keep", name, name.encode())[1] for name in ("kv-a", "kv-b"))
    calls.server.drop_abandoned(0.0)
    calls.server.drop_abandoned(2 * KEPT_WITHOUT_NODE_S)
    gone.close()
    for now_s in (3 * KEPT_WITHOUT_NODE_S, 4 * KEPT_WITHOUT_NODE_S - 1):
        calls.server.drop_abandoned(now_s)
        assert calls.kept() == b"kv-a"
    calls.server.drop_abandoned(4 * KEPT_WITHOUT_NODE_S)
    assert calls.kept() == b""
    assert calls.kept("kv-b") == b"kv-b"
    assert not peer_gone(alive)


def test_a_restarted_nodes_pool_is_kept_again(calls: KeeperCalls) -> None:
    calls.ask("keep")[1].close()
    calls.server.drop_abandoned(0.0)
    calls.ask("keep", content=b"again")
    calls.server.drop_abandoned(KEPT_WITHOUT_NODE_S)
    assert calls.kept() == b"again"


def test_an_incomplete_line_blocks_no_other_client(calls: KeeperCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_process, "REQUEST_TIMEOUT_S", 0.01)
    node, served = socket.socketpair()
    with node:
        node.send(b"{")
        calls.server.serve(served)
        assert peer_gone(node)
    assert calls.ask("keep")[0].kept
