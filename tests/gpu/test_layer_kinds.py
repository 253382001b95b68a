"""Layers that differ in their heads, read keys and values of earlier ones, or have additional inputs per token (Gemma
4), on the GPU backend against transformers."""

from __future__ import annotations

from tests.support.gpu_model import GpuDriver, gpu_backend, make_family  # isort: skip  (before the kernels)

import pytest
import torch
from transformers import AutoModelForCausalLM

from pillion.engine.backends.gpu.gpu_loading import check_limits
from pillion.engine.backends.gpu.gpu_step import GpuStepRecord
from pillion.engine.checkpoints.prepare import prepare
from tests.gpu.test_backend import close
from tests.support.families import FAMILIES, GEMMA4, make_model, tokens_of
from tests.support.gpu import DEVICE, NATIVE

pytestmark = pytest.mark.usefixtures("own_cache")

# Tiles of weights are slow in the interpreter.
SMALL = {} if NATIVE else {"hidden_size": 32, "intermediate_size": 32}


def made(folder, family, **sizes):
    """The prepared model, two texts longer than its window of 24 tokens, and transformers' logits of both."""
    folder, flags = make_family(folder, family, **{**SMALL, **sizes})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = tokens_of(36, 2), tokens_of(36, 3)
    with torch.inference_mode():
        return prepare(flags), texts, [model(torch.tensor([text])).logits[0].float() for text in texts]


@pytest.mark.parametrize(
    "family",
    [
        "gemma4",
        "mimo-v2-flash",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("gemma4-keys", "gemma4-moe", "gemma4-unified")),
    ],
)
def test_families(family, tmp_path):
    """A prompt in chunks, of which the first samples nothing, then a decode beside one of another prompt."""
    prepared, (text, other), (wanted, beside) = made(tmp_path / "model", family)
    driver = GpuDriver(prepared, num_slots=8)
    one, two = driver.sequences.add(2)
    driver.step((one, text[:19]), sample=())
    close(driver.step((one, text[19:35]), sample=[0, 15]), wanted[[19, 34]])
    found = driver.step((one, text[35:]), (two, other[:2]), sample=[0, 2])
    close(found, torch.stack((wanted[35], beside[1])))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe"])
def test_two_ranks_share_each_kind_of_heads(team, family, tmp_path):
    """Each has one of two KV heads, or both the same if a kind has one; a chunk, and a decode beside another."""
    prepared, (text, other), (wanted, beside) = made(tmp_path / "model", family, intermediate_size=64)
    driver = GpuDriver(prepared, num_slots=8, backend=team.backend(prepared))
    one, two = driver.sequences.add(2)
    driver.step((one, text[:25]), sample=())
    found = driver.step((one, text[25:26]), (two, other[:3]), sample=[0, 3])
    close(found, torch.stack((wanted[25], beside[2])))
    driver.backend.close()


@pytest.mark.parametrize("options", [{"fp8": True}, {"invariant": True}])
def test_codes_and_one_order_of_sums(options, tmp_path):
    """A prompt in two chunks is close to transformers' logits, and with batch-invariant sums it has the bits of a
    prompt in one."""
    prepared, (text, _), (wanted, _) = made(tmp_path / "model", "gemma4")
    driver = GpuDriver(prepared, num_slots=8, backend=gpu_backend(prepared, **options))
    one, two = driver.sequences.add(2)
    driver.step((one, text[:30]), sample=())
    found = driver.step((one, text[30:34]), sample=range(4))
    whole = driver.step((two, text[:34]), sample=range(30, 34))
    if "fp8" in options:
        error = (found.cpu() - wanted[30:34]).abs().mean() / wanted[30:34].abs().mean()
        # Queries and keys are normed, and scores are not scaled, so codes change weights considerably.
        assert 0 < error < 0.25
    else:
        close(found, wanted[30:34])
        assert torch.equal(found, whole)


def test_the_product_of_token_inputs_is_compiled_at_the_start(tmp_path, monkeypatch):
    """It belongs to no layer, and must be compiled before the first step even if all layers are quantized."""
    model = GpuDriver(made(tmp_path / "model", "gemma4")[0], num_slots=8).backend._model
    compiled = []
    seen = {"compile": lambda self, weight, *_: compiled.append(weight), "max_rows": lambda self, weight: 1}
    monkeypatch.setattr(model, "_plain", type("Seen", (), seen)())
    monkeypatch.setattr(model, "layers", {})
    model.compile_products()
    assert [id(weight) for weight in compiled] == [
        id(model.weights.head),
        id(model.weights["token_inputs.projection"]),
    ]


def test_plans_of_all_parts_begin_at_cache_lines(tmp_path):
    """A kernel is specialized for pointers aligned to 16 bytes; an item has 32 bytes."""
    driver = GpuDriver(made(tmp_path / "model", "gemma4")[0], num_slots=8)
    plans = driver.backend._bound.record.attention
    assert [part.attention_words for part in driver.backend._bound.parts] == [len(plan) for plan in plans]
    assert len(plans) == 2
    assert {plan.data_ptr() % 32 for plan in plans} == {0}
    begins = [GpuStepRecord(7, 3, 16, words, DEVICE).attention for words in ([33, 9, 1], [8, 8])]
    assert {plan.data_ptr() % 32 for each in begins for plan in each} == {0}


def test_the_workspace_is_allocated_without_a_pool(tmp_path):
    """For layers as wide as in published models: heads of 512 values beside those of 16."""
    options = {**SMALL, **FAMILIES["gemma4-keys"], "num_hidden_layers": 2, "global_head_dim": 512}
    folder, flags = make_model(tmp_path / "model", {**options, "layer_types": GEMMA4["layer_types"][:2]})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prepared, text = prepare(flags), tokens_of(3, 2)
    backend = gpu_backend(prepared)
    check_limits(DEVICE, backend.layout)
    backend.allocate_workspace()
    driver = GpuDriver(prepared, num_slots=8, backend=backend)
    with torch.inference_mode():
        close(driver.step((driver.sequences.add()[0], text), sample=range(3)), model(torch.tensor([text])).logits[0])
