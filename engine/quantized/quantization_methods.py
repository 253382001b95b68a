"""Table of the producers of quantized checkpoints, by the ``quant_method`` of their configs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pillion.engine.quantized.auto_round_config import SEARCH_KEYS, WHOLE_NUMBERS, parse_auto_round
from pillion.engine.quantized.compressed_tensors_config import parse_compressed_tensors
from pillion.engine.quantized.quantization import (
    ANY_MODULE,
    GROUPED_ROWS,
    OWN_METHOD,
    QUANTIZATION_KEYS,
    WHOLE_ROWS,
    MatrixScheme,
    Quantization,
    Raw,
    block_of,
    checked_pattern,
    quantization_method,
    refuse_unknown,
    unsupported,
    whole,
    words_of,
)
from pillion.errors import ConfigError


def parse_quantization(name: str, config: Raw) -> Quantization | None:
    """Parse the quantization in the config of a model of family ``name``; None if it has none. Raises ConfigError for
    an unsupported method or option."""
    method = quantization_method(config)
    if not method:
        return None
    raw = next(config[key] for key in QUANTIZATION_KEYS if config.get(key))
    try:
        if not isinstance(raw, Mapping) or method not in METHODS:
            bits = isinstance(raw, Mapping) and (raw.get("bits") or raw.get("w_bit"))
            raise unsupported(method + (f", {bits} bits" if bits else ""))
        row_codes = raw.get("row_codes", "")
        if row_codes not in ("", WHOLE_ROWS, GROUPED_ROWS):
            raise ConfigError(
                f"config.json: quantization_config: row_codes must be {WHOLE_ROWS} or {GROUPED_ROWS}, not {row_codes!r}"
            )
        quantization = METHODS[method]({key: value for key, value in raw.items() if key != "row_codes"})
        return replace(quantization, row_codes=row_codes)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from None


def _group(raw: Raw, keys: str = "group_size") -> int:
    """Return the inputs per group of the first key of ``keys`` that is present, by default 128; 0 for all inputs, which
    a config writes as -1."""
    key = next((key for key in keys.split() if raw.get(key) is not None), "")
    return 0 if key and raw[key] == -1 else whole(raw, keys, 128)


# Keys of configs of GPTQModel, AutoGPTQ and AutoAWQ, of which only a few are read.
_GPTQ_KEYS = f"""
    {SEARCH_KEYS} data_type
    quant_method bits group_size sym desc_act checkpoint_format format dynamic lm_head meta pack_dtype
    act_group_aware cache_block_outputs cache_examples_on_gpu damp_auto_increment damp_percent device
    disable_exllama exllama_config failsafe hyb_act max_input_length method model_file_base_name model_name_or_path
    model_seqlen module_name_preceding_first_block modules_in_block_to_quantize mse offload_to_disk
    offload_to_disk_path pack_impl pad_token_id parallel_packing quantizer static_groups tokenizer true_sequential
    use_cuda_fp16 use_exllama
    """


def _refuse_other_numbers(raw: Raw, method: str) -> None:
    """Raise ConfigError for codes that are not integers: AutoRound exports such codes as awq and gptq, too."""
    if not WHOLE_NUMBERS.fullmatch(data_type := words_of(raw, "data_type", "int")):
        raise unsupported(f"{method}, numbers of type {data_type}")


def _awq(raw: Raw) -> Quantization:
    refuse_unknown(
        raw,
        _GPTQ_KEYS + "w_bit q_group_size zero_point version modules_to_fuse do_fuse fuse_max_seq_len",
        "quantization_config",
    )
    _refuse_other_numbers(raw, "awq")
    version = words_of(raw, "version format checkpoint_format", "gemm")
    bits = raw.get("bits", raw.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise unsupported(f"awq, {bits} bits, version {version}", "only 4 bits in version gemm are")
    symmetric = raw.get("zero_point") is False
    scheme = MatrixScheme(layout="awq", bits=4, group=_group(raw, "group_size q_group_size"), symmetric=symmetric)
    return Quantization(method="awq", schemes=((ANY_MODULE, scheme),))


def _gptq(raw: Raw) -> Quantization:
    refuse_unknown(raw, _GPTQ_KEYS, "quantization_config")
    _refuse_other_numbers(raw, "gptq")
    version = words_of(raw, "checkpoint_format format", "gptq")
    if version not in ("gptq", "gptq_v2") or raw.get("pack_dtype") not in (None, "int32"):
        raise unsupported(f"gptq in the format {version} of {raw.get('pack_dtype', 'int32')}")
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(changes, Mapping) for changes in dynamic.values()):
        raise ConfigError("config.json: quantization_config: dynamic must give an object for each pattern")
    schemes = [
        (checked_pattern(pattern.removeprefix("+:"), "dynamic"), _gptq_scheme({**raw, **changes}, version))
        for pattern, changes in dynamic.items()
        # "-:" excludes modules, which are plain tensors in the files.
        if not pattern.startswith("-:")
    ]
    return Quantization(method="gptq", schemes=(*schemes, (ANY_MODULE, _gptq_scheme(raw, version))))


def _gptq_scheme(raw: Raw, layout: str) -> MatrixScheme:
    if type(raw.get("bits")) is not int or raw["bits"] not in (2, 3, 4, 8):
        raise unsupported(f"gptq, {raw.get('bits')} bits", "only 2, 3, 4 and 8 bits are")
    group = _group(raw)
    # With a single group, the order of inputs has no effect.
    ordered = bool(raw.get("desc_act")) and group > 0
    symmetric = raw.get("sym") is True
    return MatrixScheme(layout=layout, bits=raw["bits"], group=group, symmetric=symmetric, ordered=ordered)


def _fp8(raw: Raw) -> Quantization:
    known = """
        quant_method activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers modules_to_convert
        dequantize scale_fmt expert_dtype kv_cache_scheme
        """
    refuse_unknown(raw, known, "quantization_config")
    kind, experts = words_of(raw, "fmt", "e4m3"), words_of(raw, "expert_dtype", "fp8")
    if kind not in ("e4m3", "float8_e4m3fn") or experts != "fp8":
        raise unsupported(f"fp8 with numbers of type {kind} and experts of type {experts}")
    block = raw.get("weight_block_size")
    rows, group = (0, 0) if block is None else block_of(block, "quantization_config: weight_block_size")
    # Scales rounded up to powers of two (ue8m0) are not supported.
    dynamic = words_of(raw, "activation_scheme", "dynamic") == "dynamic" and raw.get("scale_fmt") != "ue8m0"
    scheme = MatrixScheme(
        layout="codes", kind="fp8", bits=8, group=group, rows=rows, activations="fp8", fp8_rows=dynamic
    )
    return Quantization(method="fp8", schemes=((ANY_MODULE, scheme),))


def _fbgemm_fp8(raw: Raw) -> Quantization:
    refuse_unknown(raw, "quant_method activation_scale_ub modules_to_not_convert", "quantization_config")
    scheme = MatrixScheme(layout="codes", kind="fp8", bits=8, activations="fp8", fp8_rows=True)
    return Quantization(method="fbgemm_fp8", schemes=((ANY_MODULE, scheme),))


def _bitsandbytes(raw: Raw) -> Quantization:
    known = """
        quant_method load_in_4bit load_in_8bit llm_int8_threshold llm_int8_skip_modules llm_int8_has_fp16_weight
        llm_int8_enable_fp32_cpu_offload bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant
        bnb_4bit_quant_storage
        """
    refuse_unknown(raw, known, "quantization_config")
    if raw.get("load_in_8bit"):
        scheme = MatrixScheme(layout="bnb8", bits=8, activations="int8")
    elif words_of(raw, "bnb_4bit_quant_type", "fp4") == "nf4":
        scheme = MatrixScheme(layout="bnb4", kind="nf4", bits=4)
    else:
        raise unsupported("bitsandbytes, 4 bits, type fp4", "nf4 and 8 bits are")
    return Quantization(method="bitsandbytes", schemes=((ANY_MODULE, scheme),))


def _modelopt(raw: Raw) -> Quantization:
    """Parse a config of NVIDIA's Model Optimizer, or its older file hf_quant_config.json, which nests the keys and
    names some differently."""
    known = """
        quant_method quantization producer quant_algo kv_cache_scheme kv_cache_quant_algo config_groups ignore
        group_size
        """
    refuse_unknown(raw, known, "quantization_config")
    options = raw.get("quantization", raw)
    if not isinstance(options, Mapping):
        raise ConfigError(f"config.json: quantization_config: quantization must be an object, not {options!r}")
    if options is not raw:
        refuse_unknown(options, "quant_algo kv_cache_quant_algo group_size exclude_modules", "quantization_config")
    default = {"modelopt_fp8": "fp8", "modelopt_fp4": "nvfp4"}.get(raw["quant_method"], "")
    algorithm, cache = words_of(options, "quant_algo", default), words_of(options, "kv_cache_quant_algo", "")
    fp8 = MatrixScheme(layout="codes", kind="fp8", bits=8, rows=0, activations="fp8")
    fp4 = MatrixScheme(layout="modelopt_nvfp4", kind="fp4", bits=4, group=whole(options, "group_size", 16))
    schemes = {
        "fp8": fp8,
        "fp8_per_channel_per_token": replace(fp8, rows=1, fp8_rows=True),
        "fp8_pb_wo": replace(fp8, rows=128, group=128, activations=""),
        "nvfp4": replace(fp4, activations="fp4"),
        "w4a16_nvfp4": fp4,
    }
    if algorithm not in schemes or cache not in ("", "none", "fp8"):
        raise unsupported(f"modelopt, {algorithm or 'an unnamed algorithm'}", f"{', '.join(schemes)} are")
    return Quantization(method="modelopt", schemes=((ANY_MODULE, schemes[algorithm]),))


def _mxfp4(raw: Raw) -> Quantization:
    refuse_unknown(raw, "quant_method modules_to_not_convert dequantize", "quantization_config")
    scheme = MatrixScheme(layout="mxfp4", kind="fp4", bits=4, group=32)
    return Quantization(method="mxfp4", schemes=((ANY_MODULE, scheme),))


def _own(raw: Raw) -> Quantization:
    refuse_unknown(raw, "quant_method weights", "quantization_config")
    return Quantization(method=OWN_METHOD, weights=str(raw.get("weights", "")) or OWN_METHOD)


METHODS: Mapping[str, Callable[[Raw], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": parse_auto_round,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "bitsandbytes": _bitsandbytes,
    **dict.fromkeys(("modelopt", "modelopt_fp8", "modelopt_fp4"), _modelopt),
    "mxfp4": _mxfp4,
    OWN_METHOD: _own,
}
