"""Which tokens run in the next step, and which sequence owns which slot: stall-free scheduling, sans-IO (I5, I9).

One class serves both services: a decode worker's streams sample, a prefill worker's ranges finish once computed.
A step is

    plan = scheduler.schedule(now)             decodes, proposed tokens, then prompt tails, up to the budget
    sampled = ...                              the backend runs the plan
    outcome = scheduler.commit(plan, sampled, now)

and between two steps come events: :meth:`add`, :meth:`cancel`, :meth:`fail`, the node's answers, :meth:`committed`,
:meth:`granted`, :meth:`resumed`, and the worker's, :meth:`adapter_loaded`, :meth:`adapter_failed`. Their effects are in
the next Outcome; :meth:`flush` returns it without a step. For a backend that runs ahead the next step is scheduled
before this one is committed: :meth:`launched` announces it, by the rules of :mod:`pillion.engine.scheduling.in_flight`.

**Order.** :mod:`pillion.engine.scheduling.queues` decides which sequence is served first and which is preempted;
:mod:`pillion.engine.scheduling.step_cost` decides how many tokens a step has.

**Memory.** The slots of a prompt and its first generated token come with the adopted ticket; only decodes grow, by free
slots. Without a free slot a decode waits for the outstanding lease call; if the node is exhausted, a victim is
preempted (possibly the requesting decode itself): it releases its ticket and resumes under a new one with the same
tokens (I6). Only one preemption is in progress at a time. The victim's committed blocks stay at the node, in any tier,
so a preempted sequence is in effect swapped out to the node.

Several answers to one prompt are computed as one until the first token:
:mod:`pillion.engine.scheduling.parallel_samples`. Optional collaborators decide everything else in a step; the
scheduler carries their decisions out, and calls them only for streams that need them. Tokens forced by grammars are
proposed before draft tokens. A sequence with recurrent state is rolled back to its last stored state before its
hidden states go to a draft head; later tokens are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice, zip_longest
from math import isnan

import numpy as np

from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.scheduling.adapter_slots import AdapterSlots
from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain
from pillion.engine.scheduling.block_manager import BlockManager, SideBlocks
from pillion.engine.scheduling.draft_tokens import DraftTokens
from pillion.engine.scheduling.grammars import Grammars, Verdict
from pillion.engine.scheduling.parallel_samples import ParallelSampling
from pillion.engine.scheduling.partial_blocks import PartialBlocks
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import Ending, ParallelSampleSpec, Sequence, SequenceState
from pillion.engine.scheduling.states import States
from pillion.engine.scheduling.step_cost import TailRoom, TokenBudget
from pillion.engine.scheduling.step_model import MIN_TAIL_TOKENS, StepModel
from pillion.engine.scheduling.step_plan import Outcome, ScheduledChunk, StepPlan, Update
from pillion.errors import BrokenModel, ConfigError, NotFound, PillionError
from pillion.kernels.step import MASK_LATE, Sampled
from pillion.types import FinishReason, TokenLogprob

# Max prompt tokens scored per step, and max bytes of their logits.
MAX_SCORED_ROWS = 512
MAX_SCORED_BYTES = 64 * 2**20
Chosen = tuple[int, TokenLogprob | None]


def scored_rows(vocab_size: int) -> int:
    """Return the max rows of a step that may score prompts, for a model with ``vocab_size`` logits per row."""
    return max(1, min(MAX_SCORED_ROWS, MAX_SCORED_BYTES // (4 * vocab_size)))


class Scheduler:
    """The scheduler of one worker epoch. Read-only attributes: ``budget``, ``queues``, ``free_slots``,
    ``sequences`` (all that are not gone, by seq_id), ``whole_prompts``, and the arguments.

    Args:
        blocks: manages all blocks of the worker.
        max_num_batched_tokens: max tokens per step.
        max_num_seqs: max sequences per step.
        target_itl_s: target duration of a step with streams; 0 leaves the budget constant.
        target_itl_steps: target duration as a multiple of a decode-only step's; 0 if the target is in seconds or off.
        max_whole_tokens: 0 for chunked prefill; else prompts run unchunked, and this is the longest.
        max_scored_rows: max rows per step that score a prompt's token; prompts with more are chunked in any case.
        even_steps: whether chunked prefill aims at steps of equal duration, wherever in a prompt they are.
        expected_cost: a step's cost by the device's speed, until steps are measured; None if unknown.
        pair_tokens: cost of one query-key pair relative to one token's, by the model's shape; 0 if unknown.
        partial_blocks: keeps the last blocks of answers.
        states: the states of sequences, for models with states.
        grammars: the grammars of answers.
        drafts: drafts next tokens.
        adapters: slots for the sequences' adapters.

    Raises ConfigError if the token budget is too small for the decodes of all sequences or, without chunked prefill,
    for the longest prompt together with the other sequences' decodes.
    """

    def __init__(
        self,
        *,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        target_itl_s: float = 0.0,
        target_itl_steps: float = 0.0,
        max_whole_tokens: int = 0,
        max_scored_rows: int = MAX_SCORED_ROWS,
        even_steps: bool = False,
        expected_cost: StepModel | None = None,
        pair_tokens: float = 0.0,
        partial_blocks: PartialBlocks | None = None,
        states: States | None = None,
        grammars: Grammars | None = None,
        drafts: DraftTokens | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs {max_num_seqs} must be from 1 to the step's token budget, {max_num_batched_tokens}"
            )
        # -2: the longest prompt leaves room for one generated token, and its own sequence does not decode.
        if max_whole_tokens and max_num_batched_tokens < max_whole_tokens + max_num_seqs - 2:
            raise ConfigError(
                f"without chunked prefill a step must hold a prompt of --max-model-len {max_whole_tokens} beside the "
                f"decodes of --max-num-seqs {max_num_seqs}: its token budget of {max_num_batched_tokens} is too small"
            )
        self.blocks, self.block_size = blocks, blocks.block_size
        self.in_flight, self.free_slots = blocks.in_flight, blocks.free_slots
        targets = (0.0, 0.0) if max_whole_tokens else (target_itl_s, target_itl_steps)
        even = even_steps and not max_whole_tokens
        self.budget = TokenBudget(
            max_num_batched_tokens, *targets, expected=expected_cost, even=even, pair_tokens=pair_tokens
        )
        self.queues = SchedulerQueues(max_num_seqs)
        self.sequences: dict[int, Sequence] = {}
        self.whole_prompts = max_whole_tokens > 0
        self._max_scored_rows = max_scored_rows
        self._parallel_samples = ParallelSampling(self.queues, self.blocks)
        self._starved = False
        self.partial_blocks, self.states, self.grammars = partial_blocks, states, grammars
        self.drafts, self.adapters = drafts, adapters
        self._draft_chains = drafts.draft_chains if drafts is not None else None
        optional = (partial_blocks, states, self._draft_chains)
        self._side_users: list[SideBlocks] = [user for user in optional if user is not None]

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence with its adopted ticket. Prefill chunks within the ticket's pinned blocks are reported as
        done."""
        self.sequences[sequence.seq_id] = sequence
        blocks = self.blocks
        blocks.leased(len(sequence.owned_slots()))
        blocks.out.chunks += sequence.take_chunks(sequence.num_committed)
        if sequence.left_to_compute == 0:
            self._close(sequence, now)
        else:
            sequence.wait_for(self._work_s(sequence))
            self._join(sequence, now)
            if sequence.grammar is not None and not sequence.is_prompt_only:
                # Ends the sequence if an earlier attempt has already generated the whole answer.
                self._blocked_by_grammar(sequence, now)

    def _work_s(self, sequence: Sequence) -> float:
        """Return the seconds to compute a sequence's remaining prompt alone; 0 before any step was measured."""
        budget = self.budget
        return budget.cost.model.range_s(sequence.num_computed, sequence.num_tokens, budget.max_tokens)

    def positions(self) -> dict[int, int]:
        """Return by seq_id the queue position, from 1, of each sequence that waits to run; 0 while its prompt is
        computed, or while it waits at the node for memory."""
        resuming = {s.seq_id: 0 for s in self.sequences.values() if s.state is SequenceState.RESUMING}
        return resuming | self.queues.positions()

    def cancel(self, seq_id: int, now: float) -> None:
        """End a sequence whose client is gone: free its slots and ticket without an update (I8).

        Blocks whose commit is in flight are still committed. An unstarted parallel sample is dropped. Unknown ids are
        ignored.
        """
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            for parent in self.sequences.values():
                parent.drop_parallel_sample(seq_id)
        elif not sequence.end_reported:
            sequence.report_end(now)
            self._abandon(sequence, now)

    def fail(self, seq_id: int, error: PillionError, now: float) -> None:
        """End a sequence like :meth:`cancel`, but with an error as its update. Unknown ids are ignored."""
        sequence = self.sequences.get(seq_id)
        if sequence is not None and not sequence.end_reported:
            self.blocks.out.report_end(sequence, Ending(error=error), now)
            self._abandon(sequence, now)

    def committed(self, seq_id: int, slots: Seq[int], refusal: str, now: float) -> None:
        """Handle the node's answer to a CommitOrder: each block's committed slot, or a ``refusal`` of the whole run."""
        # Negative ids: chains of states and drafts.
        if seq_id < 0:
            of_state = self.states is not None and self.states.committed(seq_id, slots, refusal)
            if not of_state and self._draft_chains is not None:
                self._draft_chains.committed(seq_id, slots, refusal)
            return
        sequence = self.sequences[seq_id]
        if refusal:
            sequence.refuse_commit()
            if sequence.is_prefill and not sequence.end_reported:
                error = NotFound(f"the KV node refused a commit, plan again: {refusal}")
                self.blocks.out.report_end(sequence, Ending(error=error), now)
        else:
            self.blocks.accept(sequence, slots)
        if sequence.state is SequenceState.CLOSING:
            self._continue_closing(sequence, now)
        elif sequence.end_reported:
            self._close(sequence, now)
        else:
            self.blocks.order_commit(sequence, now, may_wait=not sequence.is_prefill)
        if seq_id in self._parallel_samples.late:
            self._parallel_samples.parent_answered(seq_id, self.sequences)

    def granted(self, slots: Seq[int], now: float) -> None:
        """Handle the node's answer to Outcome.lease_blocks."""
        self.blocks.granted(slots, now)

    def recall(self, blocks: int, now: float) -> None:
        """Handle the node's request for ``blocks`` free slots; partial blocks, states and drafts yield theirs."""
        for user in self._side_users if blocks else ():
            user.yield_slots(blocks, now)
        self.free_slots.recall(blocks)

    def chain_opened(self, chain_id: int, ticket: AdoptedTicket | None, now: float) -> None:
        """Handle the node's answer to a ChainOrder: ``ticket`` is None if the node opened none."""
        assert self._draft_chains is not None
        self._draft_chains.opened(chain_id, ticket, now)

    def resumed(self, seq_id: int, ticket: AdoptedTicket, now: float) -> None:
        """Queue a RESUMING sequence with its newly adopted ticket; release the ticket if the sequence has ended."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            self.release_ticket(ticket, now)
            return
        self.blocks.leased(len(ticket.leased_slots))
        sequence.adopt(ticket, SequenceState.PREEMPTED)
        sequence.wait_for(self._work_s(sequence))
        self._join(sequence, now)

    def release_ticket(self, ticket: AdoptedTicket, now: float) -> None:
        """Release an adopted ticket without a sequence."""
        self.blocks.release_ticket(ticket)

    def expect_adapter(self, digest: str, now: float) -> None:
        """Preload the adapter ``digest`` for a sequence that will be added once its prompt's blocks arrive."""
        if self.adapters is not None:
            self.adapters.preload(digest)

    def adapter_loaded(self, digest: str, packed: PackedAdapter, now: float) -> None:
        """Handle an adapter of ``Outcome.adapter_orders`` that has been read and packed."""
        assert self.adapters is not None
        self.adapters.loaded(digest, packed)

    def adapter_failed(self, digest: str, error: PillionError, now: float) -> None:
        """Fail the sequences that wait for an adapter that could not be loaded."""
        assert self.adapters is not None
        for sequence in self.adapters.failed(digest):
            self.fail(sequence.seq_id, error, now)

    @property
    def may_run_ahead(self) -> bool:
        """True if the next step may be scheduled while launched steps are in flight."""
        return self.drafts is None or self.drafts.may_run_ahead(self.queues.running)

    def schedule(self, now: float) -> StepPlan:
        """Return the next step's plan; empty if nothing can run before an event or the end of a step in flight."""
        queues, adapters = self.queues, self.adapters
        if adapters is not None:
            adapters.assign(now)
        if queues.yielding or queues.flows.several:
            queues.make_way(self.in_flight)
        scheduled = self._decodes(now)
        copies: list[tuple[int, int]] = []
        if any(sequence.parent is not None for sequence in queues.preempted):
            begun, copies = self._parallel_samples.start_running(self.sequences)
            scheduled += [chunk for chunk in begun if not self._blocked_by_grammar(chunk.sequence, now)]
        budget_tokens = self.budget.max_tokens
        prompt_tails = queues.prompt_tails()
        proposal_s = 0.0
        if scheduled and (self.drafts is not None or (self.grammars is not None and self.grammars.forces)):
            scheduled, proposal_s = self._with_proposals(scheduled, prompt_tails, now)
        if prompt_tails:
            streams = sum(sequence.decoding for sequence in queues.running)
            first = prompt_tails[0].next_start
            queue = queues.lengthening_tails(prompt_tails)
            room = self.budget.room(scheduled, first, len(prompt_tails), streams=streams, queue=queue)
            budget_tokens = sum(chunk.count for chunk in scheduled) + room.at(first)
            tails = list(self._tail_chunks(prompt_tails, room, now))
            scheduled += tails
            copies += [chunk.sequence.take_copy() for chunk in tails if chunk.sequence.copy_first]
        # A step's measured cost excludes the search for proposals.
        self.budget.begin(scheduled, now + proposal_s, len(self.in_flight))
        placements, slots = adapters.place(scheduled) if adapters is not None and scheduled else ((), None)
        unknown = self.in_flight.unknown(scheduled)
        states = self.states.begin(scheduled) if self.states is not None and scheduled else None
        return StepPlan(tuple(scheduled), tuple(copies), budget_tokens, unknown, placements, slots, states)

    def launched(self, plan: StepPlan) -> None:
        """Record the last scheduled plan as in flight. Steps are committed, or failed, in launch order."""
        self.in_flight.launched(plan)

    def commit(self, plan: StepPlan, sampled: Sampled, now: float) -> Outcome:
        """Apply a step's results, in launch order; return the outcome of everything since the last call."""
        seconds = self.budget.end(now, sampled.borrowed_s)
        if self.drafts is not None:
            self.drafts.stepped(plan, seconds)
        scheduled, counting = self.in_flight.retire(plan, sampled)
        rows, scores = zip_longest(counting.token_ids, counting.logprobs), iter(counting.scored)
        vectors = iter(counting.pooled)
        for chunk in scheduled:
            sequence = chunk.sequence
            sequence.compute(chunk.start, chunk.start + chunk.count, now)
            if sequence.is_prefill and sequence.left_to_compute == 0:
                self._close(sequence, now, commit_rest=True)
            if chunk.scores and not self._accept_scores(chunk, tuple(islice(scores, chunk.scores))):
                for _ in range(chunk.samples):
                    next(rows)
                self._fail_broken(chunk, chunk.scores_end, rows, now)
                continue
            if chunk.pools:
                sequence.pool(islice(vectors, chunk.pools))
            if sequence.is_prompt_only and sequence.left_to_compute == 0:
                self._end_prompt(sequence, now)
            if chunk.samples:
                self._accept_tokens(chunk, rows, now)
            if sequence.state is SequenceState.RUNNING:
                self.blocks.order_commit(sequence, now, may_wait=not sequence.is_prefill)
        if self.states is not None:
            self.states.end_step(plan.scheduled)
        if self._draft_chains is not None and sampled.states is not None:
            self._draft_chains.store_states(plan.scheduled, sampled.states)
        return self.flush(now)

    def fail_step(self, plan: StepPlan, error: PillionError, now: float) -> Outcome:
        """Fail the sequences of a step that failed in the backend, and those of adapters that it was to place."""
        self.budget.end(now, ok=False)
        for chunk in self.in_flight.retire(plan, Sampled())[0]:
            self.fail(chunk.sequence.seq_id, error, now)
        for sequence in self.adapters.drop_placements(plan.placements) if self.adapters is not None else ():
            self.fail(sequence.seq_id, error, now)
        return self.flush(now)

    def flush(self, now: float) -> Outcome:
        """Return the outcome of everything since the last call."""
        decodes = (s for s in self.queues.running if s.decoding)
        lacking = sum(user.lacking_blocks for user in self._side_users)
        out = self.blocks.finish_outcome(decodes, now, urgent=self._starved, wanted_blocks=lacking)
        if self.states is not None:
            out.commits += self.states.take_orders(out.releases)
        adapters = self.adapters
        if adapters is not None:
            out.adapter_orders, out.evicted_adapters = adapters.take_orders(), adapters.take_evicted()
        if not out.empty:
            # Attach the load only to nonempty outcomes; most steps are preceded by an empty one.
            out.load = self.queues.load(self.budget)
            if adapters is not None:
                out.load |= {"adapters": adapters.ready, "adapter_waits": adapters.waits}
        return out

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, queues and collaborators' states are inconsistent."""
        sequences = self.sequences.values()
        self.blocks.check_integrity([*sequences, *self.side_chains()])
        for user in self._side_users:
            user.check_integrity(sequences)
        if self.grammars is not None:
            self.grammars.check_integrity(sequences)
        if self.adapters is not None:
            self.adapters.check_integrity(sequences)
        self.queues.check_integrity(sequences)
        self.in_flight.check_integrity(sequences)
        assert not any(s.num_proposed for s in sequences if not s.num_in_flight), "a proposal outlived its step"

    def side_chains(self) -> list[BlockChain]:
        """Return the block chains of partial blocks, states and drafts."""
        return [chain for user in self._side_users for chain in user.side_chains()]

    def _decodes(self, now: float) -> list[ScheduledChunk]:
        """Return a one-token chunk for each running decode that has, or can allocate, a slot for the token."""
        scheduled = []
        self._starved = False
        for sequence in self.queues.to_decode():
            if sequence.state is not SequenceState.RUNNING or not self._may_decode(sequence, now):
                continue
            start = sequence.next_start
            if start == sequence.num_blocks * self.block_size and not self._grow(sequence, now):
                self._starved = self._starved or sequence.state is SequenceState.RUNNING
                continue
            # Unstarted only if the first token's mask was late; they start with this token, unless a step is in flight.
            parallel_samples = () if sequence.num_in_flight else sequence.parallel_samples
            scheduled.append(ScheduledChunk(sequence, start, 1, 1, tuple(sample.seed for sample in parallel_samples)))
        return [chunk for chunk in scheduled if chunk.sequence.state is SequenceState.RUNNING]

    def _may_decode(self, sequence: Sequence, now: float) -> bool:
        """Return whether the next step can choose a running sequence's next token, given what is in flight."""
        grammar = sequence.grammar
        if sequence.num_in_flight:
            return self.in_flight.may_follow(sequence) and (grammar is None or grammar.may_run_ahead)
        return sequence.decoding and (grammar is None or not self._blocked_by_grammar(sequence, now))

    def _blocked_by_grammar(self, sequence: Sequence, now: float) -> bool:
        """Return whether the sequence's grammar prevents a step from choosing its next token now. Fails the sequence
        with its grammar, and ends it if forced tokens complete the answer."""
        grammar = sequence.grammar
        if grammar is None:
            return False
        assert self.grammars is not None
        verdict = self.grammars.verdict(sequence)
        if verdict is Verdict.FAILED and grammar.failure is not None:
            self.fail(sequence.seq_id, grammar.failure, now)
        elif verdict is Verdict.FINISHED:
            tokens, reason = sequence.append_known(grammar.forced, now)
            grammar.take(tokens)
            self._finish(sequence, tokens, reason, now)
        return verdict is not Verdict.RUN

    def _with_proposals(
        self, scheduled: list[ScheduledChunk], prompt_tails: Seq[Sequence], now: float
    ) -> tuple[list[ScheduledChunk], float]:
        """Return the decodes, lengthened by forced tokens and drafts, and the seconds that drafting took."""
        left = self.budget.room(scheduled, 0, 0, min_tokens=0).at(0)
        idle = left - sum(tail.left_to_compute for tail in prompt_tails)
        spare, drafting_s, grammars = left - self._tokens_for_tails(prompt_tails), 0.0, self.grammars
        if grammars is not None and grammars.forces:
            spare -= grammars.force(scheduled, spare)
        if self.drafts is not None:
            drafting_s = self.drafts.draft(scheduled, spare, idle, now, cost=self.budget.cost, grammars=grammars)
        return [chunk.lengthened() for chunk in scheduled], drafting_s

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Add a slot to a decode, preempting a sequence if necessary. Return False if no slot is free in this step."""
        while True:
            slot = self.free_slots.allocate()
            if slot is not None:
                sequence.add_slot(slot)
                return True
            if not self.free_slots.exhausted(now) or self.in_flight.holding_back:
                return False
            if any(user.yield_slots(1, now) for user in self._side_users):
                continue
            if any(s.resume_after and s.state is SequenceState.CLOSING for s in self.sequences.values()):
                return False
            victim = self.queues.victim()
            self.blocks.out.preemptions += 1
            self._close(victim, now, commit_rest=True, resume=True)
            if victim is sequence:
                return False

    def _tail_chunks(self, prompt_tails: Seq[Sequence], room: TailRoom, now: float) -> Iterator[ScheduledChunk]:
        """Yield chunks of the prompt tails, in order, up to ``room``: short tails are packed, the last one is split."""
        rows_left = self._max_scored_rows
        for sequence in prompt_tails:
            if sequence.state is not SequenceState.RUNNING and not self.queues.free_seqs:
                continue
            start = sequence.next_start
            left = room.at(start)
            if left == 0:
                return
            wanted = sequence.num_tokens - start
            needs_mask = sequence.grammar is not None and not sequence.is_prompt_only
            if needs_mask and wanted <= left and self._blocked_by_grammar(sequence, now):
                wanted -= 1
                if not wanted or sequence.end_reported:
                    continue
            scored = sequence.unscored_from
            if scored is not None and sequence.pooling is None:
                wanted = min(wanted, max(scored - start, 0) + rows_left)
                if not wanted:
                    continue
            elif self.whole_prompts and wanted > left:
                return
            reports_logits = sequence.pooling is not None and bool(sequence.pooling.logits_of)
            if reports_logits and rows_left <= 0:
                continue
            if sequence.step_ends and not self.whole_prompts:
                wanted = sequence.cut_at_step_end(start, wanted)
            chunk = self._tail_chunk(sequence, min(left, wanted), now)
            rows_left -= chunk.scores or bool(chunk.pools and reports_logits)
            room.take(start, chunk.count)
            yield chunk

    def _tail_chunk(self, sequence: Sequence, count: int, now: float) -> ScheduledChunk:
        if sequence.state is not SequenceState.RUNNING:
            self.queues.start_running(sequence)
        start = sequence.next_start
        sequence.plan_chunk(count, now)
        rows = sequence.rows_to_score(start, start + count)
        if sequence.pooling is not None:
            return ScheduledChunk(sequence, start, count, 0, pools=rows)
        if sequence.is_prefill or sequence.is_prompt_only or start + count < sequence.num_tokens:
            return ScheduledChunk(sequence, start, count, 0, scores=rows)
        seeds = tuple(sample.seed for sample in sequence.parallel_samples)
        return ScheduledChunk(sequence, start, count, 1, seeds, rows)

    def _tokens_for_tails(self, prompt_tails: Seq[Sequence]) -> int:
        """Return the tokens of a step to reserve for prompt tails: MIN_TAIL_TOKENS or, without chunked prefill, the
        first tail's."""
        if not prompt_tails:
            return 0
        return prompt_tails[0].left_to_compute if self.whole_prompts else MIN_TAIL_TOKENS

    def _accept_tokens(self, chunk: ScheduledChunk, rows: Iterator[Chosen], now: float) -> None:
        """Append the tokens chosen by a chunk's rows, which are next in ``rows``, up to the first rejected proposal,
        and start its parallel samples."""
        sequence, out = chunk.sequence, self.blocks.out
        proposed = sequence.num_proposed
        chosen: list[Chosen] = []
        if proposed:
            chosen += [(token, None) for token in sequence.proposed()[: proposed + 1 - chunk.samples].tolist()]
        chosen += [next(rows) for _ in range(chunk.samples)]
        accepted, reason = sequence.accept([token for token, _ in chosen], now)
        out.late_masks += chosen[-1][0] == MASK_LATE
        if proposed and not sequence.forced:
            out.judged_draft_tokens.append((proposed, max(accepted - 1, 0)))
        if not accepted:
            if chosen[0][0] == MASK_LATE:
                for _ in chunk.parallel_seeds:
                    next(rows)
            else:
                self._fail_broken(chunk, sequence.num_tokens, rows, now)
            return
        if proposed and sequence.forced:
            out.forced_tokens += min(accepted, proposed)
        elif proposed and self.drafts is not None:
            self.drafts.judged(sequence, proposed, accepted - 1)
        if self.grammars is not None and sequence.grammar is not None:
            reason = self.grammars.accepted(sequence, [token for token, _ in chosen[:accepted]], reason)
        out.report_tokens(sequence, chosen[:accepted], reason, now)
        if reason is not None:
            self._close(sequence, now, commit_rest=True)
        if sequence.parallel_samples:
            for sample in sequence.take_parallel_samples():
                self._begin_parallel_sample(sequence, sample, next(rows), now)

    def _accept_scores(self, chunk: ScheduledChunk, scores: tuple[TokenLogprob, ...]) -> bool:
        """Report scores of prompt tokens. Return False, without a report, if the logits are not finite."""
        if any(isnan(score.logprob) for score in scores):
            return False
        chunk.sequence.score(len(scores))
        self.blocks.out.updates.append(Update(seq_id=chunk.sequence.seq_id, prompt_logprobs=scores))
        return True

    def _end_prompt(self, sequence: Sequence, now: float) -> None:
        """End a sequence that generates nothing, with its vector if requested; fail it if the vector is not finite."""
        vector = sequence.vector
        if vector is not None and not np.isfinite(vector).all():
            error = "the embedding is not finite: its weights are damaged, or its arithmetic overflows"
            self.fail(sequence.seq_id, BrokenModel(error), now)
            return
        packed = b"" if vector is None else vector.astype("<f4").tobytes()
        self.blocks.out.report_end(sequence, Ending(reason=FinishReason.LENGTH, vector=packed), now)
        self._close(sequence, now, commit_rest=True)

    def _fail_broken(self, chunk: ScheduledChunk, token: int, rows: Iterator[Chosen], now: float) -> None:
        """Fail a sequence whose logits for token number ``token`` are not finite, and its unstarted parallel samples,
        whose results in ``rows`` are skipped."""
        sequence = chunk.sequence
        for _ in sequence.take_parallel_samples() if chunk.parallel_seeds else ():
            next(rows)
        error = (
            f"the model's logits for token {token} are not finite: its weights are damaged, or its arithmetic overflows"
        )
        self.fail(sequence.seq_id, BrokenModel(error), now)

    def _finish(self, sequence: Sequence, tokens: Seq[int], reason: FinishReason, now: float) -> None:
        """End a stream whose last ``tokens`` were forced, and needed no step."""
        self.blocks.out.forced_tokens += len(tokens)
        self.blocks.out.report_tokens(sequence, [(token, None) for token in tokens], reason, now)
        self._close(sequence, now, commit_rest=True)

    def _begin_parallel_sample(self, parent: Sequence, sample: ParallelSampleSpec, chosen: Chosen, now: float) -> None:
        """Start a parallel sample with its first token, ``chosen`` from its parent's logits, and order its ticket
        unless that token ends it."""
        child = parent.sample(sample, now)
        reason = child.append(chosen[0])
        if self.grammars is not None and parent.grammar is not None:
            child.follow_grammar(parent.grammar.sample())
            reason = self.grammars.accepted(child, (chosen[0],), reason)
        self.blocks.out.report_tokens(child, [chosen], reason, now, child.progress)
        if reason is None:
            self.sequences[child.seq_id] = child
            self._parallel_samples.order_ticket(parent, child)

    def _join(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence, and announce it to the collaborators."""
        self.queues.join(sequence)
        if self.states is not None:
            self.states.join(sequence)
        if self.drafts is not None:
            self.drafts.join(sequence)
        if self.adapters is not None:
            self.adapters.join(sequence, now)
        if self.partial_blocks is not None:
            self.partial_blocks.share(sequence)

    def _abandon(self, sequence: Sequence, now: float) -> None:
        """Close a sequence whose end was reported, without committing the rest; one that waits for a new ticket is only
        removed."""
        if sequence.state is SequenceState.RESUMING:
            del self.sequences[sequence.seq_id]
        else:
            self._close(sequence, now)

    def _close(self, sequence: Sequence, now: float, *, commit_rest: bool = False, resume: bool = False) -> None:
        """Remove a sequence from the queues and free its owned slots that will not be committed. With ``commit_rest``
        its full blocks are still committed; with ``resume`` it is preempted."""
        self.queues.leave(sequence)
        if commit_rest and sequence.state is SequenceState.RUNNING:
            if self.partial_blocks is not None and not resume:
                self.partial_blocks.keep(sequence)
            if self.states is not None:
                self.states.keep(sequence)
        self.free_slots.free(sequence.close(now, commit_rest=commit_rest, resume=resume))
        if self.states is not None:
            self.states.leave(sequence)
        if self.drafts is not None:
            self.drafts.leave(sequence)
        if self.adapters is not None:
            self.adapters.leave(sequence)
        if sequence.in_commit:
            self.blocks.out.hurry = True
        else:
            self._continue_closing(sequence, now)

    def _continue_closing(self, sequence: Sequence, now: float) -> None:
        """Continue closing a sequence without a commit in flight: commit the remaining blocks, or release the ticket,
        and then resume a preempted sequence."""
        if sequence.commit_rest:
            self.blocks.order_commit(sequence, now)
            if sequence.in_commit:
                return
        self.free_slots.free(sequence.cut(sequence.num_committed))
        self.blocks.release(sequence.ticket_id)
        if sequence.resume_after:
            sequence.wait_for_ticket()
            self.blocks.order_resume(sequence)
            return
        del self.sequences[sequence.seq_id]
        if not sequence.end_reported:
            self.blocks.out.report_end(sequence, Ending(), now)
