"""Keeps the blocks of a simulated KV node in the production ledger, for models whose layers carry a state (I9).

    [ blocks of the trace, each of several KV blocks ][ the prompt's rest and the answer, which nobody begins with ]
                       '--state, where texts part     '--state at the prompt's end         state at the answer's end--'

A prompt goes on from the longest prefix after which a state stands. Which states stay is decided by the classes that
decide it in production (:mod:`pillion.kvstore.ledger.state_eviction`), and so is how much memory a ticket needs. A
trace numbers whole blocks of 512 tokens alone, so the state at a prompt's last whole KV block stands after the last one
of these, which is where the next turn finds it. Answers take room with their blocks and states, and nobody finds them:
in a service whose prompts repeat answers, the state at the answer's end is found in place of the one at the prompt's.

With 0 pages for a state the store holds a model without states by the same rules, to compare with.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.fleets.prefix_store import NodeStore, PrefixIndex, SimTicket, SlotsOfState, StateCounts
from pillion.config import KVNodeFlags
from pillion.engine.scheduling.states import STATES
from pillion.kvstore.hashing import state_page
from pillion.kvstore.index.index import MAX_ENTRIES_PER_LOOKUP
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger, PoolShares, TicketState
from pillion.v1.kvnode_pb2 import CommitRun

ROLE = "decode"


class StateIndex(PrefixIndex):
    """Says which nodes have a state after a block of a trace. ``kv`` is the index of the blocks
    themselves, with or without a state after them."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = PrefixIndex()

    def known_blocks(self, blocks: Sequence[int]) -> int:
        return max(self.kv.longest_prefix(blocks).values(), default=0)

    def longest_prefix(self, blocks: Sequence[int]) -> dict[str, int]:
        """Returns how many leading blocks of the chain stand before the last state that a node has, by node id, the
        longest first, of MAX_ENTRIES_PER_LOOKUP nodes at most."""
        found: dict[str, int] = {}
        for depth in range(len(blocks), 0, -1):
            # The ids are sorted, because a set's order would change from run to run.
            for node_id in sorted(self.holders_of(blocks[depth - 1])):
                found.setdefault(node_id, depth)
                if len(found) == MAX_ENTRIES_PER_LOOKUP:
                    return found
        return found


@dataclass(slots=True)
class GrantedTicket:
    """Holds what a store knows of a ticket that it has granted: the production ticket, the names of the trace's KV
    blocks, how many states running sequences under it can still spare, and how many of these sequences there are."""

    state: TicketState
    names: list[bytes]
    spare_states: int
    sequences: int


class StateStore(NodeStore):
    """Represents the pool of one node, with states of ``pages`` KV blocks. A node that leaves hands nothing over."""

    def __init__(
        self, node_id: str, index: PrefixIndex, capacity: int, block_size: int, pages: int, flags: KVNodeFlags
    ) -> None:
        super().__init__(node_id, index, capacity, block_size)
        self._pages = pages
        self._block_size = block_size
        self.ledger = Ledger(itertools.count(1).__next__, 0, PoolShares(state_percent=flags.state_percent))
        self.ledger.shape(capacity)
        self._holder = self.ledger.attach(node_id, ROLE)
        self._nonces = itertools.count(1)
        self._names: dict[SimTicket, list[bytes]] = {}
        self._open: dict[SimTicket, GrantedTicket] = {}
        self._kv_index = index.kv if pages and isinstance(index, StateIndex) else index
        # While the pool has this block or page, this index lists a block of the trace.
        self._listed: dict[bytes, tuple[PrefixIndex, int]] = {}
        self._kept = self._lacking = 0

    @property
    def used(self) -> int:
        return self.ledger.num_slots - len(self.ledger.free) + self.ledger.reserved

    @property
    def cached(self) -> int:
        return self.ledger.tree.idle // self._each

    @property
    def states(self) -> StateCounts:
        pages = sum(block.page for block in self.ledger.tree.by_hash.values())
        return StateCounts(self._kept, self._lacking, self.ledger.states.evicted_states, pages)

    def prefix(self, blocks: Sequence[int]) -> int:
        names, tree = self._named(blocks), self.ledger.tree
        found = tree.longest_with_state(names, self._pages) if self._pages else tree.longest_prefix(names)
        return found.blocks // self._each

    def open(self, ticket: SimTicket) -> None:
        self._names[ticket] = self._named(ticket.blocks)
        super().open(ticket)

    def close(self, ticket: SimTicket) -> None:
        if not ticket.open:
            return
        ticket.open = False
        self._names.pop(ticket, None)
        if self._gone:
            return
        if ticket.waiting:
            self._waiting.remove(ticket)
        else:
            self.ledger.release(self._holder, [self._open.pop(ticket).state.ticket_id])
        self._grant()

    def commit(self, ticket: SimTicket, count: int) -> None:
        opened = self._open.get(ticket)
        if opened is None:
            return
        for number, name in zip(ticket.blocks[:count], opened.names[self._each - 1 :: self._each], strict=False):
            self._listed[name] = self._kv_index, number
        self._commit(opened, opened.names[: count * self._each])
        ticket.pinned = max(ticket.pinned, count)

    def keep(self, ticket: SimTicket, count: int, slots: SlotsOfState) -> bool:
        opened = self._open.get(ticket)
        if opened is None or not self._pages or not 0 < count <= ticket.pinned:
            return True
        after = opened.names[count * self._each - 1]
        last = state_page(after, self._pages - 1)
        self._listed[last] = self._index, ticket.blocks[count - 1]
        return self._keep(opened, after, slots)

    def finish(self, ticket: SimTicket, tokens: int) -> None:
        opened = self._open.get(ticket)
        if opened is None or ticket.pinned < len(ticket.blocks):
            return
        own = range(tokens // self._block_size - len(opened.names))
        number = opened.state.ticket_id
        names = [hashlib.sha256(b"%s %d %d" % (self.node_id.encode(), number, at)).digest() for at in own]
        self._commit(opened, [*opened.names, *names])
        if names and self._pages:
            self._keep(opened, names[-1], SlotsOfState.ENDED)

    def warm_chains(self) -> Iterator[tuple[int, ...]]:
        yield from ()

    def leave(self) -> None:
        for name, (index, number) in self._listed.items():
            if name in self.ledger.tree.by_hash:
                index.remove(number, self.node_id)
        self._gone = True
        self._open.clear()

    def check_integrity(self) -> None:
        check_integrity(self.ledger)
        assert self._open.keys() == self._names.keys() - set(self._waiting), "a ticket is open that has no names"
        for name, (index, number) in self._listed.items():
            here = name in self.ledger.tree.by_hash
            assert (self.node_id in index.holders_of(number)) == here, "the index says something else than the pool"

    def _grant(self) -> None:
        while self._waiting:
            ticket = self._waiting[0]
            names = self._names[ticket]
            known = ticket.known * self._each
            state = self.ledger.admit(self._holder, next(self._nonces), names, ticket.total, self._pages, known)
            if state is None:
                return
            self._waiting.popleft()
            ticket.waiting = False
            self._open[ticket] = GrantedTicket(state, names, ticket.sequences, ticket.sequences)
            ticket.pinned, ticket.known = state.blocks // self._each, state.known_blocks // self._each
            ticket.granted(ticket)

    def _commit(self, opened: GrantedTicket, names: Sequence[bytes]) -> None:
        """Commits the blocks of a chain that its ticket does not hold yet."""
        new = names[opened.state.blocks :]
        if new:
            slots = self._reserved(opened, len(new))
            self._send(CommitRun(ticket_id=opened.state.ticket_id, slots=slots, block_hashes=b"".join(new)))

    def _keep(self, opened: GrantedTicket, after: bytes, slots_of: SlotsOfState) -> bool:
        """Commits a state behind the block ``after``; returns False where there is no memory for it."""
        if slots_of is SlotsOfState.ENDED:
            slots = self._reserved(opened, self._pages)
            self._end_sequence(opened)
        else:
            slots = self.ledger.lease(self._holder, self._pages)
            if len(slots) < self._pages:
                self.ledger.give_back(self._holder, slots)
                spare = slots_of is SlotsOfState.RUNNING and opened.spare_states > 0
                self._lacking += not spare
                if not spare:
                    self._announce()
                    return False
                opened.spare_states -= 1
                slots = self._reserved(opened, self._pages)
        names = b"".join(state_page(after, page) for page in range(self._pages))
        self._send(CommitRun(ticket_id=opened.state.ticket_id, slots=slots, block_hashes=names, after=after))
        self._kept += 1
        return True

    def _end_sequence(self, opened: GrantedTicket) -> None:
        """Lets go of the states of a prefill range that has ended, of which one is kept; another sequence goes on."""
        opened.sequences -= 1
        if opened.sequences:
            spent = opened.spare_states <= opened.sequences
            opened.spare_states = min(opened.spare_states, opened.sequences)
            self.ledger.give_back(self._holder, self._reserved(opened, (STATES - 1 - spent) * self._pages))

    def _reserved(self, opened: GrantedTicket, count: int) -> tuple[int, ...]:
        """Leases slots that were reserved for a ticket."""
        slots = self.ledger.lease_some(self._holder, opened.state.ticket_id, count)
        assert len(slots) == count, "a ticket has reserved less than it needs"
        return slots

    def _send(self, run: CommitRun) -> None:
        [result] = self.ledger.commit(self._holder, [run])
        assert not result.refusal, result.refusal
        lost = [own for own, kept in zip(run.slots, result.slots, strict=True) if own != kept]
        self.ledger.give_back(self._holder, lost)
        self._announce()

    def _announce(self) -> None:
        """Tells the index what came and went."""
        for event in self.ledger.drain_events():
            listed = self._listed.get(event.block_hash)
            self.evicted += not event.here
            if listed is None:
                continue
            index, number = listed
            if event.here:
                index.add(number, self.node_id)
            else:
                index.remove(number, self.node_id)

    def _named(self, blocks: Sequence[int]) -> list[bytes]:
        """Returns the names of the KV blocks of a trace's blocks, whose numbers stand for all that is before them."""
        return [hashlib.sha256(b"%d.%d" % (number, part)).digest() for number in blocks for part in range(self._each)]
