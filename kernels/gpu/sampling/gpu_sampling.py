"""Chooses tokens on the device like the sampler on the CPU: a pure function of (logits, seed, position) (I6).

    sampling_masks.py   before this module: tokens that a grammar forbids
    sampling_edits.py   and changes of single logits
    sampling_cuts.py    the cut of rows with top_k, top_p or min_p, if a step has any
    _race               the winner of each slice of each row
    _settle             the winner among a row's slices

engine/sampling (sampler.py, gumbel.py, cuts.py) explains what is computed.

A slice's program knows its groups' largest logits and, from one random word each, their largest noise, which gives an
upper bound for each group. It draws the noise of the group with the highest bound, then of the next, until no bound
reaches the best total so far: mostly one to three of its 32 groups, whose tokens cost a Philox counter each. Scores are
relative to the slice's largest logit, because the row's is not known yet; _settle computes the winners' totals anew,
relative to the row's.

Rows are independent: a program reads one row, in an order that depends on the vocabulary alone, and there are no atomic
operations. No logits raise: a row whose largest logit is NaN or infinite yields -1, as on the CPU.

Agreement with the CPU: random words are equal bit by bit, logarithms are not. Greedy rows are equal. Drawn rows yield
the CPU's token unless one of these differences is below the precision of float32; then either token is a draw from the
same distribution:

    two totals (score + noise)               TOTAL_TOLERANCE apart
    the mass before a token and top_p        MASS_TOLERANCE of the mass of all apart
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, check, check_tensor
from pillion.kernels.gpu.sampling.gpu_philox import exponential, random_words
from pillion.kernels.gpu.sampling.sampling_cuts import find_cuts
from pillion.kernels.gpu.sampling.sampling_device import (
    FIELDS,
    GROUP,
    SamplerScratch,
    float_field,
    noise_key,
    slice_tile,
)
from pillion.kernels.gpu.sampling.sampling_record import RECORD_FIELDS
from pillion.kernels.gpu.tuned import tuned

# This tolerance of totals is absolute, in units of scores: totals that can win are between -30 and 30, where float32
# has steps of 2^-19.
TOTAL_TOLERANCE = 2e-5
# This tolerance of masses is relative: sums of up to 2^18 float32 weights are added in different orders.
MASS_TOLERANCE = 2e-5

_LOGIT_TYPES = (torch.bfloat16, torch.float16, torch.float32)

# This margin, in units of scores, is far more than the difference in rounding between a bound and what it bounds.
SLACK: tl.constexpr = tl.constexpr(1e-3)
NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
TOKEN_STREAM: tl.constexpr = tl.constexpr(0)
GROUP_STREAM: tl.constexpr = tl.constexpr(1)
# The lower bits of a group's word choose the token with the largest noise, the upper ones give its wait.
GROUP_BITS: tl.constexpr = tl.constexpr(7)
WAIT_BITS: tl.constexpr = tl.constexpr(25)
MINUS_INFINITY_BITS: tl.constexpr = tl.constexpr(-(2**23))


@triton.jit
def _group_wait(words):
    return exponential(words >> GROUP_BITS, WAIT_BITS) * (1.0 / GROUP)


@triton.jit
def _noise(s0, s1, p0, p1, tokens, words):
    """Returns the noise of tokens from the words of their groups, a seed and a position."""
    own = exponential(random_words(s0, s1, p0, p1, tokens, TOKEN_STREAM), 32)
    is_first = tokens % GROUP == (words % GROUP).to(tl.int32)
    return -tl.log(_group_wait(words) + tl.where(is_first, 0.0, own))


@triton.jit
def _winner(source, fields, vocab, top, maxima, groups, temperature, cut):
    """Returns the token of ``groups`` [N] with the largest total among those that reach ``cut``."""
    s0, s1, p0, p1 = noise_key(fields)
    words = random_words(s0, s1, p0, p1, groups, GROUP_STREAM)
    bounds = tl.div_rn(maxima - top, temperature) - tl.log(_group_wait(words)) + SLACK
    bounds = tl.where(maxima >= cut, bounds, float("-inf"))
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), NO_TOKEN, tl.int32)
    highest = tl.max(bounds, axis=0)
    while (highest > float("-inf")) & (highest >= best):
        group = tl.min(tl.where(bounds == highest, groups, NO_TOKEN), axis=0)
        # A sum over all lanes reads the group's random word: one lane has it, and the others contribute 0.
        word = tl.sum(tl.where(groups == group, words, 0), axis=0).to(tl.uint32)
        tokens = group * GROUP + tl.arange(0, GROUP)
        inside = tokens < vocab
        values = tl.load(source + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        totals = tl.div_rn(values - top, temperature) + _noise(s0, s1, p0, p1, tokens, word)
        totals = tl.where(inside & (values >= cut), totals, float("-inf"))
        most = tl.max(totals, axis=0)
        token = tl.min(tl.where(totals == most, tokens, NO_TOKEN), axis=0)
        winner = tl.where((most > best) | ((most == best) & (token < winner)), token, winner)
        best = tl.maximum(best, most)
        bounds = tl.where(groups == group, float("-inf"), bounds)
        highest = tl.max(bounds, axis=0)
    return winner


@triton.jit
def _race(logits, record, cuts, report, vocab, num_slices, CUTTING: tl.constexpr, SLICE_GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    fields = record + row * FIELDS
    temperature = float_field(fields, 0)
    if temperature >= 0.0:
        source = logits + row * vocab
        groups = place * SLICE_GROUPS + tl.arange(0, SLICE_GROUPS)
        tokens, values, odd = slice_tile(source, groups, vocab)
        maxima = tl.max(values, axis=1)
        top = tl.max(maxima, axis=0)
        leader = tl.min(tl.min(tl.where(values == top, tokens, NO_TOKEN), axis=1), axis=0)
        winner = tl.full((), NO_TOKEN, tl.int32)
        cut = tl.load(cuts + row) if CUTTING else float("-inf")
        if (temperature > 0.0) & (top > float("-inf")) & (top < float("inf")) & (top >= cut):
            winner = _winner(source, fields, vocab, top, maxima, groups, temperature, cut)
        base = report + row * (4 * num_slices) + place
        tl.store(base, top.to(tl.int32, bitcast=True))
        tl.store(base + num_slices, leader)
        tl.store(base + 2 * num_slices, odd)
        tl.store(base + 3 * num_slices, winner)


@triton.jit
def _settle(logits, record, report, out, vocab, num_slices, SLICES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    fields = record + row * FIELDS
    temperature = float_field(fields, 0)
    if temperature >= 0.0:
        places = tl.arange(0, SLICES)
        inside = places < num_slices
        base = report + row * (4 * num_slices) + places
        tops = tl.load(base, mask=inside, other=MINUS_INFINITY_BITS).to(tl.float32, bitcast=True)
        leaders = tl.load(base + num_slices, mask=inside, other=NO_TOKEN)
        odd = tl.max(tl.load(base + 2 * num_slices, mask=inside, other=0), axis=0)
        top = tl.max(tops, axis=0)
        sound = (odd == 0) & (top > float("-inf")) & (top < float("inf"))
        # Where several tokens have the greatest value, the one with the lowest id is chosen.
        chosen = tl.where(sound, tl.min(tl.where(tops == top, leaders, NO_TOKEN), axis=0), -1)
        if (temperature > 0.0) & sound:
            winners = tl.load(base + 3 * num_slices, mask=inside, other=NO_TOKEN)
            racing = winners != NO_TOKEN
            tokens = tl.where(racing, winners, 0)
            values = tl.load(logits + row * vocab + tokens, mask=racing, other=float("-inf")).to(tl.float32)
            s0, s1, p0, p1 = noise_key(fields)
            words = random_words(s0, s1, p0, p1, tokens // GROUP, GROUP_STREAM)
            noise = _noise(s0, s1, p0, p1, tokens, words)
            totals = tl.where(racing, tl.div_rn(values - top, temperature) + noise, float("-inf"))
            most = tl.max(totals, axis=0)
            chosen = tl.min(tl.where(racing & (totals == most), tokens, NO_TOKEN), axis=0)
        tl.store(out + row, chosen)


def choose(
    logits: torch.Tensor, record: torch.Tensor, out: torch.Tensor, scratch: SamplerScratch, *, cutting: bool = True
) -> None:
    """Writes the tokens of edited logits [R, V] (bfloat16, float16 or float32) into ``out``, int32 [R].

    record: int32 [R, RECORD_FIELDS], made by sampling_record.pack_rows; nothing is written for padding rows.
    cutting: whether any row has a cut (sampling_record.cuts_any); without, two launches are omitted. Otherwise launches
    depend on R and V alone. Raises Internal for misshapen tensors.
    """
    check_tensor("logits", logits, (None, scratch.vocab_size), _LOGIT_TYPES)
    rows, vocab = logits.shape
    check_tensor("record", record, (rows, RECORD_FIELDS), torch.int32, logits.device)
    check_tensor("out", out, (rows,), torch.int32, logits.device)
    check(0 < rows <= len(scratch.report), f"{rows} rows, of at most {len(scratch.report)}")
    if cutting:
        find_cuts(logits, record, scratch)
    arch, sizes = arch_of(logits.device), (vocab, scratch.num_slices)
    race = _race_constants(arch, cutting, scratch.slice_groups)
    _race[(rows, scratch.num_slices)](logits, record, scratch.cut, scratch.report, *sizes, **race)
    _settle[(rows,)](logits, record, scratch.report, out, *sizes, **_settle_constants(arch, scratch.num_slices))


def _race_constants(arch: int, cutting: bool, slice_groups: int) -> dict[str, int]:
    warps = tuned("sample_race", arch)["num_warps"]
    return {"CUTTING": cutting, "SLICE_GROUPS": slice_groups, "num_warps": warps}


def _settle_constants(arch: int, slices: int) -> dict[str, int]:
    return {"SLICES": triton.next_power_of_2(slices), "num_warps": tuned("sample_race", arch)["settle_warps"]}
