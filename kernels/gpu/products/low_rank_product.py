"""Contributions of the adapters of a step's rows to a product (LoRA), by a shrink and an expand kernel (Punica's SGMV).

    shrink: shrunk = A x for each row that has an adapter      expand: out += B shrunk

Rows of one adapter, wherever they are in the batch, form runs of at most 16, a tensor-core tile. The runs are in the
step's record, padded with empty runs, and both grids depend on the padded number alone; matrices keep their addresses
when a slot gets another adapter. So CUDA graphs replay both kernels for any step.

An adapter's matrices of a layer are in its slot's slice of one buffer, at an offset common to all slots:

    A [slices, max_rank, inputs]      B [outputs, max_rank]

A slice is one projection of a fused layer, such as the keys of QKV. The outputs of a slice are computed only from the
rows of A of this slice. In a product with a matrix for each head, heads share A or B, each has its own of the other
one, and a row's shrunk values are those of its heads. Matrices of routers and gates, which choose or weigh whole rows,
are float32, in a separate buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import FLOAT_DTYPES, cdiv, check, check_tensor, next_power_of_2

# Rows per run: the smallest tensor-core tile.
RUN_ROWS = 16
# Ranks are padded to a multiple of the smallest tensor-core tile.
RANK_MULTIPLE = 16
# int32 words of a run: its adapter slot (-1 for padding), the index of its first row in the list of rows, and its
# number of rows.
RUN_WORDS = 3
MAX_SLICES = 4


@triton.jit
def _run_of(runs, rows, run, RUN_ROWS: tl.constexpr):
    """Return a run's adapter slot, the indices of its rows in the batch, padded to 16, and a mask of the real ones."""
    slot = tl.load(runs + run * 3)
    first = tl.load(runs + run * 3 + 1)
    numbers = tl.arange(0, RUN_ROWS)
    inside = numbers < tl.load(runs + run * 3 + 2)
    return slot, tl.load(rows + first + numbers, mask=inside, other=0).to(tl.int64), inside


@triton.jit
def _shrink(
    x, matrices, runs, rows, shrunk, inputs, width, slot_values, x_stride, x_head, head_values, head_ranks,
    RUN_ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    slot, row, inside = _run_of(runs, rows, tl.program_id(0), RUN_ROWS)
    if slot >= 0:
        head = tl.program_id(2)
        ranks = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
        columns = tl.arange(0, BLOCK_INPUTS)
        a = matrices + slot.to(tl.int64) * slot_values + head * head_values + ranks[:, None].to(tl.int64) * inputs
        source = x + row[:, None] * x_stride + head * x_head
        sums = tl.zeros((RUN_ROWS, BLOCK_RANKS), tl.float32)
        for begin in range(0, inputs, BLOCK_INPUTS):
            here = begin + columns < inputs
            values = tl.load(source + begin + columns, mask=inside[:, None] & here, other=0.0)
            weights = tl.load(a + begin + columns, mask=here[None, :], other=0.0)
            sums = dot(values.to(weights.dtype), tl.trans(weights), sums)
        target = shrunk + row[:, None] * width + head * head_ranks + ranks
        tl.store(target, sums.to(shrunk.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _expand(
    shrunk, matrices, runs, rows, out, outputs, width, slot_values, first_end, second_end, third_end,
    out_stride, out_head, head_values, head_ranks,
    RUN_ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
):  # fmt: skip
    slot, row, inside = _run_of(runs, rows, tl.program_id(0), RUN_ROWS)
    if slot >= 0:
        head = tl.program_id(2)
        begin = tl.program_id(1) * BLOCK_OUTPUTS
        columns = begin + tl.arange(0, BLOCK_OUTPUTS)
        ranks = tl.arange(0, BLOCK_RANKS)
        # A block of outputs is in one slice, and uses the ranks of that slice.
        part = (
            (begin >= first_end).to(tl.int32) + (begin >= second_end).to(tl.int32) + (begin >= third_end).to(tl.int32)
        )
        b = matrices + slot.to(tl.int64) * slot_values + head * head_values
        b += columns[:, None].to(tl.int64) * RANK + ranks
        source = shrunk + row[:, None] * width + head * head_ranks + part * RANK + ranks
        sums = tl.zeros((RUN_ROWS, BLOCK_OUTPUTS), tl.float32)
        for begin_rank in range(0, RANK, BLOCK_RANKS):
            weights = tl.load(b + begin_rank, mask=columns[:, None] < outputs, other=0.0)
            values = tl.load(source + begin_rank, mask=inside[:, None], other=0.0)
            sums = dot(values, tl.trans(weights), sums)
        target = out + row[:, None] * out_stride + head * out_head + columns
        there = inside[:, None] & (columns < outputs)
        found = tl.load(target, mask=there, other=0.0).to(tl.float32) + sums
        tl.store(target, found.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """Offsets of the matrices of a fused layer in each slot.

    Attributes:
        a_at, b_at: values from the begin of a slot to A [slices * rank, inputs] and to B [outputs, rank]; for layers of
            experts, to those of one expert after another; for heads, to those of one head after another unless shared.
        inputs, outputs: sizes of the layer.
        ends: for each slice, the output after its last one; the last slice ends at ``outputs``.
        rank: max rank of slots, a multiple of RANK_MULTIPLE.
        experts: number of experts with such a layer; 0 for a layer of all rows.
        exact: whether the matrices are float32 in every type of the model, in slots of that type.
        heads: number of heads with such a product; 0 for one matrix.
        shares_b: whether heads share B; else they share A.
    """

    a_at: int
    b_at: int
    inputs: int
    outputs: int
    ends: tuple[int, ...]
    rank: int
    experts: int = 0
    exact: bool = False
    heads: int = 0
    shares_b: bool = False

    @property
    def a_values(self) -> int:
        """Values of A in a slot, of all experts or heads."""
        every = self.experts or (self.heads if self.shares_b else 1)
        return every * self.rank * len(self.ends) * self.inputs

    @property
    def values(self) -> int:
        """Values of both matrices in a slot, of all experts or heads."""
        every = self.experts or (1 if self.shares_b else max(1, self.heads))
        return self.a_values + every * self.rank * self.outputs

    @property
    def block_outputs(self) -> int:
        """Outputs of an expand program, few enough that no block spans two slices."""
        block = 128
        while any(end % block for end in self.ends[:-1]):
            block //= 2
        return max(block, RUN_ROWS)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The runs of a step on the device: int32 ``runs`` [N, RUN_WORDS] and ``rows`` [T], rows ordered by slot."""

    runs: torch.Tensor
    rows: torch.Tensor


def add_low_rank(
    x: torch.Tensor, slots: torch.Tensor, layer: LayerSlot, record: RunRecord, shrunk: torch.Tensor, out: torch.Tensor
) -> None:
    """Add to ``out`` [T, outputs] the products of ``x`` [T, inputs] with the adapters of the rows in ``record``; with
    heads, both are [T, heads, ...], and only the values of a head need be contiguous.

    slots: [P, values], one slot after another, of x's type or float32. shrunk: scratch of the same type, [T or more, at
    least heads * slices * rank]. ``out`` is of either type. Raises Internal for misshapen tensors.
    """
    heads = max(1, layer.heads)
    if layer.heads:
        check(x.shape[1:] == (heads, layer.inputs), "x is {}", x.shape)
        check(out.shape == (len(x), heads, layer.outputs) and out.dtype == x.dtype, "out is {}", out.shape)
        check(x.stride(2) == out.stride(2) == 1, "the values of a head are not contiguous")
    else:
        check_tensor("x", x, (None, layer.inputs), FLOAT_DTYPES)
        check_tensor("out", out, (len(x), layer.outputs), (x.dtype, torch.float32), x.device)
    check_tensor("slots", slots, (None, None), torch.float32 if layer.exact else x.dtype, x.device)
    check_tensor("runs", record.runs, (None, RUN_WORDS), torch.int32, x.device)
    check_tensor("shrunk", shrunk, (None, None), slots.dtype, x.device)
    ranks = len(layer.ends) * layer.rank
    check(len(shrunk) >= len(x) and shrunk.shape[1] >= heads * ranks, "shrunk is {}", shrunk.shape)
    check(all(end % layer.block_outputs == 0 for end in layer.ends[:-1]), "slices end at {}", layer.ends)
    check(layer.rank % RANK_MULTIPLE == 0 and layer.ends[-1] == layer.outputs, "{} does not fit together", layer)
    if not len(record.runs):
        return
    slot_values, width = slots.shape[1], shrunk.shape[1]
    x_strides, out_strides = (
        rows.stride()[:2] if layer.heads else (size, 0) for rows, size in ((x, layer.inputs), (out, layer.outputs))
    )
    of_a, of_b = (ranks * layer.inputs, 0) if layer.shares_b else (0, layer.outputs * layer.rank)
    # Separate pointers for the matrices, because their offsets may exceed 32 bits, for which Triton would compile other
    # kernels.
    constants = _shrink_constants()
    _shrink[(len(record.runs), ranks // constants["BLOCK_RANKS"], heads)](
        x, slots[0, layer.a_at :], record.runs, record.rows, shrunk, layer.inputs, width, slot_values,
        *x_strides, of_a, ranks, **constants,
    )  # fmt: skip
    ends = (*layer.ends[:-1], layer.outputs, layer.outputs, layer.outputs)
    constants = _expand_constants(layer, slots.element_size())
    _expand[(len(record.runs), cdiv(layer.outputs, constants["BLOCK_OUTPUTS"]), heads)](
        shrunk, slots[0, layer.b_at :], record.runs, record.rows, out, layer.outputs, width, slot_values,
        *ends[: MAX_SLICES - 1], *out_strides, of_b, ranks, **constants,
    )  # fmt: skip


def _shrink_constants() -> dict[str, int]:
    return {"RUN_ROWS": RUN_ROWS, "BLOCK_RANKS": RANK_MULTIPLE, "BLOCK_INPUTS": 128, "num_warps": 4, "num_stages": 3}


def _expand_constants(layer: LayerSlot, item_bytes: int) -> dict[str, int]:
    check(padded_rank(layer.rank) == layer.rank, "the kernels need ranks of 16, 32, 64 ..., not {}", layer.rank)
    ranks = min(layer.rank, 64)
    # float32 weights take more registers than 16-bit ones, so that fewer outputs fit into a tile.
    outputs = min(layer.block_outputs, 128 if item_bytes == 2 else max(RUN_ROWS, 2048 // ranks))
    return {
        "RUN_ROWS": RUN_ROWS,
        "RANK": layer.rank,
        "BLOCK_RANKS": ranks,
        "BLOCK_OUTPUTS": outputs,
        "num_warps": 4,
    }


def padded_rank(max_rank: int) -> int:
    """Return the allocated rank of slots: a power of two, at least RANK_MULTIPLE."""
    return max(RANK_MULTIPLE, next_power_of_2(max_rank))
