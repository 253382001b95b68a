"""Attention of ragged batches over the paged pool: the interface to the engine.

    plan (host, once per step) --record, one copy--> device --attend (each layer)--> decodes; chunks

Decodes and chunks are two launches, in sequence, with separate tiles and programs. One launch for both would have to
use the tiles of the longest query: in vLLM's Triton kernel one chunk in the batch keeps every decode's context from
being split, and a few long decodes then occupy only a few processors.

``attend`` neither allocates nor synchronizes, and its grids depend on the limits alone, so that a graph can capture it
and replay it over another record at the same address. A graph without chunks serves all steps without chunks.

With ``invariant`` other kernels cut a sequence's keys at fixed places
(:mod:`pillion.kernels.gpu.attention.parted_attention`); the launches are the same.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from pillion.kernels.gpu.attention.attention_kernel import _attend
from pillion.kernels.gpu.attention.gpu_attention_plan import GpuAttentionPlanner, Tiling
from pillion.kernels.gpu.attention.overlapped_attention import ARCH, HEAD_DIMS, _attend_overlapped
from pillion.kernels.gpu.attention.parted_attention import _attend_parts, _merge_parts, in_parts
from pillion.kernels.gpu.dependent import dependent
from pillion.kernels.gpu.fp8 import NATIVE_FP8_ARCH
from pillion.kernels.gpu.launch import (
    FLOAT_DTYPES,
    arch_of,
    check,
    check_pool,
    check_tensor,
    interpreting,
    next_power_of_2,
    processors_of,
    scales_of,
)
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.kv_codes import KV_SCALE_BYTES

PlainOrFloat8 = Literal["plain", "fp8_e4m3"]
# Rows of a decode tile: the fewest that tensor cores multiply, and the most with which attention is still memory-bound.
MIN_DECODE_ROWS, MAX_DECODE_ROWS = 16, 64
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
# Max width of heads whose decode tiles have registers for all rows; wider ones have fewer rows.
ALL_ROWS_HEAD_DIM = 128
# Heads of this width fill all registers in a chunk's tile. With 8-bit KV, or where the softmax overlaps products, this
# many bytes of values that the loops over keys do not use are spilled.
WIDE_HEAD_DIM, WIDE_SPILL_BYTES = 256, 80


def padded_head_dim(head_dim: int) -> int:
    """Return the power of two that a head fills in registers."""
    return next_power_of_2(head_dim)


def decode_tile_rows(rows: int, width: int) -> int:
    """Return a decode tile's rows for ``rows`` query rows per sequence and KV head, and heads padded to ``width``.

    Registers suffice for 32 rows with heads of 256, and 16 with heads of 512.
    """
    most = MAX_DECODE_ROWS * ALL_ROWS_HEAD_DIM // max(width, ALL_ROWS_HEAD_DIM)
    return min(max(next_power_of_2(rows), MIN_DECODE_ROWS), most)


def piece_size(kv: PlainOrFloat8, block_size: int, head_dim: int) -> int:
    """Return the size of a (layer, K or V, head) piece: elements of the pool's type, or bytes for float8."""
    return block_size * (head_dim + KV_SCALE_BYTES if kv == "fp8_e4m3" else head_dim)


def window_of(tokens: int, chunked: bool, longest: int) -> int:
    """Return the window of layers whose queries see their last ``tokens`` tokens, themselves included: that number, or
    0 (all tokens) if the ``longest`` text has no more. For queries that see the tokens since the last multiple of
    ``tokens`` it is -``tokens``."""
    if tokens >= longest:
        return 0
    return -tokens if chunked else tokens


class PagedAttention:
    """Attention over one pool for all layers of a model, called from the step loop's thread."""

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_layers: int,
        scale: float,
        max_tokens: int,
        max_seqs: int,
        max_context_blocks: int,
        kv: PlainOrFloat8 = "plain",
        softcap: float = 0.0,
        windows: tuple[int, ...] = (0,),
        decode_rows: int = 1,
        first_kv_head: int = 0,
        sinks: bool = False,
        invariant: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Allocate the partial results. Raises Internal for an inconsistent pool or numbers.

        Args:
            pool: [slots, num_layers, 2, pool_heads, block_size, head_dim] of ``dtype``, whose slots and layers may have
                any stride; or, for float8, uint8 [slots, num_layers, 2, pool_heads, block_size * (head_dim + 4)]: a
                piece's e4m3 rows, then a float32 scale for each.
            dtype: of queries and results.
            scale: factor of the scores; positive.
            softcap: scaled scores become softcap * tanh(score / softcap); 0: no cap.
            windows: the distinct windows of the layers, by :func:`window_of`.
            max_tokens, max_seqs: limits of a step. max_context_blocks: limit of a sequence.
            decode_rows: max tokens of a decode (more than one if drafts are verified).
            first_kv_head: first of the pool's heads to attend to; there may be more than ``num_kv_heads``.
            sinks: whether the layers have sinks. invariant: whether a row's bits depend on its sequence alone.
            device: device of the kernels; None: that of the pool.
        """
        _check_heads(num_heads, num_kv_heads, head_dim, scale, dtype)
        mine = range(first_kv_head, first_kv_head + num_kv_heads)
        _check_pool(pool, dtype, num_layers, mine, block_size, head_dim, kv, device or pool.device)
        self._pool, self._dtype, self._device = pool, dtype, device or pool.device
        self._heads, self._head_dim, self._layers, self._invariant = num_heads, head_dim, num_layers, invariant
        self._first_head_at = first_kv_head * pool.stride(3)
        self._scales = scales_of(pool) if kv == "fp8_e4m3" else pool
        self._score_scale, self._softcap = scale if softcap else scale * math.log2(math.e), softcap
        group, arch, processors = num_heads // num_kv_heads, arch_of(self._device), processors_of(self._device)
        heads = {"KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "SINKS": sinks}
        shape = {**heads, "POOL_HEADS": pool.shape[3], "BLOCK_SIZE": block_size, "SOFTCAP": softcap != 0}
        cut, most = (_parted_constants, max_context_blocks * block_size) if invariant else (_cut_anywhere, decode_rows)
        each = cut(arch, shape, kv, dtype.itemsize, any(windows), most, processors)
        (self._decode, decode), (self._chunk, chunk), merge = each
        self._merge = {**merge_constants(arch, heads, decode.rows, chunk.rows), **merge}
        self._merge_programs = merge_tiles(arch, head_dim)["programs"] * processors
        limits = {"max_tokens": max_tokens, "max_seqs": max_seqs, "max_context_blocks": max_context_blocks}
        self.planner = GpuAttentionPlanner(
            kv_heads=num_kv_heads,
            group=group,
            block_size=block_size,
            decode=decode,
            chunk=chunk,
            windows=windows,
            **limits,
        )
        results = torch.empty((self.planner.partial_rows, padded_head_dim(head_dim)), device=self._device)
        self._partials, self._partial_logs = results, torch.empty(len(results), device=self._device)
        # A unit's ticket is that of its first partial row. The program that merges its parts resets it.
        self._tickets = torch.zeros(len(results), dtype=torch.int32, device=self._device)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        out: torch.Tensor,
        record: torch.Tensor,
        *,
        window: int = 0,
        with_chunks: bool,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write attention of ``queries`` into ``out``; rows beyond the batch are unchanged.

        Args:
            queries: [T, heads, head_dim], rows with any stride, such as a slice of a fused projection.
            out: contiguous [T, heads * head_dim].
            record: int32 on the device, beginning with the words of the plan's record.
            window: one of the ``windows``.
            with_chunks: the plan's field, or True, which is slower for a step without chunks.
            sinks: float32 [heads], a score per head that counts in its softmax and has no value; given if the layers
                have sinks.

        Raises Internal for misshapen tensors.
        """
        self._check(layer, queries, out, record, window)
        check((sinks is not None) == self._chunk["SINKS"], "sinks are missing, or not expected")
        # Any pointer: a kernel without sinks does not read it.
        terms = self._partial_logs if sinks is None else sinks
        if sinks is not None:
            check_tensor("sinks", sinks, (self._heads,), torch.float32, self._device)
        planner = self.planner
        strides = self._pool.stride(0), layer * self._pool.stride(1) + self._first_head_at
        scale_strides = (stride // KV_SCALE_BYTES for stride in strides)
        places = (queries.stride(0), *strides, *scale_strides, self._score_scale, self._softcap)
        partials = self._partials, self._partial_logs
        for chunk in (False, True) if with_chunks else (False,):
            tiling, constants = (planner.chunk, self._chunk) if chunk else (planner.decode, self._decode)
            inputs = queries, self._pool, self._scales, record, planner.starts_at(window, chunk)
            if self._invariant:
                more = terms, planner.own_at(chunk), *places
                _attend_parts[(tiling.programs,)](*inputs, out, *partials, *more, WINDOW=window, **constants)
            else:
                kernel = _attend_overlapped if "BUFFERS" in constants else _attend
                at = planner.counts_at(window, chunk), planner.first_partial(chunk)
                more = self._tickets, terms, *places
                kernel[(tiling.programs,)](*inputs, *at, out, *partials, *more, WINDOW=window, **constants)
        if self._invariant:
            merges = record, planner.counts_at(window, False)
            _merge_parts[(self._merge_programs,)](*merges, *partials, out, terms, **self._merge)

    def _check(self, layer: int, queries: torch.Tensor, out: torch.Tensor, record: torch.Tensor, window: int) -> None:
        shape, heads, width = tuple(queries.shape), self._heads, self._head_dim
        check(0 <= layer < self._layers, "layer {} of {}", layer, self._layers)
        check(window in self.planner.windows, "nothing is planned for a window of {}", window)
        check(shape[1:] == (heads, width), "queries are {}, not [T, {}, {}]", shape, heads, width)
        check(queries.stride()[1:] == (width, 1), "a row of queries is not contiguous")
        check(queries.dtype == self._dtype and queries.device == self._device, "queries are of {}", queries.dtype)
        check_tensor("out", out, (shape[0], heads * width), self._dtype, self._device)
        check_tensor("record", record, (None,), torch.int32, self._device)


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int, scale: float, dtype: torch.dtype) -> None:
    """Raise Internal for numbers or sizes of heads that the kernels do not support."""
    check(num_heads % num_kv_heads == 0, "{} heads over {} KV heads", num_heads, num_kv_heads)
    check(MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % 16 == 0, "heads of {}", head_dim)
    check(scale > 0 and dtype in FLOAT_DTYPES, "queries are of {}, scores are scaled by {}", dtype, scale)


def _check_pool(
    pool: torch.Tensor,
    dtype: torch.dtype,
    num_layers: int,
    kv_heads: range,
    block_size: int,
    head_dim: int,
    kv: PlainOrFloat8,
    device: torch.device,
) -> None:
    """Raise Internal for a pool of another shape or type, without these heads, or inaccessible to ``device``."""
    piece = (block_size, head_dim) if kv == "plain" else (piece_size(kv, block_size, head_dim),)
    check_pool(pool, (None, num_layers, 2, None, *piece), dtype if kv == "plain" else torch.uint8, device)
    fits = 0 <= kv_heads.start < kv_heads.stop <= pool.shape[3]
    check(fits, "KV heads {} to {} of {}", kv_heads.start, kv_heads.stop, pool.shape[3])


def _attend_constants(
    kernel: str,
    arch: int,
    shape: dict[str, int],
    kv: PlainOrFloat8,
    item_bytes: int,
    windowed: bool,
    decode_rows: int = 1,
    processors: int = 1,
) -> tuple[dict[str, int], Tiling]:
    """Return the constants of the decode or the chunk kernel by name, without the window, and the division of its work.
    ``windowed``: whether there are windows."""
    width, chunk, fp8 = padded_head_dim(shape["HEAD_DIM"]), kernel == "attention_chunk", kv == "fp8_e4m3"
    # Masks and sinks need registers.
    more = windowed or bool(shape["SINKS"])
    use = tuned(kernel, arch, head_dim=width, kv=kv, bytes=item_bytes, masks_or_sinks=more)
    rows = use["rows"] if chunk else decode_tile_rows(shape["GROUP"] * decode_rows, width)
    constants = {
        **shape,
        "BLOCK_D": width,
        "BLOCK_M": rows,
        "BLOCK_N": use["keys"],
        "FP8": fp8,
        "NATIVE_FP8": fp8 and arch >= NATIVE_FP8_ARCH and not interpreting(),
        "EDGES": chunk and bool(use.get("edges", True)),
        **joining(kernel, arch, head_dim=width, kv=kv),
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        **dependent(arch),
    }
    if chunk and use.get("overlap") and overlaps(arch, shape["HEAD_DIM"], kv, item_bytes):
        constants = overlapped_constants(constants)
    return constants, Tiling(rows, use["keys"], use["programs"] * processors, use["unit_tiles"])


def overlaps(arch: int, head_dim: int, kv: PlainOrFloat8, item_bytes: int) -> bool:
    """Return True if the kernel that overlaps softmax and products supports these chunks: of 16-bit values."""
    return arch == ARCH and head_dim in HEAD_DIMS and kv == "plain" and item_bytes == 2


def overlapped_constants(constants: dict[str, int]) -> dict[str, int]:
    """Return the constants of the overlapped kernel, given those of Triton's."""
    others = ("BLOCK_D", "FP8", "NATIVE_FP8", "EDGES", "num_stages")
    kept = {name: value for name, value in constants.items() if name not in others}
    return {**kept, "BUFFERS": constants["num_stages"], "WARPS": constants["num_warps"]}


def _cut_anywhere(
    arch: int,
    shape: dict[str, int],
    kv: PlainOrFloat8,
    item_bytes: int,
    windowed: bool,
    decode_rows: int,
    processors: int,
) -> tuple[tuple[dict[str, int], Tiling], tuple[dict[str, int], Tiling], dict[str, int]]:
    """Return the constants and the division of attention that is cut by the work of the batch, for decodes and for
    chunks; the merge has no additional constants."""
    decode, chunk = (
        _attend_constants(f"attention_{kernel}", arch, shape, kv, item_bytes, windowed, decode_rows, processors)
        for kernel in ("decode", "chunk")
    )
    return decode, chunk, {}


def _parted_constants(
    arch: int,
    shape: dict[str, int],
    kv: PlainOrFloat8,
    item_bytes: int,
    windowed: bool,
    max_keys: int,
    processors: int = 1,
) -> tuple[tuple[dict[str, int], Tiling], tuple[dict[str, int], Tiling], dict[str, int]]:
    """Return the constants and the division of attention in parts, for decodes and for chunks, and constants of the
    merge. ``max_keys``: of the longest sequence."""
    width, fp8 = padded_head_dim(shape["HEAD_DIM"]), kv == "fp8_e4m3"
    native = fp8 and arch >= NATIVE_FP8_ARCH and not interpreting()
    constants = {**shape, "BLOCK_D": width, "FP8": fp8, "NATIVE_FP8": native, **dependent(arch)}
    facts = {"head_dim": width, "kv": kv, "bytes": item_bytes, "masks_or_sinks": windowed or bool(shape["SINKS"])}
    return in_parts("attention_parts", arch, constants, shape["KV_HEADS"], max_keys, processors, **facts)


def merge_tiles(arch: int, head_dim: int) -> dict[str, int]:
    """Return the tuned constants of the merge of parts of rows of ``head_dim`` values."""
    return tuned("attention_merge", arch, head_dim=padded_head_dim(head_dim))


def merge_constants(arch: int, heads: dict[str, int], decode_rows: int, chunk_rows: int) -> dict[str, int]:
    """Return the constants of the kernel that merges parts of tiles of ``decode_rows`` and ``chunk_rows``; ``heads``
    are the constants of heads, by name."""
    use = merge_tiles(arch, heads["HEAD_DIM"])
    tiles = {"BLOCK_D": padded_head_dim(heads["HEAD_DIM"]), "DECODE_M": decode_rows, "CHUNK_M": chunk_rows}
    return {**heads, **tiles, "PARTS": use["parts"], "num_warps": use["num_warps"], **dependent(arch)}


def joining(kernel: str, arch: int, **facts: int | str) -> dict[str, int]:
    """Return the constants by which a kernel merges partial results, from the tuning files by ``facts``."""
    use = tuned("attention_join", arch, of=kernel, **facts)
    return {"JOINED": use["rows"], "PARTS": use["parts"]}
