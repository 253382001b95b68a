"""Runs the gated delta rule (arXiv 2412.06464) over the rows of each sequence, token by token.

    mixed --queries and keys of unit length, in place--> mixed     (KDA) forgets --factors of a matrix's rows--> forgets
    mixed, rates, forgets, the state before --each sequence, head and piece of columns--> out, the state after

A program holds PIECE_COLUMNS columns of a head's matrix [key_dim, head_dim] in the registers of one warp and walks the
rows with them. Columns do not depend on each other, and both sums over a key run within a warp, in one order for each
token: the result is exact over any cut of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.cpu.states.pieces import PIECE_COLUMNS
from pillion.kernels.gpu.launch import arch_of, check, check_tensor
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states.gpu_convolutions import DTYPES
from pillion.kernels.gpu_states.state_places import (
    READS,
    WRITES,
    StepOfStates,
    check_places,
    columns_of,
    piece_of,
    programs_for,
    softplus,
)

# Queries and keys are normed with this number.
_L2_EPS = tl.constexpr(1e-6)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Describes the heads of a delta rule: those of queries and keys, neighbours of which share one, and their
    ``key_dim`` values; those of values, and their ``head_dim``. ``doubled``: what is learnt counts twice. ``by_rows``:
    each row of a matrix forgets on its own (KDA)."""

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    doubled: bool = False
    by_rows: bool = False

    @property
    def mixed(self) -> int:
        """Gives the number of values of a row's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.head_dim

    @property
    def pieces(self) -> int:
        """Gives the number of pieces of all matrices."""
        return self.heads * columns_of(self.head_dim)

    def check(self) -> None:
        """Raises Internal for a shape that no model has."""
        check(self.key_dim > 0 and self.heads % self.key_heads == 0, f"{self} does not fit together")
        check(not self.by_rows or self.heads == self.key_heads, f"{self} has heads that share factors")


@triton.jit
def _unit_heads(mixed, stride, scale, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Each program norms a query or a key, which come one after the other; queries are also scaled."""
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    at = mixed + tl.program_id(0).to(tl.int64) * stride + head * KEY_DIM + column
    values = tl.load(at, mask=column < KEY_DIM, other=0.0)
    factor = tl.rsqrt(tl.sum(values * values, 0) + _L2_EPS)
    factor = tl.where(head < KEY_HEADS, factor * scale, factor)
    tl.store(at, values * factor, mask=column < KEY_DIM)


@triton.jit
def _forget_factors(made, decay, shift, out, values, parts, KEY_DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < values
    made_here = tl.load(made + row * values + column, mask=inside, other=0.0).to(tl.float32)
    times = softplus(made_here + tl.load(shift + column, mask=inside, other=0.0))
    rate = tl.exp(tl.load(decay + column // KEY_DIM, mask=inside, other=0.0))
    tl.store(out + row * values + column, tl.exp(-rate * times), mask=inside)


@triton.jit
def _delta_rule(
    mixed, rates, forgets, decay, shift, out, pool, starts, count, slots, places,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    DOUBLED: tl.constexpr, BY_ROWS: tl.constexpr, PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = HEADS * (HEAD_DIM // COLUMNS)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    MIXED: tl.constexpr = 2 * KEYS + HEADS * HEAD_DIM
    RATES: tl.constexpr = HEADS if BY_ROWS else 2 * HEADS
    key_row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = key_row < KEY_DIM
    for item in range(tl.program_id(0), tl.load(count) * PIECES, tl.num_programs(0)):
        sequence, number = item // PIECES, item % PIECES
        head, first = number // (HEAD_DIM // COLUMNS), number % (HEAD_DIM // COLUMNS) * COLUMNS
        old, known = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, there = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        memory = tl.load(old + key_row * COLUMNS + column, mask=inside & known, other=0.0)
        queries = mixed + head // (HEADS // KEY_HEADS) * KEY_DIM
        values = mixed + 2 * KEYS + head * HEAD_DIM + first
        if not BY_ROWS:
            rate = -tl.exp(tl.load(decay + head))
            moved = tl.load(shift + head)
        for step_row in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
            row = tl.cast(step_row, tl.int64)
            query = tl.load(queries + row * MIXED + key_row, mask=inside, other=0.0)
            key = tl.load(queries + row * MIXED + KEYS + key_row, mask=inside, other=0.0)
            value = tl.load(values + row * MIXED + column)
            learns = tl.sigmoid(tl.load(rates + row * RATES + head).to(tl.float32))
            if DOUBLED:
                learns *= 2.0
            if BY_ROWS:
                memory *= tl.load(forgets + row * HEADS * KEY_DIM + head * KEY_DIM + key_row, mask=inside, other=0.0)
            else:
                time = softplus(tl.load(rates + row * RATES + HEADS + head).to(tl.float32) + moved)
                memory *= tl.exp(rate * time)
            learnt = (value - tl.sum(memory * key, 0)[None, :]) * learns
            memory += key * learnt
            found = tl.sum(memory * query, 0)[None, :]
            tl.store(out + row * HEADS * HEAD_DIM + head * HEAD_DIM + first + column, found)
        tl.store(new + key_row * COLUMNS + column, memory, mask=inside & there)


def unit_heads(mixed: torch.Tensor, shape: DeltaShape) -> None:
    """Makes queries and keys of ``mixed`` float32 [T, shape.mixed] as long as 1, in place, and divides queries by the
    root of key_dim. Raises Internal for a misshapen tensor."""
    shape.check()
    check_tensor("mixed", mixed, (None, shape.mixed), torch.float32)
    constants = unit_constants(shape, arch_of(mixed.device))
    _unit_heads[(len(mixed), 2 * shape.key_heads)](mixed, mixed.stride(0), shape.key_dim**-0.5, **constants)


def forget_factors(
    made: torch.Tensor, decay: torch.Tensor, shift: torch.Tensor, out: torch.Tensor, shape: DeltaShape
) -> None:
    """Makes the factors of the rows of each head's matrix, ``out`` float32 [T, heads * key_dim], of what a product made
    [T, heads * key_dim]. decay, shift: float32 [heads], logarithms, and [heads * key_dim]. Raises Internal for
    misshapen tensors."""
    values = shape.heads * shape.key_dim
    check_tensor("made", made, (None, values), DTYPES)
    check_tensor("out", out, (len(made), values), torch.float32, made.device)
    check_tensor("decay", decay, (shape.heads,), torch.float32, made.device)
    check_tensor("shift", shift, (values,), torch.float32, made.device)
    constants = factor_constants(shape, arch_of(made.device))
    parts = triton.cdiv(values, constants["BLOCK"])
    _forget_factors[(len(made) * parts,)](made, decay, shift, out, values, parts, **constants)


def delta_rule(
    mixed: torch.Tensor,
    rates: torch.Tensor,
    forgets: torch.Tensor | None,
    decay: torch.Tensor,
    shift: torch.Tensor,
    out: torch.Tensor,
    step: StepOfStates,
    places: torch.Tensor,
    shape: DeltaShape,
) -> None:
    """Runs the rule over the rows of each sequence, from its state to its next state.

    mixed: what :func:`unit_heads` left. rates: [T, 2 * heads], what makes how much each head learns, then what makes
    how much it forgets; with ``by_rows`` [T, heads], and ``forgets`` is what :func:`forget_factors` made.
    decay, shift: float32 [heads], the logarithm of how fast it forgets, and what is added to its rate; not read with
    ``by_rows``. out: float32 [T, heads * head_dim]. places: int32 [heads * head_dim / PIECE_COLUMNS, 2].

    Raises Internal for misshapen tensors.
    """
    shape.check()
    tokens, device = len(mixed), mixed.device
    check_tensor("mixed", mixed, (None, shape.mixed), torch.float32)
    check_tensor("rates", rates, (tokens, (1 if shape.by_rows else 2) * shape.heads), DTYPES, device)
    check_tensor("out", out, (tokens, shape.heads * shape.head_dim), torch.float32, device)
    check((forgets is not None) == shape.by_rows, "factors of rows are given where each row has its own")
    if forgets is not None:
        check_tensor("forgets", forgets, (tokens, shape.heads * shape.key_dim), torch.float32, device)
    else:
        check_tensor("decay", decay, (shape.heads,), torch.float32, device)
        check_tensor("shift", shift, (shape.heads,), torch.float32, device)
    step.check(tokens)
    check_places(places, shape.pieces, step)
    constants, each = delta_constants(shape, arch_of(device))
    _delta_rule[programs_for(step, shape.pieces, tokens, each)](
        *(mixed, rates, mixed if forgets is None else forgets, decay, shift, out),
        *(step.pool, step.starts, step.count, step.slots, places),
        **step.constants,
        **constants,
    )


def unit_constants(shape: DeltaShape, arch: int) -> dict[str, int]:
    """Returns the constants of the kernel of :func:`unit_heads`."""
    use = tuned("unit_heads", arch)
    # A head is normed in place, so no two threads may have the same value.
    block = max(32 * use["num_warps"], int(triton.next_power_of_2(shape.key_dim)))
    return {"KEY_HEADS": shape.key_heads, "KEY_DIM": shape.key_dim, "BLOCK": block, "num_warps": use["num_warps"]}


def factor_constants(shape: DeltaShape, arch: int) -> dict[str, int]:
    """Returns the constants of the kernel of :func:`forget_factors`."""
    use = tuned("forget_factors", arch)
    return {"KEY_DIM": shape.key_dim, "BLOCK": use["block"], "num_warps": use["num_warps"]}


def delta_constants(shape: DeltaShape, arch: int) -> tuple[dict[str, int], int]:
    """Returns the constants of the kernel of :func:`delta_rule`, and how many programs a multiprocessor gets."""
    use = tuned("delta_rule", arch)
    return {
        "HEADS": shape.heads,
        "KEY_HEADS": shape.key_heads,
        "KEY_DIM": shape.key_dim,
        "HEAD_DIM": shape.head_dim,
        "DOUBLED": shape.doubled,
        "BY_ROWS": shape.by_rows,
        "COLUMNS": PIECE_COLUMNS,
        "BLOCK": int(triton.next_power_of_2(shape.key_dim)),
        "num_warps": use["num_warps"],
    }, use["programs"]
