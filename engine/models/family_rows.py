"""Table of the supported model families, one row each: a new family goes here. Imports no torch.

A row has the differences from Llama, with the function that lists a layer's operations and tensors
(:mod:`pillion.engine.models.layer_operations`), on which all backends, the loader and the ranks are based.
transformers' defaults for missing keys are in the generated ``family_defaults.json``; a row has those that its config
classes lack. A new number in configs also needs a field in :class:`pillion.engine.models.model_config.ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pillion.engine.models.config_json import above_zero, number, per_layer, size
from pillion.engine.models.config_keys import words
from pillion.engine.models.gemma4_layer import gemma4_layer
from pillion.engine.models.linear_config import (
    bamba_layers,
    delta_layers,
    falcon_h1_layers,
    jamba_layers,
    kimi_layers,
    lfm2_layers,
    lfm3_layers,
    mamba_layers,
    nemotron_h_kinds,
    nemotron_h_layers,
    olmo_hybrid_layers,
)
from pillion.engine.models.linear_layer import (
    delta_attention,
    delta_net,
    falcon_h1_layer,
    hybrid_layer,
    nemotron_h_layer,
    selective_scan,
    short_convolution,
    state_space,
)
from pillion.engine.models.llama_layer import (
    ALL_NORMS,
    POST_NORMS,
    PRE_NORMS,
    ExpertNames,
    Projections,
    QkNorm,
    llama_layer,
)
from pillion.engine.models.mimo_layer import mimo_layer
from pillion.engine.models.model_family import DRAFTING_KEYS, Biases, ModelFamily, RopeRules
from pillion.errors import ConfigError

_WITH_HEAD_NORMS = partial(llama_layer, qk_norm=QkNorm())
_QKV_BIASES = Biases(o=False)
_ONE_KEY = Biases(qkv="use_bias", o="use_bias", mlp="use_bias")
_QWEN_SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "mlp.shared_expert.down_proj"
_GRANITE_SHARED = ("shared_mlp.input_linear",), "shared_mlp.output_linear"
# A config without the key has as many KV heads as query heads, unlike in transformers.
_QWEN = {"num_key_value_heads": None}
_GEMMA_TOKENS = {"bos_token_id": 2, "eos_token_id": 1}
_GLM = {"partial_rotary_factor": 0.5, "eos_token_id": [151_329, 151_336, 151_338]}

_MISTRAL_YARN = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_OLMO = partial(llama_layer, norms=POST_NORMS, qk_norm=QkNorm(kind="projection"))

_FUSED_MLP = ("mlp.gate_up_proj",)

_GRANITE_EXPERTS = partial(llama_layer, experts=ExpertNames(shared=_GRANITE_SHARED))
_LATENT_IGNORED = ("head_dim", "qk_head_dim")
_DEEPSEEK_FIXED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_DEEPSEEK_TRAINING = ("ep_size", "seq_aux", "aux_loss_alpha")
_DEEPSEEK_BIAS = "mlp.gate.e_score_correction_bias"
_DEEPSEEK_EXPERTS = partial(llama_layer, qk_norm=QkNorm(), experts=ExpertNames(choice_bias=_DEEPSEEK_BIAS))
_DEEPSEEK_ROUTER = partial(llama_layer, experts=ExpertNames(choice_bias=_DEEPSEEK_BIAS))
_HUNYUAN = partial(
    llama_layer,
    qk_norm=QkNorm(names=("self_attn.query_layernorm", "self_attn.key_layernorm"), after_rotation=True),
)
_HUNYUAN_SHARED = (("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"), "mlp.shared_mlp.down_proj")
_HUNYUAN_IGNORED = (
    "eod_token_id", "cla_share_factor", "attention_head_dim", "pool_type", "org_vocab_size", "pad_id", "mask_init_id",
    "text_start_id", "text_end_id", "im_start_id", "im_end_id", "im_newline_id", "image_token_id", "video_start_id",
    "video_end_id", "num_media_embeds", "anyres_pooling_size", "vit_input_resolution", "vit_mapping_type",
    "vit_norm_type", "vit_patch", "vit_token",
)  # fmt: skip
_HUNYUAN_FIXED = {"use_qk_norm": True, "norm_type": "rms", "use_rotary_pos_emb": True, "dense_list": [4096, 0]}


def _indexed_attention(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the layer types of a model with sparse attention in every layer."""
    kinds = raw.get("layer_types")
    return {"layer_types": ["full_attention" if kind == "indexed_attention" else kind for kind in kinds or ()] or None}


def _one_kv_head_each(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive as many KV heads as query heads; a config's num_key_value_heads is ignored."""
    return {"num_key_value_heads": raw["num_attention_heads"]}


_DEEPSEEK_SPARSE = ModelFamily(
    layer=_DEEPSEEK_ROUTER,
    rope=RopeRules(interleaved=True),
    sigmoid_router=True,
    ignored=(*DRAFTING_KEYS, *_LATENT_IGNORED, *_DEEPSEEK_TRAINING),
    derived=_indexed_attention,
    fixed={**_DEEPSEEK_FIXED, "rope_interleave": True, "indexer_rope_interleave": False},
)


def _minimax_m2(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ConfigError for layers with linear attention, which models before MiniMax M2 have."""
    kinds = raw.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise ConfigError("minimax_m2: config.json has attn_type_list with layers that are not 1, not supported here")
    return {}


def _cohere2(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ConfigError if ``layer_switch``, Cohere's own key, contradicts ``sliding_window_pattern``."""
    if raw.get("layer_switch") not in (None, raw["sliding_window_pattern"]):
        raise ConfigError(
            f"cohere2: config.json has layer_switch = {raw['layer_switch']!r}, which is not its"
            f" sliding_window_pattern = {raw['sliding_window_pattern']!r}"
        )
    return {}


def _apertus(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the rotary embedding of a config without one: that of the published models."""
    if raw.get("rope_parameters") or raw.get("rope_scaling"):
        return {}
    lengths = {"factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 12_000_000.0, **lengths}}


def _cohere2_moe(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the layers with experts, windows and rotary embeddings, and the expert options. The first layers may be
    dense, with their own inner width and window pattern; with pattern 1 they have a rotary embedding and no window."""
    layers, first = size(raw, "num_hidden_layers"), int(number(raw, "first_k_dense_replace", 0))
    prefix, others = size(raw, "prefix_dense_sliding_window_pattern"), size(raw, "sliding_window_pattern")
    periods = [(n + 1, prefix) if n < first else (n - first + 1, others) for n in range(layers)]
    kinds = raw["layer_types"] or [f"{'full' if n % every == 0 else 'sliding'}_attention" for n, every in periods]
    mlps = raw["mlp_layer_types"] or ["dense" if n < first else "sparse" for n in range(layers)]
    if not raw["sliding_window"]:
        kinds = ["full_attention"] * len(kinds)
    rotated = [
        int(kind == "sliding_attention" or (mixer == "dense" and prefix == 1))
        for kind, mixer in zip(kinds, mlps, strict=False)
    ]
    inner = size(raw, "intermediate_size")
    return {
        "layer_types": kinds,
        "mlp_layer_types": mlps,
        "no_rope_layers": rotated,
        "intermediate_size": raw["prefix_dense_intermediate_size"] or inner,
        "moe_intermediate_size": inner,
        "norm_topk_prob": raw["expert_selection_fn"] == "softmax" or raw["norm_topk_prob"],
        "shared_expert_combination_strategy": raw["shared_expert_combination_strategy"]
        if raw["num_shared_experts"]
        else "sum",
    }


def _hunyuan(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive HunYuan's rotary embedding: the kind "dynamic" with ``alpha`` multiplies the base by alpha ** (d / (d -
    2)) for texts of any length, where d is head_dim; other parameters are ignored, as in HunYuan's code."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if not isinstance(rope, Mapping) or not rope.get("alpha"):
            continue
        if (rope.get("rope_type") or rope.get("type")) != "dynamic":
            break
        heads = size(raw, "num_attention_heads")
        width = size(raw, "head_dim", size(raw, "hidden_size") // heads)
        base = above_zero(rope, "rope_theta", above_zero(raw, "rope_theta", 10_000.0))
        theta = base * above_zero(rope, "alpha", 1.0) ** (width / (width - 2))
        return {key: {"rope_type": "default", "rope_theta": theta}}
    return {}


def _mistral4(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive Mistral 4's rotary embedding without ``partial_rotary_factor``. Raises ConfigError if that key or head_dim
    contradicts the widths of a head's rotated and other part."""
    rotary = size(raw, "qk_rope_head_dim")
    whole = rotary + size(raw, "qk_nope_head_dim")
    if size(raw, "head_dim", whole) not in (rotary, whole):
        raise ConfigError(f"mistral4: config.json has head_dim = {raw['head_dim']}, which is not {whole}")
    derived: dict[str, Any] = {"head_dim": rotary}
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if not isinstance(rope, Mapping):
            continue
        share = number(rope, "partial_rotary_factor", rotary / whole)
        if share not in (1.0, rotary / whole):
            raise ConfigError(
                f"mistral4: config.json has partial_rotary_factor = {share}, which is not {rotary} of {whole} values"
            )
        derived[key] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return derived


def _flint(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive Flint's defaults: no window in layers 0, 1, 5, 9, ... and in the last layer; no experts in layers 0 and
    1."""
    layers = size(raw, "num_hidden_layers")
    full = {0, layers - 1, *range(1, layers, 4)}
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]
    dense = raw["mlp_only_layers"]
    return {"layer_types": raw["layer_types"] or kinds, "mlp_only_layers": [0, 1] if dense is None else dense}


def _opt(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive OPT's number of KV heads. Raises ConfigError for options of its smallest models."""
    if raw["word_embed_proj_dim"] not in (None, raw["hidden_size"]):
        raise ConfigError(
            f"opt: config.json has word_embed_proj_dim = {raw['word_embed_proj_dim']}, not supported here"
        )
    if raw.get("_remove_final_layer_norm"):
        raise ConfigError("opt: config.json has _remove_final_layer_norm, which is not supported")
    return _one_kv_head_each(raw)


def _afmoe(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive AFMoE's embedding scale (with muP), layer types, and normalized expert weights."""
    period = size(raw, "global_attn_every_n_layers")
    kinds = [("full" if n % period == 0 else "sliding") for n in range(1, size(raw, "num_hidden_layers") + 1)]
    return {
        "embedding_multiplier": size(raw, "hidden_size") ** 0.5 if raw["mup_enabled"] else 1.0,
        "layer_types": raw["layer_types"] or [f"{kind}_attention" for kind in kinds],
        "norm_topk_prob": True,
    }


def _mimo(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive MiMo-V2-Flash's layer types, rotary embeddings and window from the keys of published configs. Raises
    ConfigError if layers with a window have unsupported numbers of heads or widths."""
    layers, heads, kv_heads = (
        size(raw, f"num_{part}") for part in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    supported = {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 2 * kv_heads,
        "swa_head_dim": size(raw, "head_dim"),
        "swa_v_head_dim": size(raw, "v_head_dim"),
    }
    for key, value in supported.items():
        if raw.get(key) not in (None, value):
            raise ConfigError(f"mimo_v2_flash: config.json has {key} = {raw[key]!r}, not {value}")
    windows = per_layer(raw, "hybrid_layer_pattern", layers)
    windows = [layer > 0 and (layer + 1) % 6 > 0 for layer in range(layers)] if windows is None else windows
    experts = per_layer(raw, "moe_layer_freq", layers)
    experts = [layer > 0 for layer in range(layers)] if experts is None else experts
    factor = number(raw, "partial_rotary_factor", 0.334)
    derived = {
        "layer_types": raw["layer_types"] or [f"{'sliding' if slide else 'full'}_attention" for slide in windows],
        "mlp_layer_types": raw["mlp_layer_types"] or ["sparse" if mixed else "dense" for mixed in experts],
        "rope_parameters": raw["rope_parameters"]
        or {
            kind: {"rope_type": "default", "rope_theta": number(raw, key, theta), "partial_rotary_factor": factor}
            for kind, key, theta in (
                ("full_attention", "rope_theta", 5_000_000.0),
                ("sliding_attention", "swa_rope_theta", 10_000.0),
            )
        },
    }
    # sliding_window_size does not count the query's own token.
    return derived | ({"sliding_window": raw["sliding_window_size"] + 1} if raw.get("sliding_window_size") else {})


def _gemma4(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive Gemma 4's layers: by default every sixth has no window, and the last one has never one. Raises ConfigError
    for bidirectional attention over texts, which no published model has."""
    if raw["use_bidirectional_attention"] not in (None, "vision"):
        raise ConfigError(
            f"gemma4: config.json has use_bidirectional_attention = {raw['use_bidirectional_attention']!r}, which"
            " is not supported"
        )
    layers = size(raw, "num_hidden_layers")
    kinds = per_layer(raw, "layer_types", layers)
    if kinds is None:
        kinds = ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)]
    derived: dict[str, Any] = {"layer_types": [*kinds[:-1], "full_attention"], "attention_multiplier": 1.0}
    if raw.get("enable_moe_block"):
        derived["num_experts_per_tok"] = raw["top_k_experts"]
    if raw["rope_parameters"] is None:
        derived["rope_parameters"] = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        }
    return derived


def _lfm2(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the inner width of LFM2's MLPs: with block_auto_adjust_ff_dim two thirds of the config's, rounded up to a
    multiple of block_multiple_of."""
    width = raw["block_ff_dim"] or raw["intermediate_size"]
    if raw["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if raw["block_ffn_dim_multiplier"] is not None:
            step = raw["block_multiple_of"]
            width = -(-int(raw["block_ffn_dim_multiplier"] * width) // step) * step
    return {"intermediate_size": width}


def _lfm3(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive which of LFM3's layers have attention, and which of them a window."""
    layers = size(raw, "num_hidden_layers")
    kinds = per_layer(raw, "layer_types", layers) or [
        "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer else "conv"
        for layer in range(layers)
    ]
    return {
        "full_attn_idxs": [layer for layer, kind in enumerate(kinds) if kind != "conv"],
        "layer_types": ["full_attention" if kind == "conv" else kind for kind in kinds],
        "rope_parameters": raw["rope_parameters"]
        or {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
        },
    }


def _without_pictures(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the rotary embedding without parameters of mrope, which have no effect on texts."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    return {"rope_parameters": {key: value for key, value in rope.items() if not key.startswith("mrope_")}}


def _olmo_hybrid(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the setting that turns rotary embedding off if OLMo-Hybrid's rope_theta is null."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    base = rope.get("rope_theta", raw.get("rope_theta", 0.0)) if isinstance(rope, Mapping) else 0.0
    return {} if base is not None else {"position_embedding_type": "nope"}


def _nemotron_h(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the number of Nemotron-H's layers, and those with experts."""
    kinds = nemotron_h_kinds(raw)
    return {
        "num_hidden_layers": len(kinds),
        "moe_layers": [layer for layer, kind in enumerate(kinds) if kind == "moe"],
    }


def _bamba(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise ConfigError unless ``attn_rotary_emb`` is half of a head, the part that transformers always rotates."""
    width = size(raw, "head_dim", size(raw, "hidden_size") // size(raw, "num_attention_heads"))
    if 2 * size(raw, "attn_rotary_emb", width // 2) != width:
        raise ConfigError(
            f"bamba: config.json has attn_rotary_emb = {raw['attn_rotary_emb']}, not half of {width} values"
        )
    return {}


def _jamba(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive that Jamba has no rotary embedding, and one layer with experts per period; dense MLPs only if
    num_experts is 1."""
    count, layers = size(raw, "num_experts"), range(size(raw, "num_hidden_layers"))
    period, offset = size(raw, "expert_layer_period"), number(raw, "expert_layer_offset", 0)
    return {
        "position_embedding_type": "nope",
        "norm_topk_prob": False,
        "moe_layers": [layer for layer in layers if layer % period == offset and count > 1],
        "num_experts_per_tok": size(raw, "num_experts_per_tok") if count > 1 else 1,
    }


def _granite_hybrid(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Derive the inner width of dense MLPs, which Granite's hybrids without experts store as that of the shared
    expert."""
    return {} if raw["num_local_experts"] else {"intermediate_size": raw["shared_intermediate_size"]}


_COHERE = ModelFamily(norm="layer", parallel=True, rope=RopeRules(interleaved=True))

_GEMMA4 = {
    **_GEMMA_TOKENS,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "rope_parameters": None,
}
_GEMMA4_TEXT = ModelFamily(
    {**_GEMMA4, "use_bidirectional_attention": None},
    layer=gemma4_layer,
    norm="wide",
    scaled_embedding=True,
    rope=RopeRules(local=True),
    derived=_gemma4,
)

_LFM2_LAYER = partial(
    hybrid_layer,
    mixer=short_convolution,
    norms=("operator_norm", "", "ffn_norm", ""),
    qk_norm=QkNorm(names=("self_attn.q_layernorm", "self_attn.k_layernorm")),
)
_LFM2 = ModelFamily(
    {"block_ff_dim": None},
    layer=_LFM2_LAYER,
    linear=lfm2_layers,
    keys={"tie_embedding": "tie_word_embeddings"},
    derived=_lfm2,
    names=(
        ("model.norm.", "model.embedding_norm."),
        ("self_attn.o_proj", "self_attn.out_proj"),
        (".mlp.", ".feed_forward."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    ignored=(
        "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
        "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
        "theta",
    ),
)  # fmt: skip
_DELTA_NET = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}
_QWEN_HYBRID = partial(
    hybrid_layer,
    qk_norm=QkNorm(),
    projections=Projections(gated=True),
    experts=ExpertNames(
        shared=_QWEN_SHARED,
        shared_gate="mlp.shared_expert_gate",
    ),
)
_QWEN35 = ModelFamily(
    _DELTA_NET,
    layer=partial(_QWEN_HYBRID, mixer=delta_net),
    norm="offset",
    rope=RopeRules(partial=True),
    linear=delta_layers,
    derived=_without_pictures,
    ignored=(*DRAFTING_KEYS, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    fixed={"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
)

ROWS: dict[str, ModelFamily] = {
    # Falcon 3 repeats the activation under another key.
    "llama": ModelFamily(fixed={"activation": "swiglu"}),
    "smollm3": ModelFamily(),
    "mistral": ModelFamily({"layer_types": None}),
    "ministral": ModelFamily(),
    "mixtral": ModelFamily(),
    # Qwen 2 has qkv biases whatever the key says.
    "qwen2": ModelFamily(_QWEN, biases=Biases(qkv=True), ignored=("attention_bias",)),
    "qwen3": ModelFamily(_QWEN, layer=_WITH_HEAD_NORMS),
    "qwen3_moe": ModelFamily(layer=_WITH_HEAD_NORMS),
    "qwen2_moe": ModelFamily(
        layer=partial(
            llama_layer,
            experts=ExpertNames(
                shared=_QWEN_SHARED,
                shared_gate="mlp.shared_expert_gate",
            ),
        ),
        biases=Biases(qkv="qkv_bias"),
        window_pattern=2,
    ),
    "flint": ModelFamily(
        layer=partial(
            llama_layer,
            qk_norm=QkNorm(),
            sinks=True,
            experts=ExpertNames(shared=_QWEN_SHARED),
        ),
        norm="wide",
        rope=RopeRules(nope_if_full=True),
        sigmoid_router=True,
        derived=_flint,
        names=(("self_attn.sinks", "self_attn.softmax_offset"),),
        model_names=(("self_attn.softmax_offset", "self_attn.sinks"),),
    ),
    "phi3": ModelFamily(rope=RopeRules(partial=True), fused=("self_attn.qkv_proj", "mlp.gate_up_proj")),
    "gemma2": ModelFamily(
        {**_GEMMA_TOKENS, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0},
        layer=partial(llama_layer, norms=ALL_NORMS),
        norm="offset",
        scaled_embedding=True,
        ignored=("sliding_window_size",),
    ),
    "gemma3_text": ModelFamily(
        {
            **_GEMMA_TOKENS,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10000.0,
        },
        layer=partial(llama_layer, norms=ALL_NORMS, qk_norm=QkNorm()),
        norm="offset",
        scaled_embedding=True,
        rope=RopeRules(local=True),
    ),
    "olmo2": ModelFamily(layer=_OLMO, norm="wide"),
    "granite": ModelFamily(),
    "gemma": ModelFamily(
        _GEMMA_TOKENS,
        norm="offset",
        scaled_embedding=True,
        # transformers reads the other key, whose old value "gelu" meant the tanh form.
        ignored=("hidden_activation",),
        activations={"gelu": "gelu_tanh"},
    ),
    "vaultgemma": ModelFamily(
        {**_GEMMA_TOKENS, "attn_logit_softcapping": 50.0},
        layer=partial(llama_layer, norms=("input_layernorm", "", "pre_feedforward_layernorm", "")),
        norm="offset",
        scaled_embedding=True,
        window_pattern=2,
    ),
    "olmo3": ModelFamily(layer=_OLMO, norm="wide", rope=RopeRules(local=True), window_pattern=4),
    "olmoe": ModelFamily(layer=partial(llama_layer, qk_norm=QkNorm(kind="projection"))),
    "flex_olmo": ModelFamily(layer=_OLMO, norm="wide"),
    "cwm": ModelFamily(
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "eos_token_id": [128_001, 128_008, 128_009],
        },
        window_pattern=4,
        full_first=True,
    ),
    "internlm3": ModelFamily(),
    "iquestcoder": ModelFamily(),
    "exaone4": ModelFamily(
        layer=partial(llama_layer, norms=POST_NORMS, qk_norm=QkNorm()),
        rope=RopeRules(nope_if_full=True),
    ),
    "seed_oss": ModelFamily(biases=Biases(o="attention_out_bias")),
    "granitemoe": ModelFamily(),
    "granite_swa": ModelFamily(layer=partial(llama_layer, sinks=True), window_pattern=4, full_first=True),
    "gpt_oss": ModelFamily(
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        },
        layer=partial(llama_layer, sinks=True, experts=ExpertNames(biased=True)),
        norm="wide",
        window_pattern=2,
        ignored=("experts_per_token", "initial_context_length"),
    ),
    "ernie4_5": ModelFamily(biases=_ONE_KEY, rope=RopeRules(interleaved=True)),
    "helium": ModelFamily(biases=Biases(o=False), norm="wide", rope=RopeRules(interleaved=True)),
    "glm": ModelFamily(_GLM, biases=_QKV_BIASES, rope=RopeRules(partial=True, interleaved=True), fused=_FUSED_MLP),
    "glm4": ModelFamily(
        _GLM,
        layer=partial(
            llama_layer,
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
        ),
        biases=_QKV_BIASES,
        rope=RopeRules(partial=True, interleaved=True),
        fused=_FUSED_MLP,
    ),
    "apertus": ModelFamily(
        layer=partial(llama_layer, norms=("attention_layernorm", "", "feedforward_layernorm", ""), qk_norm=QkNorm()),
        gated=False,
        derived=_apertus,
        # Constants of the activation: slope and bound at 0.
        idle=r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)$",
    ),
    "arcee": ModelFamily(gated=False),
    "jais2": ModelFamily(norm="layer", biases=Biases(norm=True), gated=False),
    "starcoder2": ModelFamily(
        layer=partial(llama_layer, mlp=("mlp.c_fc", "mlp.c_proj")),
        biases=Biases(qkv="use_bias", o="use_bias", mlp="use_bias", norm=True),
        norm="layer",
        gated=False,
        ignored=("activation_function", "layer_norm_epsilon"),
        fixed={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    ),
    "cohere": replace(_COHERE, layer=partial(llama_layer, qk_norm=QkNorm(kind="layer_by_head"))),
    "cohere2": replace(
        _COHERE,
        defaults={"sliding_window_pattern": 4},
        rope=RopeRules(interleaved=True, nope_if_full=True),
        derived=_cohere2,
        ignored=("layer_switch",),
        fixed={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
    ),
    "cohere2_moe": replace(
        _COHERE,
        defaults={"first_k_dense_replace": 0},
        rms_eps="rms_norm_eps",
        derived=_cohere2_moe,
    ),
    "granitemoeshared": ModelFamily(layer=_GRANITE_EXPERTS),
    "granitemoe_swa": ModelFamily(layer=partial(_GRANITE_EXPERTS, sinks=True), window_pattern=4, full_first=True),
    "glm4_moe": ModelFamily(
        {"partial_rotary_factor": 0.5},
        layer=_DEEPSEEK_EXPERTS,
        biases=_QKV_BIASES,
        rope=RopeRules(partial=True),
        sigmoid_router=True,
        ignored=DRAFTING_KEYS,
    ),
    "dots1": ModelFamily(layer=_DEEPSEEK_EXPERTS, sigmoid_router=True, fixed=_DEEPSEEK_FIXED),
    "mimo_v2_flash": ModelFamily(
        {
            **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")),
            **dict.fromkeys(("hybrid_layer_pattern", "moe_layer_freq", "swa_rope_theta", "sliding_window_size")),
            "rope_parameters": None,
        },
        layer=mimo_layer,
        rope=RopeRules(partial=True, local=True),
        sigmoid_router=True,
        keys={"layernorm_epsilon": "rms_norm_eps"},
        derived=_mimo,
        names=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        model_names=((".self_attn.attention_sink_bias", ".self_attn.sinks"),),
        ignored=(*DRAFTING_KEYS, "attention_chunk_size"),
        fixed={
            "attention_bias": False,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "add_swa_attention_sink_bias": True,
        },
        idle=r"model\.mtp\.",
    ),
    "solar_open": ModelFamily(
        layer=_DEEPSEEK_ROUTER,
        biases=_QKV_BIASES,
        rope=RopeRules(partial=True),
        sigmoid_router=True,
    ),
    "minimax_m2": ModelFamily(
        {"rotary_dim": None},
        layer=partial(
            llama_layer,
            qk_norm=QkNorm(kind="projection"),
            experts=ExpertNames(choice_bias="block_sparse_moe.e_score_correction_bias"),
        ),
        model_names=((".block_sparse_moe.", ".mlp."),),
        rope=RopeRules(partial=True),
        sigmoid_router=True,
        derived=_minimax_m2,
        # attn_type_list: checked by _minimax_m2. mlp_intermediate_size: no layer has a dense MLP.
        ignored=(*DRAFTING_KEYS, "mtp_transformer_layers", "use_mtp", "attn_type_list", "mlp_intermediate_size"),
        fixed={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_moe_mode": "sigmoid",
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
        },
    ),
    "ernie4_5_moe": ModelFamily(
        layer=partial(llama_layer, experts=ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias")),
        model_names=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
        biases=_ONE_KEY,
        rope=RopeRules(interleaved=True),
        ignored=(*DRAFTING_KEYS, "moe_capacity"),
        fixed={"moe_norm_min": 1e-12, "moe_gate": "topk", "moe_use_aux_free": True, "use_rmsnorm": True},
    ),
    "exaone_moe": ModelFamily(
        layer=partial(llama_layer, qk_norm=QkNorm(), experts=ExpertNames(choice_bias="mlp.e_score_correction_bias")),
        model_names=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        rope=RopeRules(nope_if_full=True),
        sigmoid_router=True,
        ignored=DRAFTING_KEYS,
    ),
    "afmoe": ModelFamily(
        layer=partial(
            llama_layer,
            norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            qk_norm=QkNorm(),
            projections=Projections(gate="self_attn.gate_proj"),
            experts=ExpertNames(choice_bias="mlp.expert_bias", sum_norm="post_mlp_layernorm"),
        ),
        norm="wide",
        rope=RopeRules(nope_if_full=True),
        sigmoid_router=True,
        keys={"num_dense_layers": "first_k_dense_replace", "route_scale": "routed_scaling_factor"},
        derived=_afmoe,
        ignored=("load_balance_coeff", "use_grouped_mm"),
        fixed={
            "attention_bias": False,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "num_expert_groups": 1,
            "num_limited_groups": 1,
        },
    ),
    "hy_v3": ModelFamily(
        {"first_k_dense_replace": 1},
        layer=partial(
            llama_layer,
            qk_norm=QkNorm(),
            experts=ExpertNames(choice_bias="mlp.expert_bias", shared=_HUNYUAN_SHARED),
        ),
        model_names=((".mlp.expert_bias", ".mlp.e_score_correction_bias"), (".shared_mlp.", ".shared_experts.")),
        sigmoid_router=True,
        ignored=(*DRAFTING_KEYS, "enable_moe_fp32_combine"),
    ),
    "hunyuan_v1_dense": ModelFamily(layer=_HUNYUAN, derived=_hunyuan, ignored=_HUNYUAN_IGNORED, fixed=_HUNYUAN_FIXED),
    "hunyuan_v1_moe": ModelFamily(
        {"num_shared_expert": 1},
        layer=partial(
            _HUNYUAN,
            experts=ExpertNames(shared=_HUNYUAN_SHARED),
        ),
        derived=_hunyuan,
        ignored=(*_HUNYUAN_IGNORED, "moe_intermediate_size", "capacity_factor"),
        fixed={**_HUNYUAN_FIXED, "use_mixed_mlp_moe": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
    "hyperclovax": ModelFamily(
        layer=partial(llama_layer, norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")),
        # This family multiplies logits by logits_scaling, others divide.
        derived=lambda raw: {"logits_scaling": 1.0 / above_zero(raw, "logits_scaling", 1.0)},
    ),
    "ministral3": ModelFamily(
        {
            "rope_parameters": {
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                **_MISTRAL_YARN,
            }
        },
        rope=RopeRules(query_growth="all"),
    ),
    "mellum": ModelFamily(
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        },
        layer=_WITH_HEAD_NORMS,
        rope=RopeRules(local=True),
        window_pattern=1,
        ignored=(*DRAFTING_KEYS, "mtp_layer_types", "mtp_mlp_layer_types"),
    ),
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified_text": replace(_GEMMA4_TEXT, defaults={**_GEMMA4, "use_bidirectional_attention": "vision"}),
    "gpt2": ModelFamily(
        {"max_position_embeddings": 1024, "n_positions": None},
        layer=partial(llama_layer, mlp=("mlp.c_fc", "mlp.c_proj")),
        biases=Biases(qkv=True, o=True, mlp=True, norm=True),
        norm="layer",
        gated=False,
        keys={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "activation_function": "hidden_act",
        },
        fused=("self_attn.qkv_proj",),
        derived=_one_kv_head_each,
        names=(
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm.", "transformer.ln_f."),
            ("input_layernorm", "ln_1"),
            ("model.embed_positions", "transformer.wpe"),
            ("self_attn.qkv_proj", "attn.c_attn"),
            ("self_attn.o_proj", "attn.c_proj"),
            ("post_attention_layernorm", "ln_2"),
        ),
        turned=True,
        first_position=0,
        ignored=(
            *("reorder_and_upcast_attn", "predict_special_tokens"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "summary_first_dropout",
        ),
        fixed={"scale_attn_weights": True},
    ),
    "opt": ModelFamily(
        {"layer_norm_eps": 1e-05},
        layer=partial(llama_layer, norms=("self_attn_layer_norm", "", "final_layer_norm", ""), mlp=("fc1", "fc2")),
        biases=Biases(qkv="enable_bias", o="enable_bias", mlp="enable_bias", norm=True),
        norm="layer",
        gated=False,
        keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        derived=_opt,
        names=(
            ("model.norm.", "model.final_layer_norm."),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("model.", "model.decoder."),
        ),
        first_position=2,
        fixed={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "learned_embeddings": True},
    ),
    "llama4_text": ModelFamily(
        layer=partial(
            llama_layer,
            qk_norm=QkNorm(names=(), after_rotation=True, if_rotated=True),
            experts=ExpertNames(
                shared=(
                    ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
                    "feed_forward.shared_expert.down_proj",
                )
            ),
        ),
        rope=RopeRules(interleaved=True, query_growth="nope"),
        sigmoid_router=True,
        scaled_experts=True,
        # Its configs have no key for the number of shared experts.
        derived=lambda _: {"n_shared_experts": 1},
    ),
    "deepseek_v2": ModelFamily(
        rope=RopeRules(interleaved=True),
        ignored=(*_LATENT_IGNORED, *_DEEPSEEK_TRAINING),
        # With other values, DeepSeek's code and transformers differ.
        fixed={"norm_topk_prob": False, "moe_layer_freq": 1, "scoring_func": "softmax"},
    ),
    "deepseek_v3": ModelFamily(
        layer=_DEEPSEEK_ROUTER,
        sigmoid_router=True,
        ignored=(*DRAFTING_KEYS, *_LATENT_IGNORED, *_DEEPSEEK_TRAINING),
        fixed=_DEEPSEEK_FIXED,
    ),
    "deepseek_v32": _DEEPSEEK_SPARSE,
    "glm_moe_dsa": replace(
        _DEEPSEEK_SPARSE,
        derived=lambda raw: {**_indexed_attention(raw), "indexer_rope_interleave": True},
        fixed={**_DEEPSEEK_FIXED, "rope_interleave": True, "indexer_rope_interleave": True},
        keys={key: key for key in ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")},
    ),
    "mistral4": ModelFamily(
        {
            "rope_parameters": {
                "rope_theta": 10_000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                **_MISTRAL_YARN,
            }
        },
        rope=RopeRules(query_growth="all"),
        derived=_mistral4,
        ignored=(*_LATENT_IGNORED, *DRAFTING_KEYS),
    ),
    "axk1": ModelFamily(
        {"first_k_dense_replace": 1},
        layer=partial(
            llama_layer,
            experts=ExpertNames(choice_bias=_DEEPSEEK_BIAS, optional_bias=True, sum_norm="post_mlp_layernorm"),
        ),
        model_names=((".post_mlp_layernorm.", ".mlp.post_mlp_layernorm."),),
        sigmoid_router=True,
        # Published checkpoints have the norm of the sum for dense layers, too, and no e_score_correction_bias.
        idle=r"model\.layers\.\d+\.post_mlp_layernorm\.",
        ignored=(*DRAFTING_KEYS, *_LATENT_IGNORED, *_DEEPSEEK_TRAINING),
        fixed=_DEEPSEEK_FIXED,
    ),
    "glm4_moe_lite": ModelFamily(
        {"first_k_dense_replace": 1},
        layer=_DEEPSEEK_ROUTER,
        sigmoid_router=True,
        ignored=(*DRAFTING_KEYS, *_LATENT_IGNORED),
        fixed={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "youtu": ModelFamily(ignored=(*_LATENT_IGNORED, *DRAFTING_KEYS, "embedding_initializer_range")),
    "minicpm3": ModelFamily(ignored=_LATENT_IGNORED),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        defaults={},
        layer=partial(_LFM2_LAYER, experts=ExpertNames(choice_bias="feed_forward.expert_bias")),
        sigmoid_router=True,
        keys={"num_dense_layers": "first_k_dense_replace", "tie_embedding": "tie_word_embeddings"},
        derived=lambda _: {},
        fixed={"use_expert_bias": True},
    ),
    "lfm3": ModelFamily(
        {"full_attn_idxs": None, "rope_parameters": None},
        layer=partial(
            hybrid_layer,
            mixer=short_convolution,
            norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
            qk_norm=QkNorm(),
            projections=Projections(gate="self_attn.gate_proj", by_head=True),
        ),
        linear=lfm3_layers,
        rope=RopeRules(local=True),
        keys={"use_sandwich_norm": "use_post_norm"},
        derived=_lfm3,
        names=(
            ("model.norm.", "model.embedding_norm."),
            (".mlp.gate_proj.", ".feed_forward.w1."),
            (".mlp.up_proj.", ".feed_forward.w3."),
            (".mlp.down_proj.", ".feed_forward.w2."),
        ),
        model_names=((".self_attn.gate_proj.", ".self_attn.g_proj."),),
        fixed={"attention_bias": False},
    ),
    "qwen3_next": ModelFamily(
        _DELTA_NET,
        layer=partial(_QWEN_HYBRID, mixer=partial(delta_net, checkpoint_names="fused")),
        norm="offset",
        rope=RopeRules(partial=True),
        linear=delta_layers,
        ignored=DRAFTING_KEYS,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "falcon_h1": ModelFamily(
        {"time_step_limit": None},
        layer=falcon_h1_layer,
        linear=falcon_h1_layers,
        keys={"lm_head_multiplier": "logit_scale"},
        names=(("model.norm.", "model.final_layernorm."), (".mlp.", ".feed_forward.")),
        ignored=("mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"),
        fixed={
            "attention_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "projectors_bias": False,
            "mamba_use_mlp": True,
        },
    ),
    "granitemoehybrid": ModelFamily(
        {"time_step_limit": None},
        layer=partial(
            hybrid_layer,
            mixer=state_space,
            experts=ExpertNames(shared=_GRANITE_SHARED),
        ),
        derived=_granite_hybrid,
        fused=_FUSED_MLP,
        names=(("mlp.gate_up_proj", "shared_mlp.input_linear"), (".mlp.down_proj", ".shared_mlp.output_linear")),
        linear=mamba_layers,
        ignored=("mamba_chunk_size", "normalization_function", "init_method"),
    ),
    "bamba": ModelFamily(
        {"partial_rotary_factor": 0.5, "time_step_limit": None},
        layer=partial(hybrid_layer, mixer=state_space, norms=("input_layernorm", "", "pre_ff_layernorm", "")),
        rope=RopeRules(partial=True),
        linear=bamba_layers,
        derived=_bamba,
        names=(("model.norm.", "model.final_layernorm."), (".mlp.", ".feed_forward.")),
        ignored=("mamba_chunk_size", "attn_rotary_emb", "num_logits_to_keep", "z_loss_coefficient"),
    ),
    "jamba": ModelFamily(
        layer=partial(hybrid_layer, mixer=selective_scan, norms=("input_layernorm", "", "pre_ff_layernorm", "")),
        linear=jamba_layers,
        derived=_jamba,
        names=(("model.norm.", "model.final_layernorm."), (".mlp.", ".feed_forward.")),
        ignored=(
            "use_mamba_kernels",
            "use_mambapy",
            "use_associative_scan",
            "calc_logits_for_entire_prompt",
            "num_logits_to_keep",
            "n_ctx",
        ),
        fixed={"mamba_inner_layernorms": True},
    ),
    "nemotron_h": ModelFamily(
        {
            "num_hidden_layers": None,
            "position_embedding_type": None,
            "hybrid_override_pattern": None,
            "time_step_limit": None,
        },
        layer=nemotron_h_layer,
        norm="wide",
        gated=False,
        sigmoid_router=True,
        linear=nemotron_h_layers,
        keys={
            "mlp_hidden_act": "hidden_act",
            "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        },
        derived=_nemotron_h,
        names=(
            ("model.norm.", "backbone.norm_f."),
            ("model.layers.", "backbone.layers."),
            ("model.embed_tokens", "backbone.embeddings"),
            (".input_layernorm.", ".norm."),
            (".self_attn.", ".mixer."),
            (".mamba.", ".mixer."),
            (".mlp.", ".mixer."),
        ),
        model_names=(("backbone.", "model."),),
        # Keys about training, kernels and caches. transformers ignores attention_bias, too, and n_shared_experts, since
        # the shared expert's width is another key.
        ignored=(
            "attention_bias",
            *DRAFTING_KEYS,
            "mtp_layers_block_type",
            "mtp_hybrid_override_pattern",
            "use_mamba_kernels",
            "expand",
            "time_step_min",
            "time_step_max",
            "time_step_floor",
            "time_step_rank",
            "chunk_size",
            "n_shared_experts",
            "moe_shared_expert_overlap",
            "mamba_ssm_cache_dtype",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
        ),
        fixed={"mamba_hidden_act": "silu", "mamba_proj_bias": False, "sliding_window": None},
    ),
    "kimi_linear": ModelFamily(
        {"num_local_experts": None, "num_experts": 256, "first_k_dense_replace": 1, "linear_attn_config": None},
        layer=partial(
            hybrid_layer,
            mixer=delta_attention,
            experts=ExpertNames(
                choice_bias="block_sparse_moe.gate.e_score_correction_bias",
                shared=(
                    ("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
                    "block_sparse_moe.shared_experts.down_proj",
                ),
            ),
        ),
        sigmoid_router=True,
        linear=kimi_layers,
        keys={
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
        # No layer has a rotary embedding, although configs have a rotary base.
        derived=lambda raw: {"position_embedding_type": "nope", "head_dim": raw["qk_rope_head_dim"]},
        names=((".linear_attn.", ".self_attn."),),
        model_names=(
            (".block_sparse_moe.", ".mlp."),
            *(
                (f".self_attn.{part}", f".self_attn.forget_gate.{part}")
                for part in ("f_a_", "f_b_", "A_log", "dt_bias")
            ),
        ),
        ignored=(*_LATENT_IGNORED, *DRAFTING_KEYS),
        fixed={
            "mla_use_nope": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "use_grouped_topk": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "olmo_hybrid": ModelFamily(
        layer=partial(
            hybrid_layer,
            mixer=partial(delta_net, checkpoint_names="each"),
            linear_norms=PRE_NORMS,
            norms=POST_NORMS,
            qk_norm=QkNorm(kind="projection"),
        ),
        names=(
            (".input_layernorm.", ".attention_layer_norm."),
            (".post_attention_layernorm.", ".feedforward_layer_norm."),
        ),
        model_names=(
            (".attention_layer_norm.", ".input_layernorm."),
            (".feedforward_layer_norm.", ".post_attention_layernorm."),
        ),
        norm="wide",
        linear=olmo_hybrid_layers,
        derived=_olmo_hybrid,
        ignored=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
}

# Multimodal models. Supported text models are transformers' default model_type of a text_config (in DEFAULTS), and
# those of OTHER_TEXTS.
MULTIMODAL = words(
    """
    aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid exaone4_5 fast_vlm gemma3 gemma4 gemma4_unified glm46v
    glm4v glm4v_moe glmga got_ocr2 hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lfm2_vl lfm3_vl
    lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3
    nemotron_h_omni ovis2 qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qianfan_ocr qwen3_vl qwen3_vl_moe smolvlm
    video_llama_3 video_llava vipllava
    """
)
OTHER_TEXTS: dict[str, Collection[str]] = {
    **dict.fromkeys(
        words("internvl llava llava_next llava_next_video llava_onevision ovis2 video_llava vipllava"),
        sorted(words("llama mistral qwen2 qwen3 gemma gemma2 phi3 granite cohere2 gpt_oss qwen3_moe")),
    ),
    "aya_vision": ("cohere",),
    "exaone4_5": ("exaone4_5_text",),
    "glm46v": ("glm4v_moe_text",),
    "mistral3": ("ministral3", "mistral4"),
}
# Pillion's own key: stacked expert matrices are [inputs, outputs] in published files, but [outputs, inputs] if saved by
# transformers 5.
EITHER_WAY = "_experts_either_way"
# Text model -> family with the same arithmetic for texts, and defaults beyond the family's.
TEXT_AS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "exaone4_5_text": ("exaone4", {}),
    "glm4v_text": ("glm4", {}),
    "glm4v_moe_text": ("glm4_moe", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True, EITHER_WAY: True}),
}
# Model types that differ from another one in the name only.
SAME_AS = {"kimi_k2": "deepseek_v3"}
# Families of older releases.
REMOVED = (
    *("codegen", "falcon", "fuyu", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "nanochat", "nemotron", "olmo"),
    *("persimmon", "phi", "phimoe", "stablelm"),
)
