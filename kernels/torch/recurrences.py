"""Recurrences of layers with states over the rows of one sequence, token by token, in float32.

A token's bits depend only on the rows before it, however a text was cut into steps: each sum has the shape of one
token, and a fixed order. So a stored state equals the recomputed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

# Epsilon of the L2 norm of the delta rule's queries and keys.
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Taps:
    """The float32 factors [channels, taps] of a causal depthwise convolution, the last one for the token itself, and
    its bias [channels]."""

    factors: torch.Tensor
    bias: torch.Tensor | None = None


def convolve(rows: torch.Tensor, inputs: torch.Tensor, taps: Taps) -> torch.Tensor:
    """Convolve a sequence's rows [n, channels] -> [n, channels]. ``inputs`` [taps - 1, channels], those of the tokens
    before, are replaced by those of the last tokens."""
    text = torch.cat((inputs, rows))
    factors = taps.factors.t()
    found = text[: len(rows)] * factors[0]
    for tap in range(1, len(factors)):
        found += text[tap : tap + len(rows)] * factors[tap]
    if taps.bias is not None:
        found += taps.bias
    inputs.copy_(text[len(rows) :])
    return found


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Inputs of the gated delta rule for n rows, in float32: ``queries`` and ``keys`` [n, key heads, key_dim],
    ``values`` [n, heads, head_dim], ``decays`` [n, heads, 1], or [n, heads, key_dim] for a decay per row of a head's
    matrix, logarithms of 0 to 1, and ``rates`` [n, heads]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor

    def of(self, rows: slice) -> DeltaRows:
        return DeltaRows(self.queries[rows], self.keys[rows], self.values[rows], self.decays[rows], self.rates[rows])


def delta_rule(rows: DeltaRows, memory: torch.Tensor) -> torch.Tensor:
    """Run the gated delta rule over a sequence's rows -> [n, heads, head_dim]; ``memory`` [heads, key_dim, head_dim] is
    updated in place from the tokens before to the last token."""
    found = torch.empty_like(rows.values)
    shared, scale = len(memory) // rows.keys.shape[1], rows.keys.shape[-1] ** 0.5
    forgets = rows.decays.exp()
    for token in range(len(found)):
        key = _unit(rows.keys[token]).repeat_interleave(shared, 0)[:, :, None]
        query = (_unit(rows.queries[token]) / scale).repeat_interleave(shared, 0)[:, :, None]
        memory *= forgets[token, :, :, None]
        learnt = (rows.values[token] - (memory * key).sum(1)) * rows.rates[token, :, None]
        memory += key * learnt[:, None]
        found[token] = (memory * query).sum(1)
    return found


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _L2_EPS)


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
    """Run a state space over a sequence's rows -> [n, heads, head_dim]; ``memory`` [heads, head_dim, columns] is
    updated in place from the tokens before to the last token. ``rates`` [heads] are negative; ``skip`` [heads] is the
    factor of the values that are added to a head's results."""
    found = torch.empty_like(rows.values)
    shared = len(memory) // rows.writes.shape[1]
    keeps = (rows.steps * rates).exp()
    for token in range(len(found)):
        write = rows.writes[token].repeat_interleave(shared, 0)[:, None]
        read = rows.reads[token].repeat_interleave(shared, 0)[:, None]
        memory *= keeps[token, :, None, None]
        memory += (rows.values[token] * rows.steps[token, :, None])[:, :, None] * write
        found[token] = (memory * read).sum(-1)
    return found + skip[:, None] * rows.values


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
    """Run a selective scan over a sequence's rows -> [n, channels]; ``memory`` [heads, channels of a head, columns] is
    updated in place from the tokens before to the last token. ``rates`` [channels, columns] are negative; ``skip``
    [channels] is the factor of the values that are added to a channel's results."""
    found, state = torch.empty_like(rows.values), memory.view(rates.shape)
    for token, (value, step) in enumerate(zip(rows.values, rows.steps, strict=True)):
        state *= (step[:, None] * rates).exp()
        state += (value * step)[:, None] * rows.writes[token]
        found[token] = (state * rows.reads[token]).sum(-1)
    return found + skip * rows.values


def steps_of_time(steps: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return the time steps (delta) of rows [n, heads] with a head's bias ``shift``, in float32."""
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
    """Return the RMS norm over the last dimension of float32 rows [..., values], times silu of their gates, or their
    ``sigmoid``; with ``gate_first`` the norm of the gated rows."""
    gate = gates.float().sigmoid() if sigmoid else silu(gates.float())
    if gate_first:
        rows = rows * gate
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight
    return normed if gate_first else normed * gate
