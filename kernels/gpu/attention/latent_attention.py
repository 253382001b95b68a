"""Attention over a pool of latents (multi-head latent attention): the kernel, and its interface to the engine.

A token's row of a layer is ``rank`` latents and ``rotary`` rotated values, for all heads. All of it is the key, and its
latents are also the value, so a tile of rows is loaded once for both products. Widths such as 512 + 64 are no power of
two, which Triton's tiles need, so latents and rotated values have separate tiles.

Work is planned and partial results are merged as in :mod:`pillion.kernels.gpu.attention.paged_attention`. As there,
loads of rows are not masked, and rows after a sequence's end are never read. There is one KV head, whose query heads
are all heads of a token: the rows of a decode fill several tiles, whose programs read the same keys at about the same
time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.attention.attention_rows import (
    _LOWEST,
    _WORDS,
    _beginning,
    _end_item,
    _load,
    _whole,
    _words,
)
from pillion.kernels.gpu.attention.gpu_attention_plan import GpuAttentionPlanner, Tiling
from pillion.kernels.gpu.attention.paged_attention import joining, merge_constants, merge_tiles, padded_head_dim
from pillion.kernels.gpu.attention.parted_attention import _before_all, _end_part, _merge_parts, in_parts
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import NATIVE_FP8_ARCH, decode_e4m3
from pillion.kernels.gpu.launch import (
    FLOAT_DTYPES,
    arch_of,
    check,
    check_pool_device,
    check_tensor,
    interpreting,
    processors_of,
)
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.kv_codes import KV_SCALE_BYTES

# Latents and rotated values are multiples of the first number; max of each.
MIN_WIDTH, MAX_LATENTS, MAX_ROTARY = 16, 512, 128
# Scales of a row in 8 bits: of its latents, and of its rotated key.
LATENT_SCALES = 2
# Words per item; initial value of running maxima, as in attention_rows.py.


# fmt: off
@triton.jit
def _tiles(
    acc, top, total, query, rotated, positions, pool, scales, table, begin, end, last, slot_stride, layer_offset,
    scale_slot_stride, scale_offset, score_scale,
    RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, MASKED: tl.constexpr,
):
    # fmt: on
    """Fold tokens ``begin`` .. ``end`` - 1 into a row tile's state; ``last`` is the last one visible to any row."""
    columns, behind = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    none = tl.zeros((query.shape[0], BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        read = tl.minimum(tokens, last) if MASKED else tokens
        slots = tl.load(table + read // BLOCK_SIZE).to(tl.int64)
        inside = read % BLOCK_SIZE
        rows = (pool + (slots * slot_stride + layer_offset + inside * (RANK + ROTARY)))[:, None]
        keys = _load(rows + RANK + behind, behind, ROTARY, BLOCK_R)
        latents = _load(rows + columns, columns, RANK, BLOCK_D)
        if FP8:
            factors = scales + (slots * scale_slot_stride + scale_offset + inside)
            folded: tl.constexpr = 1.0 if NATIVE_FP8 else 256.0
            of_latents, of_keys = tl.load(factors) * folded, tl.load(factors + BLOCK_SIZE) * folded
            keys = decode_e4m3(keys, query.dtype, NATIVE_FP8)
            latents = decode_e4m3(latents, query.dtype, NATIVE_FP8)
            scores = dot(rotated, tl.trans(keys), none) * of_keys[None, :]
            scores += dot(query, tl.trans(latents), none) * of_latents[None, :]
        else:
            scores = dot(rotated, tl.trans(keys), none)
            scores = dot(query, tl.trans(latents), scores)
        if MASKED:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        if FP8:
            weights *= of_latents[None, :]
        acc = dot(weights.to(query.dtype), latents, acc * shrink[:, None])
        top = new_top
    return acc, top, total


# fmt: off
@triton.jit
def _attend_latents(
    queries, pool, scales, record, starts_at, counts_at, first_partial, out, partials, partial_logs, tickets,
    slot_stride, layer_offset, scale_slot_stride, scale_layer_offset, score_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr, EDGES: tl.constexpr, JOINED: tl.constexpr, PARTS: tl.constexpr,
):
    # fmt: on
    """Run a program's items in sequence. With EDGES, key tiles that all rows see completely need no masks."""
    mine = record + starts_at + tl.program_id(0)
    columns, behind = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    # Where 8 bits are widened, code hoisted out of this loop fills registers during those over keys.
    for at in tl.range(tl.load(mine), tl.load(mine + 1), _WORDS, disable_licm=FP8):
        table, row, rows, shift, _, begin, end, _ = _words(record, at)
        places = tl.arange(0, BLOCK_M)
        packed = row + tl.minimum(places, rows - 1)
        positions = packed // HEADS + shift
        cells = (queries + packed.to(tl.int64) * (RANK + ROTARY))[:, None]
        query = _load(cells + columns, columns, RANK, BLOCK_D)
        rotated = _load(cells + RANK + behind, behind, ROTARY, BLOCK_R)

        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        top, total = _beginning(queries, packed, False, False)
        # In a float8 pool, the scales of a block's latents follow its rows, then those of its rotated keys.
        scale_offset = scale_layer_offset + BLOCK_SIZE * (RANK + ROTARY) // 4
        last = end - 1
        whole_end = begin
        if EDGES:
            whole_begin, whole_end = _whole(row, rows, shift, begin, end, HEADS, BLOCK_N, 0)
            acc, top, total = _tiles(
                acc, top, total, query, rotated, positions, pool, scales, table, whole_begin, whole_end, last,
                slot_stride, layer_offset, scale_slot_stride, scale_offset, score_scale,
                RANK, ROTARY, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, FP8, NATIVE_FP8, False,
            )  # fmt: skip
        acc, top, total = _tiles(
            acc, top, total, query, rotated, positions, pool, scales, table, whole_end, end, last,
            slot_stride, layer_offset, scale_slot_stride, scale_offset, score_scale,
            RANK, ROTARY, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, FP8, NATIVE_FP8, True,
        )  # fmt: skip
        _end_item(
            acc, top, total, record, at, places, tl.arange(0, BLOCK_D), out, partials, partial_logs, counts_at,
            first_partial, tickets, queries, tl.arange(0, JOINED), tl.arange(0, BLOCK_D),
            1, HEADS, RANK, BLOCK_D, BLOCK_M, JOINED, PARTS, False,
        )  # fmt: skip


# fmt: off
@triton.jit
def _attend_latent_parts(
    queries, pool, scales, record, starts_at, out, partials, partial_logs, own_at, slot_stride, layer_offset,
    scale_slot_stride, scale_layer_offset, score_scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr, PART: tl.constexpr,
):
    # fmt: on
    """Run a program's items part by part (:mod:`pillion.kernels.gpu.attention.parted_attention`)."""
    mine = record + starts_at + tl.program_id(0)
    own = own_at + tl.program_id(0) * BLOCK_M
    columns, behind = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    scale_offset = scale_layer_offset + BLOCK_SIZE * (RANK + ROTARY) // 4
    for at in tl.range(tl.load(mine), tl.load(mine + 1), _WORDS, disable_licm=FP8):
        item = record + at
        table, row, rows, shift, _, begin, end, _ = _words(record, at)
        packed = row + tl.minimum(tl.arange(0, BLOCK_M), rows - 1)
        positions = packed // HEADS + shift
        cells = (queries + packed.to(tl.int64) * (RANK + ROTARY))[:, None]
        query = _load(cells + columns, columns, RANK, BLOCK_D)
        rotated = _load(cells + RANK + behind, behind, ROTARY, BLOCK_R)

        all_top, all_total = _before_all(queries, packed, False)
        for first in range(begin // PART * PART, end, PART):
            lower, upper = tl.maximum(first, begin), tl.minimum(first + PART, end)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            whole_begin, whole_end = _whole(row, rows, shift, lower, upper, HEADS, BLOCK_N, 0)
            acc, top, total = _tiles(
                acc, top, total, query, rotated, positions, pool, scales, table, whole_begin, whole_end, upper - 1,
                slot_stride, layer_offset, scale_slot_stride, scale_offset, score_scale,
                RANK, ROTARY, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, FP8, NATIVE_FP8, False,
            )  # fmt: skip
            acc, top, total = _tiles(
                acc, top, total, query, rotated, positions, pool, scales, table, whole_end, upper, upper - 1,
                slot_stride, layer_offset, scale_slot_stride, scale_offset, score_scale,
                RANK, ROTARY, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, FP8, NATIVE_FP8, True,
            )  # fmt: skip
            all_top, all_total = _end_part(
                acc, top, total, all_top, all_total, lower > begin, upper == end, item, own, out, partials,
                partial_logs, HEADS, HEADS, RANK, BLOCK_D, BLOCK_M,
            )  # fmt: skip


class LatentAttention:
    """Attention over one pool of latents for all layers of a model, like
    :class:`pillion.kernels.gpu.attention.paged_attention.PagedAttention` over one of keys and values."""

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        dtype: torch.dtype,
        num_heads: int,
        rank: int,
        rotary: int,
        block_size: int,
        num_layers: int,
        scale: float,
        max_tokens: int,
        max_seqs: int,
        max_context_blocks: int,
        fp8: bool = False,
        decode_rows: int = 1,
        invariant: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Allocate the partial results. Raises Internal for an inconsistent pool or numbers.

        Args:
            pool: contiguous [slots, num_layers, 1, 1, block_size, rank + rotary] of ``dtype``, or, if ``fp8``, uint8
                [slots, num_layers, 1, 1, block_size * (rank + rotary + 8)]: a block's e4m3 rows, a float32 scale for
                the latents of each, and one for its rotated key.
            dtype: of queries and results.
            scale: factor of the scores; positive.
            max_tokens, max_seqs: limits of a step. max_context_blocks: limit of a sequence.
            decode_rows: max tokens of a decode (more than one if drafts are verified).
            invariant: whether a row's bits depend on its sequence alone.
            device: device of the kernels; None: that of the pool.
        """
        check_widths(rank, rotary)
        check(scale > 0 and dtype in FLOAT_DTYPES, "queries are of {}, scores are scaled by {}", dtype, scale)
        self._pool, self._dtype, self._device = pool, dtype, device or pool.device
        check_pool_device(pool, self._device)
        piece = (block_size * (rank + rotary + LATENT_SCALES * KV_SCALE_BYTES),) if fp8 else (block_size, rank + rotary)
        check_tensor("pool", pool, (None, num_layers, 1, 1, *piece), torch.uint8 if fp8 else dtype)
        self._scales = pool.view(-1).view(torch.float32) if fp8 else pool
        self._heads, self._rank, self._rotary, self._layers = num_heads, rank, rotary, num_layers
        self._score_scale = scale * math.log2(math.e)
        arch, processors = arch_of(self._device), processors_of(self._device)
        shape = {"HEADS": num_heads, "RANK": rank, "ROTARY": rotary, "BLOCK_SIZE": block_size}
        self._invariant = invariant
        if invariant:
            heads = {"KV_HEADS": 1, "GROUP": num_heads, "HEAD_DIM": rank, "SINKS": False}
            each = _parted_constants(arch, shape, fp8, dtype.itemsize, max_context_blocks * block_size, processors)
            (self._decode, decode), (self._chunk, chunk), merge = each
            self._merge = {**merge_constants(arch, heads, decode.rows, chunk.rows), **merge}
            self._merge_programs = merge_tiles(arch, rank)["programs"] * processors
        else:
            self._decode, decode = _constants("latents_decode", arch, shape, fp8, dtype.itemsize, processors)
            self._chunk, chunk = _constants("latents_chunk", arch, shape, fp8, dtype.itemsize, processors)
        self.planner = GpuAttentionPlanner(
            kv_heads=1,
            group=num_heads,
            block_size=block_size,
            decode=decode,
            chunk=chunk,
            windows=(0,),
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_context_blocks=max_context_blocks,
            decode_tokens=decode_rows,
        )
        count = self.planner.partial_rows
        self._partials = torch.empty((count, padded_head_dim(rank)), dtype=torch.float32, device=self._device)
        self._partial_logs = torch.empty(count, dtype=torch.float32, device=self._device)
        self._tickets = torch.zeros(count, dtype=torch.int32, device=self._device)

    def attend(
        self, layer: int, queries: torch.Tensor, out: torch.Tensor, record: torch.Tensor, *, with_chunks: bool
    ) -> None:
        """Write weighted sums of latents into ``out``; rows beyond the batch are unchanged.

        Args:
            queries: contiguous [T, heads, rank + rotary].
            out: contiguous [T, heads * rank].
            record: int32 on the device, beginning with the words of the plan's record.
            with_chunks: the plan's field, or True, which is slower for a step without chunks.

        Raises Internal for misshapen tensors.
        """
        heads, planner = self._heads, self.planner
        check(0 <= layer < self._layers, "layer {} of {}", layer, self._layers)
        check_tensor("queries", queries, (None, heads, self._rank + self._rotary), self._dtype, self._device)
        check_tensor("out", out, (len(queries), heads * self._rank), self._dtype, self._device)
        check_tensor("record", record, (None,), torch.int32, self._device)
        partials = self._partials, self._partial_logs
        strides = self._pool.stride(0), layer * self._pool.stride(1)
        places = (*strides, *(stride // KV_SCALE_BYTES for stride in strides), self._score_scale)
        for chunk in (False, True) if with_chunks else (False,):
            tiling, constants = (planner.chunk, self._chunk) if chunk else (planner.decode, self._decode)
            inputs = queries, self._pool, self._scales, record, planner.starts_at(0, chunk)
            if self._invariant:
                own = planner.own_at(chunk)
                _attend_latent_parts[(tiling.programs,)](*inputs, out, *partials, own, *places, **constants)
            else:
                at = planner.counts_at(0, chunk), planner.first_partial(chunk)
                _attend_latents[(tiling.programs,)](*inputs, *at, out, *partials, self._tickets, *places, **constants)
        if self._invariant:
            merges = record, planner.counts_at(0, False)
            _merge_parts[(self._merge_programs,)](*merges, *partials, out, self._partial_logs, **self._merge)


def widths_fit(rank: int, rotary: int) -> bool:
    """Return whether the kernels support rows of these latents and rotated values."""
    fits = MIN_WIDTH <= rank <= MAX_LATENTS and MIN_WIDTH <= rotary <= MAX_ROTARY
    return fits and rank % MIN_WIDTH == 0 and rotary % MIN_WIDTH == 0


def check_widths(rank: int, rotary: int) -> None:
    """Raise Internal for rows that the kernels do not support."""
    check(widths_fit(rank, rotary), "rows of {} latents and {} rotated values", rank, rotary)


def _constants(
    kernel: str, arch: int, shape: dict[str, int], fp8: bool, item_bytes: int, processors: int = 1
) -> tuple[dict[str, Any], Tiling]:
    """Return the constants of the decode or the chunk kernel by name, and the division of its work."""
    use = tuned(kernel, arch, kv="fp8_e4m3" if fp8 else "plain", bytes=item_bytes)
    constants = {
        **shape,
        "BLOCK_D": padded_head_dim(shape["RANK"]),
        "BLOCK_R": padded_head_dim(shape["ROTARY"]),
        "BLOCK_M": use["rows"],
        "BLOCK_N": use["keys"],
        "FP8": fp8,
        "NATIVE_FP8": fp8 and arch >= NATIVE_FP8_ARCH and not interpreting(),
        "EDGES": kernel == "latents_chunk",
        **joining(kernel, arch),
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
    }
    return constants, Tiling(use["rows"], use["keys"], use["programs"] * processors, use["unit_tiles"])


def _parted_constants(
    arch: int, shape: dict[str, int], fp8: bool, item_bytes: int, max_keys: int, processors: int = 1
) -> tuple[tuple[dict[str, Any], Tiling], tuple[dict[str, Any], Tiling], dict[str, int]]:
    """Return the constants and the division of attention in parts, for decodes and for chunks, and constants of the
    merge. ``max_keys``: of the longest sequence."""
    native = fp8 and arch >= NATIVE_FP8_ARCH and not interpreting()
    widths = {"BLOCK_D": padded_head_dim(shape["RANK"]), "BLOCK_R": padded_head_dim(shape["ROTARY"])}
    # A token's rows of all heads fill several tiles, each of which needs results of its parts.
    tiles = -(-shape["HEADS"] // 16)
    facts = {"kv": "fp8_e4m3" if fp8 else "plain", "bytes": item_bytes}
    constants = {**shape, **widths, "FP8": fp8, "NATIVE_FP8": native}
    return in_parts("latents_parts", arch, constants, tiles, max_keys, processors, **facts)
