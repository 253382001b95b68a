"""Guessing by looking back: what followed the last tokens the last time they stood in this text (prompt lookup
decoding, Saxena 2023). It needs no second model and is right where answers quote their prompt: code edits, summaries,
chats.
"""

from __future__ import annotations

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.engine.scheduling.sequence import Sequence

# A guess needs at least this many tokens in common with an earlier place; the place with the most is taken, up to MAX.
MIN_MATCH_TOKENS = 2
MAX_MATCH_TOKENS = 8
# How far back is looked: a bound of the time that a guess may take, some 20 microseconds.
MAX_LOOKBACK_TOKENS = 16_384


class NGramDrafter:
    """A :class:`pillion.engine.scheduling.drafts.Drafter` without state. ``num_tokens``: most that it guesses."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def draft(self, sequence: Sequence, most: int) -> Int32:
        """What followed the latest of the earlier places that have the most in common with the text's end."""
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        last = len(text) - 1
        # Places that end like the text does, narrowed token by token from the end backwards.
        places = np.flatnonzero(text[:last] == text[last])
        matched = 1
        while matched < MAX_MATCH_TOKENS:
            longer = places[places >= matched]
            longer = longer[text[longer - matched] == text[last - matched]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        if matched < MIN_MATCH_TOKENS or not len(places):
            return text[:0]
        first = int(places[-1]) + 1
        return text[first : first + min(most, self.num_tokens)]
