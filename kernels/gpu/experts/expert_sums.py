"""Sums of the results of a row's experts: out[t] = sum of scores[t, i] * found[t * k + i], in the order of choices.

Sums are in float32, with the router's scores, and the result is rounded once. transformers rounds each score and each
product to the rows' type, and mostly each sum, so its results differ by some units of that type and are less exact. A
choice with expert -1 is not read and adds nothing: padding rows are zeros.

The MLP of all rows beside their experts (shared experts) may be the last summand, with the score of an additional
choice.

If the sums go to the residual stream next, its kernel (:mod:`pillion.kernels.gpu.rows.norms`) computes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.tuned import tuned


class PairResults(NamedTuple):
    """Inputs of the sums over each row's experts.

    Attributes:
        found: results of experts, [T * k, H].
        scores: float32 [T, k].
        chosen: expert ids, int32 [T, k]; -1 without a result.
        beside: result of the shared experts' MLP, [T, H], whose score is the last one; or None.
    """

    found: torch.Tensor
    scores: torch.Tensor
    chosen: torch.Tensor
    beside: torch.Tensor | None = None

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """Tensor arguments of kernels. ``beside`` is not read if it is None, so any pointer will do."""
        return self.found, self.scores, self.chosen, self.found if self.beside is None else self.beside

    def check(self, tokens: int, hidden: int, like: torch.Tensor) -> None:
        """Raise Internal unless these are results for rows [tokens, hidden], with the type and device of ``like``."""
        check_tensor("scores", self.scores, (tokens, None), torch.float32, like.device)
        check_tensor("chosen", self.chosen, tuple(self.scores.shape), torch.int32, like.device)
        check_tensor("found", self.found, (self.scores.numel(), hidden), like.dtype, like.device)
        if self.beside is not None:
            check_tensor("beside", self.beside, (tokens, hidden), like.dtype, like.device)


@triton.jit
def weighed(
    found, scores, chosen, beside, row, column, inside, hidden, PER_TOKEN: tl.constexpr, BESIDE: tl.constexpr
):  # fmt: skip
    """Return float32 weighted sums of the results for ``row`` and ``column``, both int64; 0 unless ``inside``. All rows
    must exist, since ids and scores are loaded without a mask."""
    total = tl.zeros(inside.shape, tl.float32)
    for choice in tl.static_range(PER_TOKEN - BESIDE):
        pair = row * PER_TOKEN + choice
        counted = tl.load(chosen + pair) >= 0
        values = tl.load(found + pair * hidden + column, mask=inside & counted, other=0.0)
        total += tl.load(scores + pair) * values.to(tl.float32)
    if BESIDE:
        values = tl.load(beside + row * hidden + column, mask=inside, other=0.0)
        total += tl.load(scores + row * PER_TOKEN + PER_TOKEN - 1) * values.to(tl.float32)
    return total


@triton.jit
def _add_up(
    found, scores, chosen, beside, out, hidden, parts,
    PER_TOKEN: tl.constexpr, BESIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one of the ``parts`` blocks of columns of one row's sum."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = weighed(found, scores, chosen, beside, row, columns, inside, hidden, PER_TOKEN, BESIDE)
    tl.store(out + row * hidden + columns, total.to(out.dtype.element_ty), mask=inside)


def add_up(results: PairResults, out: torch.Tensor) -> None:
    """Write the sums of each row's results, weighted by their scores, into ``out`` [T, H], which may be
    ``results.beside``. Raises Internal for misshapen tensors."""
    check_tensor("out", out, (None, None), (torch.bfloat16, torch.float16, torch.float32))
    tokens, hidden = out.shape
    check(tokens > 0 and hidden > 0, "no rows to add up")
    results.check(tokens, hidden, out)
    constants = sum_constants(results.scores.shape[1], arch_of(out.device))
    parts = cdiv(hidden, constants["BLOCK"])
    beside = results.beside is not None
    _add_up[(tokens * parts,)](*results.pointers, out, hidden, parts, BESIDE=beside, **constants)


def sum_constants(per_token: int, arch: int) -> dict[str, int]:
    use = tuned("expert_sums", arch)
    return {"PER_TOKEN": per_token, "BLOCK": use["block"], "num_warps": use["num_warps"]}
