"""Products of rows of heads with a matrix per head, whose bits do not depend on the number of rows
(``--batch-invariant``).

    rows [T, H, K] --tiles [inputs, tokens]---dot--> sums in registers --> out [T, H, N]
    matrices [H, N, K] --tiles [outputs, inputs]--'

A program computes one tile of tokens and outputs of a head. The tile's size does not depend on the number of rows, and
inputs are added up in order. So it is slower than torch.bmm, which chooses kernels by the number of rows. Strides are
free except the innermost ones of rows and results, because attention over latents needs its matrices as they are for
queries, and transposed for values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import arch_of, cdiv, check
from pillion.kernels.gpu.tuned import tuned


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _head_product(
    rows, matrices, out, tokens, outputs, inputs, row_stride, row_head, matrix_head, matrix_output, matrix_input,
    out_stride, out_head, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    head = tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    output = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(0) // tiles_n * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    # Outputs and tokens past the end repeat the last one and are not stored.
    output_read, token_read = tl.minimum(output, outputs - 1), tl.minimum(token, tokens - 1)
    left = matrices + (head * matrix_head + output_read[:, None] * matrix_output + column[None, :] * matrix_input)
    right = rows + (head * row_head + token_read[None, :] * row_stride + column[:, None])
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first in range(0, inputs, BLOCK_K):
        inside = first + column < inputs
        weights = tl.load(left + first * matrix_input, mask=inside[None, :], other=0.0)
        acc = dot(weights, tl.load(right + first, mask=inside[:, None], other=0.0), acc)
    pointers = out + (head * out_head + token[None, :] * out_stride + output[:, None])
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (token < tokens)[None, :])


def head_product(rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiply ``rows`` [T, H, K] by ``matrices`` [H, N, K] into ``out`` [T, H, N], all of one type; return it.

    ``rows`` and ``out`` have stride 1 in their last dimension. Raises Internal for misshapen tensors.
    """
    count, heads, inputs = rows.shape
    outputs = matrices.shape[1]
    fits = tuple(matrices.shape) == (heads, outputs, inputs) and tuple(out.shape) == (count, heads, outputs)
    check(fits and count > 0, "{} times {} into {}", rows.shape, matrices.shape, out.shape)
    check(rows.stride(2) == 1 and out.stride(2) == 1, "the values of a head are not contiguous")
    check(rows.dtype == matrices.dtype == out.dtype, "{} times {} into {}", rows.dtype, matrices.dtype, out.dtype)
    check(rows.device == matrices.device == out.device, "matrices are on {}, not on {}", matrices.device, rows.device)
    constants = _constants(rows.element_size(), arch_of(rows.device))
    tiles = cdiv(count, constants["BLOCK_T"]) * cdiv(outputs, constants["BLOCK_N"])
    _head_product[(tiles, heads)](
        rows,
        matrices,
        out,
        count,
        outputs,
        inputs,
        *rows.stride()[:2],
        *matrices.stride(),
        *out.stride()[:2],
        **constants,
    )
    return out


def _constants(item_bytes: int, arch: int) -> dict[str, Any]:
    use = tuned("head_product", arch, bytes=item_bytes)
    tile = {"BLOCK_T": use["rows"], "BLOCK_N": use["outputs"], "BLOCK_K": use["inputs"]}
    return {**tile, "num_warps": use["num_warps"], "num_stages": use["num_stages"]}
