"""Recurrences of layers with a state: the same bits over any cut of a text, and what plain formulas say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.kernels.step import LayerState
from pillion.kernels.torch.recurrences import (
    DeltaRows,
    ScanRows,
    SpaceRows,
    Taps,
    convolve,
    delta_rule,
    selective_scan,
    state_space,
)
from pillion.kernels.torch.step_states import StepStates
from tests.support.examples import examples

TOKENS = 24
CUTS = st.lists(st.integers(1, TOKENS - 1), unique=True, max_size=6).map(sorted)


def pieces(cuts: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(40))
@given(CUTS)
def test_convolutions_have_the_same_bits_over_any_cut(cuts: list[int]) -> None:
    rows, taps = random(TOKENS, 37), Taps(random(37, 4, seed=1), random(37, seed=2))
    whole, inputs = torch.zeros(3, 37), torch.zeros(3, 37)
    wanted = convolve(rows, whole, taps)
    found = [convolve(rows[part], inputs, taps) for part in pieces(cuts)]
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(inputs, whole)
    assert torch.equal(inputs, rows[-3:])
    assert taps.bias is not None
    padded = torch.nn.functional.pad(rows, (0, 0, 3, 0)).t()[None]
    plain = torch.nn.functional.conv1d(padded, taps.factors[:, None], taps.bias, groups=37)[0].t()
    torch.testing.assert_close(wanted, plain)


@pytest.mark.parametrize("factors", [1, 24])
@settings(max_examples=examples(40))
@given(cuts=CUTS)
def test_delta_rules_have_the_same_bits_over_any_cut(factors: int, cuts: list[int]) -> None:
    rows = DeltaRows(
        random(TOKENS, 2, 24),
        random(TOKENS, 2, 24, seed=1),
        random(TOKENS, 4, 40, seed=2),
        -random(TOKENS, 4, factors, seed=3).abs(),
        random(TOKENS, 4, seed=4).sigmoid(),
    )
    whole, memory = torch.zeros(4, 24, 40), torch.zeros(4, 24, 40)
    wanted = delta_rule(rows, whole)
    found = [delta_rule(rows.of(part), memory) for part in pieces(cuts)]
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(memory, whole)


@settings(max_examples=examples(40))
@given(CUTS)
def test_state_spaces_have_the_same_bits_over_any_cut(cuts: list[int]) -> None:
    rows = SpaceRows(
        random(TOKENS, 6, 16),
        random(TOKENS, 2, 24, seed=1),
        random(TOKENS, 2, 24, seed=2),
        random(TOKENS, 6, seed=3).exp(),
    )
    rates, skip = -random(6, seed=4).exp(), random(6, seed=5)
    whole, memory = torch.zeros(6, 16, 24), torch.zeros(6, 16, 24)
    wanted = state_space(rows, rates, skip, whole)
    found = [state_space(rows.of(part), rates, skip, memory) for part in pieces(cuts)]
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(memory, whole)


@pytest.mark.parametrize("block_bytes", [64, 4096])
def test_states_are_restored_from_the_slots_they_were_stored_in(block_bytes: int) -> None:
    shapes = (LayerState((2, 3)), None, LayerState((1, 4), (2, 3, 5)))
    size = 6 + 4 + 30
    pages = -(-size * 4 // block_bytes)
    pool = torch.full((4 * pages, block_bytes), 255, dtype=torch.uint8)
    order = np.random.default_rng(1).permutation(len(pool)).astype(np.int32)
    writes, others = order[: 2 * pages].reshape(2, pages), order[2 * pages :].tolist()
    states = StepStates(shapes, np.array([0, 1, 3], np.int32))
    for number, (rows, inputs, memory) in enumerate(states.of_layer(2)):
        assert rows == (slice(0, 1), slice(1, 3))[number]
        inputs += 1 + number
        memory += 7 + number
    states.write(pool, writes)
    assert bool((pool[others] == 255).all())
    again = StepStates(shapes, np.array([0, 5, 6, 9], np.int32))
    again.read(pool, np.stack([writes[1], np.full(pages, -1, np.int32), writes[0]]))
    found = [(float(inputs[0, 3]), float(memory[1, 2, 4])) for _, inputs, memory in again.of_layer(2)]
    assert found == [(2.0, 8.0), (0.0, 0.0), (1.0, 7.0)]
    assert [inputs.shape for _, inputs, _ in again.of_layer(0)] == [(2, 3)] * 3


@settings(max_examples=examples(40))
@given(CUTS)
def test_selective_scans_have_the_same_bits_over_any_cut(cuts: list[int]) -> None:
    rows = ScanRows(
        random(TOKENS, 32),
        random(TOKENS, 24, seed=1),
        random(TOKENS, 24, seed=2),
        random(TOKENS, 32, seed=3).abs(),
    )
    rates, skip = -random(32, 24, seed=4).abs(), random(32, seed=5)
    whole, memory = torch.zeros(2, 16, 24), torch.zeros(2, 16, 24)
    wanted = selective_scan(rows, rates, skip, whole)
    found = [selective_scan(rows.of(part), rates, skip, memory) for part in pieces(cuts)]
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(memory, whole)
