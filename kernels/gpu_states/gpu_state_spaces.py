"""Runs state spaces with a decay for each token (Mamba-2, arXiv 2405.21060) over the rows of each sequence, chunk by
chunk, as that paper's section 6 does.

    mixed, steps of time, the state before --each sequence, head and piece of columns--> out, the state after

With G the sum of a chunk's decays up to each row and S the matrix where the chunk begins:

    out_t = read_t exp(G_t) S + sum over j <= t of (read_t . write_j) exp(G_t - G_j) time_j value_j + skip value_t

A program walks the chunks of a sequence with some of a head's values, [state_dim, values], in the registers of a warp:
four products a chunk. Values do not depend on each other, so the fewer a program has, the more programs share a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.cpu.states.pieces import CHUNK, PIECE_COLUMNS
from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import arch_of, check, check_tensor
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states.gpu_chunks import across, chunk_of, chunk_rows, wide_dot
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

    @property
    def sides(self) -> int:
        """Gives the number of pieces of what writes, and of steps of time, that a state keeps of a chunk."""
        return self.groups + self.heads


@triton.jit
def _state_space(
    mixed, steps, decay, shift, skip, out, pool, starts, count, firsts, slots, places, sides, steps_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE_DIM: tl.constexpr, EXACT: tl.constexpr,
    PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = HEAD_DIM // COLUMNS
    SHARED: tl.constexpr = HEADS // GROUPS
    SIDE: tl.constexpr = GROUPS * STATE_DIM
    MIXED: tl.constexpr = HEADS * HEAD_DIM + 2 * SIDE
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    state_row, state_column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    column, one = tl.arange(0, COLUMNS)[None, :], tl.arange(0, 1)[None, :]
    inside, inside_row = state_row < STATE_DIM, state_column < STATE_DIM
    nothing = tl.zeros((CHUNK, COLUMNS), tl.float32)
    for item in range(tl.program_id(0), tl.load(count) * HEADS * PARTS, tl.num_programs(0)):
        sequence, head = item // (HEADS * PARTS), item // PARTS % HEADS
        first = item % PARTS * COLUMNS
        number, within = head * (HEAD_DIM // PIECE) + first // PIECE, first % PIECE + column
        group = head // SHARED
        old, known = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, there = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        group_side, _ = piece_of(pool, slots, sides, sequence, group, READS, PAGES, SLOT_VALUES)
        side, _ = piece_of(pool, slots, sides, sequence, GROUPS + head, READS, PAGES, SLOT_VALUES)
        memory = tl.load(old + state_row * PIECE + within, mask=inside & known, other=0.0)
        values = mixed + head * HEAD_DIM + first + column
        writes = mixed + HEADS * HEAD_DIM + group * STATE_DIM + state_column
        rate, moved, kept = -tl.exp(tl.load(decay + head)), tl.load(shift + head), tl.load(skip + head)
        origin, begin, end = chunk_of(starts, firsts, sequence, 0, CHUNK)
        for row in tl.range(origin, end, CHUNK, disable_licm=True):
            rows = row + place
            mine = (rows >= begin) & (rows < end)
            kept_values = old + STATE_DIM * PIECE + within
            value = chunk_rows(values, kept_values, row, begin, end, column < COLUMNS, MIXED, PIECE, CHUNK)
            write = chunk_rows(writes, group_side + state_column, row, begin, end, inside_row, MIXED, STATE_DIM, CHUNK)
            read = tl.load(writes + SIDE + rows.to(tl.int64) * MIXED, mask=mine & inside_row, other=0.0)
            fresh = tl.load(steps + rows.to(tl.int64) * steps_stride + head + one, mask=mine, other=0.0)
            time = tl.where(mine, softplus(fresh.to(tl.float32) + moved), 0.0)
            if row < begin:
                kept_times = tl.load(side + place + one, mask=rows < begin, other=0.0)
                time = tl.where(rows < begin, kept_times, time)
            sums = tl.cumsum(rate * time, 0)
            left = tl.exp(tl.where(place >= other, sums - across(sums, CHUNK), float("-inf")))
            scores = dot(read, tl.trans(write), tl.zeros((CHUNK, CHUNK), tl.float32)) * left * across(time, CHUNK)
            found = wide_dot(read, memory, nothing, EXACT) * tl.exp(sums)
            found = wide_dot(scores, value, found, EXACT) + kept * value.to(tl.float32)
            at = out + rows.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + first + column
            tl.store(at, found, mask=mine)
            if row + CHUNK <= end:
                last = tl.sum(tl.where(place == CHUNK - 1, sums, 0.0), 0)[None, :]
                new_values = value.to(tl.float32) * (time * tl.exp(last - sums))
                memory = wide_dot(tl.trans(write), new_values, memory * tl.exp(last), EXACT)
            else:
                # The rows of a chunk that is not whole are kept, once each.
                ours = (rows < end) & there
                tl.store(new + STATE_DIM * PIECE + place * PIECE + within, value.to(tl.float32), mask=ours)
                if first == 0:
                    side_after, _ = piece_of(pool, slots, sides, sequence, GROUPS + head, WRITES, PAGES, SLOT_VALUES)
                    tl.store(side_after + place + one, time, mask=ours)
                    if head % SHARED == 0:
                        group_after, _ = piece_of(pool, slots, sides, sequence, group, WRITES, PAGES, SLOT_VALUES)
                        writes_at = group_after + place * STATE_DIM + state_column
                        tl.store(writes_at, write.to(tl.float32), mask=ours & inside_row)
        tl.store(new + state_row * PIECE + within, memory, mask=inside & there)


def state_space(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    shift: torch.Tensor,
    skip: torch.Tensor,
    out: torch.Tensor,
    step: StepOfStates,
    places: torch.Tensor,
    sides: torch.Tensor,
    shape: SpaceShape,
) -> None:
    """Runs the space over the rows of each sequence, from its state to its next state.

    mixed: [T, shape.mixed], values, then what writes and what reads, both [groups, state_dim].
    steps: [T, heads], what makes each head's step of time; rows are ``stride(0)`` apart.
    decay, shift, skip: float32 [heads], the logarithm of how fast a head forgets, what is added to its step, and how
    much of its values is added to its results. out: float32 [T, heads * head_dim].
    places: int32 [heads * head_dim / PIECE_COLUMNS, 2]. sides: int32 [shape.sides, 2], those of what writes, which a
    state keeps of a chunk, and those of heads' steps of time.

    Raises Internal for misshapen tensors.
    """
    tokens, device = len(mixed), mixed.device
    check(shape.heads % shape.groups == 0 and shape.state_dim > 0, f"{shape} does not fit together")
    check_tensor("mixed", mixed, (None, shape.mixed), DTYPES)
    check(tuple(steps.shape) == (tokens, shape.heads) and steps.dtype in DTYPES, f"steps are {list(steps.shape)}")
    check(steps.stride(1) == 1 and steps.device == device, "steps have no contiguous rows, or are elsewhere")
    for name, vector in (("decay", decay), ("shift", shift), ("skip", skip)):
        check_tensor(name, vector, (shape.heads,), torch.float32, device)
    check_tensor("out", out, (tokens, shape.heads * shape.head_dim), torch.float32, device)
    step.check(tokens)
    check_places(places, shape.pieces, step)
    check_places(sides, shape.sides, step)
    constants, each = space_constants(shape, mixed.dtype == torch.float32, arch_of(device))
    parts = shape.heads * shape.head_dim // constants["COLUMNS"]
    _state_space[programs_for(min(tokens, len(step.slots)) * parts, each, device)](
        *(mixed, steps, decay, shift, skip, out, step.pool, step.starts, step.count, step.firsts, step.slots),
        *(places, sides, steps.stride(0)),
        **step.constants,
        **constants,
    )


def space_constants(shape: SpaceShape, exact: bool, arch: int) -> tuple[dict[str, int], int]:
    """Returns the kernel's constants, and how many programs a multiprocessor gets. ``exact``: whether products are
    exact, as in float32 models."""
    block = int(triton.next_power_of_2(shape.state_dim))
    use = tuned("state_space", arch, exact=int(exact), state_dim=block)
    return {
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "GROUPS": shape.groups,
        "STATE_DIM": shape.state_dim,
        "EXACT": exact,
        "CHUNK": CHUNK,
        "PIECE": PIECE_COLUMNS,
        "COLUMNS": use["columns"],
        "BLOCK": block,
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
    }, use["programs"]
