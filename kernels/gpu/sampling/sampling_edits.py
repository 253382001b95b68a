"""Bias, penalties and banned ids on the device: edits of single logits, in place.

The number of edits differs from step to step, so they are launched outside graphs, between the model and the sampler.
Log probabilities are those of masked logits without edits. So the order of a step is:

    apply_masks    kernels/gpu/sampling/sampling_masks.py, if any row follows a grammar
    keep_raw       copies rows that report log probabilities
    apply_edits    if the step has any edits
    choose         kernels/gpu/sampling/gpu_sampling.py

Each number is rounded as on the CPU (bias added, divided or multiplied, subtracted, each in float32), so edited logits
equal the CPU's bit by bit, except for the sign of a zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.sampling.sampling_record import EDIT_FIELDS
from pillion.kernels.gpu.tuned import tuned


@triton.jit(do_not_specialize=["count", "num_rows"])
def _edit(logits, edits, count, num_rows, vocab, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Apply one block of edits."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    record = edits + index.to(tl.int64) * FIELDS
    inside = index < count
    row = tl.load(record, mask=inside, other=-1)
    token = tl.load(record + 1, mask=inside, other=0)
    bias = tl.load(record + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
    repetition = tl.load(record + 3, mask=inside, other=0).to(tl.float32, bitcast=True)
    subtrahend = tl.load(record + 4, mask=inside, other=0).to(tl.float32, bitcast=True)
    inside = (row >= 0) & (row < num_rows)
    place = logits + row.to(tl.int64) * vocab + token
    value = tl.load(place, mask=inside, other=0.0) + bias
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition) - subtrahend
    tl.store(place, tl.where(subtrahend == float("inf"), float("-inf"), value), mask=inside)


def apply_edits(logits: torch.Tensor, edits: torch.Tensor) -> None:
    """Apply ``edits``, int32 [N, EDIT_FIELDS] of EditPacker, to logits [R, V] float32 in place.

    Ids are not checked against the vocabulary. Raises Internal for misshapen tensors.
    """
    check_tensor("logits", logits, (None, None), torch.float32)
    check_tensor("edits", edits, (None, EDIT_FIELDS), torch.int32, logits.device)
    count, (rows, vocab) = len(edits), logits.shape
    check(rows > 0, "no rows to edit")
    if count == 0:
        return
    constants = _constants(arch_of(logits.device))
    _edit[(cdiv(count, constants["BLOCK"]),)](logits, edits, count, rows, vocab, **constants)


def _constants(arch: int) -> dict[str, int]:
    use = tuned("sample_edits", arch)
    return {"FIELDS": EDIT_FIELDS, "BLOCK": use["block"], "num_warps": use["num_warps"]}


def keep_raw(logits: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy logits [R, V] of ``rows``, before edits, into ``kept`` [K, V] float32 on the same device.

    rows: int64 [K]. The caller copies them to the host, where log probabilities are computed.
    """
    check_tensor("logits", logits, (None, None), (torch.bfloat16, torch.float16, torch.float32))
    check_tensor("rows", rows, (None,), torch.int64, logits.device)
    check_tensor("kept", kept, (len(rows), logits.shape[1]), torch.float32, logits.device)
    kept.copy_(logits.index_select(0, rows))
