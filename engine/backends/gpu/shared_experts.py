"""Fusion of a layer's mixture of experts with the MLP that all rows pass beside it (shared experts).

    SaveRows, Experts, AddToResidual, RestoreRows, Mlp, AddToResidual  -->  JoinedExperts, AddToResidual
    SaveRows, Experts, AddToLayerSum, RestoreRows, Mlp, AddToLayerSum  -->  JoinedExperts

An MLP whose inner width is a multiple of an expert's is as many experts, which every row chooses, with a score of 1 or
that of the MLP's gate. If its matrices have the experts' format, they follow these in one stack: the products of
experts then compute them as well, without additional launches. Otherwise the MLP has separate launches, and the sum
over experts adds its rows:

* if it is in another format than the experts, or multiplies FP8 by FP8, which experts do not,
* if it is wider than MAX_JOINED experts, whose results would each be written and read once,
* if ranks have whole experts: the rank with the MLP would compute all of it while the others wait,
* if adapters may change it, or experts: both have separate slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from pillion.engine.models.layer_operations import (
    AddToLayerSum,
    AddToResidual,
    Experts,
    Layer,
    LayerOperation,
    LayerTensor,
    Mlp,
    Multiply,
    RestoreRows,
    SaveRows,
    Share,
)
from pillion.engine.models.layer_weights import LayerWeights
from pillion.engine.models.model_shard import ModelShard
from pillion.kernels.gpu.products.gpu_packing import can_pack, pack
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix, select_columns, select_rows
from pillion.kernels.torch.torch_linear import Linear

# Max experts that an MLP is split into.
MAX_JOINED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedExperts(Experts):
    """A mixture of experts and the MLP beside it, in one sum.

    Attributes:
        beside: the MLP.
        joined: number of experts that the MLP adds to the stack; 0 if it has separate matrices.
    """

    beside: Mlp
    joined: int

    @property
    def always(self) -> int:
        """The number of choices of each row beside those of the router."""
        return max(1, self.joined)


def join_operations(operations: Layer, joined: Callable[[Experts, Mlp], int]) -> Layer:
    """Return the operations of a layer with its mixture fused with the MLP beside it, if any. ``joined`` returns the
    number of experts for the MLP."""
    found: list[LayerOperation] = []
    left = list(operations)
    while left:
        match left[:6]:
            case [
                SaveRows(),
                Experts() as mixed,
                AddToResidual() | AddToLayerSum() as once,
                RestoreRows(),
                Mlp() as beside,
                AddToResidual() | AddToLayerSum() as add,
            ] if once == add and add.norm is None and not (mixed.scaled_inputs and beside.row_gate is not None):
                own = {field.name: getattr(mixed, field.name) for field in fields(Experts)}
                found.append(JoinedExperts(**own, beside=beside, joined=joined(mixed, beside)))
                if isinstance(add, AddToResidual):
                    found.append(add)
                del left[:6]
            case _:
                found.append(left.pop(0))
    return tuple(found)


def join_weights(
    whole: LayerWeights, operations: Layer, shard: ModelShard, *, in_fp8: bool = False
) -> tuple[LayerWeights, Layer]:
    """Return a layer's weights with the MLP in the experts' stack, if possible, and the operations that read them; both
    only for loading. ``in_fp8``: quantized matrices may be multiplied in FP8."""

    def count(mixed: Experts, beside: Mlp) -> int:
        other = in_fp8 and isinstance(whole.linear(beside.down).weight, QuantizedMatrix)
        return 0 if other else _joined(whole, mixed, beside, shard)

    joined = join_operations(operations, count)
    for mixture in joined:
        if isinstance(mixture, JoinedExperts) and mixture.joined:
            return _stacked(whole, operations, mixture)
    return whole, operations


def _stacked(whole: LayerWeights, operations: Layer, mixture: JoinedExperts) -> tuple[LayerWeights, Layer]:
    weights, beside, count = LayerWeights(whole), mixture.beside, mixture.joined
    for stack, own in ((mixture.gate_up, beside.gate_up), (mixture.down, beside.down)):
        pieces = _pieces(whole.linear(own).weight, own, count)
        weights[stack.name] = (*whole.experts(stack), *(Linear.plain(piece, None) for piece in pieces))
    found: list[LayerOperation] = []
    for one in operations:
        if isinstance(one, Experts):
            stacks = (replace(tensor, experts=tensor.experts + count) for tensor in (one.gate_up, one.down))
            gate_up, down = stacks
            one = replace(one, gate_up=gate_up, down=down)
        if one == beside:
            if beside.row_gate is None:
                continue
            one = Multiply(beside.row_gate)
        found.append(one)
    return weights, tuple(found)


def _pieces(matrix: Matrix, tensor: LayerTensor, count: int) -> Iterator[Matrix]:
    """Yield the parts of an MLP's matrix that become experts, by inner values."""
    if count == 1:
        yield matrix
        return
    ups = tensor.rows[0].share is Share.INNER
    inner = (tensor.rows[0] if ups else tensor.inputs[0]).size // count
    for begin in range(0, inner * count, inner):
        if ups:
            own = [torch.arange(begin, begin + inner) + inner * count * piece for piece in range(len(tensor.rows))]
            yield select_rows(matrix, torch.cat(own))
        else:
            yield select_columns(matrix, range(begin, begin + inner))


def _joined(whole: LayerWeights, mixed: Experts, beside: Mlp, shard: ModelShard) -> int:
    """Return the number of experts that the MLP adds to the experts' stack; 0 if it cannot."""
    count, rest = divmod(beside.down.shape[1], mixed.down.shape[1])
    how = mixed.gated == beside.gated and mixed.activation == beside.activation and mixed.clamped is None
    if rest or count > MAX_JOINED or not how or beside.bends is not None or (shard.whole_experts and not shard.whole):
        return 0
    for stack, own in ((mixed.gate_up, beside.gate_up), (mixed.down, beside.down)):
        linear, others = whole.linear(own), whole.experts(stack)
        if linear.bias is not None or any(one.bias is not None for one in others):
            return 0
        if not all(_alike(linear.weight, one.weight, mixed.down.shape[1]) for one in others):
            return 0
        # A matrix whose scales are all small stores them in fewer bits; most kinds require bfloat16.
        few = [*_pieces(linear.weight, own, count), others[0].weight]
        packed = [pack(one, torch.bfloat16) for one in few if isinstance(one, QuantizedMatrix) and can_pack(one)]
        if len({(each.kind, *each.parts) for each in packed}) > 1:
            return 0
    return count


def _alike(one: Matrix, other: Matrix, inner: int) -> bool:
    """Return whether matrices have one format, and the first one can be cut at multiples of ``inner`` values."""
    if not isinstance(one, QuantizedMatrix) or not isinstance(other, QuantizedMatrix):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)

    def form(matrix: QuantizedMatrix) -> tuple[object, ...]:
        return matrix.coding, matrix.offsets is None, matrix.factors is None, matrix.row_codes

    ordered = one.order is not None or other.order is not None
    if ordered or form(one) != form(other):
        return False
    # An output with one scale for all of its inputs keeps it when the matrix is cut by inputs.
    groups = {matrix.group if matrix.group < matrix.shape[1] else 0 for matrix in (one, other)}
    return len(groups) == 1 and not any(group and inner % group for group in groups)
