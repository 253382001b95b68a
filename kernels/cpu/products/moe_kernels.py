"""Mixture of experts around the grouped product: which experts a row goes to, rows sorted by expert, and their sum.

    route -> group -> gather -> (products, group by group) -> combine

A row and one of its experts are a pair; pair i of row t is number t * chosen + i. ``rows_of`` and strides are those of
:mod:`pillion.kernels.cpu.rows.rows`. :mod:`pillion.engine.models.moe` is the same in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from pillion.kernels.cpu.language import lanes
from pillion.kernels.cpu.language.emit import VECTOR_BYTES, Kernel
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, Call
from pillion.kernels.cpu.language.records import Layout
from pillion.kernels.cpu.language.values import Int, Ptr, Vec
from pillion.kernels.cpu.rows.rows import copy_row, vectors_of

# What a thread's scratch has room for.
MAX_EXPERTS = SCRATCH_BYTES // 8 - LANES

ROUTE = Layout("route", pointers=("logits", "scores", "experts"), numbers=("stride",))
GROUP = Layout("group", pointers=("experts", "group_starts", "places", "sources"))
GATHER_GROUPS = Layout("gather_groups", pointers=("rows", "sources", "grouped"), numbers=("stride",))
COMBINE = Layout(
    "combine",
    pointers=("found", "scores", "places", "out"),
    numbers=("width", "found_stride", "out_stride"),
    reals=("factor",),
)
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Route:
    """Each row's best experts: ``logits`` [rows, experts] float32 -> ``scores`` [rows, chosen] float32, best first, and
    which ``experts`` they are [rows, chosen] int32.

    Scores are the softmax over all experts; ``normalize`` makes those of the chosen ones sum up to 1. Of equal experts
    the first wins.
    """

    layout: ClassVar[Layout] = ROUTE

    experts: int
    chosen: int
    normalize: bool
    rows_of: str = "tokens"

    @property
    def name(self) -> str:
        return f"route_{self.experts}_{self.chosen}_{self.rows_of}{'_normalize' if self.normalize else ''}"

    def emit(self, call: Call) -> None:
        assert self.chosen <= self.experts <= MAX_EXPERTS
        k, args = call.k, call.args
        logits, scores, experts = args.pointer("logits"), args.pointer("scores"), args.pointer("experts")
        stride = args.number("stride")
        begin, end = call.even_range(call.step.number(f"num_{self.rows_of}"))
        with k.range(end, begin) as row:
            row_scores, row_experts = scores + row * (self.chosen * 4), experts + row * (self.chosen * 4)
            total = self._exponentials(k, logits + row * stride, call.scratch)
            chosen_total = k.variable(k.vector(0.0))
            with k.range(self.chosen) as i:
                best, expert = self._best(k, call.scratch)
                # Below all others from now on.
                lanes.store_first(k, call.scratch + expert * 4, k.vector(-1.0))
                lanes.store_first(k, row_scores + i * 4, best)
                k.store_int(row_experts + i * 4, expert, 32)
                chosen_total.value = chosen_total.value + best
            divisor = chosen_total.value if self.normalize else total
            with k.range(self.chosen) as i:
                lanes.store_first(k, row_scores + i * 4, k.broadcast(row_scores + i * 4) / divisor)

    def _exponentials(self, k: Kernel, logits: Ptr, out: Ptr) -> Vec:
        """e**(logit - the largest one) to ``out``, -1 behind the last expert; gives their sum."""
        count, vectors = k.int(self.experts), vectors_of(k.int(self.experts))
        largest = k.variable(k.vector(-math.inf))
        with k.range(vectors) as i:
            here = k.below(k.lanes(i * LANES), count)
            largest.value = k.larger(
                k.select(here, k.load(logits + i * VECTOR_BYTES), k.vector(-math.inf)), largest.value
            )
        top, total = k.maximum(largest.value), k.variable(k.vector(0.0))
        with k.range(vectors) as i:
            here = k.below(k.lanes(i * LANES), count)
            power = k.exp2((k.load(logits + i * VECTOR_BYTES) - top) * _LOG2E)
            total.value = total.value + k.select(here, power, k.vector(0.0))
            k.store(out + i * VECTOR_BYTES, k.select(here, power, k.vector(-1.0)))
        return k.sum(total.value)

    def _best(self, k: Kernel, values: Ptr) -> tuple[Vec, Int]:
        """The largest of ``values``, and the first place where it stands; place 0 if all are -1 or NaN."""
        best, places = k.variable(k.vector(-1.0)), k.variable(k.vector(0.0))
        counted = lanes.constant(k, [float(lane) for lane in range(LANES)])
        with k.range(vectors_of(k.int(self.experts))) as i:
            value = k.load(values + i * VECTOR_BYTES)
            larger = value > best.value
            best.value = k.select(larger, value, best.value)
            places.value = k.select(larger, counted + k.real(i * LANES), places.value)
        largest = k.maximum(best.value)
        behind = k.select(best.value < largest, k.vector(-math.inf), places.value * -1.0)
        return largest, lanes.first_as_int(k, k.maximum(behind) * -1.0)


def reference_route(logits: torch.Tensor, chosen: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [rows, experts] float32 -> scores [rows, chosen] float32, experts [rows, chosen] int32."""
    scores, experts = torch.softmax(logits, -1).topk(chosen, -1)
    return scores / scores.sum(-1, keepdim=True) if normalize else scores, experts.int()


@dataclass(frozen=True, slots=True)
class Group:
    """A stable counting sort of the pairs by expert; one thread has it all.

    ``experts`` [rows, chosen] int32 -> ``group_starts`` [experts + 1] int32: which grouped rows an expert owns;
    ``places`` [rows, chosen] int32: each pair's grouped row; ``sources`` [rows * chosen] int32: each grouped row's row.
    """

    layout: ClassVar[Layout] = GROUP

    experts: int
    chosen: int
    rows_of: str = "tokens"

    @property
    def name(self) -> str:
        return f"group_{self.experts}_{self.chosen}_{self.rows_of}"

    def emit(self, call: Call) -> None:
        assert self.experts <= MAX_EXPERTS
        k, args = call.k, call.args
        experts, starts, places, sources = (args.pointer(field) for field in GROUP.pointers)
        # How many pairs an expert has; then where its next one goes.
        cursors = call.scratch
        rows = call.step.number(f"num_{self.rows_of}")
        with k.when(call.thread < 1):
            with k.range(self.experts) as expert:
                k.store_int(cursors + expert * 8, 0)
            with k.range(rows * self.chosen) as pair:
                cursor = cursors + k.load_int(experts + pair * 4, 32) * 8
                k.store_int(cursor, k.load_int(cursor) + 1)
            begin = k.variable(k.int(0))
            with k.range(self.experts) as expert:
                cursor, first = cursors + expert * 8, begin.value
                k.store_int(starts + expert * 4, first, 32)
                begin.value = first + k.load_int(cursor)
                k.store_int(cursor, first)
            k.store_int(starts + self.experts * 4, begin.value, 32)
            with k.range(rows) as row, k.range(self.chosen) as choice:
                pair = row * self.chosen + choice
                cursor = cursors + k.load_int(experts + pair * 4, 32) * 8
                place = k.load_int(cursor)
                k.store_int(cursor, place + 1)
                k.store_int(places + pair * 4, place, 32)
                k.store_int(sources + place * 4, row, 32)


def reference_group(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """experts [rows, chosen] -> group_starts [num_experts + 1], places [rows, chosen], sources [rows * chosen]."""
    order = experts.view(-1).argsort(stable=True)
    counts = torch.bincount(experts.view(-1), minlength=num_experts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return starts.int(), places.view(experts.shape).int(), (order // experts.shape[1]).int()


@dataclass(frozen=True, slots=True)
class GatherGroups:
    """``grouped`` [rows * chosen, ...] = ``rows`` [rows, ...] at ``sources``.

    Of any type: a row is copied with its padding, ``stride`` bytes on both sides, a multiple of 64.
    """

    layout: ClassVar[Layout] = GATHER_GROUPS

    chosen: int
    rows_of: str = "tokens"

    @property
    def name(self) -> str:
        return f"gather_groups_{self.chosen}_{self.rows_of}"

    def emit(self, call: Call) -> None:
        k, args = call.k, call.args
        rows, sources, grouped = (args.pointer(field) for field in GATHER_GROUPS.pointers)
        stride = args.number("stride")
        begin, end = call.even_range(call.step.number(f"num_{self.rows_of}") * self.chosen)
        with k.range(end, begin) as place:
            copy_row(k, rows + k.load_int(sources + place * 4, 32) * stride, grouped + place * stride, stride)


def reference_gather_groups(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """rows [rows, ...], sources [N] -> [N, ...]."""
    return rows[sources]


@dataclass(frozen=True, slots=True)
class Combine:
    """``out`` [rows, width] = factor * (sum of a row's pairs, each its score * what its expert found), all float32.

    ``found`` is [rows * chosen, width] in groups. ``add``: to what is in ``out`` already. A row's pairs are summed from
    its best expert on, wherever they stand, so that other rows change nothing.
    """

    layout: ClassVar[Layout] = COMBINE

    chosen: int
    add: bool
    rows_of: str = "tokens"

    @property
    def name(self) -> str:
        return f"combine_{self.chosen}_{self.rows_of}{'_add' if self.add else ''}"

    def emit(self, call: Call) -> None:
        k, args = call.k, call.args
        found, scores, places, out = (args.pointer(field) for field in COMBINE.pointers)
        width, found_stride, out_stride = (args.number(field) for field in COMBINE.numbers)
        factor, vectors = args.real("factor"), vectors_of(width)
        begin, end = call.even_range(call.step.number(f"num_{self.rows_of}"))
        with k.range(end, begin) as row:
            pairs = [row * self.chosen + choice for choice in range(self.chosen)]
            sources = [found + k.load_int(places + pair * 4, 32) * found_stride for pair in pairs]
            weights = [k.broadcast(scores + pair * 4) for pair in pairs]
            with k.range(vectors) as i:
                at, total = i * VECTOR_BYTES, k.vector(0.0)
                for source, weight in zip(sources, weights, strict=True):
                    total = k.fma(k.load(source + at), weight, total)
                target = out + row * out_stride + at
                k.store(target, k.fma(total, factor, k.load(target)) if self.add else total * factor)


def reference_combine(
    out: torch.Tensor, found: torch.Tensor, scores: torch.Tensor, places: torch.Tensor, factor: float, add: bool
) -> torch.Tensor:
    """out [rows, width], found [rows * chosen, width], scores and places [rows, chosen] -> the new out."""
    total = factor * (found[places] * scores[..., None]).sum(1)
    return out + total if add else total
