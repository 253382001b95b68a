"""Vectors of a step's rows against transformers' last hidden states. On the CPU kernels their bits do not depend on
chunks or other rows; torch's products depend on the number of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.engine.checkpoints.prepare import prepare
from tests.support.cpu_model import CpuDriver, cpu_backend, needs_kernels
from tests.support.families import FAMILIES, PROMPT_TOKENS, make_model, tokens_of
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")

# Families whose last row differs: its norm, factors after it, or the previous layer.
LONG = (
    "llama-gqa-tied",
    "qwen3-qk-norm",
    "phi3",
    "gemma3",
    "granite",
    "mixtral",
    "olmo2",
    "cohere",
    "starcoder2",
    "gpt2",
    "llama4",
    "gemma4",
    "youtu",
)
NAMES = ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
TOLERANCE = 1e-4


def driver_of(prepared: Any, kernels: str) -> BackendDriver:
    if kernels == "torch":
        return BackendDriver(prepared)
    return CpuDriver(prepared, 16, 64, backend=cpu_backend(prepared, 16, threads=2))


def vectors(driver: BackendDriver, *parts: tuple[int, list[int]], of: list[int]) -> np.ndarray:
    """Run one step; return the vectors of these rows, which are not sampled."""
    batch = driver.sequences.step(parts, of)
    batch = dataclasses.replace(batch, pooled=len(of))
    driver.backend.forward(batch)
    found: np.ndarray = driver.backend._read_vectors(batch).copy()
    return found


@pytest.mark.parametrize("kernels", ["torch", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_vector_is_the_last_hidden_state_whole_and_in_chunks(own_cache, tmp_path, name, kernels) -> None:
    flags = make_model(tmp_path, FAMILIES[name])[1]
    prepared = prepare(flags)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    text = tokens_of(PROMPT_TOKENS, 1)
    with torch.inference_mode():
        # Llama 4's inner model is not transformers' ``base_model``.
        within = model.model if model.base_model is model else model.base_model
        wanted = within(torch.tensor([text])).last_hidden_state[0, -1].numpy()
    driver = driver_of(prepared, kernels)
    whole, cut, other = driver.sequences.add(), driver.sequences.add(), driver.sequences.add()
    last = len(text) - 1
    (alone,) = vectors(driver, (whole[0], text), of=[last])
    assert np.abs(alone - wanted).max() <= TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    half = len(text) // 2
    driver.step((cut[0], text[:half]), sample=())
    # A step that samples rows, one of them twice, gives only their logits beside the vectors.
    rows = [last, 2, 2, 0, 1, last]
    batch = dataclasses.replace(driver.sequences.step([(driver.sequences.add()[0], text)], rows), pooled=3)
    logits = driver.backend.forward(batch).clone()
    assert (len(logits), torch.equal(logits[1], logits[2]), torch.equal(logits[0], logits[1])) == (3, True, False)
    assert np.abs(driver.backend._read_vectors(batch)[2] - alone).max() <= (0.0 if kernels == "cpu" else TOLERANCE)
    row = 2 + len(text) - half - 1
    beside, *twice = vectors(driver, (other[0], text[3:5]), (cut[0], text[half:]), of=[1, row, row])
    assert beside.tobytes() != alone.tobytes()
    for one in twice:
        assert np.abs(one - alone).max() <= (0.0 if kernels == "cpu" else TOLERANCE)
