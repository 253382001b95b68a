"""Products and loads of the rows of a chunk of a text, for the kernels that advance in chunks (state_places.py).

A state is float32, and rows have the model's type. Tensor cores multiply 16 bits: a float32 number is split into two
bfloat16 ones, and a product takes two or three of theirs, which keeps 16 bits or more of each factor, in a fixed order.
In float32 models (EXACT), products are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot


@triton.jit
def halves(x):
    """Return two bfloat16 numbers whose sum has the first 16 bits of each float32 number. The first is truncated,
    because rounding takes a separate, slow conversion."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def wide_dot(left, right, acc, EXACT: tl.constexpr):
    """Return the matrix product plus ``acc``. One factor is float32, or both are; a bfloat16 factor is not split."""
    if EXACT:
        acc = dot(left, right, acc)
    elif left.dtype == tl.bfloat16:
        high, low = halves(right)
        acc = dot(left, high, dot(left, low, acc))
    elif right.dtype == tl.bfloat16:
        high, low = halves(left)
        acc = dot(high, right, dot(low, right, acc))
    else:
        left_high, left_low = halves(left.to(tl.float32))
        right_high, right_low = halves(right.to(tl.float32))
        acc = dot(left_high, right_high, dot(left_high, right_low, dot(left_low, right_high, acc)))
    return acc


@triton.jit
def chunk_of(starts, firsts, sequence, number, CHUNK: tl.constexpr):
    """Return the first row of chunk ``number`` of a sequence's chunks in a step, possibly before the step's rows, and
    the rows of the step that the sequence owns, [begin, end)."""
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    return begin - tl.load(firsts + sequence) % CHUNK + number * CHUNK, begin, end


@triton.jit
def chunk_rows(step_rows, kept_rows, origin, begin, end, inside, stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Load the rows of a chunk that begins at row ``origin`` of the step: [CHUNK, columns].

    Rows before ``begin`` come from a state, WIDTH values apart (``kept_rows``: columns of the chunk's first row), rows
    up to ``end`` from the step, ``stride`` apart (``step_rows``: columns of the step's first row). Later rows are
    zeros. ``inside``: mask of the columns.
    """
    place = tl.arange(0, CHUNK)[:, None]
    rows = origin + place
    in_step = (rows >= begin) & (rows < end)
    values = tl.load(step_rows + rows.to(tl.int64) * stride, mask=in_step & inside, other=0.0)
    if origin < begin:
        kept = tl.load(kept_rows + place * WIDTH, mask=(rows < begin) & inside, other=0.0)
        values = tl.where(rows < begin, kept.to(values.dtype), values)
    return values


@triton.jit
def across(column, CHUNK: tl.constexpr):
    """Transpose a column [CHUNK, 1] to a row [1, CHUNK]."""
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.sum(tl.where(place == other, column, 0.0), 0)[None, :]


@triton.jit
def running(column, CHUNK: tl.constexpr):
    """Return the running sum of a column [CHUNK, 1]. Not by tl.cumsum: Triton 3.6 cannot compile a scan of a matrix
    with one column if a thread's layout has several."""
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.sum(tl.where(place >= other, across(column, CHUNK), 0.0), 1)[:, None]
