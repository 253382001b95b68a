"""Every head, inner value and token of a model belongs to a rank, for all shapes that ranks can share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pillion.engine.models.config_parser import load_config
from pillion.engine.models.layer_operations import Entries, Share
from pillion.engine.models.model_config import LayerHeads, LinearConfig, ModelConfig, MoeConfig
from pillion.engine.models.model_shard import UNIT, ModelShard, whole_model
from pillion.errors import ConfigError
from pillion.kernels.state_pieces import PIECE_CHANNELS
from tests.support.families import FAMILIES, make_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_config(make_model(tmp_path_factory.mktemp("model"), FAMILIES["llama-gqa-tied"])[0])


def shaped(config: ModelConfig, heads: int, kv_heads: int, inner: int = 1536, tokens: int = 49152) -> ModelConfig:
    return replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner, vocab_size=tokens)


def shards(config: ModelConfig, size: int) -> list[ModelShard]:
    return [ModelShard.of(config, rank, size) for rank in range(size)]


@given(st.data())
def test_shares_cover_everything_once(config: ModelConfig, data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    fitting = [
        size for size in range(1, 17) if size <= kv_heads or (size % kv_heads == 0 and group % (size // kv_heads) == 0)
    ]
    size = data.draw(st.sampled_from(fitting))
    width, tokens = (data.draw(st.integers(UNIT * (size - 1) + 1, 5000)) for _ in range(2))
    shape = shaped(config, kv_heads * group, kv_heads, width, tokens)
    found = shards(shape, size)
    assert [head for shard in found for head in shard.heads] == list(range(kv_heads * group))
    for shard in found:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        local = shard.local(shape)
        assert local.num_heads % local.num_kv_heads == 0
        assert local.intermediate_size == len(shard.inner(width)) > 0
    for parts, total in (([s.inner(width) for s in found], width), ([s.vocabulary(tokens) for s in found], tokens)):
        assert [n for part in parts for n in part] == list(range(total))
        assert all(part.start % UNIT == 0 for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) < 2 * UNIT
        assert all(parts)
    assert sum(shard.leads for shard in found) == 1


@given(st.data())
def test_heads_with_states_and_their_channels_belong_to_ranks(config: ModelConfig, data: st.DataObject) -> None:
    """Each rank finds its heads' channels at their places; pieces of a state shared by two ranks are equal."""
    keys, group, key_dim, head_dim = (data.draw(st.integers(1, most)) for most in (6, 4, 96, 96))
    fitting = [size for size in range(2, 9) if size <= keys or (size % keys == 0 and group % (size // keys) == 0)]
    assume(fitting)
    size, heads = data.draw(st.sampled_from(fitting)), keys * group
    linear = LinearConfig(
        layers=(True,), taps=4, heads=heads, head_dim=head_dim, key_heads=keys, key_dim=key_dim, attends=(True,)
    )
    shape = replace(shaped(config, 8 * size, 8 * size), num_layers=1, linear=linear)
    sides = Entries(keys * key_dim, Share.STATE_KEYS, key_dim, convolved=True)
    values = Entries(heads * head_dim, Share.STATE_HEADS, head_dim, convolved=True)
    parts, total = (sides, values, sides), 2 * sides.size + values.size
    found = shards(shape, size)
    assert [head for shard in found for head in shard.state_heads] == list(range(heads))
    pieces: dict[int, tuple[int, ...]] = {}
    for shard in found:
        assert {head // group for head in shard.state_heads} == set(shard.state_keys)
        channels = shard.channels(parts)
        for part, first, start in zip(parts, (0, sides.size, total - sides.size), channels.starts, strict=True):
            mine = shard.entries(part)
            assert list(channels.numbers[start : start + len(mine)]) == [first + entry for entry in mine]
        assert len(channels.numbers) == PIECE_CHANNELS * len(channels.pieces)
        for place, piece in enumerate(channels.pieces):
            has = channels.numbers[place * PIECE_CHANNELS : (place + 1) * PIECE_CHANNELS]
            assert pieces.setdefault(piece, has) == has
        rates = Entries(heads, Share.STATE_HEADS)
        rows = shard.indices((rates, *parts, rates)).tolist()
        heads_of = list(shard.state_heads)
        behind = [heads + total + head for head in heads_of]
        assert rows == [*heads_of, *(heads + channel for channel in channels.numbers), *behind]
    assert sorted(pieces) == list(range(-(-total // PIECE_CHANNELS)))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"heads": 3, "head_dim": 16, "key_heads": 3, "key_dim": 16}, "3 heads over 3 keys in layers with states"),
        ({}, "too large for 144 channels of convolutions in units of 64"),
    ],
)
def test_states_that_do_not_divide_are_refused(config: ModelConfig, shape: dict[str, int], words: str) -> None:
    linear = LinearConfig(layers=(True,), taps=3, attends=(True,), **shape)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size 4 .*{words}"):
        ModelShard.of(replace(shaped(config, 8, 8), hidden_size=144, num_layers=1, linear=linear), 0, 4)


def test_three_kv_heads_are_shared_unequally_by_two(config: ModelConfig) -> None:
    first, second = shards(shaped(config, 9, 3), 2)
    assert (first.kv_heads, first.heads) == (range(2), range(6))
    assert (second.kv_heads, second.heads) == (range(2, 3), range(6, 9))


def test_more_ranks_than_kv_heads_share_each(config: ModelConfig) -> None:
    assert [shard.kv_heads.start for shard in shards(shaped(config, 8, 2), 4)] == [0, 0, 1, 1]


def test_layers_with_other_numbers_of_kv_heads(config: ModelConfig) -> None:
    """Sixteen query heads have eight KV heads in one layer and two in another."""
    mixed = replace(shaped(config, 16, 8), layer_heads=(LayerHeads(8, 16), LayerHeads(2, 32)))
    for size in (2, 4, 8, 16):
        found = shards(mixed, size)
        for count in (8, 2):
            group = 16 // count
            assert all({head // group for head in one.heads} == set(one.kv_heads_of(count)) for one in found)
            assert [one.local(mixed).layer_heads[count == 2] for one in found] == [
                LayerHeads(max(1, count // size), 32 if count == 2 else 16)
            ] * size
    with pytest.raises(ConfigError, match="size 3 does not fit 16 heads over 2 KV heads, as some layers of"):
        ModelShard.of(mixed, 0, 3)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 4), (9, 3, 6), (4, 1, 3), (4, 2, 8)])
def test_shapes_that_do_not_divide_are_refused(config: ModelConfig, heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} does not fit {heads} heads"):
        ModelShard.of(shaped(config, heads, kv_heads), 0, size)


def test_narrow_mlps_are_refused(config: ModelConfig) -> None:
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=32, normalize=True, layers=(True,) * 2)
    narrow = replace(shaped(config, 8, 8), moe=moe, num_layers=2)
    with pytest.raises(ConfigError, match="too large for 32 values in units of 32"):
        ModelShard.of(narrow, 0, 2)


def test_one_process_has_the_model(config: ModelConfig) -> None:
    shard = whole_model(config)
    assert shard.whole
    assert shard.local(config) == config
    assert (shard.rank, shard.size, len(shard.kv_heads), shard.name) == (0, 1, config.num_kv_heads, "")
