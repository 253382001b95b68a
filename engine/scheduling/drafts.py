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
from pillion.engine.scheduling.draft_control import DraftControl
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_cost import StepCost
from pillion.engine.scheduling.step_plan import SequencePiece


class Drafter(Protocol):
    """Guesses tokens, once in a step, on the step thread. Only reads the sequences."""

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """For each sequence up to so many tokens, 1 at least, that may follow ``sequence.tokens(0,
        sequence.num_tokens)``; may return none."""

    def seconds_per_token(self, sequences: int) -> float:
        """Seconds that one more guess for each of so many sequences takes to make, the step that judges it aside."""

    def ended(self, sequence: Sequence) -> None:
        """The stream has ended, or lets go of its memory and may come back: what is kept for it may be dropped."""


def speculate(
    drafter: Drafter | None, control: DraftControl, cost: StepCost, decodes: Seq[SequencePiece], left: int
) -> list[SequencePiece]:
    """``decodes``, lengthened by forced tokens and guesses of ``left`` tokens together, which then stand in their
    sequences."""
    rests = drafter is None or control.rests(len(decodes))
    streams, rooms = [], []
    for piece in decodes:
        sequence = piece.sequence
        if sequence.grammar is not None and len(sequence.grammar.forced) > 0:
            room = min(left, _room(piece))
            if room > 0:
                tokens = _forced(sequence, room)
                left -= len(tokens)
                sequence.draft(tokens, forced=True)
        elif not rests:
            streams.append(sequence)
            rooms.append(min(left, _room(piece)))
    if drafter is not None and streams:
        control.observe(decodes, cost, drafter.seconds_per_token(len(streams)) / len(streams))
        _guess(drafter, control, streams, control.decide(streams, rooms, left))
    return [_lengthened(piece) for piece in decodes]


def _guess(drafter: Drafter, control: DraftControl, streams: Seq[Sequence], shares: Seq[int]) -> None:
    """Guess so many tokens for each of the streams; those without a guess are probed, in their turn."""
    wanted = [(stream, most) for stream, most in zip(streams, shares, strict=True) if most]
    silent = (stream for stream, most in zip(streams, shares, strict=True) if not most)
    due = control.due_for_probe(silent, slow=drafter.seconds_per_token(1) > 0)
    if not (wanted or due):
        return
    control.drafts_for(len(wanted), len(due))
    guesses = drafter.draft([*wanted, *due])
    found = [(stream, _fitting(stream, guess[:most])) for (stream, most), guess in zip(wanted, guesses, strict=False)]
    if wanted and control.pays([(stream, len(tokens)) for stream, tokens in found]):
        for stream, tokens in found:
            stream.guesses.asked(tokens, stream.num_tokens)
            if len(tokens):
                stream.draft(tokens)
    else:
        for stream, tokens in found:
            control.keep_as_probe(stream, tokens)
    for (stream, _), guess in zip(due, guesses[len(wanted) :], strict=True):
        stream.guesses.probe(guess, stream.num_tokens)


def _room(piece: SequencePiece) -> int:
    """Tokens that may be drafted behind a piece: none behind a token that nobody knows yet, and behind the first token
    of forks."""
    sequence = piece.sequence
    return 0 if sequence.num_in_flight or piece.fork_seeds else sequence.room_for_drafts


def _lengthened(piece: SequencePiece) -> SequencePiece:
    sequence, drafts = piece.sequence, piece.sequence.num_drafts
    if not drafts or sequence.num_in_flight:
        return piece
    # Forced tokens need logits only where their log probabilities are reported.
    rows = 0 if sequence.drafts_are_forced and not sequence.reports_logprobs else drafts
    return SequencePiece(sequence, piece.start, piece.count + drafts, piece.samples + rows)


def _forced(sequence: Sequence, most: int) -> Int32:
    """Up to ``most`` forced tokens. The last one of a complete answer is left out: nothing is chosen behind it."""
    grammar = sequence.grammar
    assert grammar is not None
    return np.array(grammar.forced[: min(most, len(grammar.forced) - grammar.completes)], dtype=np.int32)


def _fitting(sequence: Sequence, guess: Int32) -> Int32:
    """As much of a guess as the sequence's grammar allows."""
    if sequence.grammar is None or not len(guess):
        return guess
    return guess[: sequence.grammar.count_fitting(guess.tolist())]
