"""Evicts blocks of pools with states: first what no state makes use of, then the states that save the least.

    root --b--b--b(S)--b--b--b--b(T)--b        S and T stand after blocks; without T, a text that goes on from it
                     '--b--b(U)                computes the four blocks between S and T again: the gap of T

A text goes on from a state alone, so a block after which no state stands anywhere is of no use: the last block above,
or T's four when T is gone, or the pages of a state that lacks one. Useless blocks leave first, the ends of chains
before their heads. The next to leave is the state with the smallest product of three numbers: its rank, which is 1 for
the state that lost its protection first; the square of what it saves for each block that it frees; and the part of the
states of its kind that texts went on from. What is used again is mostly what was used lately. Marconi (arXiv
2411.19379) weights both, too; ``python -m lab.benchmarks.state_hits`` chose the square. A state frees its pages; at
a chain's end it frees its gap, too. States that no request holds leave in this order before useless blocks where they
have more than their share of the pool.

The kinds are four: whether the chain goes on after a state, and whether a text has gone on from it already. A request
leaves a state at its prompt's end and one at its answer's. The pool learns by the kinds which of the two the next turn
of a chat finds, which depends on how prompts repeat answers. It also learns that the state of a turn is rarely wanted
once the next turn has its own, while that of a system prompt is.

The pool remembers where texts part when the state there has left, so the next text that comes by leaves it again.

In a pool without states, blocks leave in the order of ``plain``. Sans-IO (I9).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pillion.kvstore.ledger.eviction import EvictionPolicy
from pillion.kvstore.ledger.records import Block
from pillion.kvstore.ledger.tree import Match

# A victim is looked for among at most so many states that lost their protection first.
MAX_LOOKED_AT = 1024
# When so many states of a kind are counted, both counts are halved: traffic changes.
MAX_COUNTED = 256
# No kind counts for less than this share, so that a kind which was not wanted so far stays long enough to be found.
LEAST_SHARE = 1 / 16
# At most so many places where texts part are remembered, of some 100 bytes each.
MAX_PARTINGS = 16_384


@dataclass(slots=True, eq=False)
class StoredState:
    """Represents a state that is in the pool.

    Attributes:
        behind: the block after which it stands.
        pages: its pages, as far as they are here.
        before: the state before it on its chain, None where there is none.
        after: the states before which it is the last one.
        missing: pages that have left and are not back; while there are any, the state is of no use.
        found: whether a text has gone on from it.
        kind: the number of its kind when it lost its protection.
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
    """Counts the states of one kind that texts went on from, and those that left the pool before."""

    found: int = 1
    left: int = 1

    def count(self, *, found: bool) -> None:
        """Counts one more state."""
        if self.found + self.left >= MAX_COUNTED:
            self.found, self.left = max(1, self.found // 2), max(1, self.left // 2)
        if found:
            self.found += 1
        else:
            self.left += 1

    @property
    def share(self) -> float:
        """Gives the part of the states that texts went on from, LEAST_SHARE at least."""
        return max(LEAST_SHARE, self.found / (self.found + self.left))


class StateEviction:
    """Implements an eviction policy around ``plain``, which knows all blocks that it knows, and learns of pages.

    A search of the next state is O(states that are looked at); a state that comes takes O(its gap), and, where blocks
    stand after its own, O(states after the one before it).

    Args:
        percent: the share of the pool that states without protection may have.
    """

    def __init__(self, plain: EvictionPolicy, percent: float) -> None:
        self.plain = plain
        self.evicted_states = 0
        self._percent = percent
        self._max_pages = 0
        # The known pages: those without protection. A whole state is idle if its last page is one.
        self._known: set[Block] = set()
        self._idle: OrderedDict[StoredState, None] = OrderedDict()
        self._idle_pages = 0
        # These known blocks have no child, and are no last page of a whole state. Those in front leave first.
        self._useless: OrderedDict[Block, None] = OrderedDict()
        self._by_block: dict[Block, StoredState] = {}
        self._by_page: dict[Block, StoredState] = {}
        # These states have no other one before them on their chains.
        self._first: set[StoredState] = set()
        # Whether the pool's model has states.
        self._in_use = False
        # By the number of a kind: its counts, and its share when a state last lost its protection.
        self._kinds = [KindOfState() for _ in range(4)]
        self._shares = [kind.share for kind in self._kinds]
        # Hashes of the blocks after which texts part, those that were not met for the longest time first.
        self._partings: OrderedDict[bytes, None] = OrderedDict()

    # The ledger calls the following methods.

    def shape(self, num_slots: int) -> None:
        """Sets the bound in pages, once the pool's number of slots is known."""
        self._max_pages = int(num_slots * self._percent / 100)

    def opens(self, hashes: Sequence[bytes], match: Match) -> int:
        if match.state is not None:
            state = self._by_page[match.state]
            if state.found:
                self._part(hashes[match.blocks - 1])
            state.found = True
            if state in self._idle:
                self._kinds[state.kind].count(found=True)
        if match.blocks < match.known < len(hashes):
            self._part(hashes[match.known - 1])
        if self._partings:
            for place in range(len(hashes), max(match.known, match.blocks), -1):
                if hashes[place - 1] in self._partings:
                    return place
        return match.known

    def came(self, page: Block) -> None:
        if not self._in_use:
            self._in_use = True
            self._useless.update((block, None) for block in self.plain if self._is_useless(block))
        behind = page.parent
        assert behind is not None, "a page stands behind a block"
        state = self._by_page.get(behind) or self._by_block.get(behind)
        if state is None:
            state = self._begun(behind)
        self._wake(state)
        state.pages.append(page)
        state.missing = max(0, state.missing - 1)
        self._by_page[page] = state

    def went(self, block: Block) -> None:
        left = block.parent
        if block.page:
            state = self._by_page.pop(block)
            state.pages.remove(block)
            state.missing += 1
            if not state.pages:
                self._ended(state)
        # What is left of the chain goes next, before the ends of others.
        if left is not None and self._is_useless(left) and not (left.holds or left.prefix_pins):
            self._useless[left] = None
            self._useless.move_to_end(left, last=False)

    def check(self) -> Iterator[str]:
        """Yields a line for each thing that does not add up."""
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

    # The block tree calls the following methods: they are those of an eviction policy.

    def add(self, block: Block) -> None:
        self.plain.add(block)
        if block.page:
            self._known.add(block)
        if self._is_useless(block):
            self._useless[block] = None
        elif block.page and not block.children:
            state = self._by_page[block]
            # Its pages are one of the children.
            state.kind = 2 * state.found + (state.behind.children > 1)
            self._shares = [kind.share for kind in self._kinds]
            self._idle[state] = None
            self._idle_pages += len(state.pages)

    def remove(self, block: Block) -> None:
        self.plain.remove(block)
        self._forget(block)

    def pop(self) -> Block:
        over = self._idle_pages > self._max_pages or not self._useless
        if over and self._idle:
            block = self._worst((), {}).pages[-1]
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
        """Iterates over the known blocks as if each that is yielded was evicted."""
        gone: dict[Block, None] = {}
        states: dict[StoredState, None] = {}
        pages = self._idle_pages
        useless = deque(self._useless)
        fewer: Counter[Block] = Counter()
        while useless or len(states) < len(self._idle):
            over = pages > self._max_pages or not useless
            if over and len(states) < len(self._idle):
                state = self._worst(states, fewer)
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
                if left.children == fewer[left] and not (left.holds or left.prefix_pins):
                    useless.appendleft(left)
        yield from (block for block in self.plain if block not in gone)

    def _part(self, block_hash: bytes) -> None:
        """Remembers that texts part after a block."""
        self._partings[block_hash] = None
        self._partings.move_to_end(block_hash)
        if len(self._partings) > MAX_PARTINGS:
            self._partings.popitem(last=False)

    def _wake(self, state: StoredState) -> None:
        """Notes that a state is idle no more, or is whole no more."""
        if state in self._idle:
            del self._idle[state]
            self._idle_pages -= len(state.pages)

    def _forget(self, block: Block) -> None:
        self._useless.pop(block, None)
        if block.page:
            self._known.remove(block)
            if not block.children:
                self._wake(self._by_page[block])

    def _is_useless(self, block: Block) -> bool:
        """Returns whether nothing stands after a block, which is not the last page of a whole state."""
        if block.children or not self._in_use:
            return False
        return not block.page or self._by_page[block].missing > 0

    def _worst(self, gone: Container[StoredState], fewer: Mapping[Block, int]) -> StoredState:
        """Returns the idle state that saves the least, as if those that are ``gone`` were, and blocks had so many
        children ``fewer``."""
        least, worst, rank = 0.0, None, 0
        for state in self._idle:
            if state in gone:
                continue
            rank += 1
            # A state saves at least a block for those that it frees, and its kind has LEAST_SHARE.
            enough = rank * LEAST_SHARE >= least * (len(state.pages) + 1) ** 2
            if worst is not None and (rank > MAX_LOOKED_AT or enough):
                break
            product = rank * self._shares[state.kind] * self._saved(state, gone, fewer) ** 2
            if worst is None or product < least:
                least, worst = product, state
        assert worst is not None, "no state is idle"
        return worst

    def _saved(self, state: StoredState, gone: Container[StoredState], fewer: Mapping[Block, int]) -> float:
        """Returns how many blocks a state saves for each that it frees."""
        before = state.before
        while before is not None and (before in gone or before.missing):
            before = before.before
        gap = state.behind.depth - (-1 if before is None else before.behind.depth)
        # Its pages are one of the children.
        return gap / (len(state.pages) + (gap if state.behind.children - fewer.get(state.behind, 0) == 1 else 0))

    def _before(self, block: Block) -> StoredState | None:
        """Returns the last state before a block's end on its chain."""
        at = block.parent
        while at is not None and at not in self._by_block:
            at = at.parent
        return None if at is None else self._by_block[at]

    def _begun(self, behind: Block) -> StoredState:
        """Files a state whose first page comes."""
        state = self._by_block[behind] = StoredState(behind)
        state.before = self._before(behind)
        parallel_samples = self._first if state.before is None else state.before.after
        # The first page is one of the children.
        if behind.children > 1:
            state.after = {other for other in parallel_samples if _stands_after(other.behind, behind)}
            parallel_samples -= state.after
            for other in state.after:
                other.before = state
        parallel_samples.add(state)
        return state

    def _ended(self, state: StoredState) -> None:
        """Forgets a state whose last page has gone."""
        self.evicted_states += 1
        del self._by_block[state.behind]
        parallel_samples = self._first if state.before is None else state.before.after
        parallel_samples.remove(state)
        parallel_samples |= state.after
        for other in state.after:
            other.before = state.before


def _stands_after(block: Block, other: Block) -> bool:
    """Returns whether ``other`` is an ancestor of ``block``."""
    at: Block | None = block
    while at is not None and at.depth > other.depth:
        at = at.parent
    return at is other
