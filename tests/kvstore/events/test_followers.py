"""Followers of a node's blocks, over real gRPC: lost connections, truncated logs, restarts with and without the pool,
kill -9, and followers that read nothing. The oracle is the node's ledger, or what tickets find."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import cast

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from lab.testbed.defaults import NODE, defaults_environment
from lab.testbed.faults.board import hook_path
from pillion.cli.flags import to_argv
from pillion.errors import Conflict, Overloaded, Unavailable
from pillion.kvstore.client.attachment import Attachment
from pillion.kvstore.client.node_client import NodeClient, typed
from pillion.kvstore.events import block_follower
from pillion.kvstore.events import followers as followers_module
from pillion.kvstore.events.block_follower import BlockFollower
from pillion.kvstore.events.block_log import BlockLog
from pillion.kvstore.events.followers import Followers
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.eviction import LruEviction
from pillion.kvstore.ledger.records import IndexEvent
from pillion.kvstore.ledger.tree import BlockTree
from pillion.kvstore.node.kv_node import KVNode
from pillion.observability import metric_catalog as names
from pillion.v1.kvnode_pb2 import BlockChanges, FollowBlocksRequest
from tests.support.kv_hosts import BLOCK_BYTES, NAMESPACE, ROOT
from tests.support.node_lives import Lives, ended, parents_of, shared_keeper

# More than one of them does not fit into the pool.
CHAIN_BLOCKS = 25


def chain(number: int) -> bytes:
    return chain_hashes(ROOT, range(100 * number, 100 * number + CHAIN_BLOCKS), 1)


@pytest.fixture(scope="module")
def keeper_socket() -> Iterator[str]:
    with shared_keeper() as path:
        yield path


@pytest.fixture
async def lives(short_folder: str, keeper_socket: str) -> AsyncIterator[Lives]:
    async with ended(Lives(short_folder, keeper_socket)) as made:
        yield made


class Router:
    """A reader in its own task, which reads everything."""

    def __init__(self, address: str) -> None:
        self.client = NodeClient(address, "router")
        self.follower = BlockFollower(self.client)
        self.reading = asyncio.create_task(self.read())

    async def read(self) -> None:
        async with contextlib.aclosing(self.follower.follow()) as messages:
            async for _ in messages:
                pass

    async def has(self, blocks: Callable[[], dict[bytes, bytes]]) -> None:
        """Wait until the mirror belongs to an open stream and has exactly these blocks."""
        follower = self.follower
        await until("the follower to have them", lambda: follower.current and follower.mirror.blocks == blocks())
        follower.mirror.check_integrity()
        assert not self.reading.done()
        assert not follower.misfits

    async def stop(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
        await self.client.aclose()


@contextlib.asynccontextmanager
async def routing(address: str) -> AsyncIterator[Router]:
    router = Router(address)
    try:
        yield router
    finally:
        await router.stop()


class Relay:
    """A proxy of a Unix socket whose connections can be cut."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.closed = False
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.closed:
            writer.transport.abort()
            return
        there, back = await asyncio.open_unix_connection(self.path)
        self._writers.append(back)
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def relayed(lives: Lives) -> AsyncIterator[tuple[Relay, Router]]:
    relay = Relay(lives.flags.node_listen.removeprefix("unix:"))
    await relay.start()
    try:
        async with routing(relay.address) as router:
            yield relay, router
    finally:
        await relay.stop()


def blocks_of(node: KVNode) -> Callable[[], dict[bytes, bytes]]:
    return lambda: parents_of(node.pool.ledger)


def followers_of(node: KVNode) -> Followers:
    return node.pool.followers


async def test_a_follower_mirrors_the_pool_across_restarts(lives: Lives) -> None:
    node = await lives.begin()
    async with routing(lives.flags.node_listen) as router:
        mirror = router.follower.mirror
        await router.has(dict)
        assert mirror.pool is None, "no worker has said what a block is"
        worker = await lives.worker()
        await until("the pool's facts", lambda: mirror.pool is not None)
        assert mirror.pool is not None
        assert (mirror.pool.kv_namespace.hex(), mirror.pool.block_tokens) == (NAMESPACE, 1)
        assert (mirror.pool.node_id, mirror.pool.block_bytes) == (lives.flags.node_id, BLOCK_BYTES)
        for number in range(4):
            await lives.commit(worker, chain(number))
            await router.has(blocks_of(node))
        assert node.pool.ledger.evicted_ever > 0
        left, epoch = dict(mirror.blocks), mirror.log_epoch
        node = await lives.begin()
        await lives.renew(worker)
        await router.has(lambda: left)
        assert mirror.log_epoch != epoch
        assert mirror.pool.block_tokens == 1
        await lives.commit(worker, chain(9))
        await router.has(blocks_of(node))
        worker.close()
        node = await lives.begin(keeper_socket="")
        await router.has(dict)
        assert router.follower.snapshots == 3


async def test_a_follower_resumes_where_its_connection_broke(lives: Lives) -> None:
    node = await lives.begin()
    worker = await lives.worker()
    async with relayed(lives) as (relay, router):
        await router.has(dict)
        for number in range(4):
            relay.cut()
            await lives.commit(worker, chain(number))
            await router.has(blocks_of(node))
        assert router.follower.snapshots == 1
        assert router.follower.resumed >= 3


async def test_a_follower_of_dropped_events_gets_a_snapshot(lives: Lives) -> None:
    node = await lives.begin()
    node.pool.followers.log.max_changes = CHAIN_BLOCKS
    worker = await lives.worker()
    async with relayed(lives) as (relay, router):
        await lives.commit(worker, chain(0))
        await router.has(blocks_of(node))
        for number in range(1, 4):
            relay.closed = True
            relay.cut()
            await until("the stream to end", lambda: not followers_of(node))
            await lives.commit(worker, chain(number))
            relay.closed = False
            await router.has(blocks_of(node))
        assert router.follower.snapshots == 4


async def test_an_inconsistent_message_triggers_a_snapshot(lives: Lives) -> None:
    node = await lives.begin()
    worker = await lives.worker()
    async with routing(lives.flags.node_listen) as router:
        await lives.commit(worker, chain(0))
        await router.has(blocks_of(node))
        # As if a message had been lost on the way.
        router.follower.mirror.blocks.popitem()
        await lives.commit(worker, chain(1))
        await until("it to be noticed", lambda: router.follower.misfits == 1)
        await until("a snapshot", lambda: router.follower.snapshots == 2)
        router.follower.misfits = 0
        await router.has(blocks_of(node))


async def test_the_number_of_followers_is_limited(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers_module, "MAX_FOLLOWERS", 1)
    node = await lives.begin()
    async with routing(lives.flags.node_listen) as router:
        await router.has(dict)
        assert {m.name: cells for m, cells in node.meters.collect().items()}[names.KV_FOLLOWERS.name] == {(): 1}
        second = NodeClient(lives.flags.node_listen, "second")
        with pytest.raises(Overloaded, match="1 followers already read"):
            await anext(second.follow_blocks())
        await second.aclose()
    await until("the place to be free", lambda: not followers_of(node))


async def test_streams_end_with_the_node(lives: Lives) -> None:
    await lives.begin()
    client = NodeClient(lives.flags.node_listen, "router")
    messages = client.follow_blocks()
    await anext(messages)
    ending = asyncio.create_task(lives.end(WITHIN_S))
    with pytest.raises(Unavailable, match="the KV node is stopping"):
        await anext(messages)
    await ending
    await client.aclose()


async def test_a_caller_without_a_protocol_is_rejected(lives: Lives) -> None:
    await lives.begin()
    client = NodeClient(lives.flags.node_listen, "router")
    with pytest.raises(Conflict, match="speaks protocol 0"):
        await typed(client._stub.FollowBlocks(FollowBlocksRequest()).read())
    await client.aclose()


class HaltingReader:
    """Reads messages only while ``taking`` is set."""

    def __init__(self) -> None:
        self.taking = asyncio.Event()
        self.messages: list[BlockChanges] = []

    async def send(self, message: BlockChanges) -> None:
        await self.taking.wait()
        self.messages.append(message)


class SnapshotsOnly:
    """A node whose log drops the changes after each snapshot before that has ended; then one that has some."""

    def __init__(self, snapshots: int) -> None:
        self.left = snapshots

    async def follow_blocks(self, epoch: int = 0, number: int = 0) -> AsyncIterator[BlockChanges]:
        yield BlockChanges(kind=BlockChanges.KIND_SNAPSHOT_END, log_epoch=1)
        self.left -= 1
        if self.left >= 0:
            raise Overloaded("left behind")
        yield BlockChanges(log_epoch=1)


async def test_a_snapshot_alone_does_not_reset_the_retry_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_follower, "RETRY_S", 0.001)
    follower = BlockFollower(cast("NodeClient", SnapshotsOnly(3)))
    pauses = []
    async with contextlib.aclosing(follower.follow()) as messages:
        async for message in messages:
            pauses.append(follower._pause_s)
            if message.kind == BlockChanges.KIND_CHANGES:
                break
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.001]


async def test_a_follower_behind_the_oldest_log_entry_is_dropped() -> None:
    tree, log = BlockTree(LruEviction()), BlockLog(1, 3)
    followers = Followers(tree, log)
    reader = HaltingReader()
    following = asyncio.create_task(followers.follow(FollowBlocksRequest(), reader.send))
    await loop_turns()
    followers.note([IndexEvent(h, here=True) for h in split_hashes(chain(0))[:4]])
    reader.taking.set()
    with pytest.raises(Overloaded, match="is at change 0, and the log only has changes 2 to 4"):
        await following
    assert (followers.dropped, len(followers)) == (1, 0)


async def test_a_follower_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers_module, "STALL_S", 0.01)
    followers = Followers(BlockTree(LruEviction()), BlockLog(1, 99))
    with pytest.raises(Overloaded, match="has read nothing"):
        await followers.follow(FollowBlocksRequest(), HaltingReader().send)
    assert (followers.dropped, len(followers)) == (1, 0)


async def test_simultaneous_changes_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """So followers cost a node nothing per commit."""
    monkeypatch.setattr(followers_module, "GATHER_S", 0.2)
    followers = Followers(BlockTree(LruEviction()), BlockLog(1, 99))
    reader = HaltingReader()
    reader.taking.set()
    following = asyncio.create_task(followers.follow(FollowBlocksRequest(), reader.send))
    await until("the snapshot", lambda: len(reader.messages) == 1)
    for block_hash in split_hashes(chain(0)):
        followers.note([IndexEvent(block_hash, here=True)])
        await asyncio.sleep(0)
    await until("all changes", lambda: reader.messages[-1].number == CHAIN_BLOCKS)
    # The snapshot, and one message or two; some more where the machine stood still between two changes.
    assert len(reader.messages) < CHAIN_BLOCKS // 2
    followers.close()
    with pytest.raises(Unavailable):
        await following


class ProcessLives(Lives):
    """A node's lives as processes, which can be killed."""

    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Nothing is evicted ahead of need.
        defaults = defaults_environment({NODE: {"low_watermark_percent": 0}})
        environ = os.environ | defaults | hook_path(os.environ)
        self.process = subprocess.Popen([sys.executable, "-m", "pillion", "kvnode", *to_argv(self.flags)], env=environ)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def found(self, worker: Attachment, chains: int) -> dict[bytes, bytes]:
        """Return the hashes and parents that tickets of this many chains find, after all kept blocks are checked."""
        client = NodeClient(self.flags.node_listen, "test")

        async def looked_at() -> bool:
            with contextlib.suppress(Unavailable):
                return not (await client.status()).surviving_blocks
            # The connection to the life before is tried again only after a moment.
            return False

        await until("all of it to be looked at", looked_at)
        found: dict[bytes, bytes] = {}
        for number in range(chains):
            hashes = split_hashes(chain(number))[: await self.hits(worker, chain(number))]
            found |= dict(zip(hashes, [b"", *hashes], strict=False))
        assert (await client.status()).committed_blocks == len(found)
        await client.check_integrity()
        await client.aclose()
        return found


class PrintedEvents:
    """``pillion events`` in its own process, and a reader's view of its lines."""

    def __init__(self, address: str, folder: str, *options: str) -> None:
        self.path = f"{folder}/events.jsonl"
        with open(self.path, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pillion", "events", address, *options], stdout=output
            )

    def say(self, blocks: dict[str, str]) -> bool:
        """Return whether the lines lead to these blocks."""
        found: dict[str, str] = {}
        with open(self.path) as file:
            for text in file:
                if not text.endswith("\n"):
                    break
                line = json.loads(text)
                if line["event"] == "cleared":
                    found.clear()
                elif line["event"] == "stored":
                    found[line["hash"]] = line["parent"]
                elif line["event"] == "removed":
                    del found[line["hash"]]
                elif line["event"] == "current":
                    assert len(found) == line["blocks"]
        return found == blocks


async def test_followers_survive_kill_9_of_the_node(short_folder: str, keeper_socket: str) -> None:
    lives = ProcessLives(short_folder, keeper_socket)
    lives.start()
    printed = PrintedEvents(lives.flags.node_listen, short_folder)
    try:
        async with routing(lives.flags.node_listen) as router:
            worker = await lives.worker()
            await router.has(dict)
            for life in (1,):
                for number in (2 * life - 2, 2 * life - 1):
                    await lives.compute(worker, chain(number))
                lives.kill()
                lives.start()
                await until("the worker to notice", lambda: worker.node_gone)
                await lives.renew(worker)
                found = await lives.found(worker, 2 * life)
                await router.has(partial(dict, found))
                prompt = split_hashes(chain(2 * life - 1))
                assert router.follower.mirror.prefix_blocks(prompt) == sum(block in found for block in prompt)
                as_text = {block_hash.hex(): parent.hex() for block_hash, parent in found.items()}
                await until("the printed events", partial(printed.say, as_text))
            assert router.follower.snapshots == 2
        once = PrintedEvents(lives.flags.node_listen, short_folder, "--once")
        assert await asyncio.to_thread(once.process.wait, WITHIN_S) == 0
        assert once.say(as_text)
    finally:
        for attachment in lives.workers:
            attachment.close()
        lives.kill()
        printed.process.kill()
        printed.process.wait()


def test_the_events_command_fails_in_one_line_without_a_node(short_folder: str) -> None:
    command = [sys.executable, "-m", "pillion", "events", f"unix:{short_folder}/none.sock", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=os.environ)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
