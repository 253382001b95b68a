"""What the core does: it serves one Llama-like model on one host, at both ports, and over a kill."""

from __future__ import annotations

import json
import pathlib
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lab.testbed.cluster import AMID_STEPS, ServedCluster, served
from lab.testbed.conditions import wait_for
from lab.testbed.ports import free_port
from lab.testbed.tiny_model import byte_prompt, save_model
from pillion import Client, Delta
from tests.support.oracle import Oracle, first_difference

pytestmark = pytest.mark.cluster

FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--kv-pool-bytes", "32MiB", "--chunk-size", "64")
# Logits of float32 arithmetic in another order differ by less.
TIE = 1e-3
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(folder: pathlib.Path, port: int) -> Iterator[ServedCluster]:
    with tempfile.TemporaryDirectory(prefix="pil-") as place:
        flags = (*FLAGS, "--http-port", str(port))
        with served(pathlib.Path(place), str(folder), *flags, faults=True) as running:
            yield running


def answer(client: Client, ids: list[int], tokens: int, salt: str = "") -> tuple[tuple[int, ...], Delta]:
    stream = client.generate(ids, temperature=0.0, max_tokens=tokens, ignore_eos=True, cache_salt=salt)
    deltas = list(stream)
    return tuple(token for delta in deltas for token in delta.token_ids), deltas[-1]


def post(port: int, path: str, **body: Any) -> dict[str, Any]:
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as found:
        return json.loads(found.read())


@pytest.mark.parametrize("length", [1, 40, 300], ids=["one token", "one chunk", "several chunks"])
def test_answers_match_transformers(cluster: ServedCluster, folder: pathlib.Path, length: int) -> None:
    ids = byte_prompt(7, length)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))
    with Client(cluster.target) as client:
        got, _ = answer(client, ids, TOKENS)
    assert first_difference(oracle.greedy(ids, TOKENS), got, TIE) == ""


def test_both_apis_return_the_same_text(cluster: ServedCluster, port: int) -> None:
    messages = [{"role": "user", "content": "What is a pillion?"}]
    with Client(cluster.target) as client:
        said = client.chat(messages, temperature=0.0, max_tokens=TOKENS)
        text = "".join(delta.text for delta in said)
        continued = "".join(delta.text for delta in client.generate("A pillion is", temperature=0.0, max_tokens=TOKENS))
    chat = post(port, "/v1/chat/completions", messages=messages, max_tokens=TOKENS)
    completion = post(port, "/v1/completions", prompt="A pillion is", max_tokens=TOKENS)
    assert chat["choices"][0]["message"]["content"] == text
    assert completion["choices"][0]["text"] == continued


def test_a_killed_decode_worker_costs_a_pause(cluster: ServedCluster) -> None:
    ids = byte_prompt(9, 100)
    with Client(cluster.target) as client:
        expected, _ = answer(client, ids, 60, "before")
        cluster.arm(20, signal.SIGKILL, point=AMID_STEPS)
        got, last = answer(client, ids, 60, "after")
        dead = cluster.struck()
        wait_for("a decode worker to return", lambda: (p := cluster.component("decode")) is not None and p.pid != dead)
    assert got == expected
    assert last.timings is not None
    assert last.timings.replays > 0
    wait_for("all slots back", cluster.idle)
