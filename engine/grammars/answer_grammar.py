"""Defines what the scheduler and the sampler know of a grammar. Imports no grammar library, so that tests can use
grammars of their own.

schedule --follow--> forced tokens, the end --place_masks--> MaskRows --the forward runs--> sampler: taken or late
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from pillion.engine.sampling.sampling_rows import UInt32
from pillion.engine.scheduling.sequence import Sequence
from pillion.errors import PillionError

# A sequence keeps its AnswerGrammar under this name.
_GRAMMAR = "grammar"


class MaskRows(Protocol):
    """Holds masks of some places of one answer, which may still be computed.

    Attributes:
        bits: uint32 [N, ceil(vocabulary / 32)], valid when ``wait`` has returned True: token t may be chosen at place n
            where bit t % 32 of bits[n, t // 32] is set.
    """

    bits: UInt32

    def wait(self, seconds: float) -> bool:
        """Waits for the masks, at most ``seconds``; returns whether they are there."""


class AnswerGrammar(Protocol):
    """Represents one answer's place in its grammar, a pure function of the answer's tokens. Only the step thread uses
    it.

    Attributes:
        num_tokens: how many tokens of the answer the grammar was given.
        forced: the next tokens, where the grammar leaves no choice.
        completes: whether the answer is complete after the forced tokens, and only its end can follow.
        failure: why the request cannot go on; None while it can.
    """

    num_tokens: int
    forced: tuple[int, ...]
    completes: bool
    failure: PillionError | None

    @property
    def may_run_ahead(self) -> bool:
        """Says whether a step may be launched with the next token before that token is known. Nothing is won by that
        where a run of forced tokens or the end follows, or where masks are late."""

    def sibling(self) -> AnswerGrammar:
        """Returns the place of another answer that begins with this one's grammar."""

    def take(self, tokens: Seq[int]) -> None:
        """Notes that these tokens were appended to the answer."""

    def follow(self) -> bool:
        """Moves on to after all taken tokens, if that is possible without waiting; the class's attributes hold
        afterwards. Returns False if it is not possible; the step loop is woken when another try is worth it."""

    def count_fitting(self, guesses: Seq[int]) -> int:
        """Returns how many of the guessed next tokens are worth a try, counted from the first one: the grammar allows
        them, and another choice follows them."""

    def place_masks(self, drafts: Seq[int], places: int) -> MaskRows:
        """Returns masks of the last ``places`` of 1 + len(drafts) places: after the taken tokens, and after each of the
        drafts, which begin with forced tokens or are guesses that fit."""


def follow(sequence: Sequence, grammar: AnswerGrammar) -> None:
    """Makes the sequence's answer follow this grammar from now on, which has taken the answer's present tokens."""
    sequence.kept[_GRAMMAR] = grammar
    sequence.reads_history = True


def grammar_of(sequence: Sequence) -> AnswerGrammar | None:
    """Returns the grammar that the sequence's answer follows; None where it follows none."""
    found: AnswerGrammar | None = sequence.kept.get(_GRAMMAR)
    return found
