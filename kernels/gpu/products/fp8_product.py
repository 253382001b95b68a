"""Products of rows with a matrix of FP8 (e4m3) in FP8, for checkpoints whose producer also rounds the rows.

    rows [T, K] --scale of each row, or of its blocks of 128--> codes --'
    matrix [N, K], codes as in the checkpoint --products in FP8-----> times both scales, bias --> out [T, N]

A row's scale is its largest magnitude over 448, so that no row depends on the others (dynamic activations). If the
matrix has a scale for each output, a row has one for all of its inputs; if it has one for each block of 128 x 128
(DeepSeek-V3, arXiv 2412.19437, section 3.3), a row has one for each 128 inputs.

Many rows go to cuBLASLt (``torch._scaled_mm``). Few rows are bound by the load of the matrix: they go to a kernel here,
with split-K as in :mod:`pillion.kernels.gpu.products.quantized_product`. It adds up 128 inputs on the tensor cores,
whose accumulators have 14 bits for FP8, and these sums in float32. It also serves many rows if cuBLASLt refuses the
matrix. Both read the codes in place, in rows of K bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.fp8 import NATIVE_FP8_ARCH, decode_e4m3, encode, scale_of
from pillion.kernels.gpu.launch import arch_of, cdiv, check, check_tensor, interpreting
from pillion.kernels.gpu.products.dense_gemm import MAX_SPLITS, PROGRAMS, ROW_TILES
from pillion.kernels.gpu.products.quantized_product import _sum
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.torch.quantized_matrix import QuantizedMatrix

# Sides of the matrix's blocks, and inputs of a row's groups; also the inputs that kernels multiply at once.
BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)
# cuBLASLt requires matrices whose sides are multiples of this, and scales of blocks in rows of a multiple of SCALE_ROW.
SIDES, SCALE_ROW = 16, 4
# More rows go to cuBLASLt.
SPLIT_K_MAX_ROWS = 64
# Min blocks per split.
_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [N, K] in FP8.

    Attributes:
        codes: uint8 [N, K].
        scales: float32: of each output, [N]; or of each block, [ceil(N / 128), ceil(K / 128) and up to 3 more].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The matrix's tensors by attribute."""
        return {"codes": self.codes, "scales": self.scales}

    @property
    def in_blocks(self) -> bool:
        """True if each block has a scale."""
        return self.scales.dim() == 2


def computes_in_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies FP8."""
    return arch_of(device) >= NATIVE_FP8_ARCH


def fp8_matrix(matrix: QuantizedMatrix) -> Fp8Matrix | None:
    """Return a matrix for products in FP8; None if they do not support it."""
    (outputs, inputs), scales = matrix.shape, matrix.scales
    plain = matrix.coding == "fp8_e4m3" and matrix.offsets is None and matrix.order is None
    if not plain or outputs % SIDES or inputs % SIDES:
        return None
    if matrix.group >= inputs:
        return Fp8Matrix(matrix.codes, scales[:, 0].contiguous())
    first = scales[::BLOCK]
    if matrix.group != BLOCK or not torch.equal(first.repeat_interleave(BLOCK, 0)[:outputs], scales):
        return None
    return Fp8Matrix(matrix.codes, torch.nn.functional.pad(first, (0, -first.shape[1] % SCALE_ROW)))


@triton.jit
def _round_rows(rows, codes, scales, tokens, inputs, IN_BLOCKS: tl.constexpr, WIDE: tl.constexpr):
    """Round one row; with IN_BLOCKS, WIDE inputs of it, whose scales are at block * tokens + row."""
    token = tl.program_id(0)
    row, coded = rows + token.to(tl.int64) * inputs, codes + token.to(tl.int64) * inputs
    if IN_BLOCKS:
        block = tl.program_id(1) * (WIDE // _BLOCK) + tl.arange(0, WIDE // _BLOCK)
        column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        values = tl.load(row + column, mask=column < inputs, other=0.0).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(values), 1))
        tl.store(scales + block * tokens + token, scale, mask=block * _BLOCK < inputs)
        found = encode(tl.math.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))
        tl.store(coded + column, found, mask=column < inputs)
    else:
        column = tl.arange(0, WIDE)
        sizes = tl.zeros((WIDE,), tl.float32)
        for first in range(0, inputs, WIDE):
            values = tl.load(row + first + column, mask=first + column < inputs, other=0.0).to(tl.float32)
            sizes = tl.maximum(sizes, tl.abs(values))
        scale = scale_of(tl.max(sizes, 0))
        tl.store(scales + token, scale)
        for first in range(0, inputs, WIDE):
            inside = first + column < inputs
            values = tl.load(row + first + column, mask=inside, other=0.0).to(tl.float32)
            found = encode(tl.math.div_rn(values, tl.broadcast_to(scale, values.shape)))
            tl.store(coded + first + column, found, mask=inside)


@triton.jit
def _numbers(codes, NATIVE: tl.constexpr):
    """Convert codes to operands of a product of tiles: FP8, or in Triton's interpreter their values in float32."""
    return codes.to(tl.float8e4nv, bitcast=True) if NATIVE else decode_e4m3(codes, tl.float32, False) * 256.0


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _product(
    codes, row_scales, matrix, scales, bias, out, tokens, inputs, outputs, scale_row, depth,
    IN_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr, NATIVE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, GROUP_N: tl.constexpr,
):
    # fmt: on
    """Compute one tile of outputs and rows; with SPLIT_K one split of it, of ``depth`` inputs, into ``out`` [splits, T,
    N]."""
    tiles_n, tiles_t = tl.cdiv(outputs, BLOCK_N), tl.cdiv(tokens, BLOCK_T)
    n, t = tl.swizzle2d(tl.program_id(0) // tiles_t, tl.program_id(0) % tiles_t, tiles_n, tiles_t, GROUP_N)
    output, token = n * BLOCK_N + tl.arange(0, BLOCK_N), t * BLOCK_T + tl.arange(0, BLOCK_T)
    # Outputs and rows past the end repeat the last one and are not stored.
    output_read, token_read = tl.minimum(output, outputs - 1), tl.minimum(token, tokens - 1)
    column = tl.arange(0, _BLOCK)
    left = matrix + output_read.to(tl.int64)[:, None] * inputs + column[None, :]
    right = codes + token_read.to(tl.int64)[None, :] * inputs + column[:, None]
    begin = tl.program_id(1) * depth
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    zeros = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first in range(begin, tl.minimum(begin + depth, inputs), _BLOCK):
        inside = first + column < inputs
        weights = _numbers(tl.load(left + first, mask=inside[None, :], other=0), NATIVE)
        sums = dot(weights, _numbers(tl.load(right + first, mask=inside[:, None], other=0), NATIVE), zeros)
        if IN_BLOCKS:
            matrix_scales = tl.load(scales + output_read // _BLOCK * scale_row + first // _BLOCK)
            sums *= matrix_scales[:, None] * tl.load(row_scales + first // _BLOCK * tokens + token_read)[None, :]
        acc += sums
    if not IN_BLOCKS:
        acc *= tl.load(scales + output_read)[:, None] * tl.load(row_scales + token_read)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + output_read).to(tl.float32)[:, None]
    place = (tl.program_id(1) * tokens + token).to(tl.int64) if SPLIT_K else token.to(tl.int64)
    mask = (output < outputs)[:, None] & (token < tokens)[None, :]
    tl.store(out + place[None, :] * outputs + output[:, None], acc.to(out.dtype.element_ty), mask=mask)


def splits_of(outputs: int, inputs: int) -> int:
    """Return the number of splits of the inputs for few rows."""
    blocks, tiles = -(-inputs // BLOCK), -(-outputs // BLOCK)
    target = max(1, min(PROGRAMS // tiles, blocks // _MIN_BLOCKS, MAX_SPLITS))
    return -(-blocks // -(-blocks // target))


class Fp8Gemm:
    """GEMM of rows with FP8 matrices. Owns the workspace: the rows' codes and scales, and partial sums of splits."""

    def __init__(
        self, matrices: Iterable[Fp8Matrix], max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the workspace for products of rows [max_rows, K] of ``dtype`` with these matrices."""
        shapes = [tuple(matrix.codes.shape) for matrix in matrices]
        inputs = max((each for _, each in shapes), default=0)
        few = min(max_rows, SPLIT_K_MAX_ROWS)
        parts = max((splits_of(*shape) * few * shape[0] for shape in shapes), default=0)
        self._codes = torch.zeros(max_rows * inputs, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(max_rows * -(-inputs // BLOCK), dtype=torch.float32, device=device)
        self._partials = torch.zeros(parts, dtype=torch.float32, device=device)
        self._max_rows, self._dtype, self._arch = max_rows, dtype, arch_of(device)
        # (outputs, inputs, in_blocks) of matrices that cuBLASLt refuses.
        self._refused: set[tuple[int, int, bool]] = set()

    def compile(self, matrix: Fp8Matrix, bias: torch.Tensor | None) -> None:
        """Compile all kernels for products with ``matrix``, and find out whether cuBLASLt supports it."""
        outputs, inputs = matrix.codes.shape
        for count in sorted({min(tile, self._max_rows) for tile in ROW_TILES}):
            rows = matrix.scales.new_zeros(count, inputs, dtype=self._dtype)
            try:
                self(rows, matrix, bias, rows.new_empty(count, outputs))
            except (RuntimeError, ValueError):
                if count <= SPLIT_K_MAX_ROWS:
                    raise
                self._refused.add((outputs, inputs, matrix.in_blocks))
                self(rows, matrix, bias, rows.new_empty(count, outputs))

    def __call__(
        self, rows: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply up to ``max_rows`` rows [T, K] by ``matrix`` into ``out`` [T, N], of the rows' type; return it.

        bias: [N] of that type, or None. Raises Internal for misshapen tensors.
        """
        (outputs, inputs), count = matrix.codes.shape, len(rows)
        check_tensor("rows", rows, (None, inputs), self._dtype, matrix.codes.device)
        check_tensor("out", out, (count, outputs), self._dtype, rows.device)
        fits = count > 0 and count * inputs <= len(self._codes)
        check(fits, "the workspace does not fit {} rows of {}", count, inputs)
        if bias is not None:
            check_tensor("bias", bias, (outputs,), self._dtype, rows.device)
        codes, scales = self._round(rows, matrix.in_blocks)
        if count <= SPLIT_K_MAX_ROWS or (outputs, inputs, matrix.in_blocks) in self._refused:
            return self._multiply(codes, scales, matrix, bias, out)
        kinds = torch.float8_e4m3fn
        matrix_scales = matrix.scales[None]
        if matrix.in_blocks:
            matrix_scales = matrix.scales[:, : -(-inputs // BLOCK)].t()
        return torch._scaled_mm(
            codes.view(kinds), matrix.codes.view(kinds).t(), scales, matrix_scales, bias, out_dtype=self._dtype, out=out
        )

    def _round(self, rows: torch.Tensor, in_blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [T, K] of rows, and scales [T, 1], or [T, ceil(K / 128)] stored block by block."""
        count, inputs = rows.shape
        blocks = -(-inputs // BLOCK) if in_blocks else 1
        codes, scales = self._codes[: count * inputs].view(count, inputs), self._scales[: count * blocks]
        use = tuned("fp8_rows", self._arch)
        parts = cdiv(inputs, use["block"]) if in_blocks else 1
        _round_rows[(count, parts)](
            rows, codes, scales, count, inputs, IN_BLOCKS=in_blocks, WIDE=use["block"], num_warps=use["num_warps"]
        )
        return codes, scales.view(blocks, count).t()

    def _multiply(
        self,
        codes: torch.Tensor,
        row_scales: torch.Tensor,
        matrix: Fp8Matrix,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply quantized rows by ``matrix`` into ``out`` with the kernel here; return it."""
        (outputs, inputs), count = matrix.codes.shape, len(codes)
        constants = _constants(count, matrix.in_blocks, self._arch)
        split_k = count <= SPLIT_K_MAX_ROWS
        splits = splits_of(outputs, inputs) if split_k else 1
        split_k = splits > 1
        tiles = cdiv(outputs, constants["BLOCK_N"]) * cdiv(count, constants["BLOCK_T"])
        none = codes if bias is None else bias
        _product[(tiles, splits)](
            codes,
            row_scales,
            matrix.codes,
            matrix.scales,
            none,
            self._partials if split_k else out,
            count,
            inputs,
            outputs,
            matrix.scales.stride(0),
            cdiv(cdiv(inputs, BLOCK), splits) * BLOCK,
            HAS_BIAS=bias is not None and not split_k,
            SPLIT_K=split_k,
            **constants,
        )
        if split_k:
            use = tuned("quantized_sum", self._arch)
            _sum[(cdiv(outputs, use["block"]), count)](
                self._partials,
                none,
                out,
                count,
                outputs,
                SPLITS=splits,
                HAS_BIAS=bias is not None,
                BLOCK=use["block"],
                DEPENDENT=False,
                num_warps=use["num_warps"],
            )
        return out


def _constants(rows: int, in_blocks: bool, arch: int) -> dict[str, Any]:
    tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    use = tuned("fp8_product", arch, rows=tile)
    return {
        "IN_BLOCKS": in_blocks,
        "NATIVE": not interpreting(),
        "BLOCK_N": use["outputs"],
        "BLOCK_T": tile,
        "GROUP_N": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
    }
