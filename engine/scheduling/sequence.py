"""One sequence of a worker, a decode stream or a prefill span: its tokens, its block table and how far each has come.

    WAITING --first piece--> RUNNING --stop id, length, span computed, cancel, failure--> CLOSING --settled--> (gone)
                             ^     |                                                         |
                             |     +--preempted (also from WAITING, PREEMPTED)-----------> CLOSING
                 first piece |                                                               | settled
                        PREEMPTED <-- a new ticket was opened and adopted --------------- RESUMING
                                                                                             ^
                   a fork: another answer to its parent's prompt, with its own first token --+

Its blocks are a :class:`pillion.engine.scheduling.block_chain.BlockChain`.
A CLOSING sequence waits for the node's answer to that run and for nothing else: it gave its owned slots back when
CLOSING began, and its hold on the ticket is released when CLOSING ends. Draft tokens stand behind the sequence's own
tokens for the length of one step. A sequence belongs to the scheduler that it was added to, and its methods are the
only writers of its fields.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.engine.grammars.answer_grammar import AnswerGrammar
from pillion.engine.scheduling.acceptance import GuessRecord
from pillion.engine.scheduling.block_chain import BlockChain, ChunkDone, Holding
from pillion.errors import PillionError
from pillion.priority import rank
from pillion.types import FinishReason, SamplingParams


class SequenceState(Enum):
    """The states of the drawing above."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    CLOSING = "closing"
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class ForkSpec:
    """Another answer to a prompt: a stream of its own from its first token on, with its own seed."""

    seq_id: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """The task of a sequence; never changes.

    Attributes:
        seq_id: names the sequence on its worker and is its place in the order of arrival.
        token_ids: int32 [N], the prompt and what earlier attempts generated. A span's tokens before ``start_tokens``
            are never read.
        parent_hash: hash of the block that ends at ``start_tokens``; the request's root when that is 0.
        start_tokens: where hashing starts, a multiple of the block size. 0 for a stream.
        prompt_tokens: how many of token_ids are prompt.
        sampling: resolved parameters; None for a span, which ends when its tokens are computed.
        stop_token_ids: ids that end the stream.
        rope_shift: row of the rotary tables for position 0.
        max_tokens: most tokens behind the prompt.
        max_model_len: most tokens in all.
        chunk_ends: positions that one step does not cross, the last one the span's end. Empty for a stream.
        priority: smaller is more urgent (:mod:`pillion.priority`).
        forks: further answers to the prompt, which begin with this sequence's first token. Empty for a span.
        scored_tokens: with ``sampling.prompt_logprobs``: tokens behind the prompt's first one that are not scored.
        adapter: digest of the adapter that the sequence runs with; "" for the model alone.
    """

    seq_id: int
    token_ids: Int32
    parent_hash: bytes
    start_tokens: int = 0
    prompt_tokens: int = 0
    sampling: SamplingParams | None = None
    stop_token_ids: frozenset[int] = frozenset()
    rope_shift: int = 0
    max_tokens: int = 0
    max_model_len: int = 0
    chunk_ends: tuple[int, ...] = ()
    priority: int = 0
    forks: tuple[ForkSpec, ...] = ()
    scored_tokens: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ended: ``reason`` for a stream, ``error`` for a failure, neither for a finished span."""

    reason: FinishReason | None = None
    error: PillionError | None = None


@dataclass(slots=True)
class SequenceProgress:
    """When things happened to a sequence, in the seconds of the scheduler's clock; 0.0 is not yet.

    Attributes:
        token_steps: steps that brought tokens of the answer.
        last_token_s, longest_gap_s: when the last of these steps ended, and the longest time between two of them.
        preempted_s: when the sequence was preempted, each time.
        adapter_s: when its adapter was there for the first time.
        guessed_tokens, accepted_tokens: guesses that steps have judged, and those of them that were right.
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
    guessed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def preemptions(self) -> int:
        return len(self.preempted_s)

    def tokens_came(self, now: float) -> None:
        """Note a step that chose tokens of the answer."""
        if self.token_steps:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.token_steps += 1
        self.last_token_s = now


class Sequence(BlockChain):
    """One sequence; see the module's docstring. Memory for its tokens and its table is allocated once."""

    def __init__(
        self,
        spec: SequenceSpec,
        holding: Holding,
        block_size: int,
        now: float,
        *,
        hashes: bytes = b"",
        grammar: AnswerGrammar | None = None,
    ) -> None:
        """``hashes``: those of leading whole blocks, where they are known. ``grammar``: what the answer follows, which
        has taken the answer's tokens in ``spec``."""
        room = max(len(spec.token_ids), min(spec.max_model_len, spec.prompt_tokens + spec.max_tokens))
        super().__init__(
            spec.seq_id,
            np.empty(room, dtype=np.int32),
            block_size,
            first_block=spec.start_tokens // block_size,
            parent_hash=spec.parent_hash,
            hashes=hashes,
        )
        self.spec = spec
        self.rank = rank(spec.priority, now)
        self.is_span = spec.sampling is None
        self.num_tokens = len(spec.token_ids)
        self._tokens[: self.num_tokens] = spec.token_ids
        self.progress = SequenceProgress(arrived_s=now)
        ends = enumerate(spec.chunk_ends)
        self._chunks = [ChunkDone(seq_id=spec.seq_id, index=index, end_tokens=end) for index, end in ends]
        # Chunks whose acknowledgement is out, or waits only for the node's answer.
        self._acked_chunks = 0
        # Whether its end was reported, or nobody listens to it any more.
        self.end_reported = False
        # Answers to the same prompt that have not begun.
        self.forks = spec.forks
        # The sequence whose prompt this fork shares, until the prompt's KV is copied or found.
        self.parent: Sequence | None = None
        self.grammar = grammar
        # The place of its adapter while that is ready, else -1; and whether it cannot run for want of it.
        self.adapter_place = -1
        self.awaits_adapter = False
        sampling = spec.sampling
        # Whether a sampled token depends on the tokens before it, and not only on the logits and its position.
        self.reads_history = grammar is not None or (
            sampling is not None
            and (
                sampling.repetition_penalty not in (None, 1.0)
                or bool(sampling.presence_penalty or sampling.frequency_penalty)
            )
        )
        # Whether it ends with its prompt, without a token.
        self.is_prompt_only = sampling is not None and spec.max_tokens == 0
        # Prompt tokens are scored by the rows of positions num_scored .. score_end, each the one behind it.
        self.scored_alternatives = 0
        self.num_scored = self.score_end = spec.scored_tokens
        if sampling is not None and sampling.prompt_logprobs is not None:
            self.scored_alternatives = sampling.prompt_logprobs
            self.score_end = max(spec.scored_tokens, spec.prompt_tokens - 1)
        self.num_drafts = 0
        # Whether the drafts are tokens that the grammar forces, which are always right.
        self.drafts_are_forced = False
        # How many tickets the sequence has had, and how often a token was not chosen that a launched step runs on: a
        # step that was launched under an older number is void for it.
        self.generation = 0
        self.guesses = GuessRecord()
        self.hold(holding, SequenceState.WAITING)
        self.progress.tail_tokens = self.num_tokens - self.num_computed
        self.extend_hashes(self.num_tokens)

    def fork(self, fork: ForkSpec, now: float) -> Sequence:
        """A sequence of the same prompt without a ticket: RESUMING."""
        assert self.spec.sampling is not None
        sampling = replace(self.spec.sampling, seed=fork.seed)
        spec = replace(
            self.spec, seq_id=fork.seq_id, sampling=sampling, forks=(), scored_tokens=self.spec.prompt_tokens - 1
        )
        hashes = self.block_hashes(0, spec.prompt_tokens // self.block_size)
        grammar = self.grammar.fork() if self.grammar is not None else None
        child = Sequence(spec, Holding(0, (), ()), self.block_size, now, hashes=hashes, grammar=grammar)
        child.rank = self.rank
        child.parent = self
        child.state = SequenceState.RESUMING
        child.progress.first_step_s = now
        child.progress.tokens_came(now)
        child.progress.tail_tokens = 0
        return child

    # Transitions.

    def hold(self, holding: Holding, state: SequenceState) -> None:
        """Start from a freshly adopted ticket, WAITING or PREEMPTED: its chain is computed, the rest is to do."""
        self.take_ticket(holding)
        # Tokens behind the computed ones that are in launched steps (:mod:`pillion.engine.scheduling.in_flight`).
        self.num_in_flight = 0
        self.num_drafts = 0
        self.generation += 1
        self.state = state
        # Whether the next token is a decode: everything but the last sampled token has its KV.
        self.decoding = False
        # What the end of CLOSING does.
        self.commit_rest = self.resume_after = False

    def start_running(self) -> None:
        """WAITING or PREEMPTED -> RUNNING."""
        self.state = SequenceState.RUNNING

    def close(self, now: float, *, commit_rest: bool, resume: bool) -> tuple[int, ...]:
        """Any state -> CLOSING. Returns the owned slots that will not be committed; they leave the table. With
        ``commit_rest`` full blocks are still committed; with ``resume`` the sequence is preempted and comes back."""
        if resume:
            self.progress.preempted_s.append(now)
        self.state = SequenceState.CLOSING
        self.num_drafts = 0
        self.commit_rest, self.resume_after = commit_rest, resume
        kept = self.full_blocks if commit_rest and self.may_commit else 0
        return self.cut(max(kept, self.num_sent))

    def wait_for_ticket(self) -> None:
        """CLOSING -> RESUMING."""
        self.state = SequenceState.RESUMING

    def report_end(self, now: float) -> None:
        """Note that the end of the sequence is reported, or that nobody listens to it any more."""
        self.end_reported = True
        self.progress.ended_s = now

    # Steps.

    def plan_piece(self, now: float) -> None:
        """Note the first step, and the first step of a chunk, when a piece of the prompt is scheduled."""
        progress = self.progress
        progress.first_step_s = progress.first_step_s or now
        if not progress.first_token_s:
            progress.tail_steps += 1
        if self.is_span:
            chunk = self.chunk_at(self.next_start)
            chunk.started_s = chunk.started_s or now

    def launch(self, count: int) -> None:
        """``count`` more tokens are in a launched step."""
        self.num_in_flight += count

    def land(self, count: int) -> None:
        """The oldest launched step with this sequence, with ``count`` tokens of it, has ended."""
        self.num_in_flight -= count

    def compute(self, start: int, end: int, now: float) -> None:
        """The tokens from ``start`` to ``end`` have their KV now."""
        self.num_computed = end
        if self.is_span:
            self.chunk_at(start).computed_s = now

    def share_prompt(self) -> None:
        """A fork's copy of the prompt's partial block is scheduled: its whole prompt counts as computed."""
        self.num_computed = self.spec.prompt_tokens

    def start_decoding(self) -> None:
        """All of a fork's prompt has its KV: its next piece is a decode."""
        self.decoding = True

    def rows_to_score(self, start: int, end: int) -> int:
        """How many rows of the positions ``start`` to ``end`` are to be scored; they are the last ones before
        ``score_end``."""
        return max(0, min(end, self.score_end) - max(start, self.num_scored))

    @property
    def unscored_from(self) -> int | None:
        """The first position whose row is to be scored, and so computed, however long the cached prefix is; None: all
        are scored."""
        return self.num_scored if self.num_scored < self.score_end else None

    def score(self, count: int) -> None:
        """``count`` more tokens of the prompt are scored."""
        self.num_scored += count

    def accept(self, chosen: Seq[int], now: float) -> tuple[int, FinishReason | None]:
        """Append a step's tokens as far as the drafts behind each were right; what was computed behind is void.

        Returns how many tokens count, and why the stream ends with the last one, None when it goes on. No
        token counts where none could be chosen, or its mask was late; a later step meets that place again.
        """
        drafts = self.drafts().tolist()
        self.num_drafts = 0
        self.decoding = True
        accepted, reason = 0, None
        for token in chosen:
            if token < 0:
                break
            reason = self.append(token)
            accepted += 1
            if reason is not None or drafts[accepted - 1 : accepted] != [token]:
                break
        self.num_computed -= len(chosen) - accepted
        if not accepted and self.num_in_flight:
            # The step that was launched on the token that was not chosen is void.
            self.num_in_flight = 0
            self.generation += 1
        if accepted:
            self.progress.tokens_came(now)
            if self.grammar is not None:
                self.grammar.take(self.tokens(self.num_tokens - accepted, self.num_tokens).tolist())
        if drafts and not self.drafts_are_forced:
            # In this order: whoever reads both meanwhile knows the results of all guesses that it counts.
            self.progress.accepted_tokens += max(accepted - 1, 0)
            self.progress.guessed_tokens += len(drafts)
        self.extend_hashes(self.num_computed)
        return accepted, reason

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token. Returns why the stream ends with it, None when it goes on."""
        last = self.next_is_last
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self.spec.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if last else None

    def append_forced(self, tokens: Seq[int], now: float) -> tuple[Seq[int], FinishReason]:
        """Append the last tokens of an answer that its grammar completes. Returns those that max_tokens and stop ids
        leave, and why the stream ends with them."""
        reason = None
        for count, token in enumerate(tokens, 1):
            reason = self.append(token)
            if reason is not None:
                tokens, reason = tokens[:count], FinishReason.STOP if count == len(tokens) else reason
                break
        if tokens:
            self.progress.tokens_came(now)
            assert self.grammar is not None
            self.grammar.take(tokens)
        return tokens, reason or FinishReason.STOP

    def draft(self, tokens: Int32, *, forced: bool = False) -> None:
        """Place guesses of the next tokens, or tokens that the grammar forces, behind the sequence's own, for one
        step."""
        self.num_drafts = len(tokens)
        self.drafts_are_forced = forced
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    def drafts(self) -> Int32:
        """int32 [num_drafts], a view."""
        return self.tokens(self.num_tokens, self.num_tokens + self.num_drafts)

    def drop_drafts(self) -> None:
        """The step that would have judged the drafts has failed."""
        self.num_drafts = 0

    # Its adapter (:mod:`pillion.engine.scheduling.adapter_places`).

    def await_adapter(self) -> None:
        """It is in a queue and cannot run before its adapter is ready."""
        self.awaits_adapter = True

    def use_adapter(self, place: int, now: float) -> None:
        """Its adapter is ready in the backend's place of that number."""
        self.adapter_place, self.awaits_adapter = place, False
        self.progress.adapter_s = self.progress.adapter_s or now

    def leave_adapter(self) -> None:
        """It is in no queue any more."""
        self.adapter_place, self.awaits_adapter = -1, False

    # Forks.

    def take_forks(self) -> tuple[ForkSpec, ...]:
        """The forks that begin now; none is left."""
        forks, self.forks = self.forks, ()
        return forks

    def drop_fork(self, seq_id: int) -> None:
        """Forget a fork that has not begun; ids of others are ignored."""
        if self.forks:
            self.forks = tuple(fork for fork in self.forks if fork.seq_id != seq_id)

    def leave_parent(self) -> Sequence | None:
        """The parent, which the fork needs no longer; None where it left already."""
        parent, self.parent = self.parent, None
        return parent

    # Tokens.

    @property
    def left_to_compute(self) -> int:
        """Tokens whose KV is missing."""
        return self.num_tokens - self.num_computed

    @property
    def next_start(self) -> int:
        """Where its next piece starts: behind everything that is computed or in a launched step."""
        return self.num_computed + self.num_in_flight

    def step_end(self) -> int:
        """The position that one step may reach: the next chunk's end, or all there is."""
        return self.chunk_at(self.next_start).end_tokens if self.is_span else self.num_tokens

    def chunk_at(self, position: int) -> ChunkDone:
        """The chunk of a span that ``position`` lies in. Chunks that were taken for acknowledgement are skipped."""
        return next(chunk for chunk in islice(self._chunks, self._acked_chunks, None) if chunk.end_tokens > position)

    def take_chunks(self, blocks: int) -> tuple[ChunkDone, ...]:
        """The next chunks that end within the first ``blocks`` blocks; each is returned once."""
        waiting = islice(self._chunks, self._acked_chunks, None)
        done = tuple(chunk for chunk in waiting if chunk.end_tokens <= blocks * self.block_size)
        self._acked_chunks += len(done)
        for chunk in done:
            chunk.started_s = chunk.started_s or self.progress.arrived_s
            chunk.computed_s = chunk.computed_s or self.progress.arrived_s
        return done

    @property
    def room_for_drafts(self) -> int:
        """Tokens that a step can guess beyond the one it runs: neither the table nor the answer grows for them."""
        in_table = self.num_blocks * self.block_size - self.num_computed - 1
        return max(0, min(in_table, len(self._tokens) - self.num_tokens - 1))

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest text that it may become."""
        return len(self._tokens)

    @property
    def reports_logprobs(self) -> bool:
        sampling = self.spec.sampling
        return sampling is not None and sampling.logprobs is not None

    @property
    def next_is_last(self) -> bool:
        """Whether the next token ends the stream, whichever it is."""
        behind = self.num_tokens + 1
        return behind >= self.spec.max_model_len or behind - self.spec.prompt_tokens >= self.spec.max_tokens
