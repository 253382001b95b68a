"""Pairs sorted by expert and cut into tiles, by both ways, against a stable sort; and the sums of rows."""

from __future__ import annotations

from tests.support.gpu import DEVICE, rounded  # isort: skip  (before the kernels)

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.gpu.experts import pair_sorting
from pillion.kernels.gpu.experts.expert_sums import PairResults, add_up
from pillion.kernels.gpu.experts.pair_sorting import (
    COMPARED,
    FEW_PAIRS,
    PairOrder,
    PairSorter,
    columns_of,
    most_tiles,
    sort_few,
)
from tests.support.examples import examples
from tests.support.expert_pairs import sorted_pairs
from tests.support.guarded import MARK, Guarded


@triton.jit(do_not_specialize=["pairs", "tile_rows"])
def _sort_few(
    chosen, order, tiles, count, pairs, tile_rows, experts: tl.constexpr, most: tl.constexpr, compared: tl.constexpr
):
    """Sort like a router's last program."""
    sort_few(chosen, order, tiles, count, pairs, tile_rows, experts, most, compared)


@pytest.mark.parametrize("few", [True, False])
@given(
    tokens=st.integers(1, 70),
    choices=st.integers(1, 5),
    experts=st.sampled_from([1, 3, 40, 130]),
    tile_rows=st.sampled_from([1, 16, 100]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    crowded=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40))
def test_pairs_are_in_the_order_of_a_stable_sort(few, tokens, choices, experts, tile_rows, share, crowded, seed):
    torch.manual_seed(seed)
    chosen = torch.randint(0, max(1, experts // 8) if crowded else experts, (tokens, choices), dtype=torch.int32)
    chosen[torch.rand(tokens, choices) < share] = -1
    pairs, capacity = tokens * choices, most_tiles(experts, tokens * choices, tile_rows)
    order, tiles = Guarded((pairs,), torch.int32), Guarded((capacity, 3), torch.int32)
    count = Guarded((1,), torch.int32)
    into, given = PairOrder(order.inside, tiles.inside, count.inside, tile_rows), chosen.to(DEVICE)
    if few:
        _sort_few[(1,)](
            given, into.order, into.tiles, into.count, pairs, tile_rows, columns_of(experts), FEW_PAIRS, COMPARED
        )
    else:
        # Small blocks, so that there are several.
        with mock.patch.multiple(pair_sorting, BLOCK_PAIRS=64, SUMMED_COUNTS=128):
            sort = PairSorter(experts, pairs, DEVICE)
            for _ in range(2):
                sort(given, into)
    wanted, cut = sorted_pairs(chosen, tile_rows)
    assert order.inside.tolist() == wanted + [MARK] * (pairs - len(wanted))
    assert count.inside.tolist() == [len(cut)]
    assert [tuple(tile) for tile in tiles.inside[: len(cut)].tolist()] == cut
    assert bool((tiles.inside[len(cut) :] == MARK).all())
    assert all(each.margins_are_whole() for each in (order, tiles, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden", "choices"), [(1, 8, 1), (5, 1030, 3)])
def test_sums_skip_choices_without_an_expert(tokens, hidden, choices, dtype):
    torch.manual_seed(2)
    found = torch.randn(tokens * choices, hidden).to(dtype)
    scores, chosen = torch.rand(tokens, choices), torch.randint(-1, 3, (tokens, choices), dtype=torch.int32)
    chosen[-1] = -1
    missing = (chosen < 0).flatten()
    terms = (scores.double().flatten()[:, None] * found.double()).masked_fill(missing[:, None], 0.0)
    found[missing] = torch.nan
    out = Guarded((tokens, hidden), dtype)
    add_up(PairResults(found.to(DEVICE), scores.to(DEVICE), chosen.to(DEVICE)), out.inside)
    expected = terms.view(tokens, choices, hidden).sum(1).to(dtype)
    torch.testing.assert_close(out.inside.cpu(), expected, **rounded(dtype, 4))
    assert bool((out.inside[-1] == 0).all())
    assert out.margins_are_whole()


def test_misuse_is_refused():
    chosen, order = (
        torch.zeros(4, 2, dtype=torch.int32, device=DEVICE),
        torch.zeros(8, dtype=torch.int32, device=DEVICE),
    )
    tiles, count = torch.zeros(3, 3, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(Internal, match="3 tiles are too few"):
        PairSorter(2, 8, DEVICE)(chosen, PairOrder(order, tiles, count, 4))
    with pytest.raises(Internal, match="order"):
        PairSorter(2, 8, DEVICE)(chosen, PairOrder(order[:7], tiles, count, 16))
    with pytest.raises(Internal, match="workspace"):
        PairSorter(2, 0, DEVICE)(chosen, PairOrder(order, tiles, count, 16))
    results = PairResults(torch.zeros(4, 8, device=DEVICE), torch.zeros(4, 2, device=DEVICE), chosen)
    with pytest.raises(Internal, match="found"):
        add_up(results, torch.zeros(4, 8, device=DEVICE))
