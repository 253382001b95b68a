"""RMS norms (arXiv 1910.07467) and LayerNorms (arXiv 1607.06450), alone or fused with the residual addition.

The end of one layer and the beginning of the next are one pass over the rows:

    found --[post norm]--> * scale --+
    residual ------------------------+--[* factor]--> residual --[norm]--> out

``found``, a layer's output, may be results of its rows' experts, which are added up first (experts/expert_sums.py).
Both norms and the factor are optional. Sums are in float32; roundings are where transformers has them: after a
post norm, after the sum, after its product with the factor, and in a norm either before its weight multiplies ("plain")
or only after ("wide").

Triton must not specialize on the number of rows: compiling for 1 row or multiples of 16 would stall a running server.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.experts.expert_sums import PairResults, weighed
from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, cdiv, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.tuned import tuned

# Max values per row, which must fit into a program's registers.
MAX_COLUMNS = 16384
# Tiles have a value for every thread at least, because in an in-place norm no two threads may read the same value.
_MIN_TILE_COLUMNS = 32


@triton.jit
def _normed(values, weight, inside, columns, eps, CENTERED: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr):
    """Norm values [rows, columns], padded with zeros, by weight [1, columns], in float32; convert to TYPE. CENTERED
    subtracts each row's mean."""
    if CENTERED:
        values = tl.where(inside, values - (tl.sum(values, 1) / columns)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / columns + eps)
    normed = values * scale[:, None]
    if not WIDE:
        normed = normed.to(TYPE).to(tl.float32)
    return (normed * weight).to(TYPE)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows [ROWS, 1] and columns [1, BLOCK] of this program, and a mask of those that exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row.to(tl.int64), column, (row < rows) & (column < columns)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    values,
    weight,
    bias,
    out,
    rows,
    columns,
    values_stride,
    out_stride,
    eps,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row, column, inside = _tile(rows, columns, ROWS, BLOCK)
    # Weights are constant, so they may be read before the values are ready.
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    if BIAS:
        # Loaded before the sums, because the compiler for sm_80 would otherwise spill an address.
        shift = tl.load(bias + column, mask=column < columns, other=0.0)
    wait_for_earlier(DEPENDENT)
    loaded = tl.load(values + row * values_stride + column, mask=inside, other=0.0)
    kind: tl.constexpr = tl.float32 if BIAS else loaded.dtype
    normed = _normed(loaded.to(tl.float32), factor, inside, columns, eps, CENTERED, WIDE, kind)
    if BIAS:
        normed = (normed + shift).to(loaded.dtype)
    tl.store(out + row * out_stride + column, normed, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    residual,
    found,
    scores,
    chosen,
    beside,
    post_weight,
    weight,
    bias,
    stream_factor,
    out,
    rows,
    columns,
    scale,
    eps,
    EXPERTS: tl.constexpr,
    BESIDE: tl.constexpr,
    POST: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row, column, inside = _tile(rows, columns, ROWS, BLOCK)
    at = row * columns + column
    if NORM and not POST:
        # Weights are constant, so they may be read before the values are ready. Two of them would fill the registers.
        factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    wait_for_earlier(DEPENDENT)
    stream = tl.load(residual + at, mask=inside, other=0.0)
    if EXPERTS:
        read = tl.minimum(row, rows - 1)
        added = weighed(found, scores, chosen, beside, read, column, inside, columns, EXPERTS, BESIDE)
        added = added.to(stream.dtype)
    else:
        added = tl.load(found + at, mask=inside, other=0.0)
    if POST:
        post = tl.load(post_weight + column, mask=column < columns, other=0.0).to(tl.float32)
        added = _normed(added.to(tl.float32), post, inside, columns, eps, CENTERED, WIDE, added.dtype)
    total = (stream.to(tl.float32) + scale * added.to(tl.float32)).to(stream.dtype)
    if FACTOR:
        total = (total.to(tl.float32) * tl.load(stream_factor).to(tl.float32)).to(stream.dtype)
    tl.store(residual + at, total, mask=inside)
    if NORM:
        if POST:
            factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        kind: tl.constexpr = tl.float32 if BIAS else stream.dtype
        normed = _normed(total.to(tl.float32), factor, inside, columns, eps, CENTERED, WIDE, kind)
        if BIAS:
            normed = (normed + tl.load(bias + column, mask=column < columns, other=0.0)).to(stream.dtype)
        tl.store(out + at, normed, mask=inside)


def rms_norm(
    values: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    wide: bool,
    *,
    centered: bool = False,
    bias: torch.Tensor | None = None,
) -> None:
    """Norm every row of ``values`` [T, columns] into ``out``, of the same shape and type; both may be the same memory.

    Both may be columns of wider rows: each row is contiguous, and rows are ``stride(0)`` apart.
    weight: [columns], float32 if ``wide``, else of the type of the values. Raises Internal for misshapen tensors.
    centered: subtract each row's mean, as a LayerNorm. bias: float32 [columns], added at the end.
    """
    rows, columns = _check_rows("values", values)
    check(out.shape == values.shape and out.dtype == values.dtype, "out differs from values in shape or type")
    check(out.stride(1) == 1 and out.device == values.device, "rows of out are not contiguous, or on another device")
    _check_weight(weight, values, wide)
    tile = _row_tile(columns, arch_of(values.device))
    grid = (cdiv(rows, tile["ROWS"]),)
    strides = values.stride(0), out.stride(0)
    flags = {"CENTERED": centered, "BIAS": bias is not None, "WIDE": wide}
    shift = values if bias is None else bias
    _check_bias(bias, values)
    _rms_norm[grid](values, weight, shift, out, rows, columns, *strides, eps, **flags, **tile)


def add_rms_norm(
    residual: torch.Tensor,
    found: torch.Tensor | PairResults,
    out: torch.Tensor | None,
    *,
    weight: torch.Tensor | None,
    post_weight: torch.Tensor | None = None,
    scale: float = 1.0,
    factor: torch.Tensor | None = None,
    eps: float,
    wide: bool,
    centered: bool = False,
    bias: torch.Tensor | None = None,
) -> None:
    """Add to the residual stream and norm it: residual = factor * (residual + scale * post_norm(found)), in place,
    and out = norm(residual). All are [T, columns] and of one type; ``found`` may be results of experts, which are added
    up.

    factor: [1], of the type of the stream or float32; None for 1. weight, post_weight, centered, bias: as in
    :func:`rms_norm`; None omits that norm. ``bias`` is that of the norm after the sum. ``out`` is None if and only if
    ``weight`` is, and may be the memory of ``found``. Raises Internal for misshapen tensors.
    """
    rows, columns = _check_rows("residual", residual)
    whole = None if isinstance(found, PairResults) else found
    if isinstance(found, PairResults):
        found.check(rows, columns, residual)
    for name, tensor in (("residual", residual), ("found", whole), ("out", out)):
        if tensor is not None:
            check_tensor(name, tensor, (rows, columns), residual.dtype, residual.device)
    check((out is None) == (weight is None), "out and weight are given both or neither")
    for each in (weight, post_weight):
        if each is not None:
            _check_weight(each, residual, wide)
    _check_bias(bias, residual)
    if factor is not None:
        check_tensor("factor", factor, (1,), (residual.dtype, torch.float32), residual.device)
    tile = _row_tile(columns, arch_of(residual.device))
    # Omitted tensors are not read, so any pointer will do.
    optional = (residual if tensor is None else tensor for tensor in (post_weight, weight, bias, factor, out))
    flags: dict[str, int] = {"POST": post_weight is not None, "NORM": weight is not None, "WIDE": wide}
    flags |= {"CENTERED": centered, "BIAS": bias is not None, "FACTOR": factor is not None}
    mixed = found if isinstance(found, PairResults) else PairResults(found, residual, residual)
    flags |= {"EXPERTS": mixed.scores.shape[1] if whole is None else 0, "BESIDE": mixed.beside is not None}
    grid = (cdiv(rows, tile["ROWS"]),)
    _add_rms_norm[grid](residual, *mixed.pointers, *optional, rows, columns, scale, eps, **flags, **tile)


def _check_rows(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    check(tensor.ndim == 2, "{} has {} dimensions", name, tensor.ndim)
    check(tensor.dtype in FLOAT_DTYPES, "{} is of {}", name, tensor.dtype)
    rows, columns = tensor.shape
    check(rows > 0 and 0 < columns <= MAX_COLUMNS, "{} is {}", name, tensor.shape)
    check(tensor.stride(1) == 1, "{} has no contiguous rows", name)
    return rows, columns


def _check_weight(weight: torch.Tensor, values: torch.Tensor, wide: bool) -> None:
    check_tensor("weight", weight, (values.shape[1],), torch.float32 if wide else values.dtype, values.device)


def _check_bias(bias: torch.Tensor | None, values: torch.Tensor) -> None:
    if bias is not None:
        check_tensor("bias", bias, (values.shape[1],), torch.float32, values.device)


def _row_tile(columns: int, arch: int) -> dict[str, int]:
    block = max(next_power_of_2(columns), _MIN_TILE_COLUMNS)
    use = tuned("norms", arch, columns=block)
    return {"ROWS": use["rows"], "BLOCK": block, "num_warps": use["num_warps"], **dependent(arch)}
