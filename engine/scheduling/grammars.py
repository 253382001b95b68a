"""Says what the grammars of answers allow: whether a step may choose the next token, which tokens are certain, how many
draft tokens fit, and whether an answer is complete.

A sequence has its grammar itself (``Sequence.grammar``, :class:`pillion.engine.grammars.grammar_state.GrammarState`);
nothing here is called for sequences without one. Tokens that a grammar forces are proposed like draft tokens, and are
always right: their masks allow nothing else. Sans-IO (I9).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum

import numpy as np

from pillion.engine.scheduling.block_manager import FreeSlots
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_plan import ScheduledChunk
from pillion.kernels.step import Int32
from pillion.types import FinishReason


class Verdict(Enum):
    """Says what becomes of a sequence whose next token would be chosen.

    RUN: a step may choose the token. WAIT: not yet, because the grammar has not followed the answer. FAILED: the
    sequence cannot go on, for ``grammar.failure``. FINISHED: ``grammar.forced`` completes the answer without a step.
    """

    RUN = "run"
    WAIT = "wait"
    FAILED = "failed"
    FINISHED = "finished"


class Grammars:
    """Asks the grammars of one scheduler's sequences. Forced tokens get slots out of the ``free_slots``.

    ``forces`` says whether any grammar that was asked since the last call of :meth:`force` leaves no choice.
    """

    def __init__(self, free_slots: FreeSlots) -> None:
        self._free_slots = free_slots
        self.forces = False

    def verdict(self, sequence: Sequence) -> Verdict:
        """Returns whether a step can choose the sequence's next token."""
        grammar = sequence.grammar
        assert grammar is not None
        if not grammar.follow():
            return Verdict.WAIT
        if grammar.failure is not None:
            return Verdict.FAILED
        if grammar.forced:
            self.forces = True
        # Further answers begin with a token that is chosen; a prompt may be scored, or computed for its own sake.
        needs_step = sequence.parallel_samples or sequence.is_prompt_only or sequence.unscored_from is not None
        if needs_step or not grammar.completes or (grammar.forced and sequence.reports_logprobs):
            return Verdict.RUN
        # The forced tokens complete the answer, so that nothing is left to choose, and they themselves need no step.
        return Verdict.FINISHED

    def force(self, scheduled: Seq[ScheduledChunk], spare: int) -> int:
        """Puts forced tokens after the sequences' own (:meth:`Sequence.propose`), at most ``spare`` altogether. Returns
        how many they are."""
        used, self.forces = 0, False
        for chunk in scheduled:
            sequence, grammar = chunk.sequence, chunk.sequence.grammar
            if grammar is None or not grammar.forced or sequence.num_in_flight:
                continue
            self._grow(sequence, sequence.num_tokens + len(grammar.forced))
            room = 0 if chunk.parallel_seeds else min(spare - used, sequence.room_for_proposals)
            # The last token of a complete answer is left out: nothing is chosen after it.
            tokens = grammar.forced[: max(0, min(room, len(grammar.forced) - grammar.completes))]
            if tokens:
                sequence.propose(np.array(tokens, dtype=np.int32), forced=True)
                used += len(tokens)
        return used

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Adds slots to a decoding sequence until it has room for ``tokens`` tokens, or the worker has no free slot."""
        while sequence.num_blocks * sequence.block_size < min(tokens, sequence.most_tokens):
            slot = self._free_slots.take()
            if slot is None:
                return
            sequence.add_slot(slot)

    def fit(self, sequence: Sequence, draft_tokens: Int32) -> Int32:
        """Returns the first ones of a sequence's draft tokens, as many as its grammar may accept."""
        grammar = sequence.grammar
        return draft_tokens if grammar is None else draft_tokens[: grammar.count_fitting(draft_tokens.tolist())]

    def accepted(self, sequence: Sequence, tokens: Seq[int], reason: FinishReason | None) -> FinishReason | None:
        """Notes that these tokens are the sequence's now. Returns why it ends with the last one, None where it goes on;
        ``reason`` is the answer without its grammar."""
        grammar = sequence.grammar
        assert grammar is not None
        grammar.take(tokens)
        if reason is FinishReason.STOP or not grammar.follow():
            return reason
        return FinishReason.STOP if grammar.completes and not grammar.forced else reason

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError where a grammar is not at its answer's end."""
        for sequence in sequences:
            grammar, answered = sequence.grammar, sequence.num_tokens - sequence.prompt_tokens
            assert grammar is None or grammar.num_tokens == answered, "a grammar is not at its answer's end"
