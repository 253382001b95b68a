"""Activates an MLP: act(gate) * up, with act(gate) rounded before the product, as in transformers; without a gate,
act(up)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.tuned import tuned

ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
# These are sqrt(8 / pi) and the cubic term of gelu's tanh approximation (arXiv 1606.08415).
_GELU_SLOPE = tl.constexpr(1.5957691216057308)
_GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def _activated(gate, GELU: tl.constexpr, RELU2: tl.constexpr):
    """Activates float32 values. gelu's 0.5 * (1 + tanh(u)) is sigmoid(2 * u): one exponential, and no cancellation."""
    if GELU:
        return gate * tl.sigmoid((gate + gate * gate * gate * _GELU_CUBE) * _GELU_SLOPE)
    if RELU2:
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive
    return gate * tl.sigmoid(gate)


@triton.jit
def _gated(
    gate_up,
    out,
    inner,
    parts,
    GELU: tl.constexpr,
    RELU2: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier(DEPENDENT)
    row = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    source = gate_up + row * ((2 if GATED else 1) * inner) + columns
    gate = tl.load(source, mask=inside, other=0.0)
    values = _activated(gate.to(tl.float32), GELU, RELU2).to(gate.dtype)
    if GATED:
        up = tl.load(source + inner, mask=inside, other=0.0)
        values = (values.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * inner + columns, values, mask=inside)


def gated(gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """Writes act(gate) * up of ``gate_up`` [T, 2 * inner], gate first, into ``out`` [T, inner] of the same type; of
    ``gate_up`` [T, inner] act(up).

    activation: one of ACTIVATIONS. Raises Internal for misshapen tensors and unknown activations.
    """
    check_tensor("gate_up", gate_up, (None, None), (torch.bfloat16, torch.float16, torch.float32))
    tokens, inner = len(gate_up), out.shape[-1]
    has_gate = gate_up.shape[1] == 2 * inner
    check((has_gate or gate_up.shape[1] == inner) and inner > 0 and tokens > 0, "gate_up is {}", gate_up.shape)
    check_tensor("out", out, (tokens, inner), gate_up.dtype, gate_up.device)
    check(activation in ACTIVATIONS, "activation {!r} is not known", activation)
    constants = _constants(activation, has_gate, arch_of(gate_up.device))
    parts = cdiv(inner, constants["BLOCK"])
    _gated[(tokens * parts,)](gate_up, out, inner, parts, **constants)


def _constants(activation: str, has_gate: bool, arch: int) -> dict[str, int]:
    use = tuned("gated", arch)
    kind = {"GELU": activation == "gelu_tanh", "RELU2": activation == "relu2", "GATED": has_gate}
    return {**kind, "BLOCK": use["block"], "num_warps": use["num_warps"], **dependent(arch)}
