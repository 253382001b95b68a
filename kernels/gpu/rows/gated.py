"""MLP activation: act(gate) * up, with act(gate) rounded before the product, as in transformers; without a gate,
act(up)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.tuned import tuned

# Activations without parameters; xIELU has two factors.
NAMED = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
ACTIVATIONS = (*NAMED, "xielu")
# sqrt(8 / pi), and the cubic term of gelu's tanh approximation (arXiv 1606.08415).
_GELU_SLOPE = tl.constexpr(1.5957691216057308)
_GELU_CUBE = tl.constexpr(0.044715)
_ROOT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """Activate float32 values. gelu's 0.5 * (1 + tanh(u)) is sigmoid(2 * u): one exponential, and no cancellation."""
    if ACTIVATION == "gelu_tanh":
        return gate * tl.sigmoid((gate + gate * gate * gate * _GELU_CUBE) * _GELU_SLOPE)
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * _ROOT_HALF))
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    positive = tl.where(gate < 0.0, 0.0, gate)
    return positive if ACTIVATION == "relu" else positive * positive


@triton.jit
def _xielu(x, above, below):
    """Return xIELU (arXiv 2411.13010) of float32 values, whose slope at 0 is 0.5: ``above`` times x squared above 0,
    and ``below`` times exp(x) - 1 - x elsewhere, as a series near 0, because the difference cancels there."""
    low = tl.minimum(x, 0.0)
    series = low * low * (0.5 + low * (1 / 6 + low * (1 / 24 + low * (1 / 120 + low * (1 / 720 + low * (1 / 5040))))))
    curve = tl.where(low < -0.5, tl.exp(low) - 1.0 - low, series)
    return 0.5 * x + tl.where(x > 0.0, above * x * x, below * curve)


@triton.jit
def _gated(
    gate_up,
    up,
    out,
    inner,
    up_stride,
    parts,
    above,
    below,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier(DEPENDENT)
    row = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    source = gate_up + row * ((2 if GATED and not APART else 1) * inner) + columns
    gate = tl.load(source, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    values = (_xielu(wide, above, below) if ACTIVATION == "xielu" else _activated(wide, ACTIVATION)).to(gate.dtype)
    if GATED:
        up_ptrs = up + row * up_stride + columns if APART else source + inner
        factor = tl.load(up_ptrs, mask=inside, other=0.0)
        values = (values.to(tl.float32) * factor.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * inner + columns, values, mask=inside)


def gated(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    bends: tuple[float, float] = (0.0, 0.0),
    *,
    up: torch.Tensor | None = None,
) -> None:
    """Write act(gate) * up of ``gate_up`` [T, 2 * inner], gates first, into ``out`` [T, inner] of the same type. If
    ``gate_up`` is [T, inner], write its activation, times ``up`` [T, inner] if that is passed. Rows of ``up`` may be
    strided.

    activation: one of ACTIVATIONS. bends: xIELU's factors above and below 0.
    Raises Internal for misshapen tensors and unknown activations.
    """
    check_tensor("gate_up", gate_up, (None, None), (torch.bfloat16, torch.float16, torch.float32))
    tokens, inner = len(gate_up), out.shape[-1]
    has_gate = gate_up.shape[1] == 2 * inner
    check((has_gate or gate_up.shape[1] == inner) and inner > 0 and tokens > 0, "gate_up is {}", gate_up.shape)
    check_tensor("out", out, (tokens, inner), gate_up.dtype, gate_up.device)
    check(activation in ACTIVATIONS, "activation {!r} is not known", activation)
    if up is not None:
        fits = up.shape == out.shape and up.dtype == out.dtype and up.device == out.device and up.stride(1) == 1
        check(fits and not has_gate, "up is {} of {}", up.shape, up.dtype)
    constants = _constants(activation, has_gate or up is not None, arch_of(gate_up.device), apart=up is not None)
    parts, factors = cdiv(inner, constants["BLOCK"]), gate_up if up is None else up
    _gated[(tokens * parts,)](gate_up, factors, out, inner, factors.stride(0), parts, *bends, **constants)


def _constants(activation: str, has_gate: bool, arch: int, *, apart: bool = False) -> dict[str, Any]:
    use = tuned("gated", arch)
    kind = {"ACTIVATION": activation, "GATED": has_gate, "APART": apart}
    return {**kind, "BLOCK": use["block"], "num_warps": use["num_warps"], **dependent(arch)}
