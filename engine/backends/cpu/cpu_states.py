"""Makes the CPU kernels of layers that carry a state from token to token, whose pieces lie in slots of the pool.

x --conv.in--> convolution_inputs --gate, convolve, gate--> convolved --conv.out--> hidden               (LFM2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pillion.engine.backends.cpu.cpu_operations import OperationBuilder
from pillion.engine.models.layer_operations import LayerTensor, ShortConvolution
from pillion.engine.models.state_places import LayerPieces
from pillion.kernels.cpu.runtime.program import Buffer, Columns, Operation
from pillion.kernels.cpu.states.convolutions import Convolve
from pillion.kernels.cpu.states.pieces import PIECE_CHANNELS

# Such a function makes a buffer of a builder: that for all tokens, or for sampled rows.
BufferOf = Callable[[OperationBuilder], Buffer]


def in_pieces(channels: int) -> int:
    """Returns the number of channels of whole pieces."""
    return -(-channels // PIECE_CHANNELS) * PIECE_CHANNELS


def inputs_of(builder: OperationBuilder, name: str, channels: int, first: int) -> Buffer:
    """Returns the buffer for the product with the matrix ``name``, of which the convolution reads ``channels`` from the
    column ``first`` on."""
    width = max(builder.weights.linear(name).pairs * 32, first + in_pieces(channels))
    return builder.buffer("convolution_inputs", width, "float32")


class StateEmitter:
    """Emits the kernels of the layer ``index`` that read and write its state."""

    def __init__(self, builder: OperationBuilder, index: int) -> None:
        self._builder, self._prefix = builder, f"layers.{index}."
        places = builder.layout.state_places
        found = None if places is None else places.layers[index]
        assert found is not None
        self._pieces: LayerPieces = found

    def short_convolution(self, operation: ShortConvolution, x: Buffer) -> Iterator[Operation]:
        """Yields the kernel from the three parts of ``x`` to :func:`convolved`."""
        channels = operation.taps.shape[0]
        yield self._convolve(operation.taps, x, convolved(self._builder, channels), part_bytes=channels * 4)

    def _convolve(self, taps: LayerTensor, x: Buffer | Columns, out: Buffer, part_bytes: int = 0) -> Operation:
        """Returns the convolution of ``x``; that of the first and the third of its parts, which the second multiplies,
        where parts are so many bytes apart."""
        tensors, name, gated = self._builder.weights.tensors, self._prefix + taps.name, part_bytes > 0
        bias = tensors.get(f"{name}.bias")
        values = {
            "x": x,
            "taps": tensors[name],
            "bias": bias,
            "out": out,
            "x_stride": x.stride,
            "part_bytes": part_bytes,
            "out_stride": out.stride,
            "pieces": len(self._pieces.inputs),
            **self._places(self._pieces.inputs),
        }
        spec = Convolve(taps.shape[1], bias is not None, gated, gated and self._builder.bf16)
        return Operation(spec, values, self._builder.when)

    def _places(self, pieces: tuple[tuple[int, int], ...]) -> dict[str, Any]:
        """Returns the fields of a record that say where pieces are."""
        return {"places": torch.tensor(pieces, dtype=torch.int32), "slot_bytes": self._builder.layout.block_bytes}


def convolved(builder: OperationBuilder, channels: int) -> Buffer:
    """Returns the buffer for rows that a short convolution made."""
    return builder.buffer("convolved", in_pieces(channels), builder.row_dtype)
