"""Kernels around the grouped products of a mixture of experts: choice of experts, sorting of rows by expert, and
combination of the outputs; and the gate of shared experts.

    RouteToExperts -> [ScaleChosen] -> GroupByExpert -> GatherGroups -> (products, group by group) -> Combine
    (products) -> WeighRows

A row and one of its experts are a pair; pair i of row t is number t * chosen + i. ``rows_of`` and strides are those of
:mod:`pillion.kernels.cpu.rows.rows`. :mod:`pillion.engine.models.layers` computes the same in torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pillion.kernels.cpu.language.emit import LOG2E, VECTOR_BYTES, Int, Kernel, Ptr, Vec
from pillion.kernels.cpu.language.isa import LANES
from pillion.kernels.cpu.language.module import SCRATCH_BYTES, KernelCall, KernelSpec
from pillion.kernels.cpu.language.records import RecordLayout
from pillion.kernels.cpu.rows.rows import vectors_of

# Max experts: routing keeps two 4-byte numbers per expert in a thread's scratch.
MAX_EXPERTS = SCRATCH_BYTES // 8 - LANES


@dataclass(frozen=True, slots=True)
class RouteToExperts(KernelSpec):
    """Top-k routing: ``logits`` [rows, experts] float32 -> ``scores`` [rows, chosen] float32, best first, and the
    indices of their ``experts`` [rows, chosen] int32.

    Scores are a softmax over all experts, or with ``sigmoid`` sigmoids; with ``normalize`` they are divided by the sum
    of the row's chosen scores; finally ``scale`` multiplies them. Of equal scores the first expert wins. ``biased``:
    experts are chosen by score + ``bias`` [experts] float32. With several ``groups``, experts are chosen only in the
    ``kept_groups`` groups with the largest sum of their best ``group_best`` scores, 1 or 2.
    """

    layout = RecordLayout(
        "route", pointers=("logits", "scores", "experts", "bias"), numbers=("stride",), reals=("scale",)
    )

    experts: int
    chosen: int
    normalize: bool
    rows_of: str = "tokens"
    sigmoid: bool = False
    biased: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2

    def emit(self, call: KernelCall) -> None:
        assert self.chosen <= self.experts // self.groups * self.kept_groups
        assert self.experts <= MAX_EXPERTS - self.groups
        k, args = call.k, call.args
        logits, scores, experts = args.pointer("logits"), args.pointer("scores"), args.pointer("experts")
        stride = args.number("stride")
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            row_scores, row_experts = scores + row * (self.chosen * 4), experts + row * (self.chosen * 4)
            if self.sigmoid:
                total = self._sigmoids(k, logits + row * stride, call.scratch)
            else:
                total = self._exponentials(k, logits + row * stride, call.scratch)
            choices = self._choices(call, total) if self.biased else call.scratch
            if self.groups > 1:
                self._drop_groups(k, choices, call.scratch + 2 * self._choices_bytes)
            chosen_total = k.variable(k.vector(0.0))
            with k.range(self.chosen) as i:
                best, expert = self._best(k, choices, self.experts)
                if self.biased:
                    best = k.broadcast(call.scratch + expert * 4)
                # Below all other scores, so that the expert is not chosen again.
                k.store_first(choices + expert * 4, k.vector(self._lowest))
                k.store_first(row_scores + i * 4, best)
                k.store_int(row_experts + i * 4, expert, 32)
                chosen_total.value = chosen_total.value + best
            divisor = chosen_total.value if self.normalize else total
            with k.range(self.chosen) as i:
                k.store_first(row_scores + i * 4, k.broadcast(row_scores + i * 4) / divisor * args.real("scale"))

    @property
    def _lowest(self) -> float:
        """A score below those of all experts that may be chosen."""
        return -math.inf if self.biased else -1.0

    @property
    def _choices_bytes(self) -> int:
        """Bytes of the scores of all experts, in whole vectors."""
        return -(-self.experts // LANES) * VECTOR_BYTES

    def _drop_groups(self, k: Kernel, choices: Ptr, group_scores: Ptr) -> None:
        """Set the scores of experts outside of the best groups below all other scores."""
        size = self.experts // self.groups
        lowest = k.vector(self._lowest)
        with k.range(self.groups) as group:
            first = choices + group * (size * 4)
            score, index = self._best(k, first, size)
            if self.group_best > 1:
                k.store_first(first + index * 4, lowest)
                second = self._best(k, first, size)[0]
                k.store_first(first + index * 4, score)
                score = score + second
            k.store_first(group_scores + group * 4, score)
        with k.range(self.kept_groups):
            best = self._best(k, group_scores, self.groups)[1]
            k.store_first(group_scores + best * 4, lowest)
        with k.range(self.groups) as group:
            # The scores of kept groups have just been set to the lowest.
            dropped = k.broadcast(group_scores + group * 4) > lowest
            with k.range(vectors_of(k.int(size))) as i:
                at = choices + group * (size * 4) + i * VECTOR_BYTES
                value = k.load(at)
                # The vector may reach into the next group's scores, or past the last group.
                k.store(at, k.select(k.below(i * LANES, k.int(size)), k.select(dropped, lowest, value), value))

    def _sigmoids(self, k: Kernel, logits: Ptr, out: Ptr) -> Vec:
        """Store the sigmoids of logits in ``out``, and -1 after the last expert; return 1."""
        count = k.int(self.experts)
        with k.range(vectors_of(count)) as i:
            score = k.sigmoid(k.load(logits + i * VECTOR_BYTES))
            k.store(out + i * VECTOR_BYTES, k.select(k.below(i * LANES, count), score, k.vector(-1.0)))
        return k.vector(1.0)

    def _choices(self, call: KernelCall, total: Vec) -> Ptr:
        """Store scores / total + bias after the scores; return their address."""
        k, bias, count = call.k, call.args.pointer("bias"), call.k.int(self.experts)
        out = call.scratch + self._choices_bytes
        with k.range(vectors_of(count)) as i:
            at, valid = i * VECTOR_BYTES, k.below(i * LANES, count)
            k.store(
                out + at, k.select(valid, k.load(call.scratch + at) / total + k.load(bias + at), k.vector(-math.inf))
            )
        return out

    def _exponentials(self, k: Kernel, logits: Ptr, out: Ptr) -> Vec:
        """Store e**(logit - the largest logit) in ``out``, and -1 after the last expert; return the sum."""
        count, vectors = k.int(self.experts), vectors_of(k.int(self.experts))
        largest = k.variable(k.vector(-math.inf))
        with k.range(vectors) as i:
            valid = k.below(i * LANES, count)
            largest.value = k.maximum(
                k.select(valid, k.load(logits + i * VECTOR_BYTES), k.vector(-math.inf)), largest.value
            )
        top, total = k.max_lane(largest.value), k.variable(k.vector(0.0))
        with k.range(vectors) as i:
            valid = k.below(i * LANES, count)
            power = k.exp2((k.load(logits + i * VECTOR_BYTES) - top) * LOG2E)
            total.value = total.value + k.select(valid, power, k.vector(0.0))
            k.store(out + i * VECTOR_BYTES, k.select(valid, power, k.vector(-1.0)))
        return k.sum(total.value)

    def _best(self, k: Kernel, values: Ptr, count: int) -> tuple[Vec, Int]:
        """Return the largest of the first ``count`` ``values``, and its first index; 0 if all are the lowest or NaN."""
        best, indices = k.variable(k.vector(self._lowest)), k.variable(k.vector(0.0))
        counted = k.constant([float(lane) for lane in range(LANES)])
        with k.range(vectors_of(k.int(count))) as i:
            value = k.load(values + i * VECTOR_BYTES)
            if count < self.experts:
                value = k.select(k.below(i * LANES, k.int(count)), value, k.vector(self._lowest))
            larger = value > best.value
            best.value = k.select(larger, value, best.value)
            indices.value = k.select(larger, counted + k.real(i * LANES), indices.value)
        largest = k.max_lane(best.value)
        negated = k.select(best.value < largest, k.vector(-math.inf), indices.value * -1.0)
        return largest, k.first_as_int(k.max_lane(negated) * -1.0)


@dataclass(frozen=True, slots=True)
class ScaleChosen(KernelSpec):
    """Multiply ``scores`` [rows, chosen] float32, in place, by the ``scales`` [experts] float32 of the chosen
    ``experts`` [rows, chosen] int32."""

    layout = RecordLayout("scale_chosen", pointers=("scores", "experts", "scales"))

    chosen: int
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, (scores, experts, scales) = call.k, (call.args.pointer(name) for name in self.layout.pointers)
        with call.even_share(call.step.number(f"num_{self.rows_of}") * self.chosen) as pair:
            expert = k.load_int(experts + pair * 4, 32)
            k.store_first(scores + pair * 4, k.broadcast(scores + pair * 4) * k.broadcast(scales + expert * 4))


@dataclass(frozen=True, slots=True)
class GroupByExpert(KernelSpec):
    """Stable counting sort of the (row, expert) pairs by expert, on one thread.

    ``experts`` [rows, chosen] int32 -> ``group_starts`` [experts + 1] int32: the first grouped row of each expert;
    ``places`` [rows, chosen] int32: the grouped row of each pair; ``sources`` [rows * chosen] int32: the row of each
    grouped row.
    """

    layout = RecordLayout("group", pointers=("experts", "group_starts", "places", "sources"))

    experts: int
    chosen: int
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        assert self.experts <= MAX_EXPERTS
        k, args = call.k, call.args
        experts, starts, places, sources = (args.pointer(field) for field in self.layout.pointers)
        # Per expert: its number of pairs, and later the grouped row of its next pair.
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


@dataclass(frozen=True, slots=True)
class GatherGroups(KernelSpec):
    """Copy of each pair's row to its expert's group: ``grouped`` [rows * chosen, ...] = ``rows`` [rows, ...] at
    ``sources``.

    Rows of any type are copied with their padding; ``stride``, a multiple of 64 bytes, is that of source and target.
    ``scaled``: rows, of bfloat16 or float32, are multiplied by their pairs' ``scores`` and written to ``places``; there
    are no ``sources`` then.
    """

    layout = RecordLayout(
        "gather_groups", pointers=("rows", "sources", "grouped", "scores", "places"), numbers=("stride",)
    )

    chosen: int
    rows_of: str = "tokens"
    scaled: bool = False
    bf16: bool = False

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        rows, sources, grouped, scores, places = (args.pointer(field) for field in self.layout.pointers)
        stride = args.number("stride")
        if self.scaled:
            size = LANES * (2 if self.bf16 else 4)
            with call.even_share(call.step.number(f"num_{self.rows_of}") * self.chosen) as pair:
                score = k.broadcast(scores + pair * 4)
                source, target = (
                    rows + pair // self.chosen * stride,
                    grouped + k.load_int(places + pair * 4, 32) * stride,
                )
                with k.range(stride // size) as i:
                    k.store_float(target + i * size, k.load_float(source + i * size, self.bf16) * score, self.bf16)
            return
        with call.even_share(call.step.number(f"num_{self.rows_of}") * self.chosen) as place:
            k.copy(rows + k.load_int(sources + place * 4, 32) * stride, grouped + place * stride, stride)


@dataclass(frozen=True, slots=True)
class Combine(KernelSpec):
    """Weighted sum of the experts' outputs: ``out`` [rows, width] = factor * (sum over a row's pairs of the score * the
    expert's output), all float32.

    ``found`` [rows * chosen, width]: the experts' outputs for grouped rows. ``add``: add to ``out`` instead. Without
    ``scored``, scores count as 1. A row's pairs are summed from its best expert on, so a result does not depend on
    other rows.
    """

    layout = RecordLayout(
        "combine",
        pointers=("found", "scores", "places", "out"),
        numbers=("width", "found_stride", "out_stride"),
        reals=("factor",),
    )

    chosen: int
    add: bool
    rows_of: str = "tokens"
    scored: bool = True

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        found, scores, places, out = (args.pointer(field) for field in self.layout.pointers)
        width, found_stride, out_stride = (args.number(field) for field in self.layout.numbers)
        factor, vectors = args.real("factor"), vectors_of(width)
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            pairs = [row * self.chosen + choice for choice in range(self.chosen)]
            sources = [found + k.load_int(places + pair * 4, 32) * found_stride for pair in pairs]
            weights = [k.broadcast(scores + pair * 4) if self.scored else k.vector(1.0) for pair in pairs]
            with k.range(vectors) as i:
                at, total = i * VECTOR_BYTES, k.vector(0.0)
                for source, weight in zip(sources, weights, strict=True):
                    total = k.fma(k.load(source + at), weight, total)
                target = out + row * out_stride + at
                k.store(target, k.fma(total, factor, k.load(target)) if self.add else total * factor)


@dataclass(frozen=True, slots=True)
class WeighRows(KernelSpec):
    """Gate of shared experts: ``out`` [rows, width] = factor * sigmoid(the row's gate) * their output ``found`` [rows,
    width], all float32. A row's gate is the first value of its row of ``gates``. ``add``: add to ``out`` instead."""

    layout = RecordLayout(
        "weigh_rows",
        pointers=("gates", "found", "out"),
        numbers=("width", "gates_stride", "found_stride", "out_stride"),
        reals=("factor",),
    )

    add: bool
    rows_of: str = "tokens"

    def emit(self, call: KernelCall) -> None:
        k, args = call.k, call.args
        gates, found, out = (args.pointer(field) for field in self.layout.pointers)
        width, gates_stride, found_stride, out_stride = (args.number(field) for field in self.layout.numbers)
        with call.even_share(call.step.number(f"num_{self.rows_of}")) as row:
            weight = k.sigmoid(k.broadcast(gates + row * gates_stride)) * args.real("factor")
            source, target = found + row * found_stride, out + row * out_stride
            with k.range(vectors_of(width)) as i:
                at = i * VECTOR_BYTES
                value = k.load(source + at)
                k.store(target + at, k.fma(value, weight, k.load(target + at)) if self.add else value * weight)
