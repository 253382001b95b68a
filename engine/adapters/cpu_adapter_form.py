"""Packing of adapters for the CPU kernels. Imports neither torch nor the compiler, for use in a small process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.engine.adapters.adapter_forms import Bits, Bytes, Layers, PairBits, line_bytes
from pillion.engine.adapters.adapter_rows import product_pairs
from pillion.errors import ConfigError
from pillion.host.core_lending_table import LINE_BYTES
from pillion.kernels.cpu.adapters.adapter_tiles import RANK_MULTIPLE, pack_tiles
from pillion.kernels.cpu.products.tiles import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS

# Max LoRA pairs (A, B): per fused projection (queries, keys, values and gates), and per expert (gate and up).
MAX_PAIRS = 4
MAX_EXPERT_PAIRS = 2


@dataclass(frozen=True, slots=True)
class CpuAdapterForm:
    """Packer of adapters for the CPU kernels: a record per layer, and bytes that the records point into.

    Attributes:
        shapes: (outputs, inputs, matrices) of each product that adapters may change, by name; ``matrices`` is the
            number of experts or heads, 0 for a single matrix.
        heads: a head's outputs for keys and for values, by name of a layer with a matrix per head.
        gated: names of layers that compute gate and up, whose outputs alternate in the packed order.
        inner_orders: by prefix of the layer's name, the order of an MLP's inner values, or one order per expert, if
            quantized weights reorder them.
        max_rank: max rank of a pair.
        record: index of each field's word in a record. A pointer is an offset into the bytes, followed by its size.
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
        """Return the number of values of a row's product with A at the max rank."""
        if heads:
            return heads * padded(self.max_rank, TILE_COLUMNS)
        return (MAX_EXPERT_PAIRS if experts else MAX_PAIRS) * padded(self.max_rank, RANK_MULTIPLE)

    def depth(self, name: str) -> int:
        """Return a layer's number of inputs, padded to a multiple of DEPTH_MULTIPLE."""
        return padded(self.shapes[name][1], DEPTH_MULTIPLE)

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Pack an adapter into a record per product, all zero for one without pairs. Raises ConfigError for too many
        pairs in a layer."""
        layers = product_pairs(layers, self.heads)
        arrays: list[tuple[int, Bits]] = []
        words = np.zeros((len(self.shapes), self.record_words), np.int64)
        end = 0
        for record, name in zip(words, self.shapes, strict=True):
            pairs = layers.get(name)
            if not pairs:
                continue
            a, b, first_ranks = self._packed_layer(name, pairs)
            for field, array in (("a", a), ("b", b), ("first_ranks", first_ranks)):
                word = self.record[field]
                record[word : word + 2] = end, array.nbytes
                arrays.append((end, array))
                end += padded(array.nbytes, LINE_BYTES)
            a_count, b_count = map(_matrices, (pairs[0].a, pairs[0].b))
            record[self.record["a_tiles"]] = len(a) // (self.depth(name) * TILE_COLUMNS * a_count)
            record[self.record["b_steps"]] = b.nbytes // len(first_ranks) // LINE_BYTES
            record[self.record["a_stride"]] = a.nbytes // a_count if a_count > 1 else 0
            record[self.record["b_stride"]] = b.nbytes // b_count if b_count > 1 else 0
        data = line_bytes(end)
        for begin, array in arrays:
            data[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        return words.tolist(), data

    def _packed_layer(self, name: str, pairs: Sequence[PairBits]) -> tuple[Bits, Bits, npt.NDArray[np.int32]]:
        """Pack the pairs of one product, the results of :meth:`_packed` concatenated over experts or heads. A matrix
        shared by all heads is packed once."""
        order = self.inner_orders.get(name.rpartition(".")[0])
        inner = None if order is None else np.array(order)
        if not self.shapes[name][2]:
            return self._packed(name, pairs, inner)
        packed = [
            self._packed(
                name,
                [replace(pair, a=_matrix(pair.a, number), b=_matrix(pair.b, number)) for pair in pairs],
                None if inner is None else inner[number],
            )
            for number in range(self.shapes[name][2])
        ]
        a, b, first_ranks = zip(*packed, strict=True)
        a_count, b_count = map(_matrices, (pairs[0].a, pairs[0].b))
        return np.concatenate(a[:a_count]), np.concatenate(b[:b_count]), np.concatenate(first_ranks[:b_count])

    def _packed(
        self, name: str, pairs: Sequence[PairBits], order: npt.NDArray[np.int64] | None
    ) -> tuple[Bits, Bits, npt.NDArray[np.int32]]:
        """Pack the pairs of one matrix; ``order`` reorders its inner values. Return the tiles of A, the tiles of B, and
        for each tile of B the byte offset of its first rank in a row's product with A."""
        outputs, inputs, experts = self.shapes[name]
        if name not in self.gated and any(_share_tile(*adjacent) for adjacent in pairwise(pairs)):
            # A tile of outputs can only use the ranks of one pair.
            pairs = (_merge(pairs),)
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
        b, owners = _pad_rows(b, PANEL_COLUMNS, 0), _pad_rows(owners, PANEL_COLUMNS, -1)
        tile_owners = owners.reshape(-1, TILE_COLUMNS).max(1)
        first_ranks = tile_owners.clip(0) * np.int32(rank * kind.itemsize)
        return pack_tiles(a), pack_tiles(b), first_ranks


def _matrix(matrices: Bits, number: int) -> Bits:
    """Return the matrix of expert or head ``number``; ``matrices`` has one per expert or head, or is a shared one."""
    return matrices[number] if matrices.ndim == 3 else matrices


def _matrices(matrices: Bits) -> int:
    """Return the number of matrices: one per expert or head, or 1 for a shared one."""
    return len(matrices) if matrices.ndim == 3 else 1


def _share_tile(pair: PairBits, following: PairBits) -> bool:
    """Return whether the last outputs of a pair are in the same tile as the first outputs of the following pair."""
    return (pair.first_output + len(pair.b) - 1) // TILE_COLUMNS == following.first_output // TILE_COLUMNS


def _merge(pairs: Sequence[PairBits]) -> PairBits:
    """Merge pairs into one with their ranks concatenated; B is zero between an output and the ranks of another pair."""
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


def _pad_rows(rows: npt.NDArray[Any], multiple: int, filler: int) -> npt.NDArray[Any]:
    """Pad an array with rows of ``filler`` to a multiple of ``multiple`` rows."""
    padding = np.full((-len(rows) % multiple, *rows.shape[1:]), filler, rows.dtype)
    return np.concatenate((rows, padding)) if len(padding) else rows


def _gated(rows: npt.NDArray[Any], order: npt.NDArray[np.int64] | None, filler: int) -> npt.NDArray[Any]:
    """Interleave the rows of gate and up [2 * inner, ...] as in the packed outputs: TILE_COLUMNS of gate, as many of
    up, etc. ``order`` reorders both; each is padded with ``filler``."""
    halves = [half if order is None else half[order] for half in np.split(rows, 2)]
    tiles = [_pad_rows(half, TILE_COLUMNS, filler).reshape(-1, TILE_COLUMNS, *rows.shape[1:]) for half in halves]
    return np.stack(tiles, 1).reshape(-1, *rows.shape[1:])
