"""Three hosts with a network between them: an edge with Redis and the gateway, and two with a KV node and workers each.
Links are long, narrow and lossy, they are cut in the middle of answers, and a host comes back with another address. No
token is lost, repeated or changed, and nothing is left."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.conditions import wait_for
from lab.testbed.hosts import READY_TIMEOUT_S, Hosts, hosts
from lab.testbed.networks import HostNetwork, missing, network
from lab.testbed.tiny_model import byte_prompt, save_model
from lab.testbed.wire import LinkRule
from pillion import Client
from tests.support.adapters import make_adapter
from tests.support.oracle import Oracle, first_difference
from tests.support.own_cache import model_cache

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.skipif(missing() != "", reason=missing())]

NODES = ("kv-a", "kv-b")
# With TCP alone between the hosts NIXL streams blocks, as in production.
TRANSPORT = "nixl" if importlib.util.find_spec("nixl") else "grpc"
# Prefill and decode on different hosts, so that all blocks cross the link.
WORKERS = ("prefill-kv-a", "decode-kv-b")
GIGABIT = 125e6
LINKS = {
    "0.2 ms, a gigabit": LinkRule(0.0001, GIGABIT),
    "20 ms, 100 Mbit": LinkRule(0.01, GIGABIT / 10),
    "one of a hundred packets is lost": LinkRule(0.0001, GIGABIT, loss=0.01),
}
CUT = LinkRule(cut=True)
# Per cut: the isolated host, the one that it cannot reach, and whether the reverse direction is cut.
CUTS = (("kv-a", "kv-b", False), ("edge", "kv-a", True), ("edge", "kv-b", True), ("kv-a", "kv-b", True))
# Packets dropped before a cut is repaired.
MET_PACKETS = 10
GREEDY = byte_prompt(1, 500)
KINDS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (GREEDY, {"temperature": 0.0}),
    "sampled": (byte_prompt(2, 400), {"temperature": 1.0, "seed": 7, "logprobs": 2}),
    "parallel_samples": (byte_prompt(3, 300), {"n": 3, "temperature": 1.0, "seed": 5}),
    "adapter": (byte_prompt(4, 300), {"model": "red", "temperature": 0.0}),
}
TOKENS = 60
Answers = dict[str, dict[int, list[int]]]


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        yield pathlib.Path(name)


@contextlib.contextmanager
def answers(target: str, salt: str) -> Iterator[Answers]:
    """Begin an answer of each kind; run the block once each has its first tokens, then read all."""
    begun = {kind: threading.Event() for kind in KINDS}
    found: Answers = {}

    def ask(kind: str) -> dict[int, list[int]]:
        prompt, asked = KINDS[kind]
        tokens: dict[int, list[int]] = {}
        bounds = {"max_tokens": TOKENS, "ignore_eos": True, "cache_salt": salt, "timeout_s": READY_TIMEOUT_S}
        with Client(target) as client:
            for delta in client.generate(prompt, **bounds, **asked):
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
                begun[kind].set()
        return tokens

    with ThreadPoolExecutor(len(KINDS)) as pool:
        asked = {kind: pool.submit(ask, kind) for kind in KINDS}
        for kind in KINDS:
            wait_for(f"first tokens of {kind}", lambda one=kind: begun[one].is_set() or asked[one].done())
        yield found
        found.update({kind: one.result(READY_TIMEOUT_S) for kind, one in asked.items()})


def start_host(cluster: Hosts, node_id: str) -> None:
    cluster.node(node_id, "--kv-pool-bytes", "64MiB", "--kv-transport", TRANSPORT)
    for name in WORKERS:
        role, _, place = name.partition("-")
        if place == node_id:
            cluster.worker(role, node_id, "--enable-lora", "--max-loras", "1")


def cut_in_the_middle(net: HostNetwork, target: str, one: str, other: str, both_ways: bool, salt: str) -> Answers:
    with answers(target, salt) as found:
        met = net.counts()[1] + MET_PACKETS
        net.link(one, other, CUT, CUT if both_ways else LinkRule())
        wait_for("the cut to meet packets", lambda: net.counts()[1] >= met)
        net.links()
    return found


def test_answers_are_correct_over_bad_links(folder: pathlib.Path) -> None:
    model = save_model(folder / "tiny")
    adapter = make_adapter(model, folder / "red", r=4)
    shared = ("--model", str(model), "--dtype", "float32", "--max-model-len", "2048")
    with network("edge", *NODES) as net, hosts(folder, *shared, network=net) as cluster:
        for node_id in NODES:
            cluster.caches[node_id] = pathlib.Path(model_cache(folder / f"cache-{node_id}"))
            start_host(cluster, node_id)
        lora = ("--enable-lora", "--max-loras", "1", "--lora-modules", f"red={adapter}")
        target = cluster.gateway("--chunk-size", "64", *lora)
        cluster.sees(target, *WORKERS)
        with answers(target, "undisturbed") as expected:
            pass
        oracle = Oracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        assert first_difference(oracle.greedy(GREEDY, TOKENS), expected["greedy"][0], 1e-3) == ""
        for what, rule in LINKS.items():
            net.links(rule)
            with answers(target, what) as found:
                pass
            assert found == expected, what
        net.links()
        for one, other, both_ways in CUTS:
            what = f"{one} and {other} are apart, both ways: {both_ways}"
            assert cut_in_the_middle(net, target, one, other, both_ways, what) == expected, what
            cluster.sees(target, *WORKERS)

        assert cluster.node_status("kv-b").fetched_blocks > len(LINKS) * len(GREEDY) // 16

        # A new address amid answers: the host's processes end and return as a pod's do.
        with answers(target, "replaced") as found:
            for name in ("decode-kv-b", "kv-b"):
                cluster.stop(name, kill=True)
            net.move("kv-b")
            start_host(cluster, "kv-b")
        assert found == expected
        cluster.sees(target, *WORKERS)
        with answers(target, "after the replacement") as found:
            pass
        assert found == expected

        # One more address, under processes that run on: node and Redis see that it moved, and the worker, whose
        # connection to the node stood on the old address, is started again. What the supervising thread has started
        # ends with it.
        with cluster.supervised():
            with answers(target, "moved") as found:
                net.move("kv-b")
            assert found == expected
            for name in ("kv-b", "decode-kv-b"):
                moved = {name: net.address("kv-b")}.items()
                wait_for(f"{name} at its new address", lambda one=moved: one <= cluster.places(target).items())
            cluster.sees(target, *WORKERS)
            with answers(target, "after the move") as found:
                pass
            assert found == expected
            for node_id in NODES:
                wait_for(f"all slots back at {node_id}", lambda name=node_id: cluster.idle(name))
            assert not any(cluster.node_status(node_id).corrupt_blocks for node_id in NODES)
