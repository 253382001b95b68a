"""Eviction for pools with states: first blocks that no state uses, then the states that save the least.

    root --b--b--b(S)--b--b--b--b(T)--b        S, T and U are states after blocks. Without T, a prompt that extends its
                     '--b--b(U)                chain recomputes the four blocks between S and T: the gap of T

A prompt can only resume from a state, so blocks without a later state on their chain are useless: the last block above,
the gap of T once T is evicted, and the pages of an incomplete state. Useless blocks are evicted first, the ends of
chains before their heads. Next is the state with the smallest product of three numbers: its LRU rank, 1 for the state
that lost its protection first; the square of the blocks that it saves per block that it frees; and the hit rate of its
kind. Marconi (arXiv 2411.19379) weights the first two as well. The square did best in the simulation ``state_hits`` (at
31f4af5c). A state frees its pages and, at a chain's end, its gap. While unprotected states exceed their share of the
pool, they are evicted in this order before useless blocks.

There are four kinds of states: whether the chain continues after the state, and whether a prompt has resumed from it. A
request leaves a state at its prompt's end and at its answer's end. The hit rates show from which of the two the next
turn of a chat resumes, which depends on how prompts repeat answers; and that the state of a turn is rarely reused once
the next turn has one, while that of a system prompt is.

The pool remembers points where prompts diverge even after the state at that point was evicted, so that the next prompt
leaves a state there again.

In a pool without states, blocks are evicted in the order of ``plain``. Sans-IO (I9).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import Match

# Max states examined per search of a victim, in LRU order.
MAX_EXAMINED = 1024
# Min hit rate of a kind, so that states of a kind without hits stay long enough to get one.
MIN_HIT_RATE = 1 / 16
# Max remembered branch points, some 100 bytes each.
MAX_BRANCH_POINTS = 16_384


@dataclass(slots=True, eq=False)
class StoredState:
    """A state in the pool.

    Attributes:
        parent: the block that the state follows.
        pages: the pages that are present.
        before: the previous state on the chain, None for the first.
        after: the next states on all chains that continue this one.
        missing: number of evicted pages; the state is useless unless 0.
        hit: True once a prompt has resumed from the state.
        kind: index of the state's kind when it lost its protection.
    """

    parent: Block
    pages: list[Block] = field(default_factory=list)
    before: StoredState | None = None
    after: set[StoredState] = field(default_factory=set)
    missing: int = 0
    hit: bool = False
    kind: int = 0


@dataclass(slots=True)
class StateKind:
    """Numbers of unprotected states of one kind that were hit, and that were evicted without a hit, with decay."""

    hits: int = 1
    misses: int = 1

    def count(self, *, hit: bool) -> None:
        """Count a hit, or an eviction without one."""
        # Halved at 256, to follow changing traffic.
        if self.hits + self.misses >= 256:
            self.hits, self.misses = max(1, self.hits // 2), max(1, self.misses // 2)
        if hit:
            self.hits += 1
        else:
            self.misses += 1

    @property
    def hit_rate(self) -> float:
        """Fraction of states that were hit, at least MIN_HIT_RATE."""
        return max(MIN_HIT_RATE, self.hits / (self.hits + self.misses))


class StateEviction:
    """Eviction policy of a pool with states. It wraps ``plain``, which contains the same blocks.

    A search for a victim is O(states examined). A new state costs O(its gap) and, if its block has other children,
    O(states after the previous state).

    Args:
        percent: max share of the pool for unprotected states.
    """

    def __init__(self, plain: EvictionPolicy, percent: float) -> None:
        self.plain = plain
        self._percent = percent
        self._max_pages = 0
        self._unprotected_pages: set[Block] = set()
        # Complete states whose last page is unprotected, in LRU order.
        self._idle: OrderedDict[StoredState, None] = OrderedDict()
        self._idle_pages = 0
        # Unprotected blocks without children, except last pages of complete states. The front is evicted first.
        self._useless: OrderedDict[Block, None] = OrderedDict()
        self._by_block: dict[Block, StoredState] = {}
        self._by_page: dict[Block, StoredState] = {}
        self._first: set[StoredState] = set()
        self._in_use = False
        # By kind: counts, and hit rate when a state last lost its protection.
        self._kinds = [StateKind() for _ in range(4)]
        self._hit_rates = [kind.hit_rate for kind in self._kinds]
        # Hashes of the blocks after which prompts diverge, in LRU order.
        self._branch_points: OrderedDict[bytes, None] = OrderedDict()

    def shape(self, num_slots: int) -> None:
        """Set the limit in pages, once the pool's number of slots is known."""
        self._max_pages = int(num_slots * self._percent / 100)

    def on_admit(self, hashes: Sequence[bytes], match: Match) -> int:
        """Record the hit of a prompt, and the point where it diverges from other prompts. Return the number of blocks
        after which further prompts are expected to diverge: the last remembered branch point on its chain ``hashes``
        beyond the known blocks, or else ``match.known``."""
        if match.state is not None:
            state = self._by_page[match.state]
            if state.hit:
                self._add_branch_point(hashes[match.blocks - 1])
            state.hit = True
            if state in self._idle:
                self._kinds[state.kind].count(hit=True)
        if match.blocks < match.known < len(hashes):
            self._add_branch_point(hashes[match.known - 1])
        if self._branch_points:
            for blocks in range(len(hashes), match.known, -1):
                if hashes[blocks - 1] in self._branch_points:
                    return blocks
        return match.known

    def on_commit(self, page: Block) -> None:
        if not self._in_use:
            self._in_use = True
            self._useless.update((block, None) for block in self.plain if self._is_useless(block))
        parent = page.parent
        assert parent is not None, "a page without a parent"
        state = self._by_page.get(parent)
        if state is None:
            state = self._create(parent)
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
        # Evict this chain to its head before other chains.
        if left is not None and self._is_useless(left) and not (left.ref_count or left.prefix_pins):
            self._useless[left] = None
            self._useless.move_to_end(left, last=False)

    def check(self) -> Iterator[str]:
        """Yield a line for each inconsistency."""
        if any(page not in self._by_page for page in self._unprotected_pages):
            yield "a page without protection is of no state"
        whole = [state for state in self._by_block.values() if not state.missing]
        idle = {state for state in whole if state.pages and state.pages[-1] in self._unprotected_pages}
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
            name = f"the state after slot {state.parent.slot}"
            if not state.pages:
                yield f"{name} has no page"
            before = self._before(state.parent)
            if state.before is not before:
                yield f"{name} has another state before it than is filed"
            if state not in (self._first if before is None else before.after):
                yield f"{name} is not among those after the state before it"
        if sum(len(state.after) for state in self._by_block.values()) + len(self._first) != len(self._by_block):
            yield "states are filed after others that are gone"

    def add(self, block: Block) -> None:
        self.plain.add(block)
        if block.page:
            self._unprotected_pages.add(block)
        if self._is_useless(block):
            self._useless[block] = None
        elif block.page and not block.children:
            state = self._by_page[block]
            # The first page is one of the parent's children.
            state.kind = 2 * state.hit + (state.parent.children > 1)
            self._hit_rates = [kind.hit_rate for kind in self._kinds]
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
        if state is not None and state in self._idle:
            self._kinds[state.kind].count(hit=False)
        self.plain.drop(block)
        self._forget(block)

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks in the order in which repeated pops would evict them."""
        evicted: dict[Block, None] = {}
        states: dict[StoredState, None] = {}
        pages = self._idle_pages
        useless = deque(self._useless)
        removed_children: Counter[Block] = Counter()
        while useless or len(states) < len(self._idle):
            over = pages > self._max_pages or not useless
            if over:
                state = self._next_victim(states, removed_children)
                states[state] = None
                block = state.pages[-1]
                pages -= len(state.pages)
            else:
                block = useless.popleft()
            evicted[block] = None
            yield block
            left = block.parent
            if left is not None:
                removed_children[left] += 1
                if left.children == removed_children[left] and not (left.ref_count or left.prefix_pins):
                    useless.appendleft(left)
        yield from (block for block in self.plain if block not in evicted)

    def _add_branch_point(self, block_hash: bytes) -> None:
        """Record that texts diverge after a block."""
        self._branch_points[block_hash] = None
        self._branch_points.move_to_end(block_hash)
        if len(self._branch_points) > MAX_BRANCH_POINTS:
            self._branch_points.popitem(last=False)

    def _unmark_idle(self, state: StoredState) -> None:
        """Remove a state from the idle states, if it is one."""
        if state in self._idle:
            del self._idle[state]
            self._idle_pages -= len(state.pages)

    def _forget(self, block: Block) -> None:
        self._useless.pop(block, None)
        if block.page:
            self._unprotected_pages.remove(block)
            if not block.children:
                self._unmark_idle(self._by_page[block])

    def _is_useless(self, block: Block) -> bool:
        """Return whether a block has no children and is not the last page of a complete state."""
        if block.children or not self._in_use:
            return False
        return not block.page or self._by_page[block].missing > 0

    def _next_victim(self, evicted: Container[StoredState], removed_children: Mapping[Block, int]) -> StoredState:
        """Return the idle state with the lowest value, as if the states ``evicted`` were evicted and blocks had lost
        ``removed_children`` children."""
        lowest, victim, rank = 0.0, None, 0
        for state in self._idle:
            if state in evicted:
                continue
            rank += 1
            # No later state can have a lower value: each saves at least a block, and has at least MIN_HIT_RATE.
            bounded = rank * MIN_HIT_RATE >= lowest * (len(state.pages) + 1) ** 2
            if victim is not None and (rank > MAX_EXAMINED or bounded):
                break
            value = rank * self._hit_rates[state.kind] * self._saved(state, evicted, removed_children) ** 2
            if victim is None or value < lowest:
                lowest, victim = value, state
        assert victim is not None, "no state is idle"
        return victim

    def _saved(
        self, state: StoredState, evicted: Container[StoredState], removed_children: Mapping[Block, int]
    ) -> float:
        """Return the blocks that a state saves per block that its eviction frees; the other arguments are those of
        :meth:`_next_victim`."""
        before = state.before
        while before is not None and (before in evicted or before.missing):
            before = before.before
        gap = state.parent.depth - (-1 if before is None else before.parent.depth)
        ends_chain = state.parent.children - removed_children.get(state.parent, 0) == 1
        return gap / (len(state.pages) + (gap if ends_chain else 0))

    def _before(self, block: Block) -> StoredState | None:
        """Return the last state on a chain before ``block``; None if there is none."""
        at = block.parent
        while at is not None and at not in self._by_block:
            at = at.parent
        return None if at is None else self._by_block[at]

    def _create(self, parent: Block) -> StoredState:
        """Register the state after ``parent``, whose first page has been committed."""
        state = self._by_block[parent] = StoredState(parent)
        state.before = self._before(parent)
        siblings = self._first if state.before is None else state.before.after
        if parent.children > 1:
            state.after = {other for other in siblings if _is_descendant(other.parent, parent)}
            siblings -= state.after
            for other in state.after:
                other.before = state
        siblings.add(state)
        return state

    def _remove_state(self, state: StoredState) -> None:
        """Remove a state whose last page was evicted."""
        del self._by_block[state.parent]
        siblings = self._first if state.before is None else state.before.after
        siblings.remove(state)
        siblings |= state.after
        for other in state.after:
            other.before = state.before


def _is_descendant(block: Block, other: Block) -> bool:
    """Return whether ``other`` is an ancestor of ``block``."""
    at: Block | None = block
    while at is not None and at.depth > other.depth:
        at = at.parent
    return at is other
