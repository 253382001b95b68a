"""Helpers of the sampler's tests: rows of parameters, reference implementations, and a chi-square test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers.generation import logits_process as hf

from pillion.engine.sampling.cuts import cuts, group_maxima
from pillion.engine.sampling.gumbel import GROUP_TOKENS, group_waits, token_waits
from pillion.kernels.step import NO_IDS, Bool, Int64, RowEdit, SamplingRows, UInt32

# Probability that a correct sampler fails one chi-square test. Seeds are fixed, so passing tests always pass.
ALPHA = 1e-4
_Z = 3.719


@dataclass(frozen=True)
class RowParameters:
    """The sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    logprobs: int = -1
    bias: Mapping[int, float] = field(default_factory=dict)
    seen: Sequence[int] = ()
    repetition: float = 1.0
    answered: Sequence[int] = ()
    presence: float = 0.0
    frequency: float = 0.0
    banned: Sequence[int] = ()


def rows_of(all_params: Sequence[RowParameters]) -> SamplingRows:
    """Return the arrays that pillion.engine.backends.batching makes."""
    edits = tuple(
        RowEdit(
            row=row,
            biased=np.array([*params.bias], np.int64),
            bias=np.array([*params.bias.values()], np.float32),
            seen=np.array(params.seen, np.int32) if params.repetition != 1.0 else NO_IDS,
            repetition=params.repetition,
            answered=np.array(params.answered, np.int32),
            presence=params.presence,
            frequency=params.frequency,
            banned=np.array(params.banned, np.int64),
        )
        for row, params in enumerate(all_params)
        if params.bias or params.repetition != 1.0 or params.presence or params.frequency or len(params.banned)
    )
    return SamplingRows(
        options={
            "temperature": np.array([params.temperature for params in all_params], np.float32),
            "top_k": np.array([params.top_k for params in all_params], np.int64),
            "top_p": np.array([params.top_p for params in all_params], np.float32),
            "min_p": np.array([params.min_p for params in all_params], np.float32),
        },
        seeds=np.array([params.seed & (2**64 - 1) for params in all_params], np.uint64),
        positions=np.array([params.position for params in all_params], np.int64),
        logprobs=np.array([params.logprobs for params in all_params], np.int64),
        edits=edits,
    )


def packed_bits(allowed: np.ndarray) -> UInt32:
    """Pack bool [M, V] as grammar masks: uint32 [M, ceil(V / 32)], the lowest bit first."""
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    words: UInt32 = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    return words


@dataclass(frozen=True)
class GivenMasks:
    """Masks that are ready at once, except those of ``late`` indices of ``rows``."""

    rows: Int64
    allowed: np.ndarray
    late: Sequence[int] = ()

    def take(self) -> tuple[UInt32, Bool]:
        there = np.ones(len(self.rows), np.bool_)
        there[list(self.late)] = False
        return packed_bits(self.allowed), there


def draws_of(params: RowParameters, count: int) -> SamplingRows:
    """Return ``count`` rows that differ in seed (every second one) or in position; both must give independent draws."""
    return rows_of(
        [replace(params, seed=n, position=11) if n % 2 else replace(params, seed=7, position=n) for n in range(count)]
    )


def padded(logits: torch.Tensor) -> np.ndarray:
    """Pad logits [R, V] to whole groups, for the sampler's inner functions."""
    return torch.nn.functional.pad(logits, (0, -logits.shape[1] % GROUP_TOKENS), value=-torch.inf).numpy()


def all_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Compute the noise of every token [vocab_size], without any pruning."""
    seeds, positions = np.array([seed & (2**64 - 1)], np.uint64), np.array([position], np.int64)
    tokens = np.arange(vocab_size)
    waits, firsts, _ = group_waits(seeds, positions, -(-vocab_size // GROUP_TOKENS), tokens[:1])
    group = tokens // GROUP_TOKENS
    many = np.ones(vocab_size, np.int64)
    return -np.log(
        token_waits(seeds * many.astype(np.uint64), positions * many, tokens, waits[0, group], firsts[0, group])
    )


def unpruned(logits: torch.Tensor, params: RowParameters) -> int:
    """Return the Gumbel-max token of one unedited row [V]: the largest score + noise of the kept tokens."""
    table = padded(logits[None])
    with np.errstate(all="ignore"):
        cut = cuts(table, group_maxima(table), rows_of([params]), np.array([0]))[0]
        values = logits.numpy()
        scores = (values - values.max()) / np.float32(params.temperature)
        totals = scores + all_noise(params.seed, params.position, len(values))
    return int(np.where(values >= cut, totals, -np.inf).argmax())


def warp(logits: torch.Tensor, params: RowParameters) -> torch.Tensor:
    """Apply transformers' warpers, in their order, to logits [R, V]."""
    warpers = [hf.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(hf.TopKLogitsWarper(min(params.top_k, logits.shape[1])))
    if params.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def chi_square_fits(tokens: Sequence[int], probabilities: np.ndarray) -> bool:
    """Return True if ``tokens`` may be draws from ``probabilities`` [V]: a chi-square test at level ALPHA, impossible
    tokens never drawn. Cells with few expected draws are merged, as the test requires."""
    seen = np.bincount(tokens, minlength=len(probabilities))
    if seen[probabilities == 0].any():
        return False
    expected = probabilities * len(tokens)
    large = expected >= 10
    cells = [(seen[large], expected[large]), (seen[~large].sum(keepdims=True), expected[~large].sum(keepdims=True))]
    cells = [(s, e) for s, e in cells if e.sum() > 1]
    statistic = sum(((s - e) ** 2 / e).sum() for s, e in cells)
    freedom = sum(len(e) for _, e in cells) - 1
    return freedom == 0 or bool(statistic < _chi_square_quantile(freedom))


def _chi_square_quantile(freedom: int) -> float:
    """Return Wilson and Hilferty's approximation of the value exceeded with probability ALPHA."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + _Z * math.sqrt(part)) ** 3
