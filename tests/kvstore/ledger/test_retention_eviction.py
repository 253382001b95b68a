"""RetentionEviction: random lives of a ledger with it, the order in which blocks leave, and its bounds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pillion.kvstore.ledger.eviction import LruEviction
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import PoolShares
from pillion.kvstore.ledger.pin_table import PrefixPinWish
from pillion.kvstore.ledger.retention_eviction import RetentionEviction
from tests.support.examples import examples
from tests.support.serving_pool import NUM_SLOTS, TOKENS, ServingPool, prompt

# Shares of the pool that all owners, and one, may retain: 9 and 6 blocks.
PERCENTS = 75, 50
OWNERS = ("a", "b", "c")


class RetainingPool(ServingPool):
    """A pool with retentions, at a time that tests set."""

    def __init__(
        self,
        num_slots: int = NUM_SLOTS,
        percents: tuple[int, int] = PERCENTS,
        shares: PoolShares = PoolShares(),  # noqa: B008
    ) -> None:
        self.now = 0.0
        self.policy = RetentionEviction(LruEviction(), *percents, lambda: self.now)
        super().__init__(self.policy, num_slots, shares)
        self.policy.bind(self.ledger.tree, num_slots)

    def retain(self, owner: str, due_s: float, *tokens: int) -> bool:
        """Retains a chain for twice as long as until it is due; from then on it is worth half."""
        steps = [(self.now, 1 / due_s), (self.now + due_s, 0.5 / due_s)]
        return self.policy.retain(owner, prompt(*tokens), steps, self.now + 2 * due_s)

    def check(self) -> None:
        check_integrity(self.ledger)
        assert not list(self.policy.check())


class RetainedLives(RuleBasedStateMachine):
    """A pool with retentions and one without serve the same prompts: both have the same room for each."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = ServingPool(LruEviction())
        self.tickets: list[tuple[int, int]] = []
        self.pool = self.make()

    def make(self) -> RetainingPool:
        return RetainingPool()

    @rule(tokens=TOKENS)
    def open(self, tokens: list[int]) -> None:
        opened = self.pool.open(prompt(*tokens)), self.plain.open(prompt(*tokens))
        assert (opened[0] is None) == (opened[1] is None), "retentions change for whom there is room"
        if opened[0] is not None and opened[1] is not None:
            self.tickets.append((opened[0], opened[1]))

    @rule(tokens=TOKENS)
    def serve(self, tokens: list[int]) -> None:
        before = len(self.tickets)
        self.open(tokens)
        if len(self.tickets) > before:
            self.close(len(self.tickets) - 1)

    @precondition(lambda self: self.tickets)
    @rule(number=st.integers(0, 3))
    def close(self, number: int) -> None:
        ours, plain = self.tickets.pop(number % len(self.tickets))
        self.pool.close(ours)
        self.plain.close(plain)

    @rule(owner=st.sampled_from(OWNERS), tokens=TOKENS, due_s=st.integers(1, 20))
    def retain(self, owner: str, tokens: list[int], due_s: int) -> None:
        self.pool.retain(owner, due_s, *tokens)

    @rule(owner=st.sampled_from(OWNERS), tokens=TOKENS, shared=st.integers(0, 3))
    def let_go(self, owner: str, tokens: list[int], shared: int) -> None:
        self.pool.policy.let_go(owner, prompt(*tokens), shared)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.pool.now += seconds

    @precondition(lambda self: any(not block.children for block in self.pool.ledger.tree.policy))
    @rule(number=st.integers(0, 11))
    def spill(self, number: int) -> None:
        ends = [block for block in self.pool.ledger.tree.policy if not block.children]
        self.pool.ledger.evict_block(ends[number % len(ends)])

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.ledger.available == self.plain.ledger.available


class LivesWithPins(RetainedLives):
    """A pool with retentions in which users pin prefixes, too, beside one without."""

    def make(self) -> RetainingPool:
        return RetainingPool(shares=PoolShares(75, 50))

    @rule(tokens=TOKENS, name=st.sampled_from("xy"))
    def pin(self, tokens: list[int], name: str) -> None:
        hashes = prompt(*tokens)
        wish = PrefixPinWish("a", name, hashes[-1], len(hashes), self.pool.now + 5)
        if len(hashes) <= 3:
            self.pool.ledger.prefix_pins.pin_prefix(wish, self.pool.now, hashes)

    @rule(name=st.sampled_from("xy"))
    def unpin(self, name: str) -> None:
        self.pool.ledger.prefix_pins.drop("a", name)


for lives in (RetainedLives, LivesWithPins):
    lives.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestRetainedLives = RetainedLives.TestCase
TestLivesWithPins = LivesWithPins.TestCase


class OrderedPool(RetainingPool):
    """A pool of eight slots, whose owners may have all of it."""

    def __init__(self) -> None:
        super().__init__(num_slots=8, percents=(100, 100))

    def keep(self, steps: list[tuple[float, float]], *tokens: int) -> None:
        self.serve(*tokens)
        assert self.policy.retain("a", prompt(*tokens), [(self.now + at, worth) for at, worth in steps], self.now + 900)


def test_what_is_worth_least_now_leaves_first_and_its_chain_with_it() -> None:
    pool = OrderedPool()
    pool.keep([(0, 0.5), (20, 0.001)], 1, 1)
    pool.keep([(0, 0.1)], 2, 2)
    pool.keep([(0, 0.01), (15, 0.3)], 3, 3)
    pool.serve(4)
    pool.now += 10
    # The plain block has rested for 10 s, so it is worth a tenth of a use a second: that of the third chain is less.
    pool.serve(5, 5)
    assert [pool.blocks(*([text] * 2)) for text in (1, 2, 3, 4)] == [2, 2, 1, 1]
    # The rest of the chain that gave way leaves first, then the first chain: it was worth most for 20 s.
    pool.now += 12
    pool.serve(6, 6)
    pool.check()
    assert [pool.blocks(*([text] * 2)) for text in (1, 2, 3, 4)] == [1, 2, 0, 1]
    # The plain block has rested for 22 s, and the second chain is worth a use in ten.
    pool.serve(7, 7)
    pool.check()
    assert [pool.blocks(*([text] * 2)) for text in (1, 2, 4)] == [0, 2, 0]
    assert (pool.policy.revoked_ever, pool.policy.retentions) == (2, 1)
