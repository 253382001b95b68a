"""Applies masks of grammars: a row chooses among the tokens that its mask allows.

Most masks allow nearly all tokens or very few. So logits are seldom touched (:class:`AllowedTokens`): a row whose
likeliest token is allowed races among all tokens and passes over the banned ones; the few tokens of another row are
looked at one by one; only a row that has neither gets minus infinity for what it may not choose. Where a mask meets
edits, cuts or reports, which need all its logits, the whole row is masked (:func:`mask_rows`). Both ways choose the
same tokens, bit by bit, so which one a row takes may depend on the others of its step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from pillion.engine.sampling.gumbel import GROUP_TOKENS
from pillion.engine.sampling.sampling_rows import NO_IDS, Bool, Float32, Int64, RowEdit, SamplingRows, UInt32

# A row that may choose at most this many tokens looks at each of them.
FEW_TOKENS = 512
# A row that may choose any token that has a logit above minus infinity, and a row with few tokens.
_ANY, _FEW = -1, -2
_ONE = np.uint32(1)
_WORD_BITS = 32


def mask_rows(table: Float32, rows: Int64, bits: UInt32, edits: tuple[RowEdit, ...]) -> tuple[RowEdit, ...]:
    """Masks ``rows`` [M] of logits [R, V] in place, whose masks are ``bits`` [M, words]. Returns the edits without the
    bans that would leave a row nothing to choose."""
    for row, mask in zip(rows.tolist(), bits, strict=True):
        keep_allowed(table[row], mask)
    return possible_bans(edits, rows, bits)


def possible_bans(edits: tuple[RowEdit, ...], rows: Int64, bits: UInt32) -> tuple[RowEdit, ...]:
    """Returns the edits without the bans that would leave one of ``rows`` [M], whose masks are ``bits`` [M, words],
    nothing to choose."""
    edits_of = {edit.row: edit for edit in edits if len(edit.banned)}
    for row, mask in zip(rows.tolist(), bits, strict=True) if edits_of else ():
        edit = edits_of.get(row)
        if edit is not None and _bans_all(mask, edit.banned):
            edits_of[row] = replace(edit, banned=NO_IDS)
    return tuple(edits_of.get(edit.row, edit) for edit in edits)


def keep_allowed(row: Float32, mask: UInt32) -> None:
    """Makes the logits of a row [V] minus infinity where the mask, uint32 [ceil(V / 32)], has no bit set."""
    if 2 * int(np.bitwise_count(mask).sum()) > len(row):
        row[_ids(~mask, len(row))] = -np.inf
        return
    allowed = _ids(mask, len(row))
    kept = row[allowed]
    row.fill(-np.inf)
    row[allowed] = kept


def _ids(mask: UInt32, width: int) -> Int64:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:width]
    return np.flatnonzero(bits.view(np.bool_))


def _bans_all(mask: UInt32, banned: Int64) -> bool:
    left = mask.copy()
    ids = banned[banned < _WORD_BITS * len(mask)]
    np.bitwise_and.at(left, ids // _WORD_BITS, ~(_ONE << (ids % _WORD_BITS).astype(np.uint32)))
    return not left.any()


@dataclass(slots=True)
class AllowedTokens:
    """Says what the rows of a step may choose, while their logits are whole.

    Attributes:
        rows: [M] rising numbers of the rows with a mask.
        bits: uint32 [M, words], their masks.
        few_rows, few_ids: [F], the tokens of rows that look at them one by one, ordered by row, then by token;
            :meth:`settle` finds them.
    """

    rows: Int64
    bits: UInt32
    few_rows: Int64 = field(default_factory=lambda: NO_IDS)
    few_ids: Int64 = field(default_factory=lambda: NO_IDS)
    # This is the place in ``bits`` of each row whose likeliest token is allowed; other rows have one of the numbers
    # below 0.
    _places: Int64 = field(default_factory=lambda: NO_IDS)

    @classmethod
    def of(cls, rows: Int64, bits: UInt32, sampling: SamplingRows) -> AllowedTokens | None:
        """Returns what ``rows`` may choose; None where edits, cuts or reports need their masked logits."""
        if sampling.edits or sampling.cut[rows].any() or (sampling.logprobs[rows] >= 0).any():
            return None
        return cls(rows, bits)

    def settle(self, table: Float32, maxima: Float32, tokens: Int64, broken: Bool) -> None:
        """Finds out how each row is chosen, by its likeliest token among all [R], its group maxima [R, G], and whether
        its largest logit is not finite [R]. Writes what they are among the allowed ones for rows whose likeliest token
        is banned, but for the maxima of rows with few tokens. May mask rows of ``table`` [R, W]."""
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
            self._look_at(self.rows[others[few]], masks[few], table, tokens, broken)
        for row, mask in zip(self.rows[others[~few]].tolist(), masks[~few], strict=True):
            keep_allowed(table[row], mask)
            maxima[row] = table[row].reshape(-1, GROUP_TOKENS).max(axis=1)
            tokens[row] = table[row].argmax()
            broken[row] = not isfinite(table[row, tokens[row]])

    def _look_at(self, rows: Int64, masks: UInt32, table: Float32, tokens: Int64, broken: Bool) -> None:
        """Lists the tokens of ``rows`` with few, whose masks these are, and finds the likeliest ones."""
        self._places[rows] = _FEW
        places, ids = _set_bits(masks)
        if _WORD_BITS * masks.shape[1] > table.shape[1]:
            within = ids < table.shape[1]
            places, ids = places[within], ids[within]
        self.few_rows, self.few_ids = rows[places], ids
        values = table[self.few_rows, ids]
        ends = np.searchsorted(places, np.arange(1, len(rows) + 1)).tolist()
        for row, begin, end in zip(rows.tolist(), [0, *ends], ends, strict=False):
            best = begin + int(values[begin:end].argmax()) if end > begin else -1
            broken[row] = best < 0 or not isfinite(values[best])
            tokens[row] = ids[best] if best >= 0 else 0

    def pass_over(self, totals: Float32, rows: Int64, tokens: Int64) -> None:
        """Makes the totals [S, G] of those ``tokens`` [S, G] that ``rows`` [S] may not choose minus infinity, in every
        row whose largest total is one of them."""
        masked = np.flatnonzero(self._places[rows] >= 0)
        best = totals[masked].argmax(axis=1)
        wrong = masked[~self._has(self._places[rows[masked]], tokens[masked, best])]
        if len(wrong):
            allowed = self._has(self._places[rows[wrong], None], tokens[wrong])
            totals[wrong] = np.where(allowed, totals[wrong], np.float32(-np.inf))

    def is_few(self, rows: Int64) -> Bool:
        """Returns which of ``rows`` [S] look at their tokens one by one."""
        found: Bool = self._places[rows] == _FEW
        return found

    def candidates(self, rows: Int64, at: Int64, tokens: Int64) -> tuple[Int64, Int64]:
        """Drops candidates, each a token [N] of the row at a place [N] in ``rows`` [S], that may not be chosen, and
        adds all tokens of rows that have few. Both are ordered by row, then by token."""
        places = self._places[rows[at]]
        fits = places == _ANY
        some = np.flatnonzero(places >= 0)
        fits[some] = self._has(places[some], tokens[some])
        at, tokens = at[fits], tokens[fits]
        if not len(self.few_rows):
            return at, tokens
        place_of = np.full(len(self._places), -1)
        place_of[rows] = np.arange(len(rows))
        own = place_of[self.few_rows]
        at = np.concatenate((at, own[own >= 0]))
        order = np.argsort(at, kind="stable")
        return at[order], np.concatenate((tokens, self.few_ids[own >= 0]))[order]

    def _has(self, places: Int64, tokens: Int64) -> Bool:
        """Returns whether the masks at these places have these tokens, which broadcast."""
        words = np.minimum(tokens >> 5, self.bits.shape[1] - 1) + places * self.bits.shape[1]
        found: Bool = (self.bits.reshape(-1).take(words) >> (tokens & 31).astype(np.uint32)) & _ONE != 0
        return found


def _set_bits(masks: UInt32) -> tuple[Int64, Int64]:
    """Returns the row and the number of each bit that is set in ``masks`` [M, words], ordered by both."""
    words = np.flatnonzero(masks != 0)
    bits = np.unpackbits(masks.reshape(-1)[words].view(np.uint8), bitorder="little")
    place, bit = np.divmod(np.flatnonzero(bits.view(np.bool_)), _WORD_BITS)
    rows, word = np.divmod(words[place], masks.shape[1])
    return rows, word * _WORD_BITS + bit
