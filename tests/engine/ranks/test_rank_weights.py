"""A rank's share of a layer, in torch: cut matrices keep their values, and all ranks add up to the whole layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.decoder import LayerWeights
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import Role, tensors_of
from pillion.engine.models.layers import GATED, RmsNorm
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.rank_weights import inner_values, shard_layer
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix, plain, select_inputs
from pillion.kernels.torch.torch_linear import Linear

HEAD_DIM, HIDDEN, INNER = 16, 64, 208
CONFIG = parse_config(
    {
        "model_type": "olmo2",
        "vocab_size": 258,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": HEAD_DIM,
    }
)
(OPERATIONS,) = layers_of(CONFIG)
WIDTH = CONFIG.num_heads * HEAD_DIM


def quantized(rows, columns, group, order=None, seed=1):
    """Return a uint4 matrix with offsets."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    scales, offsets = torch.randn(2, rows, -(-columns // group), generator=generator)
    return QuantizedMatrix("uint4", codes, scales, group, offsets, order)


def shuffled(count, seed=2):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


# Orders of 192 inputs: unchanged, within four heads, across heads.
ORDERS = {
    "plain": None,
    "within": torch.cat([shuffled(64, seed) + 64 * seed for seed in range(3)]),
    "across": shuffled(WIDTH),
}


@pytest.mark.parametrize(("group", "order"), list(product([16, 48, 128, 10_000], ORDERS)))
@pytest.mark.parametrize("inputs", [range(64), range(64, 192), range(128, 192)])
def test_selected_inputs_have_the_same_values(group, order, inputs):
    matrix = quantized(5, WIDTH, group, ORDERS[order])
    found = select_inputs(matrix, inputs)
    assert torch.equal(plain(found, torch.float32), plain(matrix, torch.float32)[:, inputs.start : inputs.stop])
    assert isinstance(found, QuantizedMatrix) == (order != "across")


def layer_of(order):
    """Return a layer with biases; its matrices are quantized if the down projection has an order."""
    generator = torch.Generator().manual_seed(0)

    def linear(rows, columns, ordered=None):
        weight = torch.randn(rows, columns, generator=generator)
        matrix = weight if order is None else quantized(rows, columns, 32, ordered)
        return Linear.plain(matrix, torch.randn(rows, generator=generator))

    down = shuffled(INNER) if order == "across" else None
    return LayerWeights(
        qkv=linear(WIDTH + 2 * 3 * HEAD_DIM, HIDDEN),
        q_norm=RmsNorm(torch.arange(float(WIDTH)), 1e-6, False),
        k_norm=RmsNorm(torch.arange(3.0 * HEAD_DIM), 1e-6, False),
        o=linear(HIDDEN, WIDTH, ORDERS[order or "plain"]),
        attention_post_norm=RmsNorm(torch.ones(HIDDEN), 1e-6, False),
        gate_up=linear(2 * INNER, HIDDEN),
        down=linear(HIDDEN, INNER, down),
        mlp_post_norm=RmsNorm(torch.ones(HIDDEN), 1e-6, False),
    )


def widened(linear):
    return Linear.plain(plain(linear.weight, torch.float32), linear.bias)


def mlp_of(layer, rows):
    return widened(layer["down"])(GATED["silu"](widened(layer["gate_up"])(rows)))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("order", [None, "plain", "across"])
def test_ranks_add_up_to_the_layer(size, order):
    """Shares of two and one KV heads, and of two ranks per KV head; biases count once."""
    layer, rows = layer_of(order), torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(5))
    qkv = widened(layer["qkv"])(rows).view(7, -1, HEAD_DIM)
    attended = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(6))
    outputs, inner, seen = torch.zeros(7, HIDDEN), torch.zeros(7, HIDDEN), []
    for rank in range(size):
        shard = ModelShard.of(CONFIG, rank, size)
        share = shard_layer(layer, OPERATIONS, shard)
        heads = [*shard.heads, *(12 + head for head in shard.kv_heads), *(15 + head for head in shard.kv_heads)]
        found = widened(share["qkv"])(rows).view(7, -1, HEAD_DIM)
        torch.testing.assert_close(found, qkv[:, heads])
        queries = range(shard.heads.start * HEAD_DIM, shard.heads.stop * HEAD_DIM)
        assert share["q_norm"].weight.tolist() == list(map(float, queries))
        assert len(share["k_norm"].weight) == len(shard.kv_heads) * HEAD_DIM
        outputs += widened(share["o"])(attended[:, queries.start : queries.stop])
        inner += mlp_of(share, rows)
        seen += inner_values(layer["down"], shard).tolist()
    torch.testing.assert_close(outputs, widened(layer["o"])(attended), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(inner, mlp_of(layer, rows), atol=1e-1, rtol=1e-4)
    assert sorted(seen) == list(range(INNER))


def test_whole_experts_of_a_rank():
    """Each expert with its biases belongs to one rank; the shared MLP is split by inner values."""
    raw = {"model_type": "glm4_moe", "vocab_size": 258, "hidden_size": HIDDEN, "intermediate_size": 96}
    raw |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    raw |= {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2}
    config = parse_config({**raw, "first_k_dense_replace": 0})
    (layer,) = layers_of(config)
    weights = LayerWeights()
    for tensor in tensors_of(layer):
        matrices = [Linear.plain(torch.randn(tensor.shape), None) for _ in range(max(1, tensor.experts))]
        if tensor.role is Role.MATRIX:
            weights[tensor.name] = tuple(matrices) if tensor.experts else matrices[0]
        else:
            weights[tensor.name] = torch.randn(tensor.shape)
    shares = [replace(ModelShard.of(config, rank, 2), whole_experts=True) for rank in range(2)]
    found = [shard_layer(weights, layer, shard) for shard in shares]
    for name in ("experts.gate_up", "experts.down"):
        assert [len(share[name]) for share in found] == [3, 2]
        assert all(one is other for one, other in zip(found[0][name] + found[1][name], weights[name], strict=True))
    assert [share["shared.down"].weight.shape[1] for share in found] == [64, 32]
    assert [shard.local(config).moe.intermediate_size for shard in shares] == [48, 48]
    assert len({shard.name for shard in (*shares, ModelShard.of(config, 0, 2))}) == 3
