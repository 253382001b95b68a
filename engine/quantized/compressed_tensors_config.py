"""The ``quantization_config`` of compressed-tensors, with a scheme per group of modules. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pillion.engine.quantized.quantization import (
    MatrixScheme,
    Quantization,
    Raw,
    block_of,
    checked_pattern,
    refuse_unknown,
    unsupported,
    whole,
    words_of,
)
from pillion.errors import ConfigError

# File format -> layout of its tensors.
_LAYOUTS = {
    "pack-quantized": "packed",
    "int-quantized": "codes",
    "float-quantized": "codes",
    "naive-quantized": "codes",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "packed_mxfp4",
}
# Keys of weights and of activations in a group of modules.
_NUMBER_KEYS = """
    num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype observer
    observer_kwargs
    """
# Class of modules -> pattern of their module names. Targets of other classes match no matrix.
_CLASSES = {
    "Linear": "(?!.*embed_tokens)",
    "LinearBase": "(?!.*embed_tokens)",
    "Module": "",
    "Embedding": ".*embed_tokens$",
}
_METHOD = "compressed-tensors"


def parse_compressed_tensors(raw: Raw) -> Quantization:
    """Parse a config of compressed-tensors. Raises ConfigError, with its name, for an unsupported scheme or option."""
    known = """
        quant_method format config_groups ignore quantization_status global_compression_ratio kv_cache_scheme version
        sparsity_config transform_config run_compressed dequantize use_optimized_inference
        """
    refuse_unknown(raw, known, "quantization_config")
    _refuse_other_compression(raw)
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("config.json: quantization_config: config_groups must name at least one group")
    targets: dict[str, MatrixScheme] = {}
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            raise ConfigError(f"config.json: quantization_config: config_groups.{name} must have a list of targets")
        refuse_unknown(group, "targets weights input_activations output_activations format", f"config_groups.{name}")
        if group.get("weights"):
            targets |= dict.fromkeys(map(str, group["targets"]), _scheme(group, words_of(raw, "format", "")))
    # The order in which compressed-tensors matches: names, expressions, classes.
    ordered = sorted(targets, key=lambda target: (target in _CLASSES, "re:" in target, target))
    return Quantization(method=_METHOD, schemes=tuple((_pattern(target), targets[target]) for target in ordered))


def _pattern(target: str) -> str:
    if target in _CLASSES:
        return _CLASSES[target]
    if not target.startswith("re:"):
        return re.escape(target) + "$"
    return checked_pattern(target.removeprefix("re:"), "targets")


def _refuse_other_compression(raw: Raw) -> None:
    sparsity, transform = raw.get("sparsity_config") or {}, raw.get("transform_config") or {}
    if not isinstance(sparsity, Mapping) or words_of(sparsity, "format", "dense") != "dense":
        raise unsupported(f"{_METHOD} with sparsity_config = {repr(sparsity)[:60]}")
    if not isinstance(transform, Mapping) or transform.get("config_groups"):
        raise unsupported(f"{_METHOD} with transform_config = {repr(transform)[:60]}")
    cache = raw.get("kv_cache_scheme")
    if cache and (not isinstance(cache, Mapping) or cache.get("num_bits") != 8):
        raise unsupported(
            f"{_METHOD} with kv_cache_scheme = {repr(cache)[:60]}",
            "8 bits are ignored, since Pillion's cache is more exact",
        )


def _scheme(group: Raw, model_format: str) -> MatrixScheme:
    file_format, weights = words_of(group, "format", model_format), group["weights"]
    if not isinstance(weights, Mapping):
        raise ConfigError(f"config.json: quantization_config: weights must be an object, not {weights!r}")
    refuse_unknown(weights, _NUMBER_KEYS, "weights")
    bits, kind = weights.get("num_bits", 8), words_of(weights, "type", "int")
    layout = _LAYOUTS.get(file_format)
    if layout is None:
        raise unsupported(f"{_METHOD} in the format {file_format or 'of an unnamed kind'}, {bits} bits")
    float_bits = {"codes": 8, "nvfp4": 4, "packed_mxfp4": 4}.get(layout)
    floats = float_bits if kind == "float" and weights.get("symmetric", True) else None
    whole_codes = kind == "int" and bits in (4, 8) and layout in ("packed", "codes")
    if type(bits) is not int or not (bits == floats or whole_codes):
        raise unsupported(
            f"{_METHOD}, {bits} bits of type {kind}", "4 and 8 bits of int, 8 of float, NVFP4 and MXFP4 are"
        )
    rows, size = _scale_sizes(weights, "tensor_group" if layout == "nvfp4" else "group")
    inputs = group.get("input_activations")
    activations, row_codes = _activations(inputs)
    if row_codes and (bits != 8 or size):
        # Products are faster with quantized inputs only if weights are int8 with one scale per row.
        activations, row_codes = "int8", ""
    return MatrixScheme(
        layout=layout,
        kind=f"fp{bits}" if bits == floats else "int",
        bits=bits,
        rows=rows,
        group=size,
        symmetric=bool(weights.get("symmetric", True)),
        ordered=size > 0 and rows == 1 and weights.get("actorder") in (True, "group", "dynamic"),
        activations=activations,
        row_codes=row_codes,
        fp8_rows=activations == "fp8" and (inputs or {}).get("dynamic") is True,
    )


def _scale_sizes(weights: Raw, grouped: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that share a scale; 0 means all. ``grouped``: the strategy name for
    groups of inputs."""
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else grouped
    strategy = words_of(weights, "strategy", inferred)
    if strategy == grouped:
        return 1, whole(weights, "group_size", None)
    if strategy == "block":
        block = weights.get("block_structure")
        sizes = [int(part) for part in re.findall(r"\d+", block)] if isinstance(block, str) else block
        return block_of(sizes, "quantization_config: block_structure")
    if strategy in ("tensor", "channel"):
        return int(strategy == "channel"), 0
    raise unsupported(f"{_METHOD} with the strategy {strategy}", "tensor, channel, group and block are")


def _activations(inputs: Any) -> tuple[str, str]:
    """Return the fields ``activations`` and ``row_codes`` of MatrixScheme."""
    if not inputs:
        return "", ""
    bits = inputs.get("num_bits", 8) if isinstance(inputs, Mapping) else None
    floats = isinstance(inputs, Mapping) and words_of(inputs, "type", "int") == "float"
    if bits != 8 and not (floats and bits == 4):
        raise unsupported(f"{_METHOD} with input_activations = {repr(inputs)[:60]}", "8 bits and 4-bit floats are")
    refuse_unknown(inputs, _NUMBER_KEYS, "input_activations")
    if floats:
        return f"fp{bits}", ""
    dynamic, symmetric = inputs.get("dynamic") or False, inputs.get("symmetric", True)
    strategy = words_of(inputs, "strategy", "token" if dynamic else "tensor")
    # With a scale per step instead of per token, a row's result would depend on the batch, so do not quantize then.
    return ("", "dynamic") if dynamic is True and strategy == "token" and symmetric else ("int8", "")
