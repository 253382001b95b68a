"""Masks of grammars: a row chooses among the tokens that its mask allows.

Most masks allow nearly all tokens or very few, so logits are seldom masked (:class:`AllowedTokens`). If a row's
likeliest token is allowed, the row draws among all tokens and rejects banned candidates. If few tokens are allowed, the
row compares just these. In any other row the logits of banned tokens become -inf. Logit edits, top_k, top_p and log
probabilities need masked logits, so if a row with a mask has one of them, all rows with a mask are masked first
(:func:`mask_rows`). Both ways choose the same tokens, bit by bit, whatever the other rows of the step need.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from pillion.engine.sampling.cuts import cut_rows
from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.kernels.step import NO_IDS, Bool, Float32, Int64, RowEdit, SamplingRows, UInt32

# Max allowed tokens of a mask for the sampler to compare all of them.
FEW_TOKENS = 512
# Place of a row without banned candidates: it has no mask, its logits are masked, or its candidates are the few tokens
# that its mask allows.
_ANY = -1
_ONE = np.uint32(1)
_WORD_BITS = 32


def mask_rows(table: Float32, rows: Int64, bits: UInt32, edits: tuple[RowEdit, ...]) -> tuple[RowEdit, ...]:
    """Mask ``rows`` [M] of logits [R, V] in place by ``bits`` [M, words]. Return the edits without bans that would
    leave a row nothing to choose."""
    for row, mask in zip(rows.tolist(), bits, strict=True):
        keep_allowed(table[row], mask)
    return possible_bans(edits, rows, bits)


def possible_bans(edits: tuple[RowEdit, ...], rows: Int64, bits: UInt32) -> tuple[RowEdit, ...]:
    """Return the edits without bans that would leave one of ``rows`` [M], with masks ``bits`` [M, words], nothing to
    choose."""
    edits_of = {edit.row: edit for edit in edits if len(edit.banned)}
    for row, mask in zip(rows.tolist(), bits, strict=True) if edits_of else ():
        edit = edits_of.get(row)
        if edit is not None and _bans_all(mask, edit.banned):
            edits_of[row] = replace(edit, banned=NO_IDS)
    return tuple(edits_of.get(edit.row, edit) for edit in edits)


def keep_allowed(row: Float32, mask: UInt32) -> None:
    """Set the logits of a row [V] to -inf where the mask, uint32 [ceil(V / 32)], has no bit set."""
    if 2 * int(np.bitwise_count(mask).sum()) > len(row):
        row[_set_bits(~mask[None], len(row))[1]] = -np.inf
        return
    allowed = _set_bits(mask[None], len(row))[1]
    kept = row[allowed]
    row.fill(-np.inf)
    row[allowed] = kept


def _bans_all(mask: UInt32, banned: Int64) -> bool:
    left = mask.copy()
    ids = banned[banned < _WORD_BITS * len(mask)]
    np.bitwise_and.at(left, ids // _WORD_BITS, ~(_ONE << (ids % _WORD_BITS).astype(np.uint32)))
    return not left.any()


@dataclass(slots=True)
class AllowedTokens:
    """The masks of a step's rows, for candidates of rows whose logits are not masked.

    Attributes:
        rows: [M] rising numbers of the rows with a mask.
        bits: uint32 [M, words], their masks.
    """

    rows: Int64
    bits: UInt32
    # By row: the index of its mask in ``bits`` if its likeliest token is allowed, else _ANY.
    _places: Int64 = field(default_factory=lambda: NO_IDS)
    # Every allowed token of the rows with few, and its row; ordered by row and token.
    _few_rows: Int64 = field(default_factory=lambda: NO_IDS)
    _few_ids: Int64 = field(default_factory=lambda: NO_IDS)

    @classmethod
    def of(cls, rows: Int64, bits: UInt32, sampling: SamplingRows) -> AllowedTokens | None:
        """Return what ``rows`` may choose; None if edits, cuts or reports need their masked logits."""
        if sampling.edits or cut_rows(sampling)[rows].any() or (sampling.logprobs[rows] >= 0).any():
            return None
        return cls(rows, bits)

    def settle(self, table: Float32, maxima: Float32, tokens: Int64, broken: Bool) -> None:
        """Decide how each row is chosen, by its likeliest token among all [R], its group maxima [R, G], and whether its
        largest logit is not finite [R]. For rows whose likeliest token is banned, set these to the allowed tokens',
        with maxima of -inf if few are allowed. May mask rows of ``table`` [R, W]."""
        each = np.arange(len(self.rows))
        fits = self._has(each, tokens[self.rows])
        self._places = np.full(len(table), _ANY)
        self._places[self.rows[fits]] = each[fits]
        others = each[~fits]
        if not len(others):
            return
        masks = self.bits[others]
        few = np.bitwise_count(masks).sum(axis=1) <= FEW_TOKENS
        if few.any():
            maxima[self.rows[others[few]]] = -np.inf
            self._list_few(self.rows[others[few]], masks[few], table, tokens, broken)
        for row, mask in zip(self.rows[others[~few]].tolist(), masks[~few], strict=True):
            keep_allowed(table[row], mask)
            maxima[row] = table[row].reshape(-1, GROUP_TOKENS).max(axis=1)
            tokens[row] = table[row].argmax()
            broken[row] = not isfinite(table[row, tokens[row]])

    def _list_few(self, rows: Int64, masks: UInt32, table: Float32, tokens: Int64, broken: Bool) -> None:
        """List the tokens that these masks of ``rows`` allow, and find the likeliest ones."""
        places, ids = _set_bits(masks, table.shape[1])
        self._few_rows, self._few_ids = rows[places], ids
        values = table[self._few_rows, ids]
        ends = np.searchsorted(places, np.arange(1, len(rows) + 1)).tolist()
        for row, begin, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
            best = begin + int(values[begin:end].argmax()) if end > begin else -1
            broken[row] = best < 0 or not isfinite(values[best])
            tokens[row] = ids[best] if best >= 0 else 0

    def pass_over(self, totals: Float32, rows: Int64, tokens: Int64) -> None:
        """Set the totals [S, G] of banned ``tokens`` [S, G] of ``rows`` [S] to -inf, in every row whose largest total
        is one of them."""
        masked = np.flatnonzero(self._places[rows] >= 0)
        best = totals[masked].argmax(axis=1)
        wrong = masked[~self._has(self._places[rows[masked]], tokens[masked, best])]
        if len(wrong):
            allowed = self._has(self._places[rows[wrong], None], tokens[wrong])
            totals[wrong] = np.where(allowed, totals[wrong], np.float32(-np.inf))

    def candidates(self, rows: Int64, at: Int64, tokens: Int64) -> tuple[Int64, Int64]:
        """Drop banned candidates, each a token [N] of the row at a place [N] in ``rows`` [S], and add all tokens of
        rows that have few. Both results are ordered by row, then by token."""
        places = self._places[rows[at]]
        fits = places == _ANY
        some = np.flatnonzero(places >= 0)
        fits[some] = self._has(places[some], tokens[some])
        at, tokens = at[fits], tokens[fits]
        if not len(self._few_rows):
            return at, tokens
        place_of = np.full(len(self._places), -1)
        place_of[rows] = np.arange(len(rows))
        own = place_of[self._few_rows]
        at = np.concatenate((at, own[own >= 0]))
        order = np.argsort(at, kind="stable")
        return at[order], np.concatenate((tokens, self._few_ids[own >= 0]))[order]

    def _has(self, places: Int64, tokens: Int64) -> Bool:
        """Return whether the masks at these places have these tokens, which broadcast."""
        words = np.minimum(tokens // _WORD_BITS, self.bits.shape[1] - 1) + places * self.bits.shape[1]
        found: Bool = (self.bits.reshape(-1).take(words) >> (tokens % _WORD_BITS).astype(np.uint32)) & _ONE != 0
        return found


def _set_bits(masks: UInt32, width: int) -> tuple[Int64, Int64]:
    """Return row and number of each bit below ``width`` that is set in ``masks`` [M, words], ordered by both."""
    words = np.flatnonzero(masks != 0)
    bits = np.unpackbits(masks.reshape(-1)[words].view(np.uint8), bitorder="little")
    found = np.flatnonzero(bits.view(np.bool_))
    place = found // _WORD_BITS
    rows = words[place] // masks.shape[1]
    numbers = found + (words[place] - place - rows * masks.shape[1]) * _WORD_BITS
    if _WORD_BITS * masks.shape[1] > width:
        rows, numbers = rows[numbers < width], numbers[numbers < width]
    return rows, numbers
