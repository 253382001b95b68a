"""Locations of the pieces of a sequence's state in its slots. Imports no torch.

A state is whole pieces: per layer, the last inputs of its convolution in pieces of PIECE_CHANNELS channels, and each
head's matrix in pieces of PIECE_COLUMNS columns, placed layer after layer. No piece crosses the end of a slot, nor do a
head's pieces if all of them fit into one, so one address finds a piece. Pieces are aligned to cache lines, because
kernels write states with non-temporal stores.

    inputs of a piece   [taps - 1, PIECE_CHANNELS] float32, oldest token first
    columns of a head   [rows, PIECE_COLUMNS] float32

Kernels that continue in chunks of tokens at fixed positions (``chunk``, :mod:`pillion.kernels.gpu_states.state_places`)
keep the matrices as of the last chunk's beginning, and what the tokens since then have written:

    columns of a head   [rows + chunk, PIECE_COLUMNS] float32, the tokens' values after the matrix
    keys                [chunk, values] float32 for each
    rates of a head     [chunk, rates] float32, in the kernels' order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pillion.engine.models.layer_operations import (
    DeltaRule,
    SelectiveScan,
    ShortConvolution,
    StateOperation,
    StateSpace,
)
from pillion.engine.models.layer_states import STATE_ITEM_BYTES
from pillion.engine.models.model_shard import ModelShard
from pillion.kernels.state_pieces import PIECE_ALIGNMENT_BYTES, PIECE_CHANNELS, PIECE_COLUMNS
from pillion.kernels.step import LayerState


@dataclass(frozen=True, slots=True)
class LayerPieces:
    """Locations of the pieces of one layer's state: page, i.e. index among the state's slots, and offset in bytes.
    ``memory`` is ordered by heads, then columns; ``sides`` are those of keys, then of heads' rates, in layouts with
    chunks."""

    inputs: tuple[tuple[int, int], ...]
    memory: tuple[tuple[int, int], ...]
    sides: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Locations of a state's pieces by layer, None for a layer without, and their total size, including gaps at the
    ends of slots."""

    layers: tuple[LayerPieces | None, ...]
    nbytes: int


def state_layout(
    states: Iterable[LayerState | None], block_bytes: int, chunk: int = 0, *, whole_heads: bool = True
) -> StateLayout | None:
    """Return the locations of a state's pieces in slots of ``block_bytes``; None if a piece does not fit into a slot,
    if slots are not whole cache lines, or a matrix not whole pieces, as kernels require. ``chunk``: tokens whose rows a
    state keeps beside its matrices, a multiple of 16; 0 for none. Without ``whole_heads`` a head's pieces may continue
    in the next slot, which leaves smaller gaps."""
    if block_bytes % PIECE_ALIGNMENT_BYTES:
        return None
    cursor = _Cursor(block_bytes)
    layers: list[LayerPieces | None] = []
    for state in states:
        if state is None:
            layers.append(None)
            continue
        tokens, channels = state.inputs
        rows, columns, heads = _matrix(state)
        kept = chunk if heads and state.rates else 0
        piece = (rows + kept) * PIECE_COLUMNS * STATE_ITEM_BYTES
        inputs_bytes = tokens * PIECE_CHANNELS * STATE_ITEM_BYTES
        (keys, key_values), rates_bytes = state.keys, kept * state.rates * STATE_ITEM_BYTES
        key_bytes = kept * key_values * STATE_ITEM_BYTES
        if columns % PIECE_COLUMNS or max(piece, inputs_bytes, key_bytes, rates_bytes) > block_bytes:
            return None
        inputs = [place for _ in range(-(-channels // PIECE_CHANNELS)) for place in cursor.take(1, inputs_bytes)]
        at_once, times = (columns // PIECE_COLUMNS, heads) if whole_heads else (1, heads * columns // PIECE_COLUMNS)
        memory = [place for _ in range(times) for place in cursor.take(at_once, piece)]
        sides: list[tuple[int, int]] = []
        if kept:
            sides = [cursor.room(key_bytes) for _ in range(keys)] + [cursor.room(rates_bytes) for _ in range(heads)]
        layers.append(LayerPieces(tuple(inputs), tuple(memory), tuple(sides)))
    return StateLayout(tuple(layers), cursor.nbytes)


def own_pieces(pieces: LayerPieces, operation: StateOperation, shard: ModelShard) -> LayerPieces:
    """Return the pieces of a layer's state that a process reads and writes: of its channels, and of its heads with what
    these share."""
    inputs = tuple(pieces.inputs[piece] for piece in shard.channels(operation.taps.rows).pieces)
    match operation:
        case ShortConvolution():
            return LayerPieces(inputs, ())
        case SelectiveScan(heads=heads):
            return LayerPieces(inputs, _of_heads(pieces, shard.state_heads, heads))
        case DeltaRule(heads=heads, key_heads=keys) | StateSpace(heads=heads, groups=keys):
            mine, shared = shard.state_heads, shard.state_keys
            memory = _of_heads(pieces, mine, heads)
            if not pieces.sides:
                return LayerPieces(inputs, memory)
            rates = pieces.sides[keys + mine.start : keys + mine.stop]
            return LayerPieces(inputs, memory, pieces.sides[shared.start : shared.stop] + rates)


def _of_heads(pieces: LayerPieces, mine: range, heads: int) -> tuple[tuple[int, int], ...]:
    """Return the locations of the pieces of some of a layer's matrices."""
    each = len(pieces.memory) // heads
    return pieces.memory[mine.start * each : mine.stop * each]


def _matrix(state: LayerState) -> tuple[int, int, int]:
    """Return the rows and columns of a head's matrix in the kernels' orientation, and the number of heads; zeros for
    convolutions only."""
    if not state.memory:
        return 0, 0, 0
    heads, rows, columns = state.memory
    return (columns, rows, heads) if state.transposed else (rows, columns, heads)


class _Cursor:
    """Sequential allocator of locations."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._page = self._offset = 0

    @property
    def nbytes(self) -> int:
        return self._page * self._block_bytes + self._offset

    def take(self, count: int, piece_bytes: int) -> list[tuple[int, int]]:
        """Return the locations of ``count`` pieces, in one slot if possible."""
        if count * piece_bytes > self._block_bytes:
            return [self.room(piece_bytes) for _ in range(count)]
        page, first = self.room(count * piece_bytes)
        return [(page, first + number * piece_bytes) for number in range(count)]

    def room(self, size: int) -> tuple[int, int]:
        """Return the location of a piece of ``size`` bytes."""
        if self._offset + size > self._block_bytes:
            self._page, self._offset = self._page + 1, 0
        found = self._page, self._offset
        self._offset += size
        return found
