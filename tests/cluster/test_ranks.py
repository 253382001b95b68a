"""Workers of 1, 2 and 4 processes hand each other the KV of a prompt, and lose nothing with a process.

One pool, a prefill worker and a decode worker of each size, real ranks; a gateway that sees one pair of them at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import PATIENT_MS
from lab.testbed.conditions import within
from lab.testbed.tiny_model import save_model
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags
from pillion.decode_service.assemble import start_decode
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.worker.worker_server import WorkerServer
from pillion.gateway.assemble import model_entry
from pillion.gateway.gateway import Gateway
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.node.kv_node import KVNode
from pillion.prefill_service.assemble import start_prefill
from pillion.types import Delta, GenerateRequest, SamplingParams
from tests.support.cpu_model import needs_kernels
from tests.support.oracle import Oracle, first_difference
from tests.support.shown_workers import ShownWorkers, at_rest

pytestmark = [pytest.mark.long, pytest.mark.cluster, needs_kernels, pytest.mark.usefixtures("forked_ranks")]

SIZES = (1, 2, 4)
PAIRS = list(itertools.product(SIZES, SIZES))
EPSILON = 2e-3
BLOCK = 16
PROMPT = tuple(2 + (position * 104729) % 256 for position in range(85))
# Worker of the stopped rank, and the step of the stop.
HANGS, HANGS_AT_STEP = "decode-2", 20
WHOLE_BLOCKS = len(PROMPT) // BLOCK * BLOCK


@dataclass
class RankedCluster:
    """The workers by name, such as "decode-2", and what gateways serve."""

    node: KVNode
    workers: dict[str, WorkerServer]
    name: str
    entry: Any

    @contextlib.asynccontextmanager
    async def gateway(self, *names: str) -> AsyncIterator[tuple[Gateway, ShownWorkers]]:
        """Return a gateway that sees these workers, and its registry."""
        registry = ShownWorkers(self.node, self.workers, set(names))
        async with registry.gateway(self.name, self.entry, 2 * BLOCK) as gateway:
            yield gateway, registry


async def stream(gateway: Gateway, salt: str, max_tokens: int = 12) -> AsyncIterator[Delta]:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    request = GenerateRequest(token_ids=PROMPT, sampling=sampling, cache_salt=salt)
    async for delta in await gateway.generate(request):
        yield delta


async def answer(gateway: Gateway, salt: str) -> tuple[list[int], Delta]:
    deltas = [delta async for delta in stream(gateway, salt)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


@contextlib.asynccontextmanager
async def running(folder: pathlib.Path, model: pathlib.Path) -> AsyncIterator[RankedCluster]:
    async with contextlib.AsyncExitStack() as stack:
        common = {"heartbeat_ms": 100, "heartbeat_timeout_ms": PATIENT_MS, "attach_socket": str(folder / "a.sock")}
        shape: dict[str, Any] = {"model": str(model), "dtype": "float32", "block_size": BLOCK, "max_model_len": 512}
        node = await start_kvnode(KVNodeFlags(**common, node_listen=f"unix:{folder}/k.sock", kv_pool_bytes=2**23))
        stack.push_async_callback(node.stop)
        workers: dict[str, WorkerServer] = {}
        roles = (("prefill", PrefillFlags, start_prefill), ("decode", DecodeFlags, start_decode))
        for (role, flags, start), size in itertools.product(roles, SIZES):
            own = {"component_id": f"{role}-{size}", "listen": f"unix:{folder}/{role}{size}.sock"}
            worker = await start(
                flags(**common, **shape, **own, cpu_threads=max(1, size // 2), tensor_parallel_size=size)
            )
            stack.push_async_callback(worker.stop, 0.0)
            workers[f"{role}-{size}"] = worker
        prepared = prepare(GatewayFlags(**shape))
        entry = await asyncio.to_thread(model_entry, prepared, GatewayFlags(**shape))
        yield RankedCluster(node, workers, prepared.name, entry)


async def check_pairs(cluster: RankedCluster, expected: Any) -> None:
    """Each pair with its own prompt and that of the previous pair: blocks of any size serve any size."""
    for number, (prefill, decode) in enumerate(PAIRS):
        async with cluster.gateway(f"prefill-{prefill}", f"decode-{decode}") as (gateway, _):
            for salt in range(max(0, number - 1), number + 1):
                tokens, last = await answer(gateway, f"salt {salt}")
                assert first_difference(expected, tokens, EPSILON) == "", (prefill, decode, salt)
                cold = salt == number
                assert last.timings is not None
                assert last.usage is not None
                assert last.timings.decode_worker == f"decode-{decode}"
                assert last.timings.prefill_worker == (f"prefill-{prefill}" if cold else "")
                assert last.usage.cached_tokens == (0 if cold else WHOLE_BLOCKS)
                assert last.timings.prefilled_tokens == (WHOLE_BLOCKS if cold else 0)


async def check_stopped_rank(cluster: RankedCluster, expected: Any) -> None:
    """A rank that hangs ends its worker with all its ranks, and its stream goes on at a worker of another size."""
    hanging = cluster.workers[HANGS]
    ranks, backend, launched = hanging.worker.model.ranks, hanging.worker.model.backend, itertools.count(1)
    assert ranks is not None
    launch = backend.launch

    def launch_and_hang(*step: Any) -> Any:
        """Stop the rank amid the answer, which gets at most one token per step."""
        if next(launched) == HANGS_AT_STEP:
            os.kill(ranks.pids()[0], signal.SIGSTOP)
        return launch(*step)

    tokens: list[int] = []
    last: Delta | None = None
    async with cluster.gateway(HANGS) as (gateway, registry):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "launch", launch_and_hang)
            moving = asyncio.create_task(move(registry, hanging))
            async for last in stream(gateway, "a rank hangs", len(expected.tokens)):
                tokens += last.token_ids
            await within("the worker's failure and end", moving)
    assert first_difference(expected, tokens, EPSILON) == ""
    assert last is not None
    assert last.timings is not None
    assert last.timings.replays >= 1
    assert last.timings.decode_worker == "decode-4"
    ranks.check_integrity()


async def move(registry: ShownWorkers, hanging: WorkerServer) -> None:
    """Check the worker's process, its supervisor and the registry after its failure."""
    assert "rank" in await hanging.wait_failed()
    registry.shown = {"decode-4"}
    await hanging.stop(0.0)


async def test_prefill_and_decode_workers_of_all_sizes_share_blocks(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_model(tmp_path_factory.mktemp("model") / "m", num_attention_heads=8, num_key_value_heads=4)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(model))
    expected, longer = oracle.greedy(PROMPT, 12), oracle.greedy(PROMPT, 200)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        async with running(pathlib.Path(folder), model) as cluster:
            await check_pairs(cluster, expected)
            await check_stopped_rank(cluster, longer)
            await at_rest(cluster.node)
