"""Recurrent states, which some layers have instead of KV. Imports no torch.

States are always float32, since they accumulate with every token. A model's state concatenates those of its layers, and
takes some slots of the pool (docs/decisions/states.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from pillion.engine.models.layer_operations import (
    DeltaRule,
    Layer,
    LayerTensor,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from pillion.kernels.step import LayerState

STATE_ITEM_BYTES = 4


def layer_state(layer: Layer) -> LayerState | None:
    """Return the shapes of a layer's state; None for a layer without a state."""
    for operation in layer:
        match operation:
            case ShortConvolution(taps=taps):
                return LayerState(_inputs(taps))
            case DeltaRule(taps=taps, heads=heads, key_dim=rows, head_dim=columns, forget_up=by_rows):
                keys, rates = (operation.key_heads, rows), 1 + (1 if by_rows is None else rows)
                return LayerState(_inputs(taps), (heads, rows, columns), keys=keys, rates=rates)
            case StateSpace(taps=taps, heads=heads, head_dim=rows, groups=groups, state_dim=columns):
                keys = groups, columns
                return LayerState(_inputs(taps), (heads, rows, columns), transposed=True, keys=keys, rates=1)
            case SelectiveScan(taps=taps, heads=heads, head_dim=rows, state_dim=columns):
                return LayerState(_inputs(taps), (heads, rows, columns), transposed=True)
    return None


def states_of(layers: Iterable[Layer]) -> tuple[LayerState | None, ...]:
    """Return the shapes of each layer's state; None for a layer without a state."""
    return tuple(map(layer_state, layers))


def state_bytes(states: Iterable[LayerState | None]) -> int:
    """Return the bytes of a sequence's state, which concatenates those of all layers."""
    return sum(state.values for state in states if state is not None) * STATE_ITEM_BYTES


def _inputs(taps: LayerTensor) -> tuple[int, int]:
    """Return the shape of a convolution's last inputs: tokens, channels."""
    channels, count = taps.shape
    return count - 1, channels
