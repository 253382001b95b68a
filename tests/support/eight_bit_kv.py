"""Pools with keys and values in 8 bits, in plain torch: rounding of rows, and layout of codes and scales.

A pool is uint8 [slots, layers, 2, kv_heads, piece bytes] as :mod:`pillion.kernels.cpu.attention.kv_layout` describes.
"""

from __future__ import annotations

import torch

LANES = 16
TYPES = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


def quantize_rows(rows: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., head_dim] float32 -> codes of an 8-bit type, of the same shape, and scales [...] float32."""
    dtype, most = TYPES[kind]
    largest = rows.abs().amax(-1)
    scales = (largest / most).clamp(min=2.0**-100)
    quotients = (rows * (1.0 / scales).unsqueeze(-1)).clamp(-most, most)
    return (quotients.round() if kind == "int8" else quotients).to(dtype), scales


def places(block_size: int, head_dim: int, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes in a piece of codes [2 (K, V), block_size, head_dim], and of scales [block_size, parts * 4]."""
    token, column = torch.arange(block_size).unsqueeze(-1), torch.arange(head_dim)
    group, token = token // LANES * (LANES * (head_dim + 4 * parts)), token % LANES

    def in_line(lane: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return lane // 4 * 16 + value % 4 // 2 * 8 + lane % 4 * 2 + value % 2

    keys = group + column // 4 * 64 + in_line(token, column)
    values = group + token // 4 * (head_dim * 4) + column // LANES * 64 + in_line(column % LANES, token)
    scales = torch.cat([part * LANES * 4 + torch.arange(4) for part in range(parts)])
    return torch.stack((keys, values)), group + LANES * head_dim + token * 4 + scales


def pack_codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack codes [slots, layers, 2, kv_heads, block_size, head_dim] and scales without the last dimension, or with a
    row's parts in its place, into a pool."""
    (block_size, head_dim), parts = codes.shape[-2:], scales.shape[-1] if scales.dim() == codes.dim() else 1
    pool = torch.zeros((*codes.shape[:-2], block_size * (head_dim + 4 * parts)), dtype=torch.uint8)
    of_codes, of_scales = places(block_size, head_dim, parts)
    for part in range(2):
        pool[:, :, part, :, of_codes[part]] = codes.view(torch.uint8)[:, :, part]
    pool[..., of_scales] = scales.reshape(*codes.shape[:-1], parts).contiguous().view(torch.uint8)
    return pool


def unpack_codes(pool: torch.Tensor, block_size: int, kind: str, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert :func:`pack_codes`; scales have ``parts`` as their last dimension if there are several."""
    of_codes, of_scales = places(block_size, pool.shape[-1] // block_size - 4 * parts, parts)
    codes = torch.stack([pool[:, :, part][..., of_codes[part]] for part in range(2)], 2)
    return codes.view(TYPES[kind][0]), pool[..., of_scales].view(torch.float32).squeeze(-1)


def dequantized(pool: torch.Tensor, block_size: int, kind: str, latents: int = 0) -> torch.Tensor:
    """Return the values of a pool, float32 [slots, layers, 2, kv_heads, block_size, head_dim]. The first ``latents``
    values of a row and those after them are scaled separately."""
    codes, scales = unpack_codes(pool, block_size, kind, 2 if latents else 1)
    if not latents:
        return codes.float() * scales.unsqueeze(-1)
    counts = torch.tensor((latents, codes.shape[-1] - latents))
    return codes.float() * scales.repeat_interleave(counts, -1)
