"""Reading config.json: old and new names, missing keys, options, and rejected values."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import docs.family_defaults
import docs.models_page
from pillion.engine.backends.backend import kv_layout
from pillion.engine.encoders.encoder_parser import ENCODER_KINDS
from pillion.engine.load_model import check_adapters
from pillion.engine.models.config_keys import BOOKKEEPING
from pillion.engine.models.config_parser import (
    known_architectures,
    load_config,
    parse_config,
    unused_keys,
    without_keys,
)
from pillion.engine.models.families import DEFAULTS_FILE, FAMILIES, TEXT_OF
from pillion.engine.models.family_rows import REMOVED, SAME_AS, TEXT_AS
from pillion.engine.models.model_config import LayerHeads, QueryGrowth
from pillion.engine.models.rope import make_rope, make_ropes, partial_order, rotate
from pillion.engine.models.rope_config import served_variant
from pillion.errors import ConfigError
from tests.support.fake_backend import prepared_model

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
INNER = {**BASE, "model_type": "gemma3_text"}
# Keys without defaults in transformers.
REQUIRED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    # Keys whose defaults would have no effect in such a small model.
    "lfm2": {"block_multiple_of": 1},
    "falcon_h1": {"mamba_d_ssm": None},
    # The default rank is a 16th of the hidden size, less than a vector here, and no layer would attend.
    "jamba": {"mamba_dt_rank": 16, "attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"n_groups": 1},
}
# Families with a default number of KV heads in transformers, not that of query heads.
OWN_KV_HEADS = ("qwen2", "qwen3", "exaone4", "helium", "dots1", "exaone_moe", "qwen2_moe")
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4_TEXT = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}
SETS = {"short_factor": [1.0, 2.0] * 4, "long_factor": [1.0, 3.0] * 4, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


def test_old_and_new_spelling_of_rope_are_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = parse_config({**BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}})
    assert old == new
    assert old.ropes[0].theta == 5e5
    assert parse_config({**BASE, "rope_theta": 77.0}).ropes[0].theta == 77.0
    assert parse_config(BASE).ropes[0].theta == 10_000.0


def test_the_page_about_models_is_current():
    assert docs.models_page.unsorted() == set()
    assert docs.models_page.PAGE.read_text() == docs.models_page.render(), "run make dashboards"
    assert docs.models_page.LEFT_OUT_PAGE.read_text() == docs.models_page.render_left_out(), "run make dashboards"


def test_the_defaults_match_transformers():
    assert DEFAULTS_FILE.read_text() == docs.family_defaults.render(), "run make dashboards"


def test_a_text_part_may_leave_out_what_transformers_has_defaults_for():
    """LLaVA 1.5's text config has little more than its type."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064}
    found = parse_config({"model_type": "llava", "text_config": text})
    assert (found.hidden_size, found.num_layers, found.num_heads, found.vocab_size) == (4096, 32, 32, 32_064)


def test_an_unknown_architecture_is_refused_by_name_with_those_near_it():
    with pytest.raises(ConfigError, match=r"'mamba' is not supported; .*docs/models.md lists what is"):
        parse_config({**BASE, "model_type": "mamba"})
    with pytest.raises(ConfigError, match=r"'qwen3_6' is not supported; near it are .*qwen3_5"):
        parse_config({**BASE, "model_type": "qwen3_6"})
    with pytest.raises(ConfigError, match="None"):
        parse_config({})
    assert set(known_architectures()) == {*FAMILIES, *TEXT_OF, *TEXT_AS, *SAME_AS, *ENCODER_KINDS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "are inconsistent"),
        ({"head_dim": 15}, "are inconsistent"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes, 4 bits"),
        ({"quantization_config": {"zero_point": True}}, "an unnamed method"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx, 4 bits"),
        ({name: {"group_size": 64, "bits": 4} for name in ("quantization", "quantization_config")}, "mlx, 4 bits"),
        # A family rejects keys that it does not know.
        ({"residual_scaling": 0.5}, "residual_scaling = 0.5"),
        ({"sliding_window": 8}, "sliding_window = 8"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers = 1"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok = 2"),
        ({"logits_scaling": 3.0}, "logits_scaling = 3.0"),
        ({"attn_logit_softcapping": 5.0, "model_type": "gemma3_text"}, "attn_logit_softcapping = 5.0"),
        ({"attention_bias": True, "model_type": "mistral", "num_key_value_heads": 4}, "attention_bias = True"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' for layer 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "rope parameter alpha = 1000.0"),
        ({"model_type": "gemma3", "text_config": INNER, "residual_scaling": 0.5}, "gemma3: .*residual_scaling"),
        ({"model_type": "gemma3", "text_config": INNER, "quantization_config": {"bits": 4}}, "unnamed method, 4 bits"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be above 0"),
        *(
            ({"rope_scaling": {"rope_type": kind}}, f"rope type '{kind}' needs a factor")
            for kind in ("linear", "dynamic", "llama3", "yarn")
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.2}, "3 of 16 values"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}}, "8 factors in short_factor"),
        ({"rope_scaling": {"rope_type": "longrope", **SETS, "long_factor": [1.0, 0.0] * 4}}, "long_factor"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"model_type": "qwen2", **WINDOW, "layer_types": ["full_attention"]}, "each of the 2 layers"),
        ({"model_type": "qwen2", **WINDOW, "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "relu"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"model_type": "deepseek_v3"}, "num_key_value_heads = 128"),
        ({"model_type": "glm4_moe_lite", "num_key_value_heads": 4, "head_dim": 32}, "head_dim = 32"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 4, "scoring_func": "softmax"}, "scoring_func"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 4, "index_topk": 64}, "index_topk = 64"),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "noaux_tc"},
            "topk_method = 'noaux_tc'",
        ),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v32", "num_key_value_heads": 4, "index_head_dim": 32}, "index_head_dim = 32"),
        ({"model_type": "glm_moe_dsa", "num_key_value_heads": 4, "indexer_types": ["shared"] * 2}, "indexer_types"),
        ({"model_type": "deepseek_v4"}, "'deepseek_v4' is not supported"),
        ({"model_type": "glm4_moe", "num_key_value_heads": 4, "n_group": 3}, "n_group = 3"),
        ({"model_type": "glm4_moe", "num_key_value_heads": 4, "n_group": 128}, "n_group = 128"),
        ({"model_type": "glm4_moe", "num_key_value_heads": 4, "n_group": 2, "topk_group": 3}, "topk_group = 3"),
        ({"model_type": "glm4_moe", "num_key_value_heads": 4, "n_group": 64}, "fewer than the 8 of a token"),
        (
            {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 2, "num_experts_per_tok": 3},
            "= 3 exceeds the number of experts, 2",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(change, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config({**BASE, **change})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_missing_keys_have_the_defaults_of_transformers(name):
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = {**BASE, "num_attention_heads": 8}
    given = {key: shape[key] for key in required if not name.startswith("gemma")} | {"model_type": name}
    given |= REQUIRED.get(name, {})
    if name == "lfm2":
        given["block_auto_adjust_ff_dim"] = False  # Adjusted widths differ.
    latents = "kv_lora_rank" in FAMILIES[name].defaults
    if latents or name in OWN_KV_HEADS:
        given["num_key_value_heads"] = given["num_attention_heads"]
    theirs, ours = AutoConfig.for_model(**given), parse_config(given)
    theirs.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ.
    for key in ("vocab_size", "hidden_size", "max_position_embeddings"):
        assert getattr(ours, key) == getattr(theirs, key), key
    # Llama 4's MLP width has another key beside experts; GPT-2 and OPT have their own keys.
    widths = [key for key in ("intermediate_size_mlp", "n_inner", "ffn_dim") if hasattr(theirs, key)]
    wanted = getattr(theirs, *widths or ["intermediate_size"])
    assert ours.intermediate_size == (wanted or 4 * theirs.hidden_size)
    assert ours.rms_norm_eps == getattr(theirs, FAMILIES[name].eps, 1e-5)  # OPT has no such key.
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.num_layers, ours.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    row = theirs.kv_lora_rank + theirs.qk_rope_head_dim if latents else getattr(theirs, "head_dim", None)
    row = row + theirs.index_head_dim if hasattr(theirs, "index_head_dim") else row
    assert ours.head_dim == (row or 64 // given["num_attention_heads"])
    assert ours.num_kv_heads == (1 if latents else getattr(theirs, "num_key_value_heads", theirs.num_attention_heads))
    rope = getattr(theirs, "rope_parameters", {"rope_theta": 10_000.0})
    by_type = [rope[key] for key in ("full_attention", "sliding_attention")] if "full_attention" in rope else [rope]
    assert [rope.theta for rope in ours.ropes] == [parameters["rope_theta"] for parameters in by_type]
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "attention_chunk_size", None) or getattr(theirs, "sliding_window", None) or 0
    full = ("full_attention", "indexed_attention", "conv")
    assert ours.sliding_windows == tuple(0 if kind in full else window for kind in kinds)
    if ours.learned_positions or "position_embedding_type" in FAMILIES[name].defaults:
        assert ours.layer_ropes == (None,) * ours.num_layers
        return
    if name in ("kimi_linear", "jamba"):
        assert ours.layer_ropes == (None,) * ours.num_layers
        kinds = []
    assert not kinds or ours.layer_ropes == tuple(
        None if not rope else int(len(ours.ropes) > 1 and kind == "sliding_attention")
        for kind, rope in zip(kinds, getattr(theirs, "no_rope_layers", None) or [1] * len(kinds), strict=True)
    )
    if ours.moe is not None:
        assert ours.moe.num_experts == getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert ours.moe.experts_per_token == theirs.num_experts_per_tok
        assert ours.moe.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.moe.normalize == getattr(theirs, "norm_topk_prob", name not in ("llama4_text", "jamba"))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_config_saved_by_transformers_equals_one_without_optional_keys(name, tmp_path):
    given = {**BASE, **REQUIRED.get(name, {}), "model_type": name, "num_key_value_heads": 2, "head_dim": 16}
    if "kv_lora_rank" in FAMILIES[name].defaults:
        del given["head_dim"]
        given["num_key_value_heads"] = 4
    if name == "mimo_v2_flash":
        given["head_dim"] = 192  # Of 16 values an odd number would be rotated.
    AutoConfig.for_model(**given).save_pretrained(tmp_path)
    saved = dataclasses.asdict(load_config(tmp_path))
    plain = dataclasses.asdict(parse_config(given))
    for of_text in ("bos_token_id", "eos_token_ids"):
        del saved[of_text], plain[of_text]
    assert saved == plain


# Classes whose defaults make no model of transformers', or positions that no published model has.
NO_DEFAULT = {
    "deepseek_v2": "num_experts_per_tok must be",
    "dots1": "n_routed_experts must be",
    **dict.fromkeys(("glm4_moe", "glm4v_moe", "glm4v_moe_text"), "a rotary embedding of 21 of 42"),
}


@pytest.mark.parametrize("name", sorted({*known_architectures()} & {*CONFIG_MAPPING}))
def test_the_defaults_of_transformers_are_a_config(name: str) -> None:
    made = CONFIG_MAPPING[name]()
    for saved in (json.loads(made.to_json_string(use_diff=each)) for each in (True, False)):
        if name in NO_DEFAULT:
            with pytest.raises(ConfigError, match=NO_DEFAULT[name]):
                parse_config(saved)
        else:
            assert parse_config(saved).vocab_size == made.get_text_config().vocab_size


def test_experts_in_every_layer_need_no_dense_width() -> None:
    base = {**BASE, "model_type": "solar_open", "num_key_value_heads": 4, "moe_intermediate_size": 48}
    del base["intermediate_size"]
    assert parse_config(base).intermediate_size == 48
    glm = {**base, "model_type": "glm4_moe", "partial_rotary_factor": 1.0, "intermediate_size": None}
    assert parse_config({**glm, "first_k_dense_replace": 0}).intermediate_size == 48
    with pytest.raises(ConfigError, match="intermediate_size must be a whole number above 0, not None"):
        parse_config({**glm, "first_k_dense_replace": 1})


HARMLESS = {
    "use_flash_attention": True,
    "use_sdpa": True,
    "device_map": {"": 0},
    "max_seq_length": 2048,
    "pad_token": "<pad>",
    "tags": ["chat", "en"],
    "gradient_checkpointing": True,
    "learning_rate": 2e-5,
    "add_bos_token": True,
    "n_ctx": 2048,
    "mlp_dropout_rate": 0.1,
    "router_balance_loss": 0.01,
    "eod_token_id": 3,
    "model_family": "own",
    "created_by": "a tool",
    "qat": False,
    "merge_recipe": None,
    "extra": {},
}


@pytest.mark.parametrize("kind", ["llama", "bert", "gemma3"])
def test_keys_without_effect_are_ignored(kind: str) -> None:
    base = {**BASE, "model_type": kind, "num_key_value_heads": 4, **({"type_vocab_size": 2} if kind == "bert" else {})}
    if kind == "gemma3":
        base = {"model_type": kind, "text_config": {**INNER, "inner_maker": "a"}}
    given = {**base, **HARMLESS}
    assert parse_config(given) == parse_config(base)
    named = "created_by extra merge_recipe mlp_dropout_rate model_family pad_token qat router_balance_loss"
    assert unused_keys(given) == sorted([*named.split(), *(["inner_maker"] if kind == "gemma3" else [])])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("new_option", True),
        ("depth_factor", 2),
        ("attention_variant", "differential"),
        ("norm_kind", ["rms"]),
        ("mlp", "gelu"),
        ("hybrid_pattern", "MEM*"),
        ("topk_method", "noaux_tc"),
        ("hidden_activation", "relu"),
        ("total_ut_steps", 4),
        ("is_causal", False),
    ],
)
def test_a_key_that_may_change_arithmetic_is_refused_with_advice(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*--ignore-config-key {key}$"):
        parse_config({**BASE, key: value})
    assert parse_config(without_keys({**BASE, key: value}, [key])) == parse_config(BASE)


def test_keys_are_ignored_at_any_level() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    text = {**INNER, "own": True, "rope_scaling": {**rope, "own": 3.0}}
    plain = {"model_type": "gemma3", "text_config": {**INNER, "rope_scaling": rope}}
    given = {**plain, "text_config": text, "own": 1, "other": 2}
    assert parse_config(without_keys(given, ("own", "other"))) == parse_config(plain)
    with pytest.raises(ConfigError, match=r"--ignore-config-key near: config\.json has no such key"):
        without_keys(given, ("own", "near"))


@pytest.mark.parametrize("name", ["smollm3", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text"])
def test_which_layers_have_a_window(name):
    given = {**BASE, "model_type": name, "num_key_value_heads": 4, "num_hidden_layers": 8}
    options = {**WINDOW, "max_window_layers": 3}
    given |= {key: value for key, value in options.items() if key in FAMILIES[name].defaults}
    kinds = AutoConfig.for_model(**given).layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}
    windows = tuple(8 if kind == "sliding_attention" else 0 for kind in kinds)
    assert parse_config(given).sliding_windows == windows
    assert parse_config({**given, "layer_types": kinds[::-1]}).sliding_windows == windows[::-1]


def test_published_configs_of_mimo_have_keys_of_their_own():
    """Their window excludes the query's own token, and they list the layers with windows and experts."""
    base = {**BASE, "model_type": "mimo_v2_flash", "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 16}
    base |= {"v_head_dim": 8, "rms_norm_eps": 1e-5}
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 7e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
    }
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    mixers = ["sparse", "dense", "sparse"]
    new = {"rope_parameters": ropes, "layer_types": kinds, "mlp_layer_types": mixers, "sliding_window": 9}
    old = {"rope_theta": 7e6, "swa_rope_theta": 5e3, "partial_rotary_factor": 0.5, "sliding_window_size": 8}
    old |= {"hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [1, 0, 1], "layernorm_epsilon": 1e-5}
    old |= {"swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 8, "swa_num_attention_heads": 4}
    config = parse_config({**base, **new})
    assert parse_config({**base, **old}) == config
    assert config.layer_heads == (LayerHeads(2, 16), LayerHeads(4, 16), LayerHeads(2, 16))
    assert (config.value_width, config.value_scale, config.sliding_windows) == (8, 0.707, (0, 9, 0))
    with pytest.raises(ConfigError, match="narrower than keys"):
        check_adapters(config)
    for change, words in (
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads = 2, not 4"),
        ({"v_head_dim": 24}, "v_head_dim = 24 are inconsistent"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config({**base, **new, **change})


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_names_that_phi3_had_for_longrope(name):
    config = parse_config({**BASE, "model_type": "phi3", "rope_scaling": {"type": name, **SETS}})
    assert config.ropes[0].kind == "longrope"
    assert config.ropes[0].original_max_position == 4096  # The family's own key wins over that of the scaling.


def test_old_gemma3_has_other_keys_for_its_two_rotary_embeddings():
    old = {"rope_theta": 1e5, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    base = {**BASE, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window_pattern": 4}
    config = parse_config({**base, **old})
    assert config == parse_config({**base, **new})
    assert [rope.kind for rope in config.ropes] == ["linear", "default"]
    assert config.layer_ropes == (1, 1, 1, 0) * 3
    assert config.max_position_embeddings == 256  # Already stretched.


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_field_of_transformers_config_counts_or_is_bookkeeping(name):
    """Changing a field changes the model or is rejected: none is silently ignored."""
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "no_rope_layer_interval": 2}
    fields = {field.name: field.default for field in dataclasses.fields(type(AutoConfig.for_model(name)))}
    base = {**BASE, **REQUIRED.get(name, {}), "model_type": name, "num_key_value_heads": 4, "num_hidden_layers": 4}
    base |= {key: value for key, value in options.items() if key in fields and name != "nemotron_h"}
    if name in ("mellum", "lfm3"):
        base["layer_types"] = ["sliding_attention"] * 5  # The default has no windows.
    if name == "qwen2_moe":
        base["max_window_layers"] = 2  # Every other layer has no window.
    if name == "mimo_v2_flash":
        base["num_key_value_heads"] = 2  # Layers with a window have twice as many.
    if name == "gpt_oss":
        base["max_position_embeddings"] = 2**20  # By default its embedding is scaled to 2**17 tokens.
    if name == "cohere2_moe":
        # Softmax is over the chosen experts only; without a shared MLP nothing is averaged, and without leading dense
        # layers their key is absent.
        base |= {"expert_selection_fn": "sigmoid", "num_shared_experts": 1, "first_k_dense_replace": 1}
        base["sliding_window_pattern"] = 3
    if name == "deepseek_v2":
        base["topk_method"] = "group_limited_greedy"  # The other method has no groups.
    if name.startswith("gemma4"):
        base |= GEMMA4 | (GEMMA4_TEXT if name == "gemma4_text" else {})
    plain = parse_config(base)
    # The original length matters only with scaling, and the first embedding has no other key.
    of_text = {"bos_token_id", "eos_token_id"}
    ignored = {*BOOKKEEPING, *of_text, "rope_parameters", "original_max_position_embeddings"}
    others = {"mlp_only_layers": [1], "rotary_dim": 8}
    for key in fields.keys() - ignored - set(FAMILIES[name].ignored):
        now = base.get(key, fields[key])
        other = not now if isinstance(now, bool) else now + 1 if isinstance(now, int | float) else "strange"
        other = others.get(key, other)
        try:
            assert parse_config({**base, key: other}) != plain, key
        except ConfigError as error:
            assert key in error.message or "inconsistent" in error.message or "'strange'" in error.message  # noqa: PT017


def test_options_of_other_families_that_are_switched_off_are_ignored():
    off = {"attention_bias": None, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    off |= {"logits_scaling": 1.0, "num_experts_per_tok": 0, "final_logit_softcapping": None, "rope_interleaved": False}
    off |= {"layer_types": ["full_attention"] * 2, "_attn_implementation": "eager", "pretraining_tp": 4}
    off |= {"temperature": 0.6, "rope_scaling": {"rope_type": "default", "finetuned": True, "attn_factor": 1.0}}
    assert parse_config({**BASE, **off}) == parse_config(BASE)
    assert parse_config({**BASE, "model_type": "qwen2", "attention_bias": True}).qkv_bias
    assert not parse_config({**BASE, "model_type": "qwen2", "attention_bias": True}).o_bias


GPTQ_LIKE = [{"group_size": 64, "bits": bits} for bits in (5, 4)]
MODELOPT = [{"quantization": {"quant_algo": algorithm, "group_size": 16}} for algorithm in ("INT8_SQ", "NVFP4")]


@pytest.mark.parametrize(
    ("name", "method", "refused", "read"),
    [
        ("quantize_config.json", "gptq", "5 bits", "gptq, 4 bits in groups of 64"),
        ("quant_config.json", "awq", "5 bits", "awq, 4 bits in groups of 64"),
        ("hf_quant_config.json", "modelopt", "int8_sq", "modelopt, 4-bit floats in groups of 16"),
    ],
)
def test_a_quantization_that_only_another_file_names_is_read(name, method, refused, read, tmp_path):
    bad, good = MODELOPT if method == "modelopt" else GPTQ_LIKE
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / name).write_text(json.dumps(bad))
    with pytest.raises(ConfigError, match=f"quantized by {method}, {refused}"):
        load_config(tmp_path)
    (tmp_path / name).write_text(json.dumps(good))
    assert load_config(tmp_path).quantization.words == read


def test_model_type_aliases_are_accepted():
    shape = {**BASE, "num_key_value_heads": 4}
    assert parse_config({**shape, "model_type": "kimi_k2"}) == parse_config({**shape, "model_type": "deepseek_v3"})


def test_which_layers_have_experts():
    config = {
        **BASE,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    assert parse_config(config).moe.layers == (False, True, False, False, False, True)


ROPES = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    {"rope_type": "longrope", "factor": 4.0, **SETS},
    {"rope_type": "longrope", **SETS},
    {"rope_type": "longrope", **SETS, "attention_factor": 1.25},
]


@pytest.mark.parametrize("served", [32, 64, 65, 256, 257, 1000])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_match_transformers_at_the_served_length(rope, served):
    config = {**BASE, "rope_parameters": {"rope_theta": 1000.0, **rope}}
    theirs, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig(**config), torch.device("cpu"), seq_len=served)
    (ours,) = make_ropes(parse_config(config), served)
    torch.testing.assert_close(ours.frequencies, theirs, atol=0, rtol=1e-6)
    assert ours.scales.tolist() == pytest.approx([scale] * 8)


def test_queries_that_grow_with_their_position():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    raw = {**BASE, "model_type": "ministral3", "num_key_value_heads": 4}
    config = parse_config({**raw, "rope_parameters": rope})
    assert (config.max_position_embeddings, config.ropes[0].kind) == (256, "yarn")
    assert config.query_growth == QueryGrowth(rate=0.1, length=64)
    assert parse_config({**raw, "rope_parameters": {**rope, "llama_4_scaling_beta": 0}}).query_growth is None
    with pytest.raises(ConfigError, match=r"query scale is not supported with rope type 'dynamic'"):
        parse_config({**raw, "rope_parameters": {**rope, "rope_type": "dynamic"}})
    with pytest.raises(ConfigError, match=r"llama_4_scaling_beta = 0\.1"):
        parse_config({**BASE, "rope_parameters": rope})


def test_the_text_model_of_mistral_3():
    text = {**BASE, "num_key_value_heads": 4}
    images = {"vision_config": {}, "spatial_merge_size": 2, "vision_feature_layer": -1, "projector_hidden_act": "gelu"}
    for name in ("mistral", "ministral3"):
        outer = {"model_type": "mistral3", "text_config": {**text, "model_type": name}, **images}
        assert parse_config(outer) == parse_config({**text, "model_type": name})
    unnamed = {key: value for key, value in text.items() if key != "model_type"}
    assert parse_config({"model_type": "mistral3", "text_config": unnamed}).family == "mistral"
    with pytest.raises(ConfigError, match=r"mistral3: .*text_config of model_type = 'llama'"):
        parse_config({"model_type": "mistral3", "text_config": {**text, "model_type": "llama"}})


def test_a_choice_among_groups_of_experts_is_refused_where_a_family_has_none():
    config = {**BASE, "num_key_value_heads": 4, "num_experts": 8}
    grouped = parse_config({**config, "model_type": "glm4_moe", "n_group": 2, "topk_group": 2})
    assert (grouped.moe.groups, grouped.moe.kept_groups) == (2, 2)
    assert parse_config({**config, "model_type": "qwen3_moe", "n_group": 1, "topk_group": 1}).moe.groups == 1
    with pytest.raises(ConfigError, match=r"qwen3_moe: config\.json has n_group = 2"):
        parse_config({**config, "model_type": "qwen3_moe", "n_group": 2})


def test_options_of_models_with_learned_positions():
    for change, words in (
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights = False"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config({**BASE, "model_type": "opt", **change})
    own = {"n_embd": 48, "n_layer": 3, "n_head": 2, "n_positions": 99}
    found = parse_config({"model_type": "gpt2", "vocab_size": 100, **own})
    assert (found.hidden_size, found.num_layers, found.num_heads, found.max_position_embeddings) == (48, 3, 2, 99)
    assert (found.intermediate_size, found.num_kv_heads) == (192, 2)


@pytest.mark.parametrize("name", REMOVED)
def test_removed_families_are_reported_as_removed(name):
    with pytest.raises(ConfigError, match=f"{name}' is not supported: it was removed in this release"):
        parse_config({**BASE, "model_type": name})


def test_llama_4_configs_are_parsed():
    text = {**BASE, "model_type": "llama4_text", "num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 16}
    images = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3, "vision_config": {}}
    outer = {"model_type": "llama4", "text_config": {**text, "attention_chunk_size": 64}, **images}
    config = parse_config(outer)
    assert (config.family, config.chunked, config.sliding_windows) == ("llama4_text", True, (64, 64, 64, 0))
    assert config.layer_ropes == (0, 0, 0, None)
    kinds = ["full_attention", "chunked_attention"] * 2
    assert parse_config({**text, "layer_types": kinds}).sliding_windows == (0, 8192) * 2
    assert parse_config({**text, "moe_layers": [0, 3]}).moe.layers == (True, False, False, True)
    assert parse_config({**text, "interleave_moe_layer_step": 2}).moe.layers == (False, True) * 2


def heads(*each):
    return tuple(LayerHeads(*one) for one in each)


def test_gemma_4_configs_are_parsed():
    base = {**BASE, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6}
    plain = parse_config({**base, "model_type": "gemma4_text"})
    assert plain.layer_heads == heads(*[(2, 16)] * 5, (2, 32))
    assert plain.sliding_windows == (512,) * 5 + (0,)
    assert [(rope.kind, rope.head_dim, rope.turning) for rope in plain.ropes] == [
        ("proportional", 32, 4),
        ("default", 16, 0),
    ]
    assert (plain.attention_scale, plain.kv_sources, plain.token_inputs.width) == (1.0, (), 256)
    keys = parse_config(
        {**base, "model_type": "gemma4_text", "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    )
    assert keys.layer_heads[5] == LayerHeads(1, 32)
    assert keys.values_are_keys
    shared = parse_config({**base, **GEMMA4, "model_type": "gemma4_unified_text"})
    assert shared.kv_sources == (0, 1, 1, 0)
    assert shared.kv_places == (LayerHeads(2, 32), LayerHeads(2, 16), None, None)
    assert (shared.layer_widths, shared.last_kept_layer) == ((128, 128, 256, 256), 1)
    saved = AutoConfig.for_model(
        **base | {"model_type": "gemma4_text"}, num_global_key_value_heads=1, attention_k_eq_v=True
    ).to_dict()
    assert saved["per_layer_config"] == {"5": {"head_dim": 32, "num_key_value_heads": 1}}
    assert parse_config(saved).layer_heads == keys.layer_heads


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"num_kv_shared_layers": 2, "num_hidden_layers": 3}, "num_kv_shared_layers = 2"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input = 99, fewer than the 100 tokens"),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config = .* for layer 1"),
        ({"per_layer_config": {"0": {"head_dim": 32}, "1": {}}, "num_hidden_layers": 3}, "layers of one kind"),
        ({"per_layer_config": [1]}, "per_layer_config must be an object"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "are inconsistent"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 3.0}}},
            "3.0 does not fit",
        ),
    ],
)
def test_unsupported_options_of_gemma_4(change, words):
    base = {**BASE, "model_type": "gemma4_text", "num_key_value_heads": 2, "head_dim": 16}
    with pytest.raises(ConfigError, match=words):
        parse_config({**base, **change})


def test_keys_of_published_configs_that_change_nothing():
    """Keys in the configs of Dolly, GPT-2 XL, Galactica and Llama 4."""
    dropout = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "custom_pipelines": {"a": {"b": "c"}}}
    for name, found in (
        ("starcoder2", dropout),
        ("gpt2", {"output_past": True, "predict_special_tokens": True}),
        ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
        ("llama4_text", {"no_rope_layers": []}),
    ):
        base = {**BASE, "model_type": name, "num_key_value_heads": 4}
        assert parse_config({**base, **found}) == parse_config(base), name
    coder = {**BASE, "model_type": "starcoder2"}
    assert parse_config({**coder, "hidden_act": "gelu_fast"}) == parse_config({**coder, "hidden_act": "gelu_new"})
    with pytest.raises(ConfigError, match=r"opt: config\.json has scale_embeddings = True"):
        parse_config({**BASE, "model_type": "opt", "scale_embeddings": True})


def test_the_longest_text_with_scaling():
    def longest(**rope):
        return parse_config({**BASE, "rope_parameters": rope}).max_position_embeddings

    assert longest(rope_type="linear", factor=2.0) == 512
    assert longest(rope_type="dynamic", factor=4.0) == 1024
    assert longest(rope_type="yarn", factor=8.0, original_max_position_embeddings=64) == 512
    assert longest(rope_type="yarn", factor=2.0, original_max_position_embeddings=64) == 256
    assert longest(rope_type="llama3", factor=8.0, original_max_position_embeddings=64) == 256
    assert longest(rope_type="longrope", **SETS) == 256


def test_a_model_served_at_two_lengths_shares_blocks_only_where_they_are_the_same(tmp_path):
    def version(served, **rope):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_parameters": rope}))
        return kv_layout(dataclasses.replace(prepared_model(served), folder=tmp_path), 16).version

    plain = version(100)
    for rope in ROPES:
        versions = [version(served, **rope) for served in (64, 65, 256, 257, 1000)]
        if rope["rope_type"] == "dynamic":
            assert versions[:3] == [plain] * 3
            assert len(set(versions)) == 3
        elif rope["rope_type"] == "longrope":
            assert versions[0] == plain
            assert len(set(versions[1:])) == 1
            assert versions[1] != plain
        else:
            assert set(versions) == {plain}
    one_set = {**SETS, "long_factor": SETS["short_factor"]}
    assert (
        served_variant(parse_config({**BASE, "rope_parameters": {"rope_type": "longrope", **one_set}}).ropes, 99) == ""
    )


def test_partial_rotation_is_whole_rotation_of_reordered_heads():
    rope = parse_config({**BASE, "model_type": "phi3", "partial_rotary_factor": 0.75}).ropes[0]
    assert rope.rotary_dim == 12
    order = partial_order(16, 12)
    assert sorted(order.tolist()) == list(range(16))
    heads, positions = torch.randn(5, 2, 16), torch.arange(5) * 7
    whole = rotate(heads[..., order], *make_rope(rope, 16, 256).tables(positions, torch.float32))
    first = rotate(heads[..., :12], *make_rope(rope, 12, 256).tables(positions, torch.float32))
    torch.testing.assert_close(whole, torch.cat((first, heads[..., 12:]), -1)[..., order])


def test_files_that_are_not_a_config_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a model folder"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": [4, 5], "bos_token_id": 1}))
    assert load_config(tmp_path).eos_token_ids == (4, 5)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_added_by_hand_wins(key: str) -> None:
    """rope_scaling, which model cards tell users to add, wins over the keys of transformers 5."""
    saved = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 258,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = parse_config({**saved, "rope_scaling": scaling})
    assert (found.ropes[0].kind, found.ropes[0].theta, found.max_position_embeddings) == ("yarn", 1e6, 131072)
