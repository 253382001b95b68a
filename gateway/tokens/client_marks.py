"""Tokenizes rendered conversations such that a client's strings never become special tokens.

A mark is the text of a special token, with which templates delimit turns. template_worker.py breaks marks in the
client's strings by inserting BREAKER. The tokenizer here first finds the template's marks, and only then removes the
breakers, so that it splits and merges the client's characters like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import normalizers

# Two noncharacters, which Unicode reserves for internal use.
BREAKER = "\ufdd0\ufdd1"
_UNKNOWN_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class MarkGuard:
    """A tokenizer that removes breakers; it shares its model with the original one.

    Attributes:
        codec: that tokenizer.
        marks: texts of the marks by id, except single characters and white space.
        unknown: ids of special tokens that stand for unknown characters.
        is_spelt_by_others: whether text without a mark may become a special token too: the model merges characters to
            it, or the mark is searched for in normalized text.
    """

    codec: tokenizers.Tokenizer
    marks: Mapping[int, str]
    unknown: frozenset[int]
    is_spelt_by_others: bool

    @classmethod
    def of(cls, codec: tokenizers.Tokenizer) -> MarkGuard | None:
        """Create the guard of a tokenizer; None if that has no marks."""
        added = codec.get_added_tokens_decoder()
        marks = {
            number: token.content
            for number, token in added.items()
            if token.special and len(token.content) > 1 and token.content.strip()
        }
        if not marks:
            return None
        guarding = tokenizers.Tokenizer(codec.model)
        without_breakers = normalizers.Replace(BREAKER, "")
        own = codec.normalizer
        guarding.normalizer = without_breakers if own is None else normalizers.Sequence([without_breakers, own])
        if codec.pre_tokenizer is not None:
            guarding.pre_tokenizer = codec.pre_tokenizer
        guarding.add_tokens([added[number] for number in sorted(added)])
        if any(guarding.token_to_id(token.content) != number for number, token in added.items()):
            # Added ids are not contiguous, which add_tokens cannot reproduce; only serialization keeps the gaps.
            copied = tokenizers.Tokenizer.from_str(codec.to_str())
            copied.normalizer = guarding.normalizer
            guarding = copied
        broken = [text[0] + BREAKER + text[1:] for text in marks.values()]
        first, *others = guarding.encode_batch_fast([_UNKNOWN_CHARACTER, *broken], add_special_tokens=False)
        unknown = frozenset(first.ids) & marks.keys()
        return cls(guarding, marks, unknown, any((marks.keys() - unknown) & set(one.ids) for one in others))

    def ids(self, encoding: Any, text: str) -> list[int]:
        """Return the ids of ``encoding``, which ``codec`` made of ``text``. A special token whose mark is not in the
        text as it is, is replaced by tokens of its characters."""
        ids: list[int] = encoding.ids
        if self.marks.keys().isdisjoint(ids):
            return ids
        checked: list[int] = []
        for position, token_id in enumerate(ids):
            mark = self.marks.get(token_id)
            if mark is not None and token_id not in self.unknown:
                begin, end = encoding.token_to_chars(position) or (0, 0)
                written = text[begin:end]
                if written.strip() != mark.strip():
                    letters = [letter for letter in written if letter not in BREAKER]
                    for one in self.codec.encode_batch_fast(letters, add_special_tokens=False):
                        checked += (token_id for token_id in one.ids if token_id not in self.marks)
                    continue
            checked.append(token_id)
        return checked
