"""Encodes rendered conversations so that what a client wrote is text, whatever it looks like.

A mark is the text of a special token, with which templates begin and end turns. template_worker.py breaks those marks
that the client's own strings hold, by putting BREAKER into them. The tokenizer here finds the marks of the template as
ever, then takes the breakers out, and goes on with the whole text: so it splits and merges the client's characters as
those of any other text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import normalizers

# These two are no characters: Unicode keeps them for the inner use of programs.
BREAKER = "\ufdd0\ufdd1"
# No vocabulary has this letter, which is no character either.
_RARE = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class MarkGuard:
    """Holds a second tokenizer, which shares its model with the first.

    Attributes:
        codec: the tokenizer that takes breakers out of texts.
        marks: the text of each mark by its id; those of one character, or of white space, are none.
        unknown: those ids of marks that stand for whatever letters the tokenizer does not know.
        is_spelt_by_others: whether texts without a mark may become special tokens, too: its model joins letters to
            them, or it looks for some of them in the normalized text.
    """

    codec: tokenizers.Tokenizer
    marks: Mapping[int, str]
    unknown: frozenset[int]
    is_spelt_by_others: bool

    @classmethod
    def of(cls, codec: tokenizers.Tokenizer) -> MarkGuard | None:
        """Makes the guard of a tokenizer; None for one without marks."""
        added = codec.get_added_tokens_decoder()
        marks = {
            number: token.content
            for number, token in added.items()
            if token.special and len(token.content) > 1 and token.content.strip()
        }
        if not marks:
            return None
        guarding = tokenizers.Tokenizer(codec.model)
        taken_out = normalizers.Replace(BREAKER, "")
        own = codec.normalizer
        guarding.normalizer = taken_out if own is None else normalizers.Sequence([taken_out, own])
        if codec.pre_tokenizer is not None:
            guarding.pre_tokenizer = codec.pre_tokenizer
        guarding.add_tokens([added[number] for number in sorted(added)])
        if any(guarding.token_to_id(token.content) != number for number, token in added.items()):
            # The ids have gaps, which only the whole file tells of.
            copied = tokenizers.Tokenizer.from_str(codec.to_str())
            copied.normalizer = guarding.normalizer
            guarding = copied
        broken = [text[0] + BREAKER + text[1:] for text in marks.values()]
        first, *others = guarding.encode_batch_fast([_RARE, *broken], add_special_tokens=False)
        unknown = frozenset(first.ids) & marks.keys()
        return cls(guarding, marks, unknown, any((marks.keys() - unknown) & set(one.ids) for one in others))

    def ids(self, encoding: Any, text: str) -> list[int]:
        """Returns the ids of a text that was encoded by ``codec``, with the single characters of each special token
        that the text does not spell in place of its id."""
        found: list[int] = encoding.ids
        if self.marks.keys().isdisjoint(found):
            return found
        checked: list[int] = []
        for place, number in enumerate(found):
            mark = self.marks.get(number)
            if mark is not None and number not in self.unknown:
                begin, end = encoding.token_to_chars(place) or (0, 0)
                written = text[begin:end]
                if written.strip() != mark.strip():
                    letters = [letter for letter in written if letter not in BREAKER]
                    for one in self.codec.encode_batch_fast(letters, add_special_tokens=False):
                        checked += (number for number in one.ids if number not in self.marks)
                    continue
            checked.append(number)
        return checked
