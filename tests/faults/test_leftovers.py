"""The checker of runs with faults finds what is left on purpose."""

from __future__ import annotations

import os
import pathlib
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lab.testbed.cluster import proven_status
from lab.testbed.redis import RedisServer, running_redis
from pillion.config import KVNodeFlags
from pillion.errors import Conflict
from pillion.kvstore.assemble import start_kvnode
from pillion.types import ComponentStatus
from pillion.v1.kvnode_pb2 import NodeStatus
from tests.faults import leftovers
from tests.support.redis_nodes import Chain, fake_nodes


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


async def test_an_inconsistent_node_is_reported() -> None:
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        flags = KVNodeFlags(node_listen=f"unix:{folder}/n.sock", attach_socket=f"{folder}/a.sock", kv_pool_bytes=2**20)
        node = await start_kvnode(flags)
        try:
            assert await proven_status(node.address) is not None
            node.pool.ledger.free.append(7)
            with pytest.raises(Conflict, match="slot 7"):
                await proven_status(node.address)
        finally:
            await node.stop(0.0)
        assert await proven_status(node.address) is None


def test_leaks_of_nodes_and_components_are_found() -> None:
    known = [
        ComponentStatus(component_id="decode-0", role="decode", node_id="a"),
        ComponentStatus(component_id="decode-1", role="decode", node_id="b"),
        ComponentStatus(component_id="gateway-0", role="gateway"),
        ComponentStatus(component_id="a", role="kvnode", node_id="a"),
    ]
    assert leftovers.of_node(NodeStatus(node_id="a", holders=2, committed_blocks=5), known) == []
    for held in leftovers.HELD:
        value = ["decode-0"] if held == "fenced_components" else 1
        assert held in "".join(leftovers.of_node(NodeStatus(node_id="a", holders=2, **{held: value}), known))
    assert leftovers.of_node(NodeStatus(node_id="a", holders=3), known) == ["a knows 3 holders, not 2"]
    idle = ComponentStatus(component_id="decode-0", role="decode")
    assert leftovers.of_components((idle,)) == []
    for busy in leftovers.BUSY:
        assert busy in "".join(leftovers.of_components((replace(idle, **{busy: 2}),)))


async def test_leftovers_in_redis_are_found(redis: RedisServer) -> None:
    node, dead = await fake_nodes(redis.url, "a", "b")
    try:
        await node.has(Chain(range(5)))
        await dead.has(Chain(range(9)))
        await dead.registry.leave("b")
        has_five = {"a": NodeStatus(node_id="a", committed_blocks=3, disk_blocks=2)}
        assert leftovers.of_redis(redis.socket, ["a"], has_five) == []
        (four,) = leftovers.of_redis(redis.socket, ["a"], {"a": NodeStatus(node_id="a", committed_blocks=4)})
        assert "names 5 blocks of a" in four
        assert "['a'], not ['a', 'decode-0']" in leftovers.of_redis(redis.socket, ["a", "decode-0"], has_five)[0]
        redis.command("SET", "pillion:{load}:gateway-0", "x")
        assert leftovers.of_redis(redis.socket, ["a"], has_five) == ["the key pillion:{load}:gateway-0 is left"]
    finally:
        await node.aclose()
        await dead.aclose()
    assert "does not answer" in leftovers.of_redis(pathlib.Path("/nowhere"), [], {})[0]


def test_unready_components_are_found() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        pids = {"decode": [os.getpid()], "kvnode": [os.getpid()], "redis-server": [os.getpid()]}
        assert leftovers.of_processes(pids, ["decode-0", "kv-a"]) == []
        assert leftovers.of_processes(pids, ["decode-0", "decode-1", "kv-a"]) == ["1 of decode serve, not 2"]
        nobody = {"gateway": list[int]()}
        assert leftovers.of_processes(nobody, ["gateway-a"]) == ["0 of gateway serve, not 1"]


def test_leaked_open_files_are_found() -> None:
    growth, own = leftovers.ProcessGrowth(), {os.getpid(): "test"}
    assert growth.look(own) == []
    with tempfile.TemporaryDirectory() as folder:
        files = [open(f"{folder}/{number}", "wb") for number in range(leftovers.MORE_FILES + 1)]  # noqa: SIM115
        try:
            assert "files open" in growth.look(own)[0]
        finally:
            for file in files:
                file.close()
    assert growth.look(own) == []


def test_a_new_traceback_is_logged_once() -> None:
    tracebacks = leftovers.NewTracebacks()
    assert tracebacks.look("a line\n") == []
    log = f"a line\n{leftovers.TRACEBACK}:\nKeyError: 'x'\n"
    [told] = tracebacks.look(log)
    assert told.startswith("1 new tracebacks, the last one: Traceback")
    assert "KeyError" in told
    assert tracebacks.look(log) == []
