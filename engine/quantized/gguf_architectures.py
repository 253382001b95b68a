"""Turns a GGUF file's metadata and tensor names into those of a Hugging Face folder. Imports no torch.

The table has a row for each architecture. Keys and names are those of llama.cpp's converter (``gguf-py``), whose
changes are undone; what its loader derives by itself (``src/llama-model.cpp``) is in ``derived``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pillion.engine.models.config_keys import words
from pillion.engine.quantized.gguf_reader import GgufModel, GgufTensor
from pillion.errors import ConfigError

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
# Read by add_rope and by the checks of read_config.
_OTHER_KEYS = words(
    """
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow attention.value_length
    """
)
# No effect on the numbers of texts.
_IDLE_KEYS = frozenset({"rope.scaling.finetuned", "pooling_type", "tensor_data_layout"})
_OF_PICTURES = ("vision.", "audio.", "mm.")
_TENSORS_OF_PICTURES = ("v.", "a.", "mm.")
# Values that change nothing; any other key that is not read may be 0, false or empty.
_NEUTRAL = {
    "attention.causal": (True,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    **dict.fromkeys(("expert_weights_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"), (0.0, 1.0)),
}
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Experts of a layer are one tensor, and one name for each in a folder.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<suffix>weight|bias)")
# Divisors of the rotary frequencies: for texts of any length, for short ones and for long ones.
_ROPE_FACTORS, _ROPE_SHORT, _ROPE_LONG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_FACTORS = (_ROPE_FACTORS, _ROPE_SHORT, _ROPE_LONG)
# Gemma models of this many layers scale scores by the root of hidden / heads, others by that of a head's values.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """An architecture of GGUF files.

    Attributes:
        model_type: its ``model_type`` in config.json.
        keys: keys of its metadata, beside those of all, by their names in config.json.
        config: values of config.json that llama.cpp has in its code.
        derived: what llama.cpp computes from the metadata and the config so far.
        others: further keys: those that ``derived`` reads, and those that follow from others.
        tensors: names of a layer's tensors beside, or instead of, those of all.
        permutes: whether the two halves of a rotated head are interleaved in rows of queries and keys.
        shifted_norms: whether the weights of norms are stored with 1 added.
        partial_rope: whether only a part of a head may be rotated.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[GgufModel, Mapping[str, Any]], Mapping[str, Any]] = lambda model, config: {}
    others: Set[str] = frozenset()
    tensors: Mapping[str, str] = field(default_factory=dict)
    permutes: bool = False
    shifted_norms: bool = False
    partial_rope: bool = False


def _gemma(model: GgufModel, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scale of scores, which layers have a window, and the frequencies of those."""
    by_head = config["hidden_size"] // config["num_attention_heads"]
    largest = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[model.architecture]
    found: dict[str, Any] = {"query_pre_attn_scalar": by_head if largest else config.get("head_dim", by_head)}
    pattern = model.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        kinds = ("full_attention", "sliding_attention")
        found["layer_types"] = [kinds[int(slides)] for slides in pattern[: config["num_hidden_layers"]]]
    elif pattern is not None:
        found["sliding_window_pattern"] = pattern
    if model.architecture == "gemma3":
        found["rope_local_base_freq"] = model.get("rope.freq_base_swa") or 10_000.0
        if not config.get("sliding_window"):
            found["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return found


_GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Files of Llama, SmolLM2 and Mistral are all "llama".
ARCHITECTURES = {
    "llama": GgufArchitecture(model_type="llama", permutes=True),
    "qwen2": GgufArchitecture(model_type="qwen2"),
    "qwen3": GgufArchitecture(model_type="qwen3"),
    "qwen3moe": GgufArchitecture(
        model_type="qwen3_moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        config={"norm_topk_prob": True},
        tensors=_EXPERTS,
    ),
    "phi3": GgufArchitecture(
        model_type="phi3",
        keys={"attention.sliding_window": "sliding_window"},
        # The factor of attention follows from the two context lengths.
        others={"rope.scaling.attn_factor"},
        tensors=_FUSED,
        partial_rope=True,
    ),
    "gemma2": GgufArchitecture(
        model_type="gemma2",
        keys=_GEMMA_KEYS,
        derived=_gemma,
        others={"attention.sliding_window_pattern"},
        tensors=_FOUR_NORMS,
        shifted_norms=True,
    ),
    "gemma3": GgufArchitecture(
        model_type="gemma3_text",
        keys=_GEMMA_KEYS,
        derived=_gemma,
        others={"attention.sliding_window_pattern", "rope.freq_base_swa"},
        tensors=_FOUR_NORMS,
        shifted_norms=True,
    ),
}


def read_config(model: GgufModel) -> dict[str, Any]:
    """Returns the config.json of a model, without the tokens that end a text. Raises ConfigError for an architecture,
    or a part of one, that is not read."""
    name = model.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"GGUF files of the architecture {name!r} are not read ({known} are): use the model's folder")
    row = ARCHITECTURES[name]
    keys = {**_KEYS, **row.keys}
    _refuse_unread(model, {*keys, *_OTHER_KEYS, *_IDLE_KEYS, *row.others})
    config: dict[str, Any] = {"model_type": row.model_type, "vocab_size": _vocab_size(model), **row.config}
    config |= {ours: _one(key, model.get(key)) for key, ours in keys.items() if model.get(key) is not None}
    if missing := [
        key for key in _KEYS if key not in ("attention.key_length", "vocab_size") and model.get(key) is None
    ]:
        if missing != ["attention.head_count_kv"]:
            raise ConfigError(f"its metadata lack {name}.{missing[0]}")
        config["num_key_value_heads"] = config["num_attention_heads"]
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if model.get("attention.value_length") not in (None, head_dim):
        raise ConfigError(f"its keys have {head_dim} values, and {name}.attention.value_length is another number")
    config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in model.tensors)
    config |= row.derived(model, config)
    add_rope(config, model)
    rotated = model.get("rope.dimension_count") or head_dim
    if rotated != head_dim:
        if not row.partial_rope:
            raise ConfigError(f"{name}.rope.dimension_count = {rotated}, and heads have {head_dim} values")
        config["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    return config


def _refuse_unread(model: GgufModel, read: set[str]) -> None:
    """Raises ConfigError for the first key of the architecture's own that may change numbers and is not read."""
    begin = f"{model.architecture}."
    for key, value in model.metadata.items():
        own = key.removeprefix(begin)
        if own == key or own in read or own.startswith(_OF_PICTURES):
            continue
        if value in _NEUTRAL[own] if own in _NEUTRAL else not np.any(value):
            continue
        if own.startswith("expert"):
            others = ", ".join(one for one, row in ARCHITECTURES.items() if "expert_count" in row.keys)
            raise ConfigError(f"{key} = {value}: mixture of experts is read from folders and files of {others}")
        raise ConfigError(f"its metadata have {key} = {value!r:.80}, which is not read: use the model's folder")


def _one(key: str, value: Any) -> Any:
    """Returns the number of all layers. Raises ConfigError where layers have different ones."""
    if not isinstance(value, np.ndarray):
        return value
    found = set(value.tolist())
    if len(found) != 1:
        raise ConfigError(f"layers have different values of {key}, which is not read")
    return found.pop()


def _vocab_size(model: GgufModel) -> int:
    return len(model.metadata.get("tokenizer.ggml.tokens", ()))


def add_rope(config: dict[str, Any], model: GgufModel) -> None:
    """Adds the rotary embedding: its base, its scaling, and the factors that are tensors."""
    rope = config.setdefault("rope_parameters", {})
    rope |= {"rope_type": "default", "rope_theta": model.get("rope.freq_base") or 10_000.0}
    kind = model.get("rope.scaling.type") or "linear"
    factor = model.get("rope.scaling.factor") or model.get("rope.scale_linear")
    original = model.get("rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(f"rope.scaling.type is {kind!r}, which is not known")
    if kind == "yarn" or (kind == "linear" and factor):
        rope.update(rope_type=kind, factor=float(factor or 1.0))
        if original is not None:
            rope["original_max_position_embeddings"] = int(original)
    if kind == "yarn":
        for key, ours in (("attn_factor", "attention_factor"), ("beta_fast",) * 2, ("beta_slow",) * 2):
            if (value := model.get(f"rope.scaling.yarn_{key}")) is not None:
                rope[ours] = value
    factors = {tensor.name: tensor.numbers().tolist() for tensor in model.tensors if tensor.name in _FACTORS}
    if _ROPE_FACTORS in factors:
        one = factors[_ROPE_FACTORS]
        rope.update(rope_type="longrope", short_factor=one, long_factor=one, factor=1.0, attention_factor=1.0)
    if _ROPE_SHORT in factors and _ROPE_LONG in factors:
        rope.update(rope_type="longrope", short_factor=factors[_ROPE_SHORT], long_factor=factors[_ROPE_LONG])
        config["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])


def folder_tensors(model: GgufModel, config: Mapping[str, Any]) -> Iterator[tuple[str, GgufTensor, np.ndarray | None]]:
    """Yields each tensor with its name in a folder and the order of its rows there, None where that is the file's; of
    all experts of a layer, one after another. Raises ConfigError for a tensor that is not known."""
    row = ARCHITECTURES[model.architecture]
    layer_tensors = {**_LAYER_TENSORS, **row.tensors}
    for tensor in model.tensors:
        if tensor.name in _FACTORS or tensor.name.startswith(_TENSORS_OF_PICTURES):
            continue
        parts = _TENSOR.fullmatch(tensor.name)
        layer = parts["layer"] if parts else None
        known = (_MODEL_TENSORS if layer is None else layer_tensors).get(parts["stem"]) if parts else None
        if parts is None or known is None:
            raise ConfigError(f"its tensor {tensor.name} is not read in the architecture {model.architecture}")
        name = f"{known}.{parts['suffix']}" if layer is None else f"model.layers.{layer}.{known}.{parts['suffix']}"
        if "{}" not in known:
            yield name, tensor, _row_order(row, parts["stem"], tensor, config)
            continue
        for expert in range(len(tensor.data)):
            shape, data = tensor.shape[1:], tensor.data[expert]
            yield name.format(expert), GgufTensor(tensor.name, tensor.kind, shape, data), None


def _row_order(row: GgufArchitecture, stem: str, tensor: GgufTensor, config: Mapping[str, Any]) -> np.ndarray | None:
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stem)
    if not row.permutes or heads is None:
        return None
    rows = len(tensor.data)
    return np.arange(rows).reshape(config[heads], rows // config[heads] // 2, 2).swapaxes(1, 2).reshape(rows)


def plain_numbers(model: GgufModel, tensor: GgufTensor, order: np.ndarray | None) -> np.ndarray:
    """Returns a tensor's numbers as a folder has them."""
    numbers = tensor.numbers()
    if order is not None:
        numbers = numbers[order]
    if ARCHITECTURES[model.architecture].shifted_norms and tensor.name.endswith("norm.weight"):
        numbers = numbers - 1
    return numbers
