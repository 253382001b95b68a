"""Checkpoints in few bits: every format holds the values that its description gives it, and is served by them."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.models.model_config import load_config
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix
from tests.support.cpu_model import CpuDriver, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.oracle import Oracle, first_difference
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.torch_model import BackendDriver

torch.set_num_threads(1)

# A model of each family, and those whose tensors have other shapes or names.
MODELS = (
    "llama-odd-hidden",
    "llama-mqa-biases",
    "smollm3-nope",
    "mistral-full",
    "ministral",
    "mixtral",
    "mixtral-window-stacked",
    "qwen2-bias",
    "qwen3-qk-norm",
    "qwen3-moe-some-dense",
    "phi3-partial-rope",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
)
# Formats whose scales are powers or whose numbers are few enough that float32 holds each product exactly.
INEXACT = {"bnb-int8", "nf4-nested", "w8a16-packed", "w8a8-asymmetric"}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLION_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp("plain") / family, FAMILIES[family])[0]
        return made[family]

    return make


def group_of(family):
    return 8 if family == "llama-odd-hidden" else 16


@pytest.mark.parametrize("family", MODELS)
def test_matrices_hold_the_values_of_their_format(family, plain_folder, tmp_path):
    for name, make in PRODUCERS.items():
        few, wide = quantize_folder(plain_folder(family), tmp_path / name, make(group_of(family)))
        config = load_config(few)
        quantized = 0
        with open_checkpoint(few, config) as ours, open_checkpoint(wide, load_config(wide)) as theirs:
            for key in decoder_tensors(config):
                matrix, wanted = ours.take_matrix(key, torch.float32), theirs.take(key, torch.float32)
                quantized += isinstance(matrix, QuantizedMatrix)
                got = ours.take(key, torch.float32)
                assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-7), (name, key)
                assert name in INEXACT or torch.equal(got, wanted), (name, key)
        assert quantized, name


def cases():
    """Every format once, with models in turns and both backends."""
    for name, family, kernels in zip(
        PRODUCERS, itertools.cycle(MODELS), itertools.cycle(("cpu", "torch")), strict=False
    ):
        marks = [needs_kernels] if kernels == "cpu" else []
        yield pytest.param(name, family, kernels, marks=marks, id=f"{name}-{family}-{kernels}")


@pytest.mark.parametrize(("name", "family", "kernels"), list(cases()))
def test_logits_and_tokens_are_those_of_the_plain_values(name, family, kernels, plain_folder, tmp_path):
    few, wide = quantize_folder(plain_folder(family), tmp_path, PRODUCERS[name](group_of(family)))
    prepared = prepare(ModelFlags(model=str(few), dtype="float32", max_model_len=FAMILIES[family].get("serve", 0)))
    driver = CpuDriver(prepared) if kernels == "cpu" else BackendDriver(prepared)
    model, text = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval(), tokens_of(40, 7)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    (number,) = driver.sequences.add()
    torch.testing.assert_close(driver.run_all(number, text, [17]), wanted, atol=1e-4, rtol=1e-4)
    expected = Oracle(model).greedy(text, 8)
    assert not first_difference(expected, driver.greedy(text, 8), 1e-3)
