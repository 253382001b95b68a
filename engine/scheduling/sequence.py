"""One sequence of a worker, a decode stream or a prefill range: its tokens, its block table, and their progress.

    WAITING --first chunk--> RUNNING --stop id, length, range computed, cancel, failure-----> CLOSING --settled--> gone
                             ^     |  '--gave way to another tenant--> PREEMPTED              |
                             |     +--preempted (also from WAITING, PREEMPTED)-----------> CLOSING
                 first chunk |                                                               | settled
                        PREEMPTED <-- a new ticket was opened and adopted --------------- RESUMING
                                                                                             ^
              a parallel sample: another answer to its parent's prompt, with its own first token --+

Its blocks are a :class:`pillion.engine.scheduling.block_chain.BlockChain`. A CLOSING sequence waits only for the node's
answers to its commits: its other owned slots were freed when CLOSING began, and its ticket is released when CLOSING
ends. Proposed tokens follow the sequence's own tokens for one step. A sequence belongs to one scheduler, and only its
methods write its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import islice

import numpy as np

from pillion.engine.drafts.acceptance import DraftRecord
from pillion.engine.grammars.grammar_state import GrammarState
from pillion.engine.sampling.logit_edits import LogitEdits
from pillion.engine.scheduling.block_chain import AdoptedTicket, BlockChain, ChunkDone
from pillion.errors import PillionError
from pillion.kernels.step import Float32, Int32
from pillion.rules.priority import NO_FLOW, OUTPUT_COST, Flow, prompt_order, queue_order
from pillion.types import FinishReason, PoolingParams, SamplingParams


def rope_shift(text_tokens: int, original_tokens: int, max_model_len: int) -> int:
    """Return the row of a model's rotary tables for position 0 of a text of at most ``text_tokens`` tokens (0:
    unknown): 0, or ``max_model_len``, where the rows for texts within the model's original length begin."""
    return max_model_len if 0 < text_tokens <= original_tokens < max_model_len else 0


class SequenceState(Enum):
    """The states drawn in this module's docstring."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    CLOSING = "closing"
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class ParallelSampleSpec:
    """Another answer to a prompt: its own stream from the first token on, with its own seed."""

    seq_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ended: ``reason`` for a stream, ``error`` for a failure, neither for a finished prefill range.
    ``vector``: the pooled text as float32, little-endian; empty unless requested."""

    reason: FinishReason | None = None
    error: PillionError | None = None
    vector: bytes = b""


@dataclass(slots=True)
class SequenceProgress:
    """Times of a sequence, in seconds of the scheduler's clock; 0.0 means not yet.

    Attributes:
        tail_tokens, tail_steps: prompt tokens to compute on arrival, and steps that computed them.
        token_steps: steps with tokens of the answer.
        last_token_s, longest_gap_s: end of the last step with tokens, and the longest time between two.
        preempted_s: time of each preemption.
        adapter_s: when its adapter was first ready.
        drafted_tokens, accepted_tokens: verified draft tokens, and the accepted ones among them.
    """

    arrived_s: float
    first_step_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    tail_tokens: int = 0
    tail_steps: int = 0
    token_steps: int = 0
    last_token_s: float = 0.0
    longest_gap_s: float = 0.0
    preempted_s: list[float] = field(default_factory=list)
    adapter_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def preemptions(self) -> int:
        return len(self.preempted_s)

    def record_token_step(self, now: float) -> None:
        """Record the end of a step with tokens of the answer."""
        if self.token_steps:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.token_steps += 1
        self.last_token_s = now


@dataclass(eq=False, repr=False)
class Sequence(BlockChain):
    """A decode stream or prefill range of one worker; its states are drawn in the module's docstring. Its tokens and
    block table are allocated once.

    Args:
        ticket, now: adopted ticket and time of arrival.
        hashes: 32 bytes for each leading whole block whose hash is known.
        vocab_size: number of logits per row; read only if ``sampling`` edits logits.

    Attributes:
        seq_id: unique on the worker, in order of arrival.
        token_ids: int32 [N], the prompt and what earlier attempts generated. A prefill range's tokens before
            ``start_tokens`` are never read.
        parent_hash: hash of the block that ends at ``start_tokens``; the request's root if that is 0.
        start_tokens: where hashing starts, a multiple of the block size; 0 for a stream.
        prompt_tokens: number of token_ids that are prompt.
        sampling: resolved parameters; None for a prefill range, which ends when its tokens are computed.
        rope_shift: row of the rotary tables for position 0.
        max_model_len: max tokens of prompt and answer together.
        chunk_ends: ends of a prefill range's chunks, each acknowledged on its commit; a step may compute several. Empty
            for a stream.
        priority: smaller is more urgent (:mod:`pillion.rules.priority`).
        parallel_samples: further answers, which start with this sequence's first token. Empty for a prefill range.
        scored_tokens: with ``sampling.prompt_logprobs``, number of prompt tokens, after the first, that need no score.
        adapter: digest of the adapter; "" for the model alone.
        pooling: how the text becomes a vector, with its positions; None for a sequence that generates.
        keeps_blocks: whether whole blocks are committed; False for a model without keys and values.
        flow: the tenant's share of the worker.
        kept_tokens: positions where other texts are expected to diverge; a model with states keeps the state at the
            last block boundary before each.
    """

    ticket: InitVar[AdoptedTicket]
    block_size: int
    now: InitVar[float]
    _: KW_ONLY
    seq_id: int
    token_ids: Int32
    parent_hash: bytes
    start_tokens: int = 0
    prompt_tokens: int = 0
    sampling: SamplingParams | None = None
    rope_shift: int = 0
    max_model_len: int = 0
    chunk_ends: tuple[int, ...] = ()
    priority: int = 0
    parallel_samples: tuple[ParallelSampleSpec, ...] = ()
    scored_tokens: int = 0
    adapter: str = ""
    pooling: PoolingParams | None = None
    keeps_blocks: bool = True
    kept_tokens: tuple[int, ...] = ()
    flow: Flow = NO_FLOW
    hashes: InitVar[bytes] = b""
    vocab_size: InitVar[int] = 0
    edits: LogitEdits | None = None
    # Chunks whose acknowledgements are sent, or wait only for the node's answer.
    _acked_chunks: int = field(default=0, init=False)
    end_reported: bool = field(default=False, init=False)
    # Parent of a parallel sample that has not run yet; it may still have the prompt's partial block.
    parent: Sequence | None = field(default=None, init=False)
    grammar: GrammarState | None = field(default=None, init=False)
    # True while it is queued and its adapter is not ready; index of the ready adapter's slot, or -1.
    awaits_adapter: bool = field(default=False, init=False)
    adapter_slot: int = field(default=-1, init=False)
    # With states: positions of the prompt where a step ends, because the state is kept.
    step_ends: list[int] = field(default_factory=list, init=False)
    # True if sampling reads earlier tokens (penalties, a grammar), and not only logits, seed and position.
    reads_history: bool = field(default=False, init=False)
    # Alternatives to report per scored prompt token (prompt_logprobs).
    scored_alternatives: int = field(default=0, init=False)
    # Sum of the rows pooled so far.
    _rows_sum: Float32 | None = field(default=None, init=False)
    # True if the proposed tokens are forced by the grammar, and not drafted.
    forced: bool = field(default=False, init=False)
    # Incremented with each ticket, and when a launched step assumed a token that was then not chosen. A step launched
    # under an older number is void.
    generation: int = field(default=0, init=False)
    # Tokens charged to the flow, in prompt tokens.
    _charged: int = field(default=0, init=False)

    def __post_init__(self, ticket: AdoptedTicket, now: float, hashes: bytes, vocab_size: int) -> None:
        sampling = self.sampling
        self.max_tokens = (sampling.max_tokens or 0) if sampling is not None else 0
        capacity = max(len(self.token_ids), min(self.max_model_len, self.prompt_tokens + self.max_tokens))
        super().__init__(
            self.seq_id,
            np.empty(capacity, dtype=np.int32),
            self.block_size,
            first_block=self.start_tokens // self.block_size,
            parent_hash=self.parent_hash,
            hashes=hashes,
        )
        self.queue_order = self.prompt_order = queue_order(self.priority, now)
        self.is_prefill = self.sampling is None
        self.num_tokens = len(self.token_ids)
        self._tokens[: self.num_tokens] = self.token_ids
        self.progress = SequenceProgress(arrived_s=now)
        ends = enumerate(self.chunk_ends)
        self._chunks = [ChunkDone(seq_id=self.seq_id, index=index, end_tokens=end) for index, end in ends]
        if sampling is not None:
            self._stop_token_ids = frozenset(sampling.stop_token_ids)
            if self.edits is None and sampling.changes_logits:
                self.edits = LogitEdits(sampling, vocab_size)
            self.reads_history = self.edits is not None and self.edits.read_history
        self.is_prompt_only = sampling is not None and self.max_tokens == 0
        # Rows num_scored .. score_end - 1 remain to be scored; each scores the next token.
        self.num_scored = self.score_end = self.scored_tokens
        if sampling is not None and sampling.prompt_logprobs is not None:
            self.scored_alternatives = sampling.prompt_logprobs
            self.score_end = max(self.scored_tokens, self.prompt_tokens - 1)
        if self.pooling is not None:
            self.num_scored, self.score_end = self._pooled.start, self._pooled.stop
        self.adopt(ticket, SequenceState.WAITING)
        if not self.keeps_blocks:
            self.refuse_commit()
        self.progress.tail_tokens = self.num_tokens - self.num_computed
        self._cached_tokens = self.num_computed
        self.extend_hashes(self.num_tokens)

    @cached_property
    def draft_tokens(self) -> DraftRecord:
        """The stream's draft statistics."""
        return DraftRecord()

    def wait_for(self, work_s: float) -> None:
        """Set ``prompt_order`` by the ``work_s`` seconds that the remaining prompt would take alone, before the
        sequence is queued. A stream that has emitted tokens, on any worker, has a waiting reader and stays in order of
        arrival."""
        has_streamed = not self.is_prefill and (self.progress.token_steps or self.num_tokens > self.prompt_tokens)
        self.prompt_order = self.queue_order if has_streamed else prompt_order(self.queue_order, work_s)

    def sample(self, sample: ParallelSampleSpec, now: float) -> Sequence:
        """Return a parallel sample of this sequence's prompt: RESUMING, without a ticket or generated tokens."""
        assert self.sampling is not None
        child = replace(
            self,
            ticket=AdoptedTicket(0, (), ()),
            now=now,
            seq_id=sample.seq_id,
            sampling=replace(self.sampling, seed=sample.seed),
            parallel_samples=(),
            scored_tokens=self.prompt_tokens - 1,
            hashes=self.block_hashes(0, self.prompt_tokens // self.block_size),
        )
        child.queue_order = child.prompt_order = self.queue_order
        child.parent = self
        child._cached_tokens = len(self.token_ids)
        child.state = SequenceState.RESUMING
        child.progress.first_step_s = now
        child.progress.record_token_step(now)
        child.progress.tail_tokens = 0
        return child

    def adopt(self, ticket: AdoptedTicket, state: SequenceState) -> None:
        """Start from an adopted ticket, WAITING or PREEMPTED: only its pinned chain counts as computed."""
        self.take_ticket(ticket)
        # Tokens in launched steps (:mod:`pillion.engine.scheduling.in_flight`), right after the computed ones.
        self.num_in_flight = 0
        self.num_proposed = 0
        self.generation += 1
        self.state = state
        # True if the next chunk is a decode: only the last token lacks its KV.
        self.decoding = False
        # While CLOSING: whether full blocks are still committed, and whether the sequence resumes.
        self.commit_rest = self.resume_after = False
        # (source, target) slots to copy before the next chunk.
        self.copy_first: tuple[int, int] | None = None

    def start_running(self) -> None:
        """Move the sequence from WAITING or PREEMPTED to RUNNING."""
        self.state = SequenceState.RUNNING

    def give_way(self) -> None:
        """Move the sequence from RUNNING to PREEMPTED with all its slots. No launched step may contain it."""
        self.state, self.decoding = SequenceState.PREEMPTED, False

    def close(self, now: float, *, commit_rest: bool, resume: bool) -> tuple[int, ...]:
        """Move the sequence to CLOSING, and cut the owned slots that will not be committed off its table; return them.
        With ``commit_rest`` full blocks are still committed; with ``resume`` the sequence is preempted."""
        if resume:
            self.progress.preempted_s.append(now)
        self.state = SequenceState.CLOSING
        self.num_proposed = 0
        self.copy_first = None
        self.commit_rest, self.resume_after = commit_rest, resume
        kept = self.full_blocks if commit_rest and self.may_commit else 0
        return self.cut(max(kept, self.num_sent))

    def wait_for_ticket(self) -> None:
        """Move the sequence from CLOSING to RESUMING."""
        self.state = SequenceState.RESUMING

    def report_end(self, now: float) -> None:
        """Record that the sequence has ended for its client: no further update may be sent."""
        self.end_reported = True
        self.progress.ended_s = now

    def plan_chunk(self, count: int, now: float) -> None:
        """Record that a step with the next ``count`` prompt tokens is scheduled: start times, and the tail's steps."""
        progress = self.progress
        progress.first_step_s = progress.first_step_s or now
        if not progress.first_token_s:
            progress.tail_steps += 1
        if self.is_prefill:
            for chunk in self._chunks_with(self.next_start, self.next_start + count):
                chunk.started_s = chunk.started_s or now

    def launch(self, count: int) -> None:
        """Record ``count`` tokens in a launched step."""
        self.num_in_flight += count

    def retire(self, count: int) -> None:
        """Record the end of the oldest launched step with this sequence, which had ``count`` tokens of it."""
        self.num_in_flight -= count

    def compute(self, start: int, end: int, now: float) -> None:
        """Record the KV of tokens ``start`` to ``end`` as computed."""
        self.num_computed = end
        if self.is_prefill:
            for chunk in self._chunks_with(start, end):
                chunk.computed_s = now

    def compute_from(self, start: int) -> None:
        """Mark the KV from token ``start`` on as not computed. No launched step may contain the sequence."""
        self.num_computed = start
        self.decoding = self.left_to_compute == 1

    def share_prompt(self) -> None:
        """Count a parallel sample's prompt as computed: the copy of its partial block is scheduled."""
        self.num_computed = self.prompt_tokens

    def share(self, tokens: int, slot: int) -> None:
        """Count the next ``tokens`` tokens, less than a block, as computed: ``slot`` has their KV, and is copied before
        the sequence's next chunk."""
        self.copy_first = slot, self.slots(self.num_committed, self.num_committed + 1)[0]
        self.num_computed += tokens
        self.progress.tail_tokens = max(0, self.progress.tail_tokens - tokens)

    def take_copy(self) -> tuple[int, int]:
        """Remove and return the (source, target) slots to copy before the chunk that is being scheduled."""
        assert self.copy_first is not None
        copy, self.copy_first = self.copy_first, None
        return copy

    def start_decoding(self) -> None:
        """Mark a parallel sample whose whole prompt has its KV as decoding."""
        self.decoding = True

    def cut_at_step_end(self, start: int, count: int) -> int:
        """Return ``count``, cut so that a chunk from ``start`` on ends at the next of ``step_ends`` at the latest."""
        end = next((position for position in self.step_ends if position > start), start + count)
        return min(count, end - start)

    def rows_to_score(self, start: int, end: int) -> int:
        """Return how many of the rows ``start`` .. ``end`` - 1 are still to be scored or pooled; they are adjacent, and
        the last is ``end`` - 1 or ``score_end`` - 1."""
        return max(0, min(end, self.score_end) - max(start, self.num_scored))

    @property
    def unscored_from(self) -> int | None:
        """First position whose row is still to be scored or pooled, and is computed even if its KV is cached; None if
        all are."""
        return self.num_scored if self.num_scored < self.score_end else None

    def score(self, count: int) -> None:
        """Record ``count`` further rows as scored."""
        self.num_scored += count

    def pool(self, rows: Iterable[Float32]) -> None:
        """Add the next positions' rows, float32 [values] each, to the pooled sum. They are added one by one, so that
        the sum has the same bits however steps cut the text. The sum survives preemption."""
        for row in rows:
            self.num_scored += 1
            if self._rows_sum is None:
                self._rows_sum = row.copy()
            else:
                self._rows_sum += row

    @property
    def vector(self) -> Float32 | None:
        """Mean of the pooled rows, float32 [values]; None if none were pooled."""
        if self._rows_sum is None:
            return None
        return self._rows_sum / np.float32(len(self._pooled))

    @property
    def _pooled(self) -> range:
        assert self.pooling is not None
        assert self.pooling.rows is not None
        return self.pooling.rows

    def accept(self, chosen: Seq[int], now: float) -> tuple[int, FinishReason | None]:
        """Append a step's chosen tokens, up to the first that differs from the token proposed for its position or ends
        the stream; later ones are void.

        Returns the number of appended tokens, and the finish reason or None. If the first token is negative (no finite
        logits, or a late mask), none is appended, and a later step computes the position again.
        """
        proposed: list[int] = self.proposed().tolist() if self.num_proposed else []
        self.num_proposed = 0
        self.decoding = True
        accepted, reason = 0, None
        for token in chosen:
            if token < 0:
                break
            reason = self.append(token)
            accepted += 1
            if reason is not None or proposed[accepted - 1 : accepted] != [token]:
                break
        self.num_computed -= len(chosen) - accepted
        if not accepted and self.num_in_flight:
            # The launched step ran on a token that was not chosen; void it.
            self.num_in_flight = 0
            self.generation += 1
        if accepted:
            self.progress.record_token_step(now)
        if proposed and not self.forced:
            # In this order: a reader on another thread never sees more accepted than drafted tokens.
            self.progress.accepted_tokens += max(accepted - 1, 0)
            self.progress.drafted_tokens += len(proposed)
        self.extend_hashes(self.num_computed)
        return accepted, reason

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token. Return the finish reason, or None."""
        last = self.next_is_last
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self._stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if last else None

    def append_known(self, tokens: Seq[int], now: float) -> tuple[Seq[int], FinishReason]:
        """Append the last tokens of an answer, which need no step, up to max_tokens or a stop id. Return the appended
        tokens and the finish reason."""
        reason = None
        for count, token in enumerate(tokens, 1):
            reason = self.append(token)
            if reason is not None:
                tokens, reason = tokens[:count], FinishReason.STOP if count == len(tokens) else reason
                break
        if tokens:
            self.progress.record_token_step(now)
        return tokens, reason or FinishReason.STOP

    def propose(self, tokens: Int32, *, forced: bool = False) -> None:
        """Append proposed tokens for one step. ``forced`` ones are always accepted."""
        self.num_proposed, self.forced = len(tokens), forced
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    def proposed(self) -> Int32:
        """Return the proposed tokens as a view, int32 [num_proposed]."""
        return self.tokens(self.num_tokens, self.num_tokens + self.num_proposed)

    def follow_grammar(self, grammar: GrammarState) -> None:
        """Constrain the answer by a grammar that has consumed the tokens generated so far."""
        self.grammar, self.reads_history = grammar, True

    def await_adapter(self) -> None:
        """Record that the queued sequence cannot run before its adapter is ready."""
        self.awaits_adapter, self.adapter_slot = True, -1

    def use_adapter(self, slot: int, now: float) -> None:
        """Record that the adapter is ready in the backend's slot ``slot``."""
        self.awaits_adapter, self.adapter_slot = False, slot
        self.progress.adapter_s = self.progress.adapter_s or now

    def leave_adapter(self) -> None:
        """Clear the adapter's slot and the wait for it; the sequence has left its queue."""
        self.awaits_adapter, self.adapter_slot = False, -1

    def take_parallel_samples(self) -> tuple[ParallelSampleSpec, ...]:
        """Remove and return the parallel samples."""
        parallel_samples, self.parallel_samples = self.parallel_samples, ()
        return parallel_samples

    def drop_parallel_sample(self, seq_id: int) -> None:
        """Remove a parallel sample that has not started; other ids are ignored."""
        if self.parallel_samples:
            self.parallel_samples = tuple(sample for sample in self.parallel_samples if sample.seq_id != seq_id)

    def leave_parent(self) -> Sequence | None:
        """Clear the parent, and return it; None if there is none any more."""
        parent, self.parent = self.parent, None
        return parent

    @property
    def left_to_compute(self) -> int:
        """Tokens whose KV is missing."""
        return self.num_tokens - self.num_computed

    @property
    def may_give_way(self) -> bool:
        """True if the sequence has a slot for its next token, so that it can continue at any time."""
        return self.next_start < self.num_blocks * self.block_size

    @property
    def uncharged_tokens(self) -> int:
        """Tokens not yet charged to the flow, in prompt tokens: each computed or launched prompt token counts 1, each
        generated token OUTPUT_COST."""
        initial = len(self.token_ids)
        computed = min(self.next_start, initial) - self._cached_tokens
        # Negative while a preempted sequence recomputes, which is free.
        return max(0, computed + OUTPUT_COST * (self.num_tokens - initial) - self._charged)

    def take_charge(self) -> int:
        """Mark the uncharged tokens as charged, and return their number."""
        tokens = self.uncharged_tokens
        self._charged += tokens
        return tokens

    @property
    def next_start(self) -> int:
        """Start of the next chunk: the first token neither computed nor in a launched step."""
        return self.num_computed + self.num_in_flight

    def _chunks_with(self, start: int, end: int) -> Iterator[ChunkDone]:
        """Yield the unacknowledged chunks of a prefill range that overlap the tokens ``start`` to ``end``."""
        for chunk in islice(self._chunks, self._acked_chunks, None):
            if chunk.end_tokens > start:
                yield chunk
            if chunk.end_tokens >= end:
                return

    def take_chunks(self, blocks: int) -> tuple[ChunkDone, ...]:
        """Return the unacknowledged chunks that end within the first ``blocks`` blocks, and mark them acknowledged."""
        waiting = islice(self._chunks, self._acked_chunks, None)
        done = tuple(chunk for chunk in waiting if chunk.end_tokens <= blocks * self.block_size)
        self._acked_chunks += len(done)
        for chunk in done:
            chunk.started_s = chunk.started_s or self.progress.arrived_s
            chunk.computed_s = chunk.computed_s or self.progress.arrived_s
        return done

    @property
    def draft_capacity(self) -> int:
        """Max proposed tokens of a step that fit into the block table and the max length."""
        in_table = self.num_blocks * self.block_size - self.num_computed - 1
        return max(0, min(in_table, len(self._tokens) - self.num_tokens - 1))

    @property
    def max_length(self) -> int:
        """Max tokens of prompt and answer together."""
        return len(self._tokens)

    @property
    def reports_logprobs(self) -> bool:
        sampling = self.sampling
        return sampling is not None and sampling.logprobs is not None

    @property
    def next_is_last(self) -> bool:
        """True if the next token ends the stream, whichever it is."""
        after = self.num_tokens + 1
        return after >= self.max_model_len or after - self.prompt_tokens >= self.max_tokens
