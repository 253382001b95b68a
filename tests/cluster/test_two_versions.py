"""The last release and this tree in one cluster: each component is replaced in the middle of answers of every kind, by
the next version and by the last one again, and no answer, token or cached block is lost."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lab.testbed.conditions import wait_for
from lab.testbed.hosts import READY_TIMEOUT_S, Hosts, hosts
from lab.testbed.ports import free_port
from lab.testbed.release import install, last_release
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client
from pillion._version import PROTOCOL, VERSION
from pillion.kvstore.pool_survival.keeper_client import PoolKeeper
from tests.support.adapters import make_adapter
from tests.support.alerts import PROMTOOL, check_alerts
from tests.support.hybrids import HYBRIDS

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]},
    },
}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 40}
SAID = [{"role": "user", "content": "The harbour at night was quiet, and the lamps burned. " * 6}]
LONG = {"max_tokens": 150, "ignore_eos": True}
# Kinds of answers: client method, prompt, options.
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "greedy": ("generate", byte_prompt(1, 500), {"temperature": 0.0, **LONG}),
    "sampled": ("generate", byte_prompt(2, 400), {"temperature": 1.0, "seed": 7, "logprobs": 2, **LONG}),
    "chat": ("chat", SAID, {"temperature": 0.7, "seed": 3, **LONG}),
    "parallel_samples": ("generate", byte_prompt(3, 300), {"n": 3, "temperature": 1.0, "seed": 5, **LONG}),
    "adapter": ("generate", byte_prompt(4, 300), {"model": "red", "temperature": 0.0, **LONG}),
    "structured": ("chat", SAID, {"schema": NUMBERS, "temperature": 1.0, "seed": 9, "max_tokens": 150}),
    "tool": ("chat", SAID, {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0, "seed": 4}),
}
# Recomputed only by the cache check, which requests one token.
KEPT = [byte_prompt(seed, 700) for seed in (11, 12, 13)]
COMPONENTS = ("keeper", "kv-a", "prefill-kv-a", "decode-kv-a", "gateway")
RELEASED_PROTOCOL = 7
Answer = dict[int, list[int]]


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        yield pathlib.Path(name)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder that the last release is installed in. It is another version than this tree."""
    folder = tmp_path_factory.mktemp("released")
    if missing := install(last_release(), folder):
        pytest.skip(missing)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pillion", "version"]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert said == f"pillion {last_release().version} (protocol {RELEASED_PROTOCOL})\n"
    return folder


def ask(target: str, kind: str, begun: threading.Event) -> Answer:
    """Read an answer: the tokens of each index. Set ``begun`` with the first tokens."""
    method, prompt, asked = KINDS[kind]
    tokens: Answer = {}
    with Client(target) as client:
        for delta in getattr(client, method)(prompt, timeout_s=READY_TIMEOUT_S, **asked):
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.token_ids:
                begun.set()
    return tokens


@contextlib.contextmanager
def answers(target: str) -> Iterator[dict[str, Answer]]:
    """Begin an answer of each kind; run the block once each has its first tokens, then read all."""
    begun = {kind: threading.Event() for kind in KINDS}
    read: dict[str, Answer] = {}
    with ThreadPoolExecutor(len(KINDS)) as pool:
        asked = {kind: pool.submit(ask, target, kind, begun[kind]) for kind in KINDS}
        for kind in KINDS:
            wait_for(f"first tokens of {kind}", lambda one=kind: begun[one].is_set() or asked[one].done())
        yield read
        read.update({kind: future.result(READY_TIMEOUT_S) for kind, future in asked.items()})


def hit_share(target: str) -> float:
    """Return the cached share of the kept prompts' whole blocks; missing ones are computed."""
    cached = 0
    with Client(target) as client:
        for prompt in KEPT:
            *_, last = client.generate(prompt, temperature=0.0, max_tokens=1, timeout_s=READY_TIMEOUT_S)
            assert last.usage is not None
            cached += last.usage.cached_tokens // 16
    return cached / sum((len(prompt) - 1) // 16 for prompt in KEPT)


def started(running: Hosts, released: pathlib.Path, adapter: pathlib.Path, metrics_port: int) -> str:
    """Start a cluster of the last release, and return its gateway's address."""
    running.packages.update(dict.fromkeys(COMPONENTS, released))
    running.node("kv-a", "--kv-pool-bytes", "64MiB", "--keeper-socket", running.keeper())
    lora = ("--enable-lora", "--max-loras", "1")
    workers = [running.worker(role, "kv-a", *lora) for role in ("prefill", "decode")]
    shows = ("--metrics-port", str(metrics_port))
    target = running.gateway("--chunk-size", "64", *lora, "--lora-modules", f"red={adapter}", *shows)
    running.sees(target, *workers)
    return target


def shown(target: str) -> dict[str, tuple[str, int]]:
    """Return the version and protocol of each component but the gateway, as it reports them."""
    with Client(target) as client:
        components = client.status().components
    return {one.component_id: (one.version, one.protocol) for one in components if one.role != "gateway"}


def check_skew(metrics_port: int, expected: bool) -> None:
    """Evaluate the alert as if the gateway's current metrics had been shown for two hours."""
    if PROMTOOL is None:
        return
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=READY_TIMEOUT_S) as page:
        lines = [line for line in page.read().decode().splitlines() if line.startswith("pillion_components{")]
    series = {name: f"{float(value):.0f}x120" for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert series
    check_alerts(series, [("PillionVersionsDiffer", 30, 0), ("PillionVersionsDiffer", 90, int(expected))])


def replace(running: Hosts, name: str, packages: pathlib.Path | None) -> None:
    """Replaces a component. A keeper counts as replaced when it has the pool again: the last release's node, unlike
    this tree's, does not look at its keeper once more when it stops."""
    running.replace(name, packages)
    if name == "keeper":
        keeper = PoolKeeper(str(running.folder / "keeper.sock"))

        def has_pool() -> bool:
            kept = keeper.take("kv-a")
            if kept is not None:
                kept.close()
            return kept is not None

        wait_for("the pool at its new keeper", has_pool)


def versions(running: Hosts) -> dict[str, tuple[str, int]]:
    """Returns what there is to be said. The last release says its protocol alone."""
    names = ("kv-a", "prefill-kv-a", "decode-kv-a")
    return {name: ("", RELEASED_PROTOCOL) if name in running.packages else (VERSION, PROTOCOL) for name in names}


@pytest.mark.long
@pytest.mark.cluster
def test_each_component_is_replaced_under_load_in_both_directions(folder: pathlib.Path, released: pathlib.Path) -> None:
    model = save_model(folder / "tiny")
    adapter = make_adapter(model, folder / "red", r=4)
    with hosts(folder, "--model", str(model), "--dtype", "float32", "--max-model-len", "2048") as running:
        metrics_port = free_port()
        target = started(running, released, adapter, metrics_port)
        with answers(target) as expected:
            hit_share(target)
        assert hit_share(target) == 1
        for packages in (None, released):
            for name in COMPONENTS:
                with answers(target) as found:
                    replace(running, name, packages)
                assert found == expected, f"{name} was replaced"
                running.sees(target, "prefill-kv-a", "decode-kv-a")
                assert hit_share(target) >= 0.95, f"{name} was replaced"
                if "gateway" not in running.packages:
                    wait_for("versions to be shown", lambda: shown(target) == versions(running))
                    check_skew(metrics_port, len({(VERSION, PROTOCOL), *versions(running).values()}) > 1)
                if (name, packages) == ("kv-a", None):
                    with answers(target) as found:
                        running.redis.kill()
                        running.redis.start()
                    assert found == expected
                    wait_for("blocks that are announced again", lambda: hit_share(target) >= 0.95)
        wait_for("all slots back", lambda: running.idle("kv-a"))


@pytest.mark.long
@pytest.mark.cluster
def test_a_hybrid_models_worker_rejects_the_last_releases_node(folder: pathlib.Path, released: pathlib.Path) -> None:
    model = str(save_model(folder / "hybrid", **HYBRIDS["lfm2"]))
    with hosts(folder, "--model", model, "--dtype", "float32", "--max-model-len", "512") as running:
        running.packages["kv-a"] = released
        running.node("kv-a", "--kv-pool-bytes", "64MiB")
        worker = running.processes[running.worker("decode", "kv-a")]
        assert worker.wait(READY_TIMEOUT_S) != 0
        why = "kv-a is Pillion 0.2.0 and speaks protocol 7, in which nodes keep no states of hybrid models (8 does)"
        assert why in running.logs()
        assert running.node_status("kv-a").committed_blocks == 0
