"""Batches over a packed pool for tests of CPU attention.

A token's query, key and value depend only on its text and position, so different batches can contain the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from pillion.kernels.cpu.attention.attention_rows import AttentionShape
from pillion.kernels.cpu.attention.cpu_attention import Attention, AttentionMerge
from pillion.kernels.cpu.attention.cpu_attention_plan import CpuAttentionPlan
from pillion.kernels.cpu.language.module import KernelSpec
from pillion.kernels.cpu.runtime.program import CpuStepRecord
from pillion.kernels.step import StepBatch
from tests.support.batches import Sequences
from tests.support.cpu_references import reference_attention
from tests.support.eight_bit_kv import dequantized, pack_codes, quantize_rows
from tests.support.kernel_runner import batch_step, padded, stride
from tests.support.plain_pools import pack_pool, unpack_pool

LAYERS, LAYER = 2, 1
KV_HEADS = 2
PARTIAL_ROWS = 256
SPARE_ROWS = 3
# (text, earlier tokens, tokens of this step)
Part = tuple[int, int, int]


class KernelRunner(Protocol):
    """A kernel runner: :class:`tests.support.kernel_runner.Runner`, or the one on emulated ARM."""

    def run(self, spec: KernelSpec, values: dict[str, object], step: CpuStepRecord, threads: int = 3) -> None: ...


def dtype_of(shape: AttentionShape) -> torch.dtype:
    """Type of queries, keys, values and results."""
    return torch.bfloat16 if shape.bf16 else torch.float32


@lru_cache(maxsize=64)
def text_of(text: int, length: int, group: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [length, KV_HEADS, group, head_dim]; keys and values [length, 2, KV_HEADS, head_dim]."""
    generator = torch.Generator().manual_seed(text)
    drawn = torch.randn((length, KV_HEADS * (group + 2), head_dim), generator=generator)
    queries, pairs = drawn.split((KV_HEADS * group, KV_HEADS * 2), 1)
    return queries.unflatten(1, (KV_HEADS, group)), pairs.unflatten(1, (2, KV_HEADS))


def packed(pool: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Return a plain pool in the layout and the type of ``shape``; in 8 bits, rows of NaN have NaN codes and scales."""
    if not shape.codes:
        return pack_pool(pool.to(dtype_of(shape)))
    parts = pool.split((shape.latents, shape.head_dim - shape.latents), -1)[0 if shape.latents else 1 :]
    codes, scales = zip(*(quantize_rows(part, shape.codes) for part in parts), strict=True)
    joined = torch.cat(codes, -1)
    joined.view(torch.uint8)[~pool.isfinite()] = 0x7F
    return pack_codes(joined, torch.stack(scales, -1))


def unpacked(pool: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Return the plain form of a pool."""
    return dequantized(pool, shape.block_size, shape.codes, shape.latents) if shape.codes else unpack_pool(pool)


@dataclass(frozen=True)
class AttentionCase:
    """A batch, its queries [KV_HEADS, rows, group, head_dim], and the packed pool with its texts' K and V."""

    shape: AttentionShape
    batch: StepBatch
    queries: torch.Tensor
    pool: torch.Tensor

    @classmethod
    def of(
        cls, shape: AttentionShape, parts: Sequence[Part], *, stale: float = torch.nan, window: int = 0
    ) -> AttentionCase:
        """Build a case whose unwritten memory is ``stale``, except for V after a sequence's end in its last block.

        With a ``window``, blocks that no row of this step sees are stale as well.
        """
        size = shape.block_size
        slots = sum(-(-(before + now) // size) for _, before, now in parts) + 2
        pool = torch.full((slots, LAYERS, 2, KV_HEADS, size, shape.head_dim), stale)
        # Values that are prefixes of keys are also multiplied by weights of 0.
        cleared = slice(0 if shape.latents else 1, 2)
        sequences = Sequences(slots, size, len(parts))
        numbers = sequences.add(len(parts))
        for number, (_, before, _) in zip(numbers, parts, strict=True):
            sequences.step([(number, [0] * before)])
        batch = sequences.step([(n, [0] * now) for n, (_, _, now) in zip(numbers, parts, strict=True)], extra_blocks=1)
        asked = []
        for table, (text, before, now) in zip(batch.block_tables, parts, strict=True):
            length = before + now
            queries, pairs = text_of(text, length, shape.group, shape.head_dim)
            asked.append(queries[before:])
            lowest = max(0, before + 1 - window) if window else 0
            for block in range(lowest // size, -(-length // size)):
                first = block * size
                rows = pairs[first : first + size].permute(1, 2, 0, 3)
                piece = pool[int(table[block]), LAYER]
                piece[cleared].zero_()
                piece[:, :, : rows.shape[2]] = rows
        rows = torch.cat(asked).transpose(0, 1)
        held = torch.full((KV_HEADS, rows.shape[1] + SPARE_ROWS, shape.group, shape.head_dim), torch.nan)
        held[:, : rows.shape[1]] = rows
        dtype = dtype_of(shape)
        return cls(shape, batch, held.to(dtype), packed(pool, shape))

    def run(
        self,
        runner: KernelRunner,
        plan: CpuAttentionPlan,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        chunked: bool = False,
        selected: torch.Tensor | None = None,
        threads: int = 3,
    ) -> torch.Tensor:
        """Return [T, heads * head_dim] by kernels, to the tokens of ``selected`` [T, groups of 16 bits]."""
        shape = self.shape
        width = KV_HEADS * shape.group * shape.value_dim
        out = padded(torch.full((self.batch.num_tokens, width), torch.nan, dtype=self.queries.dtype))
        partials = torch.full((KV_HEADS, PARTIAL_ROWS, shape.sum_bytes // 4), torch.nan)
        piece_bytes = shape.piece_bytes
        shared = {
            "out": out,
            "partials": partials,
            "out_stride": stride(out),
            "partial_stride": stride(partials),
            "kv_heads": KV_HEADS,
            "window": window,
            "sinks": sinks,
        }
        layer = {
            "queries": self.queries,
            "head_stride": stride(self.queries),
            "layer_offset": LAYER * 2 * KV_HEADS * piece_bytes,
            "slot_bytes": LAYERS * 2 * KV_HEADS * piece_bytes,
            "piece_bytes": piece_bytes,
            "value_offset": 0 if shape.latents else KV_HEADS * piece_bytes,
            "scale": shape.head_dim**-0.5,
            "softcap": softcap,
            "selected": selected,
            "selected_stride": 0 if selected is None else stride(selected),
        }
        step = batch_step(self.batch, self.pool)
        step.point("items", np.ascontiguousarray(plan.items))
        step.count("num_items", len(plan.items))
        step.point("merges", np.ascontiguousarray(plan.merges))
        step.count("num_merges", len(plan.merges))
        kind = window > 0, sinks is not None, chunked
        runner.run(
            Attention(shape, softcap > 0, *kind, sparse=selected is not None), {**shared, **layer}, step, threads
        )
        if len(plan.merges):
            runner.run(AttentionMerge(shape, *kind), shared, step, threads)
        return out[:, :width]

    def reference(
        self, *, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None, chunked: bool = False
    ) -> torch.Tensor:
        """Return the attended rows by torch, in float32."""
        rows = self.queries[:, : self.batch.num_tokens].float()
        shape, pool = self.shape, self.pool
        codes = "" if shape.latents else shape.codes
        if shape.latents:
            plain = unpacked(pool, shape)
            plain[:, :, 1] = plain[:, :, 0]
            pool = pack_pool(plain)
        found = reference_attention(
            rows, pool, LAYER, self.batch, scale=shape.head_dim**-0.5, window=window, softcap=softcap,
            chunked=chunked, sinks=sinks, codes=codes, block_size=shape.block_size,
        )  # fmt: skip
        heads = found.unflatten(1, (-1, shape.head_dim))
        return heads[..., : shape.value_dim].flatten(1)
