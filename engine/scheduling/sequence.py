"""One sequence of a worker, a decode stream or a prefill range: its tokens, its block table, and their progress.

    WAITING --first chunk--> RUNNING --stop id, length, range computed, cancel, failure-----> CLOSING --settled--> gone
                             ^     |  '--gave way to another tenant--> PREEMPTED              |
                             |     +--preempted (also from WAITING, PREEMPTED)-----------> CLOSING
                 first chunk |                                                               | settled
                        PREEMPTED <-- a new ticket was opened and adopted --------------- RESUMING
                                                                                             ^
              a parallel sample: another answer to its parent's prompt, with its own first token --+

Its blocks are a :class:`pillion.engine.scheduling.block_chain.BlockChain`. A CLOSING sequence waits only for the node's
answer to that run: its owned slots were freed when CLOSING began, and its ticket is released when CLOSING ends.
Proposed tokens follow the sequence's own tokens for one step. A sequence belongs to one scheduler, and only its methods
write its fields.
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
    """Return the row of a model's rotary tables where a text of at most ``text_tokens`` tokens (0: unknown) begins.
    Rows after those of the longest text are for texts within the model's original length."""
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
    ``vector`` is a text's, if requested: float32, little-endian."""

    reason: FinishReason | None = None
    error: PillionError | None = None
    vector: bytes = b""


@dataclass(slots=True)
class SequenceProgress:
    """Times of a sequence, in seconds of the scheduler's clock; 0.0 means not yet.

    Attributes:
        token_steps: steps with tokens of the answer.
        last_token_s, longest_gap_s: end of the last of these steps, and the longest time between two.
        preempted_s: time of each preemption.
        adapter_s: when its adapter was first ready.
        drafted_tokens, accepted_tokens: judged draft tokens, and the accepted ones.
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

    def tokens_came(self, now: float) -> None:
        """Record a step with tokens of the answer."""
        if self.token_steps:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.token_steps += 1
        self.last_token_s = now


@dataclass(eq=False, repr=False)
class Sequence(BlockChain):
    """One sequence (see the module's docstring). Its tokens and table are allocated once. It begins at ``now`` with its
    ticket; ``hashes`` are those of leading whole blocks, if known.

    Attributes:
        seq_id: unique on the worker, and its place in the order of arrival.
        token_ids: int32 [N], the prompt and what earlier attempts generated. A prefill range's tokens before
            ``start_tokens`` are never read.
        parent_hash: hash of the block that ends at ``start_tokens``; the request's root if that is 0.
        start_tokens: where hashing starts, a multiple of the block size; 0 for a stream.
        prompt_tokens: number of token_ids that are prompt.
        sampling: resolved parameters; None for a prefill range, which ends when its tokens are computed.
        rope_shift: row of the rotary tables for position 0.
        max_model_len: max tokens in all.
        chunk_ends: ends of a prefill range's chunks, each acknowledged on its commit; a step may compute several. Empty
            for a stream.
        priority: smaller is more urgent (:mod:`pillion.rules.priority`).
        parallel_samples: further answers, which start with this sequence's first token. Empty for a prefill range.
        scored_tokens: with ``sampling.prompt_logprobs``, tokens after the prompt's first that are not scored.
        adapter: digest of the adapter; "" for the model alone.
        pooling: how the text becomes a vector, with its positions; None for a sequence that generates.
        keeps_blocks: whether whole blocks are committed; False for a model without keys and values.
        flow: the tenant's share of the worker.
        kept_tokens: positions after which other texts are expected to diverge; a model with states keeps one before
            each.
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
    # The sequence whose prompt this parallel sample shares, until the prompt's KV is copied or found.
    parent: Sequence | None = field(default=None, init=False)
    grammar: GrammarState | None = field(default=None, init=False)
    # Whether it is queued and waits for its adapter; and the adapter's slot in the backend, else -1.
    awaits_adapter: bool = field(default=False, init=False)
    adapter_slot: int = field(default=-1, init=False)
    # With states: steps of the prompt end at these positions, where one is kept.
    step_ends: list[int] = field(default_factory=list, init=False)
    # True if a sampled token depends on the tokens before it, and not only on the logits and its position.
    reads_history: bool = field(default=False, init=False)
    # Prompt tokens are scored by the rows of positions num_scored .. score_end; each row scores the next token.
    scored_alternatives: int = field(default=0, init=False)
    _rows_sum: Float32 | None = field(default=None, init=False)
    forced: bool = field(default=False, init=False)
    # Counts tickets, and launched steps that ran on a token not chosen: a step launched under an older number is void.
    generation: int = field(default=0, init=False)
    _charged: int = field(default=0, init=False)

    def __post_init__(self, ticket: AdoptedTicket, now: float, hashes: bytes, vocab_size: int) -> None:
        sampling = self.sampling
        self.max_tokens = (sampling.max_tokens or 0) if sampling is not None else 0
        room = max(len(self.token_ids), min(self.max_model_len, self.prompt_tokens + self.max_tokens))
        super().__init__(
            self.seq_id,
            np.empty(room, dtype=np.int32),
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
        self.num_scored = self.score_end = self.scored_tokens
        if sampling is not None and sampling.prompt_logprobs is not None:
            self.scored_alternatives = sampling.prompt_logprobs
            self.score_end = max(self.scored_tokens, self.prompt_tokens - 1)
        if self.pooling is not None:
            self.num_scored, self.score_end = self._pooled.start, self._pooled.stop
        self.hold(ticket, SequenceState.WAITING)
        if not self.keeps_blocks:
            self.refuse_commit()
        self.progress.tail_tokens = self.num_tokens - self.num_computed
        self._found_tokens = self.num_computed
        self.extend_hashes(self.num_tokens)

    @cached_property
    def draft_tokens(self) -> DraftRecord:
        """The record of the stream's draft tokens, created on demand."""
        return DraftRecord()

    def wait_for(self, work_s: float) -> None:
        """Take the queue place of a prompt that would take ``work_s`` seconds alone. A stream that has emitted tokens,
        here or elsewhere, has a waiting reader and keeps the place of its arrival. Called before the sequence is
        queued."""
        streams = not self.is_prefill and (self.progress.token_steps or self.num_tokens > self.prompt_tokens)
        self.prompt_order = self.queue_order if streams else prompt_order(self.queue_order, work_s)

    def sample(self, sample: ParallelSampleSpec, now: float) -> Sequence:
        """Return a RESUMING sequence of the same prompt, without a ticket."""
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
        child._found_tokens = len(self.token_ids)
        child.state = SequenceState.RESUMING
        child.progress.first_step_s = now
        child.progress.tokens_came(now)
        child.progress.tail_tokens = 0
        return child

    def hold(self, ticket: AdoptedTicket, state: SequenceState) -> None:
        """Start from an adopted ticket, WAITING or PREEMPTED: only its pinned chain counts as computed."""
        self.take_ticket(ticket)
        # Tokens after the computed ones in launched steps (:mod:`pillion.engine.scheduling.in_flight`).
        self.num_in_flight = 0
        self.num_proposed = 0
        self.generation += 1
        self.state = state
        # True if the next chunk is a decode: everything but the last sampled token has its KV.
        self.decoding = False
        # When CLOSING ends: whether full blocks are committed, and whether the sequence resumes.
        self.commit_rest = self.resume_after = False
        self.copy_first: tuple[int, int] | None = None

    def start_running(self) -> None:
        """Move the sequence from WAITING or PREEMPTED to RUNNING."""
        self.state = SequenceState.RUNNING

    def give_way(self) -> None:
        """Move the sequence, without tokens in a launched step, from RUNNING to PREEMPTED with all its slots."""
        self.state, self.decoding = SequenceState.PREEMPTED, False

    def close(self, now: float, *, commit_rest: bool, resume: bool) -> tuple[int, ...]:
        """Move the sequence from any state to CLOSING. Return the owned slots that will not be committed, removed from
        the table. With ``commit_rest`` full blocks are still committed; with ``resume`` the sequence is preempted."""
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
        """Record that the end is reported, or that the listener has gone."""
        self.end_reported = True
        self.progress.ended_s = now

    def plan_chunk(self, count: int, now: float) -> None:
        """Record the start times of the sequence and of chunks when ``count`` tokens of the prompt are scheduled."""
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

    def land(self, count: int) -> None:
        """Record the end of the oldest launched step with this sequence, which had ``count`` tokens of it."""
        self.num_in_flight -= count

    def compute(self, start: int, end: int, now: float) -> None:
        """Record the KV of tokens ``start`` to ``end`` as computed."""
        self.num_computed = end
        if self.is_prefill:
            for chunk in self._chunks_with(start, end):
                chunk.computed_s = now

    def compute_from(self, start: int) -> None:
        """Recompute the KV from token ``start`` on, before the computed end; no launched step may have the sequence."""
        self.num_computed = start
        self.decoding = self.left_to_compute == 1

    def share_prompt(self) -> None:
        """Record the scheduled copy of the prompt's partial block to a parallel sample: its prompt counts as
        computed."""
        self.num_computed = self.prompt_tokens

    def share(self, tokens: int, slot: int) -> None:
        """Record the KV of the next ``tokens`` tokens (less than a block) in ``slot``, copied before the sequence's
        next chunk: they count as computed."""
        self.copy_first = slot, self.slots(self.num_committed, self.num_committed + 1)[0]
        self.num_computed += tokens
        self.progress.tail_tokens = max(0, self.progress.tail_tokens - tokens)

    def take_copy(self) -> tuple[int, int]:
        """Return the (source, target) slots to copy before the next chunk, which is scheduled now."""
        assert self.copy_first is not None
        copy, self.copy_first = self.copy_first, None
        return copy

    def start_decoding(self) -> None:
        """Record that a parallel sample's whole prompt has its KV, so that its next chunk is a decode."""
        self.decoding = True

    def cut_to_place(self, start: int, count: int) -> int:
        """Return how many of ``count`` tokens of the prompt a step may compute from ``start`` on, at least one."""
        end = next((place for place in self.step_ends if place > start), start + count)
        return min(count, end - start)

    def rows_to_score(self, start: int, end: int) -> int:
        """Return the rows of positions ``start`` to ``end`` to score or pool, the last ones before ``score_end``."""
        return max(0, min(end, self.score_end) - max(start, self.num_scored))

    @property
    def unscored_from(self) -> int | None:
        """First position whose row is to be scored or pooled, and so computed whatever is cached; None if there is
        none."""
        return self.num_scored if self.num_scored < self.score_end else None

    def score(self, count: int) -> None:
        self.num_scored += count

    def pool(self, rows: Iterable[Float32]) -> None:
        """Sum the rows of the next positions of the vector. Rows are added one by one, so that the sum has the same
        bits however steps cut the text; a resuming sequence keeps its sum."""
        for row in rows:
            self.num_scored += 1
            if self._rows_sum is None:
                self._rows_sum = row.copy()
            else:
                self._rows_sum += row

    @property
    def vector(self) -> Float32 | None:
        """The mean of the summed rows; None for a sequence without a vector."""
        if self._rows_sum is None:
            return None
        return self._rows_sum / np.float32(len(self._pooled))

    @property
    def _pooled(self) -> range:
        assert self.pooling is not None
        assert self.pooling.rows is not None
        return self.pooling.rows

    def accept(self, chosen: Seq[int], now: float) -> tuple[int, FinishReason | None]:
        """Append a step's tokens up to the first rejected proposal; later results are void.

        Returns the number of accepted tokens, and the finish reason or None. No token is accepted if none could be
        chosen, or its mask was late; a later step computes that position again.
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
            # The launched step assumed a token that was not chosen: void.
            self.num_in_flight = 0
            self.generation += 1
        if accepted:
            self.progress.tokens_came(now)
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
        """Append the last tokens of an answer, which need no step. Return those that max_tokens and stop ids leave, and
        the finish reason."""
        reason = None
        for count, token in enumerate(tokens, 1):
            reason = self.append(token)
            if reason is not None:
                tokens, reason = tokens[:count], FinishReason.STOP if count == len(tokens) else reason
                break
        if tokens:
            self.progress.tokens_came(now)
        return tokens, reason or FinishReason.STOP

    def propose(self, tokens: Int32, *, forced: bool = False) -> None:
        """Append proposed tokens for one step. ``forced`` ones are always accepted."""
        self.num_proposed, self.forced = len(tokens), forced
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    def proposed(self) -> Int32:
        """Return the proposed tokens as a view, int32 [num_proposed]."""
        return self.tokens(self.num_tokens, self.num_tokens + self.num_proposed)

    def drop_proposed(self) -> None:
        """Drop the proposed tokens, because the step that would have judged them failed."""
        self.num_proposed = 0

    def follow_grammar(self, grammar: GrammarState) -> None:
        """Follow a grammar from now on, which has consumed the answer so far."""
        self.grammar, self.reads_history = grammar, True

    def await_adapter(self) -> None:
        """Record that the queued sequence cannot run before its adapter is ready."""
        self.awaits_adapter, self.adapter_slot = True, -1

    def use_adapter(self, slot: int, now: float) -> None:
        """Record that the adapter is ready in the backend's slot ``slot``."""
        self.awaits_adapter, self.adapter_slot = False, slot
        self.progress.adapter_s = self.progress.adapter_s or now

    def leave_adapter(self) -> None:
        """Record that the sequence has left its queue."""
        self.awaits_adapter, self.adapter_slot = False, -1

    def take_parallel_samples(self) -> tuple[ParallelSampleSpec, ...]:
        """Remove and return the parallel samples, which start now."""
        parallel_samples, self.parallel_samples = self.parallel_samples, ()
        return parallel_samples

    def drop_parallel_sample(self, seq_id: int) -> None:
        """Remove a parallel sample that has not started; other ids are ignored."""
        if self.parallel_samples:
            self.parallel_samples = tuple(sample for sample in self.parallel_samples if sample.seq_id != seq_id)

    def leave_parent(self) -> Sequence | None:
        """Remove and return the parent; None if already removed."""
        parent, self.parent = self.parent, None
        return parent

    @property
    def left_to_compute(self) -> int:
        """Tokens whose KV is missing."""
        return self.num_tokens - self.num_computed

    @property
    def may_give_way(self) -> bool:
        """True if the slot for the token after those in launched steps is there, so that the sequence can continue any
        time."""
        return self.next_start < self.num_blocks * self.block_size

    @property
    def uncharged_tokens(self) -> int:
        """What the sequence's flow owes beyond what it was charged: one per token of the prompt computed here or in a
        launched step, and OUTPUT_COST per generated token."""
        given = len(self.token_ids)
        computed = min(self.next_start, given) - self._found_tokens
        # Recomputation after a preemption is free.
        return max(0, computed + OUTPUT_COST * (self.num_tokens - given) - self._charged)

    def take_charge(self) -> int:
        """Mark the uncharged tokens as charged, and return their number."""
        tokens = self.uncharged_tokens
        self._charged += tokens
        return tokens

    @property
    def next_start(self) -> int:
        """Start of the next chunk: after everything computed or in a launched step."""
        return self.num_computed + self.num_in_flight

    def _chunks_with(self, start: int, end: int) -> Iterator[ChunkDone]:
        """Yield the unacknowledged chunks of a prefill range that overlap the tokens ``start`` to ``end``."""
        for chunk in islice(self._chunks, self._acked_chunks, None):
            if chunk.end_tokens > start:
                yield chunk
            if chunk.end_tokens >= end:
                return

    def take_chunks(self, blocks: int) -> tuple[ChunkDone, ...]:
        """Return the next chunks that end within the first ``blocks`` blocks, each once."""
        waiting = islice(self._chunks, self._acked_chunks, None)
        done = tuple(chunk for chunk in waiting if chunk.end_tokens <= blocks * self.block_size)
        self._acked_chunks += len(done)
        for chunk in done:
            chunk.started_s = chunk.started_s or self.progress.arrived_s
            chunk.computed_s = chunk.computed_s or self.progress.arrived_s
        return done

    @property
    def draft_capacity(self) -> int:
        """Max tokens that a step can judge beyond the one that it runs, without growing the block table."""
        in_table = self.num_blocks * self.block_size - self.num_computed - 1
        return max(0, min(in_table, len(self._tokens) - self.num_tokens - 1))

    @property
    def most_tokens(self) -> int:
        """Max length of the sequence, in tokens."""
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
