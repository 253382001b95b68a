"""Random numbers against Random123's vectors, a definition in plain Python, and their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pillion.engine.sampling.gumbel import GROUP_TOKENS, philox, random_words
from tests.support.sampling import all_noise

WORD = 0xFFFFFFFF


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox of Salmon et al., 2011, figure 2, in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & WORD, first >> 32 ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def plain_noise(seed: int, position: int, token: int) -> float:
    """Compute noise as the module docstring of pillion.engine.sampling.gumbel defines it."""

    def words(index: int, stream: int) -> tuple[int, ...]:
        return plain_philox((position & WORD, position >> 32, index, stream), (seed & WORD, seed >> 32))

    group = token // 128
    word = words(group // 4, 1)[group % 4]
    wait = -math.log1p(-((word >> 7) + 0.5) / 2**25) / 128
    if word % 128 != token % 128:
        wait -= math.log1p(-(words(token // 4, 0)[token % 4] + 0.5) / 2**32)
    return -math.log(wait)


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
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]) -> None:
    arrays = tuple(np.array([word], np.uint64) for word in counter)
    words = philox(arrays, (np.array([key[0]], np.uint64), np.array([key[1]], np.uint64)))
    assert tuple(words[0].tolist()) == wanted == plain_philox(counter, key)


def test_philox_over_arrays_that_broadcast() -> None:
    seeds, positions = np.array([5, 2**64 - 1, 2**40], np.uint64), np.array([0, 2**35 + 1, 7])
    index = np.arange(11, dtype=np.uint64)
    words = random_words(seeds[:, None], positions[:, None], index, np.array(1, np.uint64))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for place in range(11):
            counter = (position & WORD, position >> 32, place, 1)
            assert tuple(words[row, place].tolist()) == plain_philox(counter, (seed & WORD, seed >> 32))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 + 5, 2**40 + 3), (12345, 678)])
def test_noise_matches_its_definition(seed: int, position: int) -> None:
    noise = all_noise(seed, position, 1000)
    wanted = [plain_noise(seed, position, token) for token in range(1000)]
    assert np.abs(noise - wanted).max() < 1e-5


def test_noise_depends_on_every_bit_of_seed_and_position() -> None:
    base = all_noise(1, 1, 8)
    for seed, position in ((1 | 1 << 40, 1), (2, 1), (1, 2), (1, 1 | 1 << 40), (1 | 1 << 63, 1)):
        assert not np.isin(all_noise(seed, position, 8), base).any()


def test_noise_values_are_independent_exponentials() -> None:
    """Mean, variance and every covariance within and across groups, within five standard errors."""
    draws, tokens = 4000, GROUP_TOKENS + 32
    waits = np.stack([np.exp(-all_noise(seed, 3, tokens).astype(np.float64)) for seed in range(draws)])
    error = 1 / math.sqrt(draws)
    assert np.abs(waits.mean(axis=0) - 1).max() < 5 * error
    covariance = np.cov(waits, rowvar=False)
    # The variance of an exponential number's square: E(x - 1)^4 - 1 = 8.
    assert np.abs(np.diag(covariance) - 1).max() < 5 * error * math.sqrt(8)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 5 * error
    # The tails: the shares below 1/100 and above 5.
    for share, truth in ((waits < 0.01).mean(), -math.expm1(-0.01)), ((waits > 5).mean(), math.exp(-5)):
        assert abs(share - truth) < 5 * math.sqrt(truth / waits.size)
