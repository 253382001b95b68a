"""Prefill workers of several stages on GPUs, as real processes at a real KV node: the blocks of one process, outputs of
transformers, and a stage that dies. Without a GPU, Triton's interpreter computes, over a fake driver."""

from __future__ import annotations

from tests.support.gpu import DEVICE, NATIVE  # isort: skip  (before the kernels)

import asyncio
import contextlib
import os
import pathlib
import signal
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from lab.testbed import cluster, fake_cuda
from lab.testbed.random_adapter import random_adapter
from lab.testbed.tiny_model import save_model
from pillion import Client
from pillion.config import KVNodeFlags, PrefillFlags
from pillion.engine.adapters.adapter_weights import bits_of
from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.gpu import gpu_devices as devices
from pillion.engine.backends.gpu.device_memory import tensor_at
from pillion.engine.load_model import load_model
from pillion.engine.models.config_parser import load_config
from pillion.engine.stages.staged_backend import StagedBackend
from pillion.kernels.step import SamplingRows
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.gpu import cuda_driver
from pillion.kvstore.node.kv_node import KVNode
from tests.gpu.test_cluster import ANSWER_TOKENS, SHAPE, SMALL, expected
from tests.support.batches import Sequences
from tests.support.families import tokens_of

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(480), pytest.mark.usefixtures("own_cache")]

BLOCK, SLOTS = 16, 24
TEXT = tokens_of(100, 7)
NO_ROWS = SamplingRows.of((), (), ())


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, request):
    """Prepare the environment of this process and of those that it starts: one GPU."""
    for name, value in fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    monkeypatch.setattr(cluster, "READY_TIMEOUT_S", 200.0)
    if not NATIVE:
        request.getfixturevalue("forked_ranks")
    devices.device_count.cache_clear()
    yield
    devices.device_count.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=3)


@contextlib.asynccontextmanager
async def node_on(kv_device: str) -> AsyncIterator[tuple[KVNode, dict[str, Any]]]:
    """A KV node, and the flags that its workers have in common with it."""
    with tempfile.TemporaryDirectory(prefix="pil-") as place:
        common = {"attach_socket": f"{place}/a.sock", "heartbeat_timeout_ms": 60_000}
        flags = KVNodeFlags(node_listen=f"unix:{place}/k.sock", kv_device=kv_device, kv_pool_bytes=2**21, **common)
        node = await start_kvnode(flags)
        try:
            yield node, common
        finally:
            await node.stop()


class AttachedStages:
    """A loaded model, attached to a node without being a worker, so that a test may run its steps."""

    def __init__(self, folder: pathlib.Path, common: dict[str, Any], stages: int, ranks: int) -> None:
        flags = PrefillFlags(
            model=str(folder),
            device="cuda",
            dtype="float32",
            max_model_len=256,
            max_num_batched_prefill_tokens=48,
            pipeline_parallel_size=stages,
            tensor_parallel_size=ranks,
            enable_lora=True,
            **common,
        )
        self.model = load_model(flags, 1)
        self.backend: Any = self.model.backend
        self.backend.bind_adapters(2, 16)
        name, size = f"prefill-{stages}x{ranks}", self.backend.layout.block_bytes
        self.attachment = attach(
            flags.attach_socket,
            component_id=name,
            role="prefill",
            block_bytes=size,
            timeout_s=60,
            map_device=self.model.map_device,
        )
        self.model.bind_pool(self.attachment)
        self.backend.warm_up(BLOCK)
        weights = random_adapter(load_config(self.model.prepared.folder), 1, (5, 9, 16), torch.float32)
        about, data = self.backend.adapters.form().pack(bits_of(weights))
        self.backend.adapters.place(1, self.backend.adapters.build("adapter 1", about, data))

    def run(self) -> bytes:
        """Compute a prompt in chunks, alone and with an adapter, launching steps as early as possible. Return the
        blocks of both."""
        memory = tensor_at(self.attachment.pool, DEVICE)[: SLOTS * self.backend.layout.block_bytes]
        memory.zero_()
        sequences, under_way = Sequences(SLOTS, BLOCK), []
        numbers = [sequences.add(adapter=slot)[0] for slot in (-1, 1)]
        for begin in range(0, len(TEXT), 24):
            batch = sequences.step([(number, TEXT[begin : begin + 24]) for number in numbers], ())
            if len(under_way) == self.backend.max_steps_in_flight:
                under_way.pop(0).wait()
            under_way.append(self.backend.launch(batch, (), NO_ROWS))
        for step in under_way:
            step.wait()
        table = batch.block_tables[:, : len(TEXT) // BLOCK].flatten().tolist()
        return memory.view(SLOTS, -1)[table].cpu().numpy().tobytes()

    def close(self) -> None:
        self.backend.close()
        self.attachment.close()


def check_end(loaded: AttachedStages) -> None:
    """A killed stage ends the worker: the running step, and every later one."""
    backend, processes = loaded.backend, loaded.model.ranks
    assert isinstance(backend, StagedBackend)
    assert processes is not None
    assert min(backend.ranks.clock.work_s) > 0
    lost: list[str] = []
    processes.watch(lost.append)
    sequences = Sequences(SLOTS, BLOCK)
    (number,) = sequences.add()
    os.kill(processes.pids()[-1], signal.SIGKILL)
    with pytest.raises(BackendLost):
        backend.launch(sequences.step([(number, TEXT[:BLOCK])], ()), (), NO_ROWS).wait()
    with pytest.raises(BackendLost):
        backend.launch(sequences.step([(number, TEXT[:BLOCK])], ()), (), NO_ROWS)
    assert len(lost) == 1


async def test_stages_write_the_blocks_of_one_process(folder):
    async with node_on("cuda") as (node, common):
        found = []
        for stages, ranks in ((1, 1), (3, 1)):
            loaded = await asyncio.to_thread(AttachedStages, folder, common, stages, ranks)
            found.append(await asyncio.to_thread(loaded.run))
            if stages > 1:
                await asyncio.to_thread(check_end, loaded)
            await asyncio.to_thread(loaded.close)
        plain, adapted = found[0][: len(found[0]) // 2], found[0][len(found[0]) // 2 :]
        assert found[0] == found[1]
        assert len({plain, adapted, bytes(len(plain))}) == 3
        # Each stage has separate weights, as regions of the node.
        assert len(node.regions.keys) == 1 + 3


# Number of stages of the prefill worker, of ranks per stage, and of visible GPUs.
@pytest.mark.parametrize(("stages", "ranks", "gpus"), [(2, 2, 4)])
def test_a_decode_worker_answers_from_blocks_of_stages(folder, stages, ranks, gpus, monkeypatch):
    """With a GPU per stage, the pool is divided over them. The second request has a prefix hit on the first one."""
    if NATIVE:
        gpus = min(gpus, devices.device_count())
    monkeypatch.setenv("FAKE_CUDA_DEVICES", str(gpus))
    prompt = tokens_of(53, 7)
    flags = ("--device", "cuda", "--prefill-workers", "1", "--split-policy", "disaggregated", *SMALL, *SHAPE)
    sizes = ("--pipeline-parallel-size", str(stages), "--prefill-tensor-parallel-size", str(ranks))
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as place,
        cluster.served(pathlib.Path(place), str(folder), *flags, *sizes, forked=not NATIVE) as served,
    ):
        with Client(served.target) as client:
            options = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
            first, again = (list(client.generate(prompt, **options)) for _ in range(2))
        wanted = expected(folder, prompt)
        for deltas, cached in ((first, 0), (again, 48)):
            assert [token for delta in deltas for token in delta.token_ids] == wanted
            assert deltas[-1].timings.cached_tokens == cached
        assert first[-1].timings.prefilled_tokens == 48
        assert served.node_status().kv_device == (
            "cuda" if gpus == 1 else ",".join(f"cuda:{number}" for number in range(gpus))
        )
    assert not served.left_behind()
