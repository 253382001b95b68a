"""Causal depthwise convolution of the rows of each sequence with those before it, whose inputs are in its state.

    row t of a sequence   inputs t - taps + 1 .. t: of the step's rows, and of the state for those before the step
    its last row          also writes the inputs that the next step needs

Each row is a separate program, because no row depends on another one's result. Products are added up from the oldest
token to the row's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, cdiv, check, check_tensor
from pillion.kernels.gpu.tuned import tuned
from pillion.kernels.gpu_states.state_places import (
    READS,
    WRITES,
    StepOfStates,
    check_places,
    piece_of,
    pieces_of_inputs,
)
from pillion.kernels.state_pieces import PIECE_CHANNELS


@triton.jit
def _convolve(
    x, taps, bias, out, pool, owners, starts, slots, places, columns, channels, x_stride, out_stride,
    TAPS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, CHOSEN: tl.constexpr, PAGES: tl.constexpr,
    SLOT_VALUES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve one block of channels of one row; a sequence's last row also writes its last inputs to the state."""
    row = tl.program_id(0)
    sequence = tl.load(owners + row)
    if sequence >= 0:
        begin = tl.load(starts + sequence)
        is_last = row + 1 == tl.load(starts + sequence + 1)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < channels
        number = tl.where(inside, channel, 0) // PIECE
        old, reads = piece_of(pool, slots, places, sequence, number, READS, PAGES, SLOT_VALUES)
        new, writes = piece_of(pool, slots, places, sequence, number, WRITES, PAGES, SLOT_VALUES)
        within = channel % PIECE
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            source = row - (TAPS - 1) + tap
            mask = inside & (source >= begin)
            at = x + source.to(tl.int64) * x_stride + channel
            value = tl.load(at, mask=mask, other=0.0)
            if GATED:
                gate = tl.load(at + 2 * channels, mask=mask, other=0.0)
                value = (value.to(tl.float32) * gate.to(tl.float32)).to(value.dtype)
            before = tl.load(
                old + (TAPS - 1 + source - begin) * PIECE + within, mask=inside & reads & (source < begin), other=0.0
            )
            value = tl.where(source >= begin, value.to(tl.float32), before)
            total += value * tl.load(taps + channel * TAPS + tap, mask=inside, other=0.0)
            if tap > 0:
                tl.store(new + (tap - 1) * PIECE + within, value, mask=inside & writes & is_last)
        if BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        kind: tl.constexpr = out.dtype.element_ty
        if GATED:
            after = tl.load(x + row.to(tl.int64) * x_stride + channels + channel, mask=inside, other=0.0)
            result = (after.to(tl.float32) * total.to(kind).to(tl.float32)).to(kind)
        else:
            result = (total * tl.sigmoid(total)).to(kind)
        column, stored = channel, inside
        if CHOSEN:
            column = tl.load(columns + channel, mask=inside, other=-1)
            stored = column >= 0
        tl.store(out + row.to(tl.int64) * out_stride + column, result, mask=stored)


def convolve(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    step: StepOfStates,
    places: torch.Tensor,
    *,
    gated: bool = False,
    columns: torch.Tensor | None = None,
) -> None:
    """Convolve rows ``x`` [T, ...] into ``out`` [T, channels], and store the last inputs of each sequence in its state.

    x: [T, channels], whose rows are ``stride(0)`` apart; with ``gated`` [T, 3 * channels]: the first part times the
    third is convolved, and the second multiplies the result (LFM2).
    taps: float32 [channels, taps]; the last ones are for the token itself. bias: float32 [channels].
    out: of x's type, after silu; with ``gated`` without it. places: int32 [pieces, 2].
    columns: int32 [channels], the column of ``out`` for each channel; -1 for one whose inputs are only stored. None if
    all channels are in order.

    Raises Internal for misshapen tensors.
    """
    tokens, channels = len(x), len(taps)
    check_tensor("taps", taps, (None, None), torch.float32, x.device)
    check(x.dtype in FLOAT_DTYPES and tuple(x.shape) == (tokens, (3 if gated else 1) * channels), "x is {}", x.shape)
    check(x.stride(1) == 1, "x has no contiguous rows")
    check_tensor("out", out, (tokens, channels if columns is None else None), x.dtype, x.device)
    if columns is not None:
        check_tensor("columns", columns, (channels,), torch.int32, x.device)
    if bias is not None:
        check_tensor("bias", bias, (channels,), torch.float32, x.device)
    step.check(tokens)
    check_places(places, pieces_of_inputs(channels), step)
    constants = convolution_constants(taps.shape[1], gated, bias is not None, columns is not None, arch_of(x.device))
    _convolve[(tokens, cdiv(channels, constants["BLOCK"]))](
        *(x, taps, taps if bias is None else bias, out, step.pool, step.owners, step.starts, step.slots, places),
        *(places if columns is None else columns, channels, x.stride(0), out.stride(0)),
        **step.constants,
        **constants,
    )


def convolution_constants(taps: int, gated: bool, bias: bool, chosen: bool, arch: int) -> dict[str, int]:
    use = tuned("convolve", arch)
    shape = {"TAPS": taps, "GATED": gated, "BIAS": bias, "CHOSEN": chosen, "PIECE": PIECE_CHANNELS}
    return {**shape, "BLOCK": use["block"], "num_warps": use["num_warps"]}
