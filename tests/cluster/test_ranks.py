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

from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags
from pillion.decode_service.decode_server import start_decode
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.ranks import rank_processes
from pillion.engine.worker.worker_server import WorkerServer
from pillion.gateway.gateway import Gateway
from pillion.gateway.gateway_server import model_entry
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.request.job import GatewayOptions
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.node.kv_node import KVNode, start_kvnode
from pillion.offline.offline_cluster import EmptyIndex
from pillion.prefill_service.prefill_server import start_prefill
from pillion.types import Delta, GenerateRequest, SamplingParams
from pillion.wire.registry import ComponentRecord
from testbed.cluster import PATIENT_MS
from testbed.conditions import until
from testbed.tiny_model import save_model
from tests.support.cpu_model import needs_kernels
from tests.support.oracle import Oracle, first_difference

pytestmark = [pytest.mark.long, pytest.mark.cluster, needs_kernels]

SIZES = (1, 2, 4)
PAIRS = list(itertools.product(SIZES, SIZES))
EPSILON = 2e-3
BLOCK = 16
PROMPT = tuple(2 + (position * 104729) % 256 for position in range(85))
# The worker of which a rank is stopped in the end.
HANGS = "decode-2"
WHOLE_BLOCKS = len(PROMPT) // BLOCK * BLOCK


class ShownWorkers:
    """The registry of a gateway that shall see some workers only: those whose names are in ``shown``."""

    refusal = ""

    def __init__(self, node: KVNode, workers: dict[str, WorkerServer], shown: set[str]) -> None:
        self.node, self.workers, self.shown = node, workers, shown

    async def components(self) -> list[ComponentRecord]:
        return [self.node.record(0), *(self.workers[name].worker.describe() for name in self.shown)]

    async def aclose(self) -> None:
        pass


@dataclass
class RankedCluster:
    """The workers by name, such as "decode-2", and what gateways serve."""

    node: KVNode
    workers: dict[str, WorkerServer]
    name: str
    entry: Any

    @contextlib.asynccontextmanager
    async def gateway(self, *names: str) -> AsyncIterator[tuple[Gateway, ShownWorkers]]:
        """A gateway that sees these workers, and its registry."""
        registry = ShownWorkers(self.node, self.workers, set(names))
        view = Cluster("gateway", registry, EmptyIndex(), 60.0)
        options = GatewayOptions(
            policy=parse_policy("disaggregated"),
            chunk_tokens=2 * BLOCK,
            max_attempts=8,
            max_inflight_requests=4,
            max_inflight_tokens=4096,
            prefix_caching=True,
        )
        gateway = Gateway({self.name: self.entry}, view, options)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(view.aclose)
            stack.push_async_callback(gateway.aclose)
            await view.start()
            await until("the gateway to be ready", lambda: not gateway.not_ready())
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
            with pytest.MonkeyPatch.context() as patch:
                if f"{role}-{size}" == HANGS:
                    # Its ranks wait for each other by the value of the start.
                    patch.setattr(rank_processes, "STEP_SILENCE_MS", 8_000)
                worker = await start(
                    flags(**common, **shape, **own, cpu_threads=max(1, size // 2), tensor_parallel_size=size)
                )
            stack.push_async_callback(worker.stop, 0.0)
            workers[f"{role}-{size}"] = worker
        prepared = prepare(GatewayFlags(**shape))
        entry = await asyncio.to_thread(model_entry, prepared, GatewayFlags(**shape))
        yield RankedCluster(node, workers, prepared.name, entry)


async def check_pairs(cluster: RankedCluster, expected: Any) -> None:
    """Each pair with a prompt of its own, and with that of the pair before: the blocks of any size serve any size."""
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
    ranks = hanging.worker.model.ranks
    assert ranks is not None
    tokens: list[int] = []
    last: Delta | None = None
    async with cluster.gateway(HANGS) as (gateway, registry):
        async for last in stream(gateway, "a rank hangs", len(expected.tokens)):
            if not tokens:
                os.kill(ranks.pids()[0], signal.SIGSTOP)
                moving = asyncio.create_task(move(registry, hanging))
            tokens += last.token_ids
        await moving
    assert first_difference(expected, tokens, EPSILON) == ""
    assert last is not None
    assert last.timings is not None
    assert last.timings.replays >= 1
    assert last.timings.decode_worker == "decode-4"
    ranks.check_integrity()


async def move(registry: ShownWorkers, hanging: WorkerServer) -> None:
    """What the process of a worker, its supervisor and the registry do when it has failed."""
    assert "rank" in await hanging.wait_failed()
    registry.shown = {"decode-4"}
    await hanging.stop(0.0)


async def at_rest(node: KVNode) -> None:
    """Returns when no request holds anything; what is leased is the stock of workers that live."""
    client = NodeClient(node.address, "test")

    async def nothing_held() -> bool:
        await client.check_integrity()
        books = await client.status()
        return not (books.pinned_blocks or books.tickets or books.reserved_blocks or books.quarantined_blocks)

    await until("the return of every slot and ticket", nothing_held)
    await client.aclose()


async def test_every_size_feeds_every_size(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_model(tmp_path_factory.mktemp("model") / "m", num_attention_heads=8, num_key_value_heads=4)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(model))
    expected, longer = oracle.greedy(PROMPT, 12), oracle.greedy(PROMPT, 200)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        async with running(pathlib.Path(folder), model) as cluster:
            await check_pairs(cluster, expected)
            await check_stopped_rank(cluster, longer)
            await at_rest(cluster.node)
