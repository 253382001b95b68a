"""Rejection of unsupported keys of a ``config.json``, by name and before weights are read. Imports no torch.

An unknown key may change a family's arithmetic, and a model without it answers plausible nonsense. So each key must be:
read for every family, among the defaults of the family's row, bookkeeping, or set to a value without effect: null,
false, 0, empty, or a label. Keys that no family knows are ignored, and :func:`unread` lists them.
``--ignore-config-key`` removes a key before this check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from pillion.errors import ConfigError


def words(text: str) -> frozenset[str]:
    """Split a text into key names."""
    return frozenset(text.split())


# Keys read for every family.
_READ = words(
    """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim max_position_embeddings original_max_position_embeddings tie_word_embeddings hidden_act
    rope_theta rope_scaling rope_parameters partial_rotary_factor layer_types bos_token_id eos_token_id
    quantization_config compression_config quantization
    """
)
# Keys without effect on the forward pass: transformers' own, those of training and conversion tools, and sampling
# values, which requests set.
BOOKKEEPING = words(
    """
    architectures auto_map dtype torch_dtype transformers_version name_or_path attn_implementation
    experts_implementation cache_implementation use_cache use_bfloat16 torchscript return_dict output_attentions
    output_hidden_states initializer_range pretraining_tp attention_dropout hidden_dropout attn_pdrop embd_pdrop
    attention_probs_dropout_prob hidden_dropout_prob custom_pipelines output_past
    resid_pdrop router_aux_loss_coef router_jitter_noise output_router_logits is_decoder is_encoder_decoder
    chunk_size_feed_forward id2label label2id num_labels problem_type task_specific_params finetuning_task
    tokenizer_class prefix pad_token_id unk_token_id sep_token_id decoder_start_token_id tie_encoder_decoder
    pruned_heads tf_legacy_loss max_sequence_length model_max_length is_llama_config transformers.js_config
    classifier_from_token is_original_qwen3_reranker sentence_transformers
    unsloth_version unsloth_fixed license residual_dropout embedding_dropout classifier_dropout

    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens target_lookbehind temperature top_k top_p typical_p frequency_penalty max_new_tokens min_p
    presence_penalty stop_strings stop_token_ids

    attention_implementation attn_impl bf16 compile device device_map flash_attention flash_attn flash_attn_version
    fp16 fp32 fuse_cross_entropy fuse_linear_cross_entropy fuse_norm fuse_swiglu hf_hub_mixin inference init_device
    ipex is_quantized legacy low_cpu_mem_usage max_memory neuron offload_folder onnx pipeline_model_parallel_size
    pipeline_parallel_size sagemaker tensor_parallel_size torch_compile tp_size trust_remote_code use_auth_token
    use_bf16 use_cuda_graph use_fast use_flash_attention use_flash_attention_2 use_flash_attention_3 use_flash_attn
    use_flash_attn_2 use_fp16 use_fused_ops use_fused_rms_norm use_fused_rmsnorm use_fused_rope use_fused_swiglu
    use_kernels use_liger_kernel use_memory_efficient_attention use_safetensors use_sdpa use_sdpa_attention
    use_triton use_xformers world_size xformers zero_stage

    activation_dropout attention_softmax_in_fp32 batch_size checkpoint_step deepspeed dropout dropout_rate
    emb_dropout embd_dropout ffn_dropout global_step gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs init_method init_std initializer_factor is_training label_smoothing
    label_smoothing_factor layerdrop learning_rate lora_alpha lora_r lora_rank loss_type lr lr_scheduler_type
    max_steps merge_config merge_method num_train_epochs optim optimizer output_dropout peft_type
    per_device_train_batch_size recompute router_z_loss_coef router_z_loss_coefficient
    scale_attention_softmax_in_fp32 seed sequence_parallel train_batch_size training training_args
    use_gradient_checkpointing use_recompute warmup_ratio warmup_steps weight_decay z_loss_coef

    add_bos_token add_eos_token add_prefix_space additional_special_tokens chat_template
    clean_up_tokenization_spaces cls_token_id context_length ctx_len mask_token_id max_context_length max_seq_len
    max_seq_length max_tokens model_max_seq_len n_ctx padding padding_side seq_len seq_length special_tokens_map
    tokenizer truncation truncation_side

    base_model benchmark datasets eval_results feature_extractor_type generation_kwargs image_processor_type
    language languages metrics model_card_data model_version num_parameters param_count revision tags total_params
    version
    """
)
# Words in names of keys that may change the arithmetic; a text under such a key is not a mere label.
_ARITHMETIC_WORDS = words(
    """
    act activation activations arch architecture attention attn backbone bias block blocks conv cross decay delta
    embed embedding embeddings expert experts ffn fn func function fusion gate gated gating head heads hybrid
    implementation index indexer key kind kv latent layer layernorm layers linear mamba method mixer mlp mode moe mup
    norm normalization order pattern pooling pos position positional q qk qkv query residual rope rotary router routing
    scale scaling schedule score scores scoring shared softmax sparse ssm state strategy sublayer type v value variant
    window
    """
)
# Values that switch an option off. Options that are not listed are off if null, false, 0 or empty.
_NEUTRAL = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "causal": True,
}
# Keys of a multimodal config outside of its text_config, about vision and audio.
_VISION_KEYS = words(
    """
    text_config vision_config mm_tokens_per_image image_token_index boi_token_index eoi_token_index image_token_id
    boi_token_id eoi_token_id projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size
    audio_config video_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index vision_soft_tokens_per_image
    vision_start_token_id vision_end_token_id projection_hidden_size projection_layer_norm_eps ignore_index
    media_placeholder_token_id use_unified_vision_chunk video_placeholder
    image_start_token_id image_end_token_id video_start_token_id video_end_token_id vision_token_id video_token_index
    vision_feature_select_strategy image_seq_length image_grid_pinpoints vision_aspect_ratio downsample_ratio
    downsample_factor adapter_layer_norm_eps alignment_intermediate_size scale_factor projector_bias
    projector_hidden_size projector_use_layernorm visual_indicator_token_ids use_image_newline_parameter
    high_res_vision_config perceiver_config vq_config image_size patch_size num_channels spatial_pool_mode
    spatial_pool_stride video_seq_length downsample_mode insert_layer_id merge_kernel_size merger_times
    drop_vision_last_layer image_start_id image_end_id slice_start_id slice_end_id newline_id video_temporal_patch_size
    vision_hidden_size video_pruning_rate force_image_size projector_layernorm_eps projector_pooling_ratio
    vision_use_cls_token
    """
)

# The last line is bookkeeping.
_ROPE_KEYS = words(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings attention_factor
    beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor low_freq_factor high_freq_factor
    full_attention sliding_attention
    finetuned max_position_embeddings
    """
)

_EAGLE_KEYS = words(
    """
    speculators_model_type speculators_version speculators_config transformer_layer_config draft_vocab_size
    norm_before_residual target_hidden_size eagle_aux_hidden_state_layer_ids use_aux_hidden_state embed_requires_grad
    has_no_defaults_at_init tie_word_embeddings
    """
)


def check_head_keys(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unsupported key of an EAGLE-3 head's config."""
    _refuse("eagle3", "", raw, _EAGLE_KEYS | BOOKKEEPING, {}, "remove it only if the head is right without it")


def known_keys(own: Set[str], ignored: Iterable[str]) -> frozenset[str]:
    """Return the keys that a family's configs may have; arguments as in :func:`check_keys`."""
    known = _READ | BOOKKEEPING | own | set(ignored)
    # transformers 5 renamed "num_experts" of one family to "num_local_experts".
    return known.union(("num_experts", "num_local_experts")) if "num_experts_per_tok" in own else known


def check_keys(
    name: str,
    own: Set[str],
    ignored: Iterable[str],
    fixed: Mapping[str, Any],
    raw: Mapping[str, Any],
    all_keys: Set[str],
) -> None:
    """Raise ConfigError for a key unknown to the family ``name``.

    ``own``: keys that the family reads in addition to those of every family; ``ignored``: keys without effect;
    ``fixed``: keys with their only supported value; ``all_keys``: keys that any family reads.
    """
    known = known_keys(own, ignored)
    if raw.get("use_sliding_window") is False:
        # These two keys then have no effect.
        known = known.union(("sliding_window", "max_window_layers"))
    neutral = {key: value for key, value in _NEUTRAL.items() if raw.get(key) is not None}
    _refuse(name, "", raw, known, {**neutral, **fixed}, all_keys=all_keys)


def check_outer_keys(name: str, raw: Mapping[str, Any], all_keys: Set[str]) -> None:
    """Raise ConfigError for a key outside of the ``text_config`` of a multimodal config that is neither about vision or
    audio nor bookkeeping; ``all_keys`` as in :func:`check_keys`."""
    _refuse(name, "", raw, _READ | BOOKKEEPING | _VISION_KEYS, {}, all_keys=all_keys)


def unread(raw: Mapping[str, Any], all_keys: Set[str]) -> list[str]:
    """Return the keys of a config that no family knows; ``all_keys``: keys that any family knows."""
    known = _READ | BOOKKEEPING | _VISION_KEYS | _NEUTRAL.keys() | all_keys
    return sorted(key for key in raw.keys() - known if not key.startswith("_"))


def without_vision_keys(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config without the keys about vision and audio."""
    return {key: value for key, value in raw.items() if key not in _VISION_KEYS}


def check_rope_keys(name: str, rope: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unsupported parameter of a rotary embedding."""
    neutral = dict.fromkeys(("attn_factor", "extrapolation_factor", "short_mscale", "long_mscale"), 1.0)
    _refuse(name, "the rope parameter ", rope, _ROPE_KEYS, neutral)


def _is_label(key: str, value: Any) -> bool:
    """Return whether a value has no effect on arithmetic by the key's name: it is about training, a token id, or a text
    under a name without any of _ARITHMETIC_WORDS."""
    training = {"dropout", "epoch", "epochs", "loss", "optimizer", "train", "trained", "training"}
    parts, texts = re.split(r"[\W_]+", key.lower()), value if isinstance(value, list) else [value]
    if key.endswith(("_token_id", "_token_ids", "_token_index")) or not training.isdisjoint(parts):
        return True
    return all(isinstance(text, str) for text in texts) and _ARITHMETIC_WORDS.isdisjoint(parts)


def _refuse(
    name: str,
    kind: str,
    raw: Mapping[str, Any],
    known: Iterable[str],
    neutral: Mapping[str, Any],
    hint: str = "if the model is right without it: --ignore-config-key {}",
    *,
    all_keys: Set[str] | None = None,
) -> None:
    """Raise ConfigError, with ``hint``, for a key outside of ``known`` that may have an effect. With ``all_keys``, keys
    that no family knows may have labels as values."""
    for key in sorted(raw.keys() - set(known)):
        value = raw[key]
        if key.startswith("_"):
            continue
        label = all_keys is not None and key not in all_keys | neutral.keys() and _is_label(key, value)
        if label or (value == neutral[key] if key in neutral else not value):
            continue
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:56]}..."
        raise ConfigError(
            f"{name}: config.json has {kind}{key} = {shown}, which is not supported and may change the model's"
            f" arithmetic; {hint.format(key)}"
        )
