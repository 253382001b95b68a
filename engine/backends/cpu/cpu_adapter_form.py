"""Packs adapters for the CPU kernels. Imports neither torch nor the compiler: a small process does it beside steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pillion.engine.adapters.adapter_forms import LINE_BYTES, Bits, Bytes, Layers, PairBits, line_bytes
from pillion.errors import ConfigError
from pillion.kernels.cpu.products.tiles import (
    DEPTH_MULTIPLE,
    PANEL_COLUMNS,
    RANK_MULTIPLE,
    TILE_COLUMNS,
    pack_tiles,
)

# The most pairs of matrices in a fused layer: those of queries, keys and values.
MAX_PAIRS = 3


@dataclass(frozen=True, slots=True)
class CpuAdapterForm:
    """Packs an adapter as records of its layers, and the bytes that they point into.

    Attributes:
        shapes: (outputs, inputs) of the layers that adapters may change.
        inner_orders: the order of the inner values of an MLP where weights in few bits have changed it, by the prefix
            of the layer's name.
        max_rank: the highest rank of a pair.
        record: the place of each field's word in a record; a pointer is an offset, and its size is in the next word.
        record_words: words of a record.
    """

    shapes: Mapping[str, Sequence[int]]
    inner_orders: Mapping[str, Sequence[int]]
    max_rank: int
    record: Mapping[str, int]
    record_words: int

    @property
    def width(self) -> int:
        """Values of a row of shrunk inputs."""
        return MAX_PAIRS * padded(self.max_rank, RANK_MULTIPLE)

    def depth(self, name: str) -> int:
        """The padded inputs of a layer."""
        return padded(self.shapes[name][1], DEPTH_MULTIPLE)

    def pack(self, layers: Layers) -> tuple[list[Any], Bytes]:
        """Returns a record for each layer, zeros for one without pairs. Raises ConfigError where two pairs share a tile
        of outputs."""
        parts: list[tuple[int, Bits]] = []
        words = np.zeros((len(self.shapes), self.record_words), np.int64)
        end = 0
        for record, name in zip(words, self.shapes, strict=True):
            pairs = layers.get(name)
            if not pairs:
                continue
            a, b, first_ranks = self._packed(name, pairs)
            for field, part in (("a", a), ("b", b), ("first_ranks", first_ranks)):
                at = self.record[field]
                record[at : at + 2] = end, part.nbytes
                parts.append((end, part))
                end += padded(part.nbytes, LINE_BYTES)
            record[self.record["a_tiles"]] = len(a) // (self.depth(name) * TILE_COLUMNS)
            record[self.record["b_steps"]] = b.nbytes // len(first_ranks) // LINE_BYTES
        data = line_bytes(end)
        for begin, part in parts:
            data[begin : begin + part.nbytes] = part.view(np.uint8)
        return words.tolist(), data

    def _packed(self, name: str, pairs: Sequence[PairBits]) -> tuple[Bits, Bits, npt.NDArray[np.int32]]:
        """Tiles of A and of B, and the first rank of each tile of B in bytes."""
        outputs, inputs = self.shapes[name]
        rank = padded(max(len(pair.a) for pair in pairs), RANK_MULTIPLE)
        total = len(pairs) * rank
        if total > self.width:
            raise ConfigError(f"{len(pairs)} pairs of matrices in {name} are more than adapters can have there")
        kind = pairs[0].a.dtype
        a = np.zeros((padded(total, TILE_COLUMNS), self.depth(name)), kind)
        b, owners = np.zeros((outputs, rank), kind), np.full(outputs, -1, np.int32)
        for number, pair in enumerate(pairs):
            a[number * rank : number * rank + len(pair.a), :inputs] = pair.a
            rows = slice(pair.first_output, pair.first_output + len(pair.b))
            b[rows, : pair.b.shape[1]] = pair.b
            owners[rows] = number
        prefix, _, layer = name.rpartition(".")
        found = self.inner_orders.get(prefix)
        order = None if found is None else np.array(found)
        if layer == "down" and order is not None:
            a[:, :inputs] = a[:, order]
        if layer == "gate_up":
            b, owners = _gated(b, order, 0), _gated(owners, order, -1)
        b, owners = _filled(b, PANEL_COLUMNS, 0), _filled(owners, PANEL_COLUMNS, -1)
        tiles = owners.reshape(-1, TILE_COLUMNS)
        first = tiles.max(1)
        if ((tiles != first[:, None]) & (tiles >= 0)).any():
            raise ConfigError(f"two pairs of matrices in {name} meet within {TILE_COLUMNS} outputs")
        # A tile without a pair has only zeros, whichever ranks it meets.
        first_ranks = first.clip(0) * np.int32(rank * kind.itemsize)
        return pack_tiles(a), pack_tiles(b), first_ranks


def padded(count: int, multiple: int) -> int:
    """``count`` rounded up to a multiple."""
    return count + -count % multiple


def _filled(part: npt.NDArray[Any], multiple: int, filler: int) -> npt.NDArray[Any]:
    """More rows of ``filler``, up to a multiple."""
    behind = np.full((-len(part) % multiple, *part.shape[1:]), filler, part.dtype)
    return np.concatenate((part, behind)) if len(behind) else part


def _gated(part: npt.NDArray[Any], order: npt.NDArray[np.int64] | None, filler: int) -> npt.NDArray[Any]:
    """Gate's and up's values [2 * inner, ...] in the order of the packed outputs: 16 of the one, 16 of the other."""
    halves = [half if order is None else half[order] for half in np.split(part, 2)]
    tiles = [_filled(half, TILE_COLUMNS, filler).reshape(-1, TILE_COLUMNS, *part.shape[1:]) for half in halves]
    return np.stack(tiles, 1).reshape(-1, *part.shape[1:])
