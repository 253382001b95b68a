"""Prefix pins against a plain model of their rules, in random lives of a small pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given

from pillion.errors import InvalidRequest, Overloaded
from pillion.kvstore.hashing import state_page
from pillion.kvstore.ledger import pin_table
from pillion.kvstore.ledger.eviction import LruEviction
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import PoolShares
from pillion.kvstore.ledger.pin_table import MAX_PREFIX_PIN_S, PrefixPinRequest, PrefixPinTable
from pillion.kvstore.ledger.tree import BlockTree
from tests.support.scenes import random_scenes
from tests.support.serving_pool import TEXTS, ServingPool, prompt

SLOTS = 12
# Of 12 blocks: all owners have at most 9, one has at most 6.
PERCENTS = 75, 50
ALL_BLOCKS, OWNER_BLOCKS = 9, 6
MAX_PINS, MAX_OWNER_PINS = 4, 3
Key = tuple[str, str]


@dataclass
class PinModel:
    """A pin and what became of it."""

    pins: dict[Key, PrefixPinRequest] = field(default_factory=dict)
    chains: dict[Key, list[bytes]] = field(default_factory=dict)
    hits: dict[Key, int] = field(default_factory=dict)
    refused: int = 0
    lapsed: int = 0
    hits_ever: int = 0

    def covered(self, wish: PrefixPinRequest, chain: list[bytes]) -> list[Key]:
        """Return the pins that a new one replaces: its namesake, and an owner's ephemeral ones within an ephemeral
        one."""
        key = wish.owner, wish.name
        found = [key] if key in self.pins else []
        for other, pinned in self.pins.items():
            within = wish.ephemeral and pinned.ephemeral and self.chains[other] == chain[: pinned.blocks]
            if within and other[0] == wish.owner and other != key and pinned.until_s <= wish.until_s:
                found.append(other)
        return found

    def is_beyond_a_quota(self, wish: PrefixPinRequest, chain: list[bytes], most_blocks: int) -> bool:
        replaced = self.covered(wish, chain)
        left = {key: one for key, one in self.pins.items() if key not in replaced}
        owned = [one.blocks for (owner, _), one in left.items() if owner == wish.owner]
        own_limit = min(OWNER_BLOCKS, most_blocks) if most_blocks else OWNER_BLOCKS
        if sum(owned) + wish.blocks > own_limit or sum(one.blocks for one in left.values()) + wish.blocks > ALL_BLOCKS:
            return True
        return not replaced and (len(owned) >= MAX_OWNER_PINS or len(left) >= MAX_PINS)

    def pin(self, wish: PrefixPinRequest, chain: list[bytes]) -> None:
        key = wish.owner, wish.name
        hits = self.hits.get(key, 0)
        for other in self.covered(wish, chain):
            self.end(other)
        self.pins[key], self.chains[key], self.hits[key] = wish, chain, hits

    def end(self, key: Key) -> None:
        del self.pins[key], self.chains[key], self.hits[key]


class PinLife:
    """Prompts of few texts come and go in a pool, and two owners pin some of their prefixes."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now, self.model = rng, 0.0, PinModel()
        self.pool = ServingPool(SLOTS, PoolShares(*PERCENTS))
        self.table = self.pool.ledger.prefix_pins
        self.tickets: list[int] = []

    def chain(self) -> list[bytes]:
        return prompt(*self.rng.choice(TEXTS)[: self.rng.randint(1, 7)])

    def present(self, chain: list[bytes]) -> int:
        return self.pool.ledger.tree.longest_prefix(chain).blocks

    def step(self) -> None:
        getattr(self, self.rng.choice(["come", "come", "go", "pin", "pin", "pin", "drop", "wait", "evict"]))()
        self.check()

    def come(self) -> None:
        chain = self.chain()
        before = self.present(chain)
        ticket_id = self.pool.open(chain)
        if ticket_id is None:
            return
        self.tickets.append(ticket_id)
        for key, pinned in self.model.chains.items():
            if pinned == chain[: len(pinned)] and len(pinned) <= before:
                self.model.hits[key] += 1
                self.model.hits_ever += 1

    def go(self) -> None:
        if self.tickets:
            self.pool.close(self.tickets.pop(self.rng.randrange(len(self.tickets))))

    def evict(self) -> None:
        leaf = next((block for block in self.pool.ledger.tree.policy if not block.children), None)
        if leaf is not None:
            self.pool.ledger.evict_block(leaf)

    def drop(self) -> None:
        key = self.rng.choice("ab"), self.rng.choice("wxyz")
        assert self.table.drop(*key) is (key in self.model.pins)
        if key in self.model.pins:
            self.model.end(key)

    def wait(self) -> None:
        self.now += self.rng.randint(1, 3)
        over = [key for key, wish in self.model.pins.items() if wish.until_s <= self.now]
        assert self.table.expire(self.now) == len(over)
        self.model.lapsed += len(over)
        for key in over:
            self.model.end(key)

    def pin(self) -> None:
        rng, model, chain = self.rng, self.model, self.chain()
        until_s, ephemeral = self.now + rng.randint(1, 6), rng.random() < 0.5
        name = rng.choice("wxyz")
        wish = PrefixPinRequest(rng.choice("ab"), name, chain[-1], len(chain), until_s, ephemeral=ephemeral)
        most = rng.choice([0, 0, 3, 8])
        if model.is_beyond_a_quota(wish, chain, most):
            model.refused += 1
            with pytest.raises(Overloaded):
                self.table.pin_prefix(wish, self.now, chain, most)
            return
        model.pin(wish, chain)
        pin = self.table.pin_prefix(wish, self.now, chain, most)
        assert pin.blocks == self.present(chain), "what is here is pinned at once"

    def check(self) -> None:
        model, table = self.model, self.table
        check_integrity(self.pool.ledger)
        assert {key: pin.request for key, pin in table.all.items()} == model.pins
        assert {key: pin.hits for key, pin in table.all.items()} == model.hits
        assert all(pin.blocks <= self.present(model.chains[key]) for key, pin in table.all.items())
        for owner in "ab":
            assert [pin.request for pin in table.of(owner)] == [w for (one, _), w in model.pins.items() if one == owner]
        for chain in model.chains.values():
            found = table.ending_with(chain[-1])
            assert {pin.request.name for pin in found} == {n for (_, n), c in model.chains.items() if c == chain}
        assert table.blocks == sum(wish.blocks for wish in model.pins.values())
        assert (table.refused_ever, table.lapsed_ever, table.hits_ever) == (
            model.refused,
            model.lapsed,
            model.hits_ever,
        )
        policy = list(self.pool.ledger.tree.policy)
        pinned = [bool(block.prefix_pins) for block in policy]
        assert pinned == sorted(pinned), "a pinned block leaves before one that is not"
        assert self.pool.ledger.available == SLOTS - self.pool.ledger.tree.protected


@given(random_scenes(8))
def test_pins_match_a_model(scenes: list[Random]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pin_table, "MAX_PREFIX_PINS", MAX_PINS)
        patch.setattr(pin_table, "MAX_OWNER_PREFIX_PINS", MAX_OWNER_PINS)
        for rng in scenes:
            life = PinLife(rng)
            for _ in range(rng.randint(10, 40)):
                life.step()
            for ticket_id in life.tickets:
                life.pool.close(ticket_id)
            for owner, name in list(life.model.pins):
                assert life.table.drop(owner, name)
            assert not list(life.table.ending_with(life.chain()[-1]))
            assert all(not block.prefix_pins for block in life.pool.ledger.tree.by_hash.values())


@pytest.mark.parametrize(
    ("blocks", "until_s", "valid"),
    [(1, MAX_PREFIX_PIN_S, True), (1, MAX_PREFIX_PIN_S + 1, False), (1, 0.0, False), (0, 9.0, False), (1, 9.0, True)],
)
def test_a_pin_request_needs_a_length_and_an_expiry(blocks: int, until_s: float, valid: bool) -> None:
    table = ServingPool(SLOTS, PoolShares(*PERCENTS)).ledger.prefix_pins
    wish = PrefixPinRequest("a", "x", prompt(1)[-1], blocks, until_s)
    if valid:
        assert table.pin_prefix(wish, 0.0).blocks == 0
    else:
        with pytest.raises(InvalidRequest):
            table.pin_prefix(wish, 0.0)


def test_a_chain_ends_with_the_block_that_names_it() -> None:
    table = ServingPool(SLOTS, PoolShares(*PERCENTS)).ledger.prefix_pins
    a, b = prompt(1, 2)
    with pytest.raises(InvalidRequest):
        table.pin_prefix(PrefixPinRequest("a", "x", a, 2, 9.0), 0.0, [a, b])


def test_a_pin_covers_only_the_state_after_its_whole_chain() -> None:
    tree = BlockTree(LruEviction())
    table = PrefixPinTable(tree, 100, 100)
    table.shape(SLOTS)
    hashes = prompt(1, 2)
    first = tree.add(0, hashes[0], None)
    pin = table.pin_prefix(PrefixPinRequest("a", "x", hashes[1], 2, 9.0), 0.0, hashes)
    early = tree.add(1, state_page(hashes[0], 0), first, page=True)
    table.on_commit(early)
    assert pin.end is first
    tree.pin(first)
    second = tree.add(2, hashes[1], first)
    table.on_commit(second)
    state = tree.add(3, state_page(hashes[1], 0), second, page=True)
    table.on_commit(state)
    assert (pin.end, pin.blocks) == (state, 2)
    assert (early.prefix_pins, state.prefix_pins) == (0, 1)
