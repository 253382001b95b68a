"""Tokenizes rendered conversations such that a client's strings never become special tokens.

A mark is the text of a special token, with which templates delimit turns. template_worker.py breaks marks in the
client's strings by inserting BREAKER. The tokenizer here first finds the template's marks, then removes the breakers
and goes on with the whole text, so that it splits and merges the client's characters like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import normalizers

# Two noncharacters, which Unicode reserves for internal use.
BREAKER = "\ufdd0\ufdd1"
_RARE = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class MarkGuard:
    """A second tokenizer, which shares its model with the first.

    Attributes:
        codec: the tokenizer that removes breakers.
        marks: texts of the marks by id, except single characters and white space.
        unknown: ids of marks that stand for unknown characters.
        is_spelt_by_others: whether texts without a mark may become special tokens too: the model merges characters to
            them, or some are searched for in the normalized text.
    """

    codec: tokenizers.Tokenizer
    marks: Mapping[int, str]
    unknown: frozenset[int]
    is_spelt_by_others: bool

    @classmethod
    def of(cls, codec: tokenizers.Tokenizer) -> MarkGuard | None:
        """Create a tokenizer's guard; None for one without marks."""
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
            # Added ids are not contiguous, which add_tokens cannot reproduce; only serialization keeps the gaps.
            copied = tokenizers.Tokenizer.from_str(codec.to_str())
            copied.normalizer = guarding.normalizer
            guarding = copied
        broken = [text[0] + BREAKER + text[1:] for text in marks.values()]
        first, *others = guarding.encode_batch_fast([_RARE, *broken], add_special_tokens=False)
        unknown = frozenset(first.ids) & marks.keys()
        return cls(guarding, marks, unknown, any((marks.keys() - unknown) & set(one.ids) for one in others))

    def ids(self, encoding: Any, text: str) -> list[int]:
        """Return the ids of a text that ``codec`` encoded. A special token that the text does not spell is replaced by
        its characters."""
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
