"""State spaces with a decay per token (Mamba-2, arXiv 2405.21060) over the rows of each sequence, chunk by chunk, as in
that paper's section 6.

    mixed, time steps, the state before --each sequence, head and piece of columns--> out, the state after

With G the sum of a chunk's decays up to each row and S the matrix at the begin of the chunk:

    out_t = read_t exp(G_t) S + sum over j <= t of (read_t . write_j) exp(G_t - G_j) time_j value_j + skip value_t

A program iterates over the chunks of a sequence with some of a head's values, [state_dim, values], in the registers of
a warp: four products per chunk. Values are independent, so fewer values per program let more programs share a text. A
state_dim above MAX_WHOLE_STATE is multiplied in two halves: one warp's registers are too few for all of its operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.dot import dot
from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states.gpu_chunks import across, chunk_of, chunk_rows, running, wide_dot
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
from pillion.kernels.state_pieces import CHUNK, PIECE_COLUMNS

# Max values of a state that are multiplied at a time, and max values of a state.
MAX_WHOLE_STATE, MAX_STATE = 128, 256


@dataclass(frozen=True, slots=True)
class SpaceShape:
    """The heads of a state space and their values, and the groups of writes and reads (B and C), which neighbouring
    heads share; each has ``state_dim`` values."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int

    @property
    def mixed(self) -> int:
        """Values of a row's values, writes and reads."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    @property
    def pieces(self) -> int:
        """Number of pieces of all matrices."""
        return self.heads * columns_of(self.head_dim)

    @property
    def sides(self) -> int:
        """Number of pieces of writes and time steps of a partial chunk in a state."""
        return self.groups + self.heads


@triton.jit
def _piece(old, within, first, known, STATE_DIM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the values of a state from number ``first`` on, [BLOCK, columns]."""
    row = first + tl.arange(0, BLOCK)[:, None]
    return tl.load(old + row * PIECE + within, mask=(row < STATE_DIM) & known, other=0.0)


@triton.jit
def _put(new, memory, within, first, there, STATE_DIM: tl.constexpr, PIECE: tl.constexpr):
    """Store the values of a state from number ``first`` on."""
    row = first + tl.arange(0, memory.shape[0])[:, None]
    tl.store(new + row * PIECE + within, memory, mask=(row < STATE_DIM) & there)


@triton.jit
def _times(steps, side, row, begin, end, moved, stride, CHUNK: tl.constexpr):
    """Return the time step of each row of a chunk, [CHUNK, 1]: those before ``begin`` from the state."""
    place, one = tl.arange(0, CHUNK)[:, None], tl.arange(0, 1)[None, :]
    rows = row + place
    mine = (rows >= begin) & (rows < end)
    fresh = tl.load(steps + rows.to(tl.int64) * stride + one, mask=mine, other=0.0)
    time = tl.where(mine, softplus(fresh.to(tl.float32) + moved), 0.0)
    if row < begin:
        time = tl.where(rows < begin, tl.load(side + place + one, mask=rows < begin, other=0.0), time)
    return time


@triton.jit
def _writes_of(
    writes, kept, row, begin, end, column,
    STATE_DIM: tl.constexpr, MIXED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Load some columns of the writes of a chunk's rows, [CHUNK, columns]."""
    return chunk_rows(writes + column, kept + column, row, begin, end, column < STATE_DIM, MIXED, STATE_DIM, CHUNK)


@triton.jit
def _met(
    writes, kept, memory, scores, found, row, begin, end, column,
    SIDE: tl.constexpr, STATE_DIM: tl.constexpr, MIXED: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the products of some columns of reads, with writes to ``scores`` and with the state to ``found``. Returns
    both, and the writes."""
    write = _writes_of(writes, kept, row, begin, end, column, STATE_DIM, MIXED, CHUNK)
    rows = row + tl.arange(0, CHUNK)[:, None]
    here = (rows >= begin) & (rows < end) & (column < STATE_DIM)
    read = tl.load(writes + SIDE + column + rows.to(tl.int64) * MIXED, mask=here, other=0.0)
    return dot(read, tl.trans(write), scores), wide_dot(read, memory, found, EXACT), write


@triton.jit
def _keep(
    after, writes, kept, last, row, begin, end, there,
    STATE_DIM: tl.constexpr, MIXED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store the writes of the rows of a partial chunk; their ``last`` columns are loaded already."""
    place, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    ours = (row + place < end) & there
    to = after + place * STATE_DIM + column
    if WIDE:
        tl.store(to + BLOCK, last.to(tl.float32), mask=ours & (BLOCK + column < STATE_DIM))
        near = _writes_of(writes, kept, row, begin, end, column, STATE_DIM, MIXED, CHUNK)
        tl.store(to, near.to(tl.float32), mask=ours & (column < STATE_DIM))
    else:
        tl.store(to, last.to(tl.float32), mask=ours & (column < STATE_DIM))


@triton.jit
def _state_space(
    mixed, steps, decay, shift, skip, out, pool, starts, count, firsts, slots, places, sides, steps_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE_DIM: tl.constexpr, EXACT: tl.constexpr,
    PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = HEAD_DIM // COLUMNS
    SHARED: tl.constexpr = HEADS // GROUPS
    SIDE: tl.constexpr = GROUPS * STATE_DIM
    MIXED: tl.constexpr = HEADS * HEAD_DIM + 2 * SIDE
    place, other = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    near, far = tl.arange(0, BLOCK)[None, :], BLOCK + tl.arange(0, BLOCK)[None, :]
    column, one = tl.arange(0, COLUMNS)[None, :], tl.arange(0, 1)[None, :]
    for item in range(tl.program_id(0), tl.load(count) * HEADS * PARTS, tl.num_programs(0)):
        sequence, head = item // (HEADS * PARTS), item // PARTS % HEADS
        first = item % PARTS * COLUMNS
        number, within = head * (HEAD_DIM // PIECE) + first // PIECE, first % PIECE + column
        group = head // SHARED
        old, known = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, there = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        kept, _ = piece_of(pool, slots, sides, sequence, group, READS, PAGES, SLOT_VALUES)
        side, _ = piece_of(pool, slots, sides, sequence, GROUPS + head, READS, PAGES, SLOT_VALUES)
        memory = _piece(old, within, 0, known, STATE_DIM, PIECE, BLOCK)
        if WIDE:
            beyond = _piece(old, within, BLOCK, known, STATE_DIM, PIECE, BLOCK)
        values = mixed + head * HEAD_DIM + first + column
        writes = mixed + HEADS * HEAD_DIM + group * STATE_DIM
        rate, moved, through = -tl.exp(tl.load(decay + head)), tl.load(shift + head), tl.load(skip + head)
        origin, begin, end = chunk_of(starts, firsts, sequence, 0, CHUNK)
        for row in tl.range(origin, end, CHUNK, disable_licm=True):
            rows = row + place
            mine = (rows >= begin) & (rows < end)
            time = _times(steps + head, side, row, begin, end, moved, steps_stride, CHUNK)
            sums = running(rate * time, CHUNK)
            left = tl.exp(tl.where(place >= other, sums - across(sums, CHUNK), float("-inf")))
            scores, found = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, COLUMNS), tl.float32)
            scores, found, write = _met(
                writes, kept, memory, scores, found, row, begin, end, near, SIDE, STATE_DIM, MIXED, CHUNK, EXACT
            )
            if WIDE:
                scores, found, write = _met(
                    writes, kept, beyond, scores, found, row, begin, end, far, SIDE, STATE_DIM, MIXED, CHUNK, EXACT
                )
            kept_values = old + STATE_DIM * PIECE + within
            value = chunk_rows(values, kept_values, row, begin, end, column < COLUMNS, MIXED, PIECE, CHUNK)
            found = wide_dot(scores * left * across(time, CHUNK), value, found * tl.exp(sums), EXACT)
            at = out + rows.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + first + column
            tl.store(at, found + through * value.to(tl.float32), mask=mine)
            if row + CHUNK <= end:
                last = tl.sum(tl.where(place == CHUNK - 1, sums, 0.0), 0)[None, :]
                new_values = value.to(tl.float32) * (time * tl.exp(last - sums))
                if WIDE:
                    # Both halves of the writes would fill the registers: load each again.
                    beyond = wide_dot(tl.trans(write), new_values, beyond * tl.exp(last), EXACT)
                    write = _writes_of(writes, kept, row, begin, end, near, STATE_DIM, MIXED, CHUNK)
                memory = wide_dot(tl.trans(write), new_values, memory * tl.exp(last), EXACT)
            else:
                # Store the rows of a partial chunk, once each.
                ours = (rows < end) & there
                tl.store(new + STATE_DIM * PIECE + place * PIECE + within, value.to(tl.float32), mask=ours)
                if first == 0:
                    side_after, _ = piece_of(pool, slots, sides, sequence, GROUPS + head, WRITES, PAGES, SLOT_VALUES)
                    tl.store(side_after + place + one, time, mask=ours)
                    if head % SHARED == 0:
                        after, _ = piece_of(pool, slots, sides, sequence, group, WRITES, PAGES, SLOT_VALUES)
                        _keep(after, writes, kept, write, row, begin, end, there, STATE_DIM, MIXED, CHUNK, BLOCK, WIDE)
        _put(new, memory, within, 0, there, STATE_DIM, PIECE)
        if WIDE:
            _put(new, beyond, within, BLOCK, there, STATE_DIM, PIECE)


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
    """Run the space over the rows of each sequence, from its state to its next state.

    mixed: [T, shape.mixed], values, then writes and reads (B and C), both [groups, state_dim].
    steps: [T, heads], input of each head's time step; rows are ``stride(0)`` apart.
    decay, shift, skip: float32 [heads], the logarithm of a head's decay, the bias of its time step, and the factor of
    its values that are added to its results (D). out: float32 [T, heads * head_dim].
    places: int32 [heads * head_dim / PIECE_COLUMNS, 2]. sides: int32 [shape.sides, 2], pieces of a partial chunk's
    writes, and of heads' time steps.

    Raises Internal for misshapen tensors.
    """
    tokens, device = len(mixed), mixed.device
    fits = shape.heads % shape.groups == 0 and 0 < shape.state_dim <= MAX_STATE
    check(fits, "{} does not fit together", shape)
    check_tensor("mixed", mixed, (None, shape.mixed), FLOAT_DTYPES)
    check(tuple(steps.shape) == (tokens, shape.heads) and steps.dtype in FLOAT_DTYPES, "steps are {}", steps.shape)
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
    """Return the kernel's constants, and its programs per multiprocessor. ``exact``: products are exact, as in float32
    models."""
    whole = next_power_of_2(shape.state_dim)
    use = tuned("state_space", arch, exact=int(exact), state_dim=whole)
    return {
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "GROUPS": shape.groups,
        "STATE_DIM": shape.state_dim,
        "EXACT": exact,
        "CHUNK": CHUNK,
        "PIECE": PIECE_COLUMNS,
        "COLUMNS": use["columns"],
        "BLOCK": min(whole, MAX_WHOLE_STATE),
        "WIDE": whole > MAX_WHOLE_STATE,
        "num_warps": use["num_warps"],
        "num_stages": use["num_stages"],
    }, use["programs"]
