"""A KV node's ledger with its table, workers that write late, and kills between any two stores to the table.

The pool's memory is a list of what each slot holds. Everything that a kill leaves is the memory and the table's words.
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
# Two tokens and few slots: blocks are shared, evicted and computed again all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


class NodeKilledError(Exception):
    """The node ends here: what it has stored stays, and nothing else of it."""


class MortalWords:
    """A table's memory. ``left``: stores until the node is killed; None: it is not."""

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
    """A worker: slots that it was told of, and may write to until it has drained."""

    epoch: int
    told: set[int] = field(default_factory=set)


class SurvivingNode:
    """One pool over all lives of its node."""

    def __init__(self) -> None:
        self.memory = [b""] * NUM_SLOTS
        self.words = MortalWords(table_bytes(NUM_SLOTS) // WORD_BYTES)
        self.ids = itertools.count(1)
        self.deaths = 0
        SlotTable.create(self.words, b"p" * POOL_ID_BYTES, SHAPE)
        self.begin()

    def begin(self) -> None:
        """A life of the node begins; nobody uses the pool."""
        self.ledger = Ledger(self.ids.__next__, 0)
        self.ledger.shape(NUM_SLOTS)
        table = SlotTable.found(self.words)
        self.kept = SurvivingBlocks(self.ledger, table)
        self.kept.claim(table.blocks())
        self.workers = [LateWorker(self.ledger.attach("worker", "decode")) for _ in range(2)]

    def act(self, what: Callable[[], object]) -> None:
        """Does something that the node may be killed in, and begins its next life then."""
        try:
            what()
        except NodeKilledError:
            self.die()

    def die(self) -> None:
        """The node ends. Its workers write to all they were told of until they have drained; then the next life begins,
        which may be killed, too."""
        self.deaths += 1
        self.words.left = None
        for worker in self.workers:
            self.scribble(worker)
        self.begin()

    def scribble(self, worker: LateWorker) -> None:
        """A worker's step writes to slots that it holds."""
        for slot in worker.told:
            self.memory[slot] = GARBAGE

    def changed(self) -> None:
        self.kept.note(self.ledger.drain_events())

    # -- what the node does

    def serve(self, tokens: list[int], number: int) -> None:
        """A request from end to end, if there is room at once."""
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
            # A kill in here: the worker is never told of them.
            self.changed()
            worker.told |= set(slots)
        for slot, block_hash in zip(slots, left, strict=True):
            self.memory[slot] = block_hash
        if left:
            run = CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=b"".join(left))
            # What it has written whole it does not write to again, whether the answer comes or not.
            worker.told -= set(slots)
            self.ledger.commit(worker.epoch, [run])
            self.changed()
        self.ledger.release(worker.epoch, [ticket.ticket_id])
        self.changed()

    def lease(self, number: int, blocks: int) -> None:
        """A worker holds slots, and begins to write to them."""
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
        """Checksums are computed in a thread, while something else happens ``between``."""
        blocks = self.kept.unsealed(most)
        sums = [checksum_of(self.memory[block.slot]) for block in blocks]
        between()
        self.kept.seal(blocks, sums)

    def look(self, most: int, tokens: list[int] | None = None) -> None:
        """Kept blocks are looked at: some chain's, or the next ones."""
        hashes = split_hashes(chain_hashes(bytes(32), tokens or [], 1))
        run = self.kept.next_run(most) if tokens is None else self.kept.run_of(hashes, most)
        if run:
            self.kept.take(run, [checksum_of(self.memory[entry.slot]) for entry in run])
            self.changed()

    # -- what holds

    def check(self) -> None:
        """No wrong block can be served, and no slot is in two hands."""
        for block_hash, block in self.ledger.tree.by_hash.items():
            assert self.memory[block.slot] == block_hash, f"slot {block.slot} is served and holds something else"
        for worker in self.workers:
            assert worker.told <= self.ledger.holders[worker.epoch].leased.keys()
        check_integrity(self.ledger)
        self.kept.check_integrity()

    def settle(self) -> None:
        """Everything is looked at and sealed."""
        while self.kept.pending:
            self.look(3)
        while self.kept.unsealed(1):
            self.seal(3)


def random_act(node: SurvivingNode, chance: Random) -> Callable[[], object]:
    """Something that may happen next."""
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
    """What befalls a ``node`` that serves and is killed, whatever else does."""

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
