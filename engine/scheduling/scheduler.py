"""Which tokens run in the next step, and which sequence owns which slot: stall-free scheduling, sans-IO (I5, I9).

One class serves both services: a decode worker's streams sample, a prefill worker's spans end when computed. A step is

    plan = scheduler.schedule(now)             decodes, speculative tokens, then prompt tails, up to the budget exactly
    sampled = ...                              the backend runs the plan
    outcome = scheduler.commit(plan, sampled, now)

and between two steps come events: :meth:`add`, :meth:`cancel`, :meth:`fail`, the node's answers, :meth:`committed`,
:meth:`granted`, :meth:`resumed`, and the loader's, :meth:`adapter_loaded`, :meth:`adapter_failed`. What they cause is
in the next Outcome; without a step, :meth:`flush` gives it. For a backend that runs ahead the next step is scheduled
before this one is committed: :meth:`launched` announces it, and :mod:`pillion.engine.scheduling.in_flight` has the
rules.

Order. :mod:`pillion.engine.scheduling.queues` decides which sequence is served first and which is preempted;
:mod:`pillion.engine.scheduling.step_cost` how many tokens a step has.

Memory. The slots of a prompt and its first generated token come with the adopted ticket; only decodes grow, by slots
out of the stock. When the stock is empty a decode waits for the lease call under way; when the node is exhausted, a
victim is preempted (maybe the asking decode itself): it lets go of its ticket and resumes under a new one with the same
tokens (I6). The next preemption waits until the one before has settled. What a victim had committed stays findable at
the node, in whatever tier the node keeps it: that, and not a copy of the worker's own, is where it is swapped out to.

Several answers to one prompt are computed as one until the first token: :mod:`pillion.engine.scheduling.forks`.
Sequences with adapters wait until theirs is ready, without holding up others:
:mod:`pillion.engine.scheduling.adapter_places`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from math import isnan

from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.sampling.sampling_rows import MASK_LATE, Sampled
from pillion.engine.scheduling.adapter_places import AdapterPlaces
from pillion.engine.scheduling.block_chain import Holding
from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.draft_chains import DraftChains, DraftPasses, DraftShape
from pillion.engine.scheduling.draft_control import DraftControl
from pillion.engine.scheduling.drafts import Drafter, speculate
from pillion.engine.scheduling.forks import Forks
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import Ending, ForkSpec, Sequence, SequenceState
from pillion.engine.scheduling.step_cost import MIN_TAIL_TOKENS, TokenBudget
from pillion.engine.scheduling.step_plan import Outcome, SequencePiece, StepPlan, Update
from pillion.errors import BrokenModel, ConfigError, NotFound, PillionError
from pillion.sampling_ranges import MAX_SPECULATIVE_TOKENS
from pillion.types import FinishReason, TokenLogprob

# Rows of a step that score tokens of prompts, and the logits of them all.
MAX_SCORED_ROWS = 512
MAX_SCORED_BYTES = 64 * 2**20


def scored_rows(vocab_size: int) -> int:
    """Most rows of a step that score prompts, for a model with so many logits a row."""
    return max(1, min(MAX_SCORED_ROWS, MAX_SCORED_BYTES // (4 * vocab_size)))


class Scheduler:
    """Decides what runs. Attributes are for reading: ``budget``, ``queues``, ``stock``, ``sequences`` (all that are not
    gone, by seq_id), ``whole_prompts``, ``adapters``.

    Args:
        block_size: tokens per block.
        max_num_batched_tokens: most tokens of a step.
        max_num_seqs: most sequences of a step.
        target_itl_s: duration of a step to aim at; 0 leaves the budget constant.
        target_itl_steps: that duration as a number of plain steps, which only decode; 0 where it is in seconds or off.
        max_whole_tokens: 0 cuts prompts at any token. Else prompts run whole, and this is the longest one.
        drafter: guesses tokens of decodes; None guesses nothing.
        draft_control: decides how many tokens are guessed for each stream.
        max_scored_rows: most rows of a step that score a prompt's token. Prompts that are scored are cut by it, also
            where prompts run whole.
        max_loras: adapters that the backend has places for; 0: no sequence has one.
        draft_model: a draft model's shape and what runs its passes; it is the drafter then.

    Raises ConfigError when a step cannot hold the decodes of all sequences, or the longest prompt beside them where
    prompts run whole.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        target_itl_s: float = 0.0,
        target_itl_steps: float = 0.0,
        max_whole_tokens: int = 0,
        drafter: Drafter | None = None,
        draft_control: DraftControl | None = None,
        max_scored_rows: int = MAX_SCORED_ROWS,
        max_loras: int = 0,
        draft_model: tuple[DraftShape, DraftPasses] | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs {max_num_seqs} must be from 1 to the step's token budget, {max_num_batched_tokens}"
            )
        # The longest prompt leaves room for a token, and is itself one of the max_num_seqs sequences.
        if max_whole_tokens and max_num_batched_tokens < max_whole_tokens + max_num_seqs - 2:
            raise ConfigError(
                f"without chunked prefill a step must hold a prompt of --max-model-len {max_whole_tokens} beside the "
                f"decodes of --max-num-seqs {max_num_seqs}: its token budget of {max_num_batched_tokens} is too small"
            )
        self.block_size = block_size
        targets = (0.0, 0.0) if max_whole_tokens else (target_itl_s, target_itl_steps)
        self.budget = TokenBudget(max_num_batched_tokens, *targets)
        self.queues = SchedulerQueues(max_num_seqs)
        self.sequences: dict[int, Sequence] = {}
        self.whole_prompts = max_whole_tokens > 0
        self._draft_control = draft_control or DraftControl(MAX_SPECULATIVE_TOKENS)
        self._max_scored_rows = max_scored_rows
        self._in_flight = InFlightSteps()
        self.adapters = AdapterPlaces(max_loras, self._in_flight)
        self._block_manager = BlockManager(block_size, self._in_flight)
        self.stock = self._block_manager.stock
        self._forks = Forks(self.queues, self._block_manager)
        self.draft_chains = DraftChains(*draft_model, self._block_manager) if draft_model is not None else None
        self._drafter = self.draft_chains or drafter
        self._starved = False

    # Events.

    def add(self, sequence: Sequence, now: float) -> None:
        """A new sequence with its adopted ticket. Chunks of a span that the ticket already holds are done."""
        self.sequences[sequence.seq_id] = sequence
        blocks = self._block_manager
        blocks.leased(len(sequence.owned_slots()))
        blocks.out.chunks += sequence.take_chunks(sequence.num_committed)
        if sequence.left_to_compute == 0:
            self._close(sequence, now, commit_rest=True)
        else:
            self._join(sequence, now)
            if sequence.grammar is not None and not sequence.is_prompt_only:
                # An answer that an earlier attempt has completed ends here.
                self._may_choose(sequence, now)

    def positions(self) -> dict[int, int]:
        """The place in line, from 1, of each sequence that does not decode yet, by seq_id; 0 while its prompt is
        computed or it waits at the node for memory."""
        resuming = {one.seq_id: 0 for one in self.sequences.values() if one.state is SequenceState.RESUMING}
        return resuming | self.queues.positions()

    def cancel(self, seq_id: int, now: float) -> None:
        """End a sequence that nobody listens to any more: it lets go of slots and ticket, and no update follows (I8).

        What an ended stream is committing stays. A fork that has not begun never will. Unknown ids are ignored.
        """
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            for parent in self.sequences.values():
                parent.drop_fork(seq_id)
        elif not sequence.end_reported:
            sequence.report_end(now)
            self._abandon(sequence, now)

    def fail(self, seq_id: int, error: PillionError, now: float) -> None:
        """A sequence cannot go on: like :meth:`cancel`, with an update. Unknown ids are ignored."""
        sequence = self.sequences.get(seq_id)
        if sequence is not None and not sequence.end_reported:
            self._block_manager.out.report_end(sequence, Ending(error=error), now)
            self._abandon(sequence, now)

    def committed(self, seq_id: int, slots: Seq[int], refusal: str, now: float) -> None:
        """The node's answer to a CommitOrder: the slot that stays for each block, or why nothing was taken."""
        if seq_id < 0:
            assert self.draft_chains is not None
            self.draft_chains.committed(seq_id, slots, refusal)
            return
        sequence = self.sequences[seq_id]
        if refusal:
            sequence.refuse_commit()
            if sequence.is_span and not sequence.end_reported:
                error = NotFound(f"the KV node refused a commit, plan again: {refusal}")
                self._block_manager.out.report_end(sequence, Ending(error=error), now)
        else:
            self._block_manager.accept(sequence, slots)
        if sequence.state is SequenceState.CLOSING:
            self._settle(sequence, now)
        elif sequence.end_reported:
            self._close(sequence, now)
        else:
            self._block_manager.order_commit(sequence, now)
        self._forks.parent_answered(seq_id, self.sequences)

    def granted(self, slots: Seq[int], now: float) -> None:
        """The node's answer to Outcome.lease_blocks."""
        self._block_manager.granted(slots, now)

    def recall(self, blocks: int, now: float) -> None:
        """The node asks for ``blocks`` slots of the stock back; drafts give up theirs."""
        if self.draft_chains is not None and blocks:
            self.draft_chains.yield_slots(blocks, now)
        self.stock.recall(blocks)

    def draft_opened(self, chain_id: int, holding: Holding | None, now: float) -> None:
        """The node's answer to a DraftOrder; None where there is no ticket."""
        assert self.draft_chains is not None
        self.draft_chains.opened(chain_id, holding, now)

    def resumed(self, seq_id: int, holding: Holding, now: float) -> None:
        """A new ticket was adopted for a sequence without one; the ticket of a sequence that is gone is let go."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            self.let_go(holding, now)
            return
        self._block_manager.leased(len(holding.leased_slots))
        sequence.hold(holding, SequenceState.PREEMPTED)
        self._join(sequence, now)

    def let_go(self, holding: Holding, now: float) -> None:
        """Give up an adopted ticket that no sequence holds."""
        self._block_manager.let_go(holding)

    def preload(self, digest: str, now: float) -> None:
        """A sequence with this adapter comes as soon as its prompt's chain is there."""
        self.adapters.preload(digest)

    def adapter_loaded(self, digest: str, packed: PackedAdapter, now: float) -> None:
        """An adapter of Outcome.adapters is ``packed`` for the backend."""
        self.adapters.loaded(digest, packed)

    def adapter_failed(self, digest: str, error: PillionError, now: float) -> None:
        """An adapter of Outcome.adapters cannot be had: those that were to run with it fail."""
        for sequence in self.adapters.failed(digest):
            self.fail(sequence.seq_id, error, now)

    # A step.

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may be scheduled before the one just launched has landed: guesses follow tokens that
        are known, so it may where nothing would be guessed."""
        if self._drafter is None or self._draft_control.keeps_resting:
            return True
        drafts = self.draft_chains
        streams = (s for s in self.queues.running if s.decoding and not s.is_span)
        known = [s for s in streams if s.guesses.found or (drafts is not None and drafts.catches_up(s))]
        return not self._draft_control.may_guess(known)

    def schedule(self, now: float) -> StepPlan:
        """The next step's work; empty when nothing can run. At most one step is in flight."""
        self.adapters.assign(now)
        pieces = self._decodes(now)
        fork_pieces, copies = self._forks.start_running(now, self.sequences)
        pieces += [piece for piece in fork_pieces if self._may_choose(piece.sequence, now)]
        most = self.budget.max_tokens
        prompt_tails = self.queues.prompt_tails(now)
        if self._drafter is not None or any(_is_forced(piece.sequence) for piece in pieces):
            left = self.budget.left(pieces, 0, 0, least_tokens=0)
            if self.draft_chains is not None:
                self.draft_chains.begin_step(left - sum(tail.left_to_compute for tail in prompt_tails), now)
            spare = left - self._owed(prompt_tails)
            pieces = speculate(self._drafter, self._draft_control, self.budget.cost, pieces, spare)
        if prompt_tails:
            streams = sum(sequence.decoding for sequence in self.queues.running)
            left = self.budget.left(pieces, prompt_tails[0].next_start, len(prompt_tails), streams=streams)
            most = sum(piece.count for piece in pieces) + left
            pieces += self._tail_pieces(prompt_tails, left, now)
        # A step's cost is measured without what a draft model's passes took.
        drafted_s = self.draft_chains.took_s if self.draft_chains is not None else 0.0
        self._draft_control.drafted(drafted_s)
        self.budget.begin(pieces, now + drafted_s, len(self._in_flight))
        placements = self.adapters.take_placements() if pieces else ()
        return StepPlan(tuple(pieces), tuple(copies), most, self._in_flight.unknown(pieces), placements)

    def launched(self, plan: StepPlan) -> None:
        """The plan just made is in flight, and is committed, or failed, after those before it."""
        self._in_flight.launched(plan)

    def commit(self, plan: StepPlan, sampled: Sampled, now: float) -> Outcome:
        """Apply the results of a step."""
        seconds = self.budget.end(now, sampled.borrowed_s)
        if self._drafter is not None:
            self._draft_control.stepped(plan, seconds)
        pieces, sampled = self._in_flight.landed(plan, sampled)
        tokens, logprobs, scores = iter(sampled.token_ids), iter(sampled.logprobs), iter(sampled.scored)
        for piece in pieces:
            sequence = piece.sequence
            sequence.compute(piece.start, piece.start + piece.count, now)
            if sequence.is_span and sequence.left_to_compute == 0:
                self._close(sequence, now, commit_rest=True)
            if piece.scores and not self._accept_scores(piece, tuple(islice(scores, piece.scores))):
                for _ in range(piece.samples):
                    next(tokens), next(logprobs, None)
                self._fail_broken(piece, piece.scores_end, tokens, logprobs, now)
                continue
            if sequence.is_prompt_only and sequence.left_to_compute == 0:
                self._block_manager.out.report_end(sequence, Ending(reason=FinishReason.LENGTH), now)
                self._close(sequence, now, commit_rest=True)
            if piece.samples:
                self._accept_tokens(piece, tokens, logprobs, now)
            if sequence.state is SequenceState.RUNNING:
                self._block_manager.order_commit(sequence, now)
        return self.flush(now)

    def fail_step(self, plan: StepPlan, error: PillionError, now: float) -> Outcome:
        """The backend failed: the sequences of this batch fail, and those whose adapter it should have placed."""
        self.budget.end(now, ok=False)
        for piece in self._in_flight.landed(plan, Sampled())[0]:
            piece.sequence.drop_drafts()
            self.fail(piece.sequence.seq_id, error, now)
        for sequence in self.adapters.not_placed(plan.placements) if plan.placements else ():
            self.fail(sequence.seq_id, error, now)
        return self.flush(now)

    def flush(self, now: float) -> Outcome:
        """The outcome of everything since the last one."""
        decodes = (s for s in self.queues.running if s.decoding)
        drafts = self.draft_chains
        lacking = drafts.lacking_blocks if drafts is not None else 0
        out = self._block_manager.finish_outcome(decodes, now, urgent=self._starved, draft_blocks=lacking)
        adapters = self.adapters
        out.adapters = adapters.take_orders()
        out.evicted_adapters, adapters.evicted = adapters.evicted, 0
        if not out.empty:
            # Nobody reads the load of an empty one, and there is one before most steps.
            out.load = self.queues.load(self.budget, adapters)
        return out

    @property
    def awaits_landing(self) -> bool:
        """Whether memory on its way to the node waits for a step in flight."""
        return self._in_flight.holding_back

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots, queues and drafts add up."""
        sequences, drafts = self.sequences.values(), self.draft_chains
        self._block_manager.check_integrity([*sequences, *(drafts.chains.values() if drafts is not None else ())])
        if drafts is not None:
            drafts.check_integrity(sequences)
        self.queues.check_integrity(sequences)
        self._in_flight.check_integrity(sequences)
        self.adapters.check_integrity(sequences)
        assert not any(s.num_drafts for s in sequences if not s.num_in_flight), "a draft outlived its step"
        for s in sequences:
            answered = s.num_tokens - s.spec.prompt_tokens
            assert s.grammar is None or s.grammar.num_tokens == answered, "a grammar is not at its answer's end"

    # Choosing.

    def _decodes(self, now: float) -> list[SequencePiece]:
        """One token for each running decode that has a slot for it."""
        pieces = []
        self._starved = False
        for sequence in tuple(self.queues.running):
            if sequence.state is not SequenceState.RUNNING:
                continue
            start = sequence.num_computed
            if sequence.num_in_flight:
                start += sequence.num_in_flight
                if not self._in_flight.may_follow(sequence):
                    continue
            elif not sequence.decoding:
                continue
            if not sequence.num_in_flight and not self._may_choose(sequence, now):
                continue
            if start == sequence.num_blocks * self.block_size and not self._grow(sequence, now):
                self._starved = self._starved or sequence.state is SequenceState.RUNNING
                continue
            forks: tuple[ForkSpec, ...] = ()
            if not sequence.num_in_flight:
                self._grow_for_forced(sequence)
                # Forks have not begun where the mask of their first token was late.
                forks = sequence.forks
            pieces.append(SequencePiece(sequence, start, 1, 1, tuple(fork.seed for fork in forks)))
        # A sequence that was planned first may have been preempted for a later one.
        return [piece for piece in pieces if piece.sequence.state is SequenceState.RUNNING]

    def _may_choose(self, sequence: Sequence, now: float) -> bool:
        """Whether a step can choose the sequence's next token. A grammar may have ended or failed the sequence, or not
        be there yet."""
        grammar = sequence.grammar
        if grammar is None:
            return True
        if not grammar.follow():
            return False
        if grammar.failure is not None:
            self.fail(sequence.seq_id, grammar.failure, now)
            return False
        # Further answers begin with a token that is chosen; a prompt may be scored, or computed for its own sake.
        needs_step = sequence.forks or sequence.is_prompt_only or sequence.unscored_from is not None
        if needs_step or not grammar.completes or (grammar.forced and sequence.reports_logprobs):
            return True
        self._complete(sequence, now)
        return False

    def _complete(self, sequence: Sequence, now: float) -> None:
        """End a stream whose grammar leaves nothing to choose: what is forced needs no step."""
        assert sequence.grammar is not None
        out = self._block_manager.out
        tokens, reason = sequence.append_forced(sequence.grammar.forced, now)
        out.forced_tokens += len(tokens)
        out.report_tokens(sequence, [(token, None) for token in tokens], reason, now)
        self._close(sequence, now, commit_rest=True)

    def _grow_for_forced(self, sequence: Sequence) -> None:
        """Give a decode slots for tokens that its grammar forces, as far as there are some in the stock."""
        if _is_forced(sequence):
            assert sequence.grammar is not None
            needed = sequence.num_tokens + len(sequence.grammar.forced)
            while sequence.num_blocks * self.block_size < min(needed, sequence.most_tokens):
                slot = self.stock.take()
                if slot is None:
                    return
                sequence.add_slot(slot)

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Give a decode one more slot; may preempt. False: not in this step."""
        while True:
            slot = self.stock.take()
            if slot is not None:
                sequence.add_slot(slot)
                return True
            if not self.stock.exhausted(now) or self.awaits_landing:
                return False
            if self.draft_chains is not None and self.draft_chains.yield_slots(1, now):
                continue
            if any(s.resume_after and s.state is SequenceState.CLOSING for s in self.sequences.values()):
                return False
            victim = self.queues.victim()
            self._block_manager.out.preemptions += 1
            self._close(victim, now, commit_rest=True, resume=True)
            if victim is sequence:
                return False

    def _tail_pieces(self, prompt_tails: Seq[Sequence], left: int, now: float) -> Iterator[SequencePiece]:
        """Pieces in this order, cut to ``left`` tokens together: short tails are packed, the last one is split."""
        rows_left = self._max_scored_rows
        for sequence in prompt_tails:
            if left == 0:
                return
            if sequence.state is not SequenceState.RUNNING and not self.queues.free_seqs:
                continue
            start = sequence.next_start
            wanted = sequence.step_end() - start
            chooses = sequence.grammar is not None and not sequence.is_prompt_only
            if wanted <= left and chooses and not self._may_choose(sequence, now):
                # All but the token whose logits choose.
                wanted -= 1
                if not wanted or sequence.end_reported:
                    continue
            scored = sequence.unscored_from
            if scored is not None:
                wanted = min(wanted, max(scored - start, 0) + rows_left)
                if not wanted:
                    continue
            elif self.whole_prompts and wanted > left:
                return
            piece = self._tail_piece(sequence, min(left, wanted), now)
            rows_left -= piece.scores
            left -= piece.count
            yield piece

    def _tail_piece(self, sequence: Sequence, count: int, now: float) -> SequencePiece:
        if sequence.state is not SequenceState.RUNNING:
            self.queues.start_running(sequence)
        start = sequence.next_start
        sequence.plan_piece(now)
        scores = sequence.rows_to_score(start, start + count)
        if sequence.is_span or sequence.is_prompt_only or start + count < sequence.num_tokens:
            return SequencePiece(sequence, start, count, 0, scores=scores)
        return SequencePiece(sequence, start, count, 1, tuple(fork.seed for fork in sequence.forks), scores)

    def _owed(self, prompt_tails: Seq[Sequence]) -> int:
        """Tokens that stay free of drafts for a prompt tail: some, or all that it lacks where prompts run whole."""
        if not prompt_tails:
            return 0
        return prompt_tails[0].left_to_compute if self.whole_prompts else MIN_TAIL_TOKENS

    # Consequences.

    def _accept_tokens(
        self, piece: SequencePiece, tokens: Iterator[int], logprobs: Iterator[TokenLogprob | None], now: float
    ) -> None:
        """Apply a piece's tokens: one, the drafts that were right behind it, and the first tokens of forks."""
        sequence, out = piece.sequence, self._block_manager.out
        chosen: list[tuple[int, TokenLogprob | None]] = []
        if sequence.num_drafts:
            # Forced tokens without rows.
            chosen += [(token, None) for token in sequence.drafts()[: sequence.num_drafts + 1 - piece.samples].tolist()]
        chosen += [(next(tokens), next(logprobs, None)) for _ in range(piece.samples)]
        drafts, forced = sequence.num_drafts, sequence.drafts_are_forced
        accepted, reason = sequence.accept([token for token, _ in chosen], now)
        out.late_masks += chosen[-1][0] == MASK_LATE
        if drafts and not forced:
            out.judged_guesses.append((drafts, max(accepted - 1, 0)))
        if not accepted:
            if chosen[0][0] == MASK_LATE:
                for _ in piece.fork_seeds:
                    next(tokens), next(logprobs, None)
            else:
                self._fail_broken(piece, sequence.num_tokens, tokens, logprobs, now)
            return
        if drafts and forced:
            out.forced_tokens += min(accepted, drafts)
        elif drafts:
            self._draft_control.judged(sequence, drafts, accepted - 1)
        reason = self._end_of_grammar(sequence, reason)
        out.report_tokens(sequence, chosen[:accepted], reason, now)
        if reason is not None:
            self._close(sequence, now, commit_rest=True)
        if sequence.forks:
            for fork in sequence.take_forks():
                self._begin_fork(sequence, fork, next(tokens), next(logprobs, None), now)

    def _accept_scores(self, piece: SequencePiece, scores: tuple[TokenLogprob, ...]) -> bool:
        """Report how likely tokens of the prompt were. False: the model's logits are no numbers."""
        if any(isnan(one.logprob) for one in scores):
            return False
        piece.sequence.score(len(scores))
        self._block_manager.out.updates.append(Update(seq_id=piece.sequence.seq_id, prompt_logprobs=scores))
        return True

    def _end_of_grammar(self, sequence: Sequence, reason: FinishReason | None) -> FinishReason | None:
        """Why the stream ends with its last token, given the ``reason`` that has nothing to do with the grammar."""
        grammar = sequence.grammar
        if grammar is None or reason is FinishReason.STOP or not grammar.follow():
            return reason
        return FinishReason.STOP if grammar.completes and not grammar.forced else reason

    def _fail_broken(
        self,
        piece: SequencePiece,
        token: int,
        tokens: Iterator[int],
        logprobs: Iterator[TokenLogprob | None],
        now: float,
    ) -> None:
        """Fail a sequence whose logits for ``token`` are no numbers; its forks, whose tokens come from the same row as
        its own, go with it."""
        sequence = piece.sequence
        for _ in sequence.take_forks() if piece.fork_seeds else ():
            next(tokens), next(logprobs, None)
        error = (
            f"the model's logits for token {token} are not finite: its weights are damaged, or its arithmetic overflows"
        )
        self.fail(sequence.seq_id, BrokenModel(error), now)

    def _begin_fork(
        self, parent: Sequence, fork: ForkSpec, token: int, logprob: TokenLogprob | None, now: float
    ) -> None:
        """Begin a fork with its first token, chosen from its parent's logits; then it needs a ticket of its own."""
        child = parent.fork(fork, now)
        reason = child.append(token)
        if child.grammar is not None:
            child.grammar.take([token])
            reason = self._end_of_grammar(child, reason)
        self._block_manager.out.report_tokens(child, [(token, logprob)], reason, now, child.progress)
        if reason is None:
            self.sequences[child.seq_id] = child
            self._forks.order_ticket(parent, child)

    def _join(self, sequence: Sequence, now: float) -> None:
        self.queues.join(sequence)
        self.adapters.join(sequence, now)
        self._draft_control.begin(sequence)

    def _abandon(self, sequence: Sequence, now: float) -> None:
        if sequence.state is SequenceState.RESUMING:
            del self.sequences[sequence.seq_id]
        else:
            self._close(sequence, now)

    def _close(self, sequence: Sequence, now: float, *, commit_rest: bool = False, resume: bool = False) -> None:
        """Leave the queues; owned slots that will not be committed go back to the stock at once."""
        self.queues.leave(sequence)
        self.adapters.leave(sequence)
        self.stock.give(sequence.close(now, commit_rest=commit_rest, resume=resume))
        if self._drafter is not None and not sequence.is_span:
            self._drafter.ended(sequence)
        if not sequence.in_commit:
            self._settle(sequence, now)

    def _settle(self, sequence: Sequence, now: float) -> None:
        """The node has answered a closing sequence's run: commit what is left, or let go of the ticket."""
        if sequence.commit_rest:
            self._block_manager.order_commit(sequence, now)
            if sequence.in_commit:
                return
        self.stock.give(sequence.cut(sequence.num_committed))
        self._block_manager.release(sequence.ticket_id)
        if sequence.resume_after:
            sequence.wait_for_ticket()
            self._block_manager.order_resume(sequence)
            return
        del self.sequences[sequence.seq_id]
        if not sequence.end_reported:
            self._block_manager.out.report_end(sequence, Ending(), now)


def _is_forced(sequence: Sequence) -> bool:
    """Whether the grammar of a decode leaves no choice of its next token."""
    return sequence.grammar is not None and len(sequence.grammar.forced) > 0
