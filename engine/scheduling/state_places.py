"""Where in a prompt a worker keeps states: at the prompt's last whole block, where texts diverge or a client expects it
(``kept_tokens``), and now and then where a state is cheap.

    known text      [ blocks that go on as another text does | others ]
    hit             [ ........ state ]
    this prompt     [ found          | computed         place | ...                     place | tail ]

The node reports how far a prompt's blocks are known to it or to the index (``known_blocks``), which is beyond the found
state if none was kept there. So the second text leaves a state for the third (Marconi, arXiv 2411.19379), or the first
does, if the node remembers the divergence from earlier texts. The ends of a prefill range, an answer and a preempted
stream are no such places: a state is there anyway.

A step that ends at a whole block also keeps its state if that is small beside the KV since the last one (CHEAP_PART):
so the second text finds most of what it shares with the first. Sans-IO (I9).
"""

from __future__ import annotations

from pillion.engine.scheduling.sequence import Sequence

# Max share of the KV since the last state for a state without a sign of divergence.
CHEAP_PART = 1 / 64


class StatePlaces:
    """The positions of a sequence at which its state is kept while it runs; a state takes the slots of ``pages``
    blocks."""

    def __init__(self, sequence: Sequence, pages: int) -> None:
        self._size = size = sequence.block_size
        self._last = last = (sequence.num_tokens - 1) // size * size
        wished = {sequence.known_blocks * size, *(place // size * size for place in sequence.kept_tokens)}
        wished |= set() if sequence.is_prefill else {last}
        # Steps of the prompt end at these places; shared with the sequence.
        self.left = sorted(place for place in wished if sequence.num_computed < place <= last)
        sequence.step_ends = self.left
        self._kept, self._cheap_after = sequence.num_computed, int(pages * size / CHEAP_PART)

    def wants(self, tokens: int) -> bool:
        """Return whether steps end after ``tokens`` tokens for the state there."""
        return tokens in self.left

    def reached(self, tokens: int) -> bool:
        """Record the state after ``tokens`` tokens. Return whether to keep it."""
        whole = tokens % self._size == 0 and tokens <= self._last
        reached = tokens in self.left or (whole and tokens - self._kept >= self._cheap_after)
        self.left[:] = [place for place in self.left if place > tokens]
        if reached:
            self._kept = tokens
        return reached
