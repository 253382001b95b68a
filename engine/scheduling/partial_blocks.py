"""The last, partial blocks of answers, kept so that a conversation's next turn begins with a copy of one.

    answer ends --> its whole blocks are committed; the slot of the partial one is kept with the block's tokens, under
                    the hash of the block before it
    prompt is queued, its chain ends with that hash --> the block is copied; leading tokens that are equal count as
                                                        computed
    memory is short, or too many are kept --> the least recently used slot is freed

Only whole blocks have hashes, so the node has no name for a partial one: it is a leased slot of this worker, which no
other reads, and which is freed with the worker's epoch (I2, I4). Its tokens are compared, and the hash before them
covers the root, so that adapters, salts and kinds of rotary embedding stay apart. The copy is made before the step that
continues from it (copy-on-write, as for parallel samples). What was evicted is recomputed (I1).

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
        """Cut the block off a sequence that ends. ``unused_slots``: the sequence's slots after it, cut off, too."""
        size, block = sequence.block_size, sequence.full_blocks
        tokens = sequence.tokens(block * size, sequence.num_computed).copy()
        self.parent_hash = sequence.hash_before(block)
        super().__init__(0, tokens, size, first_block=0, parent_hash=self.parent_hash)
        self.slot, *self.unused_slots = sequence.cut(block)
        self.add_slot(self.slot)
        self._readers: list[Sequence] = []

    def is_read(self) -> bool:
        """Return whether a copy of the block is ordered, but not scheduled."""
        self._readers = [s for s in self._readers if s.copy_first and s.copy_first[0] == self.slot]
        return bool(self._readers)

    def share(self, sequence: Sequence) -> bool:
        """Order a copy of the block for a sequence that continues with the same tokens; return False if the first ones
        differ. Tokens whose logits are needed, at least the last one, are computed in any case."""
        start = sequence.num_computed
        last = sequence.num_tokens - 1 if sequence.unscored_from is None else sequence.unscored_from
        limit = max(0, min(last - start, len(self._tokens)))
        equal = self._tokens[:limit] == sequence.tokens(start, start + limit)
        tokens = limit if equal.all() else int(equal.argmin())
        if tokens:
            sequence.share(tokens, self.slot)
            self._readers.append(sequence)
        return tokens > 0


class PartialBlocks:
    """The partial blocks of one scheduler, by the hash of the block before each: at most ``max_blocks``, and more only
    while they are to be copied. Evicted slots go to ``free_slots``."""

    lacking_blocks = 0

    def __init__(self, max_blocks: int, free_slots: FreeSlots) -> None:
        self._max_blocks = max_blocks
        self._free_slots = free_slots
        self._kept: OrderedDict[bytes, PartialBlock] = OrderedDict()

    def share(self, sequence: Sequence) -> None:
        """Schedule a copy of the kept partial block that follows a queued sequence's committed blocks, if its leading
        tokens are the same."""
        kept = self._kept.get(sequence.hash_before(sequence.num_committed)) if self._kept else None
        if kept is not None and sequence.parent is None and kept.share(sequence):
            self._kept.move_to_end(kept.parent_hash)

    def keep(self, sequence: Sequence) -> None:
        """Cut the last, partial block off a running sequence that ends, if it has one."""
        whole = sequence.num_computed % sequence.block_size == 0
        if whole or not sequence.may_commit or not self._max_blocks:
            return
        sibling = self._kept.get(sequence.hash_before(sequence.full_blocks))
        if sibling is not None and not self._evict(1, [sibling]):
            return
        kept = PartialBlock(sequence)
        self._free_slots.free(kept.unused_slots)
        self._kept[kept.parent_hash] = kept
        self._evict(len(self._kept) - self._max_blocks, self._kept.values())

    def yield_slots(self, blocks: int, now: float) -> bool:
        """Free up to ``blocks`` slots. Return False if none can be freed."""
        return self._evict(blocks, self._kept.values())

    def _evict(self, count: int, blocks: Iterable[PartialBlock]) -> bool:
        """Free the slots of the first ``count`` of these blocks, except those to be copied. Return False if it freed
        none."""
        evicted = [kept for kept in blocks if not kept.is_read()][: max(0, count)]
        for kept in evicted:
            del self._kept[kept.parent_hash]
            self._free_slots.free((kept.slot,))
        return bool(evicted)

    def side_chains(self) -> Iterable[BlockChain]:
        return self._kept.values()

    @property
    def kept_blocks(self) -> int:
        """Number of partial blocks, each in one slot."""
        return len(self._kept)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if too many blocks are kept, or one that is to be copied was evicted."""
        assert len(self._kept) <= self._max_blocks + sum(kept.is_read() for kept in self._kept.values())
        sources = {s.copy_first[0] for s in sequences if s.copy_first}
        assert sources <= {kept.slot for kept in self._kept.values()}, "a block to be copied was evicted"
