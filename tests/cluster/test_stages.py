"""Prefill workers of several stages, real processes at a real KV node: the blocks of one process, adapters, answers of
transformers, and a stage that dies in a prompt."""

from __future__ import annotations

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
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import PATIENT_MS
from lab.testbed.conditions import until, within
from lab.testbed.random_adapter import random_adapter
from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags
from pillion.decode_service.assemble import start_decode
from pillion.engine.adapters.adapter_weights import bits_of
from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import load_model
from pillion.engine.models.config_parser import load_config
from pillion.engine.stages.staged_backend import StagedBackend
from pillion.engine.worker.worker_server import WorkerServer
from pillion.errors import Internal
from pillion.gateway.assemble import model_entry
from pillion.gateway.gateway import Gateway
from pillion.kernels.step import SamplingRows
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.node.kv_node import KVNode
from pillion.observability import metric_catalog as names
from pillion.prefill_service.assemble import start_prefill
from pillion.settings.speculative_config import parse_speculative_config
from pillion.types import Delta, GenerateRequest, SamplingParams
from tests.support.batches import Sequences
from tests.support.cpu_model import needs_kernels
from tests.support.oracle import Oracle, first_difference
from tests.support.shown_workers import ShownWorkers, at_rest

pytestmark = [pytest.mark.cluster, needs_kernels, pytest.mark.usefixtures("forked_ranks")]

BLOCK = 16
SLOTS = 64
PROMPT = tuple(2 + (position * 104729) % 256 for position in range(213))
WHOLE_BLOCKS = len(PROMPT) // BLOCK * BLOCK
EPSILON = 2e-3
NO_ROWS = SamplingRows.of((), (), ())
# By prefill worker: stages, ranks per stage.
SHAPES = {"prefill-2": (2, 1), "prefill-3": (3, 1), "prefill-2x2": (2, 2)}


def shape_of(model: pathlib.Path) -> dict[str, Any]:
    return {"model": str(model), "dtype": "float32", "block_size": BLOCK, "max_model_len": 512}


@contextlib.asynccontextmanager
async def node_in(folder: pathlib.Path) -> AsyncIterator[tuple[KVNode, dict[str, Any]]]:
    """Run a KV node; yield the flags shared by its workers."""
    common = {"heartbeat_ms": 100, "heartbeat_timeout_ms": PATIENT_MS, "attach_socket": str(folder / "a.sock")}
    node = await start_kvnode(KVNodeFlags(**common, node_listen=f"unix:{folder}/k.sock", kv_pool_bytes=2**23))
    try:
        yield node, common
    finally:
        await node.stop()


class Loaded:
    """A loaded model attached to a node without being a worker, so that a test can run its steps."""

    def __init__(self, flags: PrefillFlags, role: str) -> None:
        self.model: LoadedModel = load_model(flags, 2)
        self.backend: Any = self.model.backend
        self.backend.bind_adapters(2, 16)
        self.attachment: Attachment = attach(
            flags.attach_socket,
            component_id=role,
            role="prefill",
            block_bytes=self.backend.layout.block_bytes,
            timeout_s=60.0,
        )
        self.model.bind_pool(self.attachment)
        self.backend.warm_up(BLOCK)

    def place(self, slot: int) -> None:
        """Put a random adapter into a slot: pack it, send it to all processes, place it."""
        weights = random_adapter(load_config(self.model.prepared.folder), slot, (5, 9, 16), torch.float32)
        about, data = self.backend.adapters.form().pack(bits_of(weights))
        self.backend.adapters.place(slot, self.backend.adapters.build(f"adapter {slot}", about, data))

    def run(self) -> bytes:
        """Prefill a prompt in chunks, without and with an adapter, launching steps as early as allowed. Return the
        pool, which was empty before."""
        pool = memoryview(self.attachment.pool).cast("B")[: SLOTS * self.backend.layout.block_bytes]
        pool[:] = bytes(len(pool))
        sequences = Sequences(SLOTS, BLOCK)
        numbers = [sequences.add(adapter=slot)[0] for slot in (-1, 1)]
        under_way: list[Any] = []
        for begin in range(0, len(PROMPT), 40):
            batch = sequences.step([(number, PROMPT[begin : begin + 40]) for number in numbers], ())
            if len(under_way) == self.backend.max_steps_in_flight:
                under_way.pop(0).wait()
            under_way.append(self.backend.launch(batch, (), NO_ROWS))
        for step in under_way:
            step.wait()
        return bytes(pool)

    def close(self) -> None:
        self.backend.close()
        self.attachment.close()


async def test_stages_with_adapters_write_the_blocks_of_one_process(tmp_path: pathlib.Path) -> None:
    """And a stage that is killed ends the worker: the steps under way, and every later one."""
    model = save_model(tmp_path / "m", num_hidden_layers=4)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        async with node_in(pathlib.Path(folder)) as (_, common):
            found = []
            for stages in (1, 2):
                sizes = {"pipeline_parallel_size": stages, "max_num_batched_prefill_tokens": 128}
                flags = PrefillFlags(**common, **shape_of(model), **sizes, enable_lora=True)
                loaded = await asyncio.to_thread(Loaded, flags, f"prefill-{stages}")
                await asyncio.to_thread(loaded.place, 1)
                found.append(await asyncio.to_thread(loaded.run))
                if stages > 1:
                    await asyncio.to_thread(check_end, loaded)
                await asyncio.to_thread(loaded.close)
            assert found[0] == found[1]


def check_end(loaded: Loaded) -> None:
    backend, processes = loaded.backend, loaded.model.ranks
    assert isinstance(backend, StagedBackend)
    assert processes is not None
    readings = {(name, labels): value for name, labels, value in processes.readings()}
    assert readings[names.RANKS, ()] == 2
    assert min(readings[names.STAGE_WORK, (stage,)] for stage in "01") > 0
    assert readings[names.STAGE_WAIT, ("1",)] > 0, "the second stage waits for the first rows"
    sequences = Sequences(SLOTS, BLOCK)
    (number,) = sequences.add()
    with pytest.raises(Internal, match="does not sample"):
        backend.launch(sequences.step([(number, PROMPT[:BLOCK])]), (), NO_ROWS)
    lost: list[str] = []
    processes.watch(lost.append)
    (pid,) = processes.pids()
    os.kill(pid, signal.SIGSTOP)
    step = backend.launch(sequences.step([(number, PROMPT[:BLOCK])], ()), (), NO_ROWS)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(BackendLost, match=r"stage 1 ended with status -9|a stage has ended"):
        step.wait()
    with pytest.raises(BackendLost):
        backend.launch(sequences.step([(number, PROMPT[:BLOCK])], ()), (), NO_ROWS)
    assert len(lost) == 1
    processes.check_integrity()


async def answer(made: Gateway, prompt: tuple[int, ...], salt: str) -> tuple[list[int], Delta]:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
    request = GenerateRequest(token_ids=prompt, sampling=sampling, cache_salt=salt)
    deltas = [delta async for delta in await made.generate(request)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


async def check_answers(made: Gateway, oracle: Oracle, worker: str) -> None:
    """A cold prompt; then one with the same prefix, whose first blocks are cached."""
    for prompt, cached in ((PROMPT, 0), ((*PROMPT[: 6 * BLOCK], *PROMPT[::-1]), 6 * BLOCK)):
        tokens, last = await answer(made, prompt, worker)
        assert first_difference(oracle.greedy(prompt, 12), tokens, EPSILON) == "", (worker, cached)
        assert last.timings is not None
        assert last.usage is not None
        assert (last.timings.prefill_worker, last.usage.cached_tokens) == (worker, cached)


async def check_death(registry: ShownWorkers, made: Gateway, oracle: Oracle, name: str) -> None:
    """A stage is killed while it has a prompt's chunks; the worker ends with all of its processes, as a whole."""
    dying = registry.workers[name]
    processes, backend = dying.worker.model.ranks, dying.worker.model.backend
    assert processes is not None
    assert isinstance(backend, StagedBackend)
    pids = processes.pids()
    os.kill(pids[-1], signal.SIGSTOP)
    asked = asyncio.create_task(answer(made, PROMPT, f"{name} dies"))
    stages = backend.max_steps_in_flight
    await until("as many chunks under way as stages", lambda: backend.ranks.clock.under_way == stages)
    os.kill(pids[-1], signal.SIGKILL)
    assert "stage" in await within("the worker's failure", dying.wait_failed())
    registry.shown = {"decode"}
    await dying.stop(0.0)
    processes.check_integrity()
    tokens, last = await within("the answer", asked)
    assert first_difference(oracle.greedy(PROMPT, 12), tokens, EPSILON) == ""
    assert last.timings is not None
    assert last.timings.decode_worker == "decode"


@pytest.mark.long
async def test_workers_of_every_shape_prefill_for_a_decode_worker(tmp_path: pathlib.Path) -> None:
    model = save_model(tmp_path / "m", num_hidden_layers=4)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(model))
    async with contextlib.AsyncExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pil-")))
        node, common = await stack.enter_async_context(node_in(folder))
        every: dict[str, Any] = {**common, **shape_of(model), "cpu_threads": 1}
        workers: dict[str, WorkerServer] = {}
        for name, (stages, ranks) in SHAPES.items():
            sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
            own = {"component_id": name, "listen": f"unix:{folder}/{name}.sock"}
            budget = {"max_num_batched_prefill_tokens": 2 * BLOCK}
            workers[name] = await start_prefill(PrefillFlags(**every, **own, **sizes, **budget))
            stack.push_async_callback(workers[name].stop, 0.0)
        own = {"component_id": "decode", "listen": f"unix:{folder}/decode.sock"}
        draft_tokens = {
            "speculative_config": parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
        }
        workers["decode"] = await start_decode(DecodeFlags(**every, **own, **draft_tokens))
        stack.push_async_callback(workers["decode"].stop, 0.0)
        shown = GatewayFlags(**shape_of(model))
        prepared = prepare(shown)
        entry = await asyncio.to_thread(model_entry, prepared, shown)
        for name in SHAPES:
            registry = ShownWorkers(node, workers, {name, "decode"})
            async with registry.gateway(prepared.name, entry, 2 * BLOCK) as made:
                await check_answers(made, oracle, name)
                await check_death(registry, made, oracle, name)
        await at_rest(node)
