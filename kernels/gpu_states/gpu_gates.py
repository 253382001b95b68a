"""Norms and gates what layers with a state have found: an RMS norm over each group of a row's values, times silu of
their gates, or their sigmoid."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states.gpu_convolutions import DTYPES

# A program holds a whole group in registers, so wider ones are refused.
MAX_GROUP_VALUES = 16384


@triton.jit
def _norm_gated(
    x, gates, weight, out, groups, width, gates_stride, eps,
    OWN_WEIGHTS: tl.constexpr, GATE_FIRST: tl.constexpr, NORMED: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
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
        values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * factors
    if not GATE_FIRST:
        values *= gate
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


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
) -> None:
    """Norms each of the ``groups`` of rows ``x`` float32 [T, values] and gates them, into ``out`` [T, values].

    gates: [T, values] of out's type, whose rows are ``stride(0)`` apart. weight: float32, of one group, which all have
    in common, or of a whole row; None where rows are gated alone. gate_first: whether gated rows are normed, not normed
    rows gated. sigmoid: whether gates are sigmoids. Raises Internal for misshapen tensors.
    """
    check_tensor("x", x, (None, None), torch.float32)
    (tokens, values), device = x.shape, x.device
    width, rest = divmod(values, groups)
    check(rest == 0 and 0 < width <= MAX_GROUP_VALUES, "{} values in {} groups", values, groups)
    check_tensor("out", out, (tokens, values), DTYPES, device)
    check(tuple(gates.shape) == (tokens, values) and gates.dtype == out.dtype, "gates are {}", gates.shape)
    check(gates.stride(1) == 1 and gates.device == device, "gates have no contiguous rows, or are elsewhere")
    if weight is not None:
        check_tensor("weight", weight, (None,), torch.float32, device)
        check(len(weight) in (width, values), "weight has {} values, not {} or {}", len(weight), width, values)
    own = weight is not None and len(weight) == values
    flags = {"OWN_WEIGHTS": own, "GATE_FIRST": gate_first, "NORMED": weight is not None, "SIGMOID": sigmoid}
    _norm_gated[(tokens * groups,)](
        *(x, gates, x if weight is None else weight, out, groups, width, gates.stride(0), eps),
        **flags,
        **gate_constants(width, arch_of(device)),
    )


def gate_constants(width: int, arch: int) -> dict[str, int]:
    """Returns the constants of the kernel for groups of so many values."""
    block = next_power_of_2(width)
    use = tuned("norm_gated", arch, columns=block)
    return {"BLOCK": block, "num_warps": use["num_warps"]}
