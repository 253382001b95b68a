"""The scheduler's results: the plan of the next step, and the outcome since the last one."""

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
    """Tokens start .. start + count of one sequence, to be computed in one step.

    Attributes:
        samples: number of last rows of the chunk whose logits choose a token; row p chooses token p + 1. The chunk's
            tokens after the first of these rows are proposed ones, kept or dropped on the step's commit. Forced tokens
            need no rows.
        parallel_seeds: seeds of parallel samples; for each, the last row chooses a further token, after all others.
        scores: number of rows that score the prompt's next token; the last is row ``scores_end`` - 1.
        pools: number of rows added to the text's pooled vector; the last is row ``scores_end`` - 1.
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
        """Position after the last row that is scored or pooled."""
        return min(self.start + self.count, self.sequence.score_end)

    def lengthened(self) -> ScheduledChunk:
        """Return a decode's chunk, extended by its proposed tokens unless its own token is unknown."""
        sequence, proposed = self.sequence, self.sequence.num_proposed
        if not proposed or sequence.num_in_flight:
            return self
        # Forced tokens need logits only for reported log probabilities.
        rows = 0 if sequence.forced and not sequence.reports_logprobs else proposed
        return ScheduledChunk(sequence, self.start, self.count + proposed, self.samples + rows)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decodes first, then prompt tails, oldest first.

    Attributes:
        copies: (source, target) slots of partial blocks to copy before anything runs: the parent's for a parallel
            sample, an earlier answer's for a conversation's next turn.
        budget_tokens: the step's token budget; the chunks may have fewer tokens.
        unknown: (index of a decode's chunk, row) where the decode's token is chosen by that row of the launched step,
            counted as in its Sampled.
        placements: (adapter slot, packed adapter) pairs to place before anything runs.
        adapters: int32, each chunk's adapter slot, or -1; None if no chunk has one.
        states: slots of the sequences' states; None in a model without them.
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
        """True if sampling of this step reads tokens that the launched step chooses."""
        return any(self.scheduled[index].sequence.reads_history for index, _ in self.unknown)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks, never above the budget (I5)."""
        return sum(chunk.count for chunk in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """New tokens of a sequence, or scores of its prompt's next tokens (``prompt_logprobs``), and its ``ending``.
    ``progress`` is set with the ending, and with a parallel sample's first token."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    ending: Ending | None = None
    progress: SequenceProgress | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOrder:
    """Order to commit a run of blocks in ``slots`` after the ticket's chain. Answered by :meth:`Scheduler.committed`.

    Attributes:
        seq_id: id of a sequence or, below 0, of a chain of a state or a draft.
        chunks: prefill chunks that this run completes. The event loop acknowledges them with the node's answer, which
            the scheduler gets only between two steps; a step may be long.
        after: empty, or the hash of the block whose following state the run is.
        may_wait: True if the run may be sent together with later ones.
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
    """Order to open and adopt a new ticket for a RESUMING sequence. Answered by :meth:`Scheduler.resumed` or
    :meth:`Scheduler.fail`."""

    seq_id: int
    block_hashes: bytes
    total_blocks: int
    priority: int = 0
    state_pages: int = 0
    flow: Flow = NO_FLOW


@dataclass(frozen=True, slots=True)
class ChainOrder:
    """Order to pin the cached blocks of a draft chain, under a ticket that reserves no slots and never waits. Answered
    by :meth:`Scheduler.chain_opened`."""

    chain_id: int
    block_hashes: bytes


@dataclass(slots=True)
class Outcome:
    """Updates for the clients, and orders for the event loop. The node gets them in this order: commits, releases,
    returned_slots, lease_blocks; then resumes and chain_orders start.

    Attributes:
        chunks: prefill chunks found committed when their range was added.
        releases: tickets to release.
        returned_slots: slots to return to the node.
        lease_blocks: number of slots to lease, 0 for none. Answered by :meth:`Scheduler.granted`.
        adapter_orders: digests of adapters to read and pack. Answered by :meth:`Scheduler.adapter_loaded` or
            :meth:`Scheduler.adapter_failed`.
        hurry: True if a closing chain or a parallel sample waits for the node's answer to an earlier commit.
        judged_draft_tokens: (drafted, accepted) of each stream whose draft tokens a step verified.
        preemptions, forced_tokens, late_masks, evicted_adapters: counts since the last outcome.
        load: the scheduler's load, by field of :class:`pillion.wire.registry.WorkerLoad`. A mapping, because the
            scheduler also runs where the packages of services are not installed.
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
        reports = self.updates or self.chunks or self.preemptions or self.late_masks or self.adapter_orders
        return not (reports or self.hurry or self.has_orders)

    @property
    def urgent(self) -> bool:
        """True if the orders must be sent at once, because something waits for the node's answer or for memory."""
        memory = self.releases or self.returned_slots or self.lease_blocks or self.resumes or self.chain_orders
        return bool(self.hurry or memory or not all(order.may_wait for order in self.commits))

    @property
    def has_orders(self) -> bool:
        orders = self.commits or self.releases or self.returned_slots or self.lease_blocks
        return bool(orders or self.resumes or self.chain_orders)

    def add_orders(self, other: Outcome) -> None:
        """Append the orders to the KV node of ``other``, a later outcome."""
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
        """Report new tokens of a sequence and, unless ``reason`` is None, its end."""
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
        """Report a sequence's end, with its last tokens that were not reported before."""
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
