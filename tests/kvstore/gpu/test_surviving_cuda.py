"""A KV node with its pool on GPUs that starts over the pool of its previous process: a real keeper, and real processes
where the kernel has to prove their end. Without a GPU the fake driver is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from lab.testbed import fake_cuda
from lab.testbed.conditions import until
from lab.testbed.fake_cuda import NATIVE
from pillion.errors import ConfigError
from pillion.kvstore.gpu import cuda_driver
from pillion.kvstore.gpu.cuda_domain import CudaDomain
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.hashing import chain_hashes
from pillion.kvstore.pool_survival import surviving_pool
from pillion.kvstore.pool_survival.owned_segment import OwnedSegment
from pillion.kvstore.pool_survival.slot_table import ENTRY_WORDS, HEADER_WORDS
from pillion.kvstore.pool_survival.surviving_pool import table_words
from tests.support.kv_hosts import BLOCK_BYTES, NUM_SLOTS, ROOT, read_slot, write_slot
from tests.support.node_lives import Lives, ended, killed_and_recovered, running_keeper, shared_keeper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the locks of open files are Linux's")

CHAIN = chain_hashes(ROOT, range(6), 1)
# A worker that does not notice its node's end. It may give up its place and live on, as one does that dies.
WORKER = """
import os, sys
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.gpu.mapped_memory import map_pool
a = attach(sys.argv[1], component_id="other", role="decode", block_bytes=8192, timeout_s=60, namespace="ab" * 32,
           map_device=map_pool)
if sys.argv[2] == "unlocked":
    os.close(a._place_fds.pop())
print(a.pool_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")


@pytest.fixture(scope="module")
def keeper_socket() -> Iterator[str]:
    """One keeper for all nodes here, each with its own name. It loads no CUDA driver."""
    with shared_keeper() as path:
        yield path


@pytest.fixture
async def lives(short_folder: str, keeper_socket: str) -> AsyncIterator[Lives]:
    async with ended(Lives(short_folder, keeper_socket, kv_device="cuda")) as made:
        yield made


def two() -> str:
    """Return the --kv-device of two shards."""
    return f"cuda:0,cuda:{min(1, CudaDriver().count() - 1)}"


def is_kept(lives: Lives) -> bool:
    kept = lives.kept()
    if kept is not None:
        kept.close()
    return kept is not None


@contextlib.contextmanager
def table_of(lives: Lives) -> Iterator[memoryview]:
    """Return the words of the kept table."""
    kept = lives.kept()
    assert kept is not None
    with (
        contextlib.closing(kept),
        contextlib.closing(OwnedSegment.from_descriptor(os.dup(kept.memories[-1]))) as table,
        table_words(table) as words,
    ):
        yield words


@contextlib.contextmanager
def other_worker(lives: Lives, how: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", WORKER, lives.flags.attach_socket, how]
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=fake_cuda.environment())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_blocks_outlive_a_node_that_is_killed(lives: Lives, shards: int) -> None:
    lives.flags = lives.flags if shards == 1 else lives.of(kv_device=two())
    await killed_and_recovered(lives, fake_cuda.environment(), CHAIN)


async def test_a_surviving_pool_keeps_its_size(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --kv-pool-bytes a fresh pool gets the free memory, which a kept one reduces."""
    monkeypatch.setenv("FAKE_CUDA_TOTAL_BYTES", str(2**26))
    lives.flags = lives.of(kv_pool_bytes=0, gpu_memory_utilization=0.25 if not NATIVE else 0.9)
    await lives.begin()
    worker = await lives.worker()
    await lives.commit(worker, CHAIN)
    monkeypatch.setenv("FAKE_CUDA_USED_BYTES", str(2**25))
    node = await lives.begin()
    await lives.renew(worker)
    assert await lives.hits(worker, CHAIN) == 6
    assert node.status().committed_blocks + node.status().free_blocks == worker.num_slots


async def test_torn_or_changed_blocks_are_recomputed(lives: Lives) -> None:
    lives.flags = lives.of(kv_device=two())
    await lives.begin()
    worker = await lives.worker()
    slots = await lives.commit(worker, CHAIN)
    write_slot(worker, slots[4], read_slot(worker, slots[4])[:-1] + b"?")
    await lives.end()
    node = await lives.begin()
    await lives.renew(worker)
    assert await lives.hits(worker, CHAIN) == 4
    await until("all to be looked at", lambda: not node.status().surviving_blocks)
    assert node.status().free_blocks == NUM_SLOTS - 4
    await lives.commit(worker, CHAIN)
    (committed,) = (block for block in node.pool.ledger.tree.by_hash.values() if block.hash == CHAIN[64:96])
    await lives.end()
    with table_of(lives) as words:
        words[HEADER_WORDS + committed.slot * ENTRY_WORDS + 1] ^= 1
    node = await lives.begin()
    await lives.renew(worker)
    assert await lives.hits(worker, CHAIN) == 2
    await until("all to be looked at", lambda: not node.status().surviving_blocks)
    assert node.status().committed_blocks == 2
    node.check_integrity()


FAKE_ONLY = pytest.mark.skipif(NATIVE, reason="this asks for two GPUs of the fake driver")


@pytest.mark.parametrize("changed", ["shards", pytest.param("gpu", marks=FAKE_ONLY), "size", "model"])
async def test_changed_flags_start_a_fresh_pool_and_drop_the_old_one(
    lives: Lives, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lives.begin()
    old = await lives.worker()
    await lives.commit(old, CHAIN)
    flags: dict[str, Any] = {
        "shards": {"kv_device": "cuda:0,cuda:0"},
        "gpu": {"kv_device": "cuda:1"},
        "size": {"kv_pool_bytes": (NUM_SLOTS + 1) * BLOCK_BYTES},
        "model": {},
    }[changed]
    namespace = "cd" * 32 if changed == "model" else "ab" * 32
    if changed == "size":
        # What this worker holds is what a fresh pool would need.
        monkeypatch.setenv("FAKE_CUDA_TOTAL_BYTES", str(3 * 2**20))
        await lives.begin(**flags)
        with pytest.raises(ConfigError, match="is gone"):
            await lives.renew(old)
        assert lives.node is not None
        assert not lives.node.pool.shaped
        assert not is_kept(lives)
    old.close()
    node = await lives.begin(**flags)
    worker = await lives.worker(namespace)
    assert worker.pool_id not in ("", old.pool_id)
    assert node.status().committed_blocks == 0
    await lives.commit(worker, CHAIN)


@pytest.mark.parametrize("how", ["locked", "unlocked"])
async def test_only_the_exit_of_a_process_proves_that_it_stopped_writing(lives: Lives, how: str) -> None:
    """A place may be free before the GPU's file is closed, and a kernel may run until then."""
    await lives.begin()
    worker = await lives.worker()
    with other_worker(lives, how) as other:
        assert other.stdout is not None
        assert (await asyncio.to_thread(other.stdout.readline)).strip() == worker.pool_id
        await lives.commit(worker, CHAIN)
        await lives.end()
        other.send_signal(signal.SIGSTOP)
        node = await lives.begin()
        coming = asyncio.create_task(lives.renew(worker))
        await until("the node to know that this worker has drained", lambda: node._memory.drained)
        for _ in range(10):
            await asyncio.sleep(surviving_pool.POLL_S)
        assert not node.pool.shaped
        other.kill()
        await coming
        assert await lives.hits(worker, CHAIN) == 6


async def test_a_stopped_worker_prevents_sharing_its_pool(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surviving_pool, "PATIENCE_S", 0.0)
    await lives.begin()
    worker = await lives.worker()
    with other_worker(lives, "locked") as other:
        assert other.stdout is not None
        await asyncio.to_thread(other.stdout.readline)
        await lives.commit(worker, CHAIN)
        other.send_signal(signal.SIGSTOP)
        await lives.begin()
        with pytest.raises(ConfigError, match="is gone"):
            await lives.renew(worker)
        worker.close()
        fresh = await lives.worker()
        assert fresh.pool_id != worker.pool_id
        assert await lives.hits(fresh, CHAIN) == 0


async def test_the_pool_of_a_multi_process_worker_does_not_survive(lives: Lives) -> None:
    await lives.begin()
    worker = await lives.worker(processes=2)
    assert not worker.pool_id
    await until("the keeper to hold none of the GPU's memory", lambda: not is_kept(lives))
    worker.close()
    await lives.begin()
    assert (await lives.worker()).pool_id


async def test_a_missing_keeper_means_a_fresh_start(short_folder: str) -> None:
    made = Lives(short_folder, f"{short_folder}/keeper.sock", kv_device="cuda")
    async with ended(made) as lives:
        with running_keeper(lives.flags.keeper_socket):
            await lives.begin()
            worker = await lives.worker()
            await lives.commit(worker, CHAIN)
        node = await lives.begin()
        with pytest.raises(ConfigError, match="is gone"):
            await lives.renew(worker)
        assert not node.pool.shaped
        worker.close()
        assert await lives.hits(await lives.worker(), CHAIN) == 0


async def test_a_surviving_pool_makes_room_for_weights(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive before the first worker attaches; no worker can serve without them."""
    await lives.begin()
    (await lives.worker()).close()
    await until("the keeper to have the pool", lambda: is_kept(lives))
    node = await lives.begin()
    segment = CudaDomain.segment

    def crowded(domain: CudaDomain, size_bytes: int, shard: int = 0) -> Any:
        if is_kept(lives):
            raise ConfigError("the GPU is full")
        return segment(domain, size_bytes, shard)

    monkeypatch.setattr(CudaDomain, "segment", crowded)
    (await node._memory.region(2**21)).close()
    assert not is_kept(lives)
    assert (await lives.worker()).pool_id
