"""Keeps the last, partial blocks of answers: a conversation's next turn begins with a copy of the one that it follows.

    answer ends --> its whole blocks are committed, the slot of the partial one stays here, under the hash of the block
                    before it, with the block's tokens
    prompt joins, its chain ends with that hash --> as many tokens as agree are copied, and count as computed
    memory is short, or too many are kept --> the slot that was used least recently goes back to the free slots

Hashes name whole blocks, so the node knows nothing of a partial one: it is a leased slot of this worker's, which nobody
else reads, and goes with the worker's epoch (I2, I4). Its tokens are compared, and the hash before them covers the
root, so that adapters, salts and kinds of rotary embedding stay apart. The copy is made before the step that goes on
with it, and the reader's own slot is written then (copy-on-write, as for parallel samples). What is gone is computed
(I1).

The slots are at most PARTIAL_BLOCK_PERCENT of the pool, and are the first to go where a decode lacks a slot or
the node asks for some back. Sans-IO (I9).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pillion.engine.scheduling.block_chain import BlockChain
from pillion.engine.scheduling.block_manager import FreeSlots
from pillion.engine.scheduling.sequence import Sequence

# Share of the pool's slots for partial blocks.
PARTIAL_BLOCK_PERCENT = 1


class PartialBlock(BlockChain):
    """Holds one partial block, whose slot is leased to this worker; ``parent_hash`` names the block before it."""

    def __init__(self, sequence: Sequence) -> None:
        """Cuts the block off a sequence that ends. ``unused_slots`` are those that the sequence had behind it."""
        size, block = sequence.block_size, sequence.full_blocks
        tokens = sequence.tokens(block * size, sequence.num_computed).copy()
        self.parent_hash = sequence.hash_before(block)
        super().__init__(0, tokens, size, first_block=0, parent_hash=self.parent_hash)
        self.slot, *self.unused_slots = sequence.cut(block)
        self.add_slot(self.slot)
        self._readers: list[Sequence] = []

    def is_read(self) -> bool:
        """Returns whether a copy of the block is promised that no step has made yet."""
        self._readers = [one for one in self._readers if one.copy_first and one.copy_first[0] == self.slot]
        return bool(self._readers)

    def share(self, sequence: Sequence) -> bool:
        """Lets a sequence begin with a copy of the block; returns False where their first tokens differ. The last
        token, and those whose logits are scored, are not shared."""
        start = sequence.num_computed
        last = sequence.num_tokens - 1 if sequence.unscored_from is None else sequence.unscored_from
        most = max(0, min(last - start, len(self._tokens)))
        equal = self._tokens[:most] == sequence.tokens(start, start + most)
        tokens = most if equal.all() else int(equal.argmin())
        if tokens:
            sequence.share(tokens, self.slot)
            self._readers.append(sequence)
        return tokens > 0


class PartialBlocks:
    """Holds the partial blocks of one scheduler by the hash of the block before each: at most ``most``, and more only
    while they are read. Their slots come from the ``free_slots``, and return there."""

    lacking_blocks = 0

    def __init__(self, most: int, free_slots: FreeSlots) -> None:
        self._most = most
        self._free_slots = free_slots
        # The one that was used least recently is the first.
        self._kept: OrderedDict[bytes, PartialBlock] = OrderedDict()

    def share(self, sequence: Sequence) -> None:
        """Lets a sequence that has joined the queues begin with a copy of a block that agrees with it."""
        kept = self._kept.get(sequence.hash_before(sequence.num_committed)) if self._kept else None
        if kept is not None and sequence.parent is None and kept.share(sequence):
            self._kept.move_to_end(kept.parent_hash)

    def keep(self, sequence: Sequence) -> None:
        """Cuts the last, partial block off a running sequence that ends, if it has one."""
        whole = sequence.num_computed % sequence.block_size == 0
        if whole or not sequence.may_commit or not self._most:
            return
        known = self._kept.get(sequence.hash_before(sequence.full_blocks))
        if known is not None and not self._give_up(1, [known]):
            # Somebody is about to read the block that stands there.
            return
        kept = PartialBlock(sequence)
        self._free_slots.give(kept.unused_slots)
        self._kept[kept.parent_hash] = kept
        self._give_up(len(self._kept) - self._most, self._kept.values())

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Gives up to so many slots back to the free slots. Returns False if it gave none."""
        return self._give_up(blocks, self._kept.values())

    def _give_up(self, count: int, blocks: Iterable[PartialBlock]) -> bool:
        """Returns up to ``count`` slots of these blocks to the free slots, the first ones; those that are read stay.
        Returns whether any went."""
        gone = [kept for kept in blocks if not kept.is_read()][: max(0, count)]
        for kept in gone:
            del self._kept[kept.parent_hash]
            self._free_slots.give((kept.slot,))
        return bool(gone)

    def side_chains(self) -> Iterable[BlockChain]:
        """Returns the partial blocks."""
        return self._kept.values()

    @property
    def kept_blocks(self) -> int:
        """Gives the number of partial blocks, each of which takes a slot."""
        return len(self._kept)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError where too many are kept, or a sequence is promised a copy of a block that is gone."""
        assert len(self._kept) <= self._most + sum(kept.is_read() for kept in self._kept.values())
        promised = {one.copy_first[0] for one in sequences if one.copy_first}
        assert promised <= {kept.slot for kept in self._kept.values()}, "a copy reads a block that is gone"
