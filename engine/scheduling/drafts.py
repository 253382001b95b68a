"""The hook for speculative decoding: somebody guesses the next tokens of a stream, the step's own logits judge them.

Sampling is a pure function of (logits, seed, position) (I6), so a guess is right exactly when it is the token that
would have been chosen there anyway: drafts change how many steps an answer takes, never what it says, at any
temperature.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import SequencePiece
from pillion.sampling_ranges import MAX_SPECULATIVE_TOKENS


class Drafter(Protocol):
    """Called on the step thread, once per decode and step, so it must be quick. Reads the sequence only."""

    def draft(self, sequence: Sequence, most: int) -> Int32:
        """Up to ``most`` tokens that may follow ``sequence.tokens(0, sequence.num_tokens)``; none is an answer too."""


def speculate(drafter: Drafter, decodes: Seq[SequencePiece], left: int) -> list[SequencePiece]:
    """``decodes``, lengthened by guesses of ``left`` tokens together; the guesses stand in their sequences."""
    pieces = []
    for piece in decodes:
        sequence = piece.sequence
        # One more than twice what was right the last time: a text that cannot be guessed soon costs a token a step.
        hopeful = min(2 * sequence.right_guesses + 1, MAX_SPECULATIVE_TOKENS)
        most = min(left, sequence.room_for_drafts, hopeful)
        guess = drafter.draft(sequence, most)[:most] if most > 0 else ()
        if not len(guess):
            pieces.append(piece)
            continue
        sequence.draft(np.asarray(guess, dtype=np.int32))
        left -= len(guess)
        pieces.append(SequencePiece(sequence, piece.start, piece.count + len(guess), piece.samples + len(guess)))
    return pieces
