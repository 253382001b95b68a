"""All work between the projection of queries, keys and values and attention in one pass: norm, rotation, KV write.

    qkv --[norm of each head]--[rotary embedding]--+--> queries, in place
                                                   +--> keys and values, into the pool's rows

Values are never rotated, and normed in few models. A layer that shares the keys and values of an earlier one has only
queries.

Arithmetic is in float32 and rounded once, when a value is stored, which is closer to the exact result than a rounding
after every operation. So "plain" and "wide" norms only differ in the type of their weights here.

A block is not cleared before its first write. Rows after a sequence's last token keep old contents, possibly NaN;
attention excludes them by position, from values as well as from scores.

Pools are [slots, layers, 2, kv_heads, block_size, head_dim], K before V; slots and layers may have any stride, so that
a pool may have layers of several shapes. In one of "fp8-rows-1", a piece (one layer's keys or values of one head) is
block_size rows of head_dim e4m3 codes, and after them one float32 scale for each row: block_size * (head_dim + 4)
bytes. A value is its code's times its row's scale, which is the row's largest magnitude over 448, and at least 2**-100.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu import fp8
from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.launch import (
    FLOAT_DTYPES,
    arch_of,
    cdiv,
    check,
    check_pool,
    check_tensor,
    next_power_of_2,
    scales_of,
)
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.kv_codes import KV_SCALE_BYTES

MAX_HEAD_DIM = 512
SCALE_BYTES = tl.constexpr(KV_SCALE_BYTES)


class HeadNorm(NamedTuple):
    """The RMS norm of each query and key head: weight [heads + kv_heads, head_dim], of qkv's type or float32.
    ``last``: it comes after the rotation. ``centred``: it is a LayerNorm without biases, which first subtracts a head's
    mean. ``values``: heads of values are normed as well, without weights."""

    weight: torch.Tensor
    eps: float
    last: bool = False
    centred: bool = False
    values: bool = False


class Rotary(NamedTuple):
    """Cosines and sines [max_len, head_dim / 2], one of FLOAT_DTYPES, and int32 positions [T], unchecked, below
    max_len.

    Values i and i + head_dim / 2 of a head are a pair.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


@triton.jit
def _normed(
    low,
    high,
    weight,
    head,
    column,
    inside,
    weighed,
    changes,
    eps,
    HEAD_DIM: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Norm both halves of the heads that change, some of which are ``weighed``."""
    plain_low, plain_high = low, high
    if CENTRED:
        mean = tl.sum(low + high, 1)[:, None] / HEAD_DIM
        low = tl.where(column < HEAD_DIM // 2, low - mean, 0.0)
        high = tl.where(column < HEAD_DIM // 2, high - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(low * low + high * high, 1)[:, None] / HEAD_DIM + eps)
    factors = weight + head * HEAD_DIM + column
    low_factor = tl.load(factors, mask=inside & weighed, other=1.0).to(tl.float32)
    high_factor = tl.load(factors + HEAD_DIM // 2, mask=inside & weighed, other=1.0).to(tl.float32)
    low, high = low * inverse * low_factor, high * inverse * high_factor
    return tl.where(changes, low, plain_low), tl.where(changes, high, plain_high)


@triton.jit
def _store_fp8(low, high, pool, scales, piece, offset, column, inside, stored, BLOCK_SIZE, HEAD_DIM: tl.constexpr):
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)[:, None]
    scale = fp8.scale_of(largest)
    inverse = tl.math.div_rn(1.0, scale)
    target = pool + piece + offset * HEAD_DIM + column
    tl.store(target, fp8.encode(low * inverse), mask=inside)
    tl.store(target + HEAD_DIM // 2, fp8.encode(high * inverse), mask=inside)
    behind: tl.constexpr = BLOCK_SIZE * HEAD_DIM // SCALE_BYTES
    tl.store(scales + piece // SCALE_BYTES + behind + offset, scale, mask=stored)


@triton.jit
def _place(head, KV_HEADS: tl.constexpr, POOL_HEADS: tl.constexpr, FIRST_HEAD: tl.constexpr):
    """Return the index of heads' pieces in a layer, which may have more heads of keys and values. Heads of values
    follow those of keys, in the pool and in projections."""
    place = FIRST_HEAD + head
    if POOL_HEADS != KV_HEADS:
        place += tl.where(head < KV_HEADS, 0, POOL_HEADS - KV_HEADS)
    return place


@triton.jit
def _kv_write(
    qkv,
    weight,
    cos,
    sin,
    positions,
    rows,
    pool,
    scales,
    slot_stride,
    layer_offset,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    POOL_HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    CENTRED: tl.constexpr,
    VALUES: tl.constexpr,
    ROPE: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    FIRST: tl.constexpr = 0 if NORM or ROPE else HEADS
    token = tl.program_id(0).to(tl.int64)
    head = (FIRST + tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < TOTAL) & (column < HALF)
    source = qkv + token * (TOTAL * HEAD_DIM) + head * HEAD_DIM + column
    if ROPE:
        # Tables and positions are constant during the step, so they may be read before the projections are ready.
        at = tl.load(positions + token).to(tl.int64) * HALF + column
        c = tl.load(cos + at, mask=column < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=column < HALF, other=0.0).to(tl.float32)
    wait_for_earlier(DEPENDENT)
    row = tl.load(rows + token)
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    changes = head < HEADS + KV_HEADS
    normed = head < TOTAL if VALUES else changes
    if NORM and not NORM_LAST:
        low, high = _normed(low, high, weight, head, column, inside, changes, normed, eps, HEAD_DIM, CENTRED)
    if ROPE:
        low, high = tl.where(changes, low * c - high * s, low), tl.where(changes, high * c + low * s, high)
    if NORM and NORM_LAST:
        low, high = _normed(low, high, weight, head, column, inside, changes, normed, eps, HEAD_DIM, CENTRED)
    if FIRST == 0:
        tl.store(source, low.to(qkv.dtype.element_ty), mask=inside & (head < HEADS))
        tl.store(source + HALF, high.to(qkv.dtype.element_ty), mask=inside & (head < HEADS))
    if KV_HEADS and row >= 0:
        stored = (head >= HEADS) & (head < TOTAL)
        PIECE: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES) if FP8 else BLOCK_SIZE * HEAD_DIM
        place = _place(head - HEADS, KV_HEADS, POOL_HEADS, FIRST_HEAD)
        piece = (row // BLOCK_SIZE).to(tl.int64) * slot_stride + layer_offset + place * PIECE
        offset = row % BLOCK_SIZE
        inside = inside & stored
        if FP8:
            _store_fp8(low, high, pool, scales, piece, offset, column, inside, stored, BLOCK_SIZE, HEAD_DIM)
        else:
            target = pool + piece + offset * HEAD_DIM + column
            tl.store(target, low.to(pool.dtype.element_ty), mask=inside)
            tl.store(target + HALF, high.to(pool.dtype.element_ty), mask=inside)


def kv_write(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    layer: int,
    *,
    heads: int,
    kv_heads: range | None = None,
    norm: HeadNorm | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Norm and rotate queries in place, and write normed and rotated keys, and values, into rows of ``pool``.

    Args:
        qkv: [T, (heads + 2 * len(kv_heads)) * head_dim], queries, keys, values; its keys and values are not modified.
        kv_heads: the pool's heads whose keys and values are in ``qkv``; None: all of them. The others are unchanged.
            With range(0) ``qkv`` has only queries.
        pool: as the module's docstring describes, of 16 or 32 bits, or, for "fp8-rows-1", uint8
            [slots, layers, 2, kv_heads, block_size * (head_dim + 4)].
        rows: int32 [T], slot * block_size + row in the block, each at most once; -1 writes nothing to the pool.

    Raises Internal for misshapen tensors.
    """
    check_tensor("qkv", qkv, (None, None), FLOAT_DTYPES)
    tokens, width = qkv.shape
    is_fp8 = pool.dtype == torch.uint8
    check_pool(pool, (None, None, 2, *([None] * (2 if is_fp8 else 3))), (*FLOAT_DTYPES, torch.uint8), qkv.device)
    layers, pool_heads = pool.shape[1], pool.shape[3]
    mine = range(pool_heads) if kv_heads is None else kv_heads
    check(0 <= mine.start <= mine.stop <= pool_heads, "heads {} to {} of {}", mine.start, mine.stop, pool_heads)
    head_dim, rest = divmod(width, heads + 2 * len(mine))
    check(rest == 0 and head_dim % 2 == 0 and 0 < head_dim <= MAX_HEAD_DIM, "{} columns are no {} heads", width, heads)
    block_size, rest = divmod(pool.shape[4], head_dim + KV_SCALE_BYTES) if is_fp8 else (pool.shape[4], 0)
    check(rest == 0 and block_size * head_dim % 4 == 0, "{} bytes are no piece of {} values", pool.shape[4], head_dim)
    check(is_fp8 or pool.shape[-1] == head_dim, "pool has {} values a head, not {}", pool.shape[-1], head_dim)
    check_tensor("rows", rows, (tokens,), torch.int32, qkv.device)
    check(tokens > 0 and 0 <= layer < layers, "{} tokens in layer {} of {}", tokens, layer, layers)
    if norm is not None:
        check_tensor("norm", norm.weight, (heads + len(mine), head_dim), (qkv.dtype, torch.float32), qkv.device)
    if rotary is not None:
        check_tensor("cos", rotary.cos, (None, head_dim // 2), FLOAT_DTYPES, qkv.device)
        check_tensor("sin", rotary.sin, tuple(rotary.cos.shape), rotary.cos.dtype, qkv.device)
        check_tensor("positions", rotary.positions, (tokens,), torch.int32, qkv.device)
    flags = {"NORM": norm is not None, "ROPE": rotary is not None, "FP8": is_fp8}
    weight, eps, last, centred, values = norm or HeadNorm(qkv, 0.0)
    flags |= {"NORM_LAST": last, "CENTRED": centred, "VALUES": values}
    constants = _constants(heads, mine, pool_heads, head_dim, block_size, arch_of(qkv.device))
    visited = 2 * len(mine) if norm is None and rotary is None else heads + 2 * len(mine)
    if not visited:
        return
    scales = scales_of(pool) if is_fp8 else pool
    _kv_write[(tokens, cdiv(visited, constants["TILE"]))](
        qkv,
        weight,
        *(rotary or (qkv, qkv, rows)),
        rows,
        pool,
        scales,
        pool.stride(0),
        layer * pool.stride(1),
        eps,
        **flags,
        **constants,
    )


def _constants(
    heads: int, kv_heads: range, pool_heads: int, head_dim: int, block_size: int, arch: int
) -> dict[str, int]:
    """Return the kernel's constants. Tiles are so large that each thread has a value: queries are written in place, so
    no two threads may read the same one."""
    use = tuned("kv_write", arch)
    block = next_power_of_2(head_dim // 2)
    shape = {"HEADS": heads, "KV_HEADS": len(kv_heads), "POOL_HEADS": pool_heads, "FIRST_HEAD": kv_heads.start}
    shape |= {"HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    tile = {"TILE": use["tile_values"] // block, "BLOCK": block, "num_warps": use["num_warps"]}
    return {**shape, **tile, **dependent(arch)}
