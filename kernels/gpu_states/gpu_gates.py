"""Norm and gates of the results of layers with states: an RMS norm over each group of a row's values, times silu of
their gates, or their sigmoid. If a group is divided over ranks, the squares of all parts are summed before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.tuned import tuned

# Max values per group, which must fit into a program's registers.
MAX_GROUP_VALUES = 16384


@triton.jit
def _group_squares(
    x, gates, out, width, gates_stride, group, group_width,
    COLUMNS: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, every = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0)
    if GATE_FIRST:
        gate = tl.load(gates + row * gates_stride + column, mask=inside, other=0.0).to(tl.float32)
        values *= gate * tl.sigmoid(gate)
    tl.store(out + row * COLUMNS + every, tl.where(every == group, tl.sum(values * values, 0) / group_width, 0.0))


@triton.jit
def _norm_gated(
    x, gates, weight, out, squares, groups, width, gates_stride, squares_stride, eps,
    OWN_WEIGHTS: tl.constexpr, GATE_FIRST: tl.constexpr, NORMED: tl.constexpr, SIGMOID: tl.constexpr,
    SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * groups * width + group * width + column
    values = tl.load(x + at, mask=inside, other=0.0)
    gate = tl.load(gates + row * gates_stride + group * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate) if SIGMOID else gate * tl.sigmoid(gate)
    if GATE_FIRST:
        values *= gate
    if NORMED:
        factors = tl.load(weight + (group * width if OWN_WEIGHTS else 0) + column, mask=inside, other=0.0)
        mean = tl.load(squares + row * squares_stride) if SUMMED else tl.sum(values * values, 0) / width
        values = values * tl.rsqrt(mean + eps) * factors
    if not GATE_FIRST:
        values *= gate
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def group_squares(
    x: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, group: int, group_width: int, *, gate_first: bool
) -> None:
    """Sum the squares of rows ``x`` float32 [T, values], a part of the group ``group`` of ``group_width`` values, and
    divide the sums by that, into this column of ``out`` float32 [T, columns], a power of two. All other columns become
    0. ``gates`` and ``gate_first`` are those of :func:`norm_gated`. Raises Internal for misshapen tensors."""
    check_tensor("x", x, (None, None), torch.float32)
    tokens, values = x.shape
    _check_gates(gates, x)
    check_tensor("out", out, (tokens, None), torch.float32, x.device)
    columns = out.shape[1]
    check(columns & (columns - 1) == 0 <= group < columns, "group {} of {}", group, columns)
    check(0 < values <= MAX_GROUP_VALUES, "{} values of a group", values)
    _group_squares[(tokens,)](
        *(x, gates, out, values, gates.stride(0), group, group_width),
        COLUMNS=columns,
        GATE_FIRST=gate_first,
        **gate_constants(values, arch_of(x.device)),
    )


def norm_gated(
    x: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    *,
    groups: int = 1,
    gate_first: bool = False,
    sigmoid: bool = False,
    squares: torch.Tensor | None = None,
) -> None:
    """Norm each of the ``groups`` of rows ``x`` float32 [T, values] and gate them, into ``out`` [T, values].

    gates: [T, values] of out's type, whose rows are ``stride(0)`` apart. weight: float32, of one group, common to all,
    or of a whole row; None for gates without a norm. gate_first: gates are applied before the norm, not after. sigmoid:
    gates are sigmoids. squares: float32 [T], the means of squares if rows are a part of one group, ``stride(0)`` apart
    (:func:`group_squares`). Raises Internal for misshapen tensors.
    """
    check_tensor("x", x, (None, None), torch.float32)
    (tokens, values), device = x.shape, x.device
    width, rest = divmod(values, groups)
    check(rest == 0 and 0 < width <= MAX_GROUP_VALUES, "{} values in {} groups", values, groups)
    check_tensor("out", out, (tokens, values), FLOAT_DTYPES, device)
    check(gates.dtype == out.dtype, "gates are {}", gates.dtype)
    _check_gates(gates, x)
    if squares is not None:
        fits = squares.shape == (tokens,) and squares.dtype == torch.float32 and squares.device == device
        check(fits and groups == 1, "squares are {} of {} groups", squares.shape, groups)
    if weight is not None:
        check_tensor("weight", weight, (None,), torch.float32, device)
        check(len(weight) in (width, values), "weight has {} values, not {} or {}", len(weight), width, values)
    own = weight is not None and len(weight) == values
    flags = {"OWN_WEIGHTS": own, "GATE_FIRST": gate_first, "NORMED": weight is not None, "SIGMOID": sigmoid}
    summed = x if squares is None else squares
    _norm_gated[(tokens * groups,)](
        *(x, gates, x if weight is None else weight, out, summed, groups, width, gates.stride(0), summed.stride(0)),
        eps,
        **flags,
        SUMMED=squares is not None,
        **gate_constants(width, arch_of(device)),
    )


def _check_gates(gates: torch.Tensor, x: torch.Tensor) -> None:
    check(gates.shape == x.shape and gates.dtype in FLOAT_DTYPES, "gates are {} {}", gates.dtype, gates.shape)
    check(gates.stride(1) == 1 and gates.device == x.device, "rows of gates are not contiguous, or on another device")


def gate_constants(width: int, arch: int) -> dict[str, int]:
    """Return block size and launch options of both kernels for groups of ``width`` values."""
    block = next_power_of_2(width)
    use = tuned("norm_gated", arch, columns=block)
    return {"BLOCK": block, "num_warps": use["num_warps"]}
