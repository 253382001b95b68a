"""top_k, top_p and min_p on the device, each as a cut: the smallest logit that a row may still draw
(engine/sampling/cuts.py). Device functions of the program that chooses a row's token (gpu_sampling.py).

A row's program should not read the whole vocabulary. From the groups' largest logits and masses it first finds a lower
bound of the cut: one that at least k groups reach, or one below which there is less mass than a nucleus leaves out. A
group whose largest logit is below has all its mass there, another one at most its mass without that logit. Logits that
reach the bound, mostly a hundred, are copied together. A logit DEEPEST temperatures below the largest one cannot win
against the noise of any token, and such logits do not add up to a mass visible in float32, so no bound is lower.

The cut is the largest float32 c that enough logits reach: k tokens, or p of the mass. The bits of floats, with those of
negative ones flipped, are integers in the same order, so c is searched among integers, by fifths: 14 passes find any
float32 exactly. Counts are exact; masses are float32 sums in an order that depends on the row alone.

If more than HEAD_TOKENS logits reach the bound, as in a flat distribution, the whole row is searched. That takes some
200 us, so a token is first drawn without the nucleus. It is mostly inside, which one pass verifies, and then it is also
the winner among the tokens inside.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pillion.kernels.gpu.sampling.sampling_device import GROUP, group_tile

# Max temperatures of a bound below the largest logit. Noise is between -3 and 23, so a token 26 below cannot win, and
# 2^18 weights of e^-32 are 2^-28 of the largest one's.
DEEPEST: tl.constexpr = tl.constexpr(32.0)
# Share of the mass, of that which a nucleus leaves out, that allows for rounding.
ROOM: tl.constexpr = tl.constexpr(1e-5)
# Values that divide the range of a search in each of its passes; passes of a bound's search, to a 100th of a
# temperature.
WAYS: tl.constexpr = tl.constexpr(4)
BOUND_PASSES: tl.constexpr = tl.constexpr(5)


@triton.jit
def _key(value):
    """Map a float32 to an int64 of the same order; _value is the inverse."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reaching(
    values, count, least, top, rate, BY_MASS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Return the number of logits that reach each of ``least`` [N], or their mass (rate: 1 / temperature).

    The logits are ``count`` ones in memory, read BLOCK at a time, or, if BLOCK is 0, the tile ``values``, padded with
    -inf. No bound is -inf.
    """
    if BLOCK == 0:
        weight = tl.exp((values - top) * rate) if BY_MASS else tl.full(values.shape, 1.0, tl.float32)
        sums = tl.where(values[None, :] >= least[:, None], weight[None, :], 0.0)
    else:
        # Two-dimensional tiles are loaded as they are summed, so that no logit moves between threads.
        offsets = tl.arange(0, BLOCK)[None, :]
        sums = tl.zeros((N, BLOCK), tl.float32)
        for start in tl.range(0, count, BLOCK, num_stages=STAGES):
            there = start + offsets < count
            value = tl.load(values + start + offsets, mask=there, other=float("-inf")).to(tl.float32)
            weight = tl.exp((value - top) * rate) if BY_MASS else tl.full((1, BLOCK), 1.0, tl.float32)
            sums += tl.where(value >= least[:, None], weight, 0.0)
    return tl.sum(sums, axis=1)


@triton.jit
def _largest(
    values, count, low, high, goal, top, rate, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Return the largest key in [low, high] that a count or mass of at least ``goal`` reaches; ``low`` if none does."""
    while low < high:
        keys = tl.minimum(low + (high - low + WAYS) // (WAYS + 1) * (1 + tl.arange(0, WAYS)), high)
        reached = _reaching(values, count, _value(keys), top, rate, BY_MASS, WAYS, BLOCK, STAGES) >= goal
        # The count and mass that reach a key fall as the key grows, so the largest key reached by enough can be
        # searched for.
        high = tl.minimum(high, tl.min(tl.where(reached, high, keys - 1), axis=0))
        low = tl.maximum(low, tl.max(tl.where(reached, keys, low), axis=0))
    return low


@triton.jit
def cut_among(values, count, bound, top, rate, top_k, top_p, total, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return a row's cut by top_k (0: all) and top_p among logits, given as to _reaching, that include all above
    ``bound``; ``total`` is the row's mass."""
    low, high = _key(bound), _key(top)
    if top_k > 0:
        low = _largest(values, count, low, high, top_k.to(tl.float32), top, rate, False, BLOCK, STAGES)
        total = mass_from(values, count, _value(low), top, rate, BLOCK, STAGES)
    if top_p < 1.0:
        low = _largest(values, count, low, high, top_p * total, top, rate, True, BLOCK, STAGES)
    return _value(low)


@triton.jit
def mass_from(values, count, least, top, rate, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return the mass of those logits, given as to _reaching, that are at least ``least``."""
    one = tl.full((1,), 0.0, tl.float32) + least
    return tl.sum(_reaching(values, count, one, top, rate, True, 1, BLOCK, STAGES), axis=0)


@triton.jit
def mass_above(values, count, value, top, rate, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return the mass of those logits, given as to _reaching, that are larger than ``value``."""
    return mass_from(values, count, _value(_key(value) + 1), top, rate, BLOCK, STAGES)


@triton.jit
def lower_bound(largest, weights, masses, top, temperature, top_k, top_p, total):
    """Return a lower bound of a row's cut, from the largest logits of its groups [N], their ``weights``, the groups'
    ``masses`` (only for nuclei without top_k), and the sum of these."""
    shallow, deep = tl.full((), 0.0, tl.float32), tl.full((), DEEPEST, tl.float32)
    bound = top - temperature * DEEPEST
    limited = top_k > 0
    most = tl.where(limited, -top_k.to(tl.float32), (1.0 - top_p - ROOM) * total)
    for _ in range(BOUND_PASSES):
        depths = shallow + (deep - shallow) * ((1 + tl.arange(0, WAYS)).to(tl.float32) * (1.0 / (WAYS + 1)))
        least = top - temperature * depths
        reach = largest[None, :] >= least[:, None]
        others = tl.minimum((masses - weights)[None, :], (tl.exp(-depths) * (GROUP - 1))[:, None])
        below = tl.where(reach, others, masses[None, :])
        fits = tl.sum(tl.where(limited, tl.where(reach, -1.0, 0.0), below), axis=1) <= most
        # Only a bound that was tried is returned, since another one's rounding may lose a logit.
        bound = tl.maximum(bound, tl.max(tl.where(fits, least, bound), axis=0))
        deep = tl.minimum(deep, tl.min(tl.where(fits, depths, deep), axis=0))
        shallow = tl.maximum(shallow, tl.max(tl.where(fits, shallow, depths), axis=0))
    return bound


@triton.jit
def gather(source, able, head, count, vocab, least, CHUNK: tl.constexpr, HEAD: tl.constexpr):
    """Copy the logits of at least ``least`` in ``count`` groups into one list; return their number, or a number above
    HEAD if the list is too short."""
    found = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < count) & (found <= HEAD):
        _, _, values, inside = group_tile(source, able, start, count, vocab, CHUNK)
        reach = (inside & (values >= least)).to(tl.int32)
        each = tl.sum(reach, axis=1)
        # Sums within a group, then over a few groups, need fewer barriers than one over all tokens.
        before = found + tl.cumsum(each, axis=0) - each
        place = before[:, None] + tl.cumsum(reach, axis=1) - 1
        tl.store(head + place, values, mask=(reach > 0) & (place < HEAD))
        found += tl.sum(each, axis=0)
        start += CHUNK
    tl.debug_barrier()
    return found
