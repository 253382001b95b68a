"""Packing of adapters for the CPU kernels. Imports neither torch nor the compiler, for use in a small process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.engine.adapters.adapter_forms import LINE_BYTES, Bits, Bytes, Layers, PairBits, line_bytes
from pillion.engine.adapters.adapter_rows import product_pairs
from pillion.errors import ConfigError
from pillion.kernels.cpu.adapters.adapter_tiles import RANK_MULTIPLE, pack_tiles
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS

# Max pairs per fused layer: queries, keys, values and gates; per expert: gate and up.
MAX_PAIRS = 4
MAX_EXPERT_PAIRS = 2


@dataclass(frozen=True, slots=True)
class CpuAdapterForm:
    """Form of an adapter for the CPU kernels: records of its layers, and the bytes that they point into.

    Attributes:
        shapes: (outputs, inputs, matrices) of the products that adapters may change; matrices of experts or heads, 0
            for a single one.
        heads: a head's outputs for keys and for values, by name of a layer with a matrix per head.
        gated: names of layers that make gate and up, whose outputs alternate in the packed order.
        inner_orders: order of the inner values of an MLP, or per expert, by prefix of the layer's name, where quantized
            weights reorder them.
        max_rank: max rank of a pair.
        record: index of each field's word in a record; a pointer is an offset, with its size in the next word.
        record_words: words per record.
    """

    shapes: Mapping[str, Sequence[int]]
    heads: Mapping[str, Sequence[int]]
    gated: Sequence[str]
    inner_orders: Mapping[str, Sequence[Any]]
    max_rank: int
    record: Mapping[str, int]
    record_words: int

    def width(self, *, experts: bool, heads: int = 0) -> int:
        """Return the width of a row's product with A at the max rank."""
        if heads:
            return heads * padded(self.max_rank, TILE_COLUMNS)
        return (MAX_EXPERT_PAIRS if experts else MAX_PAIRS) * padded(self.max_rank, RANK_MULTIPLE)

    def depth(self, name: str) -> int:
        """Return a layer's inputs, padded."""
        return padded(self.shapes[name][1], DEPTH_MULTIPLE)

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Pack an adapter into a record per layer, zero for layers without pairs. Raises ConfigError for too many pairs
        in a layer."""
        layers = product_pairs(layers, self.heads)
        parts: list[tuple[int, Bits]] = []
        words = np.zeros((len(self.shapes), self.record_words), np.int64)
        end = 0
        for record, name in zip(words, self.shapes, strict=True):
            pairs = layers.get(name)
            if not pairs:
                continue
            a, b, first_ranks = self._packed_layer(name, pairs)
            for field, part in (("a", a), ("b", b), ("first_ranks", first_ranks)):
                at = self.record[field]
                record[at : at + 2] = end, part.nbytes
                parts.append((end, part))
                end += padded(part.nbytes, LINE_BYTES)
            every_a, every_b = map(_matrices, (pairs[0].a, pairs[0].b))
            record[self.record["a_tiles"]] = len(a) // (self.depth(name) * TILE_COLUMNS * every_a)
            record[self.record["b_steps"]] = b.nbytes // len(first_ranks) // LINE_BYTES
            record[self.record["a_stride"]] = a.nbytes // every_a if every_a > 1 else 0
            record[self.record["b_stride"]] = b.nbytes // every_b if every_b > 1 else 0
        data = line_bytes(end)
        for begin, part in parts:
            data[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)
        return words.tolist(), data

    def _packed_layer(self, name: str, pairs: Sequence[PairBits]) -> tuple[Bits, Bits, npt.NDArray[np.int32]]:
        """Pack a layer's pairs, concatenated by expert or head; returns like :meth:`_packed`. A matrix shared by all
        heads is packed once."""
        order = self.inner_orders.get(name.rpartition(".")[0])
        inner = None if order is None else np.array(order)
        if not self.shapes[name][2]:
            return self._packed(name, pairs, inner)
        each = [
            self._packed(
                name,
                [replace(pair, a=_of(pair.a, number), b=_of(pair.b, number)) for pair in pairs],
                None if inner is None else inner[number],
            )
            for number in range(self.shapes[name][2])
        ]
        a, b, first_ranks = zip(*each, strict=True)
        every_a, every_b = map(_matrices, (pairs[0].a, pairs[0].b))
        return np.concatenate(a[:every_a]), np.concatenate(b[:every_b]), np.concatenate(first_ranks[:every_b])

    def _packed(
        self, name: str, pairs: Sequence[PairBits], order: npt.NDArray[np.int64] | None
    ) -> tuple[Bits, Bits, npt.NDArray[np.int32]]:
        """Pack the pairs of one matrix; ``order`` reorders its inner values. Returns the tiles of A and of B, and the
        byte offset of the first rank for each tile of B."""
        outputs, inputs, experts = self.shapes[name]
        if name not in self.gated and any(_meet(*both) for both in pairwise(pairs)):
            # A tile of outputs can only use the ranks of one pair.
            pairs = (_one_pair(pairs),)
        rank = padded(max(len(pair.a) for pair in pairs), RANK_MULTIPLE)
        total = len(pairs) * rank
        if total > self.width(experts=experts > 0):
            raise ConfigError(f"{len(pairs)} pairs of matrices in {name} exceed the limit")
        kind = pairs[0].a.dtype
        a = np.zeros((padded(total, TILE_COLUMNS), self.depth(name)), kind)
        b, owners = np.zeros((outputs, rank), kind), np.full(outputs, -1, np.int32)
        for number, pair in enumerate(pairs):
            a[number * rank : number * rank + len(pair.a), :inputs] = pair.a
            rows = slice(pair.first_output, pair.first_output + len(pair.b))
            b[rows, : pair.b.shape[1]] = pair.b
            owners[rows] = number
        layer = name.rpartition(".")[2]
        if layer == "down" and order is not None:
            a[:, :inputs] = a[:, order]
        if name in self.gated:
            b, owners = _gated(b, order, 0), _gated(owners, order, -1)
        elif layer == "up" and order is not None:
            b, owners = b[order], owners[order]
        b, owners = _filled(b, PANEL_COLUMNS, 0), _filled(owners, PANEL_COLUMNS, -1)
        first = owners.reshape(-1, TILE_COLUMNS).max(1)
        first_ranks = first.clip(0) * np.int32(rank * kind.itemsize)
        return pack_tiles(a), pack_tiles(b), first_ranks


def _of(part: Bits, number: int) -> Bits:
    """Return the matrix of an expert or head, or the shared one."""
    return part[number] if part.ndim == 3 else part


def _matrices(part: Bits) -> int:
    """Return the number of expert or head matrices; 1 for a shared one."""
    return len(part) if part.ndim == 3 else 1


def _meet(pair: PairBits, following: PairBits) -> bool:
    """Return whether two pairs add to outputs of one tile."""
    return (pair.first_output + len(pair.b) - 1) // TILE_COLUMNS == following.first_output // TILE_COLUMNS


def _one_pair(pairs: Sequence[PairBits]) -> PairBits:
    """Merge pairs into one with the concatenated ranks, zero where an output belongs to another pair."""
    begin, end = pairs[0].first_output, pairs[-1].first_output + len(pairs[-1].b)
    a = np.concatenate([pair.a for pair in pairs])
    b, rank = np.zeros((end - begin, len(a)), a.dtype), 0
    for pair in pairs:
        first = pair.first_output - begin
        b[first : first + len(pair.b), rank : rank + len(pair.a)] = pair.b
        rank += len(pair.a)
    return PairBits(begin, a, b)


def padded(count: int, multiple: int) -> int:
    return count + -count % multiple


def _filled(part: npt.NDArray[Any], multiple: int, filler: int) -> npt.NDArray[Any]:
    """Pad an array with rows of ``filler`` to a multiple."""
    after = np.full((-len(part) % multiple, *part.shape[1:]), filler, part.dtype)
    return np.concatenate((part, after)) if len(after) else part


def _gated(part: npt.NDArray[Any], order: npt.NDArray[np.int64] | None, filler: int) -> npt.NDArray[Any]:
    """Interleave the rows of gate and up [2 * inner, ...] as in the packed outputs: 16 of gate, 16 of up, etc."""
    halves = [half if order is None else half[order] for half in np.split(part, 2)]
    tiles = [_filled(half, TILE_COLUMNS, filler).reshape(-1, TILE_COLUMNS, *part.shape[1:]) for half in halves]
    return np.stack(tiles, 1).reshape(-1, *part.shape[1:])
