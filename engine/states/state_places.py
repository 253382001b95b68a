"""Decides where in a prompt a worker keeps states: at the prompt's last whole block, and where texts part.

    known text      [ blocks that go on as another text does | others ]
    hit             [ ........ state ]
    this prompt     [ found          | computed         place | ...                     place | tail ]

The node says how far the blocks of a prompt are known to it or to the index (``known_blocks``), which is further than
the state that it found where nobody has kept one there. So the second text that comes by leaves a state for the third
(Marconi, arXiv 2411.19379); where the node remembers from earlier texts that they part, the first one does. A prefill
range's end, an answer's and a preempted stream's are not among the places: a state stands there when the sequence ends,
or is preempted. Sans-IO (I9).
"""

from __future__ import annotations

from pillion.engine.scheduling.sequence import Sequence


class StatePlaces:
    """Holds the numbers of tokens after which a sequence's state is to be kept while it runs; a step of its prompt ends
    there."""

    def __init__(self, sequence: Sequence) -> None:
        size = sequence.block_size
        # At least one token is computed after a place.
        last = (sequence.num_tokens - 1) // size * size
        wished = {sequence.known_blocks * size} | (set() if sequence.is_prefill else {last})
        self._left = sorted(place for place in wished if sequence.num_computed < place <= last)

    def after(self, tokens: int) -> int:
        """Returns the next place after so many tokens, 0 where there is none."""
        return next((place for place in self._left if place > tokens), 0)

    def wants(self, tokens: int) -> bool:
        """Returns whether the state after so many tokens is to be kept when it stands."""
        return tokens in self._left

    def reached(self, tokens: int) -> bool:
        """Notes that the state after so many tokens stands. Returns whether it is to be kept."""
        reached = tokens in self._left
        self._left = [place for place in self._left if place > tokens]
        return reached
