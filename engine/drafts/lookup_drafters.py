"""Drafting without a model: looks up earlier occurrences of a text's last tokens, and drafts the tokens after one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.drafts.acceptance import NO_TOKENS
from pillion.engine.drafts.recent_answers import END, MAX_MATCHES, Int64, RecentAnswers
from pillion.engine.scheduling.draft_tokens import Drafter
from pillion.engine.scheduling.sequence import Sequence
from pillion.kernels.step import Int32
from pillion.settings.speculative_config import SpeculativeConfig

# Max tokens of a text to search, which takes some 20 microseconds.
MAX_LOOKBACK_TOKENS = 16_384


class NGramDrafter:
    """Prompt lookup (Saxena 2023): drafts the tokens that followed the previous occurrence of the text's last tokens.

    Stateless, and good where answers quote their prompt: code edits, summaries, chats. A match needs at least
    ``prompt_lookup_min`` tokens; the longest wins, up to ``prompt_lookup_max``.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._min_match, self._max_match = config.prompt_lookup_min, config.prompt_lookup_max

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Return a draft for each text: the tokens that followed the longest earlier occurrence of its suffix; on equal
        length, the latest."""
        return [self._look_back(sequence, limit) for sequence, limit in wanted]

    def _look_back(self, sequence: Sequence, limit: int) -> Int32:
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        last = len(text) - 1
        # Ends of matches; each round requires one more token before.
        ends = np.flatnonzero(text[:last] == text[last])
        matched = 1
        while matched < self._max_match:
            longer = ends[ends >= matched]
            longer = longer[text[longer - matched] == text[last - matched]]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if matched < self._min_match or not len(ends):
            return text[:0]
        first = int(ends[-1]) + 1
        return text[first : first + limit]

    def seconds_per_token(self, sequences: int) -> float:
        """Return 0.0, since look-ups are nearly free beside a step."""
        return 0.0

    def sequence_finished(self, sequence: Sequence) -> None:
        """Do nothing; this drafter is stateless."""


class SuffixDrafter:
    """Suffix decoding (Oliaro et al., arXiv 2411.04975): drafts the tokens that most often followed the longest suffix
    of the text, in the text itself and in the worker's recent answers (:mod:`pillion.engine.drafts.recent_answers`).

    Match and draft have up to ``suffix_decoding_max_tree_depth`` tokens together, the draft up to
    ``suffix_decoding_max_spec_factor`` times the match's. It ends where the next token is too uncertain. There is no
    suffix tree: matches in the text itself are found by a scan of microseconds, those in answers by hash.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        # A longer match would leave less room for the draft than its factor allows.
        self._max_match = int(config.suffix_decoding_max_tree_depth / (1 + config.suffix_decoding_max_spec_factor))
        self._answers = RecentAnswers(config.suffix_decoding_max_cached_requests)

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Return for each text the draft of its longest match; on equal length, of the one in the text itself."""
        return [self._continue(sequence, limit) for sequence, limit in wanted]

    def _continue(self, sequence: Sequence, limit: int) -> Int32:
        end = sequence.num_tokens
        text = sequence.tokens(max(0, end - MAX_LOOKBACK_TOKENS), end)
        own = np.flatnonzero(text[:-1] == text[-1])
        if len(text) > 1:
            own = own[own > 0]
            own = own[text[own - 1] == text[-2]]
        pattern = text[: -self._max_match - 1 : -1]
        drafted, matched = self._after(text, 0, len(text), own[: -MAX_MATCHES - 1 : -1], pattern, limit)
        ring = self._answers.ring(sequence.parent_hash)
        if ring is not None:
            from_ring, matched_in_ring = self._after(
                ring.tokens, ring.first, ring.end, ring.matches(text), pattern, limit
            )
            if matched_in_ring > matched:
                drafted = from_ring
        return drafted

    def _after(self, tokens: Int32, first: int, end: int, ends: Int64, pattern: Int32, limit: int) -> tuple[Int32, int]:
        """Return up to ``limit`` tokens that most often follow the longest matches of ``pattern`` in ``tokens``, and
        the length of these matches.

        Args:
            tokens: ring buffer: the token with index i, ``first`` <= i < ``end``, is at i modulo the buffer's length.
            ends: indices of the last tokens of possible matches.
            pattern: last tokens of the text, in reverse order.
        """
        if not (len(ends) and len(pattern)):
            return NO_TOKENS, 0
        size = len(tokens)
        equal = tokens[(ends[:, None] - np.arange(len(pattern))) % size] == pattern
        lengths = np.where(equal.all(axis=1), len(pattern), equal.argmin(axis=1))
        lengths = np.minimum(lengths, ends - first + 1)
        matched = int(lengths.max())
        config = self._config
        factor = config.suffix_decoding_max_spec_factor
        limit = min(limit, int(matched * factor), config.suffix_decoding_max_tree_depth - matched)
        # A match of one token predicts nothing.
        if matched < 2 or limit <= 0:
            return NO_TOKENS, 0
        ends = ends[lengths == matched]
        next_indices = ends[:, None] + np.arange(1, limit + 1)
        continuations = np.where(next_indices < end, tokens[next_indices % size], END).tolist()
        return np.array(_likeliest(continuations, config.suffix_decoding_min_token_prob), dtype=np.int32), matched

    def seconds_per_token(self, sequences: int) -> float:
        """Return 0.0, since look-ups are nearly free beside a step."""
        return 0.0

    def sequence_finished(self, sequence: Sequence) -> None:
        """Store a finished answer after the last tokens of its prompt, from which its first tokens can be drafted."""
        prompt = sequence.prompt_tokens
        if not sequence.resume_after and sequence.num_tokens > prompt:
            begin = max(0, prompt - self._config.suffix_decoding_max_tree_depth)
            self._answers.add(sequence.parent_hash, sequence.tokens(begin, sequence.num_tokens))


def _likeliest(continuations: list[list[int]], min_share: float) -> list[int]:
    """Return the most frequent continuation, token by token, as far as at least the share ``min_share`` of all
    continuations begins with it; ties go to the first."""
    drafted: list[int] = []
    min_count = min_share * len(continuations)
    for position in range(len(continuations[0])):
        ((token, count),) = Counter(tokens[position] for tokens in continuations).most_common(1)
        if token == END or count < min_count:
            break
        drafted.append(token)
        continuations = [tokens for tokens in continuations if tokens[position] == token]
    return drafted


def make_lookup_drafter(config: SpeculativeConfig) -> Drafter:
    """Return the drafter of method "ngram" or "suffix"."""
    return SuffixDrafter(config) if config.method == "suffix" else NGramDrafter(config)
