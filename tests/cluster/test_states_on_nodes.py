"""Models with states on two nodes, and below their pools: states move as blocks do, and answers stay transformers'."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import wait_for
from lab.testbed.defaults import NODE
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.faults.points import BY_NAME
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.s3_service import CREDENTIALS, S3Service
from pillion import Client, Delta
from pillion.v1.kvnode_pb2 import NodeStatus
from tests.support.families import make_model, tokens_of
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("own_cache")]

PROMPTS = [tokens_of(70, 2), tokens_of(200, 3), tokens_of(33, 4)]
TOKENS, MORE = 20, tokens_of(20, 9)
# A fetch that times out brings less.
FETCHING = {"fetch_timeout_s": 60.0}
LOW_PERCENT = 20


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        yield pathlib.Path(name)


class StateReader:
    """Reads answers of a cluster, and compares them with transformers."""

    def __init__(self, model: pathlib.Path, cluster: Hosts, target: str) -> None:
        self._oracle = Oracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        self._cluster = cluster
        self.target = target

    def read(self, prompt: list[int], salt: str = "") -> Delta:
        """Return the last message of an answer."""
        options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        with Client(self.target) as client:
            deltas = list(client.generate(prompt, cache_salt=salt, **options))
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert first_difference(self._oracle.greedy(prompt, TOKENS), tokens, 1e-3) == ""
        return deltas[-1]

    def wanted(self, prompt: list[int]) -> tuple[int, ...]:
        return self._oracle.greedy(prompt, TOKENS).tokens

    def idle(self, *nodes: str) -> None:
        for node_id in nodes:
            wait_for(f"all slots back at {node_id}", lambda name=node_id: self._cluster.idle(name))


def cached(last: Delta) -> int:
    assert last.usage is not None
    return last.usage.cached_tokens


def has_room(status: NodeStatus) -> bool:
    """Return True if a node's free blocks have reached its watermark."""
    return status.free_blocks * 100 >= LOW_PERCENT * status.total_blocks


def whole(prompt: list[int]) -> int:
    """Return the max number of cached tokens of a prompt."""
    return (len(prompt) - 1) // 16 * 16


def test_states_move_between_nodes(folder: pathlib.Path) -> None:
    model = make_model(folder / "model", HYBRIDS["falcon-h1"])[0]
    flags = ("--kv-pool-bytes", "16MiB")
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", "512") as cluster:
        cluster.environ.update(hook_environment(folder / "board"))
        cluster.defaults = {NODE: FETCHING}
        for node_id in ("kv-a", "kv-b"):
            cluster.node(node_id, *flags)
        decode, prefill = cluster.worker("decode", "kv-b"), cluster.worker("prefill", "kv-a")
        target = cluster.gateway("--chunk-size", "64", "--heartbeat-timeout-ms", "1000")
        cluster.sees(target, prefill, decode)
        reader = StateReader(model, cluster, target)

        for prompt in PROMPTS:
            last = reader.read(prompt)
            assert last.timings is not None
            assert (last.timings.prefilled_tokens, last.timings.replays) == (whole(prompt), 0)
        reader.idle("kv-a", "kv-b")

        second = cluster.worker("decode", "kv-a")
        cluster.stop(decode)
        cluster.sees(target, prefill, second)
        turns = [[*prompt, *reader.wanted(prompt), *MORE] for prompt in PROMPTS]
        for turn in turns:
            assert cached(reader.read(turn)) == (len(turn) - len(MORE) - 1) // 16 * 16
        at_a = cluster.node_status("kv-a")
        assert at_a.fetched_blocks > 0
        assert at_a.corrupt_blocks == 0
        reader.idle("kv-a", "kv-b")

        decode = cluster.worker("decode", "kv-b")
        cluster.sees(target, prefill, second, decode)
        for turn in turns:
            last = reader.read(turn)
            assert last.timings is not None
            assert (cached(last), last.timings.decode_worker) == (whole(turn), second)
        assert cluster.node_status("kv-a").fetched_blocks == at_a.fetched_blocks

        cluster.stop(second)
        cluster.sees(target, prefill, decode)
        board = FaultBoard(folder / "board")
        board.arm(0, BY_NAME["kvnode, before a fetch"], 2, signal.SIGKILL, cluster.processes["kv-a"].pid)
        reader.read(tokens_of(400, 7))
        assert board.fired(0) is not None
        cluster.stop("kv-a", kill=True)
        reader.idle("kv-b")


@pytest.mark.parametrize("policy", ["colocated", "disaggregated"])
def test_branch_points_are_shared_by_all_nodes(folder: pathlib.Path, policy: str) -> None:
    """The first text is on one node alone, so the second one, on the other node, is the first there that can leave a
    state where they part; the third one finds it."""
    model = make_model(folder / "model", HYBRIDS["lfm2"])[0]
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", "256") as cluster:
        for node_id in ("kv-a", "kv-b"):
            cluster.node(node_id, "--kv-pool-bytes", "16MiB")
        target = cluster.gateway("--split-policy", policy, "--chunk-size", "64", "--heartbeat-timeout-ms", "1000")
        reader = StateReader(model, cluster, target)
        same = tokens_of(100, 2)
        texts = [[*same, *tokens_of(60, seed)] for seed in (3, 4, 5)]
        workers = [cluster.worker(role, "kv-a") for role in ("prefill", "decode")]
        cluster.sees(target, *workers)
        assert cached(reader.read(texts[0])) == 0
        others = [cluster.worker(role, "kv-b") for role in ("prefill", "decode")]
        for worker in workers:
            cluster.stop(worker)
        cluster.sees(target, *others)
        assert [cached(reader.read(text)) for text in texts[1:]] == [0, whole(same)]
        reader.idle("kv-a", "kv-b")


def test_states_come_back_from_disk(folder: pathlib.Path) -> None:
    model = make_model(folder / "model", HYBRIDS["granite-hybrid"])[0]
    flags = ("--kv-pool-bytes", "2MiB", "--disk-path", str(folder / "disk"))
    # A lease never waits for what leaves, so nothing is lost on the way.
    leaving = {"low_watermark_percent": LOW_PERCENT, "high_watermark_percent": 40}
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", "256") as cluster:
        cluster.defaults = {NODE: FETCHING | leaving}
        cluster.node("kv-a", *flags)
        decode = cluster.worker("decode", "kv-a")
        target = cluster.gateway("--split-policy", "colocated")
        cluster.sees(target, decode)
        reader = StateReader(model, cluster, target)
        prompts = [tokens_of(100, seed) for seed in range(10, 34)]
        for prompt in prompts:
            reader.read(prompt)
            reader.idle("kv-a")
            # With less room, blocks may leave the pool faster than the disk accepts them.
            wait_for("room in the pool", lambda: has_room(cluster.node_status("kv-a")))
        assert cluster.node_status("kv-a").evicted_blocks > 0
        for prompt in prompts:
            assert cached(reader.read(prompt)) == whole(prompt)
        assert cluster.node_status("kv-a").restored_blocks > 0
        reader.idle("kv-a")


async def test_states_come_from_a_bucket(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that computed them is gone, and the next one has an empty pool."""
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    model = make_model(folder / "model", HYBRIDS["lfm2"])[0]
    prompts = [tokens_of(300, 5), tokens_of(200, 3)]
    async with S3Service(folder / "s3").running() as service:
        await asyncio.to_thread(_over_a_bucket, folder, model, service.url(), prompts)


def _over_a_bucket(folder: pathlib.Path, model: pathlib.Path, url: str, prompts: list[list[int]]) -> None:
    flags = ("--kv-pool-bytes", "16MiB", "--object-url", url)
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", "512") as cluster:
        cluster.defaults = {NODE: FETCHING}
        target = cluster.gateway("--split-policy", "colocated", "--heartbeat-timeout-ms", "1000")
        cluster.node("kv-a", *flags)
        decode = cluster.worker("decode", "kv-a")
        cluster.sees(target, decode)
        reader = StateReader(model, cluster, target)
        for prompt in prompts:
            assert cached(reader.read(prompt)) == 0
        reader.idle("kv-a")

        def all_written() -> bool:
            status = cluster.node_status("kv-a")
            return status.object_blocks == status.committed_blocks

        wait_for("all blocks in the bucket", all_written)
        cluster.stop(decode)
        cluster.stop("kv-a")
        cluster.node("kv-b", *flags)
        decode = cluster.worker("decode", "kv-b")
        cluster.sees(target, decode)
        for prompt in prompts:
            assert cached(reader.read(prompt)) == whole(prompt)
        turn = [*prompts[0], *reader.wanted(prompts[0]), *MORE]
        assert cached(reader.read(turn)) == (len(turn) - len(MORE) - 1) // 16 * 16
        status = cluster.node_status("kv-b")
        assert (status.bucket_blocks > 0, status.corrupt_blocks) == (True, 0)
        reader.idle("kv-b")
