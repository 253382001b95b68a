"""Shares of a state for ranks with a GPU each: separate bytes that together cover it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pillion.engine.backends.backend import KVLayout
from pillion.engine.gpu_states.rank_states import rank_layout
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_states import states_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.models.state_layout import state_layout
from pillion.kernels.state_pieces import CHUNK
from pillion.kvstore.memory.shards import Shards

# Published sizes with fewer layers: Qwen3-Next-80B, Granite 4.0 H Small (one shared group of heads), LFM2-8B.
QWEN = {
    "model_type": "qwen3_next",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 16,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "vocab_size": 1024,
    "hidden_size": 4096,
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "attention", "attention"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
}
LFM2 = {
    "model_type": "lfm2",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}


def layout_of(config: ModelConfig, block_size: int) -> KVLayout:
    heads = config.num_kv_heads, config.head_dim, block_size, "bfloat16"
    layout = KVLayout("rows-1", config.num_layers, *heads, layers=config.kv_places)
    places = state_layout(states_of(layers_of(config)), layout.block_bytes, CHUNK)
    assert places is not None
    return replace(layout, state_bytes=places.nbytes, state_layout=places)


def pieces_of(config: ModelConfig, layout: KVLayout) -> set[tuple[int, int]]:
    """Return the places of all pieces, each at a cache line."""
    assert layout.state_layout is not None
    every = [pieces for pieces in layout.state_layout.layers if pieces is not None]
    assert len(every) == sum(state is not None for state in states_of(layers_of(config)))
    found = [place for each in every for part in (each.inputs, each.memory, each.sides) for place in part]
    assert len(set(found)) == len(found)
    assert all(0 <= page < layout.state_pages and at % 64 == 0 for page, at in found)
    return set(found)


@pytest.mark.parametrize(("raw", "size"), [(QWEN, 2), (QWEN, 4), (QWEN, 8), (GRANITE, 2), (GRANITE, 8), (LFM2, 4)])
def test_ranks_with_a_shard_each_write_bytes_that_count(raw: dict[str, Any], size: int) -> None:
    config = parse_config(raw)
    whole = layout_of(config, 32)
    shards = Shards.divided(whole.block_bytes, *whole.rows_and_pieces, size)
    for rank in range(size):
        shard = ModelShard.of(config, rank, size)
        layout = rank_layout(whole, config, shard, divided=True)
        assert (layout.version, layout.state_shards) == (f"rows-1/ranks-{size}", size)
        # All ranks agree on the number of pages, hardly more than one process needs.
        assert layout.state_pages <= 1.1 * whole.state_pages + 1
        (part,) = (part for part in shards.gathered() if part.shard == rank)
        assert part.width_bytes == part.shard_pitch, "the rank's bytes lie together"
        ends = part.shard_at, part.shard_at + part.rows * part.shard_pitch
        assert all(ends[0] <= at < ends[1] for _, at in pieces_of(config, layout))


@pytest.mark.parametrize(("raw", "size"), [(QWEN, 2), (QWEN, 8), (GRANITE, 4), (LFM2, 4)])
def test_ranks_over_one_pool_write_the_pieces_of_one_process(raw: dict[str, Any], size: int) -> None:
    config = parse_config(raw)
    whole = layout_of(config, 32)
    parts = [rank_layout(whole, config, ModelShard.of(config, rank, size), divided=False) for rank in range(size)]
    assert all(replace(part, state_layout=whole.state_layout) == whole for part in parts)
    every = [pieces_of(config, part) for part in parts]
    assert set.union(*every) == pieces_of(config, whole)
    # Ranks that share a key or group write its state.
    if raw is not GRANITE:
        assert sum(map(len, every)) == len(pieces_of(config, whole))
