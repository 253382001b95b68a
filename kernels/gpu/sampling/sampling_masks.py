"""Grammar masks on the device: the logits of tokens that a row may not choose become minus infinity, in place, before
everything else.

A mask is a bit for each token of the vocabulary, 32 to a word, the lowest bit first; a token whose bit is 0 is
forbidden. Only forbidden logits are written and none is read, so a mask that allows nearly everything costs nearly
nothing, and the previous value of a forbidden logit, even NaN, has no effect.

Masked logits are those of the whole vocabulary, so every later stage works on them unchanged: edits, cuts, the race
and log probabilities. ``masked`` of lab/testbed/gpu_reference.py is the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check_tensor
from pillion.kernels.gpu.tuned import tuned

TOKENS_PER_WORD = 32
WORD_TOKENS: tl.constexpr = tl.constexpr(TOKENS_PER_WORD)


@triton.jit(do_not_specialize=["num_rows", "words"])
def _mask(logits, masks, rows, num_rows, vocab, words, BLOCK: tl.constexpr):
    """Forbid tokens of one block of one mask's row."""
    index = tl.program_id(0)
    row = tl.load(rows + index)
    if (row >= 0) & (row < num_rows):
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab
        word = tl.load(masks + index.to(tl.int64) * words + tokens // WORD_TOKENS, mask=inside, other=-1)
        forbidden = inside & (((word >> (tokens % WORD_TOKENS)) & 1) == 0)
        tl.store(logits + row.to(tl.int64) * vocab + tokens, float("-inf"), mask=forbidden)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """Forbid tokens of rows of logits [R, V] float32, in place.

    masks: int32 [M, ceil(V / 32)]. rows: int32 [M], the row of each mask, at most one mask per row; masks of rows
    outside 0 .. R do nothing. Raises Internal for misshapen tensors.
    """
    check_tensor("logits", logits, (None, None), torch.float32)
    count, vocab = logits.shape
    words = cdiv(vocab, TOKENS_PER_WORD)
    check_tensor("masks", masks, (len(rows), words), torch.int32, logits.device)
    check_tensor("rows", rows, (None,), torch.int32, logits.device)
    if not len(rows):
        return
    constants = _constants(arch_of(logits.device))
    _mask[(len(rows), cdiv(vocab, constants["BLOCK"]))](logits, masks, rows, count, vocab, words, **constants)


def _constants(arch: int) -> dict[str, int]:
    use = tuned("sample_masks", arch)
    return {"BLOCK": use["block"], "num_warps": use["num_warps"]}
