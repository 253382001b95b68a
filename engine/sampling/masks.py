"""Masks of allowed tokens, and the choice of tokens under them.

Most masks allow nearly all tokens or very few, so logits are seldom masked (:class:`AllowedTokens`). If a row's
likeliest token is allowed, the row draws among all tokens and rejects banned candidates. If few tokens are allowed, the
row compares only these. In any other row the logits of banned tokens become -inf. Logit edits, filters and log
probabilities need masked logits, so if a row with a mask has any of them, all masks are applied to the logits first
(:func:`mask_rows`). Both ways choose exactly the same tokens, so a row's token does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from pillion.engine.sampling.allowed_masks import WORD_BITS
from pillion.engine.sampling.cuts import cut_rows
from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.kernels.step import NO_IDS, Bool, Float32, Int64, RowEdit, SamplingRows, UInt32

# Max allowed tokens of a row that are all compared, without masking its logits.
FEW_TOKENS = 512
# In place of a mask's index: the row has no banned candidates, because it has no mask, its logits are masked, or its
# candidates are the few tokens that its mask allows.
_ANY = -1


def mask_rows(table: Float32, rows: Int64, bits: UInt32, edits: tuple[RowEdit, ...]) -> tuple[RowEdit, ...]:
    """Mask ``rows`` [M] of logits [R, V] in place by ``bits`` [M, words]. Return the edits of
    :func:`possible_bans`."""
    for row, mask in zip(rows.tolist(), bits, strict=True):
        keep_allowed(table[row], mask)
    return possible_bans(edits, rows, bits)


def possible_bans(edits: tuple[RowEdit, ...], rows: Int64, bits: UInt32) -> tuple[RowEdit, ...]:
    """Return the edits, without the bans of each row that they would leave no token. ``rows`` [M]: rows with a mask;
    ``bits`` [M, words]: their masks."""
    edits_of = {edit.row: edit for edit in edits if len(edit.banned)}
    for row, mask in zip(rows.tolist(), bits, strict=True) if edits_of else ():
        edit = edits_of.get(row)
        if edit is not None and _bans_all(mask, edit.banned):
            edits_of[row] = replace(edit, banned=NO_IDS)
    return tuple(edits_of.get(edit.row, edit) for edit in edits)


def keep_allowed(row: Float32, mask: UInt32) -> None:
    """Set the logits of a row [V] to -inf except where ``mask``, uint32 [ceil(V / 32)], has a bit set."""
    if 2 * int(np.bitwise_count(mask).sum()) > len(row):
        row[_set_bits(~mask[None], len(row))[1]] = -np.inf
        return
    allowed = _set_bits(mask[None], len(row))[1]
    kept = row[allowed]
    row.fill(-np.inf)
    row[allowed] = kept


def _bans_all(mask: UInt32, banned: Int64) -> bool:
    """Return whether ``banned`` contains all tokens that ``mask`` allows."""
    left = mask.copy()
    ids = banned[banned < WORD_BITS * len(mask)]
    np.bitwise_and.at(left, ids // WORD_BITS, ~(np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)))
    return not left.any()


@dataclass(slots=True)
class AllowedTokens:
    """Masks of a step whose logits are not masked in advance; they filter candidates.

    Attributes:
        rows: [M], ascending: the rows with a mask.
        bits: uint32 [M, words], their masks.
    """

    rows: Int64
    bits: UInt32
    # Per row: the index of its mask in ``bits`` if its likeliest token is allowed, else _ANY.
    _mask_of_row: Int64 = field(default_factory=lambda: NO_IDS)
    # (row, token) of all allowed tokens in rows with at most FEW_TOKENS, in ascending order.
    _few_rows: Int64 = field(default_factory=lambda: NO_IDS)
    _few_ids: Int64 = field(default_factory=lambda: NO_IDS)

    @classmethod
    def of(cls, rows: Int64, bits: UInt32, sampling: SamplingRows) -> AllowedTokens | None:
        """Return the masks of ``rows`` [M]; None if edits, filters or reports need masked logits."""
        if sampling.edits or cut_rows(sampling)[rows].any() or (sampling.logprobs[rows] >= 0).any():
            return None
        return cls(rows, bits)

    def settle(self, table: Float32, maxima: Float32, tokens: Int64, broken: Bool) -> None:
        """Apply the masks of rows whose likeliest token is banned: list their allowed tokens if they are few, otherwise
        mask their logits in ``table`` [R, W].

        Updates, in those rows, the likeliest tokens [R], the maxima of groups [R, G] (-inf if few are allowed), and
        ``broken`` [R]: the largest logit is not finite.
        """
        each = np.arange(len(self.rows))
        allowed = self._has(each, tokens[self.rows])
        self._mask_of_row = np.full(len(table), _ANY)
        self._mask_of_row[self.rows[allowed]] = each[allowed]
        banned = each[~allowed]
        if not len(banned):
            return
        masks = self.bits[banned]
        few = np.bitwise_count(masks).sum(axis=1) <= FEW_TOKENS
        if few.any():
            maxima[self.rows[banned[few]]] = -np.inf
            self._list_few(self.rows[banned[few]], masks[few], table, tokens, broken)
        for row, mask in zip(self.rows[banned[~few]].tolist(), masks[~few], strict=True):
            keep_allowed(table[row], mask)
            maxima[row] = table[row].reshape(-1, GROUP_TOKENS).max(axis=1)
            tokens[row] = table[row].argmax()
            broken[row] = not isfinite(table[row, tokens[row]])

    def _list_few(self, rows: Int64, masks: UInt32, table: Float32, tokens: Int64, broken: Bool) -> None:
        """List the tokens that the masks of ``rows`` allow, and find each row's likeliest one."""
        indices, ids = _set_bits(masks, table.shape[1])
        self._few_rows, self._few_ids = rows[indices], ids
        values = table[self._few_rows, ids]
        ends = np.searchsorted(indices, np.arange(1, len(rows) + 1)).tolist()
        for row, begin, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
            best = begin + int(values[begin:end].argmax()) if end > begin else -1
            broken[row] = best < 0 or not isfinite(values[best])
            tokens[row] = ids[best] if best >= 0 else 0

    def pass_over(self, totals: Float32, rows: Int64, tokens: Int64) -> None:
        """Set the totals [S, G] of banned tokens to -inf, in rows whose largest total is a banned token's. tokens[i, g]
        of row rows[i] has totals[i, g]."""
        masked = np.flatnonzero(self._mask_of_row[rows] >= 0)
        best = totals[masked].argmax(axis=1)
        wrong = masked[~self._has(self._mask_of_row[rows[masked]], tokens[masked, best])]
        if len(wrong):
            allowed = self._has(self._mask_of_row[rows[wrong], None], tokens[wrong])
            totals[wrong] = np.where(allowed, totals[wrong], np.float32(-np.inf))

    def candidates(self, rows: Int64, at: Int64, tokens: Int64) -> tuple[Int64, Int64]:
        """Drop banned candidates, and add all allowed tokens of rows with few. Candidate n is token tokens[n] of row
        rows[at[n]]. Returns the new ``at`` and ``tokens``, sorted by both."""
        masks = self._mask_of_row[rows[at]]
        allowed = masks == _ANY
        masked = np.flatnonzero(masks >= 0)
        allowed[masked] = self._has(masks[masked], tokens[masked])
        at, tokens = at[allowed], tokens[allowed]
        if not len(self._few_rows):
            return at, tokens
        index_of = np.full(len(self._mask_of_row), -1)
        index_of[rows] = np.arange(len(rows))
        few_at = index_of[self._few_rows]
        at = np.concatenate((at, few_at[few_at >= 0]))
        order = np.argsort(at, kind="stable")
        return at[order], np.concatenate((tokens, self._few_ids[few_at >= 0]))[order]

    def _has(self, masks: Int64, tokens: Int64) -> Bool:
        """Return whether masks, by their indices in ``bits``, allow tokens; both arguments broadcast."""
        words = np.minimum(tokens // WORD_BITS, self.bits.shape[1] - 1) + masks * self.bits.shape[1]
        shifted = self.bits.reshape(-1).take(words) >> (tokens % WORD_BITS).astype(np.uint32)
        allowed: Bool = shifted & np.uint32(1) != 0
        return allowed


def _set_bits(masks: UInt32, width: int) -> tuple[Int64, Int64]:
    """Return the rows and columns of the bits set in ``masks`` [M, words], in ascending order; columns from ``width``
    on are ignored."""
    words = np.flatnonzero(masks != 0)
    bits = np.unpackbits(masks.reshape(-1)[words].view(np.uint8), bitorder="little")
    bit = np.flatnonzero(bits.view(np.bool_))
    index = bit // WORD_BITS
    rows = words[index] // masks.shape[1]
    columns = bit + (words[index] - index - rows * masks.shape[1]) * WORD_BITS
    if WORD_BITS * masks.shape[1] > width:
        rows, columns = rows[columns < width], columns[columns < width]
    return rows, columns
