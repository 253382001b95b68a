"""Drafters without a model: they look for a text's last tokens at earlier places, and guess what followed there."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.engine.scheduling.drafts import Drafter
from pillion.engine.scheduling.sequence import Sequence
from pillion.errors import ConfigError
from pillion.speculative_config import SpeculativeConfig

# How far back is searched, which bounds a guess to some 20 microseconds.
MAX_LOOKBACK_TOKENS = 16_384


class NGramDrafter:
    """Prompt lookup decoding (Saxena 2023): guesses what followed the last tokens when they last stood in this text.

    It needs no second model, has no state, and is right where answers quote their prompt: code edits, summaries, chats.
    A guess needs at least ``prompt_lookup_min`` tokens in common with an earlier place; the place with the most wins,
    up to ``prompt_lookup_max``.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """The tokens behind the latest of the earlier places that have the most in common with each text's end."""
        return [self._look_back(sequence, most) for sequence, most in wanted]

    def _look_back(self, sequence: Sequence, most: int) -> Int32:
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        last = len(text) - 1
        # Places that end like the text does, narrowed token by token from the end backwards.
        places = np.flatnonzero(text[:last] == text[last])
        matched = 1
        while matched < self._most:
            longer = places[places >= matched]
            longer = longer[text[longer - matched] == text[last - matched]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        if matched < self._least or not len(places):
            return text[:0]
        first = int(places[-1]) + 1
        return text[first : first + most]

    def seconds_per_token(self, sequences: int) -> float:
        """0.0: looking back costs hardly anything beside a step."""
        return 0.0

    def ended(self, sequence: Sequence) -> None:
        """Does nothing: there is no state."""


def make_lookup_drafter(config: SpeculativeConfig) -> Drafter | None:
    """The drafter of a method without a model; None where nothing, or a model, guesses. Raises ConfigError for other
    methods."""
    if config.method in ("", "draft_model"):
        return None
    if config.method != "ngram":
        raise ConfigError(f"--speculative-config: method {config.method!r} is not served yet")
    return NGramDrafter(config)
