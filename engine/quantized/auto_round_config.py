"""The ``quantization_config`` of AutoRound, in which sizes may differ by module. Imports no torch.

AutoRound (https://github.com/intel/auto-round) writes tensors in the layouts of other producers, by ``packing_format``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pillion.engine.quantized.quantization import (
    ANY_MODULE,
    MatrixScheme,
    Quantization,
    Raw,
    checked_pattern,
    refuse_unknown,
    unsupported,
    whole,
    words_of,
)
from pillion.errors import ConfigError

_METHOD = "auto-round"
_DEFAULT_FORMAT = "auto_round:auto_gptq"
# Packing format -> layout of the tensors: "gptq_v2" is "gptq" without 1 subtracted from zero points.
_LAYOUTS = {
    "auto": "gptq",
    _DEFAULT_FORMAT: "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:llm_compressor": "nvfp4",
}
# Supported bit widths by layout.
_BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "awq": (4,), "nvfp4": (4,), "packed_mxfp4": (4,)}
# Layout of 4-bit floats -> default group size.
_FLOATS = {"nvfp4": 16, "packed_mxfp4": 32}
# Values of data_type for integer codes.
WHOLE_NUMBERS = re.compile(r"(rtn_|opt_rtn_)?int(_a?sym)?")
# Keys that extra_config may set for a module.
_MODULE_KEYS = "bits group_size sym data_type act_bits act_group_size act_sym act_data_type act_dynamic"
# Keys of AutoRound's search for codes, without effect on reading them; its exports to other formats have them, too.
SEARCH_KEYS = """
    autoround_version backend block_name_to_quantize to_quant_block_names quant_block_list modules_to_not_convert
    provider amp batch_size dataset enable_adam enable_alg_ext enable_deterministic_algorithms enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps iters low_cpu_mem_usage low_gpu_mem_usage
    lr lr_scheduler minmax_lr model_free momentum n_samples nblocks not_use_best_mse nsamples optimizer sampler
    scale_dtype seed seqlen static_attention_granularity static_kv_dtype static_kv_granularity supported_types
    train_bs
    """
# A key of extra_config with only these characters is a module name; any other is a regular expression.
_NAME = re.compile(r"[\w.-]+")


def parse_auto_round(raw: Raw) -> Quantization:
    """Parse an AutoRound config. Raises ConfigError, with its name, for an unsupported format or option."""
    refuse_unknown(raw, f"quant_method packing_format extra_config {SEARCH_KEYS} {_MODULE_KEYS}", "quantization_config")
    extra = raw.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(changes, Mapping) for changes in extra.values()):
        raise ConfigError("config.json: quantization_config: extra_config must give an object for each module")
    schemes = []
    # Module names before expressions, as the first match wins. Modules of 16 or 32 bits are plain tensors.
    for key in sorted(extra, key=lambda key: _NAME.fullmatch(key) is None):
        changes = {name: value for name, value in extra[key].items() if value is not None}
        refuse_unknown(changes, _MODULE_KEYS, f"extra_config of {key}")
        if words_of(changes, "bits", "") not in ("16", "32"):
            schemes.append((_pattern(key), _scheme({**raw, **changes})))
    return Quantization(method=_METHOD, schemes=(*schemes, (ANY_MODULE, _scheme(raw))))


def _pattern(key: str) -> str:
    """Return the regular expression for :func:`re.match` on module names of a key of extra_config."""
    return re.escape(key) + "$" if _NAME.fullmatch(key) else checked_pattern(f".*(?:{key})", "extra_config")


def _scheme(raw: Raw) -> MatrixScheme:
    # Old versions have "backend" instead of "packing_format".
    packing, data_type = words_of(raw, "packing_format backend", _DEFAULT_FORMAT), words_of(raw, "data_type", "int")
    layout, bits, activations = _LAYOUTS.get(packing), raw.get("bits"), words_of(raw, "act_bits", "16")
    if layout == "nvfp4" and data_type.startswith("mx_fp"):
        layout = "packed_mxfp4"
    fits = data_type.startswith(("nv_fp", "mx_fp")) if layout in _FLOATS else WHOLE_NUMBERS.fullmatch(data_type)
    if layout is None or not fits:
        raise unsupported(f"{_METHOD} in the format {packing} with numbers of type {data_type}")
    if type(bits) is not int or bits not in _BITS[layout]:
        allowed = " and ".join(map(str, _BITS[layout]))
        raise unsupported(f"{_METHOD} in the format {packing}, {bits} bits", f"{allowed} bits are")
    if activations not in ("16", "32") and not (layout in _FLOATS and activations == "4"):
        raise unsupported(f"{_METHOD} in the format {packing} with act_bits = {activations}")
    return MatrixScheme(
        layout=layout,
        kind="fp4" if layout in _FLOATS else "int",
        bits=bits,
        group=0 if raw.get("group_size") == -1 else whole(raw, "group_size", _FLOATS.get(layout, 128)),
        symmetric=raw.get("sym", True) is True,
        activations="fp4" if activations == "4" else "",
    )
