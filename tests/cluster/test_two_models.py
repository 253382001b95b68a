"""Two models in one cluster of real processes: routed by name, listed, refused and missed as they should be."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import READY_TIMEOUT_S
from lab.testbed.conditions import wait_for
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.ports import free_port
from lab.testbed.tiny_model import save_model
from pillion import Client
from pillion.errors import InvalidRequest, NotFound
from tests.support.http import Reply, call
from tests.support.oracle import Oracle, first_difference

pytestmark = [pytest.mark.long, pytest.mark.cluster]

SEEDS = {"alpha": 1, "beta": 2}
NODES = {"alpha": "kv-a", "beta": "kv-b"}
PROMPT = [2 + (position * 104729) % 256 for position in range(70)]
BLOCKS_OF_PROMPT = 64
TOKENS = 16


@dataclass(frozen=True)
class TwoModels:
    """The running cluster, both models' folders, and the addresses of the gateway."""

    running: Hosts
    folders: dict[str, str]
    target: str
    http: str

    def worker(self, role: str, name: str) -> str:
        flags = ("--model", self.folders[name], "--served-model-name", name, "--dtype", "float32")
        return self.running.worker(role, NODES[name], *flags, "--max-model-len", "1024")

    def ask(self, path: str, body: object = None) -> Reply:
        return asyncio.run(call(self.http, path, body))

    def listed(self) -> list[str]:
        return [model["id"] for model in self.ask("/v1/models").json["data"]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    models = tmp_path_factory.mktemp("models")
    folders = {name: str(save_model(models / name, seed=seed)) for name, seed in SEEDS.items()}
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, hosts(pathlib.Path(folder)) as running:
        also = ("--also-model", f"beta={folders['beta']},max-model-len=1024")
        first = ("--model", folders["alpha"], "--served-model-name", "alpha", "--max-model-len", "1024")
        flags = (*first, *also, "--dtype", "float32", "--split-policy", "disaggregated")
        target = running.gateway(*flags, "--http-port", str(port))
        cluster = TwoModels(running, folders, target, f"127.0.0.1:{port}")
        for name, node in NODES.items():
            running.node(node, "--kv-pool-bytes", "32MiB")
            cluster.worker("prefill", name)
            cluster.worker("decode", name)
        running.sees(target, *(f"{role}-{node}" for role in ("prefill", "decode") for node in NODES.values()))
        wait_for("both models", lambda: cluster.listed() == ["alpha", "beta"], READY_TIMEOUT_S)
        yield cluster


def test_each_name_reaches_its_own_model(two: TwoModels) -> None:
    with Client(two.target) as client:
        assert [model.name for model in client.models()] == ["alpha", "beta"]
        for name, folder in two.folders.items():
            expected = Oracle(AutoModelForCausalLM.from_pretrained(folder)).greedy(PROMPT, TOKENS)
            *_, last = deltas = list(
                client.generate(PROMPT, model=name, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            )
            assert first_difference(expected, sum((one.token_ids for one in deltas), ()), 1e-3) == ""
            assert last.timings.decode_worker == f"decode-{NODES[name]}"
            assert last.timings.prefill_worker == f"prefill-{NODES[name]}"
            body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            reply = two.ask("/v1/completions", body).json
            assert (reply["model"], reply["choices"][0]["text"]) == (name, "".join(one.text for one in deltas))


def test_models_do_not_share_blocks(two: TwoModels) -> None:
    """The same tokens under the same salt are two chains: a model never finds the other one's blocks."""

    def cached(client: Client, name: str) -> int:
        *_, last = client.generate(PROMPT, model=name, temperature=0.0, max_tokens=1, cache_salt="apart")
        return last.usage.cached_tokens

    with Client(two.target) as client:
        assert cached(client, "alpha") == 0
        wait_for("alpha's own blocks", lambda: cached(client, "alpha") == BLOCKS_OF_PROMPT)
        before = two.running.node_status("kv-b").committed_blocks
        assert cached(client, "beta") == 0
        wait_for("beta's own blocks", lambda: cached(client, "beta") == BLOCKS_OF_PROMPT)
        assert two.running.node_status("kv-b").committed_blocks > before
    assert [two.running.node_status(node).fetched_blocks for node in NODES.values()] == [0, 0]


def test_an_unknown_model_is_not_found(two: TwoModels) -> None:
    body = {"model": "gamma", "prompt": "x", "max_tokens": 1}
    refused = [two.ask("/v1/completions", body), two.ask("/v1/models/gamma")]
    for reply in refused:
        assert reply.status == 404
        assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", "model")
        assert reply.error["code"] == "model_not_found"
    assert two.ask("/v1/models/beta").json["id"] == "beta"
    unnamed = two.ask("/v1/completions", body | {"model": ""})
    assert (unnamed.status, unnamed.error["param"]) == (400, "model")
    with Client(two.target) as client:
        with pytest.raises(NotFound, match="'gamma' is not served here; known: alpha, beta"):
            list(client.generate("x", model="gamma"))
        with pytest.raises(InvalidRequest, match="several models are served"):
            list(client.generate("x"))


def test_a_known_model_without_workers_is_unavailable(two: TwoModels) -> None:
    """A model that a flag names is unavailable without workers, and returns with them; the other one is served."""
    two.running.stop("decode-kv-b")
    wait_for("the list without beta", lambda: two.listed() == ["alpha"])
    # Both wait, because the model was there a moment ago; tests/gateway/request/test_faults.py waits it out.
    with ThreadPoolExecutor() as pool, Client(two.target) as client:
        asked = pool.submit(two.ask, "/v1/completions", {"model": "beta", "prompt": "x", "max_tokens": 1})
        called = pool.submit(lambda: list(client.generate("x", model="beta", max_tokens=1)))
        assert two.ask("/health").status == 200
        assert list(client.generate("x", model="alpha", max_tokens=1))
        reply = two.ask("/v1/models/beta")
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert "no decode worker of model 'beta' lives" in reply.error["message"]
        assert not any(each.done() for each in (asked, called))
        two.worker("decode", "beta")
        assert asked.result(READY_TIMEOUT_S).status == 200
        assert called.result(READY_TIMEOUT_S)
        assert two.listed() == ["alpha", "beta"]
