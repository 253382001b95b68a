"""Vectors of texts and logits of tokens from the GPU kernels: transformers' own, whole, in chunks and beside streams,
in one process and in two ranks."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend  # isort: skip  (before the kernels)

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.testbed.tiny_model import save_model
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.sampling.sampler import sample
from pillion.kernels.step import SamplingRows
from pillion.types import SamplingParams
from tests.support.families import tokens_of
from tests.support.gpu import NATIVE
from tests.support.gpu_ranks import RankTeam

pytestmark = pytest.mark.usefixtures("own_cache")

TEXT, OTHER = tokens_of(30, 2), tokens_of(7, 3)
TOLERANCE = 1e-3 if NATIVE else 1e-4
NOTHING = SamplingRows.of([], [], [])


@pytest.fixture(scope="module")
def folder(own_cache, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def wanted(folder):
    """The vectors of all rows of both texts, and their logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = [model(torch.tensor([text]), output_hidden_states=True) for text in (TEXT, OTHER)]
    # transformers' last hidden state is after the last norm.
    return [(one.hidden_states[-1][0].numpy(), one.logits[0].numpy()) for one in found]


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def check(driver, wanted):
    """Run a text whole for its last row, in chunks for the rows of its second part, and a text for logits of tokens
    beside the first token of a generation."""
    (hidden, logits), (beside, others) = wanted
    one, two, three, four = driver.sequences.add(4)
    last, half = len(TEXT) - 1, 17
    batch = replace(driver.sequences.step([(one, TEXT)], [last]), pooled=1, pooled_ids=((),))
    step = driver.backend.launch(batch, (), NOTHING)
    # The next step overwrites the buffers of this one before it is waited for.
    first = driver.backend.launch(driver.sequences.step([(two, TEXT[:half])], ()), (), NOTHING)
    found = step.wait()
    assert (found.token_ids, len(found.pooled)) == ((), 1)
    close(found.pooled[0], hidden[-1])
    first.wait()
    rows = list(range(len(TEXT) - half))
    batch = driver.sequences.step([(two, TEXT[half:])], rows)
    batch = replace(batch, pooled=len(rows), pooled_ids=((),) * len(rows))
    found = driver.backend.launch(batch, (), NOTHING).wait()
    close(np.stack(found.pooled), hidden[half:])
    # The first sampled row has two parallel samples, the next two rows are texts' with logits, and the last one's a
    # vector.
    parts = [(three, OTHER), (four, TEXT[:9])]
    batch = driver.sequences.step(parts, [6, 6, 14, 15, 3])
    batch = replace(batch, pooled=1, pooled_ids=((5, 9, 200), (), (7,)))
    chosen = SamplingRows.of([SamplingParams(temperature=0.7)] * 2, [3, 4], [7, 7])
    found = driver.backend.launch(batch, (), chosen).wait()
    assert found.token_ids == sample(torch.from_numpy(others[[6, 6]]), chosen).token_ids
    close(found.pooled[0], logits[7][[5, 9, 200]])
    close(found.pooled[1], beside[3])
    close(found.pooled[2], logits[8][[7]])


def test_rows_of_texts_match_transformers(folder, wanted):
    driver = GpuDriver(prepare(ModelFlags(model=str(folder), dtype="float32")), num_slots=24)
    check(driver, wanted)
    driver.backend.close()


@pytest.mark.long
def test_vectors_in_bfloat16_are_those_in_float32_rounded(folder, wanted):
    prepared = prepare(ModelFlags(model=str(folder), dtype="bfloat16"))
    driver = GpuDriver(prepared, num_slots=8, backend=gpu_backend(prepared))
    (number,) = driver.sequences.add()
    batch = replace(driver.sequences.step([(number, TEXT)], [len(TEXT) - 1]), pooled=1, pooled_ids=((),))
    (found,) = driver.backend.launch(batch, (), NOTHING).wait().pooled
    assert found.dtype == np.float32
    expected = wanted[0][0][-1]
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    driver.backend.close()


@pytest.mark.long
def test_rows_of_texts_from_two_ranks(folder, wanted):
    team = RankTeam(2)
    try:
        prepared = prepare(ModelFlags(model=str(folder), dtype="float32"))
        driver = GpuDriver(prepared, num_slots=24, backend=team.backend(prepared))
        check(driver, wanted)
        driver.backend.close()
    finally:
        team.close()
