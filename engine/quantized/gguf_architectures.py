"""Conversion of a GGUF file's metadata and tensor names to those of a Hugging Face folder. Imports no torch.

A table with a row per architecture. Keys and names are those of llama.cpp's converter (``gguf-py``), and the changes
that it makes to weights are undone; ``derived`` has what llama.cpp's loader derives (``src/llama-model.cpp``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pillion.engine.models.config_keys import words
from pillion.engine.models.families import FAMILIES
from pillion.engine.quantized.gguf_reader import GgufModel, GgufTensor
from pillion.errors import ConfigError

# Keys of all architectures -> names in config.json.
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
# Keys of all architectures that are read otherwise, and, in the last two lines, those without effect on texts.
_OTHER_KEYS = words(
    """
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier attention.value_length
    rope.scaling.finetuned rope.dimension_sections n_deepstack_layers pooling_type
    tensor_data_layout
    """
)
# Key -> its values without effect. Any other unread key must be 0, false or empty.
_NEUTRAL = {
    "attention.causal": (True,),
    **dict.fromkeys(("expert_gating_func", "expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("expert_weights_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"), (0.0, 1.0)),
}
# Tensors of all architectures -> their names in Llama, relative to the layer for those of layers.
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# GGUF stacks a layer's experts in one tensor; a Hugging Face checkpoint has one per expert.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_DEEPSEEK_KEYS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
}
_DEEPSEEK_OTHERS = words(
    """
    expert_group_count expert_group_used_count expert_gating_func expert_weights_norm expert_weights_scale
    nextn_predict_layers
    """
)
_DEEPSEEK_EXPERTS = {
    **_EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<own>(?P<stem>[\w.]+?)(?P<suffix>\.weight|\.bias)?)")
# Tensors with divisors of the rotary frequencies: of all texts, of short ones, and of long ones.
_ROPE_FACTORS, _ROPE_SHORT, _ROPE_LONG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_FACTORS = (_ROPE_FACTORS, _ROPE_SHORT, _ROPE_LONG)

Numbers = np.ndarray
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """An architecture of GGUF files. Tensor names are relative to their layer, e.g. "ssm_a" and "attn_q.weight".

    Attributes:
        model_type: the ``model_type`` in config.json, unless ``derived`` returns one.
        keys: metadata keys, in addition to those of all architectures -> names in config.json.
        config: values of config.json that llama.cpp hard-codes.
        derived: computes further values of config.json from the metadata and the values so far.
        others: keys that ``derived`` reads, and redundant ones; they are not read by their row in ``keys``.
        tensors: names of tensors, or of their modules, in addition to those of all architectures, or instead of them
            -> names in Llama.
        joined: tensor of a folder -> tensors of the file whose rows it concatenates.
        permutes: True if rows of queries and keys interleave the two halves of a rotated head.
        shifted_norms: True if norm weights, except those of SSMs, are stored with 1 added.
        partial_rope: True if only a part of a head may be rotated.
        changes: tensor of the file -> function that undoes the converter's change of its values. For a joined tensor,
            the key is the first of its tensors in the file, and the function takes the values of all of them.
        rows, columns: tensor of the file, with the same rule for joined ones -> order of rows or columns in a folder.
        swapped: tensors of experts that a folder stores as [experts, inputs, outputs] if they are plain.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=dict)
    derived: Callable[[GgufModel, Config], Config] = lambda model, config: {}
    others: Set[str] = frozenset()
    tensors: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    permutes: bool = False
    shifted_norms: bool = False
    partial_rope: bool = False
    changes: Mapping[str, Callable[..., Numbers]] = field(default_factory=dict)
    rows: Mapping[str, Callable[[Config], Numbers]] = field(default_factory=dict)
    columns: Mapping[str, Callable[[Config], Numbers]] = field(default_factory=dict)
    swapped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTensor:
    """A tensor of a folder, made from those of a file.

    Attributes:
        parts: tensors of the file whose rows it concatenates.
        rows, columns: order of rows and columns; None for that of the file.
        change, swapped: as in :class:`GgufArchitecture`.
    """

    name: str
    parts: tuple[GgufTensor, ...]
    rows: Numbers | None = None
    columns: Numbers | None = None
    change: Callable[..., Numbers] | None = None
    swapped: bool = False

    def numbers(self) -> Numbers:
        """Return the dequantized values."""
        values = [part.numbers() for part in self.parts]
        axis = max(values[0].ndim - 2, 0)
        if self.rows is not None:
            values = [np.concatenate(values, axis).take(self.rows, axis)]
        if self.columns is not None:
            values = [values[0].take(self.columns, -1)]
        if self.change is not None:
            return self.change(*values)
        joined = values[0] if len(values) == 1 else np.concatenate(values, axis)
        return joined.swapaxes(-1, -2) if self.swapped else joined


def _gemma(model: GgufModel, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the scale of attention scores, the layers with a sliding window, and the rotary base of these layers."""
    heads_dim = config["hidden_size"] // config["num_attention_heads"]
    # Models with these numbers of layers are the 27B ones, which divide scores by sqrt(hidden / heads) instead of
    # sqrt(head_dim).
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[model.architecture]
    derived: dict[str, Any] = {"query_pre_attn_scalar": heads_dim if largest else config.get("head_dim", heads_dim)}
    pattern = model.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        kinds = ("full_attention", "sliding_attention")
        derived["layer_types"] = [kinds[int(slides)] for slides in pattern[: config["num_hidden_layers"]]]
    elif pattern is not None:
        derived["sliding_window_pattern"] = pattern
    if model.architecture == "gemma3":
        derived["rope_local_base_freq"] = model.get("rope.freq_base_swa") or 10_000.0
        if not config.get("sliding_window"):
            derived["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return derived


def _needed(model: GgufModel, key: str) -> Any:
    """Return a key's value. Raises ConfigError if it is missing."""
    if (value := model.get(key)) is None:
        raise ConfigError(f"its metadata lack {model.architecture}.{key}")
    return value


def _mixtral(model: GgufModel, config: Config) -> Config:
    """Derive the config of Mixtral, whose files have the architecture llama, with experts; {} for Llama."""
    count = model.get("expert_count")
    if not count:
        if model.get("expert_used_count"):
            raise ConfigError("its metadata have expert_used_count and no experts")
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": count,
        "num_experts_per_tok": _needed(model, "expert_used_count"),
        "sliding_window": None,
    }


def _glm4_moe(model: GgufModel, config: Config) -> Config:
    """Derive use_qk_norm from the tensors, and the routing of experts."""
    normed = any(tensor.name == "blk.0.attn_q_norm.weight" for tensor in model.tensors)
    return {"use_qk_norm": normed, **_routing(model)}


def _routing(model: GgufModel) -> dict[str, Any]:
    """Return the routing of experts in models like DeepSeek's, by keys of config.json."""
    return {
        "n_group": model.get("expert_group_count") or 1,
        "topk_group": model.get("expert_group_used_count") or 1,
        "norm_topk_prob": bool(model.get("expert_weights_norm")),
        "routed_scaling_factor": _shortest(model.get("expert_weights_scale") or 1.0),
    }


def _ministral(model: GgufModel, config: Config) -> Config:
    """Derive the config of Ministral 3, which has a position-dependent query scale; {} without that scale."""
    beta = model.get("attention.temperature_scale")
    if not beta:
        return {}
    return {
        "model_type": "ministral3",
        "rope_parameters": {**config["rope_parameters"], "llama_4_scaling_beta": _shortest(beta)},
    }


def _lfm2(model: GgufModel, config: Config) -> Config:
    """Derive the kinds of layers: those without KV heads are convolutions."""
    heads = np.broadcast_to(_needed(model, "attention.head_count_kv"), config["num_hidden_layers"]).tolist()
    kinds = ["full_attention" if count else "conv" for count in heads]
    return {"num_key_value_heads": max(heads), "layer_types": kinds}


def _qwen35(model: GgufModel, config: Config) -> Config:
    """Derive the width of a delta net's value heads."""
    return {"linear_value_head_dim": _needed(model, "ssm.inner_size") // _needed(model, "ssm.time_step_rank")}


def _by_key_heads(size_key: str = "", after_keys: bool = False) -> Callable[[Config], Numbers]:
    """Return a function from the config to the order of a delta net's value heads in a folder: all heads of the first
    key head, then those of the second ... A file has the first value heads of all key heads, then the second ones ...
    ``size_key``: config key of a head's size, "" for 1; ``after_keys``: True if queries and keys come before."""

    def order(config: Config) -> Numbers:
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = config[size_key] if size_key else 1
        num_before = 2 * keys * config["linear_key_head_dim"] if after_keys else 0
        value_heads = np.arange(heads * size).reshape(heads // keys, keys, size).swapaxes(0, 1).reshape(-1)
        return np.concatenate((np.arange(num_before), num_before + value_heads))

    return order


def _by_groups(config: Config) -> Numbers:
    """Return the row order of a delta net's in_proj_qkvz, which has query, key, values and gates of each key head."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    ends = np.cumsum([0, *[keys * config["linear_key_head_dim"]] * 2, *[heads * config["linear_value_head_dim"]] * 2])
    return np.concatenate([np.arange(*part).reshape(keys, -1) for part in itertools.pairwise(ends)], 1).ravel()


def _deepseek2(model: GgufModel, config: Config) -> Config:
    """Derive the widths of heads and the routing of DeepSeek's models, and the model type of V3, which routes by
    sigmoids. Files whose KV heads are merged have the widths under the keys with ``_mla``."""
    key, value = (
        model.get(f"attention.{kind}_length_mla") or _needed(model, f"attention.{kind}_length")
        for kind in ("key", "value")
    )
    derived = {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": key - _needed(model, "rope.dimension_count"),
        "v_head_dim": value,
        **_routing(model),
    }
    # An expert_gating_func of 2 is the sigmoid.
    if model.get("expert_gating_func") == 2 or not model.get("expert_count"):
        return {**derived, "model_type": "deepseek_v3"}
    return {**derived, "topk_method": "group_limited_greedy" if derived["n_group"] > 1 else "greedy"}


def _keys_and_values(keys: Numbers, values: Numbers) -> Numbers:
    """Return kv_b_proj [heads * (key width + value width), rank] from keys [heads, rank, key width] and values [heads,
    value width, rank]."""
    joined = np.concatenate((keys.swapaxes(1, 2), values), 1)
    return joined.reshape(-1, joined.shape[-1])


def _gemma4(model: GgufModel, config: Config) -> Config:
    """Derive Gemma 4's layers and rotary embeddings. Raises ConfigError for unsupported or inconsistent metadata."""
    layers = config["num_hidden_layers"]
    slides = [bool(slide) for slide in np.broadcast_to(_needed(model, "attention.sliding_window_pattern"), layers)]
    heads = np.broadcast_to(_needed(model, "attention.head_count_kv"), layers).tolist()
    widths = np.broadcast_to(_needed(model, "feed_forward_length"), layers).tolist()
    for kind, size in (("", config["global_head_dim"]), ("_swa", config["head_dim"])):
        for key in (f"attention.value_length{kind}", f"rope.dimension_count{kind}"):
            if model.get(key) not in (None, size):
                raise ConfigError(f"its heads have {size} values, but gemma4.{key} = {model.get(key)}")
    if model.get("rope.scaling.type") not in (None, "none", "linear"):
        raise ConfigError(f"gemma4.rope.scaling.type is {model.get('rope.scaling.type')!r}, which is not supported")
    tensors = {tensor.name: tensor for tensor in model.tensors}
    if len(set(slides)) < 2:
        raise ConfigError("gemma4.attention.sliding_window_pattern has layers of one kind, which is not supported")
    if _ROPE_FACTORS not in tensors:
        raise ConfigError(f"it lacks the tensor {_ROPE_FACTORS}")
    local, full, factors = slides.index(True), slides.index(False), tensors[_ROPE_FACTORS].numbers()
    derived: dict[str, Any] = {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "num_key_value_heads": heads[local],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        # Without v_proj, full-attention layers use their keys as values.
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_global_key_value_heads": heads[full],
        "enable_moe_block": bool(model.get("expert_count")),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa") or 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_parameters"]["rope_theta"],
                "factor": model.get("rope.scaling.factor") or 1.0,
                # The divisors of pairs that are not rotated are huge.
                "partial_rotary_factor": float((factors < 1e6).mean()),
            },
        },
    }
    if config["hidden_size_per_layer_input"]:
        derived["vocab_size_per_layer_input"] = tensors["per_layer_token_embd.weight"].shape[0]
    return derived


def _interleaved_rows(config: Config) -> Numbers:
    """Return the row order that interleaves gate and up in the matrices of gpt-oss's experts."""
    return np.arange(2 * config["intermediate_size"]).reshape(2, -1).T.ravel()


def _interleaved_biases(gate: Numbers, up: Numbers) -> Numbers:
    """Interleave the biases of gate and up, [experts, width] each, to [experts, 2 * width]."""
    return np.stack((gate, up), -1).reshape(len(gate), -1)


def _shortest(value: float) -> float:
    """Return the shortest decimal with the same float32 value."""
    return float(f"{value:.7g}")


def _add_channel_axis(taps: Numbers) -> Numbers:
    """Add the axis of input channels of a depthwise convolution, of size 1: [channels, taps] -> [channels, 1, taps]."""
    return taps[:, None]


_GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# The gate of the shared expert, a vector in files, is a matrix of one row.
_ROW = {"ffn_gate_inp_shexp.weight": lambda gate: gate.reshape(1, -1)}
_QWEN35 = GgufArchitecture(
    model_type="qwen3_5_text",
    keys={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "full_attention_interval": "full_attention_interval",
    },
    derived=_qwen35,
    others={"ssm.inner_size", "nextn_predict_layers"},
    tensors={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    shifted_norms=True,
    partial_rope=True,
    changes={"ssm_a": lambda rates: np.log(-rates), "ssm_conv1d.weight": _add_channel_axis},
    rows={
        "attn_qkv.weight": _by_key_heads("linear_value_head_dim", after_keys=True),
        "ssm_conv1d.weight": _by_key_heads("linear_value_head_dim", after_keys=True),
        "attn_gate.weight": _by_key_heads("linear_value_head_dim"),
        **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"), _by_key_heads()),
    },
    columns={"ssm_out.weight": _by_key_heads("linear_value_head_dim")},
)
_QWEN35_MOE = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    keys={
        **_QWEN35.keys,
        **_EXPERT_KEYS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    tensors={
        **_QWEN35.tensors,
        **_EXPERTS,
        **_SHARED_EXPERT,
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    },
    changes={**_QWEN35.changes, **_ROW},
)
_QWEN3_MOE = GgufArchitecture(
    model_type="qwen3_moe", keys=_EXPERT_KEYS, config={"norm_topk_prob": True}, tensors=_EXPERTS
)
_GRANITE = GgufArchitecture(
    model_type="granite",
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    permutes=True,
)
_LFM2 = GgufArchitecture(
    model_type="lfm2",
    keys={"shortconv.l_cache": "conv_L_cache"},
    config={"block_auto_adjust_ff_dim": False},
    derived=_lfm2,
    others={"attention.head_count_kv"},
    tensors={
        "token_embd_norm": "model.norm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
    changes={"shortconv.conv.weight": _add_channel_axis},
)
ARCHITECTURES = {
    "llama": GgufArchitecture(
        model_type="llama",
        derived=_mixtral,
        others={"expert_count", "expert_used_count"},
        tensors=_EXPERTS,
        permutes=True,
    ),
    "qwen2": GgufArchitecture(model_type="qwen2"),
    "qwen2vl": GgufArchitecture(model_type="qwen2"),
    "qwen3": GgufArchitecture(model_type="qwen3"),
    "qwen3vl": GgufArchitecture(model_type="qwen3"),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen2moe": GgufArchitecture(
        model_type="qwen2_moe",
        keys={**_EXPERT_KEYS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        config={"norm_topk_prob": False},
        tensors={**_EXPERTS, **_SHARED_EXPERT},
        changes=_ROW,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE,
        model_type="qwen3_next",
        tensors={**_QWEN35_MOE.tensors, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
        joined={"linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight")},
        rows={"attn_qkv.weight": _by_groups},
        columns={},
    ),
    "phi3": GgufArchitecture(
        model_type="phi3",
        keys={"attention.sliding_window": "sliding_window"},
        # Redundant: the attention factor follows from the two context lengths.
        others={"rope.scaling.attn_factor"},
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial_rope=True,
    ),
    "gemma": GgufArchitecture(model_type="gemma", shifted_norms=True),
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
    "gemma4": GgufArchitecture(
        model_type="gemma4_text",
        keys={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        others=words(
            """
            attention.value_length attention.value_length_swa attention.sliding_window_pattern attention.head_count_kv
            feed_forward_length rope.freq_base_swa rope.dimension_count rope.dimension_count_swa
            """
        ),
        config={"final_logit_softcapping": None, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        derived=_gemma4,
        tensors={
            **_FOUR_NORMS,
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        joined={"experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight")},
    ),
    "mistral3": GgufArchitecture(
        model_type="llama", derived=_ministral, others={"attention.temperature_scale"}, permutes=True
    ),
    "smollm3": GgufArchitecture(model_type="smollm3", permutes=True),
    "arcee": GgufArchitecture(model_type="arcee", permutes=True),
    "olmo2": GgufArchitecture(
        model_type="olmo2",
        tensors={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "seed_oss": GgufArchitecture(model_type="seed_oss", tensors={"post_attention_norm": "post_attention_layernorm"}),
    "granite": _GRANITE,
    "granitemoe": replace(
        _GRANITE,
        model_type="granitemoeshared",
        keys={
            **_GRANITE.keys,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        config={"shared_intermediate_size": 0},
        derived=lambda model, config: {} if config["shared_intermediate_size"] else {"model_type": "granitemoe"},
        tensors={**_EXPERTS, "ffn_down_shexp": "shared_mlp.output_linear"},
        joined={"shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")},
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        keys={
            **_LFM2.keys,
            **_EXPERT_KEYS,
            "leading_dense_block_count": "num_dense_layers",
        },
        others=_LFM2.others | {"expert_gating_func"},
        config={"norm_topk_prob": True, "use_expert_bias": True},
        tensors={**_LFM2.tensors, **_EXPERTS, "exp_probs_b.bias": "mlp.expert_bias"},
    ),
    "minimax-m2": GgufArchitecture(
        model_type="minimax_m2",
        keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        others={"expert_gating_func", "nextn_predict_layers"},
        tensors={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        partial_rope=True,
    ),
    "gpt-oss": GgufArchitecture(
        model_type="gpt_oss",
        keys={
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        derived=lambda model, config: {"rope_parameters": {**config["rope_parameters"], "truncate": False}},
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        joined={
            f"mlp.experts.gate_up_proj{end}": (f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}")
            for end, kind in (("", "weight"), ("_bias", "bias"))
        },
        rows={"ffn_gate_exps.weight": _interleaved_rows},
        changes={"ffn_gate_exps.bias": _interleaved_biases},
        swapped=("ffn_gate_exps.weight", "ffn_down_exps.weight"),
    ),
    "glm4moe": GgufArchitecture(
        model_type="glm4_moe",
        keys=_DEEPSEEK_KEYS,
        derived=_glm4_moe,
        others=_DEEPSEEK_OTHERS,
        tensors={**_DEEPSEEK_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        partial_rope=True,
    ),
    "deepseek2": GgufArchitecture(
        model_type="deepseek_v2",
        keys={
            **_DEEPSEEK_KEYS,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        others=words(
            """
            attention.key_length attention.key_length_mla attention.value_length attention.value_length_mla
            attention.head_count_kv
            """
        )
        | _DEEPSEEK_OTHERS,
        config={"q_lora_rank": None, "num_experts_per_tok": 1},
        derived=_deepseek2,
        tensors={
            **_DEEPSEEK_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        joined={"self_attn.kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight")},
        changes={"attn_k_b.weight": _keys_and_values},
    ),
}


def read_config(model: GgufModel) -> dict[str, Any]:
    """Return the config.json of a GGUF model, without ids of special tokens. Raises ConfigError for an unsupported
    architecture or option."""
    name = model.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"GGUF architecture {name!r} is not supported ({known} are): use the model's folder")
    row = ARCHITECTURES[name]
    keys = {key: ours for key, ours in {**_KEYS, **row.keys}.items() if key not in row.others}
    _refuse_unread(model, {*keys, *_OTHER_KEYS, *row.others})
    config: dict[str, Any] = {"model_type": row.model_type, "vocab_size": _vocab_size(model), **row.config}
    config |= {ours: _common_value(key, model.get(key)) for key, ours in keys.items() if model.get(key) is not None}
    optional = (
        "vocab_size",
        "attention.key_length",
        "attention.head_count_kv",
        *(["feed_forward_length"] if "expert_feed_forward_length" in keys else []),
    )
    if missing := [key for key in _KEYS if key in keys and key not in optional and model.get(key) is None]:
        raise ConfigError(f"its metadata lack {name}.{missing[0]}")
    config["num_hidden_layers"] -= model.get("nextn_predict_layers") or 0
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in model.tensors)
    add_rope(config, model)
    if keys.get("attention.key_length") == "head_dim":
        _add_head(config, model, row)
    config |= row.derived(model, config)
    family = FAMILIES[config["model_type"]]
    if "attention_bias" in family.defaults:
        config["attention_bias"] = any(tensor.name.endswith(".attn_q.bias") for tensor in model.tensors)
    config[family.eps] = config.pop("rms_norm_eps")
    return config


def _add_head(config: dict[str, Any], model: GgufModel, row: GgufArchitecture) -> None:
    """Add head_dim and partial_rotary_factor. Raises ConfigError for unsupported widths."""
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if model.get("attention.value_length") not in (None, head_dim):
        raise ConfigError(f"its keys have {head_dim} values, but {model.architecture}.attention.value_length differs")
    rotated = model.get("rope.dimension_count") or head_dim
    if rotated != head_dim:
        if not row.partial_rope:
            raise ConfigError(
                f"{model.architecture}.rope.dimension_count = {rotated}, and heads have {head_dim} values"
            )
        config["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim


def _refuse_unread(model: GgufModel, read: set[str]) -> None:
    """Raise ConfigError for a key of the architecture that is not in ``read`` and may have an effect."""
    begin = f"{model.architecture}."
    for key, value in model.metadata.items():
        own = key.removeprefix(begin)
        if own == key or own in read or own.startswith(("vision.", "audio.", "mm.")):
            continue
        if value in _NEUTRAL[own] if own in _NEUTRAL else not np.any(value):
            continue
        raise ConfigError(f"its metadata has {key} = {value!r:.80}, which is not supported: use the model's folder")


def _common_value(key: str, value: Any) -> Any:
    """Return ``value``, or the common value of all layers if it is an array. Raises ConfigError if layers differ."""
    if not isinstance(value, np.ndarray):
        return value
    values = set(value.tolist())
    if len(values) != 1:
        raise ConfigError(f"layers have different values of {key}, which is not supported")
    return values.pop()


def _vocab_size(model: GgufModel) -> int:
    return len(model.metadata.get("tokenizer.ggml.tokens", ()))


def add_rope(config: dict[str, Any], model: GgufModel) -> None:
    """Add the rotary embedding to a config: base, scaling, and the factors, which are tensors in the file."""
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
        for key, name in (("attn_factor", "attention_factor"), ("beta_fast",) * 2, ("beta_slow",) * 2):
            if (value := model.get(f"rope.scaling.yarn_{key}")) is not None:
                rope[name] = value
        if log := model.get("rope.scaling.yarn_log_multiplier"):
            # Files of the architecture deepseek2 have a tenth of the value.
            log = _shortest(log * 10 if model.architecture == "deepseek2" else log)
            rope |= {"mscale": log, "mscale_all_dim": log}
    factors = {tensor.name: tensor.numbers().tolist() for tensor in model.tensors if tensor.name in _FACTORS}
    if _ROPE_FACTORS in factors:
        divisors = factors[_ROPE_FACTORS]
        rope.update(rope_type="longrope", short_factor=divisors, long_factor=divisors, factor=1.0, attention_factor=1.0)
    if _ROPE_SHORT in factors and _ROPE_LONG in factors:
        rope.update(rope_type="longrope", short_factor=factors[_ROPE_SHORT], long_factor=factors[_ROPE_LONG])
        config["original_max_position_embeddings"] = int(original or config["max_position_embeddings"])


def folder_tensors(model: GgufModel, config: Config) -> Iterator[FolderTensor]:
    """Yield the tensors of a folder, in architectures with {} in tensor names one per expert. Raises ConfigError for an
    unknown tensor."""
    row, family = ARCHITECTURES[model.architecture], FAMILIES[config["model_type"]]
    names = {**_TENSORS, **row.tensors}
    firsts = {parts[0]: (name, parts) for name, parts in row.joined.items()}
    later_parts = {part for parts in row.joined.values() for part in parts[1:]}
    by_name = {
        tensor.name: tensor
        for tensor in model.tensors
        if tensor.name not in _FACTORS and not tensor.name.startswith(("v.", "a.", "mm."))
    }
    for file_name, tensor in by_name.items():
        match = _TENSOR_NAME.fullmatch(file_name)
        own, layer = (match["own"], match["layer"]) if match else (file_name, None)
        if layer is not None and int(layer) >= config["num_hidden_layers"]:
            # A layer for multi-token prediction.
            continue
        parts = [tensor]
        if own in firsts:
            llama_name, joined = firsts[own]
            parts = [
                by_name[file_name.replace(own, part)] for part in joined if file_name.replace(own, part) in by_name
            ]
        elif own in later_parts:
            continue
        else:
            llama_name = names.get(own) or (
                f"{names[match['stem']]}{match['suffix'] or ''}" if match and match["stem"] in names else ""
            )
        if (
            not llama_name
            or (layer is None) != llama_name.startswith(("model.", "lm_head"))
            or len(parts) not in (1, 2)
        ):
            raise ConfigError(f"its tensor {file_name} is not supported in the architecture {model.architecture}")
        name = family.in_files(llama_name if layer is None else f"model.layers.{layer}.{llama_name}")
        change = row.changes.get(own)
        if row.shifted_norms and own.endswith("norm.weight") and not own.startswith("ssm_"):
            change = _minus_one
        folder_tensor = FolderTensor(
            name=name,
            parts=tuple(parts),
            rows=_row_order(row, own, tensor, config),
            columns=row.columns[own](config) if own in row.columns else None,
            change=change,
            swapped=own in row.swapped,
        )
        if "{}" not in llama_name:
            yield folder_tensor
            continue
        for expert in range(len(tensor.data)):
            part = GgufTensor(tensor.name, tensor.kind, tensor.shape[1:], tensor.data[expert])
            yield replace(folder_tensor, name=name.format(expert), parts=(part,))


def _minus_one(weight: Numbers) -> Numbers:
    return weight - 1


def _row_order(row: GgufArchitecture, own: str, tensor: GgufTensor, config: Config) -> Numbers | None:
    if own in row.rows:
        return row.rows[own](config)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(own.partition(".")[0])
    if not row.permutes or heads is None:
        return None
    rows = len(tensor.data)
    return np.arange(rows).reshape(config[heads], rows // config[heads] // 2, 2).swapaxes(1, 2).reshape(rows)
