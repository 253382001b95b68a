"""Adapters on a GPU: places of one size in fixed memory, and which rows of a step have one.

    AdapterWeights --pack--> GpuAdapter (on the device) --place: one copy--> a place, whose address never changes

CUDA graphs hold the addresses of all places, so each has room for ``max_rank`` in every layer. The copy into a place is
queued behind the steps that were launched before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank
from pillion.engine.backends.backend import adapter_shapes, check_adapter
from pillion.engine.backends.batch import Int32, StepBatch, adapted_runs, row_places
from pillion.engine.backends.gpu.gpu_step import HOST_RECORDS, StepShape
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError, Internal
from pillion.kernels.gpu.products.low_rank_product import (
    MAX_SLICES,
    RUN_ROWS,
    RUN_WORDS,
    LayerPlace,
    RunRecord,
    add_low_rank,
    padded_rank,
)


class AdaptedModel(Protocol):
    """What adapters need of a model on a device."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GpuAdapter:
    """A packed adapter: the contents of a place, on the device."""

    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class GpuAdapters:
    """The places of a model's adapters, and the runs of the step that is launched next."""

    def __init__(self, model: AdaptedModel, max_adapters: int, max_rank: int, max_tokens: int) -> None:
        """Raises ConfigError for a model whose fused layers the kernels cannot cut into their projections."""
        config, device = model.config, model.device
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self._shapes = adapter_shapes(config)
        self._layers: dict[str, LayerPlace] = {}
        rank, end = padded_rank(max_rank), 0
        for name, (outputs, inputs) in self._shapes.items():
            ends = _ends(config, name, outputs)
            if any(boundary % RUN_ROWS for boundary in ends[:-1]):
                raise ConfigError(
                    f"--enable-lora: the GPU kernels need projections of a multiple of {RUN_ROWS} outputs, but those of"
                    f" {name} end at {', '.join(map(str, ends))}"
                )
            # Both matrices begin at multiples of 16 values, because the padded rank is one.
            layer = LayerPlace(end, end + len(ends) * rank * inputs, inputs, outputs, ends, rank)
            self._layers[name] = layer
            end += layer.values
        self.places = torch.zeros(max_adapters, end, dtype=model.dtype, device=device)
        self._shrunk = torch.zeros(max_tokens, MAX_SLICES * rank, dtype=model.dtype, device=device)
        # The rows of all tokens and those of the samples: each its runs, and the numbers of its rows.
        self._most_runs = self._runs_of(max_tokens)
        words = 2 * (RUN_WORDS * self._most_runs + max_tokens)
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(HOST_RECORDS)
        ]
        self._turn = 0
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._max_tokens = max_tokens
        self.clear()
        self._compile()

    def pack(self, weights: AdapterWeights) -> GpuAdapter:
        """Lays an adapter out as a place and copies it to the device; touches nothing that steps use."""
        check_adapter(weights, self._shapes, self.max_rank)
        flat = torch.zeros(self.places.shape[1], dtype=self.places.dtype)
        for name, pairs in weights.layers.items():
            self._lay_out(flat, name, pairs)
        device = self.places.device
        if device.type != "cuda":
            return GpuAdapter(flat)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            data = flat.pin_memory().to(device, non_blocking=True)
        stream.synchronize()
        return GpuAdapter(data)

    def place(self, number: int, packed: GpuAdapter) -> None:
        """Queues the copy into a place."""
        self.places[number].copy_(packed.data, non_blocking=True)
        if packed.data.is_cuda:
            # It was allocated on another stream, and its memory may be used again only behind this copy.
            packed.data.record_stream(torch.cuda.current_stream(packed.data.device))

    def clear(self) -> None:
        """Makes the next step one whose rows have no adapters."""
        self._device.fill_(-1)

    def send(self, batch: StepBatch, sample_rows: Int32, shape: StepShape) -> None:
        """Begins the copy of a step's runs on the current stream. Raises Internal for places that do not exist."""
        places = row_places(batch, self.max_adapters)
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % HOST_RECORDS
        record = host.numpy()
        half = len(record) // 2
        for begin, mine, padded in ((0, places, shape.tokens), (half, places[sample_rows], shape.samples)):
            rows, runs = adapted_runs(mine, RUN_ROWS)
            if len(runs) > self._runs_of(padded):
                raise Internal(f"{len(runs)} runs of rows with adapters in a step of {padded} rows")
            rows_at = begin + RUN_WORDS * self._most_runs
            record[begin : begin + runs.size] = runs.reshape(-1)
            record[begin + runs.size : begin + RUN_WORDS * self._runs_of(padded)] = -1
            record[rows_at : rows_at + len(rows)] = rows
        self._device.copy_(host, non_blocking=True)

    def add(self, name: str, x: torch.Tensor, out: torch.Tensor, *, sampled: bool) -> None:
        """Adds to a layer's outputs [T, outputs] what its rows' adapters make of its inputs [T, inputs]. ``sampled``:
        the rows are those of the step's samples."""
        begin = len(self._device) // 2 if sampled else 0
        rows_at = begin + RUN_WORDS * self._most_runs
        runs = self._device[begin : begin + RUN_WORDS * self._runs_of(len(x))].view(-1, RUN_WORDS)
        record = RunRecord(runs, self._device[rows_at : rows_at + self._max_tokens])
        add_low_rank(x, self.places, self._layers[name], record, self._shrunk, out)

    def _runs_of(self, rows: int) -> int:
        """The most runs of so many rows: each adapter may have one that is not full."""
        return min(rows, rows // RUN_ROWS + self.max_adapters)

    def _lay_out(self, flat: torch.Tensor, name: str, pairs: tuple[LowRank, ...]) -> None:
        """Writes a layer's pairs. A pair of several projections lies in each of their slices."""
        layer, taken = self._layers[name], set()
        a = flat[layer.a_at : layer.b_at].view(len(layer.ends), layer.rank, layer.inputs)
        b = flat[layer.b_at : layer.a_at + layer.values].view(layer.outputs, layer.rank)
        for pair in pairs:
            rank, last = len(pair.a), pair.first_output + len(pair.b)
            for number, end in enumerate(layer.ends):
                begin = layer.ends[number - 1] if number else 0
                if pair.first_output >= end or last <= begin:
                    continue
                if number in taken:
                    raise ConfigError(f"two pairs of matrices in one projection of {name}")
                taken.add(number)
                a[number, :rank] = pair.a
            b[pair.first_output : last, :rank] = pair.b

    def _compile(self) -> None:
        """Runs the kernels of each kind of layer over no rows."""
        seen = set()
        for name, layer in self._layers.items():
            if (layer.inputs, layer.ends) in seen:
                continue
            seen.add((layer.inputs, layer.ends))
            x, out = (self.places.new_zeros(1, width) for width in (layer.inputs, layer.outputs))
            self.add(name, x, out, sampled=False)


def _ends(config: ModelConfig, name: str, outputs: int) -> tuple[int, ...]:
    """The ends of a fused layer's projections."""
    kind = name.rpartition(".")[2]
    if kind == "qkv":
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return queries, queries + keys, outputs
    return (outputs // 2, outputs) if kind == "gate_up" else (outputs,)
