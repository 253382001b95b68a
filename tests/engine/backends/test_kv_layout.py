"""Places of each layer's keys and values in a block, for models whose layers differ."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pillion.config import PrefillFlags
from pillion.engine.backends.backend import KVLayout
from pillion.engine.backends.cpu.cpu_loading import unsupported
from pillion.engine.backends.devices import check_gpu_ranks
from pillion.engine.backends.gpu import gpu_devices
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.load_model import check_adapters
from pillion.engine.models.config_parser import parse_config
from pillion.engine.models.model_config import LayerHeads, LinearConfig, TokenInputs
from pillion.engine.stages.stage_loading import check_stages
from pillion.errors import ConfigError, Internal
from pillion.kernels.torch.torch_attention import MixedAttention, StepAttention
from tests.support.batches import Sequences
from tests.support.families import FAMILIES, make_model

SHAPE = {
    "model_type": "llama",
    "vocab_size": 9,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
EVEN = KVLayout("rows-1", 3, 2, 16, 4, "float32")
LOCAL, WIDE = LayerHeads(2, 16), LayerHeads(1, 48)
MIXED = dataclasses.replace(EVEN, num_layers=4, layers=(LOCAL, WIDE, None, LOCAL))


def test_layers_of_one_size_are_one_array():
    assert EVEN.even
    assert EVEN.block_bytes == 3 * 2 * 2 * 4 * 16 * 4
    assert [EVEN.place(layer).offset for layer in range(3)] == [0, EVEN.block_bytes // 3, EVEN.block_bytes // 3 * 2]
    assert EVEN.rows_and_pieces == (6, 2)


@pytest.mark.parametrize(("dtype", "row"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_layers_of_a_block_may_differ_in_size(dtype, row):
    layout, extra = dataclasses.replace(MIXED, dtype=dtype), 4 if dtype == "int8" else 0
    local, wide = (4 * (size * row + extra) for size in (16, 48))
    assert [layout.place(layer).offset for layer in (0, 1, 3)] == [0, 4 * local, 4 * local + 2 * wide]
    assert [layout.place(layer).piece_bytes for layer in (0, 1, 3)] == [local, wide, local]
    assert layout.block_bytes >= 8 * local + 2 * wide
    # Slots of values that are not codes are whole numbers of pieces of each size.
    assert dtype == "int8" or layout.block_bytes % wide == 0 == layout.block_bytes % local
    assert layout.rows_and_pieces == (0, 0)
    with pytest.raises(Internal, match="layer 2 has no place"):
        layout.place(2)


def test_attention_over_layers_of_different_sizes():
    """Each layer's attention equals that over a pool with only this layer."""
    texts, generator = Sequences(40, 4), torch.Generator().manual_seed(1)
    slots = torch.full((40, MIXED.block_bytes // 4), torch.nan)
    pools = {layer: torch.full((40, 1, 2, *shape), torch.nan) for layer, shape in ((0, (2, 4, 16)), (1, (1, 4, 48)))}
    one, other = texts.add(2)
    for parts in (((one, range(9)), (other, range(3))), ((one, [1]), (other, range(6))), ((other, [2]), (one, [5]))):
        batch = texts.step([(number, list(tokens)) for number, tokens in parts])
        tokens = len(batch.positions)
        mixed = {}
        for layer, heads in ((0, LOCAL), (1, WIDE)):
            place = MIXED.place(layer)
            inside = (1, 2, heads.kv_heads, 4, heads.head_dim)
            strides = [inside[2] * 8 * heads.head_dim, *(n * heads.head_dim for n in (inside[2] * 4, 4, 1)), 1]
            view = slots.as_strided((40, *inside), (slots.stride(0), *strides))
            mixed[layer] = StepAttention(view, batch, num_heads=4, scale=0.3, firsts={layer: place.offset // 4})
        for layer, heads in ((0, LOCAL), (1, WIDE)):
            alone = StepAttention(pools[layer], batch, num_heads=4, scale=0.3)
            queries = torch.randn(tokens, 4, heads.head_dim, generator=generator)
            both = torch.randn(2, tokens, heads.kv_heads, heads.head_dim, generator=generator)
            MixedAttention(mixed).write(layer, *both)
            alone.write(0, *both)
            found = MixedAttention(mixed).attend(layer, queries)
            assert found.isfinite().all()
            assert torch.equal(found, alone.attend(0, queries))


def test_blocks_of_layers_that_differ_are_not_divided_over_gpus(monkeypatch):
    monkeypatch.setattr(gpu_devices, "device_count", lambda: 2)
    config = parse_config(SHAPE)
    check_gpu_ranks(config, 2)
    mixed = dataclasses.replace(config, layer_heads=(LOCAL, WIDE, LOCAL))
    check_gpu_ranks(mixed, 1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 on 2 GPUs divides blocks by KV heads, in which"):
        check_gpu_ranks(mixed, 2)


def test_adapters_where_values_are_keys_are_refused():
    with pytest.raises(ConfigError, match="--enable-lora is not supported yet if values are keys"):
        check_adapters(dataclasses.replace(parse_config(SHAPE), values_are_keys=True))


@pytest.mark.usefixtures("own_cache")
def test_flags_unsupported_with_shared_layers_are_refused(tmp_path):
    folder, flags = make_model(tmp_path / "model", FAMILIES["gemma4"])
    prepared = prepare(flags)
    with pytest.raises(
        ConfigError, match="gemma4_text: --pipeline-parallel-size 2 is not supported for layers that share"
    ):
        check_stages(PrefillFlags(model=str(folder), pipeline_parallel_size=2), "cpu", prepared)


def test_the_cpu_kernels_name_missing_features():
    config = parse_config(SHAPE)
    three = tuple(LayerHeads(count, 16) for count in (1, 2, 4))
    assert "3 different numbers of KV heads" in unsupported(dataclasses.replace(config, layer_heads=three), 16)
    assert "heads of a multiple of 16 values, not 24" in unsupported(
        dataclasses.replace(config, layer_heads=(LayerHeads(2, 16), LayerHeads(2, 24))), 16
    )
    inputs = TokenInputs(width=24, vocab_size=9)
    assert "multiple of 16 values, not 24" in unsupported(dataclasses.replace(config, token_inputs=inputs), 16)
    states = LinearConfig(layers=(True, False, False), taps=4, heads=2, head_dim=40, key_heads=2, key_dim=16)
    assert "states need heads of a multiple of 16 values, not 40" in unsupported(
        dataclasses.replace(config, linear=states), 16
    )
