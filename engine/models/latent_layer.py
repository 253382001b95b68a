"""Multi-head latent attention (MLA), with DeepSeek's names. Imports no torch."""

from __future__ import annotations

from typing import Any

from pillion.engine.models.layer_operations import AttendLatents, Entries, LayerTensor, Role, Share, matrix
from pillion.engine.models.model_config import LatentConfig, ModelConfig

# transformers hard-codes the epsilon of the norms within attention.
_EPS = 1e-6


def latent_attention(config: ModelConfig, latents: LatentConfig, layer: int) -> AttendLatents:
    """Return the attention of a layer, from normed rows to the output of all heads."""
    rotated, interleaved = latents.qk_rope_head_dim, config.ropes[0].interleaved
    hidden, rank = (Entries(config.hidden_size),), (Entries(latents.kv_lora_rank),)
    queries = Entries(
        config.num_heads * latents.head_dim,
        Share.HEADS,
        latents.head_dim,
        rotated,
        interleaved,
        latents.qk_nope_head_dim,
    )
    head_rows = latents.qk_nope_head_dim + latents.v_head_dim
    query_down = query_norm = None
    inputs, name = hidden, "self_attn.q_proj"
    if latents.q_lora_rank:
        inputs, name = (Entries(latents.q_lora_rank),), "self_attn.q_b_proj"
        query_down = matrix("query_down", inputs, hidden, ("self_attn.q_a_proj",), bias=config.qkv_bias)
        query_norm = _norm("query_norm", inputs, "self_attn.q_a_layernorm")
    rotated_key = Entries(rotated, head=rotated, rotated=rotated, interleaved=interleaved)
    return AttendLatents(
        query_down=query_down,
        query_norm=query_norm,
        query_up=matrix("query_up", (queries,), inputs, (name,)),
        down=matrix("latents", (*rank, rotated_key), hidden, ("self_attn.kv_a_proj_with_mqa",), bias=config.qkv_bias),
        norm=_norm("latent_norm", rank, "self_attn.kv_a_layernorm"),
        up=LayerTensor(
            name="latent_up",
            role=Role.HEAD_MATRICES,
            rows=(Entries(config.num_heads * head_rows, Share.HEADS, head_rows),),
            inputs=rank,
            checkpoint_names=(("self_attn.kv_b_proj",),),
        ),
        rope=config.layer_ropes[layer],
        grows=config.query_growth is not None,
        index=latents.index,
        **(_indexer(latents, hidden, inputs) if latents.index is not None and latents.selecting[layer] else {}),
    )


def _indexer(latents: LatentConfig, hidden: tuple[Entries, ...], query_inputs: tuple[Entries, ...]) -> dict[str, Any]:
    """Return the fields ``index_*`` of :class:`AttendLatents`. ``query_inputs``: entries of the rows that ``query_up``
    multiplies, and so do the index queries."""
    index, prefix = latents.index, "self_attn.indexer"
    assert index is not None
    rotated = Entries(
        latents.qk_rope_head_dim,
        head=latents.qk_rope_head_dim,
        rotated=latents.qk_rope_head_dim,
        interleaved=index.interleaved,
    )
    head = rotated, Entries(index.dim - latents.qk_rope_head_dim)
    weights = LayerTensor(
        name="index_weights",
        role=Role.EXACT_MATRIX,
        rows=(Entries(index.heads),),
        inputs=hidden,
        checkpoint_names=((f"{prefix}.weights_proj",),),
    )
    return {
        "index_queries": matrix("index_queries", head * index.heads, query_inputs, (f"{prefix}.wq_b",)),
        "index_key": matrix("index_key", head, hidden, (f"{prefix}.wk",)),
        "index_norm": LayerTensor(
            name="index_norm",
            role=Role.NORM,
            rows=head,
            checkpoint_names=((f"{prefix}.k_norm",),),
            bias=True,
            eps=_EPS,
            centered=True,
        ),
        "index_weights": weights,
    }


def _norm(name: str, rows: tuple[Entries, ...], checkpoint_name: str) -> LayerTensor:
    return LayerTensor(name=name, role=Role.NORM, rows=rows, checkpoint_names=((checkpoint_name,),), eps=_EPS)
