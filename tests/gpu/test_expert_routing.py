"""The router's kernel against :func:`pillion.engine.models.layers.route`, with ties won by the lowest expert."""

from __future__ import annotations

from tests.support.gpu import DEVICE, add_up_in_one_order  # isort: skip  (before the kernels)

from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from pillion.engine.models.layers import RouterBiases, route
from pillion.errors import Internal
from pillion.kernels.gpu.experts import expert_routing
from pillion.kernels.gpu.experts.expert_routing import SPLIT_K_MAX_ROWS, ExpertRouter, RouteOptions
from pillion.kernels.gpu.experts.pair_sorting import PairOrder, most_tiles
from tests.support.expert_pairs import sorted_pairs
from tests.support.families import mixed
from tests.support.guarded import Guarded

# Exponentials of -inf, and the index of the maximum of only -inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Found = namedtuple("Found", "values indices")

CASES = {
    "softmax": RouteOptions(7, 3, False),
    "normalized": RouteOptions(128, 8, True, scale=1.5),
    "exact": RouteOptions(5, 2, True, exact=True),
    "sigmoid": RouteOptions(6, 2, True, sigmoid=True, exact=True, scale=2.5),
    "one expert": RouteOptions(16, 1, False, sigmoid=True, exact=True),
    "groups": RouteOptions(12, 3, True, exact=True, groups=4, kept_groups=2),
    "groups by their best": RouteOptions(60, 4, False, groups=5, kept_groups=3, group_best=1, scale=16.0),
    # Scores of 129 experts and more are several slabs, of which a group may have some, or a slab several groups.
    "slabs": RouteOptions(300, 6, True, scale=0.5),
    "groups in slabs": RouteOptions(256, 5, True, sigmoid=True, exact=True, groups=8, kept_groups=3),
    "groups of slabs": RouteOptions(400, 4, True, exact=True, groups=2, kept_groups=1),
}


def stable_topk(values: torch.Tensor, count: int, dim: int) -> Found:
    """torch.topk, whose order of equal values is unspecified, with the lowest index first."""
    ordered = values.sort(dim=dim, descending=True, stable=True)
    return Found(ordered.values[..., :count], ordered.indices[..., :count])


def made(how: RouteOptions, tokens: int, hidden: int, dtype: torch.dtype, factor: float = 0.125):
    """Rows and a router of small whole numbers, whose products are exact in any order and often equal."""
    torch.manual_seed(how.experts)
    rows, router = torch.randint(-3, 4, (tokens, hidden)), torch.randint(-3, 4, (how.experts, hidden))
    # One neighbour equals the first expert, as does one that may be in another group.
    router[1] = router[how.experts // 2] = router[0]
    return rows.to(dtype).to(DEVICE), (router * factor).to(dtype).to(DEVICE)


def routed(rows, router, how, count=None, **options):
    """Run the kernel twice: the first run must leave its tickets unchanged."""
    device_count = torch.tensor([len(rows) if count is None else count], dtype=torch.int32, device=DEVICE)
    run = ExpertRouter(how.columns, rows.shape[1], len(rows), DEVICE)
    for _ in range(2):
        scores = Guarded((len(rows), how.choices), torch.float32)
        chosen = Guarded((len(rows), how.choices), torch.int32)
        run(rows, router, how, device_count, scores.inside, chosen.inside, **options)
        assert scores.margins_are_whole()
        assert chosen.margins_are_whole()
    return scores.inside, chosen.inside


def experts_of(how: RouteOptions):
    names = ("sigmoid", "scale", "groups", "kept_groups", "group_best", "exact")
    return replace(mixed(how.per_token, how.normalize), **{name: getattr(how, name) for name in names})


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 0.125), (torch.float16, 37 / 512)])
@pytest.mark.parametrize("name", CASES)
def test_experts_match_the_decoder(name, dtype, factor, monkeypatch):
    """In float16 the products have more digits than it, so that rounding in the right places shows."""
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    how = CASES[name]
    rows, router = made(how, 21, 200, dtype, factor)
    scores, chosen = routed(rows, router, how)
    expected, numbers = route(rows.cpu(), router.cpu(), experts_of(how))
    assert torch.equal(chosen.cpu().long(), numbers)
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "groups", "groups in slabs"])
def test_vectors_of_a_router(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    how = CASES[name]
    rows, router = made(how, 5, 40, torch.float32)
    bias, choice, scales = torch.randint(-3, 4, (3, how.experts)).float() / 4
    scores, chosen = routed(
        rows, router, how, bias=bias.to(DEVICE), choice_bias=choice.to(DEVICE), factors=scales.to(DEVICE)
    )
    expected, numbers = route(rows.cpu(), router.cpu(), experts_of(how), RouterBiases(bias, choice, scales))
    assert torch.equal(chosen.cpu().long(), numbers)
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-5, atol=1e-6)
    # A bias is rounded to the rows' type, unless products are exact.
    half, bias = rows.half(), bias + 1 / 4096
    scores, _ = routed(half, router.half(), how, bias=bias.to(DEVICE))
    expected, _ = route(half.cpu(), router.half().cpu(), experts_of(how), RouterBiases(bias))
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_the_best_of_a_group_may_be_slabs_apart():
    how = CASES["groups of slabs"]
    rows, router = torch.zeros(1, 16, device=DEVICE), torch.zeros(how.experts, 16, device=DEVICE)
    choice = torch.zeros(how.experts)
    # The first group has the larger sum of two, and the second one the largest score.
    choice[[0, 128]], choice[200] = 1.0, 1.5
    _, chosen = routed(rows, router, how, choice_bias=choice.to(DEVICE))
    assert chosen.tolist() == [[0, 128, 1, 2]]


def test_routing_of_a_row_is_batch_invariant(monkeypatch):
    """On neither other rows nor the place, nor on whether programs share the parts of its product."""
    add_up_in_one_order(monkeypatch)
    torch.manual_seed(1)
    how = RouteOptions(70, 4, True)
    rows, router = torch.randn(40, 300).to(DEVICE), torch.randn(70, 300).to(DEVICE)
    together, order = routed(rows, router, how), torch.randperm(40)
    turned = (each[order] for each in together)
    assert all(torch.equal(*each) for each in zip(routed(rows[order], router, how), turned, strict=True))
    alone = routed(rows[7:8], router, how)
    assert all(torch.equal(one, other[7:8]) for one, other in zip(alone, together, strict=True))
    monkeypatch.setattr(expert_routing, "SPLIT_K_MAX_ROWS", 0)
    assert SPLIT_K_MAX_ROWS > 40
    assert all(torch.equal(*each) for each in zip(routed(rows, router, how), together, strict=True))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("name", "shared"), [("softmax", 2), ("sigmoid", 1), ("normalized", 3)])
def test_shared_experts_follow_the_routed_ones(name, shared, gated, monkeypatch):
    """They follow those of the router, whose scores do not change; the gate's bits are those of any batch."""
    add_up_in_one_order(monkeypatch)
    how = replace(CASES[name], always=shared)
    rows, router = made(how, 21, 200, torch.float32)
    rows = rows + torch.randn(rows.shape).to(DEVICE) / 8
    gate = torch.randn(1, 200).to(DEVICE) / 8 if gated else None
    plain, expected = routed(rows, router, CASES[name]), torch.ones(21, 1)
    scores, chosen = routed(rows, router, how, 19, gate=gate)
    assert torch.equal(chosen[:19, : how.per_token], plain[1][:19])
    assert torch.equal(scores[:19, : how.per_token], plain[0][:19])
    assert chosen[:19, how.per_token :].tolist() == [[how.experts + number for number in range(shared)]] * 19
    if gate is not None:
        expected = (rows @ gate.T).sigmoid().cpu()
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(scores[:19, how.per_token :].cpu(), expected[:19].expand(-1, shared), **close)
    assert bool((chosen[19:] == -1).all())
    assert bool((scores[19:] == 0).all())
    alone, _ = routed(rows[7:8], router, how, gate=gate)
    assert torch.equal(alone, scores[7:8])
    # Another process has them if they are not among its own.
    _, chosen = routed(rows, router, how, gate=gate, own=range(2, how.experts))
    assert bool((chosen[:, how.per_token :] == -1).all())
    monkeypatch.setattr(expert_routing, "SPLIT_K_MAX_ROWS", 0)
    again, _ = routed(rows, router, how, 19, gate=gate)
    assert torch.equal(again, scores)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (16, 21), (16, 3)])
def test_rows_that_pad_a_step_have_no_experts(first, count):
    how = CASES["softmax"]
    rows, router = made(how, 18, 32, torch.float32)
    rows[max(0, count - first) :] = torch.nan
    scores, chosen = routed(rows, router, how, count, first=first)
    real = max(0, count - first)
    assert bool((chosen[real:] == -1).all())
    assert bool((scores[real:] == 0).all())
    assert bool((chosen[:real] >= 0).all())
    assert bool(scores[:real].isfinite().all())


@pytest.mark.parametrize(("tokens", "per_token"), [(5, 3), (40, 3), (SPLIT_K_MAX_ROWS + 9, 1)])
@pytest.mark.parametrize("own", [range(40), range(10, 30)])
def test_few_pairs_are_sorted_by_the_last_program(tokens, per_token, own):
    """Of one tile and of several, whether programs share the parts of a product or not; also when a graph is
    replayed."""
    how = RouteOptions(40, per_token, True, exact=True)
    rows, router = made(how, tokens, 24, torch.float32)
    pairs, capacity = tokens * per_token, most_tiles(len(own), tokens * per_token, 16)
    order, tiles = Guarded((pairs,), torch.int32), Guarded((capacity, 3), torch.int32)
    into = PairOrder(order.inside, tiles.inside, torch.zeros(1, dtype=torch.int32, device=DEVICE), 16)
    _, chosen = routed(rows, router, how, tokens - 1, own=own, into=into)
    wanted, cut = sorted_pairs(chosen, 16)
    assert into.order[: len(wanted)].tolist() == wanted
    assert [tuple(tile) for tile in into.tiles[: int(into.count)].tolist()] == cut
    assert order.margins_are_whole()
    assert tiles.margins_are_whole()


def test_experts_of_nan_rows_are_in_range():
    for how in CASES.values():
        rows, router = made(how, 3, 32, torch.float32)
        rows[1] = torch.nan
        _, chosen = routed(rows, router, how)
        assert bool(((chosen >= 0) & (chosen < how.experts)).all())


def test_misuse_is_refused():
    how = CASES["softmax"]
    rows, router = made(how, 3, 32, torch.float32)
    with pytest.raises(Internal, match="router"):
        routed(rows, router.half(), how)
    with pytest.raises(Internal, match="bias"):
        routed(rows, router, how, bias=torch.zeros(3, device=DEVICE))
    with pytest.raises(Internal, match="too few experts"):
        routed(rows, router, replace(how, per_token=8))
    small, out = ExpertRouter(how.columns, 32, 16, DEVICE), torch.zeros(40, 3, device=DEVICE)
    with pytest.raises(Internal, match="workspace"):
        small(rows.repeat(14, 1)[:40], router, how, torch.zeros(1, dtype=torch.int32, device=DEVICE), out, out.int())
