"""Common parts of the sampler's kernels: groups and slices of a vocabulary, scratch memory, and device functions.

A group is 128 tokens, as on the CPU, where one random word determines a group's noise. A slice is the groups of one
program of a kernel. A vocabulary's last group and last slice need not be full.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pillion.kernels.gpu.launch import arch_of, cdiv, check
from pillion.kernels.gpu.sampling.sampling_record import KEY_FIELD, RECORD_FIELDS
from pillion.kernels.gpu.tuned import tuned

GROUP: tl.constexpr = tl.constexpr(128)
NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
FIELDS: tl.constexpr = tl.constexpr(RECORD_FIELDS)
KEY: tl.constexpr = tl.constexpr(KEY_FIELD)
# Report of a slice of a row: the largest logit's bits, its token, and whether there is a NaN.
REPORT_FIELDS = 3
# Counts are summed in float32, which is exact up to this number.
MAX_VOCAB_TOKENS = 2**24

GROUP_TOKENS = 128
# Max logits of a row that are copied into one list, to search the cut there: those that reach its lower bound.
HEAD_TOKENS = 1024


class SamplerScratch:
    """Device memory for ``choose`` of up to R rows, at fixed addresses, so that a graph can capture launches.

    report: int32 [R, REPORT_FIELDS, slices]. maxima, masses: float32 [R, groups], each group's largest logit and its
    sum of exp((logit - largest) / temperature). able: int32 [R, groups], a program's list of groups that may contain
    the token. heads: float32 [R, HEAD_TOKENS], logits that reach a lower bound of the cut. cut: float32 [R], smallest
    logit that the last draw of a row could choose; -inf for any.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate scratch memory for a vocabulary. Raises Internal if it is too large."""
        check(0 < vocab_size <= MAX_VOCAB_TOKENS, "a vocabulary of {} tokens is not supported", vocab_size)
        self.vocab_size = vocab_size
        self.slice_groups = tuned("sample_survey", arch_of(device))["slice_groups"]
        self.num_groups = cdiv(vocab_size, GROUP_TOKENS)
        self.num_slices = cdiv(self.num_groups, self.slice_groups)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        self.report = empty(REPORT_FIELDS, self.num_slices, dtype=torch.int32)
        self.maxima, self.masses = empty(self.num_groups), empty(self.num_groups)
        self.able = empty(self.num_groups, dtype=torch.int32)
        self.heads = empty(HEAD_TOKENS)
        self.cut = empty()


@triton.jit
def float_field(fields, PLACE: tl.constexpr):
    return tl.load(fields + PLACE).to(tl.float32, bitcast=True)


@triton.jit
def noise_key(fields):
    """Load seed and position of a row's record: low and high words of each."""
    seed_low = tl.load(fields + KEY).to(tl.uint32, bitcast=True)
    seed_high = tl.load(fields + KEY + 1).to(tl.uint32, bitcast=True)
    place_low = tl.load(fields + KEY + 2).to(tl.uint32, bitcast=True)
    place_high = tl.load(fields + KEY + 3).to(tl.uint32, bitcast=True)
    return seed_low, seed_high, place_low, place_high


@triton.jit
def slice_tile(source, groups, vocab):
    """Load the logits of ``groups`` [N] of one row. Return tokens [N, 128], float32 values (-inf for NaN and past the
    vocabulary), and 1 if there is a NaN, else 0."""
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(source + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    is_nan = values != values
    has_nan = tl.max(tl.max(is_nan.to(tl.int32), axis=1), axis=0)
    return tokens, tl.where(is_nan, float("-inf"), values), has_nan


@triton.jit
def listed(able, groups, wanted):
    """Store those of ``groups`` [N] that are ``wanted`` in ``able``, in ascending order; return their number."""
    # Barriers: other threads read these stores, and may still be reading the previous values.
    tl.debug_barrier()
    place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(able + place, groups, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def group_tile(source, able, start, count, vocab, CHUNK: tl.constexpr):
    """Load the logits of CHUNK groups from place ``start`` of the ``count`` in ``able`` on: return the groups [CHUNK],
    and tokens, float32 values and their mask [CHUNK, 128]."""
    which = start + tl.arange(0, CHUNK)
    groups = tl.load(able + which, mask=which < count, other=0)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (which < count)[:, None] & (tokens < vocab)
    values = tl.load(source + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    return groups, tokens, values, inside
