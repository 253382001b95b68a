"""Masks of ``allowed_token_ids``, combined with those of grammars.

A request's mask never changes, so it is made once per stream. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from pillion.kernels.step import Bool, Int64, RowMasks, UInt32

_WORD_BITS = 32
_ALL = np.uint32(2**32 - 1)


def mask_of(token_ids: Collection[int], vocab_size: int) -> UInt32:
    """Return the mask of these tokens, uint32 [ceil(vocab_size / 32)]; all are below ``vocab_size``."""
    mask = np.zeros(-(-vocab_size // _WORD_BITS), np.uint32)
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    np.bitwise_or.at(mask, ids // _WORD_BITS, np.uint32(1) << (ids % _WORD_BITS).astype(np.uint32))
    return mask


@dataclass(frozen=True, slots=True)
class AllowedMasks:
    """:class:`pillion.kernels.step.RowMasks` for rows with their own masks.

    Attributes:
        rows: [M] rising numbers of the rows with such a mask, a grammar, or both.
        bits: uint32 [M, words], the rows' own masks; all bits set for a row with only a grammar.
        grammars: the masks of grammars; None if no row has one.
    """

    rows: Int64
    bits: UInt32
    grammars: RowMasks | None

    @classmethod
    def of(cls, own: Mapping[int, UInt32], grammars: RowMasks | None) -> AllowedMasks:
        """Return the masks of a step's rows: ``own`` by row, at least one, and those of grammars."""
        rows = np.array(sorted({*own, *(() if grammars is None else grammars.rows.tolist())}), np.int64)
        bits = np.full((len(rows), len(next(iter(own.values())))), _ALL)
        for place, row in enumerate(rows.tolist()):
            if row in own:
                bits[place] = own[row]
        return cls(rows, bits, grammars)

    def take(self) -> tuple[UInt32, Bool]:
        """Wait for the grammars' masks. If a grammar allows none of a row's own tokens, it decides alone."""
        there = np.ones(len(self.rows), dtype=bool)
        if self.grammars is None:
            return self.bits, there
        found, present = self.grammars.take()
        places = np.searchsorted(self.rows, self.grammars.rows)
        both = self.bits[places] & found
        alone = ~both.any(axis=1)
        both[alone] = found[alone]
        bits = self.bits.copy()
        bits[places], there[places] = both, present
        return bits, there
