"""The smaller GPU kernels in plain torch: the oracle of their tests, and their explanation."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, relu, silu

FP8_MAX = 448.0
FP8_MIN_SCALE = 2.0**-100


def embed(
    ids: torch.Tensor,
    sampled: torch.Tensor,
    table: torch.Tensor,
    scale: float = 1.0,
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return rows of ``table`` [vocab, hidden] times ``scale``. An id ``-1 - row`` refers to ``sampled[row]``, or to 0
    if that is negative. ``positions``: rows of another table to add."""
    known = torch.where(ids < 0, sampled[(-1 - ids).clamp(min=0).long()], ids).clamp(min=0)
    rows = table[known.long()]
    rows = rows if scale == 1.0 else (rows.float() * scale).to(table.dtype)
    return rows if positions is None else rows + positions[1][positions[0].long()]


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float, wide: bool) -> torch.Tensor:
    """Return the RMS norm over the last dimension; a plain norm is rounded before the weight multiplies, a wide one
    after."""
    normed = values.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(values.dtype) if wide else normed.to(values.dtype) * weight


def add_rms_norm(
    residual: torch.Tensor,
    found: torch.Tensor,
    scale: float,
    post_weight: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add a layer's output to the residual stream [T, hidden]; return the sum, and its norm for the next layer.

    The sum is rounded once and the scale never, as in torch on a GPU; on a CPU torch rounds the scale as well.
    """
    added = found if post_weight is None else rms_norm(found, post_weight, eps, wide)
    total = (residual.float() + scale * added.float()).to(residual.dtype)
    return total, None if weight is None else rms_norm(total, weight, eps, wide)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) * up of [T, 2 * inner], gate first."""
    gate, up = gate_up.chunk(2, -1)
    return activated(gate, activation) * up


def activated(up: torch.Tensor, activation: str, bends: tuple[float, float] = (0.0, 0.0)) -> torch.Tensor:
    """Apply an activation; ``bends`` are xIELU's factors above and below 0."""
    match activation:
        case "relu":
            return relu(up)
        case "relu2":
            return relu(up.float()).square().to(up.dtype)
        case "silu":
            return silu(up)
        case "xielu":
            exact = up.double()
            curve = torch.where(exact > 0, bends[0] * exact.square(), bends[1] * (torch.expm1(exact) - exact))
            return (curve + 0.5 * exact).to(up.dtype)
    return gelu(up, approximate="tanh" if activation == "gelu_tanh" else "none")


def normed_and_rotated(
    qkv: torch.Tensor,
    kv_heads: int,
    heads: int,
    norm: tuple[torch.Tensor, float] | None,
    rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    centred: bool = False,
    norms_values: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize and rotate a projection's queries [T, heads, D] and keys [T, kv_heads, D]; return them and the values.

    All are float32 and never rounded.

    norm: weight [heads + kv_heads, D] and eps; ``centred``: LayerNorm. ``norms_values``: normalize values as well,
    without weights. rotary: cosines and sines [max_len, D / 2] and positions [T].
    """
    every = qkv.float().view(len(qkv), heads + 2 * kv_heads, -1)
    changed, values = every.tensor_split([heads + kv_heads], 1)
    if norm is not None:
        if norms_values:
            values = rms_norm(values, torch.ones(()), norm[1], wide=True)
        changed = changed - changed.mean(-1, keepdim=True) if centred else changed
        changed = rms_norm(changed, norm[0].float(), norm[1], wide=True)
    if rotary is not None:
        cos, sin = (table[rotary[2].long()].float()[:, None] for table in rotary[:2])
        low, high = changed.chunk(2, -1)
        changed = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return changed[:, :heads], changed[:, heads:], values


def store_rows(pool: torch.Tensor, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store keys and values [T, kv_heads, D] in rows of a layer of ``pool`` [.., block_size, D]; row -1 is dropped."""
    block_size = pool.shape[4]
    for token, row in enumerate(rows.tolist()):
        if row >= 0:
            pool[row // block_size, layer, 0, :, row % block_size] = keys[token].to(pool.dtype)
            pool[row // block_size, layer, 1, :, row % block_size] = values[token].to(pool.dtype)


def fp8_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode float32 rows [..., D] as e4m3 codes (uint8) of the same shape and scales [...]."""
    scales = (values.abs().amax(-1) / FP8_MAX).clamp(min=FP8_MIN_SCALE)
    scaled = (values * (1.0 / scales)[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def fp8_parts(pool: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View an "fp8-rows-1" pool as codes [slots, layers, 2, kv_heads, block_size, D], and scales [.., block_size]."""
    block_size = pool.shape[4] // (head_dim + 4)
    codes = pool[..., : block_size * head_dim].view(*pool.shape[:-1], block_size, head_dim)
    return codes, pool.view(torch.float32)[..., -block_size:]


def fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode codes [..., D] and scales [...] to float32."""
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scales[..., None]


def masked(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return logits [R, V] with minus infinity where row m of ``masks`` int32 [M, W] has a 0 for row rows[m]."""
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    found = logits.clone()
    found[rows.long()] = found[rows.long()].masked_fill(~allowed, -torch.inf)
    return found
