"""Choice of tokens on the device like by the CPU's sampler: a pure function of (logits, seed, position) (I6).

    sampling_masks.py   before this module: tokens that a grammar forbids
    sampling_edits.py   and edits of single logits
    _survey             of each slice of each row: its largest logit; of drawn rows, each group's, and its mass
    _settle             for each row: its token, by these
      sampling_cuts.py    its cut, if it has top_k, top_p or min_p
      sampling_race.py    the winner among the tokens above the cut

engine/sampling (sampler.py, gumbel.py, cuts.py) explains the algorithm.

Two launches serve rows of every kind, parametrized by each row's record, so a CUDA graph of them serves every step. All
of a row's logits are read once, by many programs. The rest reads a few of its groups, so one program does it, which
draws only in slices that can have the row's winner.

Rows are independent: a program reads one row, in an order that depends on the row alone, and there are no atomic
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

from pillion.kernels.gpu.launch import FLOAT_DTYPES, arch_of, check, check_tensor, next_power_of_2
from pillion.kernels.gpu.sampling.sampling_cuts import cut_among, gather, lower_bound, mass_above
from pillion.kernels.gpu.sampling.sampling_device import (
    FIELDS,
    HEAD_TOKENS,
    NO_TOKEN,
    REPORT_FIELDS,
    SamplerScratch,
    float_field,
    listed,
    slice_tile,
)
from pillion.kernels.gpu.sampling.sampling_race import race
from pillion.kernels.gpu.sampling.sampling_record import FIELD_OF, RECORD_FIELDS
from pillion.kernels.gpu.tuned import tuned

# Absolute tolerance of totals, in units of scores: totals that can win are between -30 and 30, where float32 has steps
# of 2^-19.
TOTAL_TOLERANCE = 2e-5
# Relative tolerance of masses: sums of up to 2^18 float32 weights are added in different orders.
MASS_TOLERANCE = 2e-5


REPORTED: tl.constexpr = tl.constexpr(REPORT_FIELDS)
TEMPERATURE: tl.constexpr = tl.constexpr(FIELD_OF["temperature"])
TOP_K: tl.constexpr = tl.constexpr(FIELD_OF["top_k"])
TOP_P: tl.constexpr = tl.constexpr(FIELD_OF["top_p"])
MIN_P: tl.constexpr = tl.constexpr(FIELD_OF["min_p"])
HEAD: tl.constexpr = tl.constexpr(HEAD_TOKENS)
MINUS_INFINITY_BITS: tl.constexpr = tl.constexpr(-(2**23))


@triton.jit
def _survey(logits, record, report, maxima, masses, vocab, num_slices, num_groups, SLICE_GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    fields = record + row * FIELDS
    temperature = float_field(fields, TEMPERATURE)
    if temperature >= 0.0:
        groups = place * SLICE_GROUPS + tl.arange(0, SLICE_GROUPS)
        tokens, values, odd = slice_tile(logits + row * vocab, groups, vocab)
        largest = tl.max(values, axis=1)
        top = tl.max(largest, axis=0)
        leader = tl.min(tl.min(tl.where(values == top, tokens, NO_TOKEN), axis=1), axis=0)
        base = report + row * (REPORTED * num_slices) + place
        tl.store(base, top.to(tl.int32, bitcast=True))
        tl.store(base + num_slices, leader)
        tl.store(base + 2 * num_slices, odd)
        if temperature > 0.0:
            own, inside = row * num_groups + groups, groups < num_groups
            tl.store(maxima + own, largest, mask=inside)
            top_k = tl.load(fields + TOP_K)
            if (float_field(fields, TOP_P) < 1.0) & ((top_k == 0) | (top_k >= vocab)):
                weights = tl.exp((values - largest[:, None]) * (1.0 / temperature))
                mass = tl.where(largest > float("-inf"), tl.sum(weights, axis=1), 0.0)
                tl.store(masses + own, mass, mask=inside)


@triton.jit
def _sample_row(
    source,
    fields,
    maxima,
    masses,
    able,
    head,
    cuts,
    vocab,
    num_groups,
    top,
    temperature,
    GROUPS: tl.constexpr,
    GATHERED: tl.constexpr,
    RACED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sample one row's token. Store in ``cuts`` the row's logit cutoff by top_k, top_p and min_p. All pointers point at
    this row's values."""
    groups = tl.arange(0, GROUPS)
    there = groups < num_groups
    largest = tl.load(maxima + groups, mask=there, other=float("-inf"))
    rate = 1.0 / temperature
    top_k = tl.load(fields + TOP_K)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top_p = float_field(fields, TOP_P)
    cut = top + float_field(fields, MIN_P)
    bound, total = top, tl.full((), 0.0, tl.float32)
    wide = tl.full((), 0, tl.int32)
    if (top_k > 0) | (top_p < 1.0):
        weights = tl.exp((largest - top) * rate)
        mass = tl.load(masses + groups, mask=there & (top_k == 0), other=0.0) * weights
        total = tl.sum(mass, axis=0)
        bound = lower_bound(largest, weights, mass, top, temperature, top_k, top_p, total)
        count = listed(able, groups, there & (largest >= bound))
        found = gather(source, able, head, count, vocab, bound, GATHERED, HEAD)
        if found <= HEAD:
            offsets = tl.arange(0, HEAD)
            held = tl.load(head + offsets, mask=offsets < found, other=float("-inf"))
            cut = tl.maximum(cut, cut_among(held, found, bound, top, rate, top_k, top_p, total, 0, 1))
        else:
            wide += 1
    token = tl.full((), NO_TOKEN, tl.int32)
    # A wide row's nucleus is searched in the second turn, after a draw without it, and its top_k in the first.
    turn = tl.where((wide > 0) & (top_k == 0), 0, 1)
    while turn < 2:
        if (wide > 0) & ((turn > 0) | (top_k > 0)):
            cut = tl.maximum(cut, cut_among(source, vocab, bound, top, rate, top_k, top_p, total, BLOCK, STAGES))
        token = race(source, fields, able, vocab, top, largest, groups, temperature, cut, RACED)
        if turn == 0:
            value = tl.load(source + token).to(tl.float32)
            inside = mass_above(source, vocab, value, top, rate, BLOCK, STAGES) < top_p * total
            turn = tl.where(inside, 1, 0)
        turn += 1
    tl.store(cuts, cut)
    return token


@triton.jit
def _settle(
    logits,
    record,
    report,
    maxima,
    masses,
    able,
    heads,
    cuts,
    out,
    vocab,
    num_slices,
    num_groups,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    GATHERED: tl.constexpr,
    RACED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    fields = record + row * FIELDS
    temperature = float_field(fields, TEMPERATURE)
    if temperature >= 0.0:
        places = tl.arange(0, SLICES)
        inside = places < num_slices
        base = report + row * (REPORTED * num_slices) + places
        tops = tl.load(base, mask=inside, other=MINUS_INFINITY_BITS).to(tl.float32, bitcast=True)
        leaders = tl.load(base + num_slices, mask=inside, other=NO_TOKEN)
        odd = tl.max(tl.load(base + 2 * num_slices, mask=inside, other=0), axis=0)
        top = tl.max(tops, axis=0)
        sound = (odd == 0) & (top > float("-inf")) & (top < float("inf"))
        # The lowest id among equal maxima.
        chosen = tl.where(sound, tl.min(tl.where(tops == top, leaders, NO_TOKEN), axis=0), -1)
        if (temperature > 0.0) & sound:
            own = row * num_groups
            chosen = _sample_row(
                logits + row * vocab,
                fields,
                maxima + own,
                masses + own,
                able + own,
                heads + row * HEAD,
                cuts + row,
                vocab,
                num_groups,
                top,
                temperature,
                GROUPS,
                GATHERED,
                RACED,
                BLOCK,
                STAGES,
            )
        tl.store(out + row, chosen)


def choose(logits: torch.Tensor, record: torch.Tensor, out: torch.Tensor, scratch: SamplerScratch) -> None:
    """Write the tokens of edited logits [R, V] (bfloat16, float16 or float32) into ``out``, int32 [R].

    record: int32 [R, RECORD_FIELDS] of sampling_record.pack_rows; nothing is written for padding rows. Launches depend
    on R and V alone. Raises Internal for misshapen tensors.
    """
    check_tensor("logits", logits, (None, scratch.vocab_size), FLOAT_DTYPES)
    rows, vocab = logits.shape
    check_tensor("record", record, (rows, RECORD_FIELDS), torch.int32, logits.device)
    check_tensor("out", out, (rows,), torch.int32, logits.device)
    check(0 < rows <= len(scratch.report), "{} rows, of at most {}", rows, len(scratch.report))
    arch, sizes = arch_of(logits.device), (vocab, scratch.num_slices, scratch.num_groups)
    found = scratch.report, scratch.maxima, scratch.masses
    survey = _survey_constants(arch, scratch.slice_groups)
    _survey[(rows, scratch.num_slices)](logits, record, *found, *sizes, **survey)
    settle = _settle_constants(arch, scratch.num_slices, scratch.num_groups)
    work = scratch.able, scratch.heads, scratch.cut
    _settle[(rows,)](logits, record, *found, *work, out, *sizes, **settle)


def _survey_constants(arch: int, slice_groups: int) -> dict[str, int]:
    return {"SLICE_GROUPS": slice_groups, "num_warps": tuned("sample_survey", arch)["num_warps"]}


def _settle_constants(arch: int, slices: int, groups: int) -> dict[str, int]:
    use = tuned("sample_settle", arch)
    return {
        "SLICES": next_power_of_2(slices),
        "GROUPS": next_power_of_2(groups),
        "GATHERED": use["gathered_groups"],
        "RACED": use["raced_groups"],
        "BLOCK": use["block"],
        "STAGES": use["num_stages"],
        "num_warps": use["num_warps"],
    }
