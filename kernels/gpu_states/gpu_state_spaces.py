"""Runs state spaces with a decay for each token (Mamba-2, arXiv 2405.21060) over the rows of each sequence, token by
token.

    mixed, steps of time, the state before --each sequence, head and piece of columns--> out, the state after

A program holds PIECE_COLUMNS of a head's values, [state_dim, PIECE_COLUMNS], in the registers of one warp and walks the
rows with them. Values do not depend on each other, and what is read is a sum within a warp, in one order for each
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


@dataclass(frozen=True, slots=True)
class SpaceShape:
    """Describes the heads of a state space and their values, and the groups of what writes to their matrices and reads
    them, which neighbouring heads share; each has ``state_dim`` values."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int

    @property
    def mixed(self) -> int:
        """Gives the number of values of a row's values, writes and reads."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    @property
    def pieces(self) -> int:
        """Gives the number of pieces of all matrices."""
        return self.heads * columns_of(self.head_dim)


@triton.jit
def _state_space(
    mixed, steps, decay, shift, skip, out, pool, starts, count, slots, places, steps_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE_DIM: tl.constexpr, PAGES: tl.constexpr,
    SLOT_VALUES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = HEADS * (HEAD_DIM // COLUMNS)
    SIDE: tl.constexpr = GROUPS * STATE_DIM
    MIXED: tl.constexpr = HEADS * HEAD_DIM + 2 * SIDE
    state_row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = state_row < STATE_DIM
    for item in range(tl.program_id(0), tl.load(count) * PIECES, tl.num_programs(0)):
        sequence, number = item // PIECES, item % PIECES
        head, first = number // (HEAD_DIM // COLUMNS), number % (HEAD_DIM // COLUMNS) * COLUMNS
        old, known = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, there = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        memory = tl.load(old + state_row * COLUMNS + column, mask=inside & known, other=0.0)
        values = mixed + head * HEAD_DIM + first
        writes = mixed + HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_DIM
        rate, moved, kept = -tl.exp(tl.load(decay + head)), tl.load(shift + head), tl.load(skip + head)
        for step_row in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
            row = tl.cast(step_row, tl.int64)
            value = tl.load(values + row * MIXED + column)
            write = tl.load(writes + row * MIXED + state_row, mask=inside, other=0.0)
            read = tl.load(writes + row * MIXED + SIDE + state_row, mask=inside, other=0.0)
            time = softplus(tl.load(steps + row * steps_stride + head).to(tl.float32) + moved)
            memory = memory * tl.exp(rate * time) + write * (value * time)
            found = tl.sum(memory * read, 0)[None, :] + kept * value
            tl.store(out + row * HEADS * HEAD_DIM + head * HEAD_DIM + first + column, found)
        tl.store(new + state_row * COLUMNS + column, memory, mask=inside & there)


def state_space(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    shift: torch.Tensor,
    skip: torch.Tensor,
    out: torch.Tensor,
    step: StepOfStates,
    places: torch.Tensor,
    shape: SpaceShape,
) -> None:
    """Runs the space over the rows of each sequence, from its state to its next state.

    mixed: float32 [T, shape.mixed], values, then what writes and what reads, both [groups, state_dim].
    steps: [T, heads], what makes each head's step of time; rows are ``stride(0)`` apart.
    decay, shift, skip: float32 [heads], the logarithm of how fast a head forgets, what is added to its step, and how
    much of its values is added to its results. out: float32 [T, heads * head_dim].
    places: int32 [heads * head_dim / PIECE_COLUMNS, 2].

    Raises Internal for misshapen tensors.
    """
    tokens, device = len(mixed), mixed.device
    check(shape.heads % shape.groups == 0 and shape.state_dim > 0, f"{shape} does not fit together")
    check_tensor("mixed", mixed, (None, shape.mixed), torch.float32)
    check(tuple(steps.shape) == (tokens, shape.heads) and steps.dtype in DTYPES, f"steps are {list(steps.shape)}")
    check(steps.stride(1) == 1 and steps.device == device, "steps have no contiguous rows, or are elsewhere")
    for name, vector in (("decay", decay), ("shift", shift), ("skip", skip)):
        check_tensor(name, vector, (shape.heads,), torch.float32, device)
    check_tensor("out", out, (tokens, shape.heads * shape.head_dim), torch.float32, device)
    step.check(tokens)
    check_places(places, shape.pieces, step)
    constants, each = space_constants(shape, arch_of(device))
    _state_space[programs_for(step, shape.pieces, tokens, each)](
        *(mixed, steps, decay, shift, skip, out, step.pool, step.starts, step.count, step.slots, places),
        steps.stride(0),
        **step.constants,
        **constants,
    )


def space_constants(shape: SpaceShape, arch: int) -> tuple[dict[str, int], int]:
    """Returns the kernel's constants, and how many programs a multiprocessor gets."""
    use = tuned("state_space", arch)
    return {
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "GROUPS": shape.groups,
        "STATE_DIM": shape.state_dim,
        "COLUMNS": PIECE_COLUMNS,
        "BLOCK": int(triton.next_power_of_2(shape.state_dim)),
        "num_warps": use["num_warps"],
    }, use["programs"]
