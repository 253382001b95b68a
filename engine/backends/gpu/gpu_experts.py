"""Mixtures of experts on a GPU, without a host synchronization for the number of rows per expert.

    rows --router, sort--> scores, chosen, order, tiles
    rows, gathered by order --up, activation--> inner --down--> outputs of pairs --sum weighted by scores--> rows

A *pair* is a row and one of its experts. Each arrow is one launch, except that more than FEW_PAIRS pairs take three
more to sort. Grids depend only on the padded number of rows, so a mixture is part of the step's CUDA graph. Padding
rows have no experts. If ranks have whole experts (``ModelShard.whole_experts``), a rank computes the pairs with its own
experts, and the all-reduce adds up the outputs. Shared experts are part of the mixture if possible, otherwise a
separate summand (:mod:`pillion.engine.backends.gpu.shared_experts`). Adapters' products are computed before the router,
and within up and down.

All layers share the buffers, which are sized for the widest layer and the max tokens of a step. Steps of more than
MAX_MIXED_ROWS rows are computed in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pillion.engine.backends.gpu.gpu_model import GpuLayer, GpuModel
from pillion.engine.backends.gpu.shared_experts import JoinedExperts
from pillion.engine.gpu_adapters.gpu_adapters import GpuAdapters, MixtureAdapters
from pillion.engine.models.layer_operations import MAX_MIXED_ROWS, Experts, LayerTensor
from pillion.kernels.gpu.experts.expert_routing import SPLIT_K_MAX_ROWS, ExpertRouter, RouteOptions
from pillion.kernels.gpu.experts.expert_sums import PairResults, add_up
from pillion.kernels.gpu.experts.grouped_product import GroupedGemm, most_rows
from pillion.kernels.gpu.experts.pair_sorting import (
    FEW_PAIRS,
    TILE_WORDS,
    PairOrder,
    PairSorter,
    most_tiles,
    tile_rows_of,
)
from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.gpu.products.dense_gemm import ROW_TILES
from pillion.kernels.gpu.products.fp8_product import Fp8Matrix
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix


def route_options(how: Experts) -> RouteOptions:
    """Return the options of the router's kernel for a mixture."""
    return RouteOptions(
        how.router.shape[0],
        how.per_token,
        how.normalize,
        sigmoid=how.sigmoid,
        # Families with these options do not round the router's products.
        exact=how.exact or how.sigmoid or how.choice_bias is not None,
        scale=how.scale,
        groups=how.groups,
        kept_groups=how.kept_groups,
        group_best=how.group_best,
        always=how.always if isinstance(how, JoinedExperts) else 0,
    )


def _joined(how: Experts) -> int:
    """Return the number of shared experts in the stacks of experts, after those that the router chooses from."""
    return how.joined if isinstance(how, JoinedExperts) else 0


@dataclass(frozen=True, slots=True)
class _PairBuffers:
    """Buffers for the max number of pairs: scores and experts; pairs sorted by expert, their tiles, and the number of
    tiles; inner values and outputs; and inputs scaled by scores, if a layer needs them."""

    scores: torch.Tensor
    chosen: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    count: torch.Tensor
    inner: torch.Tensor
    outputs: torch.Tensor
    scaled: torch.Tensor


class GpuExperts:
    """The buffers and kernels of a model's mixtures of experts, allocated before the pool."""

    def __init__(self, model: GpuModel) -> None:
        """Allocate the buffers for ``model``, which has layers with experts."""
        self._model, self._hidden = model, model.config.hidden_size
        mixtures = [operation for _, _, operation in self._mixtures()]
        rows = min(model.max_tokens, MAX_MIXED_ROWS)
        self._pairs = pairs = rows * max(route_options(how).choices for how in mixtures)
        experts = max(how.router.shape[0] + _joined(how) for how in mixtures)
        columns = max(route_options(how).columns for how in mixtures)
        scaled = any(how.scaled_inputs for how in mixtures)

        def buffer(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=model.device)

        self._buffers = _PairBuffers(
            scores=buffer(pairs, torch.float32),
            chosen=buffer(pairs, torch.int32),
            order=buffer(pairs, torch.int32),
            # Sized for the smallest tiles, of which there are most.
            tiles=buffer(TILE_WORDS * most_tiles(experts, pairs, ROW_TILES[0]), torch.int32),
            count=buffer(1, torch.int32),
            inner=buffer(pairs * max(how.down.shape[1] for how in mixtures), model.dtype),
            outputs=buffer(pairs * self._hidden, model.dtype),
            scaled=buffer(pairs * self._hidden if scaled else 0, model.dtype),
        )
        self._route = ExpertRouter(columns, self._hidden, rows, model.device)
        self._own = max(len(model.shard.experts(how.router.shape[0])) + _joined(how) for how in mixtures)
        self._sort = PairSorter(self._own, pairs, model.device)
        self._product = GroupedGemm(model.dtype, model.device)

    def run(
        self,
        layer: GpuLayer,
        how: Experts,
        rows: torch.Tensor,
        count: torch.Tensor,
        *,
        summed: bool = True,
        adapters: MixtureAdapters | None = None,
        shared: torch.Tensor | None = None,
        router_rows: torch.Tensor | None = None,
    ) -> torch.Tensor | PairResults:
        """Compute a layer's mixture of experts, from rows [T, hidden] to rows [T, hidden] in a buffer of the model.

        Args:
            count: int32 [1], number of rows without padding.
            summed: if False, return the outputs of pairs instead, if at most MAX_MIXED_ROWS rows.
            adapters: of the rows, in steps with adapters.
            shared: output [T, hidden] of a shared expert that is not part of the mixture. Its gate is applied here,
                except in steps with adapters, which may change the gate.
            router_rows: input of the router if it is not ``rows``; may be in the buffer of the result.
        """
        router_rows = rows if router_rows is None else router_rows
        added = None if adapters is None else adapters.routed(how.router, router_rows)
        if len(rows) <= MAX_MIXED_ROWS and not summed:
            return self._run_pairs(layer, how, rows, router_rows, count, 0, adapters, added)._replace(beside=shared)
        out = self._model.projected[: len(rows)]
        for first in range(0, len(rows), MAX_MIXED_ROWS):
            part = slice(first, first + MAX_MIXED_ROWS)
            added_part = None if added is None else added[part]
            pairs = self._run_pairs(layer, how, rows[part], router_rows[part], count, first, adapters, added_part)
            add_up(pairs._replace(beside=None if shared is None else shared[part]), out[part])
        return out

    def compile(self, adapters: GpuAdapters | None = None) -> None:
        """Compile every kernel variant by running mixtures over padding rows, since a compilation, of seconds, would
        stall a step. With ``adapters``, compile those of steps with adapters."""
        no_rows = torch.zeros(1, dtype=torch.int32, device=self._model.device)
        compiled = set()
        for index, layer, how in self._mixtures():
            kinds = tuple(
                (matrix.kind, *matrix.parts) if isinstance(matrix, PackedMatrix) else ()
                for matrix in (layer.matrices[tensor.name] for tensor in (how.gate_up, how.down))
            )
            key = (route_options(how), how.gate_up.shape, how.down.shape, *kinds)
            if key not in compiled:
                compiled.add(key)
                mixture = None if adapters is None else MixtureAdapters(adapters, f"layers.{index}.", sampled=False)
                for count in self._sizes(how):
                    separate = isinstance(how, JoinedExperts) and not how.joined
                    rows, shared = self._model.residual[:count], self._model.projected[:count] if separate else None
                    self.run(layer, how, rows, no_rows, adapters=mixture, shared=shared)

    def _sizes(self, how: Experts) -> list[int]:
        """Return numbers of rows that together use every kernel variant."""
        max_rows = min(self._model.max_tokens, MAX_MIXED_ROWS)
        pairs = FEW_PAIRS, *(rows * (how.router.shape[0] + _joined(how)) for rows in ROW_TILES)
        sizes = SPLIT_K_MAX_ROWS, max_rows, *(max(1, count // route_options(how).choices) for count in pairs)
        return sorted({min(max_rows, size) for size in sizes})

    def _mixtures(self) -> Iterator[tuple[int, GpuLayer, Experts]]:
        """Yield (index, layer, operation) of each mixture of experts."""
        for index, layer in self._model.layers.items():
            yield from ((index, layer, operation) for operation in layer.operations if isinstance(operation, Experts))

    def _run_pairs(
        self,
        layer: GpuLayer,
        how: Experts,
        rows: torch.Tensor,
        router_rows: torch.Tensor,
        count: torch.Tensor,
        first: int,
        adapters: MixtureAdapters | None,
        added: torch.Tensor | None,
    ) -> PairResults:
        """Return the outputs of pairs of at most MAX_MIXED_ROWS rows, which begin with row ``first`` of the step.
        ``added``: the adapters' part of the router's logits; the other arguments are those of :meth:`run`."""
        buffers, per_row = self._buffers, route_options(how).choices
        pairs, choices = len(rows) * per_row, per_row
        scores, chosen = (buffer[:pairs].view(-1, choices) for buffer in (buffers.scores, buffers.chosen))
        num_experts = how.router.shape[0] + _joined(how)
        own = range(num_experts) if _joined(how) else self._model.shard.experts(num_experts)
        # In steps with adapters, a separate shared expert has applied its gate.
        gate = how.beside.row_gate if isinstance(how, JoinedExperts) and (how.joined or adapters is None) else None
        limits = (self._max_tile_rows(layer, tensor) for tensor in (how.gate_up, how.down))
        size = min(tile_rows_of(num_experts, pairs), *limits)
        order, capacity = buffers.order[:pairs], most_tiles(self._own, pairs, size)
        tiles = buffers.tiles[: capacity * TILE_WORDS].view(capacity, TILE_WORDS)
        into = PairOrder(order, tiles, buffers.count, size)
        sorts_itself = into if pairs <= FEW_PAIRS else None
        self._choose(layer, how, router_rows, count, first, own, gate, added, scores, chosen, sorts_itself)
        if sorts_itself is None:
            self._sort(chosen, into)
        if how.scaled_inputs:
            scaled = buffers.scaled[: pairs * self._hidden]
            torch.mul(rows[:, None], scores.to(rows.dtype)[..., None], out=scaled.view(len(rows), choices, -1))
            rows, choices = scaled.view(pairs, -1), 1
            scores.fill_(1.0)
        width = how.down.shape[1]
        inner = buffers.inner[: pairs * width].view(pairs, width)
        outputs = buffers.outputs[: pairs * self._hidden].view(pairs, self._hidden)
        activation = how.activation if how.clamped is None else (how.clamped.alpha, how.clamped.limit)

        def multiply(tensor: LayerTensor, values: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
            """Multiply the rows of pairs by their experts' matrices, including adapters."""
            matrix = layer.matrices[tensor.name]
            assert not isinstance(matrix, Fp8Matrix)
            self._product(
                values,
                order,
                choices,
                tiles,
                buffers.count,
                matrix,
                layer.biases[tensor.name],
                out=out,
                tile_rows=size,
                adapters=None if adapters is None else adapters.of_pairs(tensor, first, per_row),
                **options,
            )

        multiply(how.gate_up, rows, inner, activation=activation, gated=how.gated, scatter=False)
        multiply(how.down, inner, outputs, activation=None, gated=False, scatter=True, gathered=False)
        return PairResults(outputs, scores, chosen)

    def _max_tile_rows(self, layer: GpuLayer, tensor: LayerTensor) -> int:
        """Return the max rows of a tile in products with a stack of experts."""
        matrix = layer.matrices[tensor.name]
        kind = matrix.kind if isinstance(matrix, PackedMatrix) else None
        return most_rows(kind, self._model.dtype, arch_of(self._model.device))

    def _choose(
        self,
        layer: GpuLayer,
        how: Experts,
        rows: torch.Tensor,
        count: torch.Tensor,
        first: int,
        own: range,
        gate: LayerTensor | None,
        added: torch.Tensor | None,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        into: PairOrder | None,
    ) -> None:
        """Choose the experts of rows. The arguments are those of :meth:`_run_pairs` and :class:`ExpertRouter`."""
        self._route(
            rows,
            _matrix(layer, how.router),
            route_options(how),
            count,
            scores,
            chosen,
            first=first,
            own=own,
            bias=_vector(layer, how.router_bias),
            choice_bias=_vector(layer, how.choice_bias),
            factors=_vector(layer, how.expert_scales),
            added=added,
            gate=None if gate is None else _matrix(layer, gate),
            into=into,
        )


def _matrix(layer: GpuLayer, tensor: LayerTensor) -> torch.Tensor:
    """Return a layer's plain matrix."""
    matrix = layer.matrices[tensor.name]
    assert isinstance(matrix, torch.Tensor)
    return matrix


def _vector(layer: GpuLayer, tensor: LayerTensor | None) -> torch.Tensor | None:
    """Return a tensor of a layer as a vector; None for None."""
    values = None if tensor is None else layer.matrices[tensor.name]
    assert values is None or isinstance(values, torch.Tensor)
    return None if values is None else values.view(-1)
