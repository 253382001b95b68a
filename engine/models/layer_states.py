"""Says what layers carry from token to token, beside keys and values: their states. Imports no torch.

A state is float32, whatever type a model has: it is added to with every token. A model's state has those of its layers,
one after the other, and takes some slots of the pool (docs/decisions/states.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from pillion.engine.models.layer_operations import DeltaRule, Layer, LayerTensor, ShortConvolution, StateSpace

STATE_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerState:
    """Describes the state of one layer.

    Attributes:
        inputs: how many inputs of its convolution it keeps, those of the last tokens, and how many channels each has.
        memory: how many matrices it has, and their rows and columns; () for none.
        turned: whether kernels have a matrix by columns, because its columns are what its sums run over.
    """

    inputs: tuple[int, int]
    memory: tuple[int, ...] = ()
    turned: bool = False

    @property
    def values(self) -> int:
        """Gives how many numbers the state has."""
        return prod(self.inputs) + (prod(self.memory) if self.memory else 0)


def layer_state(layer: Layer) -> LayerState | None:
    """Returns what a layer carries from token to token; None where it carries nothing."""
    for operation in layer:
        match operation:
            case ShortConvolution(taps=taps):
                return LayerState(_inputs(taps))
            case DeltaRule(taps=taps, heads=heads, key_dim=rows, head_dim=columns):
                return LayerState(_inputs(taps), (heads, rows, columns))
            case StateSpace(taps=taps, heads=heads, head_dim=rows, state_dim=columns):
                return LayerState(_inputs(taps), (heads, rows, columns), turned=True)
    return None


def states_of(layers: Iterable[Layer]) -> tuple[LayerState | None, ...]:
    """Returns what each layer carries."""
    return tuple(map(layer_state, layers))


def state_bytes(states: Iterable[LayerState | None]) -> int:
    """Returns the number of bytes of a sequence's state; 0 for a model without one."""
    return sum(state.values for state in states if state is not None) * STATE_ITEM_BYTES


def _inputs(taps: LayerTensor) -> tuple[int, int]:
    channels, count = taps.shape
    return count - 1, channels
