"""What the scheduler and the sampler know of a grammar. Imports no grammar library, so that tests can have their own.

schedule --follow--> forced tokens, the end --place_masks--> MaskRows --the forward runs--> sampler: taken or late
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from pillion.engine.sampling.sampling_rows import UInt32
from pillion.errors import PillionError


class MaskRows(Protocol):
    """Masks of some places of one answer, which may still be computed.

    Attributes:
        bits: uint32 [N, ceil(vocabulary / 32)], valid when ``wait`` has returned True: token t may be chosen at place n
            where bit t % 32 of bits[n, t // 32] is set.
    """

    bits: UInt32

    def wait(self, seconds: float) -> bool:
        """Whether the masks are there, at the latest after ``seconds``."""


class AnswerGrammar(Protocol):
    """One answer's place in its grammar, a pure function of the answer's tokens. Belongs to the step thread.

    Attributes:
        num_tokens: how many tokens of the answer it was given.
        forced: the next tokens, where the grammar leaves no choice.
        completes: whether the answer is complete behind the forced tokens, and only its end can follow.
        failure: why the request cannot go on; None while it can.
    """

    num_tokens: int
    forced: tuple[int, ...]
    completes: bool
    failure: PillionError | None

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may be launched on the next token before it is known. That wins nothing where a run of forced
        tokens or the end follows, or where masks are late."""

    def fork(self) -> AnswerGrammar:
        """The place at the begin of another answer."""

    def take(self, tokens: Seq[int]) -> None:
        """These tokens were appended to the answer."""

    def follow(self) -> bool:
        """Go behind all taken tokens, if that is possible without waiting; the attributes above hold afterwards. False:
        not now, and the step loop is woken when it is worth another try."""

    def count_fitting(self, guesses: Seq[int]) -> int:
        """How many of the guessed next tokens are worth a try, counted from the first one: the grammar allows them, and
        another choice follows them."""

    def place_masks(self, drafts: Seq[int], places: int) -> MaskRows:
        """Masks of the last ``places`` of 1 + len(drafts) places: behind the taken tokens, and behind each of the
        drafts, which begin with forced tokens or are guesses that fit."""
