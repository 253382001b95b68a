"""Masks of ``allowed_token_ids``, combined with those of grammars.

A request's mask never changes, so it is made once per stream. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from pillion.kernels.step import Bool, Int64, RowMasks, UInt32

WORD_BITS = 32


def mask_of(token_ids: Collection[int], vocab_size: int) -> UInt32:
    """Return a bit mask of tokens, each below ``vocab_size``: uint32 [ceil(vocab_size / 32)]."""
    mask = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    np.bitwise_or.at(mask, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
    return mask


@dataclass(frozen=True, slots=True)
class AllowedMasks:
    """:class:`pillion.kernels.step.RowMasks` of a step with masks of requests (``allowed_token_ids``).

    Attributes:
        rows: [M], ascending: rows with a request's mask, a grammar's, or both.
        bits: uint32 [M, words], the requests' masks; all bits set for a row with only a grammar's.
        grammars: the grammars' masks; None if no row has a grammar.
    """

    rows: Int64
    bits: UInt32
    grammars: RowMasks | None

    @classmethod
    def of(cls, own: Mapping[int, UInt32], grammars: RowMasks | None) -> AllowedMasks:
        """Return the masks of a step's rows. ``own``: the requests' masks by row, not empty."""
        rows = np.array(sorted({*own, *(() if grammars is None else grammars.rows.tolist())}), np.int64)
        bits = np.full((len(rows), len(next(iter(own.values())))), np.uint32(2**32 - 1))
        for index, row in enumerate(rows.tolist()):
            if row in own:
                bits[index] = own[row]
        return cls(rows, bits, grammars)

    def take(self) -> tuple[UInt32, Bool]:
        """Wait for the grammars' masks; return them combined with the requests'. If no token passes both masks of a
        row, only the grammar's applies."""
        ready = np.ones(len(self.rows), dtype=bool)
        if self.grammars is None:
            return self.bits, ready
        grammar_bits, grammar_ready = self.grammars.take()
        indices = np.searchsorted(self.rows, self.grammars.rows)
        both = self.bits[indices] & grammar_bits
        disjoint = ~both.any(axis=1)
        both[disjoint] = grammar_bits[disjoint]
        bits = self.bits.copy()
        bits[indices], ready[indices] = both, grammar_ready
        return bits, ready
