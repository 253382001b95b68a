"""PrefixPinTable: random lives of a ledger with prefix pins, what they protect, and their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pillion.errors import InvalidRequest, Overloaded
from pillion.kvstore.ledger.integrity import IntegrityError, check_integrity
from pillion.kvstore.ledger.ledger import PoolShares
from pillion.kvstore.ledger.pin_table import (
    MAX_OWNER_PREFIX_PINS,
    MAX_PREFIX_PIN_S,
    PrefixPin,
    PrefixPinRequest,
)
from tests.support.examples import examples
from tests.support.serving_pool import NUM_SLOTS, TOKENS, ServingPool, prompt

# Shares of the pool that all owners, and one, may have prefix-pinned: 9 and 6 blocks.
PERCENTS = 75, 50
OWNERS = ("a", "b")


class PinnedPool(ServingPool):
    """A pool with prefix pins, which checks at each eviction whether a block without a pin could be evicted."""

    def __init__(self, num_slots: int = NUM_SLOTS, percents: tuple[int, int] = PERCENTS) -> None:
        super().__init__(num_slots, PoolShares(*percents))
        evict = self.ledger.tree.evict

        def watched_evict() -> object:
            plain = [block for block in self.ledger.tree.policy if not block.prefix_pins]
            block = evict()
            assert not block.prefix_pins or not plain, "a prefix-pinned block left before one that is not"
            return block

        self.ledger.tree.evict = watched_evict  # type: ignore[method-assign, assignment]

    def pin_prefix(self, owner: str, name: str, *tokens: int, ttl_s: float = 100.0, **fields: bool) -> PrefixPin:
        hashes = prompt(*tokens)
        wish = PrefixPinRequest(owner, name, hashes[-1], len(hashes), ttl_s, **fields)
        return self.ledger.prefix_pins.pin_prefix(wish, 0.0, hashes)


class PinTableLife(RuleBasedStateMachine):
    """Few texts and slots, two owners and three names, so that chains are shared, replaced, evicted and recomputed all
    the time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PinnedPool()
        self.ledger, self.prefix_pins = self.pool.ledger, self.pool.ledger.prefix_pins
        self.tickets: list[int] = []
        self.now = 0.0
        # What was prefix-pinned, by owner and name: the chain, when it ends, and whether it gives way to longer ones.
        self.wished: dict[tuple[str, str], tuple[list[bytes], float, bool]] = {}

    @rule(tokens=TOKENS)
    def come(self, tokens: list[int]) -> None:
        ticket_id = self.pool.open(prompt(*tokens))
        if ticket_id is not None:
            self.tickets.append(ticket_id)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket_id)
        self.ledger.release(self.pool.epoch, [ticket_id])

    @rule(
        owner=st.sampled_from(OWNERS),
        name=st.sampled_from("xyz"),
        tokens=TOKENS,
        ttl_s=st.integers(1, 5),
        ephemeral=st.booleans(),
    )
    def pin_prefix(self, owner: str, name: str, tokens: list[int], ttl_s: int, ephemeral: bool) -> None:
        hashes, until_s = prompt(*tokens), self.now + ttl_s
        given_way = {(owner, name)} & self.wished.keys()
        if ephemeral:
            given_way |= {
                key
                for key, (chain, end_s, gives_way) in self.wished.items()
                if key[0] == owner and gives_way and end_s <= until_s and chain == hashes[: len(chain)]
            }
        left = {key: wish for key, wish in self.wished.items() if key not in given_way}
        owned = sum(len(chain) for (whose, _), (chain, _, _) in left.items() if whose == owner) + len(hashes)
        total = sum(len(chain) for chain, _, _ in left.values()) + len(hashes)
        wish = PrefixPinRequest(owner, name, hashes[-1], len(hashes), until_s, ephemeral=ephemeral)
        if owned > NUM_SLOTS * PERCENTS[1] // 100 or total > NUM_SLOTS * PERCENTS[0] // 100:
            with pytest.raises(Overloaded):
                self.prefix_pins.pin_prefix(wish, self.now, hashes)
            return
        self.prefix_pins.pin_prefix(wish, self.now, hashes)
        self.wished = {**left, (owner, name): (hashes, until_s, ephemeral)}

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from("xyz"))
    def drop(self, owner: str, name: str) -> None:
        assert self.prefix_pins.drop(owner, name) is (self.wished.pop((owner, name), None) is not None)

    @rule(passed_s=st.integers(1, 3))
    def time_passes(self, passed_s: int) -> None:
        self.now += passed_s
        before = len(self.wished)
        self.wished = {key: wish for key, wish in self.wished.items() if wish[1] > self.now}
        assert self.prefix_pins.expire(self.now) == before - len(self.wished)

    @rule()
    def evict_ahead(self) -> None:
        """Evict the next leaf before its slot is needed, like a spiller."""
        leaf = next((block for block in self.ledger.tree.policy if not block.children), None)
        if leaf is not None:
            self.ledger.evict_block(leaf)

    @invariant()
    def adds_up(self) -> None:
        check_integrity(self.ledger)
        assert self.prefix_pins.all.keys() == self.wished.keys()
        for key, (hashes, _, _) in self.wished.items():
            assert self.prefix_pins.all[key].blocks <= self.ledger.tree.longest_prefix(hashes).blocks

    @invariant()
    def nobody_waits_for_a_prefix_pin(self) -> None:
        """All slots except those of tickets are available, whatever is prefix-pinned."""
        assert self.ledger.available == NUM_SLOTS - self.ledger.tree.protected

    def teardown(self) -> None:
        for ticket_id in self.tickets:
            self.ledger.release(self.pool.epoch, [ticket_id])
        # The largest prompt gets in at once, though everything may be prefix-pinned.
        self.pool.serve(*[3] * NUM_SLOTS)
        check_integrity(self.ledger)
        assert all(pin.end is None for pin in self.prefix_pins.all.values())


TestPinTableLife = PinTableLife.TestCase
TestPinTableLife.settings = settings(max_examples=examples(25), stateful_step_count=30)


@settings(max_examples=examples(30))
@given(served=st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=6), max_size=30))
def test_a_prefix_pin_survives_other_prompts(served: list[list[int]]) -> None:
    pool = PinnedPool()
    pool.serve(*[1] * 6)
    pin = pool.pin_prefix("a", "x", *[1] * 6)
    for tokens in served:
        pool.serve(*tokens)
    assert pin.blocks == pool.blocks(*[1] * 6) == 6


def test_the_same_prompts_evict_an_unpinned_prefix() -> None:
    pool = PinnedPool()
    pool.serve(*[1] * 6)
    for first in (2, 3):
        pool.serve(*[first] * 6)
    assert pool.blocks(*[1] * 6) == 0


def test_a_dropped_pins_blocks_are_evictable() -> None:
    pool = PinnedPool()
    pool.serve(*[1] * 6)
    pool.pin_prefix("a", "x", *[1] * 6)
    assert pool.ledger.prefix_pins.drop("a", "x")
    for first in (2, 3):
        pool.serve(*[first] * 6)
    assert pool.blocks(*[1] * 6) == 0


def test_a_pin_evicted_by_a_large_request_is_restored_with_its_blocks() -> None:
    pool = PinnedPool()
    pool.serve(*[1] * 6)
    pin = pool.pin_prefix("a", "x", *[1] * 6)
    pool.serve(*[2] * 10)
    # The last block leaves before the head, and the head is prefix-pinned still.
    assert pin.blocks == pool.blocks(*[1] * 6) == 2
    pool.serve(*[1] * 6)
    assert pin.blocks == 6
    check_integrity(pool.ledger)
    pool.serve(*[3] * 6)
    pool.serve(*[4] * 6)
    assert pool.blocks(*[1] * 6) == 6


def test_pins_of_an_evicted_block_shrink_to_its_parent() -> None:
    pool = PinnedPool()
    pool.serve(1, 2, 3)
    both = [pool.pin_prefix(owner, "x", 1, 2, 3) for owner in OWNERS]
    pool.ledger.evict_block(pool.ledger.tree.by_hash[prompt(1, 2, 3)[-1]])
    assert [pin.blocks for pin in both] == [2, 2]
    check_integrity(pool.ledger)


def test_a_pin_hit_is_a_prompt_with_the_whole_prefix() -> None:
    pool = PinnedPool()
    pool.serve(1, 2, 3)
    pin = pool.pin_prefix("a", "x", 1, 2, 3)
    pool.serve(1, 2)
    assert pin.hits == 0
    pool.serve(1, 2, 3, 4)
    pool.serve(1, 2, 3)
    assert pin.hits == 2 == pool.ledger.status().prefix_pin_hits
    assert pool.pin_prefix("a", "x", 1, 2, 3).hits == 2, "a renewal goes on counting"


def test_a_longer_ephemeral_pin_replaces_shorter_ones() -> None:
    pool = PinnedPool()
    pool.serve(1, 2, 3, 4)
    for length in range(1, 5):
        pool.pin_prefix("a", f"turn {length}", *[1, 2, 3, 4][:length], ephemeral=True)
    assert [one.request.name for one in pool.ledger.prefix_pins.of("a")] == ["turn 4"]
    assert pool.ledger.prefix_pins.blocks == 4
    # That of another owner, and one that a user has named, stay.
    pool.pin_prefix("b", "mine", 1, ephemeral=True)
    pool.pin_prefix("a", "named", 1)
    pool.pin_prefix("a", "turn 4", 1, 2, 3, 4, ephemeral=True)
    assert len(pool.ledger.prefix_pins.all) == 3


def test_limits() -> None:
    pool = PinnedPool(num_slots=1000, percents=(90, 60))
    hashes = prompt(1, 2, 3)
    wish = PrefixPinRequest("a", "x", hashes[-1], 3, 10.0)
    with pytest.raises(Overloaded, match="at most 2"):
        pool.ledger.prefix_pins.pin_prefix(wish, 0.0, hashes, max_blocks=2)
    for bad, now in ((wish, 10.0), (PrefixPinRequest("a", "x", hashes[-1], 3, MAX_PREFIX_PIN_S + 1), 0.0)):
        with pytest.raises(InvalidRequest):
            pool.ledger.prefix_pins.pin_prefix(bad, now)
    for number in range(MAX_OWNER_PREFIX_PINS):
        pool.pin_prefix("a", str(number), number)
    with pytest.raises(Overloaded, match="pins"):
        pool.pin_prefix("a", "one more", 1)
    pool.pin_prefix("a", "7", 2)
    assert pool.ledger.status().prefix_pins == MAX_OWNER_PREFIX_PINS
    check_integrity(pool.ledger)


@pytest.mark.parametrize("ephemeral", [False, True])
def test_the_length_of_a_pin_is_checked(ephemeral: bool) -> None:
    pool = PinnedPool()
    prefix_pins, (a, b, c) = pool.ledger.prefix_pins, prompt(1, 2, 3)
    pool.serve(1, 2)
    before = pool.pin_prefix("a", "before", 1, 2, ephemeral=ephemeral)
    for hashes, blocks in (([b], 1), ([a, b], 1), ([a, b, b], 3), ([b, b], 2), ([a, a, b], 2), ([], 1), ([a, b], 3)):
        with pytest.raises(InvalidRequest):
            prefix_pins.pin_prefix(PrefixPinRequest("a", "x", b, blocks, 200.0, ephemeral=ephemeral), 0.0, hashes)
    assert list(prefix_pins.all.values()) == [before]
    assert before.blocks == prefix_pins.blocks == 2
    # A record may be wrong as well; its chain is not here yet.
    prefix_pins.pin_prefix(PrefixPinRequest("a", "short", c, 1, 200.0), 0.0)
    prefix_pins.pin_prefix(PrefixPinRequest("a", "right", c, 3, 200.0), 0.0)
    check_integrity(pool.ledger)
    pool.serve(1, 2, 3)
    assert {one.request.name for one in prefix_pins.of("a")} == {"before", "right"}
    assert prefix_pins.all["a", "right"].blocks == 3
    assert prefix_pins.refused_ever == 1
    check_integrity(pool.ledger)


@pytest.mark.parametrize(
    "damage",
    [
        "pin.request = replace(pin.request, blocks=1); prefix_pins.blocks -= 1",
        "block.prefix_pins += 1",
        "pin.end = None",
        "prefix_pins.blocks += 1",
        "prefix_pins._by_last_hash.clear()",
    ],
)
def test_the_integrity_check_finds_damage(damage: str) -> None:
    pool = PinnedPool()
    pool.serve(1, 2)
    pin = pool.pin_prefix("a", "x", 1, 2)
    check_integrity(pool.ledger)
    names = {"replace": replace, "prefix_pins": pool.ledger.prefix_pins, "pin": pin, "block": pin.end}
    exec(damage, names)
    with pytest.raises(IntegrityError):
        check_integrity(pool.ledger)
