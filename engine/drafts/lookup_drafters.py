"""Drafts tokens without a model: looks for a text's last tokens at earlier places, and drafts the tokens that followed
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.drafts.acceptance import NO_TOKENS
from pillion.engine.drafts.recent_answers import END, MAX_PLACES, Int64, RecentAnswers
from pillion.engine.scheduling.draft_tokens import Drafter
from pillion.engine.scheduling.sequence import Sequence
from pillion.kernels.step import Int32
from pillion.settings.speculative_config import SpeculativeConfig

# A search for a text's last tokens goes back over at most this many tokens, so that it takes at most some 20
# microseconds.
MAX_LOOKBACK_TOKENS = 16_384
# Suffix decoding needs this many tokens in common with an earlier place of the text itself.
LEAST_OWN_MATCH_TOKENS = 2


class NGramDrafter:
    """Looks up the prompt (Saxena 2023): drafts what followed the last tokens when they last stood in this text.

    It needs no second model, has no state, and is right where answers quote their prompt: code edits, summaries, chats.
    A draft needs at least ``prompt_lookup_min`` tokens in common with an earlier place; the place with the most
    wins, up to ``prompt_lookup_max``.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Gives the tokens after the latest of the earlier places that have the most in common with each text's end."""
        return [self._look_back(sequence, most) for sequence, most in wanted]

    def _look_back(self, sequence: Sequence, most: int) -> Int32:
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        last = len(text) - 1
        # At these places the earlier text ends as the whole text does; they are narrowed token by token, from the end
        # backwards.
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
        """Returns 0.0, because a look-up costs hardly anything beside a step."""
        return 0.0

    def ended(self, sequence: Sequence) -> None:
        """Does nothing, because this drafter keeps no data of streams."""


class SuffixDrafter:
    """Decodes by suffixes (Oliaro and others, arXiv 2411.04975): drafts the tokens that most often followed the
    longest end of the text, in the text itself and in the worker's recent answers
    (:mod:`pillion.engine.drafts.recent_answers`).

    The match and the draft token have up to ``suffix_decoding_max_tree_depth`` tokens together, the draft token up to
    ``suffix_decoding_max_spec_factor`` times as many as the match. The draft token ends where the next token is too
    uncertain. The places that match are looked up instead of kept in a tree: the text's own by a scan, which needs no
    memory and takes microseconds, those in answers by hash.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        # This is the longest match that leaves room for the longest draft token.
        self._most_matched = int(config.suffix_decoding_max_tree_depth / (1 + config.suffix_decoding_max_spec_factor))
        self._answers = RecentAnswers(config.suffix_decoding_max_cached_requests)

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Returns the draft token after the longer match; where two are equally long, the text itself counts more than
        other answers."""
        return [self._continue(sequence, most) for sequence, most in wanted]

    def _continue(self, sequence: Sequence, most: int) -> Int32:
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        own = np.flatnonzero(text[:-1] == text[-1])
        if len(text) > 1:
            own = own[own > 0]
            own = own[text[own - 1] == text[-2]]
        pattern = text[: -self._most_matched - 1 : -1]
        drafted, matched = self._after(text, 0, len(text), own[: -MAX_PLACES - 1 : -1], pattern, most)
        ring = self._answers.ring(sequence.parent_hash)
        if ring is not None:
            answered = self._after(ring.tokens, ring.first, ring.end, ring.places(text), pattern, most)
            if answered[1] > matched:
                drafted = answered[0]
        return drafted

    def _after(
        self, tokens: Int32, first: int, end: int, places: Int64, pattern: Int32, most: int
    ) -> tuple[Int32, int]:
        """Returns the tokens that most often follow those of the ``places`` that have the most tokens in common with
        ``pattern``, which is the text's end from the last token backwards; and how many tokens these are. Places lie in
        ``tokens`` at their remainder, and those from ``first`` to ``end`` are there."""
        if not (len(places) and len(pattern)):
            return NO_TOKENS, 0
        room = len(tokens)
        same = tokens[(places[:, None] - np.arange(len(pattern))) % room] == pattern
        lengths = np.where(same.all(axis=1), len(pattern), same.argmin(axis=1))
        lengths = np.minimum(lengths, places - first + 1)
        matched = int(lengths.max())
        config = self._config
        factor = config.suffix_decoding_max_spec_factor
        most = min(most, int(matched * factor), config.suffix_decoding_max_tree_depth - matched)
        if matched < LEAST_OWN_MATCH_TOKENS or most <= 0:
            return NO_TOKENS, 0
        places = places[lengths == matched]
        ahead = places[:, None] + np.arange(1, most + 1)
        followed = np.where(ahead < end, tokens[ahead % room], END).tolist()
        return np.array(_likeliest(followed, config.suffix_decoding_min_token_prob), dtype=np.int32), matched

    def seconds_per_token(self, sequences: int) -> float:
        """Returns 0.0, because a look-up costs hardly anything beside a step."""
        return 0.0

    def ended(self, sequence: Sequence) -> None:
        """Remembers the answer, and the end of its prompt, after which an answer's first tokens may be drafted."""
        prompt = sequence.prompt_tokens
        if not sequence.resume_after and sequence.num_tokens > prompt:
            begin = max(0, prompt - self._config.suffix_decoding_max_tree_depth)
            self._answers.add(sequence.parent_hash, sequence.tokens(begin, sequence.num_tokens))


def _likeliest(followed: list[list[int]], least: float) -> list[int]:
    """Returns the tokens that most of the rows begin with, one after the other, as long as at least this share of all
    rows has them all; of equally frequent tokens it takes the first row's."""
    drafted: list[int] = []
    needed = least * len(followed)
    for place in range(len(followed[0])):
        ((token, count),) = Counter(row[place] for row in followed).most_common(1)
        if token == END or count < needed:
            break
        drafted.append(token)
        followed = [row for row in followed if row[place] == token]
    return drafted


def make_lookup_drafter(config: SpeculativeConfig) -> Drafter:
    """Makes the drafter for a method of speculation without a model."""
    return SuffixDrafter(config) if config.method == "suffix" else NGramDrafter(config)
