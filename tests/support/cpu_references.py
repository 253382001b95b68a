"""Reference results of the CPU kernels by torch: one function per kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import gelu, silu

from lab.testbed.attention_reference import paged_attention
from pillion.engine.models.layer_operations import XIELU_SLOPE, ClampedSwiglu
from pillion.engine.models.layers import clamped_swiglu, xielu
from pillion.kernels.cpu.products.gemm import GATED
from pillion.kernels.cpu.products.packed_weight import PackedWeight
from pillion.kernels.cpu.products.tiles import TILE_COLUMNS
from pillion.kernels.cpu.quantized.matrix_packing import unpack
from pillion.kernels.cpu.rows.rotate import RotateWrite
from pillion.kernels.step import StepBatch
from tests.support.eight_bit_kv import dequantized, pack_codes, quantize_rows, unpack_codes
from tests.support.plain_pools import pack_pool, unpack_pool, write_kv

# Parameters of "gated_clamped" in GEMM tests, whose values are about 1.
CLAMPED = ClampedSwiglu(alpha=1.3, limit=0.8)
# xIELU's factors above and below 0, and checkpoint values whose softplus gives them (the second plus the slope at 0).
BENDS = 0.8, 1.3
_RAW_BENDS = torch.tensor([BENDS[0], BENDS[1] - XIELU_SLOPE]).expm1().log()


def reference_embed(table: torch.Tensor, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
    """Embed: table [vocab, width], token_ids [T] -> [T, width] float32."""
    return table[token_ids].float() * scale


def reference_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Norm: x [rows, width] float32 -> normed rows of the same shape and type."""
    if weight is None or kind == "none":
        return x
    if kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return normed if bias is None else normed + bias


def reference_norm_add(
    hidden: torch.Tensor, found: torch.Tensor, weight: torch.Tensor, eps: float, factor: float
) -> torch.Tensor:
    """Add the residual: hidden and found [rows, width] float32 -> the new value of hidden."""
    return hidden + factor * reference_norm(found, weight, eps, "rms")


def reference_gather_rows(
    hidden: torch.Tensor, attended: torch.Tensor, sample_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the sampled rows: hidden and attended [T, ...], sample_rows [R] -> both [R, ...]."""
    return hidden[sample_rows], attended[sample_rows]


def reference_soft_cap_scale(logits: torch.Tensor, divisor: float, cap: float) -> torch.Tensor:
    """Scale and cap logits [R, vocab] float32; cap 0 disables the cap."""
    scaled = logits / divisor
    return cap * torch.tanh(scaled / cap) if cap else scaled


def reference_rotate(
    spec: RotateWrite,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    growth: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Split, norm and rotate: qkv [T, (heads + 2 * kv_heads) * head_dim] float32 -> queries [T, heads, head_dim], keys
    and values [T, kv_heads, head_dim], of the model's type; keys and values to be quantized to 8 bits are float32.
    tables: cosines, sines; norms: weights of queries, of keys; growth: factors of queries [positions]."""
    parts = torch.split(qkv.view(len(qkv), -1, spec.head_dim), [spec.heads, spec.kv_heads, spec.kv_heads], 1)
    found = []
    for number, part in enumerate(parts[:2]):
        turned = part
        if norms is not None:
            over = part.flatten(1) if spec.qk_norm == "projection" else part
            weight = norms[number]
            if spec.qk_norm == "layer_by_head":
                weight, over = norms[number].view(-1, spec.head_dim), over - over.mean(-1, keepdim=True)
            normed = over * torch.rsqrt(over.pow(2).mean(-1, keepdim=True) + eps) * weight
            turned = normed.view(part.shape)
        if spec.rope:
            cos, sin = (table[positions][:, None] for table in tables)
            low, high = turned.chunk(2, -1)
            turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        found.append(turned)
    if growth is not None:
        found[0] = found[0] * growth[positions][:, None, None]
    model = torch.bfloat16 if spec.bf16 else torch.float32
    kept = torch.float32 if spec.codes else model
    return found[0].to(model), found[1].to(kept), parts[2].to(kept)


def reference_write(
    pool: torch.Tensor, layer: int, batch: StepBatch, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return the pool in the layout of :mod:`pillion.kernels.cpu.attention.kv_layout` after the step; V is 0 after the
    ends of blocks that the step began."""
    plain = unpack_pool(pool)
    write_kv(plain, layer, batch, keys, values)
    for slot, rows in _begun(batch, plain.shape[4]):
        plain[slot, layer, 1, :, rows] = 0
    return pack_pool(plain)


def reference_write_codes(
    pool: torch.Tensor, layer: int, batch: StepBatch, keys: torch.Tensor, values: torch.Tensor, kind: str, size: int
) -> torch.Tensor:
    """Return :func:`reference_write` for an 8-bit pool with blocks of ``size`` tokens; scales of V are 0 after ends."""
    codes, scales = unpack_codes(pool, size, kind)
    as_bytes = codes.view(torch.uint8)
    (key_codes, key_scales), (value_codes, value_scales) = (quantize_rows(part, kind) for part in (keys, values))
    write_kv(as_bytes, layer, batch, key_codes.view(torch.uint8), value_codes.view(torch.uint8))
    write_kv(scales, layer, batch, key_scales, value_scales)
    for slot, rows in _begun(batch, size):
        scales[slot, layer, 1, :, rows] = 0
    return pack_codes(codes, scales)


def _begun(batch: StepBatch, block_size: int) -> Iterator[tuple[int, slice]]:
    """Yield the blocks that this step began and did not fill, and the rows after their ends."""
    for seq, end in enumerate(batch.context_lens.tolist()):
        first = end - int(batch.query_starts[seq + 1] - batch.query_starts[seq])
        block, rest = divmod(end, block_size)
        if rest and first <= block * block_size:
            yield int(batch.block_tables[seq, block]), slice(rest, None)


def reference_gemm(
    x: torch.Tensor,
    packed: PackedWeight,
    epilogue: str,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Compute one group's GEMM in float64. x [T, depth] -> [T, pairs * 32], gated [T, pairs * 16]; "add" adds to
    ``out``."""
    total = x.double() @ unpack(packed).double().T
    if bias is not None:
        total = total + bias.double()
    if epilogue == "add":
        assert out is not None
        return out.double() + factor * total
    if epilogue in GATED:
        gate, up = total.view(len(total), packed.pairs, 2, TILE_COLUMNS).unbind(-2)
        if epilogue == "gated_clamped":
            return clamped_swiglu(torch.cat((gate, up), -1), CLAMPED).flatten(-2)
        gated = silu(gate) if epilogue == "gated_silu" else gelu(gate, approximate="tanh")
        return (gated * up).flatten(-2)
    if epilogue == "act_xielu":
        return xielu(total, _RAW_BENDS)
    return gelu(total) if epilogue == "act_erf_gelu" else total


def reference_sum_inputs(x: torch.Tensor, depth: int, inputs: int) -> torch.Tensor:
    """Sum groups of ``inputs`` values: x [rows, depth or more] -> [rows, groups] float32."""
    return torch.stack([part.sum(1) for part in x[:, :depth].float().split(inputs, 1)], 1)


def reference_gather_inputs(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Reorder columns: x [rows, ...], order [depth] -> [rows, depth]."""
    return x[:, order.long()]


def reference_route(
    logits: torch.Tensor,
    chosen: int,
    normalize: bool,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    groups: tuple[int, int, int] = (1, 1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select experts. ``groups``: number of groups, groups that a row's experts are from, best scores that count per
    group.

    logits [rows, experts] float32 -> scores [rows, chosen] float32, experts [rows, chosen] int32.
    """
    every = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    choices = every if bias is None else every + bias
    count, kept, best = groups
    ranks = choices.unflatten(-1, (count, -1)).topk(best, -1).values.sum(-1).argsort(-1, descending=True)
    inside = (
        torch.zeros(len(logits), count).scatter_(1, ranks[:, :kept], 1.0).repeat_interleave(logits.shape[1] // count, 1)
    )
    experts = choices.where(inside > 0, -torch.inf).topk(chosen, -1).indices
    scores = every.gather(-1, experts)
    return (scores / scores.sum(-1, keepdim=True) if normalize else scores) * scale, experts.int()


def reference_group(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort by expert: experts [rows, chosen] -> group_starts [num_experts + 1], places [rows, chosen], sources [rows *
    chosen]."""
    order = experts.view(-1).argsort(stable=True)
    counts = torch.bincount(experts.view(-1), minlength=num_experts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return starts.int(), places.view(experts.shape).int(), (order // experts.shape[1]).int()


def reference_gather_groups(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Gather: rows [rows, ...], sources [N] -> [N, ...]."""
    return rows[sources]


def reference_combine(
    out: torch.Tensor, found: torch.Tensor, scores: torch.Tensor, places: torch.Tensor, factor: float, add: bool
) -> torch.Tensor:
    """Combine: out [rows, width], found [rows * chosen, width], scores and places [rows, chosen] -> the new out."""
    total = factor * (found[places] * scores[..., None]).sum(1)
    return out + total if add else total


def reference_attention(
    queries: torch.Tensor,
    packed_pool: torch.Tensor,
    layer: int,
    batch: StepBatch,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    codes: str = "",
    block_size: int = 0,
) -> torch.Tensor:
    """Attend by torch: queries [kv_heads, T, group, head_dim] -> attended [T, heads * head_dim]. ``codes`` and
    ``block_size`` are those of a pool in 8 bits."""
    rows = queries.transpose(0, 1).flatten(1, 2)
    pool = dequantized(packed_pool, block_size, codes) if codes else unpack_pool(packed_pool)
    options = {"window": window, "chunked": chunked, "softcap": softcap, "sinks": sinks}
    return paged_attention(rows, pool, layer, batch, scale=scale, **options).flatten(1)
