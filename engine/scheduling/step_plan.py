"""The scheduler's two results: the plan of the next step, and the outcome of what happened since the last outcome."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pillion.engine.backends.backend import PackedAdapter
from pillion.engine.scheduling.block_chain import ChunkDone
from pillion.engine.scheduling.sequence import Ending, Sequence, SequenceProgress
from pillion.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens start .. start + count of one sequence, to be computed in one step.

    Attributes:
        samples: rows at the end of the piece whose logits choose tokens; the row of position p chooses that of p + 1.
            0: none. Above 1: the tokens behind the first of these rows are drafts, which the sequence holds behind its
            own tokens until the step's commit has judged them. Drafts that a grammar forces need no rows.
        fork_seeds: the last row chooses one more token with each of these seeds, in this order, behind the others.
        scores: rows of the piece, the last one that of position ``scores_end`` - 1, that score the prompt's next token.
    """

    sequence: Sequence
    start: int
    count: int
    samples: int
    fork_seeds: tuple[int, ...] = ()
    scores: int = 0

    @property
    def scores_end(self) -> int:
        """Behind the last position whose row is scored."""
        return min(self.start + self.count, self.sequence.score_end)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decodes first, then prompt tails, oldest first.

    Attributes:
        copies: (source, target) slots to copy before anything runs: the prompt's last, partial block, for a fork that
            is about to write behind it (copy-on-write).
        budget_tokens: the step's token budget, which the pieces may leave unused.
        unknown: (piece, row) of decodes whose token is what that row of the launched step chooses, counted as in its
            Sampled.
        placements: (place, packed adapter) pairs that the backend gets before anything runs.
    """

    pieces: tuple[SequencePiece, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    budget_tokens: int = 0
    unknown: tuple[tuple[int, int], ...] = ()
    placements: tuple[tuple[int, PackedAdapter], ...] = ()

    @property
    def awaits_tokens(self) -> bool:
        """Whether a choice of this step depends on tokens that the launched step chooses."""
        return any(self.pieces[place].sequence.reads_history for place, _ in self.unknown)

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces; never above the budget (I5)."""
        return sum(piece.count for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A sequence's new tokens, and its end. ``progress`` comes with the end, and with a fork's first token.
    ``prompt_logprobs`` are those of the prompt's next tokens, and come in updates of their own."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    ending: Ending | None = None
    progress: SequenceProgress | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOrder:
    """Seal these slots, a run that follows the ticket's tail. Answered with :meth:`Scheduler.committed`.

    ``seq_id`` names a sequence, or, below 0, a draft model's chain. ``chunks`` are those that are committed when the
    node takes the run. They are reported with the node's answer, on asyncio's thread: the scheduler itself gets that
    answer only between two steps, and a step may be long.
    """

    seq_id: int
    ticket_id: int
    slots: tuple[int, ...]
    block_hashes: bytes
    ordered_s: float
    chunks: tuple[ChunkDone, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOrder:
    """Open and adopt a new ticket for a sequence without one: :meth:`Scheduler.resumed`, or :meth:`Scheduler.fail`."""

    seq_id: int
    block_hashes: bytes
    total_blocks: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Pin what the node has of a draft model's chain, under a ticket that reserves nothing and never waits. Answered
    with :meth:`Scheduler.draft_opened`."""

    chain_id: int
    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """A scheduler's load, for the registry and so for the planner: fields of a ComponentRecord.

    Attributes:
        running_requests, waiting_requests: sequences that run, and those that do not.
        queued_tokens: tokens of prompts, begun or not, that are yet to be computed.
        context_tokens: KV tokens that the ``decoding_requests`` streams read in a step.
        step_cost_s: see StepCost.weights_s.
        adapters, adapter_waits: digests of the adapters that are ready, and sequences that wait for theirs.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    queued_tokens: int = 0
    decoding_requests: int = 0
    context_tokens: int = 0
    step_cost_s: tuple[float, ...] = ()
    largest_step_tokens: int = 0
    adapters: tuple[str, ...] = ()
    adapter_waits: int = 0


@dataclass(slots=True)
class Outcome:
    """Everything that asyncio's side has to do and to report. The node gets its orders in this order: commits,
    releases, give_back, lease_blocks; then resumes and draft_orders begin.

    Attributes:
        chunks: those that were committed before the span came.
        releases: tickets whose hold this worker lets go.
        give_back: slots that leave the stock.
        lease_blocks: slots to lease; answered with :meth:`Scheduler.granted`. 0: none.
        adapters: digests of adapters to load; each is answered with :meth:`Scheduler.adapter_loaded` or
            :meth:`Scheduler.adapter_failed`.
        judged_guesses: of each stream's guess that was judged, its tokens, and how many of them were right.
        preemptions, forced_tokens, late_masks, evicted_adapters: how many there were since the last outcome.
    """

    updates: list[Update] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)
    commits: list[CommitOrder] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    give_back: list[int] = field(default_factory=list)
    lease_blocks: int = 0
    resumes: list[ResumeOrder] = field(default_factory=list)
    draft_orders: list[DraftOrder] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    judged_guesses: list[tuple[int, int]] = field(default_factory=list)
    preemptions: int = 0
    forced_tokens: int = 0
    late_masks: int = 0
    evicted_adapters: int = 0
    load: SchedulerLoad = field(default_factory=SchedulerLoad)

    @property
    def empty(self) -> bool:
        told = self.updates or self.chunks or self.preemptions or self.late_masks or self.adapters
        return not (told or self.has_orders)

    @property
    def has_orders(self) -> bool:
        orders = self.commits or self.releases or self.give_back or self.lease_blocks
        return bool(orders or self.resumes or self.draft_orders)

    def add_orders(self, other: Outcome) -> None:
        """Append the node's orders of a later outcome."""
        self.commits += other.commits
        self.releases += other.releases
        self.give_back += other.give_back
        self.lease_blocks += other.lease_blocks
        self.resumes += other.resumes
        self.draft_orders += other.draft_orders

    def report_tokens(
        self,
        sequence: Sequence,
        chosen: Seq[tuple[int, TokenLogprob | None]],
        reason: FinishReason | None,
        now: float,
        progress: SequenceProgress | None = None,
    ) -> None:
        """New tokens of a sequence; with a ``reason`` they are its last ones."""
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
        """How a sequence ended, and the tokens that came with that. Nothing is reported of it afterwards."""
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
