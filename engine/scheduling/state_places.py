"""Decides where in a prompt a worker keeps states: at the prompt's last whole block, where texts part or a client
expects that they will (``kept_tokens``), and now and then where a state is cheap.

    known text      [ blocks that go on as another text does | others ]
    hit             [ ........ state ]
    this prompt     [ found          | computed         place | ...                     place | tail ]

The node says how far the blocks of a prompt are known to it or to the index (``known_blocks``), which is further than
the state that it found where nobody has kept one there. So the second text that comes by leaves a state for the third
(Marconi, arXiv 2411.19379); where the node remembers from earlier texts that they part, the first one does. A prefill
range's end, an answer's and a preempted stream's are not among the places: a state stands there when the sequence ends,
or is preempted.

Where a step ends at a whole block anyway, and a state takes little beside the KV since the last one (CHEAP_PART), it is
kept, too: so the second text, too, finds most of what it shares with the first. Sans-IO (I9).
"""

from __future__ import annotations

from pillion.engine.scheduling.sequence import Sequence

# Without a sign that texts part there, a state is kept where it takes at most this part of the KV since the last one.
CHEAP_PART = 1 / 64


class StatePlaces:
    """Says after how many tokens of a sequence its state is to be kept while it runs.

    Args:
        pages: how many blocks' slots a state takes.
    """

    def __init__(self, sequence: Sequence, pages: int) -> None:
        self._size = size = sequence.block_size
        # At least one token is computed after a place.
        self._last = last = (sequence.num_tokens - 1) // size * size
        wished = {sequence.known_blocks * size, *(place // size * size for place in sequence.kept_tokens)}
        wished |= set() if sequence.is_prefill else {last}
        # A step of the prompt ends at each of these places; the sequence has the same list.
        self.left = sorted(place for place in wished if sequence.num_computed < place <= last)
        sequence.step_ends = self.left
        self._kept, self._cheap_after = sequence.num_computed, int(pages * size / CHEAP_PART)

    def wants(self, tokens: int) -> bool:
        """Returns whether steps end after so many tokens for the state that stands there."""
        return tokens in self.left

    def reached(self, tokens: int) -> bool:
        """Notes that the state after so many tokens stands. Returns whether it is to be kept."""
        whole = tokens % self._size == 0 and tokens <= self._last
        reached = tokens in self.left or (whole and tokens - self._kept >= self._cheap_after)
        self.left[:] = [place for place in self.left if place > tokens]
        if reached:
            self._kept = tokens
        return reached
