"""Applies top_k, top_p and min_p on the device, each as a cut: the smallest logit that a row may still draw
(engine/sampling/cuts.py).

    _survey   for each slice of each row: every group's largest logit, and its mass if a nucleus needs it
    _cut      for each row: its cut, -inf if all may be drawn

One program finds a row's cut, so it should not read the whole vocabulary. It first finds a lower bound of the cut.
With top_k that is the k-th largest of the groups' largest logits: each of these is a token. With a nucleus of all
tokens it is one below which, by the groups' masses and largest logits, there is too little mass to matter. Logits that
reach the bound, mostly a few hundred, are copied together; if there are too many, the whole row is searched.

The cut is the largest float32 c for which enough reaches c: k tokens, or p of the mass. The bits of floats, with those
of negative ones flipped, are integers in the same order, so c is searched among integers, by quarters: 16 passes find
any float32 exactly. Counts are exact; masses are float32 sums in an order that depends on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of
from pillion.kernels.gpu.sampling.sampling_device import (
    FIELDS,
    GROUP,
    HEAD_TOKENS,
    SamplerScratch,
    float_field,
    slice_tile,
)
from pillion.kernels.gpu.tuned import tuned

# A nucleus's bound lies at most DEEPEST temperatures below the largest logit and is found by this many halvings.
DEEPEST: tl.constexpr = tl.constexpr(64.0)
HALVINGS: tl.constexpr = tl.constexpr(12)
# At most this share of the mass outside a nucleus may lie below the bound; the rest allows for rounding.
SHARE_BELOW: tl.constexpr = tl.constexpr(0.5)
# A nucleus that leaves out less than this share of the mass is sought among all tokens.
LEAST_SHARE: tl.constexpr = tl.constexpr(1e-5)
# The search compares floats by integers in the same order (see _key); this is the integer of -inf, the smallest one.
LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31) + 0x7FFFFF)


@triton.jit
def _key(value):
    """Maps a float32 to an int64 of the same order; _value is the inverse."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reaching(values, count, a, b, c, top, rate, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns how many of ``count`` logits reach a, b and c, or their mass (rate: 1 / temperature)."""
    offsets = tl.arange(0, BLOCK)
    at_a = tl.zeros((BLOCK,), tl.float32)
    at_b = tl.zeros((BLOCK,), tl.float32)
    at_c = tl.zeros((BLOCK,), tl.float32)
    start = tl.full((), 0, tl.int32)
    while start < count:
        inside = start + offsets < count
        value = tl.load(values + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        weight = tl.exp((value - top) * rate) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
        at_a += tl.where(inside & (value >= a), weight, 0.0)
        at_b += tl.where(inside & (value >= b), weight, 0.0)
        at_c += tl.where(inside & (value >= c), weight, 0.0)
        start += BLOCK
    return tl.sum(at_a, axis=0), tl.sum(at_b, axis=0), tl.sum(at_c, axis=0)


@triton.jit
def _largest(values, count, low, high, goal, top, rate, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest key in [low, high] that a count or mass of at least ``goal`` reaches; ``low`` is one."""
    while low < high:
        quarter = (high - low + 3) // 4
        a = low + quarter
        b = tl.minimum(a + quarter, high)
        c = tl.minimum(b + quarter, high)
        at_a, at_b, at_c = _reaching(values, count, _value(a), _value(b), _value(c), top, rate, BY_MASS, BLOCK)
        # A logit that is at least as large as a key is so for every smaller key, too. So the larger the key, the fewer
        # logits reach it, and the largest key that enough of them reach can be searched for.
        high = tl.where(at_a < goal, a - 1, tl.where(at_b < goal, b - 1, tl.where(at_c < goal, c - 1, high)))
        low = tl.where(at_c >= goal, c, tl.where(at_b >= goal, b, tl.where(at_a >= goal, a, low)))
    return low


@triton.jit
def _cut_among(values, count, low, top, rate, top_k, top_p, total, BLOCK: tl.constexpr):
    """Finds the key of a row's cut among logits that include all that are kept."""
    high = _key(top)
    if top_k > 0:
        low = _largest(values, count, low, high, top_k.to(tl.float32), top, rate, False, BLOCK)
        kept = _value(low)
        total, _, _ = _reaching(values, count, kept, kept, kept, top, rate, True, BLOCK)
    if top_p < 1.0:
        low = _largest(values, count, low, high, top_p * total, top, rate, True, BLOCK)
    return low


@triton.jit
def _nucleus_bound(maxima, masses, top, temperature, rate, top_p, total):
    """Returns a key that is a lower bound of a nucleus's cut."""
    allowed = (1.0 - top_p) * SHARE_BELOW * total
    shallow = tl.full((), 0.0, tl.float32)
    deep = tl.full((), DEEPEST, tl.float32)
    for _ in range(HALVINGS):
        middle = (shallow + deep) * 0.5
        # A group's tokens below the bound weigh at most as much as all its tokens, and each less than the bound.
        least = top - temperature * middle
        below = tl.where(maxima < least, masses, tl.minimum(masses, tl.exp(-middle) * GROUP))
        fits = tl.sum(below, axis=0) <= allowed
        deep = tl.where(fits, middle, deep)
        shallow = tl.where(fits, shallow, middle)
    known = (deep < DEEPEST) & (allowed > total * LEAST_SHARE)
    return tl.where(known, _key(top - temperature * deep), LOWEST_KEY)


@triton.jit
def _gather(source, able, heads, count, vocab, least, CHUNK: tl.constexpr, HEAD: tl.constexpr):
    """Copies the logits of ``count`` groups that reach ``least`` together; returns their number, or more than HEAD."""
    found = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < count) & (found <= HEAD):
        which = start + tl.arange(0, CHUNK)
        groups = tl.load(able + which, mask=which < count, other=0)
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (which < count)[:, None] & (tokens < vocab)
        values = tl.load(source + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        reach = tl.reshape((inside & (values >= least)).to(tl.int32), (CHUNK * GROUP,))
        place = found + tl.cumsum(reach, axis=0) - 1
        tl.store(heads + place, tl.reshape(values, (CHUNK * GROUP,)), mask=(reach > 0) & (place < HEAD))
        found += tl.sum(reach, axis=0)
        start += CHUNK
    return found


@triton.jit
def _survey(logits, record, maxima, masses, vocab, num_groups, SLICE_GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    fields = record + row * FIELDS
    temperature = float_field(fields, 0)
    top_k = tl.load(fields + 1)
    lone = (float_field(fields, 2) < 1.0) & ((top_k == 0) | (top_k >= vocab))
    limited = (top_k > 0) & (top_k < vocab)
    if (temperature > 0.0) & (lone | limited | (float_field(fields, 3) > float("-inf"))):
        groups = tl.program_id(1) * SLICE_GROUPS + tl.arange(0, SLICE_GROUPS)
        _, values, _ = slice_tile(logits + row * vocab, groups, vocab)
        largest = tl.max(values, axis=1)
        inside = groups < num_groups
        tl.store(maxima + row * num_groups + groups, largest, mask=inside)
        if lone:
            weights = tl.exp((values - largest[:, None]) * (1.0 / temperature))
            mass = tl.where(largest > float("-inf"), tl.sum(weights, axis=1), 0.0)
            tl.store(masses + row * num_groups + groups, mass, mask=inside)


@triton.jit
def _cut(
    logits,
    record,
    maxima,
    masses,
    able,
    heads,
    cuts,
    vocab,
    num_groups,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    fields = record + row * FIELDS
    temperature = float_field(fields, 0)
    top_k = tl.load(fields + 1)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top_p = float_field(fields, 2)
    depth = float_field(fields, 3)
    cut = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (depth > float("-inf"))):
        groups = tl.arange(0, GROUPS)
        own = row * num_groups + groups
        largest = tl.load(maxima + own, mask=groups < num_groups, other=float("-inf"))
        top = tl.max(largest, axis=0)
        if (top > float("-inf")) & (top < float("inf")):
            if (top_k > 0) | (top_p < 1.0):
                rate = 1.0 / temperature
                low = tl.full((), LOWEST_KEY, tl.int64)
                total = tl.full((), 0.0, tl.float32)
                if top_k > 0:
                    if top_k <= num_groups:
                        goal = top_k.to(tl.float32)
                        low = _largest(
                            maxima + row * num_groups, num_groups, low, _key(top), goal, top, rate, False, BLOCK
                        )
                else:
                    mass = tl.load(masses + own, mask=groups < num_groups, other=0.0) * tl.exp((largest - top) * rate)
                    total = tl.sum(mass, axis=0)
                    low = _nucleus_bound(largest, mass, top, temperature, rate, top_p, total)
                least = _value(low)
                reaching = (largest >= least) & (groups < num_groups)
                # Other threads of this program read what is stored here, hence the barriers.
                place = tl.cumsum(reaching.to(tl.int32), axis=0) - 1
                tl.store(able + row * num_groups + place, groups, mask=reaching)
                tl.debug_barrier()
                count = tl.sum(reaching.to(tl.int32), axis=0)
                source = logits + row * vocab
                head = heads + row * HEAD
                found = _gather(source, able + row * num_groups, head, count, vocab, least, CHUNK, HEAD)
                tl.debug_barrier()
                if found <= HEAD:
                    low = _cut_among(head, found, low, top, rate, top_k, top_p, total, BLOCK)
                else:
                    low = _cut_among(source, vocab, low, top, rate, top_k, top_p, total, BLOCK)
                cut = _value(low)
            cut = tl.maximum(cut, top + depth)
    tl.store(cuts + row, cut)


def find_cuts(logits: torch.Tensor, record: torch.Tensor, scratch: SamplerScratch) -> None:
    """Writes the cut of each row of logits [R, V] into ``scratch.cut``; ``choose`` has checked the arguments."""
    rows, vocab = logits.shape
    arch, sizes = arch_of(logits.device), (vocab, scratch.num_groups)
    found = scratch.maxima, scratch.masses
    survey = _survey_constants(arch, scratch.slice_groups)
    _survey[(rows, scratch.num_slices)](logits, record, *found, *sizes, **survey)
    work = scratch.able, scratch.heads, scratch.cut
    _cut[(rows,)](logits, record, *found, *work, *sizes, **_cut_constants(arch, scratch.num_groups))


def _survey_constants(arch: int, slice_groups: int) -> dict[str, int]:
    return {"SLICE_GROUPS": slice_groups, "num_warps": tuned("sample_cut", arch)["survey_warps"]}


def _cut_constants(arch: int, groups: int) -> dict[str, int]:
    use = tuned("sample_cut", arch)
    tiles = {"GROUPS": triton.next_power_of_2(groups), "CHUNK": use["chunk_groups"], "BLOCK": use["block"]}
    return {**tiles, "HEAD": HEAD_TOKENS, "num_warps": use["num_warps"]}
