"""Objects: which blocks form one, what their names contain, and that all damage is detected."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.kvstore.hashing import HASH_BYTES, SEGMENT_BLOCKS
from pillion.kvstore.memory.memory import block_checksum
from pillion.kvstore.tiers.object_tier.object_runs import (
    HEADER_BYTES,
    MAX_RUN_BYTES,
    RunLayout,
    RunName,
    locate,
    split_runs,
)
from pillion.kvstore.tiers.tiers import CorruptBlock
from tests.support.disk import BLOCK_BYTES, NAMESPACE, OTHER, Stored
from tests.support.object_blocks import branched

LAYOUT = RunLayout(NAMESPACE, BLOCK_BYTES)


@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4))
def test_runs_are_chains_of_one_segment_and_their_names_find_every_block(seed: int, lengths: list[int]) -> None:
    chains, rng = branched(lengths), random.Random(seed)
    blocks = list({name.hash: (name, data) for chain in chains for name, data in chain}.values())
    chosen = rng.sample(blocks, rng.randint(0, len(blocks)))
    runs = split_runs(chosen, BLOCK_BYTES)
    assert sorted(name.hash for run in runs for name, _ in run) == sorted(name.hash for name, _ in chosen)
    for run in runs:
        assert len(run) <= SEGMENT_BLOCKS
        assert len({name.segment for name, _ in run}) == 1
        assert all(name.parent == before.hash for (before, _), (name, _) in itertools.pairwise(run))
    names = [RunName.of([name for name, _ in run]) for run in runs]
    listed = {
        path: RunName.parse(name.segment, path.rpartition("/")[2]) for name in names for path in [LAYOUT.path(name)]
    }
    assert list(listed.values()) == names
    there = {name.hash for name, _ in chosen}
    for chain in chains:
        hashes = [name.hash for name, _ in chain]
        for begin in range(0, len(hashes), SEGMENT_BLOCKS):
            part = hashes[begin : begin + SEGMENT_BLOCKS]
            assert locate([name for name in names if name.segment == part[0]], part).keys() == there & set(part)


def test_an_object_round_trips() -> None:
    run = branched([7])[0][2:]
    data = LAYOUT.pack(run)
    assert len(data) == HEADER_BYTES + 5 * BLOCK_BYTES
    found = LAYOUT.unpack(memoryview(data), RunName.of([name for name, _ in run]))
    assert found == {name.hash: (name.checksum, payload) for name, payload in run}


def test_a_name_contains_the_objects_size_which_is_limited() -> None:
    """A name with more blocks than a run has was not written by this code, and would be read whole."""
    layout, first = RunLayout(bytes(32), MAX_RUN_BYTES // 4), bytes(32)
    assert layout.size_bytes(RunName(first, first, (b"ab",) * 3)) == HEADER_BYTES + MAX_RUN_BYTES
    with pytest.raises(CorruptBlock, match="its name has 5 blocks, and a run has at most 4"):
        layout.size_bytes(RunName(first, first, (b"ab",) * 4))


@given(st.data())
def test_damage_is_always_detected(data: st.DataObject) -> None:
    """A bit, a length or another run's object: it is CorruptBlock, or the damage is in a payload, whose checksum shows
    it."""
    run = branched([5])[0]
    name = RunName.of([one for one, _ in run])
    packed = LAYOUT.pack(run)
    match data.draw(st.sampled_from(["bit", "length", "other"])):
        case "bit":
            at = data.draw(st.integers(0, len(packed) - 1))
            packed[at] ^= 1 << data.draw(st.integers(0, 7))
        case "length":
            packed = packed[: data.draw(st.integers(0, len(packed) - 1))]
        case _:
            packed = LAYOUT.pack(branched([5, 5])[1])
    try:
        found = LAYOUT.unpack(memoryview(packed), name)
    except CorruptBlock:
        return
    assert any(block_checksum(payload) != checksum for checksum, payload in found.values())


def test_foreign_objects_are_rejected() -> None:
    run = branched([3])[0]
    name = RunName.of([one for one, _ in run])
    for layout in (RunLayout(OTHER, BLOCK_BYTES), RunLayout(NAMESPACE, BLOCK_BYTES - 64)):
        blocks: list[Stored] = [(one, payload[: layout.block_bytes]) for one, payload in run]
        with pytest.raises(CorruptBlock, match="another namespace or segment"):
            LAYOUT.unpack(memoryview(layout.pack(blocks)), name)
    for text in ("", "README", str(name)[:-1], str(name) + "zz", f"{name.first.hex()}-{'00' * 2 * SEGMENT_BLOCKS}"):
        assert RunName.parse(name.segment, text) is None
    assert len(name.first) == HASH_BYTES
