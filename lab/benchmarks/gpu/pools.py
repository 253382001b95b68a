"""Attention alone, over a pool of random keys and values, for the section and the tuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.benchmarks.gpu.bench import Bench
from lab.benchmarks.gpu.shapes import BatchEntry, LlamaShape, Tables
from pillion.kernels.gpu.attention.paged_attention import PagedAttention, PlainOrFloat8, piece_size
from pillion.kernels.step import StepBatch

# Scale of all keys of a float8 pool, at which softmax is neither flat nor one-hot.
FP8_SCALE = 0.5
# Rows to compare, and the relative tolerance for bfloat16.
VERIFIED_ROWS = 8
TOLERANCE = 2e-2


def make_pool(
    bench: Bench, shape: LlamaShape, slots: int, layers: int, block_size: int, kv: PlainOrFloat8
) -> torch.Tensor:
    """Make a pool [slots, layers, 2, kv_heads, ...] for :class:`PagedAttention`, of normal random numbers."""
    outer = (slots, layers, 2, shape.kv_heads)
    if kv == "plain":
        pool = torch.empty(*outer, block_size, shape.head_dim, dtype=torch.bfloat16, device=bench.device)
        return pool.normal_()
    pool = torch.empty(*outer, piece_size(kv, block_size, shape.head_dim), dtype=torch.uint8, device=bench.device)
    values = block_size * shape.head_dim
    scale = torch.full((block_size,), FP8_SCALE, device=bench.device).view(torch.uint8)
    for slot in pool:
        rows = torch.randn(*outer[1:], values, device=bench.device).to(torch.float8_e4m3fn)
        slot[..., :values] = rows.view(torch.uint8)
        slot[..., values:] = scale
    return pool


@dataclass(frozen=True, slots=True)
class Attended:
    """One step's attention, ready to run.

    Attributes:
        calls: one per layer.
        attend: computes one layer's attention into ``out``.
        token_bytes: bytes of K and V of a token in one layer.
    """

    attention: PagedAttention
    batch: StepBatch
    calls: list[Callable[[], None]]
    queries: torch.Tensor
    out: torch.Tensor
    token_bytes: int

    @property
    def read_bytes(self) -> float:
        """Fewest bytes of a layer's attention: K and V once, queries and results."""
        context = int(self.batch.context_lens.sum())
        return context * self.token_bytes + 2 * self.queries.numel() * self.queries.element_size()

    def flops(self) -> float:
        """Return the operations of both products, over the keys that each query sees."""
        _, heads, head_dim = self.queries.shape
        seen = int((self.batch.positions.astype("int64") + 1).sum())
        return 4.0 * seen * heads * head_dim


class AttentionPool:
    """A pool with room for the largest measured batch."""

    def __init__(
        self, bench: Bench, shape: LlamaShape, *, block_size: int, tokens: int, layers: int, kv: PlainOrFloat8 = "plain"
    ) -> None:
        self._shape, self._layers, self._kv, self.block_size = shape, layers, kv, block_size
        slots = -(-tokens // block_size)
        self.tensor = make_pool(bench, shape, slots, layers, block_size, kv)
        self._tables = Tables(slots, block_size)
        self._device = bench.device

    def attend(self, entries: list[BatchEntry], *, invariant: bool = False) -> Attended:
        """Plan the attention of a step and send the plan to the device. ``invariant``: in parts of fixed keys."""
        shape, batch = self._shape, self._tables.batch(entries)
        attention = PagedAttention(
            self.tensor,
            dtype=torch.bfloat16,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=self.block_size,
            num_layers=self._layers,
            scale=shape.head_dim**-0.5,
            max_tokens=batch.num_tokens,
            max_seqs=batch.num_seqs,
            max_context_blocks=batch.block_tables.shape[1],
            kv=self._kv,
            invariant=invariant,
        )
        work = attention.planner.plan(batch)
        record = torch.zeros(attention.planner.max_record_words, dtype=torch.int32)
        record[: len(work.record)] = torch.from_numpy(work.record)
        record = record.to(self._device)
        queries = torch.randn(batch.num_tokens, shape.heads, shape.head_dim, device=self._device).bfloat16()
        out = torch.empty(batch.num_tokens, shape.heads * shape.head_dim, dtype=torch.bfloat16, device=self._device)

        def of(layer: int) -> Callable[[], None]:
            return lambda: attention.attend(layer, queries, out, record, with_chunks=work.with_chunks)

        token_bytes = 2 * shape.kv_heads * piece_size(self._kv, 1, shape.head_dim) * self.tensor.element_size()
        return Attended(attention, batch, [of(layer) for layer in range(self._layers)], queries, out, token_bytes)

    def gathering(self, attended: Attended, layer: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Return a call that gathers the first sequence's K and V into [1, kv_heads, context, head_dim]."""
        context = int(attended.batch.context_lens[0])
        table = attended.batch.block_tables[0, : -(-context // self.block_size)]
        slots = torch.from_numpy(table.astype("int64")).to(self._device)

        def gather() -> tuple[torch.Tensor, torch.Tensor]:
            # [blocks, 2, heads, block_size, head_dim] -> [2, heads, tokens, head_dim]
            pieces = self.tensor[:, layer].index_select(0, slots).permute(1, 2, 0, 3, 4)
            both = pieces.reshape(2, self._shape.kv_heads, -1, self._shape.head_dim)[:, :, :context].contiguous()
            return both[0][None], both[1][None]

        return gather

    def keys_values(self, attended: Attended, layer: int, sequence: int) -> torch.Tensor:
        """Return K and V of one sequence, float32 [2, kv_heads, context, head_dim], from either kind of pool."""
        shape, context = self._shape, int(attended.batch.context_lens[sequence])
        table = attended.batch.block_tables[sequence, : -(-context // self.block_size)]
        pieces = self.tensor[torch.from_numpy(table.astype("int64")).to(self._device), layer]
        if self._kv == "fp8_e4m3":
            values = self.block_size * shape.head_dim
            rows = pieces[..., :values].contiguous().view(torch.float8_e4m3fn).float()
            scales = pieces[..., values:].contiguous().view(torch.float32)
            pieces = rows.view(*rows.shape[:-1], self.block_size, shape.head_dim) * scales[..., None]
        # [blocks, 2, heads, block_size, head_dim] -> [2, heads, tokens, head_dim]
        return pieces.float().permute(1, 2, 0, 3, 4).reshape(2, shape.kv_heads, -1, shape.head_dim)[:, :, :context]


def verify_rows(pool: AttentionPool, attended: Attended) -> None:
    """Run the first layer and compare rows of the first and the last sequence with plain torch in float32.

    Raises AssertionError if they differ.
    """
    attended.calls[0]()
    batch, (_, heads, head_dim) = attended.batch, attended.queries.shape
    for sequence in {0, batch.num_seqs - 1}:
        keys, values = pool.keys_values(attended, 0, sequence)
        begin, end = batch.query_starts[sequence : sequence + 2].tolist()
        for row in {*range(begin, end, max(1, (end - begin) // VERIFIED_ROWS)), end - 1}:
            seen = int(batch.positions[row]) + 1
            query = attended.queries[row].float().view(keys.shape[0], -1, head_dim)
            weights = torch.softmax(query @ keys[:, :seen].transpose(1, 2) * head_dim**-0.5, -1)
            expected = (weights @ values[:, :seen]).reshape(heads * head_dim)
            check_near(attended.out[row], expected)


def check_near(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of ``found``. Raises AssertionError beyond TOLERANCE, and for NaN."""
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not off <= TOLERANCE:
        raise AssertionError(f"attention is off by {off:.4f} of its length")
    return off
