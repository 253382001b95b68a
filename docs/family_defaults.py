"""Writes what transformers assumes for keys that configs leave out: ``python -m docs.family_defaults``, or ``make
dashboards``.

The values are those of transformers' own classes of configs, of the keys that Pillion reads; the table of families says
only where they are others.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Set
from typing import Any

from transformers import CONFIG_MAPPING

from pillion.engine.models.config_keys import words
from pillion.engine.models.families import DEFAULTS_FILE, FAMILIES
from pillion.engine.models.family_rows import MULTIMODAL, TEXT_AS

# Where a config leaves these keys out, transformers' own value counts.
DEFAULTED = words(
    """
    activation_function attention_bias attention_chunk_size attention_in_multiplier attention_k_eq_v
    attention_multiplier attention_out_bias attention_out_multiplier attention_value_scale attn_layer_indices
    attn_layer_offset attn_layer_period attn_scale attn_temperature_tuning block_auto_adjust_ff_dim
    block_ffn_dim_multiplier block_multiple_of conv_L_cache conv_bias conv_kernel decoder_sparse_step dim_model_base
    embedding_multiplier enable_bias enable_moe_block expert_layer_offset expert_layer_period expert_selection_fn
    ffn_dim final_logit_softcapping first_k_dense_replace floor_scale full_attn_idxs global_attn_every_n_layers head_dim
    hidden_act hidden_activation hidden_size hidden_size_per_layer_input index_head_dim index_n_heads index_topk
    interleave_moe_layer_step intermediate_size intermediate_size_mlp key_multiplier kv_lora_rank layer_norm_eps
    layer_norm_epsilon layer_rope_theta layer_types layers_block_type linear_allow_neg_eigval linear_conv_kernel_dim
    linear_head_dim linear_key_head_dim linear_num_heads linear_num_key_heads linear_num_value_heads
    linear_value_head_dim lm_head_multiplier logit_scale logits_scaling mamba_conv_bias mamba_d_conv mamba_d_head
    mamba_d_ssm mamba_d_state mamba_dt_rank mamba_expand mamba_head_dim mamba_n_groups mamba_n_heads
    mamba_norm_before_gate mamba_num_heads mamba_proj_bias mamba_rms_norm max_position_embeddings max_window_layers
    mlp_bias mlp_hidden_act mlp_layer_types mlp_multipliers mlp_only_layers moe_intermediate_size moe_k
    moe_layer_end_index moe_layer_interval moe_layer_start_index moe_layers moe_num_experts moe_num_shared_experts
    moe_shared_expert_intermediate_size moe_topk mup_enabled n_group n_groups n_inner n_positions n_routed_experts
    n_shared_experts no_rope_layer_interval no_rope_layers norm_eps norm_epsilon norm_topk_prob num_attention_heads
    num_dense_layers num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_kv_shared_layers
    num_local_experts num_shared_experts original_max_position_embeddings position_embedding_type
    prefix_dense_intermediate_size prefix_dense_sliding_window_pattern q_lora_rank qk_nope_head_dim qk_rope_head_dim
    qkv_bias query_pre_attn_scalar residual_multiplier rms_norm_eps rope_interleave rope_theta route_scale
    routed_scaling_factor router_scaling_factor scale_depth scale_emb shared_expert_combination_strategy
    shared_expert_intermediate_size shared_intermediate_size sliding_window sliding_window_pattern ssm_in_multiplier
    ssm_multipliers ssm_out_multiplier ssm_state_size swiglu_alpha swiglu_limit tie_word_embeddings top_k_experts
    topk_group topk_method use_attention_gate use_bias use_conv_bias use_double_wide_mlp use_post_norm use_qk_norm
    use_sandwich_norm use_sliding_window v_head_dim vocab_size vocab_size_per_layer_input word_embed_proj_dim
    """
)


def defaults_of(name: str, left_out: Set[str]) -> dict[str, Any]:
    """Returns the values that transformers' class for ``name`` gives to missing keys, but for those ``left_out``."""
    kind = CONFIG_MAPPING[name]
    found = {field.name: field.default for field in dataclasses.fields(kind) if field.name in DEFAULTED - left_out}
    # The base of rotary embeddings is no field, for models that have several of them have no single one.
    if kind.default_theta != 10_000.0 and not isinstance(kind.default_theta, dict):
        found["rope_theta"] = kind.default_theta
    return dict(sorted(found.items()))


def render() -> str:
    """Returns the file's text: an object for each family, for each text model that is of a family in all but its name,
    and for each model of text and images, whose text model it names."""
    rows = {name: defaults_of(name, {*row.fixed, *row.ignored}) for name, row in FAMILIES.items()}
    for name, (family, _) in TEXT_AS.items():
        if name in CONFIG_MAPPING:
            rows[name] = defaults_of(name, DEFAULTED - FAMILIES[family].defaults.keys())
    for name in MULTIMODAL:
        rows[name] = {"text_config": CONFIG_MAPPING[name]().text_config.model_type}
    return json.dumps(rows, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    pathlib.Path(DEFAULTS_FILE).write_text(render())
