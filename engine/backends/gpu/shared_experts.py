"""Fusion of a layer's mixture of experts with its shared expert, an MLP that all rows pass.

    SaveRows, Experts, AddToResidual, RestoreRows, Mlp, AddToResidual  -->  JoinedExperts, AddToResidual
    SaveRows, Experts, AddToLayerSum, RestoreRows, Mlp, AddToLayerSum  -->  JoinedExperts

A shared expert whose inner width is n times an expert's is equivalent to n experts that every row chooses, with a score
of 1 or of its gate. If possible, its matrices are appended to the stacks of experts, whose products then need no
additional launches. Otherwise it has separate launches, and the sum over experts adds its output:

* if it is in another format than the experts, or multiplies FP8 by FP8, which experts do not,
* if it is wider than MAX_JOINED experts, each of whose outputs would be written and read,
* if ranks have whole experts, since one rank would compute all of it while the others wait,
* if adapters may change it or experts, since these have separate slots.
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

# Max experts into which a shared expert is split.
MAX_JOINED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedExperts(Experts):
    """A mixture of experts with a shared expert.

    Attributes:
        beside: the shared expert.
        joined: number of experts that it adds to the stacks; 0 if it has separate matrices.
    """

    beside: Mlp
    joined: int

    @property
    def always(self) -> int:
        """The number of choices per row in addition to the router's."""
        return max(1, self.joined)


def join_operations(operations: Layer, joined: Callable[[Experts, Mlp], int]) -> Layer:
    """Return the operations of a layer, with its mixture and its shared expert fused if it has both. ``joined`` returns
    the number of experts that a shared expert adds to the stacks."""
    fused: list[LayerOperation] = []
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
                of_mixture = {field.name: getattr(mixed, field.name) for field in fields(Experts)}
                fused.append(JoinedExperts(**of_mixture, beside=beside, joined=joined(mixed, beside)))
                if isinstance(add, AddToResidual):
                    fused.append(add)
                del left[:6]
            case _:
                fused.append(left.pop(0))
    return tuple(fused)


def join_weights(
    whole: LayerWeights, operations: Layer, shard: ModelShard, *, in_fp8: bool = False
) -> tuple[LayerWeights, Layer]:
    """Return a layer's weights with the shared expert in the stacks of experts, if possible, and operations that name
    these weights, for loading only. ``in_fp8``: quantized matrices may be multiplied in FP8."""

    def count(mixed: Experts, beside: Mlp) -> int:
        multiplies_fp8 = in_fp8 and isinstance(whole.linear(beside.down).weight, QuantizedMatrix)
        return 0 if multiplies_fp8 else _joined(whole, mixed, beside, shard)

    joined = join_operations(operations, count)
    for mixture in joined:
        if isinstance(mixture, JoinedExperts) and mixture.joined:
            return _stacked(whole, operations, mixture)
    return whole, operations


def _stacked(whole: LayerWeights, operations: Layer, mixture: JoinedExperts) -> tuple[LayerWeights, Layer]:
    """Append the shared expert of ``mixture`` to the stacks of experts; return the new weights and operations."""
    weights, beside, count = LayerWeights(whole), mixture.beside, mixture.joined
    for stack, own in ((mixture.gate_up, beside.gate_up), (mixture.down, beside.down)):
        matrices = _split_into_experts(whole.linear(own).weight, own, count)
        weights[stack.name] = (*whole.experts(stack), *(Linear.plain(matrix, None) for matrix in matrices))
    stacked: list[LayerOperation] = []
    for operation in operations:
        if isinstance(operation, Experts):
            stacks = (replace(tensor, experts=tensor.experts + count) for tensor in (operation.gate_up, operation.down))
            gate_up, down = stacks
            operation = replace(operation, gate_up=gate_up, down=down)
        if operation == beside:
            if beside.row_gate is None:
                continue
            operation = Multiply(beside.row_gate)
        stacked.append(operation)
    return weights, tuple(stacked)


def _split_into_experts(matrix: Matrix, tensor: LayerTensor, count: int) -> Iterator[Matrix]:
    """Yield the matrices of ``count`` experts that a shared expert's matrix is split into, by inner values."""
    if count == 1:
        yield matrix
        return
    ups = tensor.rows[0].share is Share.INNER
    inner = (tensor.rows[0] if ups else tensor.inputs[0]).size // count
    for begin in range(0, inner * count, inner):
        if ups:
            rows = [torch.arange(begin, begin + inner) + inner * count * half for half in range(len(tensor.rows))]
            yield select_rows(matrix, torch.cat(rows))
        else:
            yield select_columns(matrix, range(begin, begin + inner))


def _joined(whole: LayerWeights, mixed: Experts, beside: Mlp, shard: ModelShard) -> int:
    """Return the number of experts that the shared expert can add to the stacks; 0 if none."""
    count, rest = divmod(beside.down.shape[1], mixed.down.shape[1])
    same_activation = mixed.gated == beside.gated and mixed.activation == beside.activation and mixed.clamped is None
    if (
        rest
        or count > MAX_JOINED
        or not same_activation
        or beside.bends is not None
        or (shard.whole_experts and not shard.whole)
    ):
        return 0
    for stack, own in ((mixed.gate_up, beside.gate_up), (mixed.down, beside.down)):
        linear, experts = whole.linear(own), whole.experts(stack)
        if linear.bias is not None or any(expert.bias is not None for expert in experts):
            return 0
        if not all(_alike(linear.weight, expert.weight, mixed.down.shape[1]) for expert in experts):
            return 0
        # The packed kinds may still differ, because small scales are stored in fewer bits. Most kinds require bfloat16.
        sample = [*_split_into_experts(linear.weight, own, count), experts[0].weight]
        quantized = [matrix for matrix in sample if isinstance(matrix, QuantizedMatrix) and can_pack(matrix)]
        packed = [pack(matrix, torch.bfloat16) for matrix in quantized]
        if len({(matrix.kind, *matrix.parts) for matrix in packed}) > 1:
            return 0
    return count


def _alike(matrix_a: Matrix, matrix_b: Matrix, inner: int) -> bool:
    """Return whether two matrices have the same format, and can be split at multiples of ``inner`` inputs."""
    if not isinstance(matrix_a, QuantizedMatrix) or not isinstance(matrix_b, QuantizedMatrix):
        return isinstance(matrix_a, torch.Tensor) and isinstance(matrix_b, torch.Tensor)

    def form(matrix: QuantizedMatrix) -> tuple[object, ...]:
        return matrix.coding, matrix.offsets is None, matrix.factors is None, matrix.row_codes

    ordered = matrix_a.order is not None or matrix_b.order is not None
    if ordered or form(matrix_a) != form(matrix_b):
        return False
    # Scales of whole rows (group 0 here) allow any split by inputs.
    groups = {matrix.group if matrix.group < matrix.shape[1] else 0 for matrix in (matrix_a, matrix_b)}
    return len(groups) == 1 and not any(group and inner % group for group in groups)
