"""Products of rows with the matrices of their experts, all experts of a layer in one launch.

    tiles (expert, first place, rows) --> rows of a tile: rows[order[first + i] // choices]
                                          --dot with the expert's matrix--> [bias, activation] --> out

A tile has rows of one expert. The kernel is persistent: the grid fills the device once, and each program iterates over
its share of tiles and blocks of outputs. The number of tiles is read on the device, so that the grid depends on the
device and the shapes alone, and a CUDA graph serves any routing. Blocks are ordered so that concurrent programs read
the same rows and, if an expert has several tiles, the same weights, which are then in the cache.

If the outputs are all gates and then all up values, a block of outputs has both, so that the activation needs no
separate launch and no memory in between.

A row's bits do not depend on its tile: the matrix is the left operand of the products of tiles, as in
products/quantized_product.py, and an output is one chain of additions over the inputs in order, for any number of rows
per tile. Contributions of adapters (:mod:`pillion.kernels.gpu.experts.expert_adapters`) are added last.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dependent import dependent, wait_for_earlier
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.experts.expert_adapters import (
    PairAdapters,
    expand_constants,
    expanded,
    shrink_pairs,
    slots_of,
)
from pillion.kernels.gpu.experts.pair_sorting import TILE_WORDS
from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, cdiv, check, check_tensor, processors_of
from pillion.kernels.gpu.products.dense_gemm import ROW_TILES
from pillion.kernels.gpu.products.gpu_packing import BITS, PackedKind, PackedMatrix
from pillion.kernels.gpu.products.packed_tiles import packed_part, tile_constants
from pillion.kernels.gpu.rows.gated import NAMED, _activated
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.torch.quantized_matrix import CODINGS

# Name of an activation, or alpha and limit of a clamped SwiGLU (gpt-oss).
Activation = str | tuple[float, float]
_CLAMPED = "clamped"

# Gate and up outputs alternate in blocks of 8: in a tensor-core accumulator, the thread with output n also has output
# n + 8.
_INTERLEAVE = tl.constexpr(8)
# Constexprs of packed matrices, for plain ones.
_PLAIN: dict[str, Any] = {
    "CODING": "", "BIAS": 0.0, "GROUP": 0, "SCALE": "float32", "SHIFT": "none", "EXACT": False, "DEPTH": 1,
    "PLACES": 1, "PER_WORD": 1, "TAIL": 0, "ORDERED": False, "NATIVE_FP8": False,
}  # fmt: skip


@triton.jit
def _plain_part(
    rows, weights, token, output, inputs,
    RAGGED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the products of rows ``token`` with outputs ``output`` of a plain matrix: float32 [outputs, tokens]."""
    columns = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    # 32-bit offsets suffice, because no matrix has 2**31 weights.
    weight_ptrs = weights + output[:, None] * inputs + columns[None, :]
    row_ptrs = rows + token.to(tl.int64)[None, :] * inputs + columns[:, None]
    for k in range(0, inputs, BLOCK_K):
        if RAGGED:
            k_mask = k + columns < inputs
            left = tl.load(weight_ptrs + k, mask=k_mask[None, :], other=0.0)
            right = tl.load(row_ptrs + k, mask=k_mask[:, None], other=0.0)
        else:
            left = tl.load(weight_ptrs + k)
            right = tl.load(row_ptrs + k)
        acc = dot(left, right, acc)
    return acc


@triton.jit
def _gated_by(gate, up, alpha, limit, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Return act(gate) * up of float32 values. As in transformers, every intermediate result is rounded to DTYPE."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        slope = tl.sigmoid((gate * alpha).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        gate = gate * slope
        up = (up + 1.0).to(DTYPE).to(tl.float32)
    else:
        gate = _activated(gate, ACTIVATION)
    return gate.to(DTYPE).to(tl.float32) * up


# fmt: off
@triton.jit(do_not_specialize=["choices", "per_token"])
def _grouped(
    rows, order, tiles, count, words, scales, offsets, factors, columns_of, table, bias, out, row_slots, shrunk, b,
    choices, inputs, outputs, width, padded, units, word_stride, scale_stride, alpha, limit, per_token, first_end,
    slot_values,
    CODING: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    EXACT: tl.constexpr, DEPTH: tl.constexpr, PLACES: tl.constexpr, PER_WORD: tl.constexpr, TAIL: tl.constexpr,
    RAGGED: tl.constexpr, ORDERED: tl.constexpr, NATIVE_FP8: tl.constexpr, GATHERED: tl.constexpr,
    SCATTERED: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr, SLICES: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, DEPENDENT: tl.constexpr,
):
    # fmt: on
    """Compute every ``num_programs``-th block of outputs of a tile, from block ``program_id`` on. ``width`` is the
    number of columns of ``out``."""
    BLOCK_OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    blocks_n = tl.cdiv(width, BLOCK_OUT)
    # No prefetch of weights: the previous kernel may still be choosing the experts.
    wait_for_earlier(DEPENDENT)
    tile_count = tl.load(count)
    for item in range(tl.program_id(0), tile_count * blocks_n, tl.num_programs(0)):
        t, n = tl.swizzle2d(item // blocks_n, item % blocks_n, tile_count, blocks_n, GROUP_T)
        expert = tl.load(tiles + t * 3).to(tl.int64)
        begin = tl.load(tiles + t * 3 + 1)
        tile_rows = tl.load(tiles + t * 3 + 2)
        index = tl.arange(0, BLOCK_T)
        inside = index < tile_rows
        place = begin + tl.minimum(index, tile_rows - 1)
        pair = tl.load(order + place) if GATHERED or SCATTERED or RANK > 0 else place
        token = pair // choices if GATHERED else place
        column = n * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        output = n * BLOCK_N + tl.arange(0, BLOCK_N)
        if GATED:
            offset = tl.arange(0, BLOCK_N)
            output = n * BLOCK_OUT + offset // (2 * _INTERLEAVE) * _INTERLEAVE + offset % _INTERLEAVE
            output += offset // _INTERLEAVE % 2 * width
        output = tl.minimum(output, outputs - 1)
        if CODING == "":
            total = _plain_part(
                rows, words + expert * word_stride, token, output, inputs, RAGGED, BLOCK_N, BLOCK_T, BLOCK_K
            )
        else:
            # There are as many offsets as scales, which take half the words of "two_halves" scales.
            offset_stride = scale_stride // 2 if SCALE == "two_halves" else scale_stride
            total = packed_part(
                rows, words + expert * word_stride, scales + expert * scale_stride, offsets + expert * offset_stride,
                factors + expert * padded, columns_of + expert * inputs, table, token, output, 0, units, inputs, padded,
                CODING, BIAS, GROUP, SCALE, SHIFT, EXACT, DEPTH, PLACES, PER_WORD, TAIL, RAGGED, ORDERED, NATIVE_FP8,
                BLOCK_N, BLOCK_T,
            )  # fmt: skip
        if RANK > 0:
            slot, lowest, highest = slots_of(row_slots, pair, inside, per_token)
            total = expanded(
                total, shrunk, b, slot, lowest, highest, expert, place, output, outputs, first_end, slot_values,
                RANK, SLICES, BLOCK_RANKS,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + expert * outputs + output).to(tl.float32)[:, None]
        if GATED:
            gate_up = tl.permute(tl.reshape(total, (BLOCK_OUT // _INTERLEAVE, 2, _INTERLEAVE, BLOCK_T)), (0, 2, 3, 1))
            gate, up = tl.split(gate_up)
            total = _gated_by(gate, up, alpha, limit, ACTIVATION, out.dtype.element_ty)
            total = tl.reshape(total, (BLOCK_OUT, BLOCK_T))
        elif ACTIVATION != "":
            total = _activated(total.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
        target = (pair if SCATTERED else place).to(tl.int64)
        mask = inside[None, :] & (column < width)[:, None]
        tl.store(out + target[None, :] * width + column[:, None], total.to(out.dtype.element_ty), mask=mask)


@cache
def most_rows(kind: PackedKind | None, dtype: torch.dtype, arch: int) -> int:
    """Return the max rows per tile for packed matrices of a kind, or plain ones (None). With more rows, each warp would
    dequantize all weights of the tile."""
    return _tuned(kind, ROW_TILES[-1], dtype, arch).get("most_rows", ROW_TILES[-1])


class GroupedGemm:
    """Grouped GEMM of rows with their experts' matrices: plain tensors [E, N, K], or packed matrices, whose tensors
    have a first dimension of experts. One per model.

    A call neither allocates nor synchronizes, so that it can be captured in a CUDA graph.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare products of rows of ``dtype``."""
        self._dtype, self._arch, self._processors = dtype, arch_of(device), processors_of(device)
        self._table = CODINGS["nf4"].to(device)

    def __call__(
        self,
        rows: torch.Tensor,
        order: torch.Tensor | None,
        choices: int,
        tiles: torch.Tensor,
        count: torch.Tensor,
        matrix: torch.Tensor | PackedMatrix,
        bias: torch.Tensor | None,
        activation: Activation | None,
        *,
        gated: bool,
        out: torch.Tensor,
        scatter: bool,
        tile_rows: int,
        gathered: bool = True,
        adapters: PairAdapters | None = None,
    ) -> torch.Tensor:
        """Multiply rows [R, K] by the matrices of their experts into ``out``; return it.

        Args:
            order: int32 [P]: place i has row ``order[i] // choices``. None if place i has row i.
            choices: pairs per row.
            tiles: int32 [C, 3]: expert, first place, and number of rows, at most ``tile_rows``.
            count: int32 [1]: number of tiles; later ones are not read.
            bias: [E, N] of the rows' type, added before the activation, or None.
            activation: one of NAMED, (alpha, limit) of a clamped SwiGLU, or None.
            gated: the outputs are all gates, then all up values; act(gate) * up is written.
            out: of the rows' type, [..., N], or [..., N / 2] if gated. Rows in no tile are not written.
            scatter: write the result of place i to row ``order[i]`` of ``out`` instead of row i.
            tile_rows: one of ROW_TILES.
            gathered: read rows by ``order``, if there is one. False: place i has row i.
            adapters: the rows' adapters, which are applied before bias and activation; they need an ``order``.

        Raises Internal for misshapen tensors and unknown activations.
        """
        inputs, width = _sizes(matrix, gated)
        packed = matrix if isinstance(matrix, PackedMatrix) else None
        weights = matrix.words if isinstance(matrix, PackedMatrix) else matrix
        outputs = width * (2 if gated else 1)
        check_tensor("rows", rows, (None, inputs), self._dtype, weights.device)
        check_tensor("out", out, (None, width), rows.dtype, rows.device)
        _check_tiles(rows, order, tiles, count, scatter, tile_rows)
        check(packed is not None or weights.dtype == rows.dtype, "matrices are of {}", weights.dtype)
        if bias is not None:
            check_tensor("bias", bias, (len(weights), outputs), rows.dtype, rows.device)
        if adapters is not None:
            adapters.check(len(weights), inputs, outputs, rows)
            shrink_pairs(rows, order, choices, tiles, count, adapters, gathered, tile_rows, self._arch)
        kind, ordered = (inputs, False) if packed is None else (packed.kind, packed.order is not None)
        constants, programs = _constants(kind, ordered, activation, gated, tile_rows, rows.dtype, self._arch)
        constants |= expand_constants(None if adapters is None else adapters.layer)
        block_out = constants["BLOCK_N"] // (2 if gated else 1)
        items = len(tiles) * cdiv(width, block_out)
        alpha, limit = activation if isinstance(activation, tuple) else (0.0, 0.0)
        scales = weights if packed is None else packed.scales
        parts = {} if packed is None else packed.parts
        _grouped[(min(programs * self._processors, items),)](
            rows, count if order is None else order, tiles, count, weights, scales, parts.get("offsets", scales),
            parts.get("factors", self._table), parts.get("order", count), self._table, rows if bias is None else bias,
            out, *((count, rows, rows) if adapters is None else adapters.pointers), choices, inputs, outputs, width,
            0 if packed is None else packed.kind.padded, 0 if packed is None else packed.kind.units, weights.stride(0),
            scales.stride(0), alpha, limit, *((0, 0, 0) if adapters is None else adapters.numbers),
            GATHERED=order is not None and gathered, SCATTERED=scatter, HAS_BIAS=bias is not None, **constants,
        )  # fmt: skip
        return out


def _check_tiles(
    rows: torch.Tensor,
    order: torch.Tensor | None,
    tiles: torch.Tensor,
    count: torch.Tensor,
    scatter: bool,
    tile_rows: int,
) -> None:
    """Raise Internal if the order, the tiles or their count are misshapen or inconsistent."""
    check_tensor("tiles", tiles, (None, TILE_WORDS), torch.int32, rows.device)
    check_tensor("count", count, (1,), torch.int32, rows.device)
    check(order is not None or not scatter, "results cannot be scattered without an order")
    if order is not None:
        check_tensor("order", order, (None,), torch.int32, rows.device)
    check(tile_rows in ROW_TILES, "a tile has one of {} rows, not {}", ROW_TILES, tile_rows)


def _sizes(matrix: torch.Tensor | PackedMatrix, gated: bool) -> tuple[int, int]:
    """Return a stack's number of inputs, and the columns of its result. Raises Internal for a misshapen stack."""
    if isinstance(matrix, PackedMatrix):
        outputs, inputs = matrix.kind.outputs, matrix.kind.inputs
    else:
        check_tensor("matrix", matrix, (None, None, None), FLOAT_DTYPES)
        _, outputs, inputs = matrix.shape
    check(not gated or outputs % 2 == 0, "{} outputs cannot be gates and as many up values", outputs)
    return inputs, outputs // 2 if gated else outputs


def _constants(
    kind: PackedKind | int,
    ordered: bool,
    activation: Activation | None,
    gated: bool,
    tile_rows: int,
    dtype: torch.dtype,
    arch: int,
) -> tuple[dict[str, Any], int]:
    """Return the constexprs and launch options of :func:`_grouped`, and its programs per multiprocessor. ``kind``: kind
    of packed matrices, or number of inputs of plain ones. ``ordered``: packed inputs are permuted."""
    name = _CLAMPED if isinstance(activation, tuple) else activation or ""
    check(name in ("", _CLAMPED, *NAMED), "activation {!r} is not known", activation)
    check(bool(name) or not gated, "gates need an activation")
    check(gated or name != _CLAMPED, "a clamped SwiGLU needs gates")
    use = _tuned(kind if isinstance(kind, PackedKind) else None, tile_rows, dtype, arch)
    if isinstance(kind, PackedKind):
        constants = tile_constants(kind, dtype, arch, ordered=ordered)
    else:
        constants = _PLAIN | {"RAGGED": kind % use["depth"] != 0}
    constants |= {
        "ACTIVATION": name,
        "GATED": gated,
        "BLOCK_N": use["outputs"],
        "BLOCK_T": tile_rows,
        "BLOCK_K": use["depth"],
        "GROUP_T": use["group"],
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
        **dependent(arch),
    }
    return constants, use["programs"]


def _tuned(kind: PackedKind | None, tile_rows: int, dtype: torch.dtype, arch: int) -> dict[str, int]:
    """Return the tuning file's constants for packed matrices of a kind, or for plain ones (None)."""
    bits, coding, scale = (BITS[kind.coding], kind.coding, kind.scale) if kind else (8 * dtype.itemsize, "", "")
    more: dict[str, int | str] = {"bits": bits, "coding": coding, "scale": scale, "bytes": dtype.itemsize}
    return tuned("grouped_product", arch, rows=tile_rows, **more)
