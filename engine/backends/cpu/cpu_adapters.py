"""Adapters for the CPU kernels: packed in any thread, placed by writing a few addresses into a table.

    AdapterWeights --pack--> CpuAdapter (its own memory) --place--> the table that kernels read --> a step's arrays

A place holds no memory of its own: an adapter takes what its rank needs, and ``max_adapters`` of them bound it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.backends.batch import Int32, StepBatch, adapted_runs, row_places
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.records import Words
from pillion.kernels.cpu.products.low_rank import PLACE, RANK_MULTIPLE, pack_tiles
from pillion.kernels.cpu.products.packing import DEPTH_MULTIPLE, PANEL_COLUMNS, TILE_COLUMNS, in_turn
from pillion.kernels.cpu.runtime.program import CpuStepRecord

# The most pairs of matrices in a fused layer: those of queries, keys and values.
MAX_PAIRS = 3
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """A packed adapter: ``words`` [layers, PLACE.num_words] are its records, which point into ``data``."""

    words: Words
    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class AdapterTable:
    """The places of adapters, and how an adapter is packed for a model.

    Attributes:
        places: for each layer that adapters may change, int64 [max_adapters, PLACE.num_words]: what is in each place.
        width: values of a row of shrunk inputs.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        inner_orders: Mapping[str, torch.Tensor],
        max_adapters: int,
        max_rank: int,
        *,
        bf16: bool,
    ) -> None:
        """``shapes``: (outputs, inputs) of the layers. ``inner_orders``: the order of the inner values of an MLP where
        weights in few bits have changed it, by the prefix of the layer's name."""
        self._shapes, self._inner_orders, self._kind = shapes, inner_orders, "bf16" if bf16 else "fp32"
        self._words = np.zeros((len(shapes), max_adapters, PLACE.num_words), np.int64)
        self.places = dict(zip(shapes, self._words, strict=True))
        self.width = MAX_PAIRS * (max_rank + -max_rank % RANK_MULTIPLE)

    def pack(self, weights: AdapterWeights) -> CpuAdapter:
        """Packs an adapter that fits the model. Raises ConfigError where two pairs share a tile of outputs."""
        parts: list[torch.Tensor] = []
        words = np.zeros((len(self._shapes), PLACE.num_words), np.int64)
        end = 0
        for record, name in zip(words, self._shapes, strict=True):
            pairs = weights.layers.get(name)
            if not pairs:
                continue
            a, b, first_ranks = self._packed(name, pairs)
            sizes = []
            for part in (a, b, first_ranks):
                flat = part.view(torch.uint8)
                parts.append(torch.nn.functional.pad(flat, (0, -len(flat) % _LINE_BYTES)))
                sizes.append((end, len(flat)))
                end += len(parts[-1])
            tiles = len(first_ranks)
            steps = b.nbytes // tiles // _LINE_BYTES
            a_tiles = a.nbytes // (self.depth(name) * TILE_COLUMNS * a.element_size())
            values = {**dict(zip(PLACE.pointers, sizes, strict=True)), "a_tiles": a_tiles, "b_steps": steps}
            PLACE.fill(record, values)
        data = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
        for field in PLACE.pointers:
            # Records had offsets so far; records without sizes stay zero.
            place = PLACE.place[field]
            words[:, place] += np.where(words[:, place + 1] > 0, data.data_ptr(), 0)
        return CpuAdapter(words, data)

    def place(self, number: int, packed: CpuAdapter | None) -> None:
        """Writes a place."""
        self._words[:, number] = 0 if packed is None else packed.words

    def depth(self, name: str) -> int:
        """The padded inputs of a layer."""
        inputs = self._shapes[name][1]
        return inputs + -inputs % DEPTH_MULTIPLE

    def _packed(self, name: str, pairs: Sequence[LowRank]) -> tuple[torch.Tensor, ...]:
        """Tiles of A and of B, and the first rank of each tile of B."""
        outputs, inputs = self._shapes[name]
        rank = max(len(pair.a) for pair in pairs)
        rank += -rank % RANK_MULTIPLE
        if len(pairs) * rank > self.width:
            raise ConfigError(f"{len(pairs)} pairs of matrices in {name} are more than adapters can have there")
        total = len(pairs) * rank
        a = torch.zeros(total + -total % TILE_COLUMNS, self.depth(name))
        b, owners = torch.zeros(outputs, rank), torch.full((outputs,), -1)
        for number, pair in enumerate(pairs):
            a[number * rank : number * rank + len(pair.a), :inputs] = pair.a
            rows = slice(pair.first_output, pair.first_output + len(pair.b))
            b[rows, : pair.b.shape[1]] = pair.b
            owners[rows] = number
        prefix, _, kind = name.rpartition(".")
        order = self._inner_orders.get(prefix)
        if kind == "down" and order is not None:
            a[:, :inputs] = a[:, order]
        if kind == "gate_up":
            b, owners = (_gated(part, order, filler) for part, filler in ((b, 0.0), (owners, -1)))
        b = torch.nn.functional.pad(b, (0, 0, 0, -len(b) % PANEL_COLUMNS))
        tiles = torch.nn.functional.pad(owners, (0, -len(owners) % PANEL_COLUMNS), value=-1).view(-1, TILE_COLUMNS)
        first = tiles.amax(1)
        if ((tiles != first[:, None]) & (tiles >= 0)).any():
            raise ConfigError(f"two pairs of matrices in {name} meet within {TILE_COLUMNS} outputs")
        size = 2 if self._kind == "bf16" else 4
        # A tile without a pair has only zeros, whichever ranks it meets.
        first_ranks = (first.clamp(min=0) * rank * size).to(torch.int32)
        return pack_tiles(a, self._kind), pack_tiles(b, self._kind), first_ranks


def _gated(part: torch.Tensor, order: torch.Tensor | None, filler: float) -> torch.Tensor:
    """Gate's and up's values [2 * inner, ...] in the order of the packed outputs."""
    halves = [half if order is None else half[order] for half in part.chunk(2)]
    missing = [half.new_full((-len(half) % TILE_COLUMNS, *half.shape[1:]), filler) for half in halves]
    return in_turn(*(torch.cat(both) for both in zip(halves, missing, strict=True)))


class AdapterRows:
    """Fills a step's record with the rows that have adapters. ``most_rows``: the most rows of a run."""

    def __init__(self, max_adapters: int, most_rows: int) -> None:
        self._max_adapters, self._most_rows = max_adapters, most_rows

    def fill(self, step: CpuStepRecord, batch: StepBatch, sample_rows: Int32) -> None:
        """``sample_rows``: the rows whose logits the step computes. Raises Internal for places that do not exist."""
        places = row_places(batch, self._max_adapters)
        used = np.unique(places)
        self._fill(step, "tokens", places)
        self._fill(step, "samples", places[sample_rows])
        used = used[used >= 0]
        step.point("used_places", used)
        step.count("num_used_places", len(used))

    def _fill(self, step: CpuStepRecord, name: str, places: Int32) -> None:
        rows, runs = adapted_runs(places, self._most_rows)
        step.point(f"{name}_places", places)
        step.point(f"{name}_adapted", rows)
        step.point(f"{name}_runs", runs)
        step.count(f"num_{name}_runs", len(runs))
