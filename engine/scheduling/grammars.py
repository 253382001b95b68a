"""Decisions by the grammars of answers: whether a step may choose the next token, which tokens are forced, how many
draft tokens fit, and whether an answer is complete.

Each sequence has its own :class:`pillion.engine.grammars.grammar_state.GrammarState` (``Sequence.grammar``). Forced
tokens are proposed like draft tokens, and always accepted: their masks allow no other token. Sans-IO (I9).
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
    """Whether a step may choose a sequence's next token.

    RUN: it may. WAIT: not yet, because the grammar has not consumed the answer. FAILED: the sequence fails with
    ``grammar.failure``. FINISHED: ``grammar.forced`` completes the answer without a step.
    """

    RUN = "run"
    WAIT = "wait"
    FAILED = "failed"
    FINISHED = "finished"


class Grammars:
    """The grammars of one scheduler's sequences; slots of forced tokens are allocated from ``free_slots``.

    ``forces``: True if forced tokens were found since the last call of :meth:`force`.
    """

    def __init__(self, free_slots: FreeSlots) -> None:
        self._free_slots = free_slots
        self.forces = False

    def verdict(self, sequence: Sequence) -> Verdict:
        """Return whether a step may choose the next token of a sequence with a grammar."""
        grammar = sequence.grammar
        assert grammar is not None
        if not grammar.follow():
            return Verdict.WAIT
        if grammar.failure is not None:
            return Verdict.FAILED
        if grammar.forced:
            self.forces = True
        # Parallel samples begin with a chosen token; a prompt may be scored, or computed for the cache.
        needs_step = sequence.parallel_samples or sequence.is_prompt_only or sequence.unscored_from is not None
        if needs_step or not grammar.completes or (grammar.forced and sequence.reports_logprobs):
            return Verdict.RUN
        return Verdict.FINISHED

    def force(self, scheduled: Seq[ScheduledChunk], spare: int) -> int:
        """Propose forced tokens (:meth:`Sequence.propose`), at most ``spare`` altogether. Return their number."""
        used, self.forces = 0, False
        for chunk in scheduled:
            sequence, grammar = chunk.sequence, chunk.sequence.grammar
            if grammar is None or not grammar.forced or sequence.num_in_flight:
                continue
            self._grow(sequence, sequence.num_tokens + len(grammar.forced))
            limit = 0 if chunk.parallel_seeds else min(spare - used, sequence.draft_capacity)
            # The last token of a complete answer is chosen by the step, since nothing is chosen after it.
            tokens = grammar.forced[: max(0, min(limit, len(grammar.forced) - grammar.completes))]
            if tokens:
                sequence.propose(np.array(tokens, dtype=np.int32), forced=True)
                used += len(tokens)
        return used

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Add slots to a decode until it has room for ``tokens`` tokens, or no slot is free."""
        while sequence.num_blocks * sequence.block_size < min(tokens, sequence.max_length):
            slot = self._free_slots.allocate()
            if slot is None:
                return
            sequence.add_slot(slot)

    def fit(self, sequence: Sequence, draft_tokens: Int32) -> Int32:
        """Return the draft tokens up to the first that the sequence's grammar, if any, rejects."""
        grammar = sequence.grammar
        return draft_tokens if grammar is None else draft_tokens[: grammar.count_fitting(draft_tokens.tolist())]

    def accepted(self, sequence: Sequence, tokens: Seq[int], reason: FinishReason | None) -> FinishReason | None:
        """Record the accepted tokens of a sequence with a grammar. Return its finish reason or None, given the
        ``reason`` or None without the grammar."""
        grammar = sequence.grammar
        assert grammar is not None
        grammar.take(tokens)
        if reason is FinishReason.STOP or not grammar.follow():
            return reason
        return FinishReason.STOP if grammar.completes and not grammar.forced else reason

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if a grammar was given more or fewer tokens than its answer has."""
        for sequence in sequences:
            grammar, answer_tokens = sequence.grammar, sequence.num_tokens - sequence.prompt_tokens
            assert grammar is None or grammar.num_tokens == answer_tokens, "a grammar is not at its answer's end"
