"""Maintains the table of the ledger's committed blocks, from which they are recovered after a KV node's death.

    commit    the block is in the ledger --its checksum is computed--> its entry is written
    eviction  the block has left the ledger --> its entry is removed --> its slot is leased, written to, ...
    death     blocks with an entry were committed and complete, and their slots have not been writable since
    restart   once no process uses the pool any more (:mod:`pillion.kvstore.pool_survival.surviving_pool`)
              a slot with an entry is claimed --its bytes are intact, and its parent is there--> in the ledger again
                                              '--otherwise--> entry removed --> free

An entry is removed before its slot is leased, because the node passes the ledger's events to
:meth:`SurvivingBlocks.note` in the turn of its loop in which it evicts, before the slot is handed out. An entry is
written some time after the commit, so a death loses the blocks committed just before it.

No I/O (I9): checksums are computed elsewhere and passed to :meth:`SurvivingBlocks.seal` and
:meth:`SurvivingBlocks.resolve`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from pillion.errors import Internal
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.ledger.records import Block, IndexEvent
from pillion.kvstore.pool_survival.slot_table import NO_PARENT, SlotTable, SurvivingBlock


class SurvivingBlocks:
    """The table of one pool, and the surviving blocks that wait to be recovered. Only the node's loop calls it.

    Attributes:
        pending: surviving blocks by hash, in order of writing. The node itself leases their slots.
        recovered, dropped: numbers of surviving blocks that are in the ledger again, and that are lost.
    """

    def __init__(self, ledger: Ledger, table: SlotTable) -> None:
        self.pending: dict[bytes, SurvivingBlock] = {}
        self.recovered = self.dropped = 0
        self._ledger = ledger
        self._table = table
        self._epoch = 0
        # Hashes of pending children by parent hash.
        self._children: dict[bytes, dict[bytes, None]] = {}
        # Committed blocks without an entry in the table, and slots of the committed blocks with one.
        self._unsealed: dict[bytes, None] = {}
        self._slots: dict[bytes, int] = {}

    def claim(self, entries: Iterable[SurvivingBlock]) -> None:
        """Claim the slots of surviving blocks, once, before any slot is leased. ``entries`` are the table's."""
        for entry in entries:
            if entry.hash in self.pending:
                self._table.remove(entry.slot)
            else:
                self.pending[entry.hash] = entry
                self._children.setdefault(entry.parent, {})[entry.hash] = None
        if self.pending:
            self._epoch = self._ledger.claim([entry.slot for entry in self.pending.values()])

    def note(self, events: Iterable[IndexEvent]) -> None:
        """Handle changes of the ledger's blocks. Pass all events, in order, before any freed slot is used."""
        for event in events:
            if event.here:
                # Recovered blocks have their entries already.
                if event.block_hash not in self._slots:
                    self._unsealed[event.block_hash] = None
                continue
            self._unsealed.pop(event.block_hash, None)
            slot = self._slots.pop(event.block_hash, None)
            if slot is not None:
                self._table.remove(slot)

    def unsealed(self, limit: int) -> list[Block]:
        """Return up to ``limit`` committed blocks that have no entry in the table yet."""
        known = self._ledger.tree.by_hash
        return [known[block_hash] for block_hash in islice(self._unsealed, limit)]

    def seal(self, blocks: Sequence[Block], checksums: Sequence[int]) -> None:
        """Write entries for those of ``blocks`` that are still in the ledger. Ignores blocks evicted meanwhile, since
        their checksums may be of overwritten bytes."""
        for block, checksum in zip(blocks, checksums, strict=True):
            if self._ledger.tree.by_hash.get(block.hash) is block and block.hash in self._unsealed:
                del self._unsealed[block.hash]
                block.checksum = checksum
                self._write(block)

    def next_run(self, limit: int) -> list[SurvivingBlock]:
        """Return up to ``limit`` pending blocks of one chain to verify next, parents first; empty at the end."""
        entry = next(iter(self.pending.values()), None)
        while entry is not None and entry.parent in self.pending:
            entry = self.pending[entry.parent]
        run: list[SurvivingBlock] = []
        while entry is not None and len(run) < limit:
            run.append(entry)
            children = self._children.get(entry.hash)
            entry = self.pending[next(iter(children))] if children else None
        return run

    def run_of(self, hashes: Sequence[bytes], limit: int) -> list[SurvivingBlock]:
        """Return up to ``limit`` pending blocks that continue a chain after its blocks in the ledger."""
        run: list[SurvivingBlock] = []
        known = self._ledger.tree.by_hash
        for block_hash in hashes:
            if block_hash in known:
                continue
            entry = self.pending.get(block_hash)
            if entry is None or len(run) >= limit:
                break
            run.append(entry)
        return run

    def resolve(self, run: Sequence[SurvivingBlock], checksums: Sequence[int]) -> int:
        """Add the blocks of a run to the ledger if their checksums match and their parents are in it, and free the
        slots of the other blocks. Return how many were added. ``run``: the latest result of :meth:`next_run` or
        :meth:`run_of`."""
        known, before = self._ledger.tree.by_hash, self.recovered
        good: list[SurvivingBlock] = []
        for entry, checksum in zip(run, checksums, strict=True):
            here = entry.hash in known
            follows = entry.parent == good[-1].hash if good else entry.parent == NO_PARENT or entry.parent in known
            if not here and follows and checksum == entry.checksum:
                good.append(entry)
                continue
            # A later block may continue a chain of recomputed blocks, so go on with the rest of the run.
            self._restore(good)
            good = []
            self._drop(entry, lost=not here)
        self._restore(good)
        if not self.pending:
            self._ledger.end_epoch(self._epoch)
        return self.recovered - before

    def check_integrity(self) -> None:
        """Raise Internal on contradictions between table, ledger and pending blocks. O(slots)."""
        known = self._ledger.tree.by_hash
        entries = {slot: entry for slot in range(self._table.shape.num_slots) if (entry := self._table.read(slot))}
        expected = {slot: block_hash for block_hash, slot in self._slots.items()}
        expected |= {entry.slot: entry.hash for entry in self.pending.values()}
        if expected != {slot: entry.hash for slot, entry in entries.items()}:
            raise Internal("the table has other blocks than those recorded or pending")
        for block_hash, slot in self._slots.items():
            block = known.get(block_hash)
            if block is None or block.slot != slot:
                raise Internal(f"slot {slot} is in the table, and its block is not in the ledger")
        if known.keys() != self._unsealed.keys() | self._slots.keys() or self._unsealed.keys() & self._slots.keys():
            raise Internal("a committed block is neither in the table nor waiting to be written, or both")
        holder = self._ledger.holders.get(self._epoch)
        claimed = set(holder.leased) if holder is not None else set()
        if claimed != {entry.slot for entry in self.pending.values()}:
            raise Internal("the slots of pending blocks are not those that are claimed")

    def _restore(self, run: Sequence[SurvivingBlock]) -> None:
        if not run:
            return
        parent = None if run[0].parent == NO_PARENT else self._ledger.tree.by_hash[run[0].parent]
        blocks = self._ledger.restore(self._epoch, parent, [(entry.slot, entry.hash) for entry in run])
        for block, entry in zip(blocks, run, strict=True):
            self._forget(entry)
            block.checksum = entry.checksum
            self._slots[block.hash] = block.slot
        self.recovered += len(run)

    def _drop(self, entry: SurvivingBlock, *, lost: bool) -> None:
        self._forget(entry)
        self._table.remove(entry.slot)
        self._ledger.return_slots(self._epoch, [entry.slot])
        self.dropped += lost

    def _forget(self, entry: SurvivingBlock) -> None:
        del self.pending[entry.hash]
        siblings = self._children[entry.parent]
        del siblings[entry.hash]
        if not siblings:
            del self._children[entry.parent]

    def _write(self, block: Block) -> None:
        self._table.write(block.slot, block.hash, block.parent_hash or NO_PARENT, block.checksum)
        self._slots[block.hash] = block.slot
