"""Stateless random numbers on the device: Philox-4x32-10 (Salmon et al., 2011), bit for bit those of the CPU.

Device functions for other kernels. The key is a row's seed (low word, high word); the counter is (position low,
position high, index, stream).

An exponential number is -log1p(-u) for u in (0, 1). Triton's interpreter has no log1p, so it is computed from log:
log(y) * u / (1 - y) with y = 1 - u as rounded, where y's rounding error cancels (Kahan; see Higham, Accuracy and
Stability of Numerical Algorithms, section 1.14.1). The result is exact to a few units in the last place for all u down
to 2^-33.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS: tl.constexpr = tl.constexpr(10)
MULTIPLIER_0: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLIER_1: tl.constexpr = tl.constexpr(0xCD9E8D57)
KEY_STEP_0: tl.constexpr = tl.constexpr(0x9E3779B9)
KEY_STEP_1: tl.constexpr = tl.constexpr(0xBB67AE85)
# The largest float32 below 1.
LARGEST_UNIFORM: tl.constexpr = tl.constexpr(1 - 2.0**-24)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return four words of the counter (c0, c1, c2, c3) under the key (k0, k1): uint32 tensors that broadcast."""
    for _ in tl.static_range(ROUNDS):
        # Products and keys overflow on purpose, also when Triton checks for overflow.
        high_0, low_0 = tl.umulhi(c0, MULTIPLIER_0), tl.mul(c0, MULTIPLIER_0, sanitize_overflow=False)
        high_1, low_1 = tl.umulhi(c2, MULTIPLIER_1), tl.mul(c2, MULTIPLIER_1, sanitize_overflow=False)
        c0, c1 = high_1 ^ c1 ^ k0, low_1
        c2, c3 = high_0 ^ c3 ^ k1, low_0
        k0 = tl.add(k0, KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_words(seed_low, seed_high, place_low, place_high, number, STREAM: tl.constexpr):
    """Return word ``number % 4`` of the counter with index ``number // 4``; numbers are int32, the rest uint32."""
    index = (number // 4).to(tl.uint32)
    which = number % 4
    stream = tl.full((), STREAM, tl.uint32)
    w0, w1, w2, w3 = philox(place_low, place_high, index, stream, seed_low, seed_high)
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def exponential(words, BITS: tl.constexpr):
    """Convert uniform words of BITS bits to Exp(1) numbers, float32, none of them 0 or infinite."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-BITS), LARGEST_UNIFORM)
    rest = 1.0 - uniform
    lost = 1.0 - rest
    # Where 1 - u rounds to 1, u itself is the answer.
    return tl.where(lost == 0.0, uniform, -tl.log(rest) * tl.div_rn(uniform, tl.where(lost == 0.0, 1.0, lost)))
