"""A cluster over GPU memory, as real processes: one decode worker; prefill and decode over one pool and one copy of the
weights; a decode worker of two ranks. Without a GPU, Triton's interpreter computes, over a fake driver."""

from __future__ import annotations

import pathlib
import re
import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion import Client
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from testbed import cluster, fake_cuda
from testbed.tiny_model import save_model
from tests.support.families import tokens_of
from tests.support.gpu import NATIVE

PROMPT_TOKENS, ANSWER_TOKENS = 53, 5
# The interpreter computes a step of these sizes in a second or two.
SMALL = ("--max-num-batched-tokens", "32", "--max-num-seqs", "4", "--max-num-batched-prefill-tokens", "32")
SHAPE = ("--dtype", "float32", "--max-model-len", "256", "--chunk-size", "32", "--heartbeat-timeout-ms", "30000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """Prepares the environment of the cluster's processes."""
    for name, value in fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28)).items():
        monkeypatch.setenv(name, value)
    if not NATIVE:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cluster, "READY_TIMEOUT_S", 200.0)


def expected(folder: pathlib.Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(ANSWER_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.cluster
@pytest.mark.timeout(480)
@pytest.mark.parametrize("prefill_workers", [0, 1] if NATIVE else [1])
@pytest.mark.parametrize("ranks", [1, 2] if NATIVE else [2])
def test_answers_from_a_gpus_memory(folder, prefill_workers, ranks):
    """``ranks``: of the decode worker; the prefill worker has one."""
    prompt = tokens_of(PROMPT_TOKENS, 7)
    policy = "disaggregated" if prefill_workers else "colocated"
    flags = ("--device", "cuda", "--prefill-workers", str(prefill_workers), "--split-policy", policy, *SMALL, *SHAPE)
    flags = (*flags, "--tensor-parallel-size", str(ranks), "--prefill-tensor-parallel-size", "1")
    # Paths of sockets must be short.
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as place,
        cluster.served(pathlib.Path(place), str(folder), *flags) as served,
    ):
        with Client(served.target) as client:
            options = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
            first = list(client.generate(prompt, **options))
            again = list(client.generate(prompt, **options))
        wanted = expected(folder, prompt)
        for deltas, cached in ((first, 0), (again, 48)):
            assert [token for delta in deltas for token in delta.token_ids] == wanted
            assert deltas[-1].timings.cached_tokens == cached
        assert first[-1].timings.prefilled_tokens == (48 if prefill_workers else 0)
        status = served.node_status()
        assert status.kv_device.startswith("cuda")
        # The pool has the memory that the first worker's weights and buffers left.
        assert 0 < status.total_blocks * 2 * 2 * 2 * 16 * 16 * 4 < 2**28 or NATIVE
        log = served.log.read_text()
    # One worker filled the weights; the other one mapped them, unless it has ranks, which have shares of their own.
    assert len(re.findall("has region .*: fill", log)) <= (1 if ranks == 1 else ranks + prefill_workers)
    assert not served.left_behind()


@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.skipif(not NATIVE, reason="the interpreter would take hours for the real model")
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
