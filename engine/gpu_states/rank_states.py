"""Locations of a rank's part of a state on GPUs.

    a pool in one piece            the rank's heads within the state of the whole model, which workers with any number
    of
                                   ranks can use
    a pool with a shard per rank   a state of only the rank's heads, in its shard of each slot; the shards together are
    a
                                   state for this number of ranks only

If several shards have the same KV head, each rank uses only the rows of its blocks that are read from its shard when a
block is gathered (:func:`pillion.kvstore.memory.head_shares.own_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pillion.engine.backends.backend import KVLayout
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import StateOperation
from pillion.engine.models.layer_states import states_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.models.state_layout import LayerPieces, own_pieces, state_layout
from pillion.kernels.state_pieces import CHUNK
from pillion.kernels.step import LayerState
from pillion.kvstore.memory.head_shares import own_rows, shares_of


def rank_layout(layout: KVLayout, config: ModelConfig, shard: ModelShard, *, divided: bool) -> KVLayout:
    """Return the layout of a rank, with only its own pieces of states. ``layout``: of the whole model; ``divided``:
    each rank has a shard of the pool."""
    if shard.whole or not layout.state_pages:
        return layout
    if divided:
        return _divided(layout, config, shard)
    whole = layout.state_layout
    if whole is None:
        return layout
    layers = tuple(
        None if operation is None or pieces is None else own_pieces(pieces, operation, shard)
        for operation, pieces in zip(_operations(config), whole.layers, strict=True)
    )
    return replace(layout, state_layout=replace(whole, layers=layers))


def _divided(layout: KVLayout, config: ModelConfig, shard: ModelShard) -> KVLayout:
    """Return the layout of a rank with a shard of the pool. All ranks have the same number of pages."""
    size, pages, by_rank = shard.size, 0, []
    for rank in range(size):
        first, room = _state_room(layout, rank, size)
        states = _own_states(config, ModelShard.of(config, rank, size))
        own = state_layout(states, room, CHUNK, whole_heads=False)
        if own is None:
            return replace(layout, state_layout=None)
        pages = max(pages, -(-own.nbytes // room))
        by_rank.append(replace(own, layers=tuple(_moved(pieces, first) for pieces in own.layers)))
    version, nbytes = f"{layout.version}/ranks-{size}", pages * layout.block_bytes
    return replace(layout, version=version, state_bytes=nbytes, state_layout=by_rank[shard.rank], state_shards=size)


def _state_room(layout: KVLayout, rank: int, size: int) -> tuple[int, int]:
    """Return the offset and the size in bytes of a rank's states in its shard of a slot; zeros if layers differ."""
    rows, heads = layout.rows_and_pieces
    if not heads:
        return 0, 0
    shares = shares_of(heads, size)
    alike = [other for other, share in enumerate(shares) if share == shares[rank]]
    rank_rows, row_bytes = own_rows(rows, alike.index(rank), len(alike)), layout.block_bytes // (rows * heads)
    row_bytes *= len(shares[rank])
    return rank_rows.start * row_bytes, len(rank_rows) * row_bytes


def _own_states(config: ModelConfig, shard: ModelShard) -> Iterator[LayerState | None]:
    """Yield the states of a rank's heads and channels, by layer."""
    for operation, state in zip(_operations(config), states_of(layers_of(config)), strict=True):
        if operation is None or state is None:
            yield None
            continue
        inputs = state.inputs[0], len(shard.channels(operation.taps.rows).numbers)
        if not state.memory:
            yield replace(state, inputs=inputs)
            continue
        keys = len(shard.state_keys), state.keys[1]
        yield replace(state, inputs=inputs, memory=(len(shard.state_heads), *state.memory[1:]), keys=keys)


def _operations(config: ModelConfig) -> Iterator[StateOperation | None]:
    """Yield each layer's operation with recurrent state, or None."""
    for layer in layers_of(config):
        yield next((operation for operation in layer if isinstance(operation, StateOperation)), None)


def _moved(pieces: LayerPieces | None, by: int) -> LayerPieces | None:
    """Return pieces at offsets increased by ``by`` bytes."""
    if pieces is None:
        return None
    parts = pieces.inputs, pieces.memory, pieces.sides
    return LayerPieces(*(tuple((page, offset + by) for page, offset in part) for part in parts))
