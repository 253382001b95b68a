"""One stream (decode) or span (prefill) on a worker: its tokens, its block table, and how far each has come.

    WAITING --first piece--> RUNNING --stop id, length, span computed, cancel, failure--> CLOSING --settled--> (gone)
                             ^     |                                                         |
                             |     +--preempted (also from WAITING, SWAPPED)-------------> CLOSING
                 first piece |                                                               | settled
                          SWAPPED <-- a new ticket was opened and adopted ---------------- RESUMING
                                                                                             ^
                           another answer to its parent's prompt, with its own first token --+

The block table, left to right; every count is in blocks and none of them shrinks while the sequence runs:

    [ committed: the ticket's chain | in commit: sent to the KV node | owned: leased, being written or still empty ]
    0                        num_committed                        num_sent                                  num_blocks

Only one run of blocks is under way to the node at a time, so that a refusal cannot leave a hole in the chain.
CLOSING waits for that answer and nothing else: owned slots went back when it began, and the hold on the ticket is
released when it ends. Draft tokens stand behind the sequence's own for the length of one step. A sequence belongs to
the scheduler that it was added to; nobody else changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

import numpy as np

from pillion.engine.backends.batch import Int32
from pillion.errors import PillionError
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes
from pillion.priority import rank
from pillion.sampling_ranges import MAX_SPECULATIVE_TOKENS
from pillion.types import FinishReason, SamplingParams


class SequenceState(Enum):
    """See the drawing above."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "swapped"
    CLOSING = "closing"
    RESUMING = "resuming"


@dataclass(frozen=True, slots=True)
class ForkSpec:
    """Another answer to a prompt: a stream of its own from its first token on, with its own seed."""

    seq_id: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What is asked for; never changes.

    Attributes:
        seq_id: names the sequence on its worker and is its place in the order of arrival.
        token_ids: int32 [N], the prompt and what earlier attempts generated. Of a span, what stands before
            ``start_tokens`` is never read.
        parent_hash: hash of the block that ends at ``start_tokens``; the request's root when that is 0.
        start_tokens: where hashing starts, a multiple of the block size. 0 for a stream.
        prompt_tokens: how many of token_ids are prompt.
        sampling: resolved parameters; None for a span, which ends when its tokens are computed.
        stop_token_ids: ids that end the stream.
        max_tokens: most tokens behind the prompt.
        max_model_len: most tokens in all.
        chunk_ends: positions that one step does not cross, the last one the span's end. Empty for a stream.
        priority: smaller is more urgent (:mod:`pillion.priority`).
        forks: further answers to the prompt, which begin with this one's first token. Empty for a span.
    """

    seq_id: int
    token_ids: Int32
    parent_hash: bytes
    start_tokens: int = 0
    prompt_tokens: int = 0
    sampling: SamplingParams | None = None
    stop_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 0
    max_model_len: int = 0
    chunk_ends: tuple[int, ...] = ()
    priority: int = 0
    forks: tuple[ForkSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """A ticket as the worker adopted it: slots of its pinned chain, and slots leased for what is to be written."""

    ticket_id: int
    chain_slots: tuple[int, ...]
    leased_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ended by itself: ``reason`` of a stream, ``error`` of a failure, neither of a finished span."""

    reason: FinishReason | None = None
    error: PillionError | None = None


@dataclass(slots=True)
class SequenceProgress:
    """When things happened, in the seconds of the scheduler's clock; 0.0 is not yet.

    Attributes:
        token_steps: steps that brought tokens of the answer.
        last_token_s, longest_gap_s: when the last one did, and the longest time between two of them.
        preempted_s: when its memory was taken, each time.
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

    @property
    def preemptions(self) -> int:
        """How often it gave way."""
        return len(self.preempted_s)

    def tokens_came(self, now: float) -> None:
        """A step chose tokens."""
        if self.token_steps:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.token_steps += 1
        self.last_token_s = now


@dataclass(slots=True)
class ChunkMark:
    """When a chunk of a span began its first step and ended its last one."""

    end_tokens: int
    started_s: float
    computed_s: float


class Sequence:
    """See the module's docstring. Memory for its tokens and its table is allocated once."""

    def __init__(
        self, spec: SequenceSpec, holding: Holding, block_size: int, now: float, *, hashes: bytes = b""
    ) -> None:
        """``hashes``: of leading whole blocks, where they are known."""
        self.spec = spec
        self.seq_id = spec.seq_id
        self.rank = rank(spec.priority, now)
        self.block_size = block_size
        self.is_span = spec.sampling is None
        room = max(len(spec.token_ids), min(spec.max_model_len, spec.prompt_tokens + spec.max_tokens))
        self._tokens: Int32 = np.empty(room, dtype=np.int32)
        self.num_tokens = len(spec.token_ids)
        self._tokens[: self.num_tokens] = spec.token_ids
        self._table: Int32 = np.zeros(room // block_size + 2, dtype=np.int32)
        self._hashes = bytearray(hashes)
        self.state = SequenceState.WAITING
        self.progress = SequenceProgress(arrived_s=now)
        self.chunks = [ChunkMark(end, 0.0, 0.0) for end in spec.chunk_ends]
        # Chunks whose acknowledgement waits for nothing but the node's answer, or is out.
        self.chunks_acked = 0
        # Whether its end was told, or nobody wants to hear of it any more.
        self.told = False
        # Answers to the same prompt that have not begun.
        self.forks = spec.forks
        # Whose prompt this one shares, until its KV is copied or found.
        self.parent: Sequence | None = None
        self.reads_history = _reads_history(spec.sampling)
        self.num_drafts = 0
        # How often it has got a ticket: what was launched under an older one is void.
        self.holds = 0
        # Of the last guess, how many tokens were right; at first, hope.
        self.right_guesses = MAX_SPECULATIVE_TOKENS
        self.hold(holding)
        self.progress.tail_tokens = self.num_tokens - self.num_computed
        self.extend_hashes(self.num_tokens)

    def fork(self, fork: ForkSpec, now: float) -> Sequence:
        """A sequence of the same prompt without a ticket: RESUMING."""
        assert self.spec.sampling is not None
        sampling = replace(self.spec.sampling, seed=fork.seed)
        spec = replace(self.spec, seq_id=fork.seq_id, sampling=sampling, forks=())
        hashes = self.block_hashes(0, spec.prompt_tokens // self.block_size)
        child = Sequence(spec, Holding(0, (), ()), self.block_size, now, hashes=hashes)
        child.rank = self.rank
        child.parent = self
        child.state = SequenceState.RESUMING
        child.progress.first_step_s = now
        child.progress.tokens_came(now)
        child.progress.tail_tokens = 0
        return child

    def hold(self, holding: Holding) -> None:
        """Start from a freshly adopted ticket: its chain is computed, the rest is to do."""
        slots = (*holding.chain_slots, *holding.leased_slots)
        self.ticket_id = holding.ticket_id
        self.num_blocks = len(slots)
        if self.num_blocks > len(self._table):
            self._table = np.zeros(self.num_blocks, dtype=np.int32)
        self._table[: self.num_blocks] = slots
        self.num_committed = self.num_sent = len(holding.chain_slots)
        self.num_computed = self.num_committed * self.block_size
        # Tokens behind these that are in steps under way (:mod:`pillion.engine.scheduling.in_flight`).
        self.flying = 0
        self.holds += 1
        self.state = SequenceState.WAITING
        # Whether the next token is a decode: everything but the last sampled token has its KV.
        self.decoding = False
        # False once the node refused a run: the chain's tail is then not what the next block would follow.
        self.may_commit = True
        # What CLOSING does once the node has answered.
        self.commit_rest = self.resume_after = False

    # Tokens.

    @property
    def num_generated(self) -> int:
        """Tokens behind the prompt, over all attempts."""
        return self.num_tokens - self.spec.prompt_tokens

    @property
    def left_to_compute(self) -> int:
        """Tokens whose KV is missing."""
        return self.num_tokens - self.num_computed

    @property
    def next_start(self) -> int:
        """Where its next piece starts: behind everything that is computed or under way."""
        return self.num_computed + self.flying

    def step_end(self) -> int:
        """The position that one step may reach: the next chunk's end, or all there is."""
        return self.chunk_at(self.next_start).end_tokens if self.is_span else self.num_tokens

    def chunk_at(self, position: int) -> ChunkMark:
        """The chunk of a span that ``position`` lies in. Chunks before ``chunks_acked`` are not looked at."""
        return next(mark for mark in islice(self.chunks, self.chunks_acked, None) if mark.end_tokens > position)

    def tokens(self, start: int, end: int) -> Int32:
        """int32 [end - start], a view."""
        return self._tokens[start:end]

    def draft(self, tokens: Int32) -> None:
        """Guesses of the next tokens, for one step."""
        self.num_drafts = len(tokens)
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    @property
    def room_for_drafts(self) -> int:
        """Tokens that a step can guess beyond the one it runs: neither the table nor the answer grows for them."""
        in_table = self.num_blocks * self.block_size - self.num_computed - 1
        return max(0, min(in_table, len(self._tokens) - self.num_tokens - 1))

    @property
    def next_is_last(self) -> bool:
        """Whether the next token ends the stream, whichever it is."""
        behind = self.num_tokens + 1
        return behind >= self.spec.max_model_len or behind - self.spec.prompt_tokens >= self.spec.max_tokens

    def append(self, token: int) -> FinishReason | None:
        """Take a sampled token. Returns why the stream ends with it, None when it goes on."""
        last = self.next_is_last
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self.spec.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if last else None

    # Blocks.

    def table(self) -> Int32:
        """int32 [num_blocks] slots in order, a view."""
        return self._table[: self.num_blocks]

    def slots(self, start: int, end: int) -> tuple[int, ...]:
        """Slots of blocks start .. end."""
        return tuple(self._table[start:end].tolist())

    def owned_slots(self) -> tuple[int, ...]:
        """Slots that are leased to this worker, those in commit included."""
        return self.slots(self.num_committed, self.num_blocks)

    def add_slot(self, slot: int) -> None:
        """One more block at the end."""
        self._table[self.num_blocks] = slot
        self.num_blocks += 1

    def swap_slot(self, block: int, slot: int) -> None:
        """Read ``block`` from ``slot`` from now on (I2)."""
        self._table[block] = slot

    def cut(self, block: int) -> tuple[int, ...]:
        """Forget the table from ``block`` on; returns its slots."""
        dropped = self.slots(block, self.num_blocks)
        self.num_blocks = min(self.num_blocks, block)
        return dropped

    @property
    def in_commit(self) -> bool:
        """Whether a run of blocks is under way to the node."""
        return self.num_sent > self.num_committed

    @property
    def full_blocks(self) -> int:
        """Blocks whose every token has its KV."""
        return min(self.num_computed // self.block_size, self.num_blocks)

    # Hashes.

    def extend_hashes(self, num_tokens: int) -> None:
        """Hash the whole blocks among the first ``num_tokens`` tokens that are not hashed yet."""
        start = self.spec.start_tokens + len(self._hashes) // HASH_BYTES * self.block_size
        end = num_tokens // self.block_size * self.block_size
        if end > start:
            parent = bytes(self._hashes[-HASH_BYTES:]) or self.spec.parent_hash
            self._hashes += chain_hashes(parent, self._tokens[start:end].tolist(), self.block_size)

    def block_hashes(self, start: int, end: int) -> bytes:
        """32 bytes for each of blocks start .. end, all of them at or behind ``start_tokens``."""
        first = self.spec.start_tokens // self.block_size
        return bytes(self._hashes[(start - first) * HASH_BYTES : (end - first) * HASH_BYTES])


def _reads_history(sampling: SamplingParams | None) -> bool:
    """Whether a choice depends on which tokens stand before it, and not on the logits and its place alone."""
    if sampling is None:
        return False
    repeats = sampling.repetition_penalty not in (None, 1.0)
    return repeats or bool(sampling.presence_penalty or sampling.frequency_penalty)
