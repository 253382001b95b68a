"""Descriptions of quantization_config, and rejections by name before weights are read."""

from __future__ import annotations

import pytest

from pillion.engine.quantized.quantization_methods import parse_quantization
from pillion.errors import ConfigError

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "static_kv_granularity": "tensor"}
EXPORTED = {"data_type": "int", "iters": 200, "autoround_version": "0.13.0", "lr_scheduler": None, "seed": 42}
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def parsed(found):
    return parse_quantization("llama", {"quantization_config": found})


def with_group(weights, **changes):
    return {**PACKED, **changes, "config_groups": {"group_0": {**GROUP, "weights": weights}}}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"}, "awq, 4 bits in groups of 128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}, "awq, 4 bits in groups of 64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True, "meta": {"a": 1}}, "gptq, 8 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*down": {"bits": 8}, "-:.*up": {}}},
            "gptq, 8 bits in groups of 32 and 4 bits in groups of 32",
        ),
        (PACKED, "compressed-tensors, 4 bits in groups of 128"),
        (AUTO_ROUND, "auto-round, 4 bits in groups of 64"),
        # AutoRound's exports to other producers' formats, with their names.
        ({**AUTO_ROUND, **EXPORTED, "quant_method": "gptq", "damp_percent": 0.01}, "gptq, 4 bits in groups of 64"),
        ({**AUTO_ROUND, **EXPORTED, "quant_method": "awq", "zero_point": False}, "awq, 4 bits in groups of 64"),
        ({**AUTO_ROUND, "model_free": True}, "auto-round, 4 bits in groups of 64"),
        (
            {**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 8, "sym": True}, ".*o_proj": {"bits": 16}}},
            "auto-round, 8 bits in groups of 64 and 4 bits in groups of 64",
        ),
        ({**PACKED, "sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}}, "4 bits"),
        (with_group({**FP8, "strategy": "tensor"}, format="float-quantized"), "8-bit floats"),
        (
            with_group({**FP8, "strategy": "block", "block_structure": "128x64"}, format="float-quantized"),
            "8-bit floats in blocks of 128 x 64",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8, 8-bit floats in blocks of 128 x 128"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8, 8-bit floats"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fbgemm_fp8, 8-bit floats"),
        ({"load_in_8bit": True, "_load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes, NF4"),
        ({"quant_method": "pillion", "weights": "Q4_K, Q6_K"}, "Q4_K, Q6_K"),
        (with_group(FP4, format="nvfp4-pack-quantized"), "compressed-tensors, 4-bit floats in groups of 16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, 4-bit floats in groups of 16"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_NVFP4"}}, "modelopt, 4-bit floats"),
        ({"quant_method": "modelopt_fp4"}, "modelopt, 4-bit floats in groups of 16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt, 8-bit floats"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "modelopt, 8-bit floats in blocks of 128 x 128"),
    ],
)
def test_formats_are_described_in_words(found, words):
    assert words in parsed(found).words


def test_rounded_activations_are_noted():
    groups = {"group_0": {**GROUP, "weights": {**FP8, "strategy": "channel"}, "input_activations": ROWS}}
    assert parsed({**PACKED, "format": "float-quantized", "config_groups": groups}).activations == {"fp8"}
    assert not parsed(PACKED).activations
    groups = {"group_0": {**GROUP, "weights": FP4, "input_activations": {**FP4, "dynamic": "local"}}}
    assert parsed({**PACKED, "format": "nvfp4-pack-quantized", "config_groups": groups}).activations == {"fp4"}
    assert parsed({"quant_method": "modelopt", "quant_algo": "NVFP4"}).activations == {"fp4"}
    assert not parsed({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}).activations
    assert parsed({"quant_method": "modelopt", "quant_algo": "FP8"}).activations == {"fp8"}
    assert parsed({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}).fp8_rows


@pytest.mark.parametrize(
    ("rows", "row_codes", "activations"),
    [
        ({}, "dynamic", ""),
        ({"symmetric": False}, "", "int8"),
        ({"strategy": "tensor", "dynamic": False}, "", "int8"),
        ({"strategy": None, "dynamic": False}, "", "int8"),
        ({"strategy": "tensor"}, "", "int8"),
        ({"strategy": "group", "group_size": 32}, "", "int8"),
        ({"strategy": "token", "dynamic": False}, "", "int8"),
    ],
)
def test_rows_are_quantized_if_their_scale_needs_no_other_rows(rows, row_codes, activations):
    made = {key: value for key, value in {**ROWS, "type": "int", **rows}.items() if value is not None}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {**GROUP, "weights": weights, "input_activations": made}
    found = parsed({**PACKED, "format": "int-quantized", "config_groups": {"group_0": group}})
    assert (found.schemes[0][1].row_codes, found.schemes[0][1].activations) == (row_codes, activations)
    assert found.quantizes_inputs == bool(row_codes)
    # Row quantization is ignored for weights in groups.
    grouped = parsed({**PACKED, "config_groups": {"group_0": {**GROUP, "input_activations": made}}})
    assert (grouped.quantizes_inputs, grouped.activations) == (False, {"int8"})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, 4 bits, version gemv"),
        ({"quant_method": "awq", "bits": 3}, "awq, 3 bits"),
        ({"quant_method": "awq", "group_size": 0}, "group_size must be a whole number above 0, not 0"),
        ({"quant_method": "gptq", "bits": 5}, "gptq, 5 bits"),
        ({"quant_method": "auto-round", "bits": 5}, "auto-round in the format auto_round:auto_gptq, 5 bits"),
        ({"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:auto_awq"}, "auto_awq, 8 bits"),
        ({"quant_method": "auto-round", "bits": 4, "backend": "auto_round:exllamav2"}, "format auto_round:exllamav2"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_int"}, "numbers of type mx_int"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits = 8"),
        ({"quant_method": "auto-round", "bits": 4, "rotation_config": {"a": 1}}, "rotation_config"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": 8}}, "extra_config must give an object"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"(": {}}}, "not a regular expression"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"super_bits": 6}}}, "super_bits"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor", "data_type": "int"}, "numbers of type int"),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "bits": 8}, "8 bits"),
        ({"quant_method": "gptq", "bits": 4.0}, "gptq, 4.0 bits"),
        ({"quant_method": "gptq", "bits": 4, "data_type": "mx_fp"}, "gptq, numbers of type mx_fp"),
        ({"quant_method": "awq", "bits": 4, "data_type": "mx_fp"}, "awq, numbers of type mx_fp"),
        (with_group({"num_bits": 4.0, "group_size": 128}), "4.0 bits of type int"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in the format marlin"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 8}}, "adapter"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*": 8}}, "dynamic must give an object"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, r"dynamic: \( is not a regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a{4294967295}": {}}}, "is not a regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(" * 5000: {}}}, "is not a regular expression"),
        ({"quant_method": "hqq"}, "quantized by hqq are not supported"),
        ({"quant_method": "aqlm", "bits": 2}, "quantized by aqlm, 2 bits"),
        ({"quant_method": "mxfp4", "bits": 3}, "bits = 3"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quantized by modelopt, w4a8_awq"),
        ({"quant_method": "modelopt"}, "quantized by modelopt, an unnamed algorithm"),
        ({"quant_method": "modelopt", "quantization": "NVFP4"}, "quantization must be an object, not 'NVFP4'"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "pre_quant_scale": True}},
            "pre_quant_scale",
        ),
        ({"load_in_4bit": True}, "bitsandbytes, 4 bits, type fp4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "numbers of type e5m2"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "experts of type fp4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "4 bits of type int"),
        (with_group({**FP4, "strategy": "group"}, format="nvfp4-pack-quantized"), "with the strategy group"),
        ({**PACKED, "format": "mxfp4-pack-quantized"}, "4 bits of type int"),
        ({**PACKED, "format": "marlin-24"}, "in the format marlin-24"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config = .*sparse-24-bitmask"),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "with transform_config"),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 4}}, "with kv_cache_scheme"),
        ({**PACKED, "moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config"),
        ({**PACKED, "config_groups": {}}, "at least one group"),
        ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 must have a list of targets"),
        ({**PACKED, "config_groups": {"group_0": {**GROUP, "targets": ["re:("]}}}, "not a regular expression"),
        (with_group({"num_bits": 3, "group_size": 128}), "3 bits of type int"),
        ({"quant_method": "pillion", "row_codes": "static"}, "row_codes must be dynamic or grouped, not 'static'"),
        (with_group({"num_bits": 4, "type": "float", "group_size": 32}), "4 bits of type float"),
        (with_group({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}), "strategy tensor_group"),
        (with_group({"num_bits": 4, "strategy": "group"}), "group_size must be a whole number"),
        (
            {**PACKED, "config_groups": {"group_0": {**GROUP, "input_activations": {"num_bits": 4}}}},
            "with input_activations",
        ),
    ],
)
def test_unsupported_methods_are_refused_by_name(found, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parsed(found)
    assert caught.value.message.startswith("llama: ")
