"""A KV node's ledger with its table, workers that write late, and kills between any two stores to the table.

The pool's memory is a list of slot contents. A kill preserves the memory and the table's words alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from pillion.errors import Overloaded
from pillion.kvstore.hashing import chain_hashes, split_hashes
from pillion.kvstore.ledger.integrity import check_integrity
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import PoolShape
from pillion.kvstore.pool_survival.slot_table import POOL_ID_BYTES, WORD_BYTES, SlotTable, table_bytes
from pillion.kvstore.pool_survival.surviving_blocks import SurvivingBlocks
from pillion.v1.kvnode_pb2 import CommitRun

NUM_SLOTS = 10
SHAPE = PoolShape(NUM_SLOTS, 64, "cd" * 32)
GARBAGE = b"not what anybody asked for"
# Two tokens and few slots, so that blocks are constantly shared, evicted and recomputed.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class NodeKilledError(Exception):
    """Simulated end of the node: only its stores remain."""


class MortalWords:
    """A table's memory. ``left``: stores until the node is killed; None: never."""

    def __init__(self, count: int) -> None:
        self.words = [0] * count
        self.left: int | None = None

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, place: int) -> int:
        return self.words[place]

    def __setitem__(self, place: int, word: int) -> None:
        if self.left is not None:
            if not self.left:
                self.left = None
                raise NodeKilledError
            self.left -= 1
        self.words[place] = word


def checksum_of(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content) or 1


@dataclass
class LateWorker:
    """A worker with the slots that it may write to until it has drained."""

    epoch: int
    told: set[int] = field(default_factory=set)


class SurvivingNode:
    """One pool across all restarts of its node."""

    def __init__(self) -> None:
        self.memory = [b""] * NUM_SLOTS
        self.words = MortalWords(table_bytes(NUM_SLOTS) // WORD_BYTES)
        self.ids = itertools.count(1)
        self.deaths = 0
        SlotTable.create(self.words, b"p" * POOL_ID_BYTES, SHAPE)
        self.begin()

    def begin(self) -> None:
        """Start the node; the pool is unused."""
        self.ledger = Ledger(self.ids.__next__, 0)
        self.ledger.shape(NUM_SLOTS)
        table = SlotTable.open(self.words)
        self.kept = SurvivingBlocks(self.ledger, table)
        self.kept.claim(table.blocks())
        self.workers = [LateWorker(self.ledger.attach("worker", "decode")) for _ in range(2)]

    def act(self, what: Callable[[], object]) -> None:
        """Do something during which the node may be killed, and then restart it."""
        try:
            what()
        except NodeKilledError:
            self.die()

    def die(self) -> None:
        """End the node. Its workers write to all their slots until they have drained; then it restarts, which may be
        killed as well."""
        self.deaths += 1
        self.words.left = None
        for worker in self.workers:
            self.scribble(worker)
        self.begin()

    def scribble(self, worker: LateWorker) -> None:
        """Run a worker's step, which writes to its slots."""
        for slot in worker.told:
            self.memory[slot] = GARBAGE

    def changed(self) -> None:
        self.kept.note(self.ledger.drain_events())

    def serve(self, tokens: list[int], number: int) -> None:
        """Run a request from end to end, if there is room at once."""
        worker = self.workers[number % len(self.workers)]
        hashes = split_hashes(chain_hashes(bytes(32), tokens, 1))
        ticket = self.ledger.admit(worker.epoch, next(self.ids), hashes, len(hashes) + 1)
        self.changed()
        if ticket is None:
            return
        left = hashes[ticket.blocks :]
        slots: list[int] = []
        if left:
            try:
                slots = list(self.ledger.adopt(worker.epoch, ticket.ticket_id, len(left)).leased_slots)
            except Overloaded:
                left = []
            self.changed()
            worker.told |= set(slots)
        for slot, block_hash in zip(slots, left, strict=True):
            self.memory[slot] = block_hash
        if left:
            run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))
            worker.told -= set(slots)
            self.ledger.commit(worker.epoch, [run])
            self.changed()
        self.ledger.release(worker.epoch, [ticket.ticket_id])
        self.changed()

    def lease(self, number: int, blocks: int) -> None:
        """Lease slots to a worker, which begins to write to them."""
        worker = self.workers[number % len(self.workers)]
        slots = self.ledger.lease(worker.epoch, blocks)
        self.changed()
        worker.told |= set(slots)
        self.scribble(worker)

    def give_back(self, number: int) -> None:
        worker = self.workers[number % len(self.workers)]
        slots, worker.told = sorted(worker.told), set()
        self.ledger.return_slots(worker.epoch, slots)
        self.changed()

    def seal(self, most: int, between: Callable[[], object] = lambda: None) -> None:
        """Compute checksums in a thread, while something else happens ``between``."""
        blocks = self.kept.unsealed(most)
        sums = [checksum_of(self.memory[block.slot]) for block in blocks]
        between()
        self.kept.seal(blocks, sums)

    def look(self, most: int, tokens: list[int] | None = None) -> None:
        """Check kept blocks: some chain's, or the next ones."""
        hashes = split_hashes(chain_hashes(bytes(32), tokens or [], 1))
        run = self.kept.next_run(most) if tokens is None else self.kept.run_of(hashes, most)
        if run:
            self.kept.resolve(run, [checksum_of(self.memory[entry.slot]) for entry in run])
            self.changed()

    def check(self) -> None:
        """Check that no wrong block can be served, and no slot has two owners."""
        for block_hash, block in self.ledger.tree.by_hash.items():
            assert self.memory[block.slot] == block_hash, f"slot {block.slot} is served and holds something else"
        for worker in self.workers:
            assert worker.told <= self.ledger.holders[worker.epoch].leased.keys()
        check_integrity(self.ledger)
        self.kept.check_integrity()

    def settle(self) -> None:
        """Check and seal everything."""
        while self.kept.pending:
            self.look(3)
        while self.kept.unsealed(1):
            self.seal(3)


def random_act(node: SurvivingNode, chance: Random) -> Callable[[], object]:
    """Draw and run a random event."""
    tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 7))]
    number, most = chance.randrange(2), chance.randrange(1, 4)
    return chance.choice(
        [
            lambda: node.serve(tokens, number),
            lambda: node.serve(tokens, number),
            lambda: node.lease(number, most),
            lambda: node.give_back(number),
            lambda: node.seal(most),
            lambda: node.seal(most, lambda: node.serve(tokens, number)),
            lambda: node.look(most),
            lambda: node.look(most, tokens),
        ]
    )


class MortalLives(RuleBasedStateMachine):
    """Random events of a ``node`` that serves and is killed."""

    node: SurvivingNode

    @rule(tokens=TOKENS, number=st.integers(0, 1))
    def serve(self, tokens: list[int], number: int) -> None:
        self.node.act(lambda: self.node.serve(tokens, number))

    @rule(most=st.integers(1, 4), tokens=st.none() | TOKENS)
    def look(self, most: int, tokens: list[int] | None) -> None:
        self.node.act(lambda: self.node.look(most, tokens))

    @rule(stores=st.integers(0, 30))
    def be_killed_soon(self, stores: int) -> None:
        self.node.words.left = stores

    @rule()
    def be_killed(self) -> None:
        self.node.die()
