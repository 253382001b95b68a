"""Sampling against Random123's vectors, transformers' processors and the softmax itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.sampler import SamplingRows, candidates, gumbel_noise, gumbel_noise_at, philox, sample

# The probability with which a right sampler fails a chi-square test here. The draws are fixed by their seeds, so a
# test that passes once passes always.
ALPHA = 1e-4


def rows(count, temperature=1.0, top_p=1.0, top_k=0, seed=0, position=0):
    return SamplingRows(
        temperature=np.broadcast_to(np.float32(temperature), count),
        top_p=np.broadcast_to(np.float32(top_p), count),
        top_k=np.broadcast_to(np.int32(top_k), count),
        seeds=np.broadcast_to(np.asarray(seed, np.uint64), count),
        positions=np.broadcast_to(np.asarray(position, np.int64), count),
    )


def shifted(logits, temperature):
    return ((logits - logits.max()) / np.float32(temperature)).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, wanted):
    words = philox(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == wanted


def test_noise_of_some_tokens_is_a_part_of_the_noise_of_all():
    everything = gumbel_noise(2**63 + 5, 2**40 + 3, 1001)
    some = np.array([0, 1, 5, 6, 7, 500, 999, 1000])
    assert everything.shape == (1001,)
    assert np.isfinite(everything).all()
    assert np.array_equal(gumbel_noise_at(2**63 + 5, 2**40 + 3, some), everything[some])


def test_noise_depends_on_every_bit_of_seed_and_position():
    base = gumbel_noise(1, 1, 8)
    for seed, position in ((1 | 1 << 40, 1), (2, 1), (1, 2), (1, 1 | 1 << 40)):
        assert not np.array_equal(gumbel_noise(seed, position, 8), base)


def test_greedy_is_the_argmax():
    logits = torch.randn(5, 300)
    assert sample(logits, rows(5, temperature=0.0)).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, rows(5, temperature=1e-6, seed=3)).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, rows(5, top_k=1, seed=3)).tolist() == logits.argmax(-1).tolist()
    assert sample(logits, rows(5, top_p=1e-6, seed=3)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 7), (0.9, 0.9, 12)]
)
def test_tokens_are_distributed_as_the_softmax_says(temperature, top_p, top_k):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 2
    draws = 6_000
    # Half the draws vary the seed, half the position: both must give independent numbers.
    number = np.arange(draws)
    seeds, positions = np.where(number % 2, number, 7), np.where(number % 2, 11, number)
    tokens = sample(logits.expand(draws, -1), rows(draws, temperature, top_p, top_k, seeds, positions))
    warped = warp(logits[None], temperature, top_k, top_p)[0]
    expected = warped.double().softmax(-1).numpy() * draws
    seen = np.bincount(tokens, minlength=40)
    assert not seen[expected == 0].any()
    # Cells with few draws are thrown together, as the test wants it.
    large = expected >= 20
    cells = [(seen[large], expected[large]), (seen[~large].sum(keepdims=True), expected[~large].sum(keepdims=True))]
    statistic = sum(((s - e) ** 2 / e).sum() for s, e in cells if e.sum() > 0)
    freedom = sum(len(e) for _, e in cells if e.sum() > 0) - 1
    assert statistic < chi_square_quantile(freedom)


def chi_square_quantile(freedom):
    """Wilson and Hilferty's approximation of the value exceeded with probability ALPHA (z = 3.719)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


def warp(logits, temperature, top_k, top_p):
    for warper in (
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ):
        logits = warper(None, logits)
    return logits


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([5, 64, 3000]),
    spread=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_candidates_are_those_of_transformers(seed, size, spread, temperature, top_k, top_p):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    kept = candidates(shifted(logits.numpy(), temperature), top_k, top_p)
    ours = np.zeros(size, bool)
    ours[slice(None) if kept is None else kept] = True
    # transformers adds up from the small end in fp32; in float64 the two ways meet.
    theirs = warp(logits[None].double(), temperature, min(top_k, size), top_p)[0].numpy() > -np.inf
    unsure = ours != theirs
    if unsure.any():
        # Only a token at whose edge the mass is p to within fp32 rounding may be judged otherwise.
        probabilities = warp(logits[None].double(), temperature, min(top_k, size), 1.0)[0].softmax(-1).numpy()
        before = probabilities[probabilities > probabilities[unsure].max()].sum()
        assert unsure.sum() == 1
        assert abs(before - top_p) < 1e-5


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    scores = np.array([0.0, -1.0, -1.0, -1.0, -5.0], np.float32)
    assert candidates(scores, 2, 1.0).tolist() == [0, 1, 2, 3]
    assert candidates(scores, 0, 0.5).tolist() == [0, 1, 2, 3]
    assert candidates(scores, 0, 0.3).tolist() == [0]
    assert candidates(scores, 5, 1.0) is None


def test_a_row_does_not_depend_on_its_batch():
    """The same logits, seed and position give the same token alone, in any company and in any place (I6)."""
    random = np.random.default_rng(0)
    count = 12
    logits = torch.randn(count, 5003) * 2
    batch = SamplingRows(
        temperature=random.choice([0.0, 0.7, 1.0, 1.5], count).astype(np.float32),
        top_p=random.choice([0.5, 0.95, 1.0], count).astype(np.float32),
        top_k=random.choice([0, 20, 2000], count).astype(np.int32),
        seeds=random.integers(0, 2**64, count, np.uint64),
        positions=random.integers(0, 10_000, count),
    )
    together = sample(logits, batch)
    for order in (random.permutation(count), np.array([3]), np.array([7, 2])):
        part = SamplingRows(
            batch.temperature[order], batch.top_p[order], batch.top_k[order], batch.seeds[order], batch.positions[order]
        )
        assert sample(logits[order], part).tolist() == together[order].tolist()


def test_sampling_changes_nothing():
    logits = torch.randn(3, 50)
    before = logits.clone()
    sample(logits, rows(3, top_k=5, top_p=0.5, seed=1))
    assert torch.equal(logits, before)
