"""Defines the scheduler's two results: the plan of the next step, and the outcome of what happened since the last
outcome."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.scheduling.block_chain import ChunkDone
from pillion.engine.scheduling.sequence import Ending, Sequence, SequenceProgress
from pillion.kernels.step import Int32, StateSlots
from pillion.rules.priority import NO_FLOW, Flow
from pillion.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Describes tokens start .. start + count of one sequence, to be computed in one step.

    Attributes:
        samples: rows at the end of the chunk whose logits choose tokens; the row of position p chooses that of p + 1.
            With 0 none does. Above 1 the tokens after the first of these rows are proposed, and the sequence holds them
            after its own until the step's commit has judged them. Tokens that are certain need no rows.
        parallel_seeds: the last row chooses one more token with each of these seeds, in this order, after the others.
        scores: number of rows of the chunk that score the prompt's next token; the last one is that of position
            ``scores_end`` - 1.
        pools: number of rows of the chunk that are added to a text's vector; the last one is that of the same position.
    """

    sequence: Sequence
    start: int
    count: int
    samples: int
    parallel_seeds: tuple[int, ...] = ()
    scores: int = 0
    pools: int = 0

    @property
    def scores_end(self) -> int:
        """Gives the position after the last one whose row is scored or pooled."""
        return min(self.start + self.count, self.sequence.score_end)

    def lengthened(self) -> ScheduledChunk:
        """Returns the chunk, lengthened by the tokens that are proposed after it, if the sequence's own token is
        known."""
        sequence, proposed = self.sequence, self.sequence.num_proposed
        if not proposed or sequence.num_in_flight:
            return self
        # Tokens that are certain need logits only where their log probabilities are reported.
        rows = 0 if sequence.forced and not sequence.reports_logprobs else proposed
        return ScheduledChunk(sequence, self.start, self.count + proposed, self.samples + rows)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Describes one step: decodes first, then prompt tails, oldest first.

    Attributes:
        copies: (source, target) slots to copy before anything runs: the prompt's last, partial block, for a parallel
            sample that is about to write after it (copy-on-write).
        budget_tokens: the step's token budget, which the chunks may leave unused.
        unknown: (chunk, row) of decodes whose token is what that row of the launched step chooses, counted as in its
            Sampled.
        placements: (slot, packed adapter) pairs that the backend gets before anything runs.
        adapters: int32, the slot of the adapter of each chunk's sequence, or -1; None where no chunk has one.
        states: where the states of the chunks' sequences are; None in a model without them.
    """

    scheduled: tuple[ScheduledChunk, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    budget_tokens: int = 0
    unknown: tuple[tuple[int, int], ...] = ()
    placements: tuple[tuple[int, PackedAdapter], ...] = ()
    adapters: Int32 | None = None
    states: StateSlots | None = None

    @property
    def awaits_tokens(self) -> bool:
        """Says whether a choice of this step depends on tokens that the launched step chooses."""
        return any(self.scheduled[place].sequence.reads_history for place, _ in self.unknown)

    @property
    def num_tokens(self) -> int:
        """Gives the number of tokens of all chunks, which is never above the budget (I5)."""
        return sum(chunk.count for chunk in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Holds a sequence's new tokens, and its end. ``progress`` comes with the end, and with a parallel sample's first
    token. ``prompt_logprobs`` are those of the prompt's next tokens, and come in updates of their own."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    ending: Ending | None = None
    progress: SequenceProgress | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOrder:
    """Asks the KV node to commit these slots, a run of blocks that follows the ticket's chain.
    :meth:`Scheduler.committed` takes the answer.

    ``seq_id`` names a sequence, or, below 0, a chain of a feature's. ``chunks`` are those that are committed when the
    node takes the run. They are reported with the node's answer, on asyncio's thread: the scheduler itself gets that
    answer only between two steps, and a step may be long. With ``after`` the run is the state after the block of
    that hash. Nobody waits for a run that ``may_wait``, so it may go to the node together with later ones.
    """

    seq_id: int
    ticket_id: int
    slots: tuple[int, ...]
    block_hashes: bytes
    ordered_s: float
    chunks: tuple[ChunkDone, ...] = ()
    after: bytes = b""
    may_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOrder:
    """Asks for a new ticket for a sequence without one, to be opened and adopted. :meth:`Scheduler.resumed` or
    :meth:`Scheduler.fail` takes the answer."""

    seq_id: int
    block_hashes: bytes
    total_blocks: int
    priority: int = 0
    state_pages: int = 0
    flow: Flow = NO_FLOW


@dataclass(frozen=True, slots=True)
class ChainOrder:
    """Asks the KV node to pin the blocks that it has of a feature's own chain, under a ticket that reserves nothing and
    never waits. :meth:`Scheduler.chain_opened` takes the answer."""

    chain_id: int
    block_hashes: bytes


@dataclass(slots=True)
class Outcome:
    """Holds everything that asyncio's side has to do and to report. The node gets its orders in this order: commits,
    releases, returned_slots, lease_blocks; then resumes and chain_orders begin.

    Attributes:
        chunks: the chunks that were committed before the prefill range came.
        releases: tickets whose hold this worker lets go.
        returned_slots: slots that leave the free slots.
        lease_blocks: number of slots to lease, 0 for none; :meth:`Scheduler.granted` takes the answer.
        adapter_orders: digests of adapters to be read and packed; :meth:`Scheduler.adapter_loaded` or
            :meth:`Scheduler.adapter_failed` takes each answer.
        hurry: whether somebody waits for the node's answer to an earlier run: its chain, which closes, or a parallel
            sample.
        judged_draft_tokens: for each stream whose proposed tokens were judged, how many there were, and how many were
            right.
        preemptions, forced_tokens, late_masks, evicted_adapters: how many there were since the last outcome.
        load: the scheduler's figures of load, by their names in :class:`pillion.wire.registry.WorkerLoad`. They are a
            mapping because the scheduler runs where the packages of services are not installed.
    """

    updates: list[Update] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)
    commits: list[CommitOrder] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    returned_slots: list[int] = field(default_factory=list)
    lease_blocks: int = 0
    resumes: list[ResumeOrder] = field(default_factory=list)
    chain_orders: list[ChainOrder] = field(default_factory=list)
    adapter_orders: list[str] = field(default_factory=list)
    hurry: bool = False
    judged_draft_tokens: list[tuple[int, int]] = field(default_factory=list)
    preemptions: int = 0
    forced_tokens: int = 0
    late_masks: int = 0
    evicted_adapters: int = 0
    load: dict[str, Any] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        told = self.updates or self.chunks or self.preemptions or self.late_masks or self.adapter_orders
        return not (told or self.hurry or self.has_orders)

    @property
    def urgent(self) -> bool:
        """Says whether somebody waits for what is ordered, or for what was ordered before."""
        memory = self.releases or self.returned_slots or self.lease_blocks or self.resumes or self.chain_orders
        return bool(self.hurry or memory or not all(order.may_wait for order in self.commits))

    @property
    def has_orders(self) -> bool:
        orders = self.commits or self.releases or self.returned_slots or self.lease_blocks
        return bool(orders or self.resumes or self.chain_orders)

    def add_orders(self, other: Outcome) -> None:
        """Appends the orders to the KV node of a later outcome."""
        self.commits += other.commits
        self.releases += other.releases
        self.returned_slots += other.returned_slots
        self.lease_blocks += other.lease_blocks
        self.resumes += other.resumes
        self.chain_orders += other.chain_orders

    def report_tokens(
        self,
        sequence: Sequence,
        chosen: Seq[tuple[int, TokenLogprob | None]],
        reason: FinishReason | None,
        now: float,
        progress: SequenceProgress | None = None,
    ) -> None:
        """Reports new tokens of a sequence; with a ``reason`` they are its last ones."""
        ids = tuple(token for token, _ in chosen)
        logprobs = tuple(logprob for _, logprob in chosen if logprob is not None)
        if reason is None:
            self.updates.append(Update(seq_id=sequence.seq_id, token_ids=ids, logprobs=logprobs, progress=progress))
        else:
            self.report_end(sequence, Ending(reason=reason), now, ids, logprobs)

    def report_end(
        self,
        sequence: Sequence,
        ending: Ending,
        now: float,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Reports how a sequence ended, and the tokens that came with that. Nothing is reported of it afterwards."""
        sequence.report_end(now)
        self.updates.append(
            Update(
                seq_id=sequence.seq_id,
                token_ids=token_ids,
                logprobs=logprobs,
                ending=ending,
                progress=sequence.progress,
            )
        )
