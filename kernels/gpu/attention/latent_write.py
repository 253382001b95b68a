"""Write of rows of latents into the pool, with their norm and rotation, and rotation of queries, in one pass.

    latents     [T, rank + rotary] --[norm of the latents]--[rotary embedding of the rest]--> the pool's rows
    projected   [T, heads, still + rotary] --[rotary embedding of the rest]--> queries [T, heads, rank + rotary]

The first ``rank`` values of queries, the absorbed product with the keys' up-projection, are computed elsewhere.
Arithmetic is in float32; a plain norm is rounded before its weight multiplies, and everything else once, when it is
stored. A block is not cleared before its first write: attention reads no row after a sequence's last token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu import fp8
from pillion.kernels.gpu.attention.kv_write import Rotary
from pillion.kernels.gpu.attention.latent_attention import LATENT_SCALES, check_widths
from pillion.kernels.gpu.launch import (
    FLOAT_DTYPES,
    arch_of,
    cdiv,
    check,
    check_pool_device,
    check_tensor,
    next_power_of_2,
)
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.kv_codes import KV_SCALE_BYTES

_SCALES = LATENT_SCALES * KV_SCALE_BYTES
SCALE_BYTES = tl.constexpr(_SCALES)


@triton.jit
def _rotated(source, c, s, column, inside, HALF: tl.constexpr):
    """Return both halves of rotated values from ``source``; a pair is HALF apart."""
    low = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + column, mask=inside, other=0.0).to(tl.float32)
    return low * c - high * s, high * c + low * s


# fmt: off
@triton.jit(do_not_specialize=["layer"])
def _latent_write(
    latents, weight, projected, queries, cos, sin, positions, rows, pool, scales, layer, eps,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, STILL: tl.constexpr, LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # fmt: on
    """Write a token's row of the pool (first program of a token), or rotate TILE query heads (the others)."""
    WIDTH: tl.constexpr = RANK + ROTARY
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    angles = tl.load(positions + token).to(tl.int64) * HALF + column
    c = tl.load(cos + angles, mask=column < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=column < HALF, other=0.0).to(tl.float32)
    inside = column < HALF
    if tl.program_id(1) == 0:
        row = tl.load(rows + token)
        if row >= 0:
            PIECE: tl.constexpr = BLOCK_SIZE * (WIDTH + SCALE_BYTES) if FP8 else BLOCK_SIZE * WIDTH
            piece = ((row // BLOCK_SIZE).to(tl.int64) * LAYERS + layer) * PIECE
            target = pool + piece + row % BLOCK_SIZE * WIDTH
            place = tl.arange(0, BLOCK)
            there = place < RANK
            loaded = tl.load(latents + token * WIDTH + place, mask=there, other=0.0)
            values = loaded.to(tl.float32)
            normed = values * tl.rsqrt(tl.sum(values * values, 0) / RANK + eps)
            if not WIDE:
                normed = normed.to(loaded.dtype).to(tl.float32)
            normed *= tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
            low, high = _rotated(latents + token * WIDTH + RANK, c, s, column, inside, HALF)
            if FP8:
                factors = scales + piece // 4 + BLOCK_SIZE * WIDTH // 4 + row % BLOCK_SIZE
                of_latents = fp8.scale_of(tl.max(tl.abs(normed), 0))
                of_key = fp8.scale_of(tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0))
                tl.store(factors, of_latents)
                tl.store(factors + BLOCK_SIZE, of_key)
                inverse = tl.math.div_rn(1.0, of_key)
                tl.store(target + place, fp8.encode(normed * tl.math.div_rn(1.0, of_latents)), mask=there)
                tl.store(target + RANK + column, fp8.encode(low * inverse), mask=inside)
                tl.store(target + RANK + HALF + column, fp8.encode(high * inverse), mask=inside)
            else:
                kind: tl.constexpr = pool.dtype.element_ty
                tl.store(target + place, normed.to(kind), mask=there)
                tl.store(target + RANK + column, low.to(kind), mask=inside)
                tl.store(target + RANK + HALF + column, high.to(kind), mask=inside)
    else:
        head = ((tl.program_id(1) - 1) * TILE + tl.arange(0, TILE))[:, None]
        mine = (head < HEADS) & inside
        source = projected + (token * HEADS + head) * (STILL + ROTARY) + STILL
        left, right = _rotated(source, c, s, column, mine, HALF)
        query = queries + (token * HEADS + head) * WIDTH + RANK
        tl.store(query + column, left.to(queries.dtype.element_ty), mask=mine)
        tl.store(query + HALF + column, right.to(queries.dtype.element_ty), mask=mine)


def latent_write(
    latents: torch.Tensor,
    weight: torch.Tensor,
    projected: torch.Tensor,
    queries: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    layer: int,
    rotary: Rotary,
    *,
    eps: float,
    wide: bool,
) -> None:
    """Norm and rotate rows into ``rows`` of ``pool``, and rotate the last values of each query.

    Args:
        latents: [T, rank + rotary], not modified.
        weight: of the norm [rank], float32 if ``wide``, else of the type of the latents.
        projected: [T, heads, still + rotary].
        queries: [T, heads, rank + rotary], of which the last ``rotary`` values are written.
        pool: contiguous [slots, layers, 1, 1, block_size, rank + rotary], or, in 8 bits, uint8 [slots, layers, 1, 1,
            block_size * (rank + rotary + 8)], as in ``LatentAttention``.
        rows: int32 [T], slot * block_size + row in the block, each at most once; -1 writes nothing to the pool.
        wide: whether the norm rounds only after its weight.

    Raises Internal for misshapen tensors.
    """
    check_tensor("latents", latents, (None, None), FLOAT_DTYPES)
    (tokens, width), kind, device = latents.shape, latents.dtype, latents.device
    rank = len(weight)
    rotated = width - rank
    check_widths(rank, rotated)
    check_tensor("weight", weight, (rank,), torch.float32 if wide else kind, device)
    check_tensor("projected", projected, (tokens, None, None), kind, device)
    heads, still = projected.shape[1], projected.shape[2] - rotated
    check(still >= 0, "queries have {} values, of which {} are rotated", projected.shape[2], rotated)
    check_tensor("queries", queries, (tokens, heads, width), kind, device)
    is_fp8 = pool.dtype == torch.uint8
    check_tensor("pool", pool, (None, None, 1, 1, None, *([] if is_fp8 else [width])), torch.uint8 if is_fp8 else kind)
    check_pool_device(pool, device)
    layers, (block_size, rest) = pool.shape[1], divmod(pool.shape[4], width + _SCALES) if is_fp8 else (pool.shape[4], 0)
    check(rest == 0, "{} bytes are no rows of {} values", pool.shape[4], width)
    check_tensor("rows", rows, (tokens,), torch.int32, device)
    check(tokens > 0 and 0 <= layer < layers, "{} tokens in layer {} of {}", tokens, layer, layers)
    check_tensor("cos", rotary.cos, (None, rotated // 2), FLOAT_DTYPES, device)
    check_tensor("sin", rotary.sin, tuple(rotary.cos.shape), rotary.cos.dtype, device)
    check_tensor("positions", rotary.positions, (tokens,), torch.int32, device)
    constants = _constants(heads, rank, rotated, still, layers, block_size, arch_of(device))
    scales = pool.view(torch.float32) if is_fp8 else pool
    _latent_write[(tokens, 1 + cdiv(heads, constants["TILE"]))](
        *(latents, weight, projected, queries, *rotary, rows, pool, scales, layer, eps),
        WIDE=wide,
        FP8=is_fp8,
        **constants,
    )


def _constants(
    heads: int, rank: int, rotary: int, still: int, layers: int, block_size: int, arch: int
) -> dict[str, int]:
    use = tuned("kv_write", arch)
    half = next_power_of_2(rotary // 2)
    shape = {"HEADS": heads, "RANK": rank, "ROTARY": rotary, "STILL": still, "LAYERS": layers, "BLOCK_SIZE": block_size}
    blocks = {"BLOCK": next_power_of_2(rank), "BLOCK_HALF": half}
    return {**shape, **blocks, "TILE": use["tile_values"] // half, "num_warps": use["num_warps"]}
