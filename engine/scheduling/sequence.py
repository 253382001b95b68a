"""Represents one sequence of a worker, a decode stream or a prefill range: its tokens, its block table and how far each
has come.

    WAITING --first chunk--> RUNNING --stop id, length, range computed, cancel, failure-----> CLOSING --settled--> gone
                             ^     |  '--gave way to another tenant--> PREEMPTED              |
                             |     +--preempted (also from WAITING, PREEMPTED)-----------> CLOSING
                 first chunk |                                                               | settled
                        PREEMPTED <-- a new ticket was opened and adopted --------------- RESUMING
                                                                                             ^
              a parallel sample: another answer to its parent's prompt, with its own first token --+

Its blocks are a :class:`pillion.engine.scheduling.block_chain.BlockChain`.
A CLOSING sequence waits for the node's answer to that run and for nothing else: it gave its owned slots back when
CLOSING began, and its hold on the ticket is released when CLOSING ends. Proposed tokens stand after the sequence's own
tokens for the length of one step. A sequence belongs to the scheduler that it was added to, and its methods are the
only writers of its fields.
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
from pillion.engine.scheduling.block_chain import BlockChain, ChunkDone, Holding
from pillion.errors import PillionError
from pillion.kernels.step import Float32, Int32
from pillion.rules.priority import NO_FLOW, OUTPUT_COST, Flow, prompt_order, queue_order
from pillion.types import FinishReason, PoolingParams, SamplingParams


def rope_shift(text_tokens: int, original_tokens: int, max_model_len: int) -> int:
    """Returns where in a model's rotary tables a text of at most ``text_tokens`` tokens begins; 0 stands for unknown.
    The tables' rows after those of the longest text are for texts within the model's original length."""
    return max_model_len if 0 < text_tokens <= original_tokens < max_model_len else 0


class SequenceState(Enum):
    """Names the states of a sequence, as this module's drawing shows them."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    CLOSING = "closing"
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class ParallelSampleSpec:
    """Describes another answer to a prompt: a stream of its own from its first token on, with its own seed."""

    seq_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Says why a sequence ended: ``reason`` for a stream, ``error`` for a failure, neither for a finished prefill
    range. ``vector`` is that of a text whose vector was wanted: float32, least significant byte first."""

    reason: FinishReason | None = None
    error: PillionError | None = None
    vector: bytes = b""


@dataclass(slots=True)
class SequenceProgress:
    """Notes when things happened to a sequence, in the seconds of the scheduler's clock; 0.0 means not yet.

    Attributes:
        token_steps: number of steps that brought tokens of the answer.
        last_token_s, longest_gap_s: when the last of these steps ended, and the longest time between two of them.
        preempted_s: when the sequence was preempted, each time.
        adapter_s: when its adapter was there for the first time.
        drafted_tokens, accepted_tokens: draft tokens that steps have judged, and those of them that were right.
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
        """Notes a step that chose tokens of the answer."""
        if self.token_steps:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.token_steps += 1
        self.last_token_s = now


@dataclass(eq=False, repr=False)
class Sequence(BlockChain):
    """Represents one sequence, as the module's docstring describes it. Its tokens and its table are allocated once. It
    begins at ``now`` with what it holds by its ticket; ``hashes`` are those of leading whole blocks, where they are
    known.

    Attributes:
        seq_id: names the sequence on its worker and is its place in the order of arrival.
        token_ids: int32 [N], what it began with: the prompt and what earlier attempts generated. A prefill range's
            tokens before ``start_tokens`` are never read.
        parent_hash: hash of the block that ends at ``start_tokens``; the request's root when that is 0.
        start_tokens: where hashing starts, a multiple of the block size. 0 for a stream.
        prompt_tokens: how many of token_ids are prompt.
        sampling: resolved parameters; None for a prefill range, which ends when its tokens are computed.
        rope_shift: row of the rotary tables for position 0.
        max_model_len: most tokens in all.
        chunk_ends: the ends of a prefill range's chunks, each of which is acknowledged when it is committed; the last
            one is the range's end. A step may compute several chunks. Empty for a stream.
        priority: smaller is more urgent (:mod:`pillion.rules.priority`).
        parallel_samples: further answers to the prompt that have not begun: they do with this sequence's first token.
            Empty for a prefill range.
        scored_tokens: with ``sampling.prompt_logprobs``, the number of tokens after the prompt's first one that are not
            scored.
        adapter: digest of the adapter that the sequence runs with; "" for the model alone.
        pooling: how the text becomes a vector, with its positions; None for a sequence that generates.
        keeps_blocks: whether whole blocks are committed; False for a model without keys and values.
        flow: the tenant's share of the worker.
        kept_tokens: after so many tokens of the prompt other texts are expected to part from it; a model whose layers
            carry states keeps one before each of these places.
    """

    holding: InitVar[Holding]
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
    # Compiled from ``sampling``, and shared with parallel samples; None if nothing changes single logits.
    edits: LogitEdits | None = None
    # The acknowledgements of these chunks are sent, or wait only for the node's answer.
    _acked_chunks: int = field(default=0, init=False)
    # This says whether the sequence's end was reported, or nobody listens to the sequence any more.
    end_reported: bool = field(default=False, init=False)
    # This is the sequence whose prompt this parallel sample shares, until the prompt's KV is copied or found.
    parent: Sequence | None = field(default=None, init=False)
    # The grammar that the answer follows.
    grammar: GrammarState | None = field(default=None, init=False)
    # Whether it is in a queue and waits for its adapter; and the backend's slot that has this, else -1.
    awaits_adapter: bool = field(default=False, init=False)
    adapter_slot: int = field(default=-1, init=False)
    # Where the model's layers carry states, steps of the prompt end at these places, where one is kept.
    step_ends: list[int] = field(default_factory=list, init=False)
    # True if a sampled token depends on the tokens before it, and not only on the logits and its position.
    reads_history: bool = field(default=False, init=False)
    # Prompt tokens are scored by the rows of positions num_scored .. score_end, each row scores the token after it.
    scored_alternatives: int = field(default=0, init=False)
    _rows_sum: Float32 | None = field(default=None, init=False)
    # This says whether a grammar forces the proposed tokens, which are right then.
    forced: bool = field(default=False, init=False)
    # This counts the tickets that the sequence has had, and the times when a launched step ran on a token that was then
    # not chosen: a step that was launched under an older number is void for it.
    generation: int = field(default=0, init=False)
    # This counts what the sequence's flow was charged for it.
    _charged: int = field(default=0, init=False)

    def __post_init__(self, holding: Holding, now: float, hashes: bytes, vocab_size: int) -> None:
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
        # This says whether the sequence ends with its prompt, without a generated token.
        self.is_prompt_only = sampling is not None and self.max_tokens == 0
        self.num_scored = self.score_end = self.scored_tokens
        if sampling is not None and sampling.prompt_logprobs is not None:
            self.scored_alternatives = sampling.prompt_logprobs
            self.score_end = max(self.scored_tokens, self.prompt_tokens - 1)
        if self.pooling is not None:
            # These rows are not scored but summed, in order.
            self.num_scored, self.score_end = self._pooled.start, self._pooled.stop
        self.hold(holding, SequenceState.WAITING)
        if not self.keeps_blocks:
            self.refuse_commit()
        self.progress.tail_tokens = self.num_tokens - self.num_computed
        # These tokens need not be computed here.
        self._found_tokens = self.num_computed
        self.extend_hashes(self.num_tokens)

    @cached_property
    def draft_tokens(self) -> DraftRecord:
        """Gives what is remembered of the stream's draft tokens. It is made when it is first asked for."""
        return DraftRecord()

    def wait_for(self, work_s: float) -> None:
        """Takes the place in line of a prompt that would take ``work_s`` seconds by itself. A stream that had tokens
        already, here or elsewhere, has a reader who waits for the next one: it keeps the place of its arrival.

        It is called before the sequence joins a queue."""
        streams = not self.is_prefill and (self.progress.token_steps or self.num_tokens > self.prompt_tokens)
        self.prompt_order = self.queue_order if streams else prompt_order(self.queue_order, work_s)

    def sample(self, sample: ParallelSampleSpec, now: float) -> Sequence:
        """Makes a sequence of the same prompt without a ticket, which is RESUMING."""
        assert self.sampling is not None
        child = replace(
            self,
            holding=Holding(0, (), ()),
            now=now,
            seq_id=sample.seq_id,
            sampling=replace(self.sampling, seed=sample.seed),
            parallel_samples=(),
            scored_tokens=self.prompt_tokens - 1,
            hashes=self.block_hashes(0, self.prompt_tokens // self.block_size),
        )
        child.queue_order = child.prompt_order = self.queue_order
        child.parent = self
        # Its prompt is charged to its parent.
        child._found_tokens = len(self.token_ids)
        child.state = SequenceState.RESUMING
        child.progress.first_step_s = now
        child.progress.tokens_came(now)
        child.progress.tail_tokens = 0
        return child

    def hold(self, holding: Holding, state: SequenceState) -> None:
        """Starts from a freshly adopted ticket, WAITING or PREEMPTED: its pinned chain counts as computed, and the rest
        is still to be computed."""
        self.take_ticket(holding)
        # This counts tokens after the computed ones that are in launched steps
        # (:mod:`pillion.engine.scheduling.in_flight`).
        self.num_in_flight = 0
        # Draft tokens, or what its grammar forces, stand after the sequence's own for one step.
        self.num_proposed = 0
        self.generation += 1
        self.state = state
        # This says whether the next token is a decode: everything but the last sampled token has its KV.
        self.decoding = False
        # These say whether full blocks are still committed, and whether the sequence resumes, when CLOSING ends.
        self.commit_rest = self.resume_after = False
        # These (source, target) slots are to be copied before the next chunk runs.
        self.copy_first: tuple[int, int] | None = None

    def start_running(self) -> None:
        """Moves the sequence from WAITING or PREEMPTED to RUNNING."""
        self.state = SequenceState.RUNNING

    def give_way(self) -> None:
        """Moves the sequence, none of whose tokens is in a launched step, from RUNNING to PREEMPTED with all that it
        holds: what it lacks is computed when it runs again."""
        self.state, self.decoding = SequenceState.PREEMPTED, False

    def close(self, now: float, *, commit_rest: bool, resume: bool) -> tuple[int, ...]:
        """Moves the sequence from any state to CLOSING. Returns the owned slots that will not be committed; they leave
        the table. With ``commit_rest`` full blocks are still committed; with ``resume`` the sequence is preempted and
        comes back."""
        if resume:
            self.progress.preempted_s.append(now)
        self.state = SequenceState.CLOSING
        self.num_proposed = 0
        self.copy_first = None
        self.commit_rest, self.resume_after = commit_rest, resume
        kept = self.full_blocks if commit_rest and self.may_commit else 0
        return self.cut(max(kept, self.num_sent))

    def wait_for_ticket(self) -> None:
        """Moves the sequence from CLOSING to RESUMING."""
        self.state = SequenceState.RESUMING

    def report_end(self, now: float) -> None:
        """Notes that the end of the sequence is reported, or that nobody listens to it any more."""
        self.end_reported = True
        self.progress.ended_s = now

    def plan_chunk(self, count: int, now: float) -> None:
        """Notes, when ``count`` more tokens of the prompt are scheduled, the time if they are the first ones of the
        sequence or of chunks."""
        progress = self.progress
        progress.first_step_s = progress.first_step_s or now
        if not progress.first_token_s:
            progress.tail_steps += 1
        if self.is_prefill:
            for chunk in self._chunks_with(self.next_start, self.next_start + count):
                chunk.started_s = chunk.started_s or now

    def launch(self, count: int) -> None:
        """Notes that ``count`` more tokens are in a launched step."""
        self.num_in_flight += count

    def land(self, count: int) -> None:
        """Notes that the oldest launched step with this sequence, with ``count`` tokens of it, has ended."""
        self.num_in_flight -= count

    def compute(self, start: int, end: int, now: float) -> None:
        """Notes that the KV of the tokens from ``start`` to ``end`` is computed now."""
        self.num_computed = end
        if self.is_prefill:
            for chunk in self._chunks_with(start, end):
                chunk.computed_s = now

    def compute_from(self, start: int) -> None:
        """Notes that the KV of the tokens from ``start`` on, which is before those that are computed, is to be computed
        again; no launched step may have the sequence."""
        self.num_computed = start
        self.decoding = self.left_to_compute == 1

    def share_prompt(self) -> None:
        """Notes that a parallel sample's copy of the prompt's partial block is scheduled: its prompt counts as
        computed."""
        self.num_computed = self.prompt_tokens

    def share(self, tokens: int, slot: int) -> None:
        """Notes that the KV of the next ``tokens`` tokens, less than a block's, is in ``slot``, which is to be copied
        before the sequence's next chunk runs: they count as computed."""
        self.copy_first = slot, self.slots(self.num_committed, self.num_committed + 1)[0]
        self.num_computed += tokens
        self.progress.tail_tokens = max(0, self.progress.tail_tokens - tokens)

    def take_copy(self) -> tuple[int, int]:
        """Returns the (source, target) slots to copy before the next chunk, which is scheduled now."""
        assert self.copy_first is not None
        copy, self.copy_first = self.copy_first, None
        return copy

    def start_decoding(self) -> None:
        """Notes that the KV of a parallel sample's whole prompt is there, so that its next chunk is a decode."""
        self.decoding = True

    def cut_to_place(self, start: int, count: int) -> int:
        """Returns how many of ``count`` tokens of the prompt a step may compute from ``start`` on, at least one."""
        end = next((place for place in self.step_ends if place > start), start + count)
        return min(count, end - start)

    def rows_to_score(self, start: int, end: int) -> int:
        """Returns how many rows of the positions ``start`` to ``end`` are to be scored, or to be pooled; they are the
        last ones before ``score_end``."""
        return max(0, min(end, self.score_end) - max(start, self.num_scored))

    @property
    def unscored_from(self) -> int | None:
        """Gives the first position whose row is to be scored or pooled, and so computed, however long the cached prefix
        is; None where all are."""
        return self.num_scored if self.num_scored < self.score_end else None

    def score(self, count: int) -> None:
        """Notes that ``count`` more tokens of the prompt are scored."""
        self.num_scored += count

    def pool(self, rows: Iterable[Float32]) -> None:
        """Adds the rows of the next positions that make the vector. One row is added after the other,
        so that the sum has the same bits however steps cut the text; a sequence that resumes keeps its sum."""
        for row in rows:
            self.num_scored += 1
            if self._rows_sum is None:
                self._rows_sum = row.copy()
            else:
                self._rows_sum += row

    @property
    def vector(self) -> Float32 | None:
        """Gives the mean of the rows that were added up; None where no vector is wanted."""
        if self._rows_sum is None:
            return None
        return self._rows_sum / np.float32(len(self._pooled))

    @property
    def _pooled(self) -> range:
        assert self.pooling is not None
        assert self.pooling.rows is not None
        return self.pooling.rows

    def accept(self, chosen: Seq[int], now: float) -> tuple[int, FinishReason | None]:
        """Appends a step's tokens as far as the token that was proposed after each was right; later results are void.

        Returns how many tokens count, and why the stream ends with the last one; None when it goes on. No token counts
        where none could be chosen, or its mask was late; a later step meets that place again.
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
            # The step that was launched on another token than the chosen one is void.
            self.num_in_flight = 0
            self.generation += 1
        if accepted:
            self.progress.tokens_came(now)
        if proposed and not self.forced:
            # The order matters: a reader on another thread never sees more right draft tokens than judged ones.
            self.progress.accepted_tokens += max(accepted - 1, 0)
            self.progress.drafted_tokens += len(proposed)
        self.extend_hashes(self.num_computed)
        return accepted, reason

    def append(self, token: int) -> FinishReason | None:
        """Appends a sampled token. Returns why the stream ends with it, None when the stream goes on."""
        last = self.next_is_last
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self._stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if last else None

    def append_known(self, tokens: Seq[int], now: float) -> tuple[Seq[int], FinishReason]:
        """Appends the last tokens of an answer, which need no step. Returns those that max_tokens and stop ids leave,
        and why the stream ends with them."""
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
        """Puts proposed tokens after the sequence's own, for one step. Those that are ``forced`` are right."""
        self.num_proposed, self.forced = len(tokens), forced
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    def proposed(self) -> Int32:
        """Returns the proposed tokens as a view, int32 [num_proposed]."""
        return self.tokens(self.num_tokens, self.num_tokens + self.num_proposed)

    def drop_proposed(self) -> None:
        """Forgets the proposed tokens, because the step that would have judged them has failed."""
        self.num_proposed = 0

    def follow_grammar(self, grammar: GrammarState) -> None:
        """Makes the answer follow this grammar from now on, which has taken the answer's present tokens."""
        self.grammar, self.reads_history = grammar, True

    def await_adapter(self) -> None:
        """Notes that the sequence is in a queue and cannot run before its adapter is ready."""
        self.awaits_adapter, self.adapter_slot = True, -1

    def use_adapter(self, slot: int, now: float) -> None:
        """Notes that the sequence's adapter is ready in the backend's slot of that number."""
        self.awaits_adapter, self.adapter_slot = False, slot
        self.progress.adapter_s = self.progress.adapter_s or now

    def leave_adapter(self) -> None:
        """Notes that the sequence is in no queue any more."""
        self.awaits_adapter, self.adapter_slot = False, -1

    def take_parallel_samples(self) -> tuple[ParallelSampleSpec, ...]:
        """Returns the parallel samples that begin now, and empties the list of those that have not begun."""
        parallel_samples, self.parallel_samples = self.parallel_samples, ()
        return parallel_samples

    def drop_parallel_sample(self, seq_id: int) -> None:
        """Forgets a parallel sample that has not begun; other ids are ignored."""
        if self.parallel_samples:
            self.parallel_samples = tuple(sample for sample in self.parallel_samples if sample.seq_id != seq_id)

    def leave_parent(self) -> Sequence | None:
        """Forgets the parent, which the parallel sample needs no longer, and returns it; None where that has happened
        already."""
        parent, self.parent = self.parent, None
        return parent

    @property
    def left_to_compute(self) -> int:
        """Gives the number of the sequence's tokens whose KV is missing."""
        return self.num_tokens - self.num_computed

    @property
    def may_give_way(self) -> bool:
        """Says whether the slot for the token after those in launched steps is there, so that the sequence can go on at
        any time."""
        return self.next_start < self.num_blocks * self.block_size

    @property
    def uncharged_tokens(self) -> int:
        """Gives what the sequence's flow owes for it beyond what it was charged: one for each token of the prompt that
        was computed here or is in a launched step, and OUTPUT_COST for each generated one."""
        given = len(self.token_ids)
        computed = min(self.next_start, given) - self._found_tokens
        # What is computed again, after the sequence was preempted, costs nothing.
        return max(0, computed + OUTPUT_COST * (self.num_tokens - given) - self._charged)

    def take_charge(self) -> int:
        """Returns the uncharged tokens, which then count as charged."""
        tokens = self.uncharged_tokens
        self._charged += tokens
        return tokens

    @property
    def next_start(self) -> int:
        """Gives the position where the sequence's next chunk starts: after everything that is computed or in a launched
        step."""
        return self.num_computed + self.num_in_flight

    def _chunks_with(self, start: int, end: int) -> Iterator[ChunkDone]:
        """Yields the chunks of a prefill range that have one of the tokens from ``start`` to ``end``. Chunks that were
        taken for acknowledgement are skipped."""
        for chunk in islice(self._chunks, self._acked_chunks, None):
            if chunk.end_tokens > start:
                yield chunk
            if chunk.end_tokens >= end:
                return

    def take_chunks(self, blocks: int) -> tuple[ChunkDone, ...]:
        """Returns the next chunks that end within the first ``blocks`` blocks, each once."""
        waiting = islice(self._chunks, self._acked_chunks, None)
        done = tuple(chunk for chunk in waiting if chunk.end_tokens <= blocks * self.block_size)
        self._acked_chunks += len(done)
        for chunk in done:
            chunk.started_s = chunk.started_s or self.progress.arrived_s
            chunk.computed_s = chunk.computed_s or self.progress.arrived_s
        return done

    @property
    def room_for_proposals(self) -> int:
        """Gives the number of tokens that a step can judge beyond the one it runs: the block table does not grow for
        them."""
        in_table = self.num_blocks * self.block_size - self.num_computed - 1
        return max(0, min(in_table, len(self._tokens) - self.num_tokens - 1))

    @property
    def most_tokens(self) -> int:
        """Gives the number of tokens of the longest text that the sequence may become."""
        return len(self._tokens)

    @property
    def reports_logprobs(self) -> bool:
        sampling = self.sampling
        return sampling is not None and sampling.logprobs is not None

    @property
    def next_is_last(self) -> bool:
        """Says whether the next token ends the stream, whichever it is."""
        after = self.num_tokens + 1
        return after >= self.max_model_len or after - self.prompt_tokens >= self.max_tokens
