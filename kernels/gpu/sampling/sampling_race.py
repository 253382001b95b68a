"""Gumbel-max draw of a row's token on the device: the largest score + noise, with the noise of the CPU's sampler
(engine/sampling/gumbel.py).

One random word determines a group of 128 tokens' largest noise and its token. So a program with a row's largest logits
by group gets, from one word per group, the totals of these tokens, and a bound for all others. The largest of these
totals must be exceeded to win. Groups that may do so are listed, mostly one to three of 1,002 (some 20 in a flat
distribution), and only their tokens cost a random word each. Several groups are processed together, with one reduction
at the end, because none depends on another one's result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.sampling.gpu_philox import exponential, random_words
from pillion.kernels.gpu.sampling.sampling_device import GROUP, NO_TOKEN, group_tile, listed, noise_key

# Margin, in units of scores, far above the difference in rounding between a bound and the bounded totals.
SLACK: tl.constexpr = tl.constexpr(1e-3)
TOKEN_STREAM: tl.constexpr = tl.constexpr(0)
GROUP_STREAM: tl.constexpr = tl.constexpr(1)
# The lower bits of a group's word choose the token with the largest noise, the upper ones determine its wait.
GROUP_BITS: tl.constexpr = tl.constexpr(7)
WAIT_BITS: tl.constexpr = tl.constexpr(25)


@triton.jit
def _group_wait(words):
    return exponential(words >> GROUP_BITS, WAIT_BITS) * (1.0 / GROUP)


@triton.jit
def race(source, fields, able, vocab, top, largest, groups, temperature, cut, CHUNK: tl.constexpr):
    """Return the token of a row with the largest total among those that reach ``cut``, of equals the lowest.

    ``largest`` [N] are the largest logits of ``groups`` [N], -inf without a group, and ``top`` is the largest of all.
    ``able`` is memory for the numbers of N groups.
    """
    s0, s1, p0, p1 = noise_key(fields)
    words = random_words(s0, s1, p0, p1, groups, GROUP_STREAM)
    most = -tl.log(_group_wait(words))
    first = groups * GROUP + (words % GROUP).to(tl.int32)
    noisiest = tl.load(source + first, mask=first < vocab, other=float("-inf")).to(tl.float32)
    least = tl.max(tl.where(noisiest >= cut, tl.div_rn(noisiest - top, temperature) + most, float("-inf")), axis=0)
    bounds = tl.where(largest >= cut, tl.div_rn(largest - top, temperature) + most + SLACK, float("-inf"))
    count = listed(able, groups, (bounds > float("-inf")) & (bounds >= least))
    best = tl.full((CHUNK, GROUP), float("-inf"), tl.float32)
    winners = tl.full((CHUNK, GROUP), NO_TOKEN, tl.int32)
    for start in tl.range(0, count, CHUNK, num_stages=1):
        raced, tokens, values, inside = group_tile(source, able, start, count, vocab, CHUNK)
        word = random_words(s0, s1, p0, p1, raced, GROUP_STREAM)[:, None]
        own = exponential(random_words(s0, s1, p0, p1, tokens, TOKEN_STREAM), 32)
        is_first = tokens % GROUP == (word % GROUP).to(tl.int32)
        noise = -tl.log(_group_wait(word) + tl.where(is_first, 0.0, own))
        totals = tl.div_rn(values - top, temperature) + noise
        # Groups ascend, so of equal totals at one place of the tile the first one has the lowest token.
        better = inside & (values >= cut) & (totals > best)
        best, winners = tl.where(better, totals, best), tl.where(better, tokens, winners)
    total = tl.max(tl.max(best, axis=1), axis=0)
    return tl.min(tl.min(tl.where(best == total, winners, NO_TOKEN), axis=1), axis=0)
