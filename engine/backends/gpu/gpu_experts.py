"""Mixtures of experts on a GPU, without asking the device for the number of rows per expert.

    rows --router, sort--> scores, chosen, order, tiles
    rows, gathered by order --up, activation--> inner --down--> found, at each pair's place --sum by scores--> rows

Each arrow is one launch, except that many pairs are sorted in three more. Grids depend only on the padded number of
rows, so a mixture is part of the step's CUDA graph, and steps run ahead. Rows that pad a step have no experts. If ranks
have whole experts (``ModelShard.whole_experts``), a rank's pairs are those with its own, and the all-reduce adds up the
rest. An MLP that all rows pass beside their experts is part of the mixture if possible, otherwise a summand
(:mod:`pillion.engine.backends.gpu.shared_experts`). What adapters add to the router's products is computed before; what
they add to up and down, within these.

Buffers are sized for the widest layer and the max tokens of a step, and shared by all layers. Steps larger than
MAX_MIXED_ROWS are computed in parts.
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
from pillion.kernels.gpu.experts.expert_routing import SHARED_ROWS, ExpertRouter, RouteOptions
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
from pillion.kernels.gpu.products.fp8_product import Fp8Matrix
from pillion.kernels.gpu.products.gpu_packing import PackedMatrix
from pillion.kernels.gpu.products.quantized_product import ROW_TILES


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
    """Return the number of experts that follow those of the router in the stacks."""
    return how.joined if isinstance(how, JoinedExperts) else 0


@dataclass(frozen=True, slots=True)
class _PairBuffers:
    """Buffers for the max number of pairs of a row and one of its experts: scores, experts, the pairs' order and their
    tiles, and the number of these; inner values and results; and scaled inputs, if any."""

    scores: torch.Tensor
    chosen: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    count: torch.Tensor
    inner: torch.Tensor
    found: torch.Tensor
    scaled: torch.Tensor


class GpuExperts:
    """The buffers and kernels of a model's mixtures of experts, allocated before the pool."""

    def __init__(self, model: GpuModel) -> None:
        """Allocate the buffers of ``model``, some of whose layers have experts."""
        self._model, self._hidden = model, model.config.hidden_size
        every = [operation for _, _, operation in self._mixtures()]
        rows = min(model.max_tokens, MAX_MIXED_ROWS)
        self._pairs = pairs = rows * max(route_options(how).choices for how in every)
        experts = max(how.router.shape[0] + _joined(how) for how in every)
        columns = max(route_options(how).columns for how in every)
        scaled = any(how.scaled_inputs for how in every)

        def room(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=model.device)

        self._buffers = _PairBuffers(
            scores=room(pairs, torch.float32),
            chosen=room(pairs, torch.int32),
            order=room(pairs, torch.int32),
            # Tiles per pair are most for few pairs.
            tiles=room(TILE_WORDS * most_tiles(experts, pairs, ROW_TILES[0]), torch.int32),
            count=room(1, torch.int32),
            inner=room(pairs * max(how.down.shape[1] for how in every), model.dtype),
            found=room(pairs * self._hidden, model.dtype),
            scaled=room(pairs * self._hidden if scaled else 0, model.dtype),
        )
        self._route = ExpertRouter(columns, self._hidden, rows, model.device)
        self._own = max(len(model.shard.experts(how.router.shape[0])) + _joined(how) for how in every)
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
        beside: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor | PairResults:
        """Compute a layer's mixture of experts, from rows [T, hidden], the first ``count`` int32 [1] of which are not
        padding, to rows [T, hidden] of a buffer that all layers share.

        Without ``summed``, return the experts' results if one pass computes all rows. ``adapters``: those of the rows,
        in steps with some. ``beside``: rows [T, hidden] of an MLP beside the experts that is not one of them, before
        its gate, unless there are adapters, which may change the gate. ``routed``: the input rows of the router, if
        they differ; they may be in the buffer of results."""
        routed = rows if routed is None else routed
        added = None if adapters is None else adapters.routed(how.router, routed)
        if len(rows) <= MAX_MIXED_ROWS and not summed:
            return self._find(layer, how, rows, routed, count, 0, adapters, added)._replace(beside=beside)
        out = self._model.found[: len(rows)]
        for first in range(0, len(rows), MAX_MIXED_ROWS):
            part = slice(first, first + MAX_MIXED_ROWS)
            some = None if added is None else added[part]
            found = self._find(layer, how, rows[part], routed[part], count, first, adapters, some)
            add_up(found._replace(beside=None if beside is None else beside[part]), out[part])
        return out

    def compile(self, adapters: GpuAdapters | None = None) -> None:
        """Compile every kernel for every number of rows, by running them over rows that are all padding: a compilation
        takes seconds, too long for a step. With ``adapters``, compile those of steps with adapters."""
        none = torch.zeros(1, dtype=torch.int32, device=self._model.device)
        compiled = set()
        for index, layer, how in self._mixtures():
            kinds = tuple(
                (matrix.kind, *matrix.parts) if isinstance(matrix, PackedMatrix) else ()
                for matrix in (layer.matrices[tensor.name] for tensor in (how.gate_up, how.down))
            )
            key = (route_options(how), how.gate_up.shape, how.down.shape, *kinds)
            if key not in compiled:
                compiled.add(key)
                own = None if adapters is None else MixtureAdapters(adapters, f"layers.{index}.", sampled=False)
                for count in self._sizes(how):
                    apart = isinstance(how, JoinedExperts) and not how.joined
                    rows, beside = self._model.residual[:count], self._model.found[:count] if apart else None
                    self.run(layer, how, rows, none, adapters=own, beside=beside)

    def _sizes(self, how: Experts) -> list[int]:
        """Return numbers of rows that together need every kernel."""
        most = min(self._model.max_tokens, MAX_MIXED_ROWS)
        pairs = FEW_PAIRS, *(rows * (how.router.shape[0] + _joined(how)) for rows in ROW_TILES)
        sizes = SHARED_ROWS, most, *(max(1, count // route_options(how).choices) for count in pairs)
        return sorted({min(most, size) for size in sizes})

    def _mixtures(self) -> Iterator[tuple[int, GpuLayer, Experts]]:
        """Yield the layers that have experts, by their numbers, with the operation."""
        for index, layer in self._model.layers.items():
            yield from ((index, layer, operation) for operation in layer.operations if isinstance(operation, Experts))

    def _find(
        self,
        layer: GpuLayer,
        how: Experts,
        rows: torch.Tensor,
        routed: torch.Tensor,
        count: torch.Tensor,
        first: int,
        adapters: MixtureAdapters | None,
        added: torch.Tensor | None,
    ) -> PairResults:
        """Return the experts' results of at most MAX_MIXED_ROWS rows, the first of which is number ``first`` of the
        step; the router reads ``routed``. ``added``: what adapters add to the router's products."""
        buffers, per_row = self._buffers, route_options(how).choices
        pairs, choices = len(rows) * per_row, per_row
        scores, chosen = (each[:pairs].view(-1, choices) for each in (buffers.scores, buffers.chosen))
        whole = how.router.shape[0] + _joined(how)
        own = range(whole) if _joined(how) else self._model.shard.experts(whole)
        # With adapters, which may change its gate, a separate MLP applies the gate itself.
        gate = how.beside.row_gate if isinstance(how, JoinedExperts) and (how.joined or adapters is None) else None
        size = min(tile_rows_of(whole, pairs), *(self._most_rows(layer, tensor) for tensor in (how.gate_up, how.down)))
        order, capacity = buffers.order[:pairs], most_tiles(self._own, pairs, size)
        tiles = buffers.tiles[: capacity * TILE_WORDS].view(capacity, TILE_WORDS)
        into = PairOrder(order, tiles, buffers.count, size)
        few = pairs <= FEW_PAIRS
        self._choose(layer, how, routed, count, first, own, gate, added, scores, chosen, into if few else None)
        if not few:
            self._sort(chosen, into)
        if how.scaled_inputs:
            scaled = buffers.scaled[: pairs * self._hidden]
            torch.mul(rows[:, None], scores.to(rows.dtype)[..., None], out=scaled.view(len(rows), choices, -1))
            rows, choices = scaled.view(pairs, -1), 1
            scores.fill_(1.0)
        width = how.down.shape[1]
        inner = buffers.inner[: pairs * width].view(pairs, width)
        found = buffers.found[: pairs * self._hidden].view(pairs, self._hidden)
        activation = how.activation if how.clamped is None else (how.clamped.alpha, how.clamped.limit)

        def multiply(tensor: LayerTensor, values: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
            """Multiply rows of pairs by their experts' matrices, with what their adapters add."""
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
        multiply(how.down, inner, found, activation=None, gated=False, scatter=True, gathered=False)
        return PairResults(found, scores, chosen)

    def _most_rows(self, layer: GpuLayer, tensor: LayerTensor) -> int:
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
        """Choose the experts of rows; the arguments are those of :meth:`_find` and of :class:`ExpertRouter`."""
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
    found = layer.matrices[tensor.name]
    assert isinstance(found, torch.Tensor)
    return found


def _vector(layer: GpuLayer, tensor: LayerTensor | None) -> torch.Tensor | None:
    """Return a layer's vector, flat; None without one."""
    found = None if tensor is None else layer.matrices[tensor.name]
    assert found is None or isinstance(found, torch.Tensor)
    return None if found is None else found.view(-1)
