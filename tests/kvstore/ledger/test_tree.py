"""A tree of blocks: what a chain has of a prompt, which block is on which chain, and the pages of a state after one."""

from __future__ import annotations

from random import Random

from hypothesis import given

from pillion.kvstore.hashing import SEGMENT_BLOCKS, state_page
from pillion.kvstore.ledger.eviction import LruEviction
from pillion.kvstore.ledger.pin_table import PrefixPinTable
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import BlockTree, Match
from tests.support.scenes import random_scenes

PAGES = 2


def grown(rng: Random) -> tuple[BlockTree, dict[bytes, list[Block]]]:
    """A tree of random chains, some with a state after a block, and the chain of each of its blocks by its hash."""
    tree = BlockTree(LruEviction())
    chains: dict[bytes, list[Block]] = {}
    for slot in range(rng.randint(1, 12)):
        before = rng.choice([[], *chains.values()])
        if before:
            tree.pin(before[-1])
        block = tree.add(slot, bytes([slot]) * 32, before[-1] if before else None)
        chains[block.hash] = [*before, block]
    for chain in list(chains.values()):
        last = chain[-1]
        tree.pin(last)
        # Of some states not all pages have come.
        for page in range(rng.choice([0, 0, 1, PAGES])):
            last = tree.add(100 + len(tree), state_page(chain[-1].hash, page), last, page=True)
        # A pin goes on to the block that is added, so each chain ends with its own two.
        for _ in range(rng.randint(0, 2)):
            tree.unpin(last)
    return tree, chains


def pages_after(tree: BlockTree, block: Block) -> list[Block]:
    pages = (tree.by_hash.get(state_page(block.hash, page)) for page in range(PAGES))
    return [page for page in pages if page is not None]


@given(random_scenes())
def test_chains_and_states_are_found(scenes: list[Random]) -> None:
    for rng in scenes:
        tree, chains = grown(rng)
        whole = rng.choice(list(chains.values()))
        # A prompt goes on otherwise than the pool's chain, or repeats a block of another one.
        hashes = [block.hash for block in whole[: rng.randint(0, len(whole))]]
        known = len(hashes)
        hashes += [rng.choice([b"?" * 32, *chains])] * rng.randint(0, 1)
        while known < len(hashes) and chains.get(hashes[known], [])[:-1] == whole[:known] and hashes[known] in chains:
            whole = chains[hashes[known]]
            known += 1
        chain = whole[:known]
        last = chain[-1] if chain else None
        assert tree.longest_prefix(hashes) == Match(last, known, sum(not block.ref_count for block in chain))
        expected = Match(None, 0, 0, known=known)
        for block in chain:
            pages = pages_after(tree, block)
            if len(pages) == PAGES:
                newly = sum(not one.ref_count for one in [*chains[block.hash], *pages])
                expected = Match(block, block.depth + 1, newly, pages[-1], known)
        assert tree.longest_with_state(hashes, PAGES) == expected
        for block_hash, own in chains.items():
            block = own[-1]
            pages = pages_after(tree, block)
            assert tree.chain(block) == own
            assert tree.state_end(block) is (pages[-1] if pages else block)
            assert tree.on_chain(block, last) is (block_hash in [one.hash for one in chain])
            if len(pages) == PAGES:
                assert tree.state_after(block, pages[-1], PAGES) == pages
                assert tree.state_after(block.parent, pages[-1], PAGES) == []


def test_a_policy_replaces_the_default_with_and_without_pins() -> None:
    bare, pinned = BlockTree(LruEviction()), BlockTree(LruEviction())
    PrefixPinTable(pinned, 50, 25)
    around, other = pinned.policy, LruEviction()
    for tree in (bare, pinned):
        tree.order_by(other)
        assert tree.plain is other
    assert bare.policy is other
    assert pinned.policy is around


def test_an_empty_chain_has_no_blocks() -> None:
    tree = BlockTree(LruEviction())
    block = tree.add(0, b"a" * 32, None)
    assert not tree.on_chain(block, None)
    assert tree.chain(None) == []
    assert tree.state_after(None, None, PAGES) == []


def test_a_segment_is_named_after_its_first_block() -> None:
    tree = BlockTree(LruEviction())
    block: Block | None = None
    hashes = [bytes([number]) * 32 for number in range(2 * SEGMENT_BLOCKS + 1)]
    for slot, block_hash in enumerate(hashes):
        block = tree.add(slot, block_hash, block)
    segments = [one.segment for one in tree.chain(block)]
    first, second, third = hashes[::SEGMENT_BLOCKS]
    assert segments == [first] * SEGMENT_BLOCKS + [second] * SEGMENT_BLOCKS + [third]


def test_only_pages_of_a_state_are_added_as_pages() -> None:
    tree = BlockTree(LruEviction())
    block = tree.add(0, b"a" * 32, None)
    page = tree.add(1, state_page(block.hash, 0), block, page=True)
    assert (block.page, page.page) == (False, True)
