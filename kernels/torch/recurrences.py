"""Recurrences of linear attention and state space layers over one sequence's rows, token by token, in float32.

A token's bits depend only on the rows up to it, however a text was cut into steps: each sum has the shape of one token,
and a fixed order. So a stored state equals the recomputed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus


@dataclass(frozen=True, slots=True)
class Taps:
    """Parameters of a causal depthwise convolution, float32: ``factors`` [channels, taps], the last tap for the token
    itself, and ``bias`` [channels], or None."""

    factors: torch.Tensor
    bias: torch.Tensor | None = None


def convolve(rows: torch.Tensor, inputs: torch.Tensor, taps: Taps) -> torch.Tensor:
    """Convolve a sequence's rows [n, channels] -> [n, channels]. ``inputs`` [taps - 1, channels], the rows before, are
    replaced in place by the last rows."""
    text = torch.cat((inputs, rows))
    factors = taps.factors.t()
    out = text[: len(rows)] * factors[0]
    for tap in range(1, len(factors)):
        out += text[tap : tap + len(rows)] * factors[tap]
    if taps.bias is not None:
        out += taps.bias
    inputs.copy_(text[len(rows) :])
    return out


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Inputs of the gated delta rule for n rows, in float32: ``queries`` and ``keys`` [n, key heads, key_dim],
    ``values`` [n, heads, head_dim], ``decays``, logarithms of factors up to 1, [n, heads, 1], or [n, heads, key_dim]
    for a decay per row of a head's matrix, and learning ``rates`` [n, heads]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor

    def of(self, rows: slice) -> DeltaRows:
        return DeltaRows(self.queries[rows], self.keys[rows], self.values[rows], self.decays[rows], self.rates[rows])


def delta_rule(rows: DeltaRows, memory: torch.Tensor) -> torch.Tensor:
    """Run the gated delta rule over a sequence's rows -> [n, heads, head_dim]; ``memory`` [heads, key_dim, head_dim]
    is the state before the rows, and becomes that after them, in place."""
    out = torch.empty_like(rows.values)
    heads_per_key, scale = len(memory) // rows.keys.shape[1], rows.keys.shape[-1] ** 0.5
    factors = rows.decays.exp()
    for token in range(len(out)):
        key = _unit(rows.keys[token]).repeat_interleave(heads_per_key, 0)[:, :, None]
        query = (_unit(rows.queries[token]) / scale).repeat_interleave(heads_per_key, 0)[:, :, None]
        memory *= factors[token, :, :, None]
        delta = (rows.values[token] - (memory * key).sum(1)) * rows.rates[token, :, None]
        memory += key * delta[:, None]
        out[token] = (memory * query).sum(1)
    return out


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Return vectors of unit L2 norm, with the models' epsilon."""
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, slots=True)
class SpaceRows:
    """Inputs of a state space for n rows, in float32: ``values`` [n, heads, head_dim], ``writes`` and ``reads`` (B and
    C) [n, groups, columns], and the time steps [n, heads]."""

    values: torch.Tensor
    writes: torch.Tensor
    reads: torch.Tensor
    steps: torch.Tensor

    def of(self, rows: slice) -> SpaceRows:
        return SpaceRows(self.values[rows], self.writes[rows], self.reads[rows], self.steps[rows])


def state_space(rows: SpaceRows, rates: torch.Tensor, skip: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Run a state space over a sequence's rows -> [n, heads, head_dim]; ``memory`` [heads, head_dim, columns]
    is the state before the rows, and becomes that after them, in place. ``rates`` (A) [heads] are negative; ``skip``
    (D) [heads]: factors of the values added to the results."""
    out = torch.empty_like(rows.values)
    heads_per_group = len(memory) // rows.writes.shape[1]
    decays = (rows.steps * rates).exp()
    for token in range(len(out)):
        write = rows.writes[token].repeat_interleave(heads_per_group, 0)[:, None]
        read = rows.reads[token].repeat_interleave(heads_per_group, 0)[:, None]
        memory *= decays[token, :, None, None]
        memory += (rows.values[token] * rows.steps[token, :, None])[:, :, None] * write
        out[token] = (memory * read).sum(-1)
    return out + skip[:, None] * rows.values


@dataclass(frozen=True, slots=True)
class ScanRows:
    """Inputs of a selective scan for n rows, in float32: ``values`` [n, channels], ``writes`` and ``reads`` (B and C)
    [n, columns], and the time steps [n, channels]."""

    values: torch.Tensor
    writes: torch.Tensor
    reads: torch.Tensor
    steps: torch.Tensor

    def of(self, rows: slice) -> ScanRows:
        return ScanRows(self.values[rows], self.writes[rows], self.reads[rows], self.steps[rows])


def selective_scan(rows: ScanRows, rates: torch.Tensor, skip: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Run a selective scan over a sequence's rows -> [n, channels]; ``memory`` [heads, channels of a head, columns]
    is the state before the rows, and becomes that after them, in place. ``rates`` (A) [channels, columns] are negative;
    ``skip`` (D) [channels]: factors of the values added to the results."""
    out, state = torch.empty_like(rows.values), memory.view(rates.shape)
    for token, (value, step) in enumerate(zip(rows.values, rows.steps, strict=True)):
        state *= (step[:, None] * rates).exp()
        state += (value * step)[:, None] * rows.writes[token]
        out[token] = (state * rows.reads[token]).sum(-1)
    return out + skip * rows.values


def steps_of_time(steps: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return the time steps (delta) softplus(steps + shift), float32 [n, heads]; ``shift`` [heads] is a bias."""
    return softplus(steps.float() + shift)


def normed_and_gated(
    rows: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Return the RMS norm over the last dimension of float32 rows [..., values], times silu(gates), or with ``sigmoid``
    sigmoid(gates). With ``gate_first`` rows are gated before the norm."""
    gate = gates.float().sigmoid() if sigmoid else silu(gates.float())
    if gate_first:
        rows = rows * gate
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight
    return normed if gate_first else normed * gate
