"""--activation-quantization int8: kernels and torch round inputs alike, for all weight formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pillion.config import ModelFlags
from pillion.engine.backends.cpu.cpu_weights import CpuWeights, load_cpu_weights
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.checkpoints.weights import load_weights
from pillion.engine.load_model import precision_notes
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.kernels.cpu.quantized.dot_kinds import DOT_KINDS
from tests.engine.quantized.test_gguf import FILES, HALVES, MADE, prepared_from
from tests.support.cpu_model import CpuDriver, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.quantized import PRODUCERS, quantize_folder
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def plain_folder(tmp_path):
    made = {}

    def make(family):
        if family not in made:
            made[family] = make_model(tmp_path / "plain" / family, FAMILIES[family])[0]
        return made[family]

    return make


def rounding(model: Any, **flags: Any) -> PreparedModel:
    return prepare(ModelFlags(model=str(model), dtype="float32", activation_quantization="int8", **flags))


def packed(prepared: PreparedModel) -> CpuWeights:
    return load_cpu_weights(prepared, load_config(prepared.folder), lambda line: None)


def kinds_of(weights: CpuWeights) -> set[str]:
    """Return the kinds of all layers' matrices except routers."""
    names = {name.removesuffix(".kind") for name in weights.numbers if name.endswith(".kind")}
    return {weights.linear(name).kind for name in names if name.startswith("layers.") and "router" not in name}


def check_alike(prepared: PreparedModel, exact: PreparedModel) -> None:
    """Assert that the kernels' logits are torch's, up to each group's largest value, between two codes: one in 16 here.
    Those with only quantized weights are farther away. Other batches give the same bits."""
    assert prepared.fingerprint != exact.fingerprint
    text = tokens_of(40, 7)
    drivers = [CpuDriver(prepared), BackendDriver(prepared), BackendDriver(exact)]
    ours, theirs, unrounded = (driver.run_all(driver.sequences.add()[0], text, [17]) for driver in drivers)
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().mean() < 0.6 * (theirs - unrounded).abs().mean()
    assert (theirs - unrounded).abs().mean() < 0.1 * unrounded.std()
    assert torch.equal(drivers[0].run_all(drivers[0].sequences.add()[0], text, [1] * 20), ours)


@needs_kernels
@pytest.mark.parametrize(("name", "kind"), [("llama-mqa-biases", "int8"), ("mixtral", "int4")])
def test_inputs_are_rounded_for_a_quantized_plain_checkpoint(name, kind, plain_folder):
    folder = plain_folder(name)
    prepared = rounding(folder, quantization=kind)
    check_alike(prepared, prepare(ModelFlags(model=str(folder), dtype="float32", quantization=kind)))
    weights = packed(prepared)
    assert kinds_of(weights) <= DOT_KINDS.keys()
    assert weights.linear("lm_head").kind not in DOT_KINDS


@needs_kernels
@pytest.mark.parametrize("kinds", [MADE, tuple(HALVES)], ids=["by-32", "by-256"])
def test_inputs_are_rounded_for_a_gguf_file(kinds, tmp_path, monkeypatch):
    sizes = {}
    if kinds != MADE:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        monkeypatch.setitem(FILES["llama"][1], "rope.dimension_count", 64)
    exact = prepared_from(tmp_path / "a.gguf", "llama", tmp_path, kinds, **sizes)[1]
    prepared = rounding(tmp_path / "a.gguf", max_model_len=100)
    check_alike(prepared, exact)
    assert kinds_of(packed(prepared)) <= DOT_KINDS.keys()
    assert prepared.weights.endswith("; inputs in 8 bits")


@needs_kernels
@pytest.mark.parametrize("producer", ["awq", "gptq", "w4a16", "mxfp4-packed"])
def test_inputs_are_rounded_for_stored_formats(producer, plain_folder, tmp_path):
    few, _ = quantize_folder(plain_folder("qwen2-bias"), tmp_path, PRODUCERS[producer](16))
    prepared = rounding(few)
    check_alike(prepared, prepare(ModelFlags(model=str(few), dtype="float32")))
    assert kinds_of(packed(prepared)) <= DOT_KINDS.keys()


def test_heads_read_unrounded_rows(plain_folder):
    prepared = rounding(plain_folder("llama-mqa-biases"), quantization="int8")
    exact = prepare(ModelFlags(model=str(plain_folder("llama-mqa-biases")), dtype="float32", quantization="int8"))
    rounded, plain = (
        load_weights(one.folder, load_config(one.folder), torch.float32).lm_head for one in (prepared, exact)
    )
    rows = torch.randn(3, load_config(prepared.folder).hidden_size)
    assert torch.equal(rounded(rows), plain(rows))


def test_flags_that_do_not_fit_are_refused(plain_folder):
    folder = plain_folder("llama-mqa-biases")
    with pytest.raises(ConfigError, match=r"those of .* are plain; add --quantization int8 or int4"):
        rounding(folder)
    with pytest.raises(ConfigError, match="both round inputs"):
        rounding(folder, quantization="int8-dynamic")
    with pytest.raises(ConfigError, match="load-format dummy"):
        rounding(folder, load_format="dummy")


def test_the_flag_is_named_where_it_has_no_effect(plain_folder):
    prepared = rounding(plain_folder("llama-mqa-biases"), quantization="int8")
    assert not list(precision_notes(prepared, "cpu"))
    (note,) = precision_notes(prepared, "cuda")
    assert "--activation-quantization int8 rounds the inputs of linear layers on CPUs only" in note
