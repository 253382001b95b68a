"""The last, partial blocks of answers: a conversation's next turn begins with a copy of the one before.

    answer ends --> its whole blocks are committed, the slot of the partial one stays here, under the hash of the block
                    before it, with the block's tokens
    prompt joins, its chain ends with that hash --> as many tokens as agree are copied, and count as computed
    memory is short, or too many are kept --> the slot that was used least recently goes back to the free slots

Hashes are of whole blocks, so a partial one is unknown to the node: it is a leased slot of this worker, read by no
other and freed with the worker's epoch (I2, I4). Its tokens are compared, and the hash before them covers the root, so
that adapters, salts and kinds of rotary embedding stay apart. The copy is made before the step that continues from it
(copy-on-write, as for parallel samples). What is gone is recomputed (I1).

The slots are at most PARTIAL_BLOCK_PERCENT of the pool, and the first to be freed if a decode lacks a slot or the
node asks for some. Sans-IO (I9).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pillion.engine.scheduling.block_chain import BlockChain
from pillion.engine.scheduling.block_manager import FreeSlots
from pillion.engine.scheduling.sequence import Sequence

PARTIAL_BLOCK_PERCENT = 1


class PartialBlock(BlockChain):
    """One partial block, in a slot leased to this worker; ``parent_hash`` is that of the block before it."""

    def __init__(self, sequence: Sequence) -> None:
        """Cut the block off a sequence that ends. ``unused_slots`` are those that the sequence had after it."""
        size, block = sequence.block_size, sequence.full_blocks
        tokens = sequence.tokens(block * size, sequence.num_computed).copy()
        self.parent_hash = sequence.hash_before(block)
        super().__init__(0, tokens, size, first_block=0, parent_hash=self.parent_hash)
        self.slot, *self.unused_slots = sequence.cut(block)
        self.add_slot(self.slot)
        self._readers: list[Sequence] = []

    def is_read(self) -> bool:
        """Return whether a promised copy of the block has not been made yet."""
        self._readers = [one for one in self._readers if one.copy_first and one.copy_first[0] == self.slot]
        return bool(self._readers)

    def share(self, sequence: Sequence) -> bool:
        """Let a sequence begin with a copy of the block; return False if their first tokens differ. The last token, and
        those whose logits are scored, are not shared."""
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
    """The partial blocks of one scheduler, by the hash of the block before each: at most ``most``, and more only while
    they are read. Their slots come from the ``free_slots`` and return there."""

    lacking_blocks = 0

    def __init__(self, most: int, free_slots: FreeSlots) -> None:
        self._most = most
        self._free_slots = free_slots
        self._kept: OrderedDict[bytes, PartialBlock] = OrderedDict()

    def share(self, sequence: Sequence) -> None:
        """Let a sequence that has joined the queues begin with a copy of a matching block."""
        kept = self._kept.get(sequence.hash_before(sequence.num_committed)) if self._kept else None
        if kept is not None and sequence.parent is None and kept.share(sequence):
            self._kept.move_to_end(kept.parent_hash)

    def keep(self, sequence: Sequence) -> None:
        """Cut the last, partial block off a running sequence that ends, if it has one."""
        whole = sequence.num_computed % sequence.block_size == 0
        if whole or not sequence.may_commit or not self._most:
            return
        known = self._kept.get(sequence.hash_before(sequence.full_blocks))
        if known is not None and not self._give_up(1, [known]):
            return
        kept = PartialBlock(sequence)
        self._free_slots.give(kept.unused_slots)
        self._kept[kept.parent_hash] = kept
        self._give_up(len(self._kept) - self._most, self._kept.values())

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Free up to ``blocks`` slots. Return False if none."""
        return self._give_up(blocks, self._kept.values())

    def _give_up(self, count: int, blocks: Iterable[PartialBlock]) -> bool:
        """Free up to ``count`` slots of these blocks, in order, but not of blocks that are read. Return whether any
        were."""
        gone = [kept for kept in blocks if not kept.is_read()][: max(0, count)]
        for kept in gone:
            del self._kept[kept.parent_hash]
            self._free_slots.give((kept.slot,))
        return bool(gone)

    def side_chains(self) -> Iterable[BlockChain]:
        return self._kept.values()

    @property
    def kept_blocks(self) -> int:
        """Number of partial blocks, each in one slot."""
        return len(self._kept)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if too many are kept, or a sequence is promised a copy of a block that is gone."""
        assert len(self._kept) <= self._most + sum(kept.is_read() for kept in self._kept.values())
        promised = {one.copy_first[0] for one in sequences if one.copy_first}
        assert promised <= {kept.slot for kept in self._kept.values()}, "a copy reads a block that is gone"
