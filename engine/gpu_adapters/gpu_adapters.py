"""Holds adapters on a GPU: slots of one size in fixed memory, and which rows of a step have one.

    AdapterWeights --pack--> GpuAdapter (on the device) --slot: one copy--> a slot, whose address never changes

CUDA graphs hold the addresses of all slots, so each has room for ``max_rank`` in every layer. The copy into a slot is
queued behind the steps that were launched before it.

Virtual tokens stay on the host, and only steps that have such rows, which run without a graph, copy what they need:
blocks with virtual tokens are nearly always cached. Steps with rows whose adapter has biases, or norms of rows (DoRA),
run without a graph, too: slots have no room for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pillion.engine.adapters.adapter_config import MERGE
from pillion.engine.adapters.adapter_rows import adapted_runs, adapter_shapes, plain_shapes, row_slots
from pillion.engine.adapters.adapter_weights import AdapterWeights, LowRank, VirtualTokens, shard_adapter
from pillion.engine.adapters.plain_adapters import PlainAdapters
from pillion.engine.backends.backend import PackedAdapter, check_slot
from pillion.engine.backends.gpu.device_memory import to_device
from pillion.engine.backends.gpu.gpu_step import HOST_RECORDS, StepShape
from pillion.engine.backends.gpu.pool_parts import PartRows
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError, Internal
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
    """Holds a packed adapter: the contents of a slot, on the device; and its virtual tokens, on the host. ``affine``
    has, by the name of a layer, an output and what the outputs from it on are multiplied by and get, on the device."""

    data: torch.Tensor
    affine: dict[str, list[tuple[int, torch.Tensor]]]
    virtual: VirtualTokens | None = None

    @property
    def nbytes(self) -> int:
        vectors = sum(part.nbytes for parts in self.affine.values() for _, part in parts)
        return self.data.nbytes + vectors + (self.virtual.values.nbytes if self.virtual else 0)


@dataclass(frozen=True, slots=True)
class _VirtualRows:
    """Holds what the rows of one sequence's virtual tokens get: ``values`` [rows, ...] of an adapter, for the step's
    rows ``begin`` to ``end``."""

    kv: bool
    values: torch.Tensor
    begin: int
    end: int


class GpuAdapters(PlainAdapters):
    """Holds the slots of a model's adapters, and the runs of the step that is launched next."""

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
    ) -> None:
        """Makes the slots, for steps of at most so many tokens. ``config`` is that of the whole model; ``inner_values``
        are those of the MLPs that a rank has, None where the process is no rank of several. Raises ConfigError for a
        model whose fused layers the kernels cannot cut into their projections."""
        # An adapter has to fit these shapes, which are those of the whole model and not of a rank's share.
        super().__init__(max_adapters, max_rank, plain_shapes(config))
        self._whole, self._shard, self._inner_values, self._dtype = config, shard, inner_values, dtype
        self._config = config = shard.local(config)
        self._layers: dict[str, LayerSlot] = {}
        rank, end = padded_rank(max_rank), 0
        own = tuple(f"layers.{index}." for index in shard.own_layers(config))
        shapes = {name: shape for name, shape in plain_shapes(config).items() if name.startswith(own)}
        for name, shape in shapes.items():
            outputs, inputs = shape.outputs, shape.inputs
            ends = _ends(config, name, outputs)
            if any(boundary % RUN_ROWS for boundary in ends[:-1]):
                raise ConfigError(
                    f"--enable-lora: the GPU kernels need projections of a multiple of {RUN_ROWS} outputs, but those of"
                    f" {name} end at {', '.join(map(str, ends))}"
                )
            # Both matrices begin at multiples of 16 values, because the padded rank is one.
            layer = LayerSlot(end, end + len(ends) * rank * inputs, inputs, outputs, ends, rank)
            self._layers[name] = layer
            end += layer.values
        self.slots = torch.zeros(max_adapters, end, dtype=dtype, device=device)
        self._shrunk = torch.zeros(max_tokens, MAX_SLICES * rank, dtype=dtype, device=device)
        # A step has runs over the rows of all tokens and over those of the samples; both have room for their runs and
        # the numbers of their rows.
        self._most_runs = self._runs_of(max_tokens)
        words = 2 * (RUN_WORDS * self._most_runs + max_tokens)
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(HOST_RECORDS)
        ]
        self._turn = 0
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._max_tokens = max_tokens
        self._held: list[GpuAdapter | None] = [None] * max_adapters
        # For each slot with an affine that the step uses: its rows, and those of them that are sampled.
        self._scaled: list[tuple[GpuAdapter, torch.Tensor, torch.Tensor]] = []
        self._rows: list[_VirtualRows] = []
        # These are the step's rows in the pool without those of virtual tokens.
        self._others: torch.Tensor | None = None
        self.clear()
        self._compile()

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Lays an adapter out as a slot. Raises ConfigError where it does not fit, or is for experts, their routers or
        gates, which have adapters on CPUs alone."""
        known = adapter_shapes(self._whole)
        beyond = next((name for name in weights.layers if name in known and name not in self._shapes), None)
        if beyond is not None:
            raise ConfigError(
                f"adapter {weights.digest[:12]} changes {beyond}: on GPUs experts, their routers and the gates beside"
                f" them have no adapters yet; serve it with --device cpu, or {MERGE}"
            )
        return super().pack(weights)

    def _pack(self, weights: AdapterWeights) -> GpuAdapter:
        """Lays an adapter, or the share of a rank or stage, out as a slot and copies it to the device; touches nothing
        that steps use."""
        if self._inner_values is not None:
            weights = shard_adapter(weights, self._whole, self._shard, self._inner_values)
        flat = torch.zeros(self.slots.shape[1], dtype=self.slots.dtype)
        layers = {name: pairs for name, pairs in weights.layers.items() if name in self._layers}
        for name, pairs in layers.items():
            self._lay_out(flat, name, pairs)
        device, virtual = self.slots.device, weights.virtual
        if virtual is not None:
            # A layer's keys and values of a run of tokens are one piece of memory.
            values = virtual.values.transpose(0, 1).flatten(2) if virtual.kv else virtual.values
            values = values.contiguous().pin_memory() if device.type == "cuda" else values.contiguous()
            virtual = VirtualTokens(virtual.kv, values)
        affine = {
            name: [(pair.first_output, pair.affine) for pair in pairs if pair.affine is not None]
            for name, pairs in layers.items()
            if any(pair.affine is not None for pair in pairs)
        }
        if device.type != "cuda":
            return GpuAdapter(flat, affine, virtual)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            data = flat.pin_memory().to(device, non_blocking=True)
            affine = {name: [(first, part.to(device)) for first, part in parts] for name, parts in affine.items()}
        stream.synchronize()
        return GpuAdapter(data, affine, virtual)

    def place(self, slot: int, packed: PackedAdapter) -> None:
        """Queues a copy into the slot after the steps that were launched."""
        check_slot(slot, self.max_adapters)
        assert isinstance(packed, GpuAdapter)
        self.slots[slot].copy_(packed.data, non_blocking=True)
        self._held[slot] = packed
        if packed.data.is_cuda:
            # The adapter was allocated on another stream, and its memory may be used again only after this copy, and
            # after steps that read its vectors.
            for part in (packed.data, *(part for parts in packed.affine.values() for _, part in parts)):
                part.record_stream(torch.cuda.current_stream(part.device))

    def check(self, batch: StepBatch) -> None:
        """Raises Internal for a batch with adapter slots that do not exist."""
        row_slots(batch, self.max_adapters)

    def needs_more(self, batch: StepBatch) -> bool:
        """Says whether a step has rows of virtual tokens, or of adapters with an affine; notes what the former get."""
        self._rows, self._others, self._scaled = [], None, []
        if not any(held is not None and (held.virtual or held.affine) for held in self._held):
            return False
        assert batch.adapters is not None
        firsts, affine = batch.positions[batch.query_starts[:-1]], False
        for slot, first, *ends in zip(batch.adapters, firsts, batch.query_starts, batch.query_starts[1:], strict=False):
            held = self._held[slot] if slot >= 0 else None
            affine = affine or (held is not None and bool(held.affine))
            virtual = None if held is None else held.virtual
            tokens = 0 if virtual is None else virtual.values.shape[1 if virtual.kv else 0]
            if virtual is not None and first < tokens:
                count = min(tokens - first, ends[1] - ends[0])
                run = slice(int(first), int(first + count))
                values = virtual.values[:, run] if virtual.kv else virtual.values[run]
                self._rows.append(_VirtualRows(virtual.kv, values, int(ends[0]), int(ends[0] + count)))
        return affine or bool(self._rows)

    def embed(self, residual: torch.Tensor) -> None:
        """Writes the embeddings of virtual tokens into the rows [T, hidden] that have them."""
        for rows in self._rows:
            if not rows.kv:
                residual[rows.begin : rows.end].copy_(rows.values, non_blocking=True)

    def write(self, index: int, rows: torch.Tensor, parts: Sequence[PartRows]) -> torch.Tensor:
        """Writes a layer's keys and values of virtual tokens into their places in the pool. Returns ``rows`` without
        these places."""
        if self._others is None:
            self._others = rows.clone()
            for one in self._rows:
                if one.kv:
                    self._others[one.begin : one.end] = -1
        for one in self._rows:
            if one.kv:
                self._write(index, one.values[index], rows[one.begin : one.end], parts)
        return self._others

    def warm_up(self, rows: torch.Tensor, parts: Sequence[PartRows]) -> None:
        """Compiles the kernels for virtual tokens over a bound pool. ``rows`` is -1."""
        config = self._config
        width = 2 * config.num_kv_heads * config.head_dim
        self._write(0, torch.zeros(1, width, dtype=self._dtype), rows, parts)

    def _write(self, index: int, values: torch.Tensor, rows: torch.Tensor, parts: Sequence[PartRows]) -> None:
        """Writes keys and values of the host [T, 2 * KV heads * head_dim] into a layer of the pool's ``rows`` [T]."""
        config = self._config
        # Kernels take keys and values after queries, which are left as they are without a norm and a rotation.
        qkv = self.slots.new_zeros(len(values), config.num_heads * config.head_dim + values.shape[1])
        qkv[:, -values.shape[1] :].copy_(values, non_blocking=True)
        for part in parts:
            part.write(index, qkv, rows, None, None)

    def clear(self) -> None:
        """Makes the next step one whose rows have no adapters."""
        self._device.fill_(-1)

    def send(self, batch: StepBatch, sample_rows: Int32, shape: StepShape) -> None:
        """Begins the copy of the runs of a step's rows on the current stream. Raises Internal for slots that do not
        exist."""
        slots = row_slots(batch, self.max_adapters)
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % HOST_RECORDS
        record = host.numpy()
        half = len(record) // 2
        for begin, mine, padded in ((0, slots, shape.tokens), (half, slots[sample_rows], shape.samples)):
            rows, runs = adapted_runs(mine, RUN_ROWS)
            if len(runs) > self._runs_of(padded):
                raise Internal(f"{len(runs)} runs of rows with adapters in a step of {padded} rows")
            rows_at = begin + RUN_WORDS * self._most_runs
            record[begin : begin + runs.size] = runs.reshape(-1)
            record[begin + runs.size : begin + RUN_WORDS * self._runs_of(padded)] = -1
            record[rows_at : rows_at + len(rows)] = rows
        self._device.copy_(host, non_blocking=True)
        for slot, held in enumerate(self._held) if shape.more else ():
            if held is not None and held.affine and (slots == slot).any():
                both = [np.flatnonzero(mine == slot) for mine in (slots, slots[sample_rows])]
                all_rows, sampled = (to_device(rows, self.slots.device) for rows in both)
                self._scaled.append((held, all_rows, sampled))

    def add(self, name: str, x: torch.Tensor, out: torch.Tensor, *, sampled: bool) -> None:
        """Adds to a layer's outputs [T, outputs] the products of its inputs [T, inputs] with the rows' adapters.
        ``sampled`` says that the rows are those of the step's samples."""
        for held, *both in self._scaled:
            for first, affine in held.affine.get(name, ()):
                rows, mine = both[sampled], slice(first, first + affine.shape[1])
                found = out[rows, mine].float() * affine[0] + affine[1]
                out[rows, mine] = found.to(out.dtype)
        begin = len(self._device) // 2 if sampled else 0
        rows_at = begin + RUN_WORDS * self._most_runs
        runs = self._device[begin : begin + RUN_WORDS * self._runs_of(len(x))].view(-1, RUN_WORDS)
        record = RunRecord(runs, self._device[rows_at : rows_at + self._max_tokens])
        add_low_rank(x, self.slots, self._layers[name], record, self._shrunk, out)

    def _runs_of(self, rows: int) -> int:
        """Returns the largest number of runs that so many rows can have: each adapter may have one that is not full."""
        return min(rows, rows // RUN_ROWS + self.max_adapters)

    def _lay_out(self, flat: torch.Tensor, name: str, pairs: tuple[LowRank, ...]) -> None:
        """Writes a layer's pairs of matrices into a slot. A pair for several projections is written into each of their
        slices."""
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
        """Runs the kernels of each kind of layer over no rows, which compiles them."""
        seen = set()
        for name, layer in self._layers.items():
            if (layer.inputs, layer.ends) in seen:
                continue
            seen.add((layer.inputs, layer.ends))
            x, out = (self.slots.new_zeros(1, width) for width in (layer.inputs, layer.outputs))
            self.add(name, x, out, sampled=False)


def _ends(config: ModelConfig, name: str, outputs: int) -> tuple[int, ...]:
    """Returns the ends of a fused layer's projections."""
    kind = name.rpartition(".")[2]
    if kind == "qkv":
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return queries, queries + keys, outputs
    return (outputs // 2, outputs) if kind == "gate_up" else (outputs,)
