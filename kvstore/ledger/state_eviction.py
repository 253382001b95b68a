"""Eviction for pools with states: first blocks that no state uses, then the states that save the least.

    root --b--b--b(S)--b--b--b--b(T)--b        S and T are states after blocks; without T, a text that extends its
                     '--b--b(U)                chain recomputes the four blocks between S and T: the gap of T

A text can only resume from a state, so a block with no state on its chain after it is useless: the last block above,
T's four once T is gone, or the pages of an incomplete state. Useless blocks leave first, the ends of chains before
their heads. Next is the state with the smallest product of three numbers: its rank, 1 for the one that lost its
protection first (recent use predicts reuse); the square of the blocks that it saves per block that it frees; and the
share of states of its kind that texts resumed from. Marconi (arXiv 2411.19379) weights the first two as well.
The simulation ``state_hits`` (at 31f4af5c) chose the square. A state frees its pages and, at a chain's end, its gap.
States that no request uses leave in this order before useless blocks while they exceed their share of the pool.

There are four kinds: whether the chain continues after a state, and whether a text has already resumed from it. A
request leaves a state at its prompt's end and one at its answer's. By the kinds the pool learns which of the two the
next turn of a chat finds, which depends on how prompts repeat answers, and that the state of a turn is rarely wanted
once the next turn has its own, while that of a system prompt is.

The pool remembers where texts diverge even after the state there was evicted, so that the next text leaves it again.

In a pool without states, blocks leave in the order of ``plain``. Sans-IO (I9).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import Match

# States considered per search of a victim, in order of their loss of protection.
MAX_LOOKED_AT = 1024
# Count at which both counts of a kind are halved, to follow changing traffic.
MAX_COUNTED = 256
# Minimum share of a kind, so that states of an unused kind stay long enough to be found.
MIN_SHARE = 1 / 16
# Remembered points of divergence, some 100 bytes each.
MAX_BRANCH_POINTS = 16_384


@dataclass(slots=True, eq=False)
class StoredState:
    """A state in the pool.

    Attributes:
        behind: the block that it follows.
        pages: its pages that are present.
        before: the previous state on its chain.
        after: the states whose previous state it is.
        missing: evicted pages that have not returned; the state is useless unless 0.
        found: True once a text resumed from it.
        kind: number of its kind when it lost its protection.
    """

    behind: Block
    pages: list[Block] = field(default_factory=list)
    before: StoredState | None = None
    after: set[StoredState] = field(default_factory=set)
    missing: int = 0
    found: bool = False
    kind: int = 0


@dataclass(slots=True)
class KindOfState:
    """Counts of the states of one kind that texts resumed from, and of those evicted first."""

    found: int = 1
    left: int = 1

    def count(self, *, found: bool) -> None:
        if self.found + self.left >= MAX_COUNTED:
            self.found, self.left = max(1, self.found // 2), max(1, self.left // 2)
        if found:
            self.found += 1
        else:
            self.left += 1

    @property
    def hit_rate(self) -> float:
        """Fraction of the states that texts resumed from, at least MIN_SHARE."""
        return max(MIN_SHARE, self.found / (self.found + self.left))


class StateEviction:
    """Eviction policy around ``plain``, which contains the same blocks.

    A search for a victim is O(states considered); an arriving state costs O(its gap), and, if blocks follow its own,
    O(states after the previous one).

    Args:
        percent: share of the pool that unprotected states may have.
    """

    def __init__(self, plain: EvictionPolicy, percent: float) -> None:
        self.plain = plain
        self._percent = percent
        self._max_pages = 0
        # Unprotected pages. A whole state is idle if its last page is one.
        self._known: set[Block] = set()
        self._idle: OrderedDict[StoredState, None] = OrderedDict()
        self._idle_pages = 0
        # Unprotected blocks without children, except last pages of whole states. The front leaves first.
        self._useless: OrderedDict[Block, None] = OrderedDict()
        self._by_block: dict[Block, StoredState] = {}
        self._by_page: dict[Block, StoredState] = {}
        self._first: set[StoredState] = set()
        self._in_use = False
        # By kind: its counts, and its share when a state last lost its protection.
        self._kinds = [KindOfState() for _ in range(4)]
        self._shares = [kind.hit_rate for kind in self._kinds]
        # Hashes of the blocks after which texts diverge, least recently met first.
        self._branch_points: OrderedDict[bytes, None] = OrderedDict()

    def shape(self, num_slots: int) -> None:
        """Set the limit in pages, once the pool's number of slots is known."""
        self._max_pages = int(num_slots * self._percent / 100)

    def opens(self, hashes: Sequence[bytes], match: Match) -> int:
        if match.state is not None:
            state = self._by_page[match.state]
            if state.found:
                self._add_branch_point(hashes[match.blocks - 1])
            state.found = True
            if state in self._idle:
                self._kinds[state.kind].count(found=True)
        if match.blocks < match.known < len(hashes):
            self._add_branch_point(hashes[match.known - 1])
        if self._branch_points:
            for place in range(len(hashes), max(match.known, match.blocks), -1):
                if hashes[place - 1] in self._branch_points:
                    return place
        return match.known

    def on_commit(self, page: Block) -> None:
        if not self._in_use:
            self._in_use = True
            self._useless.update((block, None) for block in self.plain if self._is_useless(block))
        behind = page.parent
        assert behind is not None, "a page stands behind a block"
        state = self._by_page.get(behind) or self._by_block.get(behind)
        if state is None:
            state = self._create(behind)
        self._unmark_idle(state)
        state.pages.append(page)
        state.missing = max(0, state.missing - 1)
        self._by_page[page] = state

    def on_evict(self, block: Block) -> None:
        left = block.parent
        if block.page:
            state = self._by_page.pop(block)
            state.pages.remove(block)
            state.missing += 1
            if not state.pages:
                self._remove_state(state)
        # The rest of this chain is next, before the ends of others.
        if left is not None and self._is_useless(left) and not (left.ref_count or left.prefix_pins):
            self._useless[left] = None
            self._useless.move_to_end(left, last=False)

    def check(self) -> Iterator[str]:
        """Yield a line for each inconsistency."""
        if any(page not in self._by_page for page in self._known):
            yield "a page without protection is of no state"
        whole = [state for state in self._by_block.values() if not state.missing]
        idle = {state for state in whole if state.pages and state.pages[-1] in self._known}
        if idle != self._idle.keys():
            yield f"{len(self._idle)} states are counted as idle of {len(idle)}"
        if self._idle_pages != sum(len(state.pages) for state in idle):
            yield f"{self._idle_pages} pages are counted as those of idle states"
        useless = {block for block in self.plain if self._is_useless(block)}
        if useless != self._useless.keys():
            yield f"{len(self._useless)} ends of chains are counted as useless of {len(useless)}"
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

    def add(self, block: Block) -> None:
        self.plain.add(block)
        if block.page:
            self._known.add(block)
        if self._is_useless(block):
            self._useless[block] = None
        elif block.page and not block.children:
            state = self._by_page[block]
            # The state's pages are one of the children.
            state.kind = 2 * state.found + (state.behind.children > 1)
            self._shares = [kind.hit_rate for kind in self._kinds]
            self._idle[state] = None
            self._idle_pages += len(state.pages)

    def remove(self, block: Block) -> None:
        self.plain.remove(block)
        self._forget(block)

    def pop(self) -> Block:
        over = self._idle_pages > self._max_pages or not self._useless
        if over and self._idle:
            block = self._next_victim((), {}).pages[-1]
        elif self._useless:
            block = next(iter(self._useless))
        else:
            return self.plain.pop()
        self.drop(block)
        return block

    def drop(self, block: Block) -> None:
        state = self._by_page.get(block)
        if state is not None and state in self._idle and not block.children:
            self._kinds[state.kind].count(found=False)
        self.plain.drop(block)
        self._forget(block)

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks in the order in which repeated pops would evict them."""
        gone: dict[Block, None] = {}
        states: dict[StoredState, None] = {}
        pages = self._idle_pages
        useless = deque(self._useless)
        fewer: Counter[Block] = Counter()
        while useless or len(states) < len(self._idle):
            over = pages > self._max_pages or not useless
            if over and len(states) < len(self._idle):
                state = self._next_victim(states, fewer)
                states[state] = None
                block = state.pages[-1]
                pages -= len(state.pages)
            else:
                block = useless.popleft()
            gone[block] = None
            yield block
            left = block.parent
            if left is not None:
                fewer[left] += 1
                if left.children == fewer[left] and not (left.ref_count or left.prefix_pins):
                    useless.appendleft(left)
        yield from (block for block in self.plain if block not in gone)

    def _add_branch_point(self, block_hash: bytes) -> None:
        """Record that texts diverge after a block."""
        self._branch_points[block_hash] = None
        self._branch_points.move_to_end(block_hash)
        if len(self._branch_points) > MAX_BRANCH_POINTS:
            self._branch_points.popitem(last=False)

    def _unmark_idle(self, state: StoredState) -> None:
        """Remove a state from the idle ones, if it is there."""
        if state in self._idle:
            del self._idle[state]
            self._idle_pages -= len(state.pages)

    def _forget(self, block: Block) -> None:
        self._useless.pop(block, None)
        if block.page:
            self._known.remove(block)
            if not block.children:
                self._unmark_idle(self._by_page[block])

    def _is_useless(self, block: Block) -> bool:
        """Return whether nothing follows a block that is not the last page of a whole state."""
        if block.children or not self._in_use:
            return False
        return not block.page or self._by_page[block].missing > 0

    def _next_victim(self, gone: Container[StoredState], fewer: Mapping[Block, int]) -> StoredState:
        """Return the idle state that saves the least, as if the states ``gone`` were evicted, and blocks had ``fewer``
        children."""
        least, worst, rank = 0.0, None, 0
        for state in self._idle:
            if state in gone:
                continue
            rank += 1
            # No later state can be worse: each saves at least a block, and its kind's share is at least MIN_SHARE.
            enough = rank * MIN_SHARE >= least * (len(state.pages) + 1) ** 2
            if worst is not None and (rank > MAX_LOOKED_AT or enough):
                break
            product = rank * self._shares[state.kind] * self._saved(state, gone, fewer) ** 2
            if worst is None or product < least:
                least, worst = product, state
        assert worst is not None, "no state is idle"
        return worst

    def _saved(self, state: StoredState, gone: Container[StoredState], fewer: Mapping[Block, int]) -> float:
        """Return how many blocks a state saves per block that it frees."""
        before = state.before
        while before is not None and (before in gone or before.missing):
            before = before.before
        gap = state.behind.depth - (-1 if before is None else before.behind.depth)
        return gap / (len(state.pages) + (gap if state.behind.children - fewer.get(state.behind, 0) == 1 else 0))

    def _before(self, block: Block) -> StoredState | None:
        """Return the last state on a block's chain before the block's end."""
        at = block.parent
        while at is not None and at not in self._by_block:
            at = at.parent
        return None if at is None else self._by_block[at]

    def _create(self, behind: Block) -> StoredState:
        """Register a state whose first page arrives."""
        state = self._by_block[behind] = StoredState(behind)
        state.before = self._before(behind)
        siblings = self._first if state.before is None else state.before.after
        if behind.children > 1:
            state.after = {other for other in siblings if _stands_after(other.behind, behind)}
            siblings -= state.after
            for other in state.after:
                other.before = state
        siblings.add(state)
        return state

    def _remove_state(self, state: StoredState) -> None:
        """Remove a state whose last page was evicted."""
        del self._by_block[state.behind]
        siblings = self._first if state.before is None else state.before.after
        siblings.remove(state)
        siblings |= state.after
        for other in state.after:
            other.before = state.before


def _stands_after(block: Block, other: Block) -> bool:
    """Return whether ``other`` is an ancestor of ``block``."""
    at: Block | None = block
    while at is not None and at.depth > other.depth:
        at = at.parent
    return at is other
