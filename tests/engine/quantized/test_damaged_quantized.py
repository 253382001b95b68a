"""Damaged and mislabelled quantized checkpoints: each is rejected with the faulty name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pillion.engine.checkpoints.weights import load_weights
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from tests.support.families import FAMILIES, make_model
from tests.support.quantized import PRODUCERS, compressed, quantize_folder

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
GROUPS_OF_48 = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 48}
MAKERS = {
    **PRODUCERS,
    "w4a8-codes": lambda group: compressed("int-quantized", num_bits=4, strategy="channel"),
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Folders of one small model by format, made once."""
    plain, made = make_model(tmp_path_factory.mktemp("plain"), FAMILIES["llama-gqa-tied"])[0], {}

    def make(name):
        if name not in made:
            made[name] = quantize_folder(plain, tmp_path_factory.mktemp(name), MAKERS[name](16))[0]
        return made[name]

    return make


def load(folder):
    return load_weights(folder, load_config(folder), torch.float32)


def fill(name, value, count=1):
    def change(tensors):
        flat = tensors[name].view(-1)
        flat[:count] = torch.tensor(value).to(flat.dtype)

    return change


def replace(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


def drop(name):
    return lambda tensors: tensors.pop(name)


def state(**changes):
    def change(tensors):
        name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
        found = {**json.loads(bytes(tensors[name].tolist())), **changes}
        tensors[name] = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("awq", drop(f"{Q}.qweight"), "lacks .*q_proj.weight"),
        ("awq", drop(f"{Q}.scales"), "q_proj.scales is missing, which a matrix of awq, 4 bits in groups of 16 needs"),
        ("awq", drop(f"{Q}.qzeros"), "q_proj.qzeros is missing"),
        ("awq", fill(f"{DOWN}.scales", float("nan")), "down_proj.scales contains NaN"),
        ("awq", fill(f"{DOWN}.scales", float("inf")), "down_proj.scales contains NaN or infinit"),
        ("awq", replace(f"{Q}.qweight", torch.Tensor.long), "q_proj.qweight is I64, not I32"),
        ("awq", replace(f"{Q}.qweight", lambda tensor: tensor[:-1]), r"q_proj.qweight is \[63, 8\], not \[64, 8\]"),
        ("awq", replace(f"{Q}.qzeros", lambda tensor: tensor[:, :-1]), r"q_proj.qzeros is \[4, 7\], not \[4, 8\]"),
        ("awq", lambda tensors: tensors.update({f"{Q}.bias": torch.ones(64)}), "holds .*q_proj.bias"),
        ("awq", lambda tensors: tensors.update({f"{Q}.extra": torch.ones(64)}), "holds .*q_proj.extra"),
        ("gptq", fill(f"{Q}.qzeros", 0), "q_proj.qzeros has zero points other than 8"),
        ("gptq", fill(f"{Q}.g_idx", 4), "q_proj.g_idx names groups outside of 0 to 3"),
        ("gptq", fill(f"{Q}.g_idx", -1), "q_proj.g_idx names groups outside of 0 to 3"),
        ("gptq-act-order", fill(f"{Q}.g_idx", 0, 64), "q_proj.g_idx gives group 0 64 inputs, not 16"),
        ("gptq", replace(f"{Q}.g_idx", torch.Tensor.float), "q_proj.g_idx is F32"),
        ("gptq-8-bits", replace(f"{Q}.scales", torch.Tensor.int), "q_proj.scales is I32"),
        ("w4a16", drop(f"{Q}.weight_scale"), "q_proj.weight_scale is missing"),
        ("w4a16", fill(f"{Q}.weight_scale", float("nan")), "q_proj.weight_scale contains NaN"),
        ("w4a16-asymmetric", drop(f"{Q}.weight_zero_point"), "q_proj.weight_zero_point is missing"),
        (
            "w4a16-asymmetric",
            replace(f"{Q}.weight_zero_point", lambda tensor: torch.full((64, 4), 8, dtype=torch.int8)),
            "q_proj.weight_zero_point has numbers outside of -8 to 7",
        ),
        (
            "w4a16-asymmetric",
            replace(f"{Q}.weight_zero_point", lambda tensor: torch.zeros(64, 4, dtype=torch.int32)),
            r"q_proj.weight_zero_point is torch.int32 \[64, 4\], which does not fit 64 rows",
        ),
        ("w4a16", fill(f"{Q}.weight_shape", 32), r"q_proj.weight_shape is \[32, 64\], not \[64, 64\]"),
        ("w4a16-act-order", fill(f"{Q}.weight_g_idx", 9), "q_proj.weight_g_idx names groups outside"),
        ("w4a8-codes", fill(f"{Q}.weight", 8), "q_proj.weight has numbers outside of -8 to 7"),
        ("w8a8", replace(f"{Q}.weight", lambda tensor: tensor.view(torch.uint8)), "q_proj.weight is U8, not I8"),
        ("w8a8", replace(f"{Q}.weight_scale", lambda tensor: tensor[:5]), r"q_proj.weight_scale is \[5, 1\], not"),
        ("w8a8", drop(f"{Q}.weight_scale"), "q_proj.weight_scale is missing, which a matrix of compressed-tensors"),
        ("deepseek-fp8", drop(f"{Q}.weight_scale_inv"), "q_proj.weight_scale is missing, which a matrix of fp8"),
        # Tensors that change numbers and that the config announces.
        ("gptq-act-order", drop(f"{Q}.g_idx"), "q_proj.g_idx is missing, which a matrix of gptq"),
        ("w4a16-act-order", drop(f"{Q}.weight_g_idx"), "q_proj.weight_g_idx is missing"),
        ("nf4", drop(f"{Q}.weight.quant_state.bitsandbytes__nf4"), "quant_state.bitsandbytes__nf4 is missing"),
        ("nf4", drop(f"{Q}.weight.absmax"), "q_proj.weight.absmax is missing"),
        ("bnb-int8", drop(f"{Q}.SCB"), "q_proj.SCB is missing, which a matrix of bitsandbytes, 8 bits needs"),
        ("fp8-channel", fill(f"{Q}.weight", float("nan")), "q_proj.weight contains NaN"),
        (
            "fp8-channel",
            replace(f"{Q}.weight", lambda it: it.float().to(torch.float8_e5m2)),
            "q_proj.weight is F8_E5M2",
        ),
        (
            "deepseek-fp8",
            replace(f"{Q}.weight_scale_inv", lambda it: it[:1]),
            r"weight_scale_inv is \[1, 4\], not \[2, 4\]",
        ),
        ("deepseek-fp8", fill(f"{Q}.weight_scale_inv", 3e38), "q_proj.weight_scale_inv contains NaN or infinit"),
        (
            "deepseek-fp8-ue8m0",
            replace(f"{Q}.weight_scale_inv", lambda it: (it.view(torch.uint8) | 255).view(it.dtype)),
            "NaN",
        ),
        (
            "nvfp4",
            drop(f"{Q}.weight_scale"),
            "q_proj.weight_scale is missing, which a matrix of compressed-tensors, 4-bit",
        ),
        ("nvfp4", drop(f"{Q}.weight_global_scale"), "q_proj.weight_global_scale is missing"),
        ("nvfp4", fill(f"{Q}.weight_global_scale", 0), "q_proj.weight_global_scale is 0.0, not a number above 0"),
        ("nvfp4", fill(f"{Q}.weight_scale", float("nan")), "q_proj.weight_scale contains NaN"),
        ("nvfp4", fill(f"{Q}.weight_global_scale", 1e-38), "q_proj.weight_scale contains NaN or infinit"),
        ("nvfp4", replace(f"{Q}.weight_packed", lambda it: it.view(torch.int8)), "not as its quantization_config says"),
        ("mxfp4-packed", drop(f"{Q}.weight_scale"), "q_proj.weight_scale is missing"),
        ("mxfp4-packed", fill(f"{Q}.weight_scale", 255), "q_proj.weight_scale contains NaN"),
        ("modelopt-nvfp4", drop(f"{Q}.weight_scale_2"), "q_proj.weight_scale_2 is missing"),
        ("modelopt-nvfp4", replace(f"{Q}.weight_scale", torch.Tensor.half), "q_proj.weight_scale is F16, not F8_E4M3"),
        ("modelopt-nvfp4", fill(f"{Q}.weight_scale_2", float("nan")), "q_proj.weight_scale_2 is nan"),
        ("nf4", state(shape=[32, 128]), r"is for nf4 of \[32, 128\]"),
        ("nf4", state(quant_type="fp4"), "is for fp4"),
        ("nf4", state(blocksize=0), "blocksize must be 1 to 4096, not 0"),
        # Nothing of that size is allocated.
        ("nf4", state(blocksize=2**52), "blocksize must be 1 to 4096"),
        ("nf4-nested", state(nested_blocksize=2**50), "nested_blocksize must be 1 to 4096"),
        ("nf4", state(blocksize=32), "absmax has 64 values, not 128"),
        ("nf4", fill(f"{Q}.weight.quant_state.bitsandbytes__nf4", 0), "is not JSON"),
        ("nf4", fill(f"{Q}.weight.quant_map", 0.5), "quant_map has other values"),
        ("nf4", fill(f"{Q}.weight.absmax", float("nan")), "absmax contains NaN"),
        ("nf4", replace(f"{Q}.weight", lambda tensor: tensor[:-1]), r"q_proj.weight is \[2047, 1\]"),
        ("nf4-nested", drop(f"{Q}.weight.nested_absmax"), "nested_absmax is missing"),
        ("nf4-nested", state(nested_offset=None), "nested_offset None"),
        ("bnb-int8", fill(f"{Q}.SCB", float("inf")), "q_proj.SCB contains NaN or infinit"),
        ("bnb-int8", replace(f"{Q}.weight_format", lambda tensor: tensor + 2), "weight_format is 2"),
    ],
)
def test_invalid_tensors_are_refused_by_name(name, change, words, quantized, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(quantized(name), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as caught:
        load(folder)
    assert str(folder) in caught.value.message


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("awq", {"group_size": 48}, "groups of 48 do not divide its 64 inputs"),
        ("awq", {"group_size": 32}, "qzeros is"),
        ("gptq", {"bits": 8}, "qweight is"),
        (
            "w8a16",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": GROUPS_OF_48}}},
            "weight: groups of 48 do",
        ),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "zero points other than 8"),
        ("awq", {"quant_method": "gptq", "version": None, "zero_point": None}, "qweight is"),
        ("w4a16", {"format": "int-quantized"}, "quantized, but not as its quantization_config says"),
        ("deepseek-fp8", {"weight_block_size": [16, 16]}, "weight_scale_inv is"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused(name, change, words, quantized, tmp_path):
    folder = tmp_path / "mislabelled"
    shutil.copytree(quantized(name), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        load(folder)
