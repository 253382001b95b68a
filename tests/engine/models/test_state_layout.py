"""Places of a state's pieces in slots: no overlap, none across a slot's end, a head within one slot if it fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.models.state_layout import state_layout
from pillion.kernels.step import LayerState
from tests.support.examples import examples

MATRICES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 4).map(lambda count: 16 * count))
STATES = st.builds(
    LayerState,
    st.tuples(st.integers(1, 4), st.integers(1, 300)),
    st.one_of(st.just(()), MATRICES),
    keys=st.tuples(st.integers(1, 3), st.integers(1, 40)),
    rates=st.integers(0, 40),
)


def swapped(state: LayerState) -> LayerState:
    """Return a layer's state with transposed matrices, as kernels hold them."""
    heads, rows, columns = state.memory
    return replace(state, memory=(heads, columns, rows), transposed=True)


@settings(max_examples=examples(100))
@given(
    st.lists(st.one_of(st.none(), STATES), min_size=1, max_size=6),
    st.integers(1, 200).map(lambda n: 64 * n),
    st.sampled_from([0, 16]),
)
def test_sizes_of_state_pieces(states: list[LayerState | None], block_bytes: int, chunk: int) -> None:
    sizes = [0 if state is None else state.inputs[0] * 256 for state in states]
    # A state without rates keeps no rows of a chunk.
    columns = [
        0 if state is None or not state.memory else (state.memory[1] + chunk * bool(state.rates)) * 64
        for state in states
    ]
    sides = [
        [chunk * state.keys[1] * 4] * state.keys[0] + [chunk * state.rates * 4] * state.memory[0]
        for state in states
        if state is not None and state.memory and state.rates and chunk
    ]
    places = state_layout(states, block_bytes, chunk)
    assert (places is None) == (max(0, *sizes, *columns, *(size for each in sides for size in each)) > block_bytes)
    if places is None:
        return
    pieces = []
    for state, layer, inputs_bytes, piece_bytes in zip(states, places.layers, sizes, columns, strict=True):
        assert (state is None) == (layer is None)
        if state is None or layer is None:
            continue
        assert len(layer.inputs) == -(-state.inputs[1] // 64)
        pieces += [(page, first, first + inputs_bytes) for page, first in layer.inputs]
        heads = state.memory[0] if state.memory else 0
        each = len(layer.memory) // heads if heads else 0
        assert each * 16 == (state.memory[2] if heads else 0)
        for head in range(heads):
            mine = layer.memory[head * each : (head + 1) * each]
            assert len({page for page, _ in mine}) == 1 or each * piece_bytes > block_bytes
            pieces += [(page, first, first + piece_bytes) for page, first in mine]
        each_side = sides.pop(0) if heads and chunk and state.rates else []
        pieces += [(page, first, first + size) for (page, first), size in zip(layer.sides, each_side, strict=True)]
    assert all(first >= 0 and end <= block_bytes and first % 64 == 0 for _, first, end in pieces)
    for (page, _, end), (next_page, first, _) in pairwise(pieces):
        assert (next_page, first) == (page, end) or (next_page, first) == (page + 1, 0)
    assert places.nbytes == (pieces[-1][0] * block_bytes + pieces[-1][2] if pieces else 0)
    transposed = [swapped(state) if state is not None and state.memory else state for state in states]
    assert state_layout(transposed, block_bytes, chunk) == places


def test_unaligned_matrices_and_slots_have_no_places() -> None:
    assert state_layout([LayerState((3, 64), (2, 24, 40))], 2**20) is None
    assert state_layout([LayerState((3, 64))], 1056) is None
    assert state_layout([LayerState((3, 64))], 1088) is not None
