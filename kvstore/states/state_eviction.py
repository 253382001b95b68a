"""Evicts the states that save the least, where those that no request holds have more than their share of the pool.

    root --b--b--b(S)--b--b--b--b(T)--b        S and T stand after blocks; without T, a text that goes on from it
                     '--b--b(U)                computes the four blocks between S and T again: the gap of T

What a state saves for each byte is its gap, since all states of a pool have the same size. What is used again is mostly
what was used lately, so the gap is weighted by the state's rank: 1 for the state that lost its protection first
(Marconi, arXiv 2411.19379, weights both, too). Above the share the state with the smallest product goes, page by page
from its last one; below it pages leave in the order of all blocks.

A state of which a page is gone is of no use, so its other pages go before all states. Sans-IO (I9).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from pillion.config import KVNodeFlags
from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.ledger_states import LedgerStates
from pillion.kvstore.ledger.records import Block

# A victim is looked for among so many states that lost their protection first. The search mostly ends long before,
# at the rank that is above the least product found so far.
MAX_LOOKED_AT = 1024


@dataclass(slots=True, eq=False)
class KeptState:
    """Represents a state that is in the pool.

    Attributes:
        behind: the block after which it stands.
        pages: its pages, as far as they are here.
        before: the state before it on its chain, None where there is none.
        after: the states before which it is the last one.
        missing: pages that have left and are not back; while there are any, the state is of no use.
    """

    behind: Block
    pages: list[Block] = field(default_factory=list)
    before: KeptState | None = None
    after: set[KeptState] = field(default_factory=set)
    missing: int = 0


class StateEviction(LedgerStates):
    """Implements an eviction policy around ``plain``, which knows all blocks that it knows, and learns of pages.

    A search of the next victim is O(gap of the first state), as many states as that are looked at; a state that comes
    takes O(its gap), and, where blocks stand after its own, O(states after the one before it).

    Args:
        percent: the share of the pool that states without protection may have.
    """

    def __init__(self, plain: EvictionPolicy, percent: int) -> None:
        super().__init__(self)
        self.plain = plain
        self.evicted_states = 0
        self._percent = percent
        self._max_pages = 0
        # The known pages: those without protection. A state is idle if its last page is one.
        self._known: set[Block] = set()
        self._idle: OrderedDict[KeptState, None] = OrderedDict()
        self._by_block: dict[Block, KeptState] = {}
        self._by_page: dict[Block, KeptState] = {}
        # These states have no other one before them on their chains.
        self._first: set[KeptState] = set()

    # The ledger calls the following methods.

    def shape(self, num_slots: int) -> None:
        """Sets the bound in pages, once the pool's number of slots is known."""
        self._max_pages = num_slots * self._percent // 100

    def came(self, page: Block) -> None:
        behind = page.parent
        assert behind is not None, "a page stands behind a block"
        state = self._by_page.get(behind) or self._by_block.get(behind)
        if state is None:
            state = self._begun(behind)
        self._idle.pop(state, None)
        state.pages.append(page)
        state.missing = max(0, state.missing - 1)
        self._by_page[page] = state

    def went(self, page: Block) -> None:
        state = self._by_page.pop(page)
        state.pages.remove(page)
        self._idle.pop(state, None)
        if not state.pages:
            self._ended(state)
            return
        state.missing += 1
        if state.pages[-1] in self._known:
            self._idle[state] = None
            self._idle.move_to_end(state, last=False)

    def check(self) -> Iterator[str]:
        """Yields a line for each thing that does not add up."""
        if any(page not in self._by_page for page in self._known):
            yield "a page without protection is of no state"
        idle = {state for state in self._by_block.values() if state.pages and state.pages[-1] in self._known}
        if idle != self._idle.keys():
            yield f"{len(self._idle)} states are counted as idle of {len(idle)}"
        pages = Counter(page for state in self._by_block.values() for page in state.pages)
        if pages != Counter(self._by_page.keys()):
            yield "the pages of states are not those that are filed"
        for state in self._by_block.values():
            name = f"the state after slot {state.behind.slot}"
            if not state.pages:
                yield f"{name} has no page"
            before = self._before(state.behind)
            if state.before is not before:
                yield f"{name} has another state before it than is filed"
            if state not in (self._first if before is None else before.after):
                yield f"{name} is not among those after the state before it"
        if sum(len(state.after) for state in self._by_block.values()) + len(self._first) != len(self._by_block):
            yield "states are filed after others that are gone"

    # The block tree calls the following methods: they are those of an eviction policy.

    def add(self, block: Block) -> None:
        self.plain.add(block)
        if block.page:
            self._known.add(block)
            state = self._by_page[block]
            if state.pages[-1] is block:
                self._idle[state] = None
                self._idle.move_to_end(state, last=not state.missing)

    def remove(self, block: Block) -> None:
        self.plain.remove(block)
        self._forget(block)

    def pop(self) -> Block:
        if len(self._known) <= self._max_pages:
            block = self.plain.pop()
        else:
            block = self._worst(()).pages[-1]
            self.plain.drop(block)
        self._forget(block)
        return block

    def drop(self, block: Block) -> None:
        self.plain.drop(block)
        self._forget(block)

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Block]:
        gone: dict[KeptState, None] = {}
        left = len(self._known)
        first: dict[Block, None] = {}
        while left > self._max_pages:
            state = self._worst(gone)
            for page in reversed(state.pages):
                if left > self._max_pages and page in self._known:
                    first[page] = None
                    left -= 1
                    yield page
            gone[state] = None
        yield from (block for block in self.plain if block not in first)

    def _forget(self, block: Block) -> None:
        if block.page:
            self._known.remove(block)
            self._idle.pop(self._by_page[block], None)

    def _worst(self, gone: Container[KeptState]) -> KeptState:
        """Returns the idle state with the smallest product of gap and rank, as if those that are ``gone`` were."""
        least, worst, rank = 0, None, 0
        for state in self._idle:
            if state in gone:
                continue
            rank += 1
            # A gap has at least one block, so no later state has a smaller product than its rank.
            if worst is not None and (rank >= least or rank > MAX_LOOKED_AT):
                break
            product = 0 if state.missing else rank * self._gap(state, gone)
            if worst is None or product < least:
                least, worst = product, state
        assert worst is not None, "a page without protection is of no idle state"
        return worst

    def _gap(self, state: KeptState, gone: Container[KeptState]) -> int:
        """Returns the blocks between a state and the one before it on its chain."""
        before = state.before
        while before is not None and (before in gone or before.missing):
            before = before.before
        return state.behind.depth - (-1 if before is None else before.behind.depth)

    def _before(self, block: Block) -> KeptState | None:
        """Returns the last state before a block's end on its chain."""
        at = block.parent
        while at is not None and at not in self._by_block:
            at = at.parent
        return None if at is None else self._by_block[at]

    def _begun(self, behind: Block) -> KeptState:
        """Files a state whose first page comes."""
        state = self._by_block[behind] = KeptState(behind)
        state.before = self._before(behind)
        siblings = self._first if state.before is None else state.before.after
        # The first page is one of the children.
        if behind.children > 1:
            state.after = {other for other in siblings if _stands_after(other.behind, behind)}
            siblings -= state.after
            for other in state.after:
                other.before = state
        siblings.add(state)
        return state

    def _ended(self, state: KeptState) -> None:
        """Forgets a state whose last page has gone."""
        self.evicted_states += 1
        del self._by_block[state.behind]
        siblings = self._first if state.before is None else state.before.after
        siblings.remove(state)
        siblings |= state.after
        for other in state.after:
            other.before = state.before


def _stands_after(block: Block, other: Block) -> bool:
    """Returns whether ``other`` is an ancestor of ``block``."""
    at: Block | None = block
    while at is not None and at.depth > other.depth:
        at = at.parent
    return at is other


def keep_states(flags: KVNodeFlags) -> Callable[[EvictionPolicy], LedgerStates]:
    """Returns what makes the eviction of states by a node's flags."""
    return lambda policy: StateEviction(policy, flags.state_percent)
