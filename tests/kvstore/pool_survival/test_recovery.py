"""A KV node that starts over the pool of its previous process: real nodes, a real keeper, and real worker processes
where the kernel has to prove their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from lab.testbed.conditions import WITHIN_S, until
from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.client.attachment import Attachment
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes
from pillion.kvstore.memory.segment import lock_place, map_shared, reopened
from pillion.kvstore.pool_survival import survival, surviving_pool
from pillion.kvstore.pool_survival.keeper_client import PoolKeeper
from pillion.kvstore.pool_survival.owned_segment import OWNER, OwnedSegment, locked_places
from pillion.wire.attach import AttachHello, attach_reply_from_line
from pillion.wire.json_lines import line_to_bytes
from tests.support.kv_hosts import BLOCK_BYTES, NAMESPACE, NUM_SLOTS, ROOT
from tests.support.node_lives import Lives, ended, running_keeper, shared_keeper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the locks of open files are Linux's")

CHAIN = chain_hashes(ROOT, range(6), 1)
# A worker that does not notice its node's end: it holds the pool until it is killed.
DEAF_WORKER = """
import sys
from pillion.kvstore.client.attachment import attach
a = attach(sys.argv[1], component_id="deaf", role="decode", block_bytes=8192, timeout_s=60, namespace="ab" * 32)
print(a.pool_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def keeper_socket() -> Iterator[str]:
    """One keeper for all nodes here: each test's has its own name."""
    with shared_keeper() as path:
        yield path


@contextlib.contextmanager
def deaf_worker(attach_socket: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", DEAF_WORKER, attach_socket], stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def another_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
async def lives(short_folder: str, keeper_socket: str) -> AsyncIterator[Lives]:
    async with ended(Lives(short_folder, keeper_socket)) as made:
        yield made


async def test_blocks_and_mappings_outlive_a_node_again_and_again(lives: Lives) -> None:
    await lives.begin()
    worker = await lives.worker()
    pool_id, memory = worker.pool_id, worker.memory
    assert pool_id
    await lives.commit(worker, CHAIN)
    for life in range(1, 4):
        node = await lives.begin()
        assert worker.node_gone
        await lives.renew(worker)
        assert (worker.pool_id, worker.memory) == (pool_id, memory)
        assert not worker.node_gone
        # A chain of which the node has only a part: the rest is computed, and outlives the next death with it.
        longer = chain_hashes(ROOT, range(6 + 2 * life), 1)
        assert await lives.hits(worker, longer) == 4 + 2 * life
        await lives.commit(worker, longer)
        status = node.status()
        assert (status.recovered_blocks, status.committed_blocks_ever, status.surviving_blocks) == (4 + 2 * life, 2, 0)
        node.check_integrity()
    assert node.status().free_blocks + node.status().committed_blocks == NUM_SLOTS


async def test_a_new_worker_finds_what_others_have_committed(lives: Lives) -> None:
    await lives.begin()
    first = await lives.worker()
    await lives.commit(first, CHAIN)
    first.close()
    await lives.begin()
    assert await lives.hits(await lives.worker(), CHAIN) == 6


async def test_no_slot_is_granted_before_the_last_worker_has_drained(lives: Lives) -> None:
    await lives.begin()
    quick, slow = await lives.worker(), await lives.worker()
    await lives.commit(quick, CHAIN)
    node = await lives.begin()
    coming = asyncio.create_task(lives.renew(quick))
    await until("the node to know that it has drained", lambda: node._memory.drained)
    assert not node.pool.shaped
    await lives.renew(slow)
    await coming
    assert await lives.hits(slow, CHAIN) == 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_missed_the_exit_keeps_its_pool_private(
    lives: Lives, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is proof; while it only sleeps it may still write when it wakes, so it keeps the pool."""
    if number == signal.SIGSTOP:
        monkeypatch.setattr(surviving_pool, "PATIENCE_S", 0.0)
    await lives.begin()
    with deaf_worker(lives.flags.attach_socket) as deaf:
        assert deaf.stdout is not None
        worker = await lives.worker()
        said = (await asyncio.to_thread(deaf.stdout.readline)).strip()
        assert said == worker.pool_id
        await lives.commit(worker, CHAIN)
        deaf.send_signal(number)
        await lives.begin()
        if number == signal.SIGKILL:
            await lives.renew(worker)
            assert await lives.hits(worker, CHAIN) == 6
        else:
            with pytest.raises(ConfigError, match="is gone"):
                await lives.renew(worker)
            fresh = await lives.worker()
            assert fresh.pool_id != said
            assert await lives.hits(fresh, CHAIN) == 0


@pytest.mark.parametrize("listens", [False, True])
async def test_a_stopping_worker_does_not_wait_for_a_node(lives: Lives, listens: bool) -> None:
    """Neither for one that is not there yet, nor for one that does not answer."""
    await lives.begin()
    worker = await lives.worker()
    await lives.end()
    given_up = threading.Event()
    with contextlib.ExitStack() as stack:
        if listens:
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.bind(lives.flags.attach_socket)
            silent.listen()
        renewing = asyncio.create_task(lives.renew(worker, 1e6, given_up))
        if listens:
            silent.settimeout(WITHIN_S)
            connection, _ = await asyncio.to_thread(silent.accept)
            stack.enter_context(connection)
            await asyncio.to_thread(connection.recv, 1)
        given_up.set()
        with pytest.raises(Unavailable, match=r"cannot attach again|this process stops"):
            await asyncio.wait_for(renewing, WITHIN_S)


async def test_a_node_with_a_duplicate_name_recovers_nothing(
    lives: Lives, short_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example two clusters with one keeper: the first pool stays kept, and the second node serves without."""
    monkeypatch.setattr(surviving_pool, "PATIENCE_S", 0.0)
    await lives.begin()
    await lives.commit(await lives.worker(), CHAIN)
    other = Lives(short_folder, lives.flags.keeper_socket)
    apart = {"node_listen": f"unix:{short_folder}/b.sock", "attach_socket": f"{short_folder}/b.attach"}
    other.flags = other.of(**apart)
    async with ended(other):
        node = await other.begin()
        await other.worker()
        survival = node.pool.survival
        assert survival is not None
        memories = [segment.fileno() for segment in (survival._pool.places, survival._pool._table_segment)]
        with pytest.raises(Unavailable, match="is running: give each node a --node-id of its own"):
            await asyncio.to_thread(survival._keeper.keep, lives.flags.node_id, memories)
        assert lives.node is not None
        assert lives.node.pool.survival is not None
        assert not lives.node.pool.survival._keeper.lost()
        await lives.end()
        await until("the keeper to have the second pool", lambda: not survival._keeper.lost())


async def test_recovery_waits_for_the_earlier_nodes_exit(lives: Lives) -> None:
    """A network adapter may write for it to memory that it has unmapped."""
    await lives.begin()
    worker = await lives.worker()
    await lives.commit(worker, CHAIN)
    await lives.end()
    kept = lives.kept()
    assert kept is not None
    with contextlib.closing(kept), another_process() as earlier:
        try:
            kept.processes.append((OWNER, os.pidfd_open(earlier.pid)))
            PoolKeeper(lives.flags.keeper_socket).keep(lives.flags.node_id, kept.memories, kept.processes)
            node = await lives.begin()
            coming = asyncio.create_task(lives.renew(worker))
            await until("the node to know that the worker has drained", lambda: node._memory.drained)
            for _ in range(10):
                await asyncio.sleep(surviving_pool.POLL_S)
            assert not node.pool.shaped
        finally:
            earlier.kill()
        await coming
    assert await lives.hits(worker, CHAIN) == 6


async def another_model(lives: Lives) -> Attachment:
    await lives.begin()
    return await lives.worker("cd" * HASH_BYTES)


async def another_size(lives: Lives) -> Attachment:
    await lives.begin(kv_pool_bytes=(NUM_SLOTS + 1) * BLOCK_BYTES)
    return await lives.worker()


async def another_name(lives: Lives) -> Attachment:
    await lives.begin(node_id="kv-b")
    return await lives.worker()


@pytest.mark.parametrize("again", [another_model, another_size, another_name])
async def test_changed_flags_start_a_fresh_pool(lives: Lives, again: Callable[[Lives], Any]) -> None:
    await lives.begin()
    old = await lives.worker()
    await lives.commit(old, CHAIN)
    old.close()
    worker = await again(lives)
    assert worker.pool_id not in ("", old.pool_id)
    assert lives.node is not None
    assert lives.node.status().committed_blocks == 0
    await lives.commit(worker, CHAIN)


async def test_a_block_that_changed_is_computed_again(lives: Lives) -> None:
    await lives.begin()
    worker = await lives.worker()
    slots = await lives.commit(worker, CHAIN)
    worker.memory[slots[3] * BLOCK_BYTES] ^= 1
    node = await lives.begin()
    await lives.renew(worker)
    assert await lives.hits(worker, CHAIN) == 3
    await until("all to be looked at", lambda: not node.status().surviving_blocks)
    assert node.status().free_blocks == NUM_SLOTS - 3
    await lives.commit(worker, CHAIN)


async def test_a_worker_of_an_older_version_ends_the_keeping(lives: Lives) -> None:
    """It takes no place, so whether it still writes is unknown."""
    await lives.begin()
    worker = await lives.worker()
    await lives.commit(worker, CHAIN)
    with socket.socket(socket.AF_UNIX) as old:
        old.settimeout(WITHIN_S)
        old.connect(lives.flags.attach_socket)
        hello = AttachHello(component_id="old", role="decode", block_bytes=BLOCK_BYTES, namespace=NAMESPACE)
        old.sendall(line_to_bytes(hello))
        line = await asyncio.to_thread(old.recv, 4096)
        assert not attach_reply_from_line(line).pool_id
        worker.close()
        await lives.begin()
        assert await lives.hits(await lives.worker(), CHAIN) == 0


async def test_a_restarted_keeper_gets_the_pool_again(short_folder: str) -> None:
    """Without a keeper the node serves, and its pool would end with it."""
    async with ended(Lives(short_folder, f"{short_folder}/keeper.sock")) as lives:
        await lives.begin()
        worker = await lives.worker()
        await lives.begin()
        with pytest.raises(ConfigError, match="is gone"):
            await lives.renew(worker)
        worker = await lives.worker()
        with running_keeper(lives.flags.keeper_socket):
            await lives.commit(worker, CHAIN)
        assert lives.node is not None
        life = lives.node.pool.survival
        await until("the node to miss the keeper", life._keeper.lost)
        with running_keeper(lives.flags.keeper_socket):
            await until("the new keeper to have the pool", lambda: not life._keeper.lost())
            await lives.begin()
            await lives.renew(worker)
            assert await lives.hits(worker, CHAIN) == 6


async def test_a_stopping_node_hands_its_pool_to_a_new_keeper(
    short_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade replaces the keeper and then the node, between two checks of the node for its keeper."""
    async with ended(Lives(short_folder, f"{short_folder}/keeper.sock")) as lives:
        with running_keeper(lives.flags.keeper_socket):
            await lives.begin()
            worker = await lives.worker()
            await lives.commit(worker, CHAIN)
            monkeypatch.setattr(survival, "KEEPER_POLL_S", 10 * WITHIN_S)
            await lives.begin()
            await lives.renew(worker)
            await lives.safe()
        with running_keeper(lives.flags.keeper_socket):
            await lives.begin()
            await lives.renew(worker)
            assert await lives.hits(worker, CHAIN) == 6


def test_memory_is_freed_with_its_last_user(short_folder: str) -> None:
    """No file has a name, and nothing remains after the keeper; until then everything can be recovered."""
    with running_keeper(f"{short_folder}/keeper.sock") as keeper:
        check_kept_memory(PoolKeeper(f"{short_folder}/keeper.sock"), keeper)


def sizes(client: PoolKeeper) -> list[int]:
    """Return the sizes of the memory kept for one node."""
    kept = client.take("kv-a")
    assert kept is not None
    try:
        return [os.fstat(descriptor).st_size for descriptor in kept.memories]
    finally:
        kept.close()


def check_kept_memory(client: PoolKeeper, keeper: subprocess.Popen[bytes]) -> None:
    segments = [OwnedSegment(1 << 20), OwnedSegment(4096)]
    client.keep("kv-a", [segment.fileno() for segment in segments])
    with map_shared(segments[0].fileno(), 5) as mapped:
        mapped[:5] = b"hello"
    for segment in segments:
        segment.close()
    assert sizes(client) == [1 << 20, 4096]
    kept = client.take("kv-a")
    assert kept is not None
    with map_shared(kept.memories[0], 5) as mapped:
        assert mapped[:] == b"hello"
    kept.close()
    assert client.take("kv-b") is None
    again = [OwnedSegment(8192), OwnedSegment(4096)]
    client.keep("kv-a", [segment.fileno() for segment in again])
    assert sizes(client) == [8192, 4096]
    with pytest.raises(Unavailable, match="1 of a pool and 0 of processes were announced"):
        client.keep("kv-a", [again[0].fileno()])
    client.keep("kv-b", [segment.fileno() for segment in again])
    client.drop("kv-b")
    assert client.take("kv-b") is None
    for segment in again:
        segment.close()
    # Two descriptors for each name, the listening socket and a connection: what was replaced is closed.
    held = [os.readlink(f"/proc/{keeper.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{keeper.pid}/fd")]
    assert len([name for name in held if "memfd" in name]) == 2
    keeper.kill()
    keeper.wait()
    assert client.lost()
    with pytest.raises(Unavailable):
        client.take("kv-a")


def test_a_user_lock_lasts_as_long_as_the_mapping() -> None:
    segment = OwnedSegment(8192)
    assert segment.own()
    worker = reopened(segment.fileno())
    lock_place(worker, 2**62)
    assert segment.users() == {2**62}
    with map_shared(worker, 8192):
        os.close(worker)
        assert segment.users() == {2**62}, "it may still write"
        other = OwnedSegment.from_descriptor(os.dup(segment.fileno()))
        assert not other.own(), "one node at a time"
        assert locked_places(other.fileno()) == {2**62}
        other.close()
    assert segment.users() == set()
    assert OWNER not in segment.users()
    segment.close()


def test_all_users_of_a_segment_are_found() -> None:
    segment, chance = OwnedSegment(4096), random.Random(5)
    assert segment.own()
    places = {1, 2, 2**62, *(chance.randrange(3, 2**62) for _ in range(40))}
    with contextlib.ExitStack() as stack:
        for place in chance.sample(sorted(places), len(places)):
            lock_place(stack.enter_context(os.fdopen(reopened(segment.fileno()))).fileno(), place)
        assert segment.users() == places
    segment.close()


def test_unknown_shared_memory_is_not_recovered(short_folder: str) -> None:
    descriptor = os.open(f"{short_folder}/file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(ConfigError, match="does not belong to a KV node"):
        OwnedSegment.from_descriptor(descriptor)
    plain = os.memfd_create("plain")
    with pytest.raises(ConfigError, match="does not belong to a KV node"):
        OwnedSegment.from_descriptor(plain)
