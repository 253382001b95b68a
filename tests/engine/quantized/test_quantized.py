"""Quantized checkpoints: every format holds the values of its specification, and is served by them."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pillion.config import ModelFlags
from pillion.engine.checkpoints.checkpoint import decoder_tensors, open_checkpoint
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.checkpoints.weights import load_weights
from pillion.engine.load_model import precision_notes
from pillion.engine.models.config_parser import load_config
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix, rounded_rows
from tests.support.cpu_model import CpuDriver, needs_kernels
from tests.support.families import FAMILIES, make_model, tokens_of
from tests.support.oracle import Oracle, first_difference
from tests.support.quantized import (
    FULL_WORDS,
    PRODUCERS,
    Producer,
    affine,
    auto_round,
    compressed,
    gptq,
    nf4,
    packed,
    quantize_folder,
    round_rows,
)
from tests.support.torch_model import BackendDriver

pytestmark = pytest.mark.usefixtures("own_cache")


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
ROUNDED_ROWS = ("w8a8",)
# Other formats' scales are powers of two, or their codes so few that float32 holds each product exactly.
INEXACT = {"bnb-int8", "nf4-nested", "w8a16-packed", "w8a8-asymmetric"}


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


# Every format meets an odd width, biases with one KV head, fused projections and stacked experts in ``make test``.
SHAPES = ("llama-odd-hidden", "llama-mqa-biases", "phi3-partial-rope", "mixtral-window-stacked")


@pytest.mark.parametrize(
    "family", [*SHAPES, pytest.param("gemma3", marks=pytest.mark.long), pytest.param("olmo2", marks=pytest.mark.long)]
)
def test_matrices_hold_the_values_of_their_format(family, plain_folder, tmp_path):
    for name, make in PRODUCERS.items():
        few, wide = quantize_folder(plain_folder(family), tmp_path / name, make(group_of(family)))
        assert same_values(few, wide, exact=name not in INEXACT), name


@needs_kernels
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gptq-2-bits", "auto-round-3-bits") else pytest.param(name, marks=pytest.mark.long)
        for name in FULL_WORDS
    ],
)
def test_codes_of_two_and_three_bits(name, plain_folder, tmp_path):
    """Codes may span two words, and become 4-bit codes."""
    few, wide = quantize_folder(plain_folder("llama-gqa-tied"), tmp_path, FULL_WORDS[name]())
    assert {"layers.0.qkv.weight", "layers.1.down.weight"} <= same_values(few, wide)
    drivers = [CpuDriver(prepare(ModelFlags(model=str(folder), dtype="float32"))) for folder in (few, wide)]
    found, wanted = (driver.run_all(driver.sequences.add()[0], tokens_of(40, 7), [17]) for driver in drivers)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def same_values(few, wide, exact=True):
    """Compare all tensors of two folders; return the names quantized in the first."""
    config, quantized = load_config(few), set()
    with open_checkpoint(few, config) as ours, open_checkpoint(wide, load_config(wide)) as theirs:
        for key in decoder_tensors(config):
            wanted, got = theirs.load(key, torch.float32), ours.load(key, torch.float32)
            assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-7), (few, key)
            assert not exact or torch.equal(got, wanted), (few, key)
            if isinstance(ours.load_matrix(key, torch.float32), QuantizedMatrix):
                quantized.add(key)
    return quantized


def cases():
    """Return every format once, with models in turn: one format of each coding on the CPU kernels, the others on
    torch."""
    for name, family in zip(PRODUCERS, itertools.cycle(MODELS), strict=False):
        if name in ROUNDED_ROWS:
            continue
        kernels = "cpu" if name in ("awq", "gptq-act-order", "deepseek-fp8", "nf4", "nvfp4") else "torch"
        marks = [needs_kernels] if kernels == "cpu" else []
        yield pytest.param(name, family, kernels, marks=marks, id=f"{name}-{family}-{kernels}")


@pytest.mark.parametrize(("name", "family", "kernels"), list(cases()))
def test_logits_and_tokens_match_the_plain_values(name, family, kernels, plain_folder, tmp_path):
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


def test_rows_are_rounded_as_compressed_tensors_rounds_them(plain_folder, tmp_path):
    """Several texts, because a value between two codes may round either way, which changes the rest of its text. Each
    row's largest value becomes 127.5, which the kernels and torch round differently."""
    few, wide = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, PRODUCERS["w8a8"](16))
    prepared = prepare(ModelFlags(model=str(few), dtype="float32"))
    driver = BackendDriver(prepared)
    model, texts = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval(), tokens_of(48, 7)
    batch = torch.tensor(texts).view(16, 3)
    with torch.inference_mode():
        plain = model(batch).logits.float()
        wanted = round_rows(model, few)(batch).logits.float()
    found = torch.stack([driver.run_all(driver.sequences.add()[0], text, []) for text in batch.tolist()])
    same = ((found - wanted).abs() < 1e-4 + 1e-4 * wanted.abs()).flatten(1).all(1)
    assert int(same.sum()) >= 12, (found - wanted).abs().amax((1, 2))
    assert float((wanted - plain).abs().amax((1, 2)).min()) > 1e-3
    text = batch[int(same.nonzero()[0])].tolist()
    assert not first_difference(Oracle(model).greedy(text, 8), driver.greedy(text, 8), 0.1)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_and_torch_round_rows_alike(dtype, plain_folder, tmp_path):
    """Also for experts. Without rounded rows, the kernels' logits are as far from torch's as unrounded ones; with them
    0.15 of that, because a row's largest value lies between two codes. In bfloat16 it is 0.97, which proves nothing, so
    only bits across batches are compared."""
    few, wide = quantize_folder(plain_folder("mixtral"), tmp_path, PRODUCERS["w8a8"](16))
    exact, text = prepare(ModelFlags(model=str(few), dtype="float32")), tokens_of(40, 7)
    prepared = prepare(ModelFlags(model=str(few), dtype=dtype))
    plain = prepare(ModelFlags(model=str(wide), dtype="float32"))
    drivers = [CpuDriver(prepared), BackendDriver(exact), BackendDriver(plain)]
    ours, theirs, unrounded = (driver.run_all(driver.sequences.add()[0], text, [17]) for driver in drivers)
    if dtype == "float32":
        assert (ours - theirs).abs().mean() < 0.4 * (theirs - unrounded).abs().mean()
    assert torch.equal(drivers[0].run_all(drivers[0].sequences.add()[0], text, [1] * 20), ours)


def unchanged(name, weight):
    return {name: weight}, weight


@needs_kernels
def test_rows_of_experts_are_rounded_alike_or_not(plain_folder, tmp_path):
    """A layer's experts read the same rows: if one is plain, none rounds them."""
    rounding = PRODUCERS["w8a8"](16)

    def quantize(name, weight):
        if ".experts." not in name or ".experts.1." in name:
            return unchanged(name, weight)
        return rounding.quantize(name, weight)

    few, wide = quantize_folder(plain_folder("mixtral"), tmp_path, Producer(rounding.config, quantize))
    prepared, text = prepare(ModelFlags(model=str(few), dtype="float32")), tokens_of(40, 7)
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0].float()
    for driver in (CpuDriver(prepared), BackendDriver(prepared)):
        found = driver.run_all(driver.sequences.add()[0], text, [17])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gptq", "w4a16", "w8a8", "deepseek-fp8", "nf4"])
def test_heads_and_embeddings_that_are_quantized(name, tied, tmp_path):
    shape = {"tie_word_embeddings": tied, "marks": ("<a>", "<b>", "<c>", "<d>", "<e>", "<f>")}
    plain, producer = make_model(tmp_path / "plain", shape)[0], PRODUCERS[name](16)
    # Only compressed-tensors quantizes embeddings.
    also = ("embed_tokens",) if "config_groups" in producer.config and tied else ("lm_head",)
    if "config_groups" in producer.config:
        producer.config["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    tensors = load_file(plain / "model.safetensors")
    if tied and also == ("lm_head",):
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, plain / "model.safetensors")
    few, wide = quantize_folder(plain, tmp_path, producer, also)
    assert {"embedding"} <= same_values(few, wide) or also == ("lm_head",)
    ours, theirs = (load_weights(folder, load_config(folder), torch.float32) for folder in (few, wide))
    rows = torch.randn(3, 64)
    rounded = rounded_rows(rows) if name == "w8a8" else rows
    assert torch.equal(ours.lm_head(rows), theirs.lm_head(rounded))
    assert torch.equal(ours.embedding, theirs.embedding)


def test_a_scheme_for_each_group_of_modules(plain_folder, tmp_path):
    """Names win over expressions, which win over classes; modules plain in the file stay plain."""
    four, eight = PRODUCERS["w4a16"](16), PRODUCERS["w8a16-packed"](16)
    special = "model.layers.1.mlp.up_proj"
    floats = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")

    def quantize(name, weight):
        if "layers.0.self_attn.o_proj" in name:
            return unchanged(name, weight)
        chosen = floats if name.startswith(special) else four if ".mlp." in name else eight
        return chosen.quantize(name, weight)

    groups = {
        "group_0": eight.config["config_groups"]["group_0"],
        "group_1": {
            **four.config["config_groups"]["group_0"],
            "targets": ["re:.*mlp[.].*"],
            "format": "pack-quantized",
        },
        "group_2": {**floats.config["config_groups"]["group_0"], "targets": [special], "format": "float-quantized"},
    }
    config = {**eight.config, "config_groups": groups, "ignore": ["lm_head", "model.layers.0.self_attn.o_proj"]}
    few, wide = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, Producer(config, quantize))
    quantized = same_values(few, wide, exact=False)
    assert "layers.0.gate_up.weight" in quantized
    assert not {"layers.0.o.weight", "layers.1.gate_up.weight"} & quantized


def test_layers_with_sizes_of_their_own(plain_folder, tmp_path):
    """The first pattern wins, as in GPTQModel; patterns with a minus mean plain."""
    four, eight = gptq(), gptq(bits=8, group=32)

    def quantize(name, weight):
        if "o_proj" in name:
            return unchanged(name, weight)
        return (eight if "layers.1.mlp" in name else four).quantize(name, weight)

    dynamic = {"-:.*o_proj": {}, r"+:.*[.]1[.]mlp": {"bits": 8, "group_size": 32}, ".*mlp": {"bits": 4}}
    producer = Producer({**four.config, "dynamic": dynamic}, quantize)
    few, wide = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, producer)
    assert "layers.1.down.weight" in same_values(few, wide)


def test_modules_of_auto_round_with_sizes_of_their_own(plain_folder, tmp_path):
    """Names win over expressions; 16-bit modules are plain in the file."""
    four, eight, two = auto_round(), auto_round(8, group=0, symmetric=False), auto_round(2, group=32)

    def quantize(name, weight):
        if "o_proj" in name:
            return unchanged(name, weight)
        chosen = two if "layers.0.mlp.down" in name else eight if "mlp" in name else four
        return chosen.quantize(name, weight)

    eight_bits = {"bits": 8, "group_size": -1, "sym": False, "act_bits": None}
    special = {
        r".*mlp\..*": eight_bits,
        "o_proj$": {"bits": 16, "act_bits": 16},
        "model.layers.0.mlp.down_proj": {"bits": 2, "group_size": 32},
    }
    producer = Producer({**four.config, "extra_config": special}, quantize)
    few, wide = quantize_folder(plain_folder("llama-gqa-tied"), tmp_path, producer)
    quantized = same_values(few, wide, exact=False)
    assert {"layers.0.down.weight", "layers.1.down.weight", "layers.1.gate_up.weight"} <= quantized
    assert "layers.0.o.weight" not in quantized


def test_projections_with_orders_of_their_own_are_widened_together(plain_folder, tmp_path):
    def quantize(name, weight):
        tensors, values = gptq(act_order=True).quantize(name, weight)
        if "k_proj" in name:
            groups = torch.arange(weight.shape[1]).flip(0) // 16
            found, module = affine(weight, 4, 16, True, groups), name.removesuffix(".weight")
            tensors |= {f"{module}.qweight": packed(found.codes, 4).t(), f"{module}.scales": found.scales.t()}
            return {**tensors, f"{module}.g_idx": groups.int()}, found.values
        return tensors, values

    producer = Producer(gptq(act_order=True).config, quantize)
    few, wide = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, producer)
    quantized = same_values(few, wide)
    assert "layers.0.qkv.weight" not in quantized
    assert "layers.0.gate_up.weight" in quantized


def test_zero_biases_of_models_without_biases(plain_folder, tmp_path):
    def quantize(name, weight):
        tensors, values = gptq().quantize(name, weight)
        return {**tensors, name.replace(".weight", ".bias"): torch.zeros(len(weight))}, values

    producer = Producer(gptq().config, quantize)
    few, wide = quantize_folder(plain_folder("mistral-full"), tmp_path, producer)
    assert same_values(few, wide)


def test_blocks_that_end_in_the_middle_of_a_row(tmp_path):
    """40 inputs and blocks of 64."""
    plain = make_model(tmp_path / "plain", FAMILIES["llama-odd-hidden"])[0]
    few, wide = quantize_folder(plain, tmp_path, nf4(nested=False))
    same_values(few, wide)
    with open_checkpoint(few, load_config(few)) as checkpoint:
        assert checkpoint.load_matrix("layers.0.qkv.weight", torch.float32).group == 8


def test_activation_and_cache_schemes_are_reported_but_not_used(plain_folder, tmp_path):
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    producer = compressed("float-quantized", fp8, num_bits=8, type="float")
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}

    def quantize(name, weight):
        tensors, values = producer.quantize(name, weight)
        module = name.removesuffix(".weight")
        tensors[f"{module}.input_scale"] = torch.ones(1)
        if "k_proj" in name:
            tensors[f"{module.removesuffix('.k_proj')}.k_scale"] = torch.ones(1)
        return tensors, values

    made = Producer({**producer.config, "kv_cache_scheme": cache}, quantize)
    few, wide = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, made)
    assert same_values(few, wide)
    (note,) = precision_notes(prepare(ModelFlags(model=str(few), dtype="float32")))
    assert "rounds the inputs of quantized layers to fp8" in note


def test_unused_row_quantization_is_reported(plain_folder, tmp_path):
    """GPUs quantize only weights."""
    few, _ = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, PRODUCERS["w8a8"](16))
    prepared = prepare(ModelFlags(model=str(few), dtype="float32"))
    assert not list(precision_notes(prepared, "cpu"))
    (note,) = precision_notes(prepared, "cuda")
    assert "rounds the inputs of quantized layers to int8;" in note


def test_all_types_of_row_quantization_are_reported(plain_folder, tmp_path):
    """Groups of modules may differ."""
    producer = PRODUCERS["w8a8"](16)
    group = producer.config["config_groups"]["group_0"]
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    groups = {
        "group_0": {**group, "targets": ["re:.*mlp[.].*"]},
        "group_1": {**group, "input_activations": rows},
    }
    made = Producer({**producer.config, "config_groups": groups}, producer.quantize)
    few, _ = quantize_folder(plain_folder("llama-mqa-biases"), tmp_path, made)
    prepared = prepare(ModelFlags(model=str(few), dtype="float32"))
    for device, types in (("cpu", "to fp8;"), ("cuda", "to fp8 and int8;")):
        (note,) = precision_notes(prepared, device)
        assert f"rounds the inputs of quantized layers {types}" in note


def test_the_flag_that_rounds_rows_is_named_where_it_has_no_effect(plain_folder):
    """Only Pillion makes int8-dynamic."""
    flags = ModelFlags(model=str(plain_folder("llama-mqa-biases")), dtype="float32", quantization="int8-dynamic")
    prepared = prepare(flags)
    assert not list(precision_notes(prepared, "cpu"))
    (note,) = precision_notes(prepared, "cuda")
    assert "--quantization int8-dynamic" in note
    assert "producer" not in note


def test_a_separate_quantization_file_is_part_of_the_model(plain_folder, tmp_path):
    """Quantizers before 2024 wrote a separate file. Another such file makes another model."""
    few, _ = quantize_folder(plain_folder("mistral-full"), tmp_path, PRODUCERS["gptq"](16))
    config = json.loads((few / "config.json").read_text())
    said = config.pop("quantization_config")
    (few / "config.json").write_text(json.dumps(config))
    (few / "quantize_config.json").write_text(json.dumps(said))
    flags = ModelFlags(model=str(few), dtype="float32")
    first = prepare(flags)
    assert len(BackendDriver(first).greedy([5, 6], 4)) == 4
    (few / "quantize_config.json").write_text(json.dumps({**said, "sym": False}))
    assert prepare(flags).fingerprint != first.fingerprint
