"""Which tokens run in the next step, and who owns which slot: stall-free scheduling, sans-IO (I5, I9).

One class serves both services: a decode worker's streams sample, a prefill worker's spans end when computed. A step is

    plan = scheduler.schedule(now)             decodes, speculative tokens, then prompt tails, up to the budget exactly
    sampled = ...                              the backend's business
    outcome = scheduler.commit(plan, sampled, now)

and between two steps come events: :meth:`add`, :meth:`cancel`, :meth:`fail`, and the node's answers,
:meth:`committed`, :meth:`granted`, :meth:`resumed`. What they cause is in the next Outcome; without a step,
:meth:`flush` gives it. For a backend that runs ahead the next step is scheduled before this one is committed:
:meth:`launched` says so, and :mod:`pillion.engine.scheduling.in_flight` by which rules.

Order. :mod:`pillion.engine.scheduling.queues` says who is served first and who gives way;
:mod:`pillion.engine.scheduling.step_cost` how much a step takes.

Memory. The slots of a prompt and its first generated token come with the adopted ticket; only decodes grow, by slots
out of the stock. When it is empty a decode waits for the lease call under way; when the node is exhausted, a victim
gives way (maybe the one that asks): it lets go of its ticket and resumes under a new one with the same tokens (I6). One
preemption at a time is waited for before the next. What a victim had committed stays findable at the node, in whatever
tier the node keeps it: that, and not a copy of the worker's own, is where it is swapped out to.

Several answers to one prompt are computed as one until the first token. Then each further one is a sequence that
resumes: its ticket pins the same blocks, and the partial block behind them is copied from its parent before it writes
there. Where the parent is gone by then, those few tokens are computed again (I1).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from pillion.engine.scheduling.block_manager import BlockManager
from pillion.engine.scheduling.drafts import Drafter, speculate
from pillion.engine.scheduling.forks import Forks
from pillion.engine.scheduling.in_flight import InFlightSteps
from pillion.engine.scheduling.queues import SchedulerQueues
from pillion.engine.scheduling.sequence import Ending, ForkSpec, Holding, Sequence, SequenceState
from pillion.engine.scheduling.step_cost import MIN_TAIL_TOKENS, TokenBudget
from pillion.engine.scheduling.step_plan import Outcome, Sampled, SequencePiece, StepPlan
from pillion.engine.scheduling.updates import tell_end, tell_tokens
from pillion.errors import ConfigError, NotFound, PillionError
from pillion.types import TokenLogprob


class Scheduler:
    """Decides what runs.

    Args:
        block_size: tokens per block.
        max_num_batched_tokens: most tokens of a step.
        max_num_seqs: most sequences of a step.
        target_itl_s: duration of a step to aim at; 0 leaves the budget constant.
        max_whole_tokens: 0 cuts prompts at any token. Else prompts run whole, and this is the longest one.
        drafter: guesses tokens of decodes; None guesses nothing.

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
        max_whole_tokens: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs {max_num_seqs} must be from 1 to the step's token budget, {max_num_batched_tokens}"
            )
        # The longest prompt leaves room for a token, and itself has one of the seats.
        if max_whole_tokens and max_num_batched_tokens < max_whole_tokens + max_num_seqs - 2:
            raise ConfigError(
                f"without chunked prefill a step must hold a prompt of --max-model-len {max_whole_tokens} beside the "
                f"decodes of --max-num-seqs {max_num_seqs}: its token budget of {max_num_batched_tokens} is too small"
            )
        self.block_size = block_size
        self.budget = TokenBudget(max_num_batched_tokens, 0.0 if max_whole_tokens else target_itl_s)
        self.queues = SchedulerQueues(max_num_seqs)
        self._whole_prompts = max_whole_tokens > 0
        self._drafter = drafter
        self._in_flight = InFlightSteps()
        self._block_manager = BlockManager(block_size, self._in_flight)
        self._sequences: dict[int, Sequence] = {}
        self._forks = Forks(self.queues, self._block_manager)
        self._starved = False

    # Events.

    def add(self, sequence: Sequence, now: float) -> None:
        """A new sequence with its adopted ticket. Of a span, chunks that the ticket already holds are done."""
        self._sequences[sequence.seq_id] = sequence
        self._block_manager.leased(len(sequence.owned_slots()))
        self._block_manager.out.chunks += self._block_manager.take_chunks(sequence, sequence.num_committed)
        if sequence.left_to_compute == 0:
            self._close(sequence, now, commit_rest=True)
        else:
            self.queues.join(sequence)

    def cancel(self, seq_id: int, now: float) -> None:
        """Nobody wants it: its slots and its ticket are let go, and no update follows (I8). Of a stream that has ended,
        what is being committed stays. A fork that has not begun never will. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            for parent in self._sequences.values():
                if parent.forks:
                    parent.forks = tuple(fork for fork in parent.forks if fork.seq_id != seq_id)
        elif not sequence.told:
            sequence.told = True
            self._abandon(sequence, now)

    def fail(self, seq_id: int, error: PillionError, now: float) -> None:
        """It cannot go on: like :meth:`cancel`, with an update. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None and not sequence.told:
            tell_end(self._block_manager.out, sequence, Ending(error=error), now)
            self._abandon(sequence, now)

    def committed(self, seq_id: int, slots: Seq[int], refusal: str, now: float) -> None:
        """The node's answer to a CommitOrder: the slot that stays for each block, or why nothing was taken."""
        sequence = self._sequences[seq_id]
        if refusal:
            sequence.num_sent = sequence.num_committed
            sequence.may_commit = False
            if sequence.is_span and not sequence.told:
                error = NotFound(f"the KV node refused a commit, plan again: {refusal}")
                tell_end(self._block_manager.out, sequence, Ending(error=error), now)
        else:
            self._block_manager.accept(sequence, slots)
        if sequence.state is SequenceState.CLOSING:
            self._settle(sequence, now)
        elif sequence.told:
            self._close(sequence, now)
        else:
            self._block_manager.order_commit(sequence, now)
        self._forks.parent_heard(seq_id, self._sequences)

    def granted(self, slots: Seq[int], now: float) -> None:
        """The node's answer to Outcome.lease_blocks."""
        self._block_manager.granted(slots, now)

    def recall(self, blocks: int, now: float) -> None:
        """The node would like slots of the stock back."""
        self._block_manager.stock.recall(blocks)

    def resumed(self, seq_id: int, holding: Holding, now: float) -> None:
        """A new ticket was adopted for a sequence without one. When that is gone, the ticket is let go."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            self.let_go(holding, now)
            return
        self._block_manager.leased(len(holding.leased_slots))
        sequence.hold(holding)
        sequence.state = SequenceState.PREEMPTED
        self.queues.join(sequence)

    def let_go(self, holding: Holding, now: float) -> None:
        """An adopted ticket that nobody wants any more."""
        self._block_manager.let_go(holding)

    # A step.

    @property
    def may_run_ahead(self) -> bool:
        """Whether steps may be launched before the one before has landed: guesses are judged before the next ones."""
        return self._drafter is None

    def schedule(self, now: float) -> StepPlan:
        """The next step's work; empty when nothing can run. At most one step is under way."""
        pieces = self._decodes(now)
        begun, copies = self._forks.start_running(now, self._sequences)
        pieces += begun
        most = self.budget.max_tokens
        prompt_tails = self.queues.prompt_tails(now)
        if self._drafter is not None:
            spare = self.budget.left(pieces, 0, least_tokens=0) - self._owed(prompt_tails)
            pieces = speculate(self._drafter, pieces, spare)
        if prompt_tails:
            left = self.budget.left(pieces, prompt_tails[0].next_start)
            most = sum(piece.count for piece in pieces) + left
            pieces += self._tail_pieces(prompt_tails, left, now)
        self.budget.begin(pieces, now, len(self._in_flight))
        return StepPlan(tuple(pieces), tuple(copies), most, self._in_flight.unknown(pieces))

    def launched(self, plan: StepPlan) -> None:
        """The plan just made is under way, and is committed, or failed, behind those before it."""
        self._in_flight.launched(plan)

    def commit(self, plan: StepPlan, sampled: Sampled, now: float) -> Outcome:
        """Take the results of a step."""
        self.budget.end(now)
        pieces, sampled = self._in_flight.landed(plan, sampled)
        tokens, logprobs = iter(sampled.token_ids), iter(sampled.logprobs)
        for piece in pieces:
            sequence = piece.sequence
            sequence.num_computed = piece.start + piece.count
            if sequence.is_span:
                sequence.chunk_at(piece.start).computed_s = now
                if sequence.left_to_compute == 0:
                    self._close(sequence, now, commit_rest=True)
            if piece.samples:
                self._take_tokens(piece, tokens, logprobs, now)
            if sequence.state is SequenceState.RUNNING:
                self._block_manager.order_commit(sequence, now)
        return self.flush(now)

    def fail_step(self, plan: StepPlan, error: PillionError, now: float) -> Outcome:
        """The backend failed: so do the sequences of this batch, and only they."""
        self.budget.end(now, ok=False)
        for piece in self._in_flight.landed(plan, Sampled())[0]:
            piece.sequence.num_drafts = 0
            self.fail(piece.sequence.seq_id, error, now)
        return self.flush(now)

    def flush(self, now: float) -> Outcome:
        """What happened since the last outcome."""
        queues = self.queues
        out = self._block_manager.close((s for s in queues.running if s.decoding), now, urgent=self._starved)
        if not out.empty:
            # Nobody reads the load of an empty one, and there is one before most steps.
            out.load = queues.load(self.budget)
        return out

    @property
    def num_sequences(self) -> int:
        """Everything that is not gone, the closing and resuming ones included."""
        return len(self._sequences)

    def check_integrity(self) -> None:
        """Slots, lines and drafts add up. Raises AssertionError."""
        sequences = self._sequences.values()
        self._block_manager.check_integrity(sequences)
        self.queues.check_integrity(sequences)
        self._in_flight.check_integrity(sequences)
        assert not any(s.num_drafts for s in sequences), "a draft outlived its step"

    # Choosing.

    def _decodes(self, now: float) -> list[SequencePiece]:
        """One token for each running decode that has a slot for it."""
        pieces = []
        self._starved = False
        for sequence in tuple(self.queues.running):
            start = sequence.num_computed
            if sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.flying:
                start += sequence.flying
                if not self._in_flight.may_follow(sequence):
                    continue
            elif not sequence.decoding:
                continue
            if start == sequence.num_blocks * self.block_size and not self._grow(sequence, now):
                self._starved = self._starved or sequence.state is SequenceState.RUNNING
                continue
            pieces.append(SequencePiece(sequence, start, 1, 1))
        # Who came first may have given way to who came later.
        return [piece for piece in pieces if piece.sequence.state is SequenceState.RUNNING]

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Give a decode one more slot; may preempt. False: not in this step."""
        while True:
            slot = self._block_manager.stock.take()
            if slot is not None:
                sequence.add_slot(slot)
                return True
            # Memory that waits for a landing is on its way.
            if not self._block_manager.stock.exhausted(now) or self._in_flight.holding:
                return False
            if any(s.resume_after and s.state is SequenceState.CLOSING for s in self._sequences.values()):
                return False
            victim = self.queues.victim()
            victim.progress.preempted_s.append(now)
            self._block_manager.out.preemptions += 1
            self._close(victim, now, commit_rest=True, resume=True)
            if victim is sequence:
                return False

    def _tail_pieces(self, prompt_tails: Seq[Sequence], left: int, now: float) -> Iterator[SequencePiece]:
        """In this order, cut to ``left`` tokens together: short ones packed, the last one split where it has to be."""
        for sequence in prompt_tails:
            if left == 0:
                return
            if sequence.state is not SequenceState.RUNNING and not self.queues.free_seqs:
                continue
            wanted = sequence.step_end() - sequence.next_start
            if self._whole_prompts and wanted > left:
                return
            count = min(left, wanted)
            yield self._tail_piece(sequence, count, now)
            left -= count

    def _tail_piece(self, sequence: Sequence, count: int, now: float) -> SequencePiece:
        if sequence.state is not SequenceState.RUNNING:
            self.queues.start_running(sequence)
        start, progress = sequence.next_start, sequence.progress
        progress.first_step_s = progress.first_step_s or now
        if not progress.first_token_s:
            progress.tail_steps += 1
        if sequence.is_span:
            mark = sequence.chunk_at(start)
            mark.started_s = mark.started_s or now
        if sequence.is_span or start + count < sequence.num_tokens:
            return SequencePiece(sequence, start, count, 0)
        return SequencePiece(sequence, start, count, 1, tuple(fork.seed for fork in sequence.forks))

    def _owed(self, prompt_tails: Seq[Sequence]) -> int:
        """Tokens that stay free of guesses for a prompt tail: some, or all that it lacks where prompts run whole."""
        if not prompt_tails:
            return 0
        return prompt_tails[0].left_to_compute if self._whole_prompts else MIN_TAIL_TOKENS

    # Consequences.

    def _take_tokens(
        self, piece: SequencePiece, tokens: Iterator[int], logprobs: Iterator[TokenLogprob | None], now: float
    ) -> None:
        """One token, the drafts that were right behind it, and the first tokens of forks."""
        sequence = piece.sequence
        chosen = [(next(tokens), next(logprobs, None)) for _ in range(piece.samples)]
        guesses = sequence.tokens(sequence.num_tokens, sequence.num_tokens + sequence.num_drafts).tolist()
        sequence.num_drafts = 0
        sequence.decoding = True
        sequence.progress.tokens_came(now)
        taken, reason = 0, None
        for token, _ in chosen:
            reason = sequence.append(token)
            taken += 1
            # What was computed behind a wrong guess is void.
            if reason is not None or guesses[taken - 1 : taken] != [token]:
                break
        sequence.num_computed -= piece.samples - taken
        if guesses:
            sequence.right_guesses = taken - 1
            self._block_manager.out.right_guesses += taken - 1
        sequence.extend_hashes(sequence.num_computed)
        tell_tokens(self._block_manager.out, sequence, chosen[:taken], reason, now)
        if reason is not None:
            self._close(sequence, now, commit_rest=True)
        if sequence.forks:
            forks, sequence.forks = sequence.forks, ()
            for fork in forks:
                self._begin_fork(sequence, fork, next(tokens), next(logprobs, None), now)

    def _begin_fork(
        self, parent: Sequence, fork: ForkSpec, token: int, logprob: TokenLogprob | None, now: float
    ) -> None:
        """Its first token, chosen from its parent's logits; then it needs a ticket of its own."""
        child = parent.fork(fork, now)
        reason = child.append(token)
        tell_tokens(self._block_manager.out, child, [(token, logprob)], reason, now, child.progress)
        if reason is None:
            self._sequences[child.seq_id] = child
            self._forks.ask(parent, child)

    def _abandon(self, sequence: Sequence, now: float) -> None:
        """Stop without committing the rest."""
        if sequence.state is SequenceState.RESUMING:
            del self._sequences[sequence.seq_id]
        else:
            self._close(sequence, now)

    def _close(self, sequence: Sequence, now: float, *, commit_rest: bool = False, resume: bool = False) -> None:
        """Leave the lines; owned slots that will not be committed go back to the stock at once."""
        self.queues.leave(sequence)
        sequence.state = SequenceState.CLOSING
        sequence.commit_rest, sequence.resume_after = commit_rest, resume
        keep = sequence.full_blocks if commit_rest and sequence.may_commit else 0
        self._block_manager.stock.give(sequence.cut(max(keep, sequence.num_sent)))
        if not sequence.in_commit:
            self._settle(sequence, now)

    def _settle(self, sequence: Sequence, now: float) -> None:
        """The node has answered: commit what is left, or let go of the ticket."""
        if sequence.commit_rest:
            self._block_manager.order_commit(sequence, now)
            if sequence.in_commit:
                return
        self._block_manager.stock.give(sequence.cut(sequence.num_committed))
        self._block_manager.release(sequence.ticket_id)
        if sequence.resume_after:
            sequence.state = SequenceState.RESUMING
            self._block_manager.resume(sequence)
            return
        del self._sequences[sequence.seq_id]
        if not sequence.told:
            tell_end(self._block_manager.out, sequence, Ending(), now)
