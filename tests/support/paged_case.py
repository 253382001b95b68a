"""Batches over a paged pool for tests of GPU attention.

Memory that no row of a step may read is NaN: slots outside of the block tables, other layers, and the unwritten rows of
a sequence's last block.
"""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lab.testbed.attention_reference import paged_attention
from pillion.kernels.gpu.attention.gpu_attention_plan import GpuAttentionPlan
from pillion.kernels.gpu.attention.paged_attention import PagedAttention, piece_size
from pillion.kernels.step import StepBatch
from tests.support.batches import Sequences

LAYERS, LAYER = 2, 1
KV_HEADS = 2
SPARE_ROWS = 3
UNTOUCHED = 77.0
NAN_CODE = 0x7F
FLOAT8_LARGEST = 448.0


@dataclass(frozen=True)
class PagedShape:
    """A model's attention shape."""

    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    softcap: float = 0.0
    window: int = 0  # Below 0: of chunks of positions.
    sinks: bool = False

    @property
    def sink_scores(self) -> torch.Tensor | None:
        """Return scores below and above those of the tokens, one per head."""
        return torch.linspace(-3.0, 6.0, self.heads) if self.sinks else None

    @property
    def heads(self) -> int:
        return KV_HEADS * self.group


@dataclass(frozen=True)
class PagedCase:
    """A batch of (earlier tokens, tokens of this step), and its pool's contents, plain and in the kernels' format."""

    shape: PagedShape
    batch: StepBatch
    queries: torch.Tensor
    plain: torch.Tensor
    pool: torch.Tensor

    @classmethod
    def of(cls, shape: PagedShape, parts: Sequence[tuple[int, int]], *, fp8: bool = False) -> PagedCase:
        size, generator = shape.block_size, torch.Generator().manual_seed(len(parts))
        slots = sum(-(-(before + now) // size) for before, now in parts) + 2
        sequences = Sequences(slots, size, len(parts))
        numbers = sequences.add(len(parts))
        for number, (before, _) in zip(numbers, parts, strict=True):
            sequences.step([(number, [0] * before)])
        batch = sequences.step([(n, [0] * now) for n, (_, now) in zip(numbers, parts, strict=True)])
        plain = torch.full((slots, LAYERS, 2, KV_HEADS, size, shape.head_dim), torch.nan)
        for table, context in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
            for position in range(context):
                row = torch.randn((2, KV_HEADS, shape.head_dim), generator=generator)
                plain[int(table[position // size]), LAYER, :, :, position % size] = row
        pool = plain = plain.to(shape.dtype)
        if fp8:
            plain, pool = _quantized(plain)
        fused = torch.randn((batch.num_tokens + SPARE_ROWS, shape.heads + 2, shape.head_dim), generator=generator)
        queries = fused.to(shape.dtype)[:, : shape.heads]
        return cls(shape, batch, queries.to(DEVICE), plain, pool.to(DEVICE))

    def attention(self, **more: object) -> PagedAttention:
        """Create the attention of this case's pool, with limits that just fit the batch; ``more`` overrides."""
        shape, batch = self.shape, self.batch
        options = {
            "pool": self.pool,
            "dtype": shape.dtype,
            "num_heads": shape.heads,
            "num_kv_heads": KV_HEADS,
            "head_dim": shape.head_dim,
            "block_size": shape.block_size,
            "num_layers": LAYERS,
            "scale": shape.head_dim**-0.5,
            "kv": "fp8_e4m3" if self.pool.dtype == torch.uint8 else "plain",
            "softcap": shape.softcap,
            "windows": (shape.window,),
            "sinks": shape.sinks,
            "max_tokens": batch.num_tokens,
            "max_seqs": batch.num_seqs,
            "max_context_blocks": batch.block_tables.shape[1],
        }
        return PagedAttention(**{**options, **more})

    def run(self, attention: PagedAttention, plan: GpuAttentionPlan | None = None) -> torch.Tensor:
        """Run the step, by its own or this plan; return all rows of the output, beyond the batch as well."""
        shape = self.shape
        plan = plan or attention.planner.plan(self.batch)
        # The buffer is longer than the record; words after those in use are stale.
        record = torch.full((attention.planner.max_record_words,), 2**30, dtype=torch.int32, device=DEVICE)
        record[: len(plan.record)] = torch.from_numpy(plan.record).to(DEVICE)
        out = torch.full((len(self.queries), shape.heads * shape.head_dim), UNTOUCHED, dtype=shape.dtype, device=DEVICE)
        sinks = None if shape.sink_scores is None else shape.sink_scores.to(DEVICE)
        attention.attend(
            LAYER, self.queries, out, record, window=shape.window, with_chunks=plan.with_chunks, sinks=sinks
        )
        return out.cpu()

    def reference(self) -> torch.Tensor:
        """Compute the expected output [T, heads * head_dim] in float32."""
        shape = self.shape
        queries = self.queries[: self.batch.num_tokens].cpu().float()
        found = paged_attention(
            queries,
            self.plain,
            LAYER,
            self.batch,
            scale=shape.head_dim**-0.5,
            window=abs(shape.window),
            chunked=shape.window < 0,
            softcap=shape.softcap,
            sinks=shape.sink_scores,
        )
        return found.flatten(1)


def _quantized(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``plain`` to float8: return the values in float32, and the pool of bytes."""
    known = plain.float()
    scales = known.nan_to_num().abs().amax(-1, keepdim=True) / FLOAT8_LARGEST
    codes = (known / scales).to(torch.float8_e4m3fn)
    values = codes.float() * scales
    missing = known.isnan()
    pieces = codes.view(torch.uint8).masked_fill(missing, NAN_CODE)
    scales = scales.masked_fill(missing[..., :1], torch.nan).contiguous()
    pool = torch.cat((pieces.flatten(-2), scales.view(torch.uint8).flatten(-2)), -1)
    assert pool.shape[-1] == piece_size("fp8_e4m3", plain.shape[-2], plain.shape[-1])
    return values, pool.contiguous()
