"""State spaces with a decay per value (Mamba-1, arXiv 2312.00752) over the rows of each sequence, token by token.

    mixed, time steps, writes and reads, the state before --each sequence and piece--> out, the state after

A program has one piece of a state, [state_dim, channels], in the registers of a warp, and iterates over all rows of a
sequence. Decays differ per value, so rows are no matrix products, unlike those of Mamba-2. A state contains no rows of
a partial chunk: each row has the same bits however a text was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import FLOAT_DTYPES, check, check_tensor, next_power_of_2
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
from pillion.kernels.state_pieces import PIECE_COLUMNS

# Max state values per channel, and max programs per multiprocessor.
MAX_SCANNED, SCAN_PROGRAMS = 64, 32


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Sizes of a selective scan: channels, and state values per channel."""

    channels: int
    state_dim: int

    @property
    def pieces(self) -> int:
        """Number of pieces of a state."""
        return columns_of(self.channels)


@triton.jit
def _selective_scan(
    mixed, steps, writes, reads, decay, skip, out, pool, starts, count, slots, places, sides_stride,
    CHANNELS: tl.constexpr, STATE_DIM: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    PAGES: tl.constexpr, SLOT_VALUES: tl.constexpr,
):  # fmt: skip
    """Scan one piece of each sequence's state over its rows, for every ``num_programs``-th piece."""
    PIECES: tl.constexpr = CHANNELS // PIECE
    place, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, PIECE)[None, :]
    within, held = place * PIECE + column, place < STATE_DIM
    for item in range(tl.program_id(0), tl.load(count) * PIECES, tl.num_programs(0)):
        sequence, number = item // PIECES, item % PIECES
        channel = number * PIECE + column
        old, known = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, there = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        memory = tl.load(old + within, mask=held & known, other=0.0)
        rates = -tl.exp(tl.load(decay + channel * STATE_DIM + place, mask=held, other=0.0))
        through = tl.load(skip + channel)
        begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        at, side = begin.to(tl.int64) * CHANNELS + channel, begin.to(tl.int64) * sides_stride + place
        for _ in range(begin, end):
            time, value = softplus(tl.load(steps + at).to(tl.float32)), tl.load(mixed + at).to(tl.float32)
            write = tl.load(writes + side, mask=held, other=0.0).to(tl.float32)
            read = tl.load(reads + side, mask=held, other=0.0).to(tl.float32)
            memory = memory * tl.exp(time * rates) + (time * value) * write
            tl.store(out + at, tl.sum(memory * read, 0)[None, :] + through * value)
            at, side = at + CHANNELS, side + sides_stride
        tl.store(new + within, memory, mask=held & there)


def selective_scan(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    writes: torch.Tensor,
    reads: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    out: torch.Tensor,
    step: StepOfStates,
    places: torch.Tensor,
    shape: ScanShape,
) -> None:
    """Run the scan over the rows of each sequence, from its state to its next state.

    mixed, steps: [T, channels], values and the inputs of their time steps.
    writes, reads: [T, state_dim] of one type (B and C); rows of both are ``stride(0)`` apart.
    decay: float32 [channels, state_dim] (A), the logarithm of the decay of each value of a channel's row. skip: float32
    [channels] (D), the factor of the values that are added to a channel's results. out: float32 [T, channels].
    places: int32 [channels / PIECE_COLUMNS, 2].

    Raises Internal for misshapen tensors.
    """
    tokens, device = len(mixed), mixed.device
    check(0 < shape.state_dim <= MAX_SCANNED, "{} has too many state values", shape)
    for name, rows in (("mixed", mixed), ("steps", steps)):
        check_tensor(name, rows, (tokens, shape.channels), FLOAT_DTYPES, device)
    for name, rows in (("writes", writes), ("reads", reads)):
        fits = rows.shape == (tokens, shape.state_dim) and rows.dtype in FLOAT_DTYPES and rows.device == device
        check(fits and rows.stride() == (writes.stride(0), 1), "{} are {} {}", name, rows.dtype, rows.shape)
    check_tensor("decay", decay, (shape.channels, shape.state_dim), torch.float32, device)
    check_tensor("skip", skip, (shape.channels,), torch.float32, device)
    check_tensor("out", out, (tokens, shape.channels), torch.float32, device)
    step.check(tokens)
    check_places(places, shape.pieces, step)
    _selective_scan[programs_for(min(tokens, len(step.slots)) * shape.pieces, SCAN_PROGRAMS, device)](
        *(mixed, steps, writes, reads, decay, skip, out, step.pool, step.starts, step.count, step.slots, places),
        writes.stride(0),
        **step.constants,
        **scan_constants(shape),
    )


def scan_constants(shape: ScanShape) -> dict[str, int]:
    return {
        "CHANNELS": shape.channels,
        "STATE_DIM": shape.state_dim,
        "PIECE": PIECE_COLUMNS,
        "BLOCK": next_power_of_2(shape.state_dim),
        "num_warps": 1,
    }
