"""Which tokens run in the next step, and who owns which slot: stall-free scheduling, sans-IO (I5, I9).

One class serves both services: a decode worker's streams sample, a prefill worker's spans end when computed. A step is

    plan = scheduler.schedule(now)             decodes, then remnants, oldest first, up to the budget exactly
    sampled = ...                              the backend's business
    outcome = scheduler.commit(plan, sampled, now)

and between two steps come events: :meth:`add`, :meth:`cancel`, :meth:`fail`, and the node's answers,
:meth:`committed`, :meth:`granted`, :meth:`resumed`. What they cause is in the next Outcome; without a step,
:meth:`flush` gives it.

Memory. The slots of a prompt and its first generated token come with the adopted ticket; only decodes grow, by slots
out of the stock. When it is empty a decode waits for the lease call under way; when the node is exhausted, the newest
sequence gives way (even the one that asks): it lets go of its ticket and resumes under a new one with the same tokens
(I6). So the oldest always gets on, and one preemption at a time is waited for before the next.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from engine.plan import ChunkDone, CommitOrder, Load, Outcome, Piece, ResumeOrder, StepPlan, Update
from engine.sequence import Ending, Holding, Sequence, State
from engine.slots import SlotStock
from pillion.errors import ConfigError, NotFound, PillionError

# The stock asks for slots when it lacks what decodes need within the first many tokens, and fills up to the second.
STOCK_LOW_TOKENS = 4
STOCK_TARGET_TOKENS = 16


def _age(sequence: Sequence) -> int:
    return sequence.seq_id


class Scheduler:
    """Raises ConfigError unless the decodes of ``max_num_seqs`` sequences fit the budget."""

    def __init__(self, *, block_size: int, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs {max_num_seqs} must be from 1 to the step's token budget, {max_num_batched_tokens}"
            )
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.stock = SlotStock()
        self._sequences: dict[int, Sequence] = {}
        # Both sorted by age, so that the last one is the newest.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._starved = False
        self._leased = 0
        self._out = Outcome()

    # Events.

    def add(self, sequence: Sequence, now: float) -> None:
        """A new sequence with its adopted ticket. Of a span, chunks that the ticket already holds are done."""
        self._sequences[sequence.seq_id] = sequence
        self._leased += len(sequence.owned_slots())
        self._out.chunks += self._take_chunks(sequence, sequence.num_committed)
        if sequence.left_to_compute == 0:
            self._close(sequence, now, commit_rest=True)
        else:
            insort(self._waiting, sequence, key=_age)

    def cancel(self, seq_id: int, now: float) -> None:
        """Nobody wants it: its slots and its ticket are let go, and no update follows (I8). Of a stream that has ended,
        what is being committed stays. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None and not sequence.told:
            sequence.told = True
            self._abandon(sequence, now)

    def fail(self, seq_id: int, error: PillionError, now: float) -> None:
        """It cannot go on: like :meth:`cancel`, with an update. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None and not sequence.told:
            self._tell_end(sequence, Ending(error=error), now)
            self._abandon(sequence, now)

    def committed(self, seq_id: int, slots: Seq[int], refusal: str, now: float) -> None:
        """The node's answer to a CommitOrder: the slot that stays for each block, or why nothing was taken."""
        sequence = self._sequences[seq_id]
        if refusal:
            sequence.num_sent = sequence.num_committed
            sequence.may_commit = False
            if sequence.is_span and not sequence.told:
                error = NotFound(f"the KV node refused a commit, plan again: {refusal}")
                self._tell_end(sequence, Ending(error=error), now)
        else:
            self._accept(sequence, slots)
        if sequence.state is State.CLOSING:
            self._settle(sequence, now)
        elif sequence.told:
            self._close(sequence, now)
        else:
            self._order_commit(sequence, now)

    def granted(self, slots: Seq[int], now: float) -> None:
        """The node's answer to Outcome.lease_blocks."""
        self._leased += len(slots)
        self.stock.granted(slots, now)

    def recall(self, blocks: int, now: float) -> None:
        """The node would like slots of the stock back."""
        self.stock.recall(blocks)

    def resumed(self, seq_id: int, holding: Holding, now: float) -> None:
        """A new ticket was adopted for a preempted sequence. When that is gone, the ticket is let go."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            self.let_go(holding, now)
            return
        self._leased += len(holding.leased_slots)
        sequence.hold(holding)
        insort(self._waiting, sequence, key=_age)

    def let_go(self, holding: Holding, now: float) -> None:
        """An adopted ticket that nobody wants any more."""
        self._leased += len(holding.leased_slots)
        self.stock.give(holding.leased_slots)
        self._release(holding.ticket_id)

    # A step.

    def schedule(self, now: float) -> StepPlan:
        """The next step's work; empty when nothing can run."""
        pieces = self._decodes(now)
        # Speculative tokens of the decodes go here, before the remnants, once there are any: they lengthen decode
        # pieces by what the budget leaves.
        left = self.max_num_batched_tokens - len(pieces)
        for sequence in self._remnants():
            if left == 0:
                break
            count = min(left, sequence.step_end() - sequence.num_computed)
            pieces.append(self._remnant_piece(sequence, count, now))
            left -= count
        return StepPlan(tuple(pieces))

    def commit(self, plan: StepPlan, sampled: Seq[int], now: float) -> Outcome:
        """Take the results of a step: ``sampled`` has one token for each piece that samples, in order."""
        tokens = iter(sampled)
        for piece in plan.pieces:
            sequence = piece.sequence
            sequence.num_computed = piece.start + piece.count
            if sequence.is_span:
                sequence.chunk_at(piece.start).computed_s = now
            if piece.samples:
                self._take_token(sequence, next(tokens), now)
            elif sequence.is_span and sequence.left_to_compute == 0:
                self._close(sequence, now, commit_rest=True)
            if sequence.state is State.RUNNING:
                self._order_commit(sequence, now)
        return self.flush(now)

    def fail_step(self, plan: StepPlan, error: PillionError, now: float) -> Outcome:
        """The backend failed: so do the sequences of this batch, and only they."""
        for piece in plan.pieces:
            self.fail(piece.sequence.seq_id, error, now)
        return self.flush(now)

    def flush(self, now: float) -> Outcome:
        """What happened since the last outcome."""
        growing = [s for s in self._running if s.decoding]
        room = [s.num_blocks * self.block_size - s.num_computed for s in growing]
        low = sum(tokens < STOCK_LOW_TOKENS for tokens in room)
        self.stock.aim(low, sum(tokens < STOCK_TARGET_TOKENS for tokens in room))
        out, self._out = self._out, Outcome()
        out.give_back.extend(self.stock.surplus())
        self._leased -= len(out.give_back)
        out.lease_blocks = self.stock.wanted(now, urgent=self._starved)
        out.load = Load(len(self._running), len(self._waiting), sum(s.left_to_compute for s in self._waiting))
        return out

    @property
    def num_sequences(self) -> int:
        """Everything that is not gone, the closing and resuming ones included."""
        return len(self._sequences)

    def check_integrity(self) -> None:
        """Every slot leased to this worker is in exactly one place (I4). Raises AssertionError."""
        self.stock.check_integrity()
        places = list(self.stock.slots)
        for sequence in self._sequences.values():
            places.extend(sequence.owned_slots())
        assert len(set(places)) == len(places), "a slot is in two places"
        assert len(places) == self._leased, f"{self._leased} slots are leased, {len(places)} are accounted for"
        for line in (self._waiting, self._running):
            assert line == sorted(line, key=_age), "a line is out of order"
            assert all(self._sequences.get(s.seq_id) is s for s in line), "a line holds a sequence that is gone"
        assert len(self._running) <= self.max_num_seqs

    # Choosing.

    def _decodes(self, now: float) -> list[Piece]:
        """One token for each running decode that has a slot for it."""
        pieces = []
        self._starved = False
        for sequence in tuple(self._running):
            if sequence.state is not State.RUNNING or not sequence.decoding:
                continue
            if sequence.num_computed == sequence.num_blocks * self.block_size and not self._grow(sequence, now):
                self._starved = self._starved or sequence.state is State.RUNNING
                continue
            pieces.append(Piece(sequence, sequence.num_computed, 1, samples=True))
        return pieces

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Give a decode one more slot; may preempt. False: not in this step."""
        while True:
            slot = self.stock.take()
            if slot is not None:
                sequence.add_slot(slot)
                return True
            coming = any(s.resume_after and s.state is State.CLOSING for s in self._sequences.values())
            if coming or not self.stock.exhausted(now):
                return False
            newest = max((line[-1] for line in (self._waiting, self._running) if line), key=_age)
            self._preempt(newest, now)
            if newest is sequence:
                return False

    def _remnants(self) -> Iterator[Sequence]:
        """What has prompt left to compute, oldest first; of the waiting line, as many as may run."""
        room = self.max_num_seqs - len(self._running)
        running = [s for s in self._running if not s.decoding and s.left_to_compute]
        return heapq.merge(running, list(islice(self._waiting, room)), key=_age)

    def _remnant_piece(self, sequence: Sequence, count: int, now: float) -> Piece:
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_age)
            sequence.state = State.RUNNING
        start = sequence.num_computed
        marks = sequence.marks
        marks.first_step_s = marks.first_step_s or now
        if not marks.first_token_s:
            marks.remnant_steps += 1
        if sequence.is_span:
            mark = sequence.chunk_at(start)
            mark.started_s = mark.started_s or now
        return Piece(sequence, start, count, samples=not sequence.is_span and start + count == sequence.num_tokens)

    # Consequences.

    def _take_token(self, sequence: Sequence, token: int, now: float) -> None:
        reason = sequence.append(token)
        sequence.decoding = True
        sequence.marks.first_token_s = sequence.marks.first_token_s or now
        sequence.extend_hashes(sequence.num_computed)
        if reason is None:
            self._out.updates.append(Update(seq_id=sequence.seq_id, token_ids=(token,)))
        else:
            self._tell_end(sequence, Ending(reason=reason), now, (token,))
            self._close(sequence, now, commit_rest=True)

    def _tell_end(self, sequence: Sequence, ending: Ending, now: float, last: tuple[int, ...] = ()) -> None:
        sequence.told = True
        sequence.marks.ended_s = now
        update = Update(seq_id=sequence.seq_id, token_ids=last, ending=ending, marks=sequence.marks)
        self._out.updates.append(update)

    def _abandon(self, sequence: Sequence, now: float) -> None:
        """Stop without committing the rest."""
        if sequence.state is State.RESUMING:
            del self._sequences[sequence.seq_id]
        else:
            self._close(sequence, now)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        sequence.marks.preemptions += 1
        self._close(sequence, now, commit_rest=True, resume=True)

    def _close(self, sequence: Sequence, now: float, *, commit_rest: bool = False, resume: bool = False) -> None:
        """Leave the lines; owned slots that will not be committed go back to the stock at once."""
        for line in (self._waiting, self._running):
            if sequence in line:
                line.remove(sequence)
        sequence.state = State.CLOSING
        sequence.commit_rest, sequence.resume_after = commit_rest, resume
        keep = sequence.full_blocks if commit_rest and sequence.may_commit else 0
        self.stock.give(sequence.cut(max(keep, sequence.num_sent)))
        if not sequence.in_commit:
            self._settle(sequence, now)

    def _settle(self, sequence: Sequence, now: float) -> None:
        """The node has answered: commit what is left, or let go of the ticket."""
        if sequence.commit_rest:
            self._order_commit(sequence, now)
            if sequence.in_commit:
                return
        self.stock.give(sequence.cut(sequence.num_committed))
        self._release(sequence.ticket_id)
        if sequence.resume_after:
            sequence.state = State.RESUMING
            # One token is always left to compute: its logits are wanted.
            whole = (sequence.num_tokens - 1) // self.block_size
            hashes = sequence.block_hashes(0, whole)
            total = sequence.num_tokens // self.block_size + 1
            self._out.resumes.append(ResumeOrder(seq_id=sequence.seq_id, block_hashes=hashes, total_blocks=total))
            return
        del self._sequences[sequence.seq_id]
        if not sequence.told:
            self._tell_end(sequence, Ending(), now)

    def _release(self, ticket_id: int) -> None:
        self._out.releases.append(ticket_id)
        self.stock.memory_is_coming()

    def _order_commit(self, sequence: Sequence, now: float) -> None:
        """Send the full blocks that the node has not seen, one run at a time."""
        start, end = sequence.num_committed, sequence.full_blocks
        if sequence.in_commit or not sequence.may_commit or end <= start:
            return
        sequence.num_sent = end
        self._out.commits.append(
            CommitOrder(
                seq_id=sequence.seq_id,
                ticket_id=sequence.ticket_id,
                slots=sequence.slots(start, end),
                block_hashes=sequence.block_hashes(start, end),
                ordered_s=now,
                chunks=self._take_chunks(sequence, end),
            )
        )

    def _accept(self, sequence: Sequence, slots: Seq[int]) -> None:
        """The run is committed. Where another committer was first, read from its slot; the own one is free again: no
        step runs between two steps (I2)."""
        for block, slot in enumerate(slots, start=sequence.num_committed):
            own = sequence.slots(block, block + 1)[0]
            if own == slot:
                self._leased -= 1
            else:
                sequence.swap_slot(block, slot)
                self.stock.send_back((own,))
        sequence.num_committed = sequence.num_sent

    def _take_chunks(self, sequence: Sequence, blocks: int) -> tuple[ChunkDone, ...]:
        """The next chunks that end within the first ``blocks`` blocks; each is taken once."""
        held, first = blocks * self.block_size, sequence.chunks_acked
        done = [mark for mark in sequence.chunks[first:] if mark.end_tokens <= held]
        sequence.chunks_acked += len(done)
        arrived_s = sequence.marks.arrived_s
        return tuple(
            ChunkDone(
                seq_id=sequence.seq_id,
                index=index,
                end_tokens=mark.end_tokens,
                started_s=mark.started_s or arrived_s,
                computed_s=mark.computed_s or arrived_s,
            )
            for index, mark in enumerate(done, start=first)
        )
