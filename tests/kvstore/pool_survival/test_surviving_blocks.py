"""A node killed between any two stores to its table, repeatedly: its next life recovers what was committed, under the
right hash, in slots that nobody writes to."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pillion.errors import ConfigError, Internal
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.pool_survival.slot_table import NO_PARENT, POOL_ID_BYTES, WORD_BYTES, SlotTable, table_bytes
from tests.support.examples import examples
from tests.support.surviving_node import (
    NUM_SLOTS,
    SHAPE,
    TOKENS,
    MortalLives,
    MortalWords,
    NodeKilledError,
    SurvivingNode,
    random_act,
)

POOL_ID = b"p" * POOL_ID_BYTES
KILLS = 1_000


class SurvivingLives(MortalLives):
    """Two tokens and ten slots, so that blocks are shared, evicted and recomputed all the time."""

    @initialize()
    def first_life(self) -> None:
        self.node = SurvivingNode()

    @rule(number=st.integers(0, 1), blocks=st.integers(1, 4))
    def lease(self, number: int, blocks: int) -> None:
        self.node.act(lambda: self.node.lease(number, blocks))

    @rule(number=st.integers(0, 1))
    def give_back(self, number: int) -> None:
        self.node.act(lambda: self.node.give_back(number))

    @rule(most=st.integers(1, 5))
    def seal(self, most: int) -> None:
        self.node.act(lambda: self.node.seal(most))

    @rule(most=st.integers(1, 5), tokens=TOKENS)
    def seal_meanwhile(self, most: int, tokens: list[int]) -> None:
        """Blocks are evicted while their checksums are computed, and their slots then hold others."""
        self.node.act(lambda: self.node.seal(most, lambda: self.node.serve(tokens, 0)))

    @rule(place=st.integers(0, 200), word=st.integers(0, 2**64 - 1))
    def a_word_is_damaged(self, place: int, word: int) -> None:
        """Corrupt the entries, not the header, between two lives."""
        words = self.node.words.words
        header = len(words) - NUM_SLOTS * (len(words) // (NUM_SLOTS + 1))
        words[header + place % (len(words) - header)] = word
        self.node.die()

    @invariant()
    def nothing_wrong_is_served(self) -> None:
        if hasattr(self, "node"):
            self.node.check()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.act(self.node.settle)
            self.node.act(self.node.settle)
            self.node.check()
            known = set(self.node.ledger.tree.by_hash)
            self.node.die()
            self.node.settle()
            assert set(self.node.ledger.tree.by_hash) == known, "what was sealed is there again"


SurvivingLives.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestKeptLives = SurvivingLives.TestCase


def test_a_thousand_kills_serve_no_wrong_block() -> None:
    """Each at a random store of a random life; half of all takeovers are interrupted as well."""
    node, taken = SurvivingNode(), 0
    for seed in range(KILLS):
        chance = Random(seed)
        deaths = node.deaths
        node.words.left = chance.randrange(60)
        while node.deaths == deaths:
            node.act(random_act(node, chance))
            node.check()
            if node.words.left is None and node.deaths == deaths:
                node.words.left = 0
        if chance.random() < 0.5:
            node.act(node.settle)
        node.check()
        taken += node.kept.recovered
    assert node.deaths >= KILLS
    assert taken > KILLS, "blocks are recovered, and not only dropped"


def test_a_kill_at_any_store_leaves_no_valid_torn_entry() -> None:
    """An incomplete entry does not count, and neither does what it overwrote."""
    old, new = split_hashes(chain_hashes(bytes(32), [1, 2], 1))
    for left in itertools.count():
        words = MortalWords(table_bytes(NUM_SLOTS) // WORD_BYTES)
        table = SlotTable.create(words, POOL_ID, SHAPE)
        table.write(3, old, NO_PARENT, 7)
        words.left = left
        try:
            table.write(3, new, old, 8)
        except NodeKilledError:
            assert SlotTable.open(words).read(3) is None or not left
            assert not left or not words[table_bytes(4) // WORD_BYTES - 1]
            continue
        entry = SlotTable.open(words).read(3)
        assert entry is not None
        assert (entry.hash, entry.parent, entry.checksum) == (new, old, 8)
        assert left > 10
        return


def test_entries_of_another_slot_or_pool_are_ignored() -> None:
    words = MortalWords(table_bytes(NUM_SLOTS) // WORD_BYTES)
    table = SlotTable.create(words, POOL_ID, SHAPE)
    (block_hash,) = split_hashes(chain_hashes(bytes(32), [1], 1))
    table.write(0, block_hash, NO_PARENT, 7)
    entry_words = (len(words) * WORD_BYTES - table_bytes(0)) // WORD_BYTES // NUM_SLOTS
    header = table_bytes(0) // WORD_BYTES
    words.words[header + entry_words : header + 2 * entry_words] = words.words[header : header + entry_words]
    assert [entry.slot for entry in SlotTable.open(words).blocks()] == [0]
    other = SlotTable(words, b"q" * POOL_ID_BYTES, SHAPE)
    assert other.blocks() == []


@pytest.mark.parametrize("place", range(table_bytes(0) // WORD_BYTES))
def test_a_damaged_header_discards_the_table(place: int) -> None:
    words = MortalWords(table_bytes(NUM_SLOTS) // WORD_BYTES)
    table = SlotTable.create(words, POOL_ID, SHAPE)
    assert SlotTable.open(words).shape == table.shape
    words[place] ^= 1 << 17
    with pytest.raises(ConfigError):
        SlotTable.open(words)


def test_an_abandoned_table_is_discarded() -> None:
    words = MortalWords(table_bytes(2) // WORD_BYTES)
    SlotTable.create(words, POOL_ID, PoolShape(2, 64, "cd" * 32)).forsake()
    with pytest.raises(ConfigError):
        SlotTable.open(words)


def test_a_chain_with_a_bad_block_ends_before_it() -> None:
    node = SurvivingNode()
    node.serve([1, 0, 1, 1, 0], 0)
    node.settle()
    third = node.kept._slots[split_hashes(chain_hashes(bytes(32), [1, 0, 1], 1))[2]]
    node.memory[third] = b"flipped"
    node.die()
    assert len(node.kept.pending) == 5
    node.settle()
    assert (node.kept.recovered, node.kept.dropped) == (2, 3)
    assert len(node.ledger.free) == NUM_SLOTS - 2
    node.check()


def test_a_block_that_is_computed_again_first_stays() -> None:
    node = SurvivingNode()
    node.serve([1, 0, 1], 0)
    node.settle()
    node.die()
    node.serve([1, 0], 0)
    node.check()
    node.settle()
    assert (node.kept.recovered, node.kept.dropped) == (1, 0)
    assert len(node.ledger.tree) == 3
    node.check()


def test_reassigned_slots_are_not_claimed() -> None:
    node = SurvivingNode()
    node.serve([1], 0)
    node.settle()
    words = node.words
    node.begin()
    table = SlotTable.open(words)
    with pytest.raises(Internal):
        node.ledger.claim([entry.slot for entry in table.blocks()])


def test_a_checksum_of_a_reassigned_slot_is_ignored() -> None:
    """During its computation the block was evicted, and recomputed elsewhere."""
    node = SurvivingNode()
    node.serve([1], 0)
    (first,) = node.kept.unsealed(1)

    def meanwhile() -> None:
        node.lease(0, NUM_SLOTS)
        worker = node.workers[0]
        worker.told.remove(first.slot)
        node.ledger.return_slots(worker.epoch, list(worker.told))
        worker.told = {first.slot}
        node.serve([1], 1)

    node.seal(1, meanwhile)
    node.check()
    node.die()
    assert not node.kept.pending
