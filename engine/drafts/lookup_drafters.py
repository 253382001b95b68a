"""Drafting without a model: finds earlier places of a text's last tokens, and drafts the tokens that followed there."""

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

# Max tokens searched for a text's last tokens: some 20 microseconds.
MAX_LOOKBACK_TOKENS = 16_384
MIN_OWN_MATCH_TOKENS = 2


class NGramDrafter:
    """Prompt lookup (Saxena 2023): drafts what followed the last tokens where they last occurred in this text.

    Stateless, and good where answers quote their prompt: code edits, summaries, chats. A match needs at least
    ``prompt_lookup_min`` tokens; the longest wins, up to ``prompt_lookup_max``.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Return the tokens after the latest of the longest matches of each text's end."""
        return [self._look_back(sequence, most) for sequence, most in wanted]

    def _look_back(self, sequence: Sequence, most: int) -> Int32:
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        last = len(text) - 1
        # Places where the earlier text ends like the whole text, narrowed backwards token by token.
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
        """Return 0.0, since look-ups are nearly free beside a step."""
        return 0.0

    def ended(self, sequence: Sequence) -> None:
        """Do nothing; this drafter is stateless."""


class SuffixDrafter:
    """Suffix decoding (Oliaro et al., arXiv 2411.04975): drafts the tokens that most often followed the longest suffix
    of the text, in the text itself and in the worker's recent answers (:mod:`pillion.engine.drafts.recent_answers`).

    Match and draft have up to ``suffix_decoding_max_tree_depth`` tokens together, the draft up to
    ``suffix_decoding_max_spec_factor`` times the match. It ends where the next token is too uncertain. Matches are
    searched instead of kept in a tree: the text's own by a scan of microseconds without memory, those in answers by
    hash.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._most_matched = int(config.suffix_decoding_max_tree_depth / (1 + config.suffix_decoding_max_spec_factor))
        self._answers = RecentAnswers(config.suffix_decoding_max_cached_requests)

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Return the draft of the longer match; on equal length the text itself wins over other answers."""
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
        """Return the tokens that most often follow the best of ``places``, those with the longest match of ``pattern``,
        which is the text's end reversed; and the match's length. ``tokens`` is indexed by places modulo its length and
        has those from ``first`` to ``end``."""
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
        if matched < MIN_OWN_MATCH_TOKENS or most <= 0:
            return NO_TOKENS, 0
        places = places[lengths == matched]
        ahead = places[:, None] + np.arange(1, most + 1)
        followed = np.where(ahead < end, tokens[ahead % room], END).tolist()
        return np.array(_likeliest(followed, config.suffix_decoding_min_token_prob), dtype=np.int32), matched

    def seconds_per_token(self, sequences: int) -> float:
        """Return 0.0, since look-ups are nearly free beside a step."""
        return 0.0

    def ended(self, sequence: Sequence) -> None:
        """Store the answer, and the end of its prompt, after which an answer's first tokens may be drafted."""
        prompt = sequence.prompt_tokens
        if not sequence.resume_after and sequence.num_tokens > prompt:
            begin = max(0, prompt - self._config.suffix_decoding_max_tree_depth)
            self._answers.add(sequence.parent_hash, sequence.tokens(begin, sequence.num_tokens))


def _likeliest(followed: list[list[int]], least: float) -> list[int]:
    """Return the most frequent continuation, token by token, while at least the share ``least`` of all rows agrees;
    ties go to the first row."""
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
    """Return the drafter of a method without a model."""
    return SuffixDrafter(config) if config.method == "suffix" else NGramDrafter(config)
