"""Makes a worker's steps follow grammars: forced tokens, the end of an answer, and the masks of a step's rows.

A grammar hangs on its sequence (:func:`pillion.engine.grammars.answer_grammar.follow`). Tokens that it forces are
proposals that are always right: their masks allow nothing else. Other features' guesses are cut where it refuses them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from pillion.engine.backends.backend import Int32
from pillion.engine.grammars.answer_grammar import follow, grammar_of
from pillion.engine.grammars.compiler import GrammarCompiler
from pillion.engine.grammars.step_masks import StepMasks
from pillion.engine.sampling.sampling_rows import RowMasks
from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.step_feature import StepFeature, Steps
from pillion.engine.scheduling.step_plan import SequencePiece, StepPlan
from pillion.engine.worker.worker_feature import Attach, RequestNeeds, WorkerFeature, WorkerPlace, WorkerSetup
from pillion.observability import metric_catalog
from pillion.types import FinishReason

log = logging.getLogger("pillion.worker")


class GrammarSteps(StepFeature):
    """Keeps the grammars of one scheduler's sequences."""

    use = "forced"
    certain = True

    def __init__(self) -> None:
        # This says whether any grammar that was asked since the last proposals leaves no choice.
        self._forces = False

    def bind(self, steps: Steps) -> None:
        self._steps = steps

    def added(self, sequence: Sequence, now: float) -> None:
        if not sequence.is_prompt_only:
            # An earlier attempt has already generated the whole answer, so the sequence ends without a step.
            self.may_choose(sequence, now)

    def sibling_begins(self, parent: Sequence, child: Sequence) -> None:
        grammar = grammar_of(parent)
        if grammar is not None:
            follow(child, grammar.sibling())

    def may_choose(self, sequence: Sequence, now: float) -> bool:
        """Returns whether a step can choose the sequence's next token. The grammar may have ended or failed the
        sequence, or not be there yet."""
        grammar = grammar_of(sequence)
        if grammar is None:
            return True
        if not grammar.follow():
            return False
        if grammar.failure is not None:
            self._steps.fail(sequence.seq_id, grammar.failure, now)
            return False
        if grammar.forced:
            self._forces = True
        # Further answers begin with a token that is chosen; a prompt may be scored, or computed for its own sake.
        needs_step = sequence.siblings or sequence.is_prompt_only or sequence.unscored_from is not None
        if needs_step or not grammar.completes or (grammar.forced and sequence.reports_logprobs):
            return True
        # The forced tokens complete the answer, so that nothing is left to choose, and they themselves need no step.
        tokens, reason = sequence.append_known(grammar.forced, now)
        if tokens:
            grammar.take(tokens)
        self._steps.finish(sequence, tokens, reason, now)
        return False

    def may_follow(self, sequence: Sequence) -> bool:
        grammar = grammar_of(sequence)
        return grammar is None or grammar.may_run_ahead

    def proposes(self, pieces: Seq[SequencePiece]) -> bool:
        return self._forces

    def propose(self, pieces: Seq[SequencePiece], spare: int, idle: int, now: float) -> tuple[int, float]:
        used, self._forces = 0, False
        for piece in pieces:
            sequence, grammar = piece.sequence, grammar_of(piece.sequence)
            if grammar is None or not grammar.forced or sequence.num_in_flight:
                continue
            self._grow(sequence, sequence.num_tokens + len(grammar.forced))
            room = 0 if piece.sibling_seeds else min(spare - used, sequence.room_for_proposals)
            # The last token of a complete answer is left out: nothing is chosen after it.
            tokens = grammar.forced[: max(0, min(room, len(grammar.forced) - grammar.completes))]
            if tokens:
                sequence.propose(np.array(tokens, dtype=np.int32), self)
                used += len(tokens)
        return used, 0.0

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Adds slots to a decoding sequence until it has room for ``tokens`` tokens, or the worker has no free slot."""
        while sequence.num_blocks * sequence.block_size < min(tokens, sequence.most_tokens):
            slot = self._steps.blocks.stock.take()
            if slot is None:
                return
            sequence.add_slot(slot)

    def fitting(self, sequence: Sequence, guess: Int32) -> Int32:
        grammar = grammar_of(sequence)
        return guess if grammar is None else guess[: grammar.count_fitting(guess.tolist())]

    def masks(self, plan: StepPlan) -> RowMasks | None:
        return StepMasks.of(plan)

    def accepted(self, sequence: Sequence, tokens: Seq[int], reason: FinishReason | None) -> FinishReason | None:
        grammar = grammar_of(sequence)
        if grammar is None:
            return reason
        grammar.take(tokens)
        if reason is FinishReason.STOP or not grammar.follow():
            return reason
        return FinishReason.STOP if grammar.completes and not grammar.forced else reason

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            grammar = grammar_of(sequence)
            answered = sequence.num_tokens - sequence.prompt_tokens
            assert grammar is None or grammar.num_tokens == answered, "a grammar is not at its answer's end"


class GrammarRoom(WorkerFeature):
    """Keeps the grammars of one decode worker."""

    serves = "grammar"

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def step_feature(self) -> StepFeature:
        return GrammarSteps()

    def attached(self, worker: WorkerPlace) -> None:
        self._compiler.mask_threads.wake = worker.wake
        self._compiler.on_compiled = worker.meters.distribution(metric_catalog.GRAMMAR_COMPILE).observe

    async def made_ready(self, needs: RequestNeeds) -> Attach:
        """Compiles the grammar on a thread. Raises InvalidRequest for a grammar that does not compile or that refuses
        the answer so far."""
        started = self._compiler.start(needs.grammar, needs.answer, needs.stop_token_ids)
        grammar = await asyncio.wrap_future(started)
        return lambda sequence: follow(sequence, grammar)

    def close(self) -> None:
        self._compiler.close()


async def load_grammars(setup: WorkerSetup) -> WorkerFeature | None:
    """Loads a decode worker's feature that follows grammars; returns None, and logs a line, where llguidance cannot be
    used."""
    if setup.role != "decode":
        return None
    prepared, vocab_size = setup.model.prepared, setup.model.backend.vocab_size
    try:
        load = GrammarCompiler.load
        return GrammarRoom(await asyncio.to_thread(load, prepared.folder, vocab_size, prepared.eos_token_ids))
    except (ImportError, OSError, ValueError) as error:
        log.warning("answers cannot follow grammars here: %s", error)
        return None
