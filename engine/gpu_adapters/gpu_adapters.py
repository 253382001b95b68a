"""Adapters on a GPU: slots of equal size at fixed addresses, and a step's rows with adapters.

    AdapterWeights --pack--> GpuAdapter (on the device) --slot: one copy--> a slot, whose address never changes

CUDA graphs capture the addresses of all slots, so each has memory for ``max_rank`` in every layer and every expert that
adapters may change (--lora-target-modules). Matrices of routers and gates are float32, in separate slots. The copy to a
slot is queued behind the launched steps; afterwards the adapter's own device memory is freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from pillion.engine.adapters.adapter_rows import (
    LayerShape,
    adapted_runs,
    adapter_shapes,
    product_pairs,
    product_shapes,
    row_slots,
)
from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank, shard_adapter
from pillion.engine.adapters.plain_adapters import PlainAdapters
from pillion.engine.backends.backend import PackedAdapter, check_slot
from pillion.engine.backends.gpu.gpu_step import HOST_RECORDS, StepShape
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_operations import MAX_MIXED_ROWS, Experts, LayerTensor
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError, Internal
from pillion.kernels.gpu.experts.expert_adapters import PairAdapters
from pillion.kernels.gpu.products.low_rank_product import (
    MAX_SLICES,
    RUN_ROWS,
    RUN_WORDS,
    LayerSlot,
    RunRecord,
    add_low_rank,
    padded_rank,
)
from pillion.kernels.step import Int32, StepBatch


@dataclass(frozen=True, slots=True)
class GpuAdapter:
    """A packed adapter: the contents of its slots, in the model's type and in float32; on the device if memory
    allows."""

    data: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.data)


class GpuAdapters(PlainAdapters):
    """Adapter slots of a model, and the next step's runs of rows with the same adapter. ``slots``: two tensors
    [adapters, values], in the model's type and in float32."""

    def __init__(
        self,
        config: ModelConfig,
        shard: ModelShard,
        inner_values: Mapping[str, torch.Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
        max_adapters: int,
        max_rank: int,
        max_tokens: int,
        targets: Sequence[str] = (),
    ) -> None:
        """Allocate the slots, for steps of up to ``max_tokens``. ``config``: of the whole model; ``inner_values``: by
        layer, indices of the rank's inner values of the MLP, None without tensor parallelism. Raises ConfigError if the
        kernels cannot split a fused layer into projections, or memory is short."""
        super().__init__(max_adapters, max_rank, adapter_shapes(config, targets))
        self._whole, self._shard, self._inner_values, self._dtype = config, shard, inner_values, dtype
        self._config = config = shard.local(config)
        self._max_tokens, self._rank = max_tokens, padded_rank(max_rank)
        own = tuple(f"layers.{index}." for index in shard.own_layers(config))
        shapes = adapter_shapes(config, targets)
        shapes = {name: shape for name, shape in shapes.items() if name.startswith(own)}
        self._by_heads = {name: shape.by_head for name, shape in shapes.items() if shape.by_head is not None}
        self._lay_slots(product_shapes(shapes), device)
        mixtures = {
            f"layers.{index}.{how.router.name}": how
            for index, layer in enumerate(layers_of(config))
            for how in layer
            if isinstance(how, Experts)
        }
        self._routers = mixtures.keys()
        self._allocate_buffers(list(mixtures.values()))
        sizes = RUN_WORDS * self._max_runs(max_tokens), max_tokens, max_tokens
        # Runs, row indices and row slots are aligned to the 16 bytes that kernels need.
        ends = [0, *accumulate(-(-size // 4) * 4 for size in sizes)]
        self._offsets = ends[:-1]
        words = 2 * ends[-1]
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(HOST_RECORDS)
        ]
        self._turn = 0
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._stream: torch.cuda.Stream | None = None
        self.clear()
        self._compile()

    def _pack(self, weights: AdapterWeights) -> GpuAdapter:
        """Lay out an adapter, or this process's shard of it, like a slot and copy it to the device, without touching
        memory that steps use."""
        if self._inner_values is not None:
            weights = shard_adapter(weights, self._whole, self._shard, self._inner_values)
        flats = tuple(torch.zeros(slots.shape[1], dtype=slots.dtype) for slots in self.slots)
        for name, pairs in product_pairs(weights.layers, self._by_heads).items():
            if name in self._layers:
                self._lay_out(flats[self._layers[name].exact], name, pairs)
        device = self._device.device
        if device.type != "cuda":
            return GpuAdapter(flats)
        if self._stream is None:
            # One stream for all adapters, because torch caches freed memory per stream.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream, data = self._stream, tuple(flat.pin_memory() for flat in flats)
        # On OOM, which large adapters of experts may cause, the adapter stays on the host until it is placed.
        with torch.cuda.stream(stream), contextlib.suppress(torch.OutOfMemoryError):
            data = tuple(flat.to(device, non_blocking=True) for flat in data)
        stream.synchronize()
        return GpuAdapter(data)

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Queue a copy into the slot behind the launched steps."""
        check_slot(slot, self.max_adapters)
        assert isinstance(packed, GpuAdapter)
        for slots, data in zip(self.slots, packed.data, strict=True):
            slots[slot].copy_(data, non_blocking=True)
        if self._device.is_cuda:
            # The memory was allocated on another stream: keep it until this copy is done.
            for part in packed.data:
                if part.is_cuda:
                    part.record_stream(torch.cuda.current_stream(part.device))

    def check(self, batch: StepBatch) -> None:
        """Raise Internal for a batch with unknown adapter slots."""
        row_slots(batch, self.max_adapters)

    def clear(self) -> None:
        """Remove adapters from the rows of the next step."""
        self._device.fill_(-1)

    def send(self, batch: StepBatch, sample_rows: Int32, shape: StepShape) -> None:
        """Queue the copy of the runs of a step's rows on the current stream. Raises Internal for unknown slots."""
        slots = row_slots(batch, self.max_adapters)
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % HOST_RECORDS
        record = host.numpy()
        half = len(record) // 2
        for begin, row_slot, padded in ((0, slots, shape.tokens), (half, slots[sample_rows], shape.samples)):
            rows, runs = adapted_runs(row_slot, RUN_ROWS)
            if len(runs) > self._max_runs(padded):
                raise Internal(f"{len(runs)} runs of rows with adapters in a step of {padded} rows")
            runs_at, rows_at, slots_at = (begin + offset for offset in self._offsets)
            record[runs_at : runs_at + runs.size] = runs.reshape(-1)
            record[runs_at + runs.size : runs_at + RUN_WORDS * self._max_runs(padded)] = -1
            record[rows_at : rows_at + len(rows)] = rows
            record[slots_at : slots_at + len(row_slot)] = row_slot
            record[slots_at + len(row_slot) : slots_at + padded] = -1
        self._device.copy_(host, non_blocking=True)

    def add(self, name: str, x: torch.Tensor, out: torch.Tensor, *, sampled: bool) -> None:
        """Add the products of a layer's inputs ``x`` [T, inputs] with the rows' adapters to its outputs [T, outputs];
        in a layer with a matrix per head, both are [T, heads, ...]. ``sampled``: rows are the step's sampled rows."""
        if name not in self._layers:
            return
        layer, (runs_at, rows_at, _) = self._layers[name], self._offsets_in_record(sampled=sampled)
        runs = self._device[runs_at : runs_at + RUN_WORDS * self._max_runs(len(x))].view(-1, RUN_WORDS)
        record = RunRecord(runs, self._device[rows_at : rows_at + self._max_tokens])
        add_low_rank(x, self.slots[layer.exact], layer, record, self._shrunk[layer.exact], out)

    def routed(self, name: str, x: torch.Tensor, *, sampled: bool) -> torch.Tensor | None:
        """Return the adapters' part of a router's logits [T, experts], float32, for inputs [T, inputs]; None if
        adapters may not change the router. The next call overwrites the result."""
        if name not in self._layers:
            return None
        outputs = self._layers[name].outputs
        out = self._routed[: len(x) * outputs].view(-1, outputs).zero_()
        self.add(name, x, out, sampled=sampled)
        return out

    def of_pairs(self, name: str, first: int, per_token: int, *, sampled: bool) -> PairAdapters | None:
        """Return the adapters of pairs of a row and an expert, for products of a layer's experts; None if adapters may
        not change these. Pairs begin with row ``first`` of the step, ``per_token`` per row."""
        if name not in self._layers:
            return None
        layer, (_, _, slots_at) = self._layers[name], self._offsets_in_record(sampled=sampled)
        rows = self._device[slots_at + first : slots_at + self._max_tokens]
        ranks = len(layer.ends) * layer.rank
        pairs = self._pairs[: len(self._pairs) // ranks * ranks].view(-1, ranks)
        return PairAdapters(self.slots[0], layer, rows, per_token, pairs)

    def _offsets_in_record(self, *, sampled: bool) -> tuple[int, ...]:
        """Return the offsets of runs, row indices and row slots in the record, whose second half is for sampled
        rows."""
        return tuple(offset + (len(self._device) // 2 if sampled else 0) for offset in self._offsets)

    def _max_runs(self, rows: int) -> int:
        """Return the max number of runs of ``rows`` rows; each adapter may have one that is not full."""
        return min(rows, rows // RUN_ROWS + self.max_adapters)

    def _lay_out(self, flat: torch.Tensor, name: str, pairs: Sequence[LowRank]) -> None:
        """Write a layer's (A, B) pairs to a slot. The A of a pair for several projections is written to the slice of
        each."""
        layer, written = self._layers[name], set()
        a = flat[layer.a_at : layer.b_at].view(-1, len(layer.ends), layer.rank, layer.inputs)
        b = flat[layer.b_at : layer.a_at + layer.values].view(-1, layer.outputs, layer.rank)
        for index, pair in enumerate(pairs):
            rank, last = pair.a.shape[-2], pair.first_output + pair.b.shape[-2]
            if layer.rank > self._rank:
                begin = index * self._rank
                a[:, 0, begin : begin + rank] = pair.a
                b[:, pair.first_output : last, begin : begin + rank] = pair.b
                continue
            for number, end in enumerate(layer.ends):
                begin = layer.ends[number - 1] if number else 0
                if pair.first_output >= end or last <= begin:
                    continue
                if number in written:
                    raise ConfigError(f"two pairs of matrices in one projection of {name}")
                written.add(number)
                a[:, number, :rank] = pair.a
            b[:, pair.first_output : last, :rank] = pair.b

    def _compile(self) -> None:
        """Compile the kernels of each kind of layer, except experts, by running them without adapted rows."""
        compiled = set()
        for name, layer in self._layers.items():
            key = layer.inputs, layer.ends, layer.rank, layer.exact, layer.heads, name in self._routers
            if layer.experts or key in compiled:
                continue
            compiled.add(key)
            heads = (layer.heads,) if layer.heads else ()
            x, out = (self.slots[0].new_zeros(1, *heads, width) for width in (layer.inputs, layer.outputs))
            for sampled in (False, True):
                if name in self._routers:
                    self.routed(name, x, sampled=sampled)
                else:
                    self.add(name, x, out, sampled=sampled)

    def _lay_slots(self, shapes: Mapping[str, LayerShape], device: torch.device) -> None:
        """Place the layers in a slot, and allocate the slots. Raises ConfigError on OOM."""
        self._layers: dict[str, LayerSlot] = {}
        sizes = [0, 0]
        for name, shape in shapes.items():
            ends, rank = shape.ends, self._rank
            if not shape.experts and any(boundary % RUN_ROWS for boundary in ends[:-1]):
                # Tiles would span projections, so all projections share one slice with the ranks of all.
                ends, rank = (shape.outputs,), padded_rank(len(ends) * self._rank)
            experts, begin = len(self._shard.experts(shape.experts)), sizes[shape.exact]
            heads = shape.heads
            shares_b = heads > 0 and name.endswith(".keys")
            layer = LayerSlot(begin, 0, shape.inputs, shape.outputs, ends, rank, experts, shape.exact, heads, shares_b)
            layer = replace(layer, b_at=begin + layer.a_values)
            self._layers[name] = layer
            sizes[shape.exact] += layer.values
        try:
            self.slots = tuple(
                torch.zeros(self.max_adapters, size, dtype=dtype, device=device)
                for size, dtype in zip(sizes, (self._dtype, torch.float32), strict=True)
            )
        except torch.OutOfMemoryError:
            gib = (sizes[0] * self._dtype.itemsize + sizes[1] * 4) / 2**30
            raise ConfigError(
                f"--enable-lora: {self.max_adapters} adapters of {gib:.1f} GiB each do not fit beside the model: lower"
                " --max-loras or --max-lora-rank, or name fewer layers by --lora-target-modules"
            ) from None

    def _allocate_buffers(self, mixtures: Sequence[Experts]) -> None:
        """Allocate the buffers of a step: products with A in both types, router logits, and products of pairs with
        A."""
        tokens, ranks = self._max_tokens, MAX_SLICES * self._rank
        heads = max((layer.heads for layer in self._layers.values()), default=0)
        shared = int(self._config.moe is not None and self._config.moe.shared > 0)
        pairs = min(tokens, MAX_MIXED_ROWS) * max((how.per_token + shared for how in mixtures), default=0)
        routed = tokens * max((how.router.shape[0] for how in mixtures), default=0)
        self._shrunk = tuple(
            slots.new_zeros(tokens if slots.shape[1] else 0, max(ranks, heads * self._rank)) for slots in self.slots
        )
        self._routed = self.slots[1].new_zeros(routed)
        self._pairs = self.slots[0].new_zeros(pairs * ranks)


class MixtureAdapters(NamedTuple):
    """Adapters of one mixture of experts. ``layer``: prefix of its tensors' names; ``sampled``: rows are the step's
    sampled rows."""

    adapters: GpuAdapters
    layer: str
    sampled: bool

    def routed(self, tensor: LayerTensor, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the adapters' part of a router's logits, as :meth:`GpuAdapters.routed`."""
        return self.adapters.routed(self.layer + tensor.name, rows, sampled=self.sampled)

    def of_pairs(self, tensor: LayerTensor, first: int, per_token: int) -> PairAdapters | None:
        """Return the adapters of pairs, as :meth:`GpuAdapters.of_pairs`."""
        return self.adapters.of_pairs(self.layer + tensor.name, first, per_token, sampled=self.sampled)
