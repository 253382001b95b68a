"""Moves of whole blocks against plain indexing."""

from __future__ import annotations

from tests.support.gpu import DEVICE  # isort: skip  (before the kernels)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.errors import Internal
from pillion.kernels.gpu.blocks import copy, gather, scatter
from tests.support.examples import examples
from tests.support.guarded import Guarded

SLOTS = 7
# Block sizes: for words of each size, less and more than a program's part, and a multiple of parts.
BLOCK_BYTES = (1, 2, 6, 16, 20, 48, 4112, 8192, 8200, 16384, 20002, 9001)


def made_pool(block_bytes: int, seed: int) -> Guarded:
    torch.manual_seed(seed)
    pool = Guarded((SLOTS, block_bytes), torch.uint8)
    pool.inside.copy_(torch.randint(0, 256, (SLOTS, block_bytes)))
    return pool


def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=9),
    block_bytes=st.sampled_from(BLOCK_BYTES),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40))
def test_blocks_are_gathered(slots, block_bytes, seed):
    pool = made_pool(block_bytes, seed)
    was = pool.whole.clone()
    out = Guarded((len(slots), block_bytes), torch.uint8)
    expected = out.inside.clone()
    for entry, slot in enumerate(slots):
        if slot >= 0:
            expected[entry] = pool.inside[slot]
    gather(pool.inside, int32(slots), out.inside)
    assert torch.equal(out.inside, expected)
    assert torch.equal(pool.whole, was)
    assert out.margins_are_whole()


@given(
    order=st.permutations(range(SLOTS)),
    holes=st.lists(st.booleans(), min_size=1, max_size=SLOTS),
    block_bytes=st.sampled_from(BLOCK_BYTES),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40))
def test_blocks_are_scattered(order, holes, block_bytes, seed):
    pool = made_pool(block_bytes, seed)
    slots = [-1 if hole else slot for slot, hole in zip(order, holes, strict=False)]
    buffer = torch.randint(0, 256, (len(slots), block_bytes)).to(torch.uint8).to(DEVICE)
    expected = pool.inside.clone()
    for entry, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = buffer[entry]
    scatter(buffer, int32(slots), pool.inside)
    assert torch.equal(pool.inside, expected)
    assert pool.margins_are_whole()


@given(
    order=st.permutations(range(SLOTS)),
    kinds=st.lists(st.sampled_from(["whole", "no origin", "no goal"]), min_size=1, max_size=3),
    block_bytes=st.sampled_from(BLOCK_BYTES),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40))
def test_blocks_are_copied(order, kinds, block_bytes, seed):
    pool = made_pool(block_bytes, seed)
    expected = pool.inside.clone()
    pairs = []
    for kind, origin, goal in zip(kinds, order[:3], order[3:], strict=False):
        pairs.append([-1 if kind == "no origin" else origin, -1 if kind == "no goal" else goal])
        if kind == "whole":
            expected[goal] = expected[origin]
    copy(pool.inside, int32(pairs))
    assert torch.equal(pool.inside, expected)
    assert pool.margins_are_whole()


def test_a_pool_may_have_any_type_and_shape_and_begin_between_words():
    torch.manual_seed(1)
    whole = torch.randn(1 + SLOTS * 2 * 3 * 40).to(torch.bfloat16).to(DEVICE)
    pool = whole[1:].view(SLOTS, 2, 3, 40)
    expected = pool.clone()
    expected[5], expected[0] = pool[2], pool[6]
    copy(pool, int32([[2, 5], [6, 0]]))
    assert torch.equal(pool, expected)
    out = torch.empty(2, 480, dtype=torch.uint8, device=DEVICE)
    gather(pool, int32([3, 0]), out)
    assert torch.equal(out.view(torch.bfloat16), expected[[3, 0]].flatten(1))


def test_pools_of_more_than_two_billion_words():
    """The pool takes no memory unless it is touched."""
    pool = torch.empty((2**31 // 129 + 3, 129), dtype=torch.uint8, device=DEVICE)
    last = len(pool) - 1
    assert (last - 1) * 129 > 2**31
    pool[last], pool[1] = 5, 6
    copy(pool, int32([[last, 0], [1, last - 1]]))
    assert bool((pool[0] == 5).all())
    assert bool((pool[last - 1] == 6).all())


def test_misshapen_tensors_are_refused():
    pool = torch.zeros(SLOTS, 4, 4, device=DEVICE)
    out = torch.zeros(2, 64, dtype=torch.uint8, device=DEVICE)
    slots = int32([1, 2])
    for move in (lambda p, s, b: gather(p, s, b), lambda p, s, b: scatter(b, s, p)):
        move(pool, slots, out)
        for bad in (
            (pool[:, :2], slots, out),
            (pool, slots.long(), out),
            (pool, slots, out[:1]),
            (pool, slots, out.int()),
        ):
            with pytest.raises(Internal):
                move(*bad)
    for bad_pairs in (slots, int32([[1, 2, 3]]), int32([[1, 2]]).long()):
        with pytest.raises(Internal):
            copy(pool, bad_pairs)
    with pytest.raises(Internal):
        copy(pool[:, :2], int32([[1, 2]]))
