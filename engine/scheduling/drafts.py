"""Several tokens of a stream in one step: forced ones, and guesses that the step's own logits judge.

Sampling is a pure function of (logits, seed, position) (I6), so a guess is right exactly when it is the token that
would have been chosen there anyway: drafts change how many steps an answer takes, never its tokens, at any temperature.
Tokens that a grammar forces are drafts that are always right: their masks allow nothing else. Guesses are cut where the
grammar refuses them, and are made only where nothing is forced.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import SequencePiece
from pillion.sampling_ranges import MAX_SPECULATIVE_TOKENS

# A guess needs at least MIN tokens in common with an earlier place; the place with the most wins, up to MAX.
MIN_MATCH_TOKENS = 2
MAX_MATCH_TOKENS = 8
# How far back is searched, which bounds a guess to some 20 microseconds.
MAX_LOOKBACK_TOKENS = 16_384

NO_DRAFTS = np.empty(0, dtype=np.int32)


class Drafter(Protocol):
    """Guesses tokens, once per decode and step, on the step thread: quickly. Only reads the sequence."""

    def draft(self, sequence: Sequence, most: int) -> Int32:
        """Up to ``most`` tokens that may follow ``sequence.tokens(0, sequence.num_tokens)``; may return none."""


def speculate(drafter: Drafter | None, decodes: Seq[SequencePiece], left: int) -> list[SequencePiece]:
    """``decodes``, lengthened by forced tokens and guesses of ``left`` tokens together, which then stand in their
    sequences."""
    pieces = []
    for piece in decodes:
        sequence, most = piece.sequence, min(left, piece.sequence.room_for_drafts)
        grammar, tokens = sequence.grammar, NO_DRAFTS
        forced = grammar is not None and len(grammar.forced) > 0
        # Behind a token that nobody knows yet, and behind the first token of forks, nothing is drafted.
        if most > 0 and not sequence.num_in_flight and not piece.fork_seeds:
            tokens = _forced(sequence, most) if forced else _guess(drafter, sequence, most)
        if not len(tokens):
            pieces.append(piece)
            continue
        sequence.draft(tokens, forced=forced)
        left -= len(tokens)
        # Forced tokens need logits only where their log probabilities are reported.
        rows = 0 if forced and not sequence.reports_logprobs else len(tokens)
        pieces.append(SequencePiece(sequence, piece.start, piece.count + len(tokens), piece.samples + rows))
    return pieces


def _forced(sequence: Sequence, most: int) -> Int32:
    """Up to ``most`` forced tokens. The last one of a complete answer is left out: nothing is chosen behind it."""
    grammar = sequence.grammar
    assert grammar is not None
    return np.array(grammar.forced[: min(most, len(grammar.forced) - grammar.completes)], dtype=np.int32)


def _guess(drafter: Drafter | None, sequence: Sequence, most: int) -> Int32:
    """Up to ``most`` guesses that the sequence's grammar allows."""
    if drafter is None:
        return NO_DRAFTS
    # One more than twice what was right the last time: a text that cannot be guessed soon costs a token a step.
    hopeful = min(2 * sequence.accepted_drafts + 1, MAX_SPECULATIVE_TOKENS, most)
    guess = np.asarray(drafter.draft(sequence, hopeful)[:hopeful], dtype=np.int32)
    if sequence.grammar is None or not len(guess):
        return guess
    return guess[: sequence.grammar.count_fitting(guess.tolist())]


class NGramDrafter:
    """Prompt lookup decoding (Saxena 2023): guesses what followed the last tokens when they last stood in this text.

    It needs no second model, has no state, and is right where answers quote their prompt: code edits, summaries, chats.
    ``num_tokens``: most that it guesses.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def draft(self, sequence: Sequence, most: int) -> Int32:
        """The tokens behind the latest of the earlier places that have the most in common with the text's end."""
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
