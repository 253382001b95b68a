"""Locations of the pieces of a sequence's state in its slots. Imports no torch.

A state is a sequence of pieces: for each layer, the last inputs of its convolution in pieces of PIECE_CHANNELS
channels, and each head's matrix in pieces of PIECE_COLUMNS columns. A piece never crosses the end of a slot, and the
pieces of a head are in one slot if they fit. Pieces are aligned to cache lines, because kernels write states with
non-temporal stores.

    inputs of a piece   [taps - 1, PIECE_CHANNELS] float32, oldest token first
    columns of a head   [rows, PIECE_COLUMNS] float32

Kernels that process chunks of tokens at fixed positions (``chunk``, :mod:`pillion.kernels.gpu_states.state_places`)
store the matrices as of the last chunk's start, and the values, keys and rates of the tokens since then:

    columns of a head   [rows + chunk, PIECE_COLUMNS] float32, the tokens' values after the matrix
    a key head          [chunk, width] float32
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
    """Locations (index among the state's slots, offset in bytes) of the pieces of one layer's state: last inputs of the
    convolution; matrices, by head, then by columns; and, in layouts with chunks, keys, then rates of heads."""

    inputs: tuple[tuple[int, int], ...]
    memory: tuple[tuple[int, int], ...]
    sides: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Locations of a state's pieces by layer (None for a layer without a state), and the state's size in bytes,
    including gaps at the ends of slots."""

    layers: tuple[LayerPieces | None, ...]
    nbytes: int


def state_layout(
    states: Iterable[LayerState | None], block_bytes: int, chunk: int = 0, *, whole_heads: bool = True
) -> StateLayout | None:
    """Return the locations of a state's pieces in slots of ``block_bytes``; None if kernels do not support them: a
    piece is larger than a slot, slots are not whole cache lines, or a matrix is not whole pieces. ``chunk``: max tokens
    whose values, keys and rates a state stores after its matrices, a multiple of 16; 0 for none. Without
    ``whole_heads``, a head's pieces may continue in the next slot, which leaves smaller gaps."""
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
        chunk_tokens = chunk if heads and state.rates else 0
        piece = (rows + chunk_tokens) * PIECE_COLUMNS * STATE_ITEM_BYTES
        inputs_bytes = tokens * PIECE_CHANNELS * STATE_ITEM_BYTES
        (keys, key_values), rates_bytes = state.keys, chunk_tokens * state.rates * STATE_ITEM_BYTES
        key_bytes = chunk_tokens * key_values * STATE_ITEM_BYTES
        if columns % PIECE_COLUMNS or max(piece, inputs_bytes, key_bytes, rates_bytes) > block_bytes:
            return None
        inputs = [
            location for _ in range(-(-channels // PIECE_CHANNELS)) for location in cursor.allocate_run(1, inputs_bytes)
        ]
        run, num_runs = (columns // PIECE_COLUMNS, heads) if whole_heads else (1, heads * columns // PIECE_COLUMNS)
        memory = [location for _ in range(num_runs) for location in cursor.allocate_run(run, piece)]
        sides: list[tuple[int, int]] = []
        if chunk_tokens:
            sides = [cursor.allocate(key_bytes) for _ in range(keys)] + [
                cursor.allocate(rates_bytes) for _ in range(heads)
            ]
        layers.append(LayerPieces(tuple(inputs), tuple(memory), tuple(sides)))
    return StateLayout(tuple(layers), cursor.nbytes)


def own_pieces(pieces: LayerPieces, operation: StateOperation, shard: ModelShard) -> LayerPieces:
    """Return the locations of the pieces of a layer's state that a process reads and writes: those of its channels, its
    state heads, and their key heads."""
    inputs = tuple(pieces.inputs[piece] for piece in shard.channels(operation.taps.rows).pieces)
    match operation:
        case ShortConvolution():
            return LayerPieces(inputs, ())
        case SelectiveScan(heads=heads):
            return LayerPieces(inputs, _of_heads(pieces, shard.state_heads, heads))
        case DeltaRule(heads=heads, key_heads=keys) | StateSpace(heads=heads, groups=keys):
            own_heads, own_keys = shard.state_heads, shard.state_keys
            memory = _of_heads(pieces, own_heads, heads)
            if not pieces.sides:
                return LayerPieces(inputs, memory)
            rates = pieces.sides[keys + own_heads.start : keys + own_heads.stop]
            return LayerPieces(inputs, memory, pieces.sides[own_keys.start : own_keys.stop] + rates)


def _of_heads(pieces: LayerPieces, own: range, heads: int) -> tuple[tuple[int, int], ...]:
    """Return the locations of the matrices of the state heads ``own``, out of ``heads``."""
    pieces_per_head = len(pieces.memory) // heads
    return pieces.memory[own.start * pieces_per_head : own.stop * pieces_per_head]


def _matrix(state: LayerState) -> tuple[int, int, int]:
    """Return the rows and columns of a head's matrix in the kernels' orientation, and the number of heads; zeros for a
    state without matrices."""
    if not state.memory:
        return 0, 0, 0
    heads, rows, columns = state.memory
    return (columns, rows, heads) if state.transposed else (rows, columns, heads)


class _Cursor:
    """Bump allocator of the locations of pieces in slots."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._page = self._offset = 0

    @property
    def nbytes(self) -> int:
        return self._page * self._block_bytes + self._offset

    def allocate_run(self, count: int, piece_bytes: int) -> list[tuple[int, int]]:
        """Return the locations of ``count`` pieces, in one slot if possible."""
        if count * piece_bytes > self._block_bytes:
            return [self.allocate(piece_bytes) for _ in range(count)]
        page, first = self.allocate(count * piece_bytes)
        return [(page, first + number * piece_bytes) for number in range(count)]

    def allocate(self, size: int) -> tuple[int, int]:
        """Return the location of a piece of ``size`` bytes."""
        if self._offset + size > self._block_bytes:
            self._page, self._offset = self._page + 1, 0
        location = self._page, self._offset
        self._offset += size
        return location
