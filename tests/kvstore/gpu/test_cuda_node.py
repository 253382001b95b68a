"""A node whose pool is on a GPU, with real worker processes: they share memory; the node copies nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from lab.testbed import fake_cuda
from lab.testbed.conditions import WITHIN_S, loop_turns, until
from lab.testbed.fake_cuda import NATIVE, DeviceBytes
from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.gpu import cuda_driver
from pillion.kvstore.gpu.mapped_memory import map_pool
from pillion.kvstore.node.kv_node import KVNode

MIB = 2**20
BLOCK_BYTES = 65536
NUM_SLOTS = 24

# Attaches, writes or reads a slot, says so, and then waits for the parent's end.
WORKER = """
import sys
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.gpu.mapped_memory import map_pool
from lab.testbed.fake_cuda import DeviceBytes
path, what, slot = sys.argv[1:4]
a = attach(path, component_id=what, role="decode", block_bytes=65536, timeout_s=60, map_device=map_pool)
assert len(a.memory) == 0
device = DeviceBytes(a.pool)
if what == "writer":
    device.write(int(slot) * 65536, slot.encode() * 65536)
print(a.epoch, a.num_slots, a.pool.device_index, device.read(int(slot) * 65536, 65536).count(slot.encode()),
      flush=True)
sys.stdin.read()
"""
NODE = """
import asyncio, sys
from pillion.kvstore.assemble import start_kvnode
from pillion.config import KVNodeFlags
async def main():
    flags = KVNodeFlags(node_listen=f"unix:{sys.argv[1]}/node.sock", attach_socket=f"{sys.argv[1]}/attach.sock",
                        kv_device="cuda", kv_pool_bytes=2**21, kv_transport="grpc")
    node = await start_kvnode(flags)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())


@asynccontextmanager
async def running(folder: str, **more: object) -> AsyncIterator[KVNode]:
    flags: dict[str, object] = {
        "node_listen": f"unix:{folder}/node.sock",
        "attach_socket": f"{folder}/attach.sock",
        "kv_device": "cuda",
        "kv_pool_bytes": NUM_SLOTS * BLOCK_BYTES,
        "kv_transport": "grpc",
    }
    node = await start_kvnode(KVNodeFlags(**(flags | more)))  # type: ignore[arg-type]
    try:
        yield node
        node.pool.check_integrity()
    finally:
        await node.stop(0.1)


async def attached(folder: str, block_bytes: int = BLOCK_BYTES) -> Attachment:
    return await asyncio.to_thread(
        attach,
        f"{folder}/attach.sock",
        component_id="w",
        role="decode",
        block_bytes=block_bytes,
        timeout_s=WITHIN_S,
        map_device=map_pool,
    )


@contextlib.contextmanager
def process(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end."""
    command = [sys.executable, "-c", program, *arguments]
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=fake_cuda.environment()
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def words_of(started: subprocess.Popen[str]) -> list[str]:
    assert started.stdout is not None
    return (await asyncio.to_thread(started.stdout.readline)).split()


async def test_one_process_writes_and_another_reads(short_folder: str) -> None:
    path = f"{short_folder}/attach.sock"
    before = 0 if NATIVE else fake_cuda.copied_bytes()
    async with running(short_folder) as node:
        with process(WORKER, path, "writer", "5") as writer:
            epoch, num_slots, index, count = map(int, await words_of(writer))
            assert (num_slots, index, count) == (NUM_SLOTS, 0, BLOCK_BYTES)
            with process(WORKER, path, "reader", "5") as reader:
                other, *rest = map(int, await words_of(reader))
                assert rest == [NUM_SLOTS, 0, BLOCK_BYTES], "the same memory in both processes"
                assert other != epoch
            assert before == (0 if NATIVE else fake_cuda.copied_bytes()), "the node moves no byte"
            assert node.status().kv_device == "cuda"
        await until("all workers to be gone", lambda: not node.pool.ledger.holders)


# Loses its connection as a dying process does, whose kernels may still run; then waits for the parent's end.
DYING = """
import os, sys
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.gpu.mapped_memory import map_pool
a = attach(sys.argv[1], component_id="dying", role="decode", block_bytes=65536, timeout_s=60, map_device=map_pool)
print(a.epoch, flush=True)
sys.stdin.readline()
os.close(a.fileno())
print("closed", flush=True)
sys.stdin.read()
"""


async def test_a_dying_workers_slots_are_freed_at_its_exit(short_folder: str) -> None:
    """The end of its socket does not stop kernels that it launched; the end of its process does (I4)."""
    async with running(short_folder) as node:
        with process(DYING, f"{short_folder}/attach.sock") as worker:
            epoch = int((await words_of(worker))[0])
            assert node.pool.lease(epoch, 5)
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
            assert await words_of(worker) == ["closed"]
            await loop_turns()
            assert node.pool.status().free_blocks == NUM_SLOTS - 5
            worker.kill()
            await until("the slots to be free", lambda: node.pool.status().free_blocks == NUM_SLOTS)


@pytest.mark.parametrize("detaches", [False, True])
async def test_slots_of_a_multi_process_worker_are_freed_after_its_last_exit(short_folder: str, detaches: bool) -> None:
    """A rank that outlives rank 0 for a moment may still end a kernel, whatever became of the connection (I4)."""
    ending = "a.close(); print('closed', flush=True)" if detaches else ""
    program = f"{DYING.split('print')[0]}a.name_processes([int(sys.argv[2])])\nprint(a.epoch, flush=True)\n"
    program += f"sys.stdin.readline()\n{ending}\nsys.stdin.read()"
    async with running(short_folder) as node:
        with (
            process("import sys; print('there', flush=True); sys.stdin.read()") as rank,
            process(program, f"{short_folder}/attach.sock", str(rank.pid)) as worker,
        ):
            assert await words_of(rank) == ["there"]
            epoch = int((await words_of(worker))[0])
            assert node.pool.lease(epoch, 5)
            assert worker.stdin is not None
            if detaches:
                worker.stdin.write("go\n")
                worker.stdin.flush()
                assert await words_of(worker) == ["closed"]
            else:
                worker.kill()
                await until("the end to be seen", lambda: node.pool.status().quarantined_blocks == 5)
                await asyncio.to_thread(worker.wait)
            await loop_turns()
            assert node.pool.status().free_blocks == NUM_SLOTS - 5
            rank.kill()
            await until("the slots to be free", lambda: node.pool.status().free_blocks == NUM_SLOTS)


async def test_a_worker_of_too_many_processes_is_rejected(short_folder: str) -> None:
    async with running(short_folder) as node:
        mine = await attached(short_folder)
        with pytest.raises(ConfigError, match="128 other processes, not 129"):
            mine.name_processes([os.getpid()] * 129)
        mine.close()
        await until("all workers to be gone", lambda: not node.pool.ledger.holders)


async def test_a_worker_attaches_to_a_restarted_node(short_folder: str) -> None:
    async with running(short_folder):
        mine = await attached(short_folder)
    with pytest.raises(Unavailable, match="the KV node is gone"):
        mine.name_processes([os.getpid()])
    mine.close()


async def test_a_worker_that_detaches_frees_its_slots_and_lives_on(short_folder: str) -> None:
    async with running(short_folder) as node:
        with process(
            WORKER.replace("sys.stdin.read()", "a.close(); sys.stdin.read()"),
            f"{short_folder}/attach.sock",
            "reader",
            "0",
        ) as worker:
            await words_of(worker)
            await until("all workers to be gone", lambda: not node.pool.ledger.holders)
            assert worker.poll() is None


async def test_a_killed_worker_frees_its_slots(short_folder: str) -> None:
    async with running(short_folder) as node:
        with process(WORKER, f"{short_folder}/attach.sock", "writer", "3") as worker:
            epoch = int((await words_of(worker))[0])
            assert node.pool.lease(epoch, 5)
            worker.send_signal(signal.SIGSTOP)
            node.pool.ledger.fence(epoch)
            assert node.pool.status().quarantined_blocks == 5, "asleep, not dead: nobody may reuse its slots"
            node.pool.check_integrity()
            worker.kill()
            await until("the slots to be free", lambda: node.pool.status().free_blocks == NUM_SLOTS)
        mine = await attached(short_folder)
        assert not isinstance(mine.pool, memoryview)
        assert DeviceBytes(mine.pool).read(3 * BLOCK_BYTES, 4) == b"3333"
        mine.close()
        await until("all workers to be gone", lambda: not node.pool.ledger.holders)


async def test_a_mapping_outlives_a_killed_node(short_folder: str) -> None:
    with process(NODE, short_folder) as node:
        assert await words_of(node) == ["ready"]
        mine = await attached(short_folder)
        assert not isinstance(mine.pool, memoryview)
        memory = DeviceBytes(mine.pool)
        memory.write(7 * BLOCK_BYTES, b"still here")
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(mine.fileno(), ended.set)
        os.kill(node.pid, signal.SIGKILL)
        async with asyncio.timeout(WITHIN_S):
            await ended.wait()
        await asyncio.to_thread(node.wait)
        asyncio.get_running_loop().remove_reader(mine.fileno())
        assert memory.read(7 * BLOCK_BYTES, 10) == b"still here"
        memory.write(7 * BLOCK_BYTES, b"a step ends")
        mine.close()
        assert mine.pool.address == 0


@pytest.mark.skipif(NATIVE, reason="another one's use of a real GPU cannot be said")
async def test_the_pool_gets_the_remaining_device_memory(short_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_TOTAL_BYTES", str(200 * MIB))
    monkeypatch.setenv("FAKE_CUDA_USED_BYTES", str(1000 * MIB))
    async with running(short_folder, kv_pool_bytes=0, gpu_memory_utilization=0.5) as node:
        with pytest.raises(ConfigError, match=r"no memory is left for KV.*--gpu-memory-utilization 0\.5"):
            await attached(short_folder, MIB)
        # Weights of the first worker came meanwhile, say; what is in use is what counts when it attaches.
        monkeypatch.setenv("FAKE_CUDA_USED_BYTES", str(60 * MIB))
        with pytest.raises(ConfigError, match="one block has"):
            await attached(short_folder, 41 * MIB)
        monkeypatch.setenv("FAKE_CUDA_USED_BYTES", str(70 * MIB))
        first = await attached(short_folder, MIB)
        assert (first.num_slots, node.pool.status().total_blocks) == (30, 30)
        monkeypatch.setenv("FAKE_CUDA_USED_BYTES", str(20 * MIB))
        second = await attached(short_folder, MIB)
        assert second.num_slots == 30, "frozen once it is resolved"
        for worker in (first, second):
            worker.close()
        await until("all workers to be gone", lambda: not node.pool.ledger.holders)


async def test_a_rejected_worker_leaves_the_memory(short_folder: str) -> None:
    free = cuda_driver.CudaDriver().device(0).memory_info()[0]
    async with running(short_folder, kv_pool_bytes=64 * MIB) as node:
        with pytest.raises(ConfigError, match="--kv-pool-bytes"):
            await attached(short_folder, 65 * MIB)
        with pytest.raises(ConfigError, match="at least one byte"):
            await attached(short_folder, 0)
        assert cuda_driver.CudaDriver().device(0).memory_info()[0] > free - 32 * MIB
        worker = await attached(short_folder, 32 * MIB)
        assert worker.num_slots == 2
        assert cuda_driver.CudaDriver().device(0).memory_info()[0] < free - 32 * MIB
        worker.close()
        await until("all workers to be gone", lambda: not node.pool.ledger.holders)
    assert cuda_driver.CudaDriver().device(0).memory_info()[0] > free - 32 * MIB


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kv_device": "cuda:99"}, "no CUDA device 99"),
        ({"kv_device": "gpu"}, "--kv-device 'gpu'"),
        ({"kv_device": "cuda:"}, "--kv-device 'cuda:'"),
        ({"kv_device": "cpu", "host_bytes": 1}, "--host-bytes"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"host_bytes": -1}, "--host-bytes"),
    ],
)
async def test_impossible_node_flags_are_refused(short_folder: str, flags: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        async with running(short_folder, **flags):
            pass
    assert "\n" not in caught.value.message


async def test_a_gpu_node_needs_a_cuda_driver(short_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-nowhere.so.1")
    with pytest.raises(ConfigError, match="no usable CUDA driver"):
        async with running(short_folder):
            pass
