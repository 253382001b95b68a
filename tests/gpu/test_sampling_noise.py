"""The device's random words against the CPU's and Random123's, and its exponential numbers against float64."""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.engine.sampling.gumbel import random_words as words_on_cpu
from pillion.kernels.gpu.sampling.gpu_philox import exponential, philox, random_words
from tests.support.examples import examples

WORD = 0xFFFFFFFF
COUNT = 64


@triton.jit
def _philox(given, out):
    place = tl.arange(0, 16)
    c0, c1, c2, c3 = tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3)
    k0, k1 = tl.load(given + 4), tl.load(given + 5)
    w0, w1, w2, w3 = philox(c0, c1, c2 + (place * 0).to(tl.uint32), c3, k0, k1)
    tl.store(out + place, tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3))), place < 4)


@triton.jit
def _words(key, first, out, STREAM: tl.constexpr, COUNT: tl.constexpr):  # noqa: N803
    places = tl.arange(0, COUNT)
    words = random_words(tl.load(key), tl.load(key + 1), tl.load(key + 2), tl.load(key + 3), first + places, STREAM)
    tl.store(out + places, words)


@triton.jit
def _exponential(words, out, BITS: tl.constexpr, COUNT: tl.constexpr):  # noqa: N803
    places = tl.arange(0, COUNT)
    tl.store(out + places, exponential(tl.load(words + places), BITS))


def words_of(*words: int) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint32)).to(DEVICE)


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, wanted):
    out = torch.zeros(4, dtype=torch.uint32, device=DEVICE)
    _philox[(1,)](words_of(*counter, *key), out)
    assert tuple(out.tolist()) == wanted


@settings(max_examples=examples(6))
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**63 - 1),
    first=st.sampled_from([0, 3, 128_250, 2**24 - COUNT]),
    stream=st.sampled_from([0, 1]),
)
def test_random_words_match_the_cpu_bit_by_bit(seed, position, first, stream):
    out = torch.zeros(COUNT, dtype=torch.uint32, device=DEVICE)
    key = words_of(seed & WORD, seed >> 32, position & WORD, position >> 32)
    _words[(1,)](key, first, out, stream, COUNT)
    numbers = np.arange(first, first + COUNT)
    seeds, positions = np.full(COUNT, seed, np.uint64), np.full(COUNT, position, np.int64)
    wanted = words_on_cpu(seeds, positions, (numbers // 4).astype(np.uint64), np.array(stream, np.uint64))
    assert out.tolist() == wanted[np.arange(COUNT), numbers % 4].tolist()


@pytest.mark.parametrize("bits", [25, 32])
def test_exponential_numbers_are_right_to_a_few_units_in_the_last_place(bits):
    """The smallest numbers matter most, because they win."""
    most = 2**bits - 1
    words = np.unique([0, 1, 2, 100, most, most - 1, most // 2, *np.geomspace(1, most, 500).astype(np.int64)])
    words = np.resize(words, 512)
    out = torch.zeros(512, dtype=torch.float32, device=DEVICE)
    _exponential[(1,)](words_of(*words.tolist()), out, bits, 512)
    uniform = np.minimum((words.astype(np.float32) + np.float32(0.5)).astype(np.float64) / 2**bits, 1 - 2.0**-24)
    np.testing.assert_allclose(out.cpu().numpy(), -np.log1p(-uniform), rtol=4 * 2.0**-23)
