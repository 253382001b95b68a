"""A hybrid model through the whole system over GPU memory, as real processes: a prefill worker hands its state over.
Without a GPU, Triton's interpreter computes, over a fake driver."""

from __future__ import annotations

import pathlib
import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed import cluster, fake_cuda
from lab.testbed.conditions import wait_for
from pillion import Client
from tests.support.families import make_model, tokens_of
from tests.support.gpu import NATIVE
from tests.support.hybrids import HYBRIDS
from tests.support.oracle import Oracle, first_difference

PROMPT_TOKENS, ANSWER_TOKENS = 53, 5
# The interpreter computes a step of these sizes in a second or two.
SMALL = ("--max-num-batched-tokens", "32", "--max-num-seqs", "4", "--max-num-batched-prefill-tokens", "32")
SHAPE = ("--dtype", "float32", "--max-model-len", "256", "--chunk-size", "32", "--heartbeat-timeout-ms", "30000")


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(480)
@pytest.mark.usefixtures("own_cache")
def test_answers_from_states_in_a_gpus_memory(tmp_path, monkeypatch):
    """The first request continues from the prefill worker's state, and the second one from that of the first prompt."""
    for name, value in fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28)).items():
        monkeypatch.setenv(name, value)
    if not NATIVE:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cluster, "READY_TIMEOUT_S", 200.0)
    folder, prompt = make_model(tmp_path / "model", HYBRIDS["lfm2"])[0], tokens_of(PROMPT_TOKENS, 7)
    wanted = Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).greedy(prompt, ANSWER_TOKENS)
    flags = ("--device", "cuda", "--prefill-workers", "1", "--split-policy", "disaggregated", *SMALL, *SHAPE)
    # Socket paths are limited in length.
    with (
        tempfile.TemporaryDirectory(prefix="pil-") as place,
        cluster.served(pathlib.Path(place), str(folder), *flags, forked=not NATIVE) as served,
        Client(served.target) as client,
    ):
        for cached, prefilled in ((0, 48), (48, 0)):
            options = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
            deltas = list(client.generate(prompt, **options))
            found = [token for delta in deltas for token in delta.token_ids]
            assert first_difference(wanted, found, 1e-3) == ""
            timings = deltas[-1].timings
            assert (timings.cached_tokens, timings.prefilled_tokens) == (cached, prefilled)
            # A request may finish before the node has its last blocks and states.
            wait_for("all states kept", served.idle)
        assert served.node_status().kv_device.startswith("cuda")
