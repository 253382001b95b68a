"""Adapters in a cluster of real processes: every answer is that of transformers with peft, whatever dies or is swapped.

All tests share one cluster: two decode workers and a prefill worker with slots for two adapters, of which four are
served. Greedy tokens are compared, in float32.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import pathlib
import re
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import ServedCluster, served
from lab.testbed.conditions import WITHIN_S, result_of, wait_for
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client
from pillion.errors import NotFound, PillionError
from pillion.host.adapter_folders import ADAPTERS
from pillion.types import StructuredOutputs
from tests.support.adapters import adapted_model, make_adapter
from tests.support.drafts import speculative
from tests.support.oracle import Oracle, first_difference
from tests.support.own_cache import model_cache

pytestmark = pytest.mark.cluster

NAMES = ("red", "green", "blue")
EPSILON = 1e-3
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", "32MiB", "--chunk-size", "64"),
    *("--decode-workers", "2", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
    *("--speculative-config", str(speculative(3)), "--allow-runtime-lora-updating"),
)
Tokens = Callable[[str, list[int], int], Any]


@pytest.fixture(scope="module")
def folder() -> Iterator[pathlib.Path]:
    """Write a model, its adapters, and a separate model cache."""
    with tempfile.TemporaryDirectory(prefix="pil-") as name, pytest.MonkeyPatch.context() as patch:
        folder = pathlib.Path(name)
        patch.setenv("PILLION_CACHE", model_cache(folder / "cache"))
        save_model(folder / "tiny")
        for seed, adapter in enumerate((*NAMES, "x", "y", "z")):
            make_adapter(folder / "tiny", folder / "adapters" / adapter, seed=seed, r=4 + seed % 2, lora_alpha=8)
        yield folder


@pytest.fixture(scope="module")
def cluster(folder: pathlib.Path) -> Iterator[ServedCluster]:
    modules = [word for name in NAMES for word in ("--lora-modules", f"{name}={folder / 'adapters' / name}")]
    flags = (*FLAGS, *modules, "--lora-path", str(folder / "adapters"))
    (folder / "run").mkdir()
    with served(folder / "run", str(folder / "tiny"), *flags, faults=True) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: pathlib.Path) -> Tokens:
    """Return the oracle's greedy answer by adapter name; "" is the base model."""
    oracles = {"": Oracle(AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32))}

    @functools.cache
    def greedy(adapter: str, ids: tuple[int, ...], count: int) -> Any:
        if adapter not in oracles:
            oracles[adapter] = Oracle(adapted_model(folder / "tiny", folder / "adapters" / adapter))
        return oracles[adapter].greedy(ids, count)

    return lambda adapter, ids, count: greedy(adapter, tuple(ids), count)


def answer(client: Client, model: str, ids: list[int], count: int, **options: Any) -> list[int]:
    stream = client.generate(ids, model=model, temperature=0.0, max_tokens=count, ignore_eos=True, **options)
    return [token for delta in stream for token in delta.token_ids]


def settled(cluster: ServedCluster) -> None:
    """Wait until nothing is in use and all components serve."""
    wait_for("all slots back", cluster.idle)
    wait_for("all parts", lambda: len(cluster.components("decode")) == 2 and bool(cluster.component("prefill")))


def test_more_adapters_than_slots_are_served_beside_the_base_model(cluster: ServedCluster, expected: Tokens) -> None:
    settled(cluster)
    tasks = [(model, byte_prompt(seed, 5 + 23 * seed)) for seed in range(6) for model in ("", *NAMES)]
    with Client(cluster.target) as client, concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        found = list(pool.map(lambda task: answer(client, *task, 16), tasks))
        digests = {info.adapter for info in client.models() if info.parent}
        workers = [set(one.adapters) for one in client.status().components if one.role == "decode"]
    for (model, ids), tokens in zip(tasks, found, strict=True):
        assert first_difference(expected(model, ids, 16), tokens, EPSILON) == "", model
    assert len(workers) == 2
    assert all(len(ready) <= 2 and ready <= digests for ready in workers)
    settled(cluster)


def test_parallel_samples_and_prefix_hits_have_the_adapter(cluster: ServedCluster, expected: Tokens) -> None:
    """Draft tokens, too: the decode workers make some in every test here."""
    ids = byte_prompt(63, 90)
    with Client(cluster.target) as client:
        for cached in (False, True):
            for model in (*NAMES, ""):
                found: dict[int, list[int]] = {0: [], 1: [], 2: []}
                for delta in client.generate(ids, model=model, temperature=0.0, max_tokens=12, ignore_eos=True, n=3):
                    found[delta.index] += delta.token_ids
                assert delta.usage is not None
                assert delta.usage.cached_tokens == (80 if cached else 0), "blocks of another adapter"
                assert delta.usage.prompt_tokens == 90
                for answered in found.values():
                    assert first_difference(expected(model, ids, 12), answered, EPSILON) == "", model
            settled(cluster)


def test_structured_output_works_with_an_adapter(cluster: ServedCluster) -> None:
    shape = StructuredOutputs(regex="[ab]{20}")
    with Client(cluster.target) as client:
        texts = {
            model: "".join(
                delta.text
                for delta in client.generate(
                    byte_prompt(5, 40), model=model, temperature=0.0, max_tokens=30, structured_outputs=shape
                )
            )
            for model in NAMES
        }
    assert all(re.fullmatch("[ab]{20}", text) for text in texts.values()), texts
    assert len(set(texts.values())) > 1, "no adapter matters"
    settled(cluster)


@pytest.mark.parametrize("role", ["decode", "prefill", "kvnode"])
def test_killed_workers_cost_a_pause(cluster: ServedCluster, expected: Tokens, role: str) -> None:
    tasks = [(model, byte_prompt(40 + seed, 200)) for seed, model in enumerate(("red", "green", "blue", ""))]
    with Client(cluster.target) as client, concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:

        def read(task: tuple[str, list[int]]) -> tuple[list[int], int]:
            model, ids = task
            stream = client.generate(
                ids, model=model, temperature=0.0, max_tokens=100, ignore_eos=True, cache_salt=f"{role} {model}"
            )
            deltas = list(stream)
            assert deltas[-1].timings is not None
            return [token for delta in deltas for token in delta.token_ids], deltas[-1].timings.replays

        if role == "prefill":
            cluster.kill(role, signal.SIGSTOP)
        else:
            # A step adds at most four tokens to a stream, of 100.
            cluster.arm(10, signal.SIGSTOP)
        reading = [pool.submit(read, task) for task in tasks]
        held = None
        if role == "prefill":
            wait_for("all prefill ranges", lambda: cluster.node_status().tickets >= len(tasks))
        else:
            held = psutil.Process(cluster.struck())
        for victim in cluster.components(role):
            victim.kill()
        if held is not None and role != "decode":
            held.resume()
        found = [future.result() for future in reading]
    for (model, ids), (tokens, _) in zip(tasks, found, strict=True):
        assert first_difference(expected(model, ids, 100), tokens, EPSILON) == "", model
    assert sum(replays for _, replays in found) >= 1
    settled(cluster)


def http_port(cluster: ServedCluster) -> int:
    """Return the port of the gateway's HTTP API."""
    gateway = cluster.component("gateway")
    assert gateway is not None
    grpc_port = int(cluster.target.rpartition(":")[2])
    ports = {one.laddr.port for one in gateway.net_connections("tcp") if one.status == "LISTEN"}
    for port in sorted(ports - {grpc_port}):
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=WITHIN_S),
        ):
            return port
    raise AssertionError(f"no HTTP API at {ports}")


def complete(port: int, model: str, ids: list[int]) -> tuple[str, str]:
    """Return an answer's text, and the version of its weights."""
    answered = post(port, "completions", {"model": model, "prompt": ids, **GREEDY})
    return answered["choices"][0]["text"], answered["system_fingerprint"]


def over_grpc(client: Client, model: str, ids: list[int]) -> tuple[str, str]:
    """As :func:`complete`."""
    deltas = list(client.generate(ids, model=model, temperature=0.0, max_tokens=24, ignore_eos=True))
    assert deltas[-1].timings is not None
    return "".join(delta.text for delta in deltas), deltas[-1].timings.system_fingerprint


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S) as reply:
        return json.load(reply)


def test_a_swap_under_load_does_not_mix_versions(
    cluster: ServedCluster, folder: pathlib.Path, expected: Tokens
) -> None:
    """One folder is overwritten repeatedly: each answer is of a single version, which it names."""
    ids, port, live = byte_prompt(7, 70), http_port(cluster), folder / "adapters" / "live"
    with Client(cluster.target) as client:

        def swap(version: str) -> None:
            shutil.copytree(folder / "adapters" / version, live, dirs_exist_ok=True)
            client.load_adapter("live", "live", in_place=True)

        known = {}
        for version in ("x", "y"):
            swap(version)
            assert first_difference(expected(version, ids, 24), answer(client, "live", ids, 24), EPSILON) == ""
            known[version] = complete(port, "live", ids)
        assert known["x"][0] != known["y"][0]
        assert known["x"][1] != known["y"][1]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = []
            for turn in range(6):
                now = [pool.submit(complete, port, "live", ids) for _ in range(2)]
                now += [pool.submit(over_grpc, client, "live", ids) for _ in range(2)]
                asked += now
                next(concurrent.futures.as_completed(now))
                swap("xy"[turn % 2])
            found = {future.result() for future in asked}
        assert found == set(known.values())
        client.unload_adapter("live")
    settled(cluster)


def test_a_stream_survives_the_unload_of_its_adapter(cluster: ServedCluster, expected: Tokens) -> None:
    ids = byte_prompt(9, 30)
    with Client(cluster.target) as client:
        client.load_adapter("passing", "x")
        # A step adds at most four tokens to a stream, of 300.
        cluster.arm(30, signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(answer, client, "passing", ids, 300)
            with cluster.holding():
                client.unload_adapter("passing")
                with pytest.raises(NotFound):
                    answer(client, "passing", ids, 2)
            got = result_of("the stream to end", reading)
    assert first_difference(expected("x", ids, 300), got, EPSILON) == ""
    settled(cluster)


def test_an_adapter_without_files_is_a_named_error(
    cluster: ServedCluster, folder: pathlib.Path, expected: Tokens
) -> None:
    """No machine has them any more; others are served meanwhile, and it is as soon as they are back."""
    ids, store = byte_prompt(11, 40), folder / "cache" / ADAPTERS
    with Client(cluster.target) as client:
        digest = client.load_adapter("lost", "z").adapter
        shutil.move(store / digest, folder / "away")
        with pytest.raises(PillionError, match=digest[:12]):
            answer(client, "lost", ids, 4)
        assert first_difference(expected("red", ids, 8), answer(client, "red", ids, 8), EPSILON) == ""
        shutil.move(folder / "away", store / digest)
        assert first_difference(expected("z", ids, 8), answer(client, "lost", ids, 8), EPSILON) == ""
        client.unload_adapter("lost")
    settled(cluster)
