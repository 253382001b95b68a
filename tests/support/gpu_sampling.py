"""Helpers for tests of the GPU sampler: a launch on rows of parameters, and a check for ties."""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

from collections.abc import Sequence

import numpy as np
import torch

from pillion.engine.sampling.sampler import edited
from pillion.kernels.gpu.sampling.gpu_sampling import MASS_TOLERANCE, TOTAL_TOLERANCE, choose
from pillion.kernels.gpu.sampling.sampling_device import SamplerScratch
from pillion.kernels.gpu.sampling.sampling_edits import apply_edits
from pillion.kernels.gpu.sampling.sampling_record import EditPacker, pack_rows
from tests.support.sampling import RowParameters, all_noise, rows_of


def chosen_on_device(logits: torch.Tensor, all_params: Sequence[RowParameters], *, padded_to: int = 0) -> list[int]:
    """Return the kernels' choice from a copy of logits [R, V]; -7 if nothing was written."""
    rows, vocab = rows_of(all_params), logits.shape[1]
    count = max(len(all_params), padded_to)
    table = torch.full((count, vocab), 1.0, dtype=logits.dtype)
    table[: len(all_params)] = logits
    table = table.to(DEVICE)
    edits = EditPacker(vocab).pack(rows.edits)
    if len(edits):
        apply_edits(table, torch.from_numpy(edits).to(DEVICE))
    record = torch.from_numpy(pack_rows(rows, padded_to)).to(DEVICE)
    out = torch.full((count,), -7, dtype=torch.int32, device=DEVICE)
    scratch = SamplerScratch(count, vocab, DEVICE)
    choose(table, record, out, scratch)
    return out.tolist()


def edited_row(logits: torch.Tensor, params: RowParameters) -> np.ndarray:
    """Return one row [V] edited by the CPU's code."""
    table = logits[None].float().numpy().copy()
    with edited(table, rows_of([params]).edits), np.errstate(all="ignore"):
        return table[0].copy()


def nearly_tie(row: np.ndarray, params: RowParameters, one: int, other: int) -> bool:
    """Return True if two tokens of an edited row [V] tie by the tolerances of
    pillion.kernels.gpu.sampling.gpu_sampling."""
    values = row.astype(np.float64)
    scores = (values - values.max()) / np.float32(params.temperature)
    totals = scores + all_noise(params.seed, params.position, len(row))
    if abs(totals[one] - totals[other]) <= TOTAL_TOLERANCE:
        return True
    weights = np.exp(scores)
    if 0 < params.top_k < len(row):
        weights[values < np.sort(values)[-params.top_k]] = 0.0
    before = [weights[values > values[token]].sum() / weights.sum() for token in (one, other)]
    return any(abs(share - np.float32(params.top_p)) <= MASS_TOLERANCE for share in before)
