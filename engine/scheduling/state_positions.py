"""Positions in a prompt where a worker keeps the recurrent state: the prompt's last block boundary, boundaries where
texts diverge or a client expects them to (``kept_tokens``), and others where a state is cheap.

    earlier text    [ blocks shared with this prompt                    | diverging blocks ]
    hit             [ ........ state ]
    this prompt     [ cached         | computed                   state | computed              state | tail ]

The node reports how many leading blocks of a prompt it or the index knows (``known_blocks``): more than the hit, which
ends with a state, if no state was kept where the texts diverge. So the second text leaves a state for the third
(Marconi, arXiv 2411.19379), or the first does, if the node remembers the divergence from earlier texts. The ends of a
prefill range, an answer and a preempted stream need no position here: their states are kept in any case.

A step that ends at a block boundary also keeps its state if that is small compared to the KV since the last one
(CHEAP_PART), so that the second text has a hit of most of the text that it shares with the first. Sans-IO (I9).
"""

from __future__ import annotations

from pillion.engine.scheduling.sequence import Sequence

# Max size of a cheap state, relative to the KV since the last kept state.
CHEAP_PART = 1 / 64


class StatePositions:
    """The positions of a sequence's prompt at which its state is kept; a state takes the slots of ``pages`` blocks."""

    def __init__(self, sequence: Sequence, pages: int) -> None:
        self._size = size = sequence.block_size
        self._last = last = (sequence.num_tokens - 1) // size * size
        positions = {sequence.known_blocks * size, *(tokens // size * size for tokens in sequence.kept_tokens)}
        positions |= set() if sequence.is_prefill else {last}
        # Positions not yet reached; steps of the prompt end there. The list is shared with the sequence.
        self.left = sorted(position for position in positions if sequence.num_computed < position <= last)
        sequence.step_ends = self.left
        self._kept, self._cheap_after = sequence.num_computed, int(pages * size / CHEAP_PART)

    def wants(self, tokens: int) -> bool:
        """Return whether the state after ``tokens`` tokens is to be kept, and not reached yet."""
        return tokens in self.left

    def reached(self, tokens: int) -> bool:
        """Record that the state after ``tokens`` tokens was computed. Return whether to keep it."""
        at_boundary = tokens % self._size == 0 and tokens <= self._last
        is_kept = tokens in self.left or (at_boundary and tokens - self._kept >= self._cheap_after)
        self.left[:] = [position for position in self.left if position > tokens]
        if is_kept:
            self._kept = tokens
        return is_kept
