"""Defines the interface of drafters, which draft the next tokens of streams."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from pillion.engine.scheduling.sequence import Sequence
from pillion.kernels.step import Int32


class Drafter(Protocol):
    """Drafts tokens, once in a step, on the step thread. A drafter only reads the sequences."""

    def draft(self, wanted: Seq[tuple[Sequence, int]]) -> list[Int32]:
        """Returns for each sequence up to so many tokens, 1 at least, that may follow ``sequence.tokens(0,
        sequence.num_tokens)``; it may return none."""

    def seconds_per_token(self, sequences: int) -> float:
        """Returns the seconds that one more draft for each of so many sequences takes to make, the step that judges it
        aside."""

    def ended(self, sequence: Sequence) -> None:
        """Notes that the stream has ended, or was preempted and may come back: the drafter may drop its data."""
