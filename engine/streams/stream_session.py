"""One gateway's connection to a worker: its streams, and the deltas to send next.

    submit --> checked --> ticket adopted, or opened --> its blocks committed --> queued, prompt tail, decode -->
    finished
                  |              |                             |                        |                      | failed
                  +--------------+-----------error-------------+------------------------+-----> last delta
    cancel, or the connection's end: no further delta

If no other worker computes a part of the prompt, a submit has no ticket. This worker then opens and adopts one in a
single call, which waits at the KV node while memory is short, and fails if the node has less of the prompt than the
gateway expected.

A submit may come while a prefill worker still runs the prefill range: this worker then waits at the KV node for the
range's blocks, and that is the whole hand-off.

A submit's parallel samples are streams from its first token on. If the submit ends before that, they end with it, and
only its own key gets a delta.

All updates of a stream since the last message are merged into one delta, so a slow gateway costs one entry per stream;
one message has the deltas of all streams of a step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
from opentelemetry.context import Context

from pillion.engine.scheduling.block_chain import AdoptedTicket, ChunkDone
from pillion.engine.scheduling.sequence import ParallelSampleSpec, Sequence, SequenceProgress, rope_shift
from pillion.engine.scheduling.step_plan import Update
from pillion.engine.worker.tickets import MEMORY_WAIT_S, Tickets
from pillion.engine.worker.worker import Worker
from pillion.engine.worker.worker_epoch import SequenceListener, WorkerEpoch
from pillion.engine.worker.worker_telemetry import record, record_stream
from pillion.errors import (
    BrokenGrammar,
    BrokenModel,
    Conflict,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PillionError,
    Unavailable,
)
from pillion.kvstore.hashing import HASH_BYTES
from pillion.observability import telemetry
from pillion.rules.grammar_limits import MAX_GRAMMAR_BYTES
from pillion.rules.priority import MAX_FLOW_KEY_BYTES, bounded, bounded_flow
from pillion.types import MAX_BAD_SEQUENCES, MAX_BAD_TOKENS, MAX_PROMPT_LOGPROBS, SamplingParams, range_violations
from pillion.v1.common_pb2 import Queued
from pillion.v1.decode_pb2 import DecodeBatch, DecodeDelta, DecodeError, DecodeTimings, Submit, TokenSequence
from pillion.v1.prefill_pb2 import RunPrefillRequest
from pillion.wire.common import finish_to_pb, logprob_to_pb, read_pooling, read_sampling
from pillion.wire.errors import as_pillion_error

log = logging.getLogger("pillion.decode")

# Max streams, over all connections, that wait for memory or prefilled blocks, and have no sequence on the worker yet.
MAX_AWAITING = 4096
# Pending deltas at which a refusal pauses reading submits until they are sent.
MAX_PENDING_DELTAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_POOLED_IDS = 16
# Max positions per prompt at which a client may ask to keep the recurrent state.
MAX_KEPT_POSITIONS = 8


class MemoryShort(Overloaded):
    """The KV node had no memory for a prompt in time. Not retried on another worker: the client gets this error."""


@dataclass(eq=False, slots=True)
class _DecodeStream:
    """The stream of one answer to a gateway, for a Submit or one of its parallel samples; the listener of its sequence.

    Attributes:
        key: the stream's id on the connection.
        seq_id: the sequence's id on the worker.
        timer: ends the stream at its deadline.
        tickets: the epoch's tickets, while the stream waits for its own or for blocks.
        generated: number of tokens of the answer.
        sent_draft_tokens: drafted tokens as of the last timings sent.
    """

    session: DecodeSession
    trace: Context
    key: int
    seq_id: int
    parallel_samples: tuple[_DecodeStream, ...] = ()
    timer: asyncio.TimerHandle | None = None
    tickets: Tickets | None = None
    generated: int = 0
    sent_draft_tokens: int = 0
    # Written by the step thread.
    progress: SequenceProgress | None = None

    def should_send_timings(self, new_tokens: int) -> bool:
        """Return whether a delta with ``new_tokens`` that is not the last has timings, since a stream that the gateway
        ends has no last one: if it has the first tokens, or draft tokens were verified since the last timings, which
        then count as sent."""
        if self.progress is None:
            return False
        sent, self.sent_draft_tokens = self.sent_draft_tokens, self.progress.drafted_tokens
        return sent < self.sent_draft_tokens or self.generated == new_tokens

    def on_begun(self) -> None:
        self.session.report_begun(self.key)

    def on_update(self, update: Update) -> None:
        self.generated += len(update.token_ids)
        self.progress = update.progress or self.progress
        ending = update.ending
        if ending is not None and update.progress is not None:
            record_stream(self.trace, update.progress, self.generated)
        self.session.add_update(self.key, update)

    def on_chunk(self, chunk: ChunkDone) -> None:
        raise AssertionError("streams have no chunks")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits on the streams of a worker.

    Attributes:
        max_streams: max streams of all connections and other sequences of the worker.
        flags: the flags that determine ``max_streams``, for error messages.
        vectors_alone: True if only texts to embed are accepted.
    """

    max_streams: int
    flags: str
    vectors_alone: bool = False


class DecodeSession:
    """One gateway's connection, which its servicer closes.

    Args:
        limits: limits shared by all connections.
        adopting: shared by all connections: the number of streams that each running :meth:`_start` will add.
    """

    def __init__(self, worker: Worker, limits: StreamLimits, adopting: dict[asyncio.Task[None], int]) -> None:
        self._worker = worker
        self._limits = limits
        self._streams: dict[int, _DecodeStream] = {}
        self._adopting = adopting
        self._pending: dict[int, DecodeDelta] = {}
        self._scored: set[int] = set()
        self._awake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._finishing = False

    async def submit(self, submit: Submit) -> None:
        """Start a stream; an error becomes its only delta. Raises InvalidRequest for a key in use, which ends the
        connection."""
        await self._room.wait()
        keys = (submit.key, *(sample.key for sample in submit.siblings))
        if len(set(keys)) < len(keys):
            raise InvalidRequest("a submit and its parallel samples need a key each")
        for key in keys:
            if key in self._streams or key in self._pending:
                raise InvalidRequest(f"key {key} is in use on this connection")
        worker, waits = self._worker, _waits(submit)
        try:
            worker.check_open()
            sampling = check_submit(submit, worker.block_size, worker.model.backend.vocab_size, worker.max_model_len)
            generates = read_pooling(submit) is None
            if not generates and not worker.gives_vectors:
                raise InvalidRequest(f"{worker.component_id} has no vectors of texts: it computes in stages")
            if generates and self._limits.vectors_alone:
                raise InvalidRequest(f"{worker.component_id} generates nothing: it is a {worker.role} worker")
            if (generates or submit.pooled_ids) and not worker.model.chooses_tokens:
                raise InvalidRequest(
                    f"{worker.model.prepared.name} generates nothing: it has no head that chooses tokens"
                )
            if submit.siblings and submit.prompt_tokens != len(submit.token_ids):
                raise InvalidRequest("only a prompt without an answer has parallel samples")
            if not submit.awaited_blocks:
                # Before opening a ticket, which may evict blocks.
                self._check_room(len(keys))
            if waits and len(self._adopting) >= MAX_AWAITING:
                raise Overloaded(f"{MAX_AWAITING} streams already wait at {worker.component_id}")
        except PillionError as error:
            self._fail(submit.key, error)
            return
        stream = self._open(submit, submit.key)
        parallel_samples = [self._open(submit, sample.key) for sample in submit.siblings]
        stream.parallel_samples = tuple(parallel_samples)
        task = asyncio.create_task(self._start(stream, submit, sampling))
        self._adopting[task] = 0 if waits else len(keys)
        task.add_done_callback(self._adopting.pop)

    def cancel(self, key: int) -> None:
        """End a stream without a delta. Unknown keys are ignored: the stream may just have ended by itself."""
        stream = self._drop(key)
        self._pending.pop(key, None)
        if stream is None:
            return
        self._worker.epoch.cancel(stream.seq_id)
        if stream.progress is not None:
            record_stream(stream.trace, replace(stream.progress, ended_s=time.monotonic()), stream.generated)

    def close(self) -> None:
        """Cancel all streams of the connection, which has ended (I8). Idempotent."""
        self._closed = True
        for key in tuple(self._streams):
            self.cancel(key)
        self._awake.set()

    def finish(self) -> None:
        """End the connection after the pending deltas, because the worker stops."""
        self._finishing = True
        self._awake.set()

    async def deltas(self) -> AsyncIterator[DecodeBatch]:
        """Yield batches of deltas, one per step with updates, and one more per stream whose prompt is scored, until
        :meth:`close` or :meth:`finish`."""
        while not self._closed:
            await self._awake.wait()
            self._awake.clear()
            pending, self._pending = self._pending, {}
            self._room.set()
            scored, self._scored = self._scored, set()
            for key in scored & pending.keys():
                yield DecodeBatch(deltas=[pending.pop(key)])
            if pending:
                yield DecodeBatch(deltas=pending.values())
            if self._finishing and not self._pending:
                return

    def add_update(self, key: int, update: Update) -> None:
        try:
            self._write_update(key, update)
        except Exception as error:  # noqa: BLE001  (a defect must end its stream, not those after it in the outcome)
            # The delta may be incomplete.
            self._pending.pop(key, None)
            self._end(key, as_pillion_error(error, "Decode"))

    def _write_update(self, key: int, update: Update) -> None:
        delta = self._pending_delta(key)
        delta.token_ids.extend(update.token_ids)
        if update.logprobs:
            delta.logprobs.extend(map(logprob_to_pb, update.logprobs))
        if update.prompt_logprobs:
            delta.prompt_logprobs.extend(map(logprob_to_pb, update.prompt_logprobs))
            self._scored.add(key)
            return
        stream, ending = self._streams.get(key), update.ending
        if ending is None:
            if stream is not None and stream.should_send_timings(len(update.token_ids)):
                assert stream.progress is not None
                delta.timings.CopyFrom(_timings_of(stream.progress))
            return
        self._drop(key)
        delta.finish_reason = finish_to_pb(ending.reason)
        delta.vector = ending.vector
        head = self._worker.model.head
        if head is not None and ending.vector:
            delta.vector = head.logits(np.frombuffer(ending.vector, "<f4")).astype("<f4").tobytes()
        if ending.error is not None:
            delta.error.CopyFrom(_error_of(ending.error))
            if isinstance(ending.error, BrokenModel):
                log.error("a request failed: %s", ending.error)
        if update.progress is not None:
            delta.timings.CopyFrom(_timings_of(update.progress))

    def report_begun(self, key: int) -> None:
        """Report that the prompt of a stream is being computed: queue position 0."""
        self._pending_delta(key).queued.CopyFrom(Queued())

    async def report_queued(self) -> None:
        """Add a heartbeat with the queue position to the delta of each stream that waits or computes its prompt. Waits
        for the step loop, so a hung worker sends none."""
        if not self._streams:
            return
        positions = await self._worker.epoch.positions()
        for key, stream in self._streams.items():
            position = positions.get(stream.seq_id)
            if position is not None:
                self._pending_delta(key).queued.CopyFrom(Queued(position=position))

    def _check_room(self, streams: int) -> None:
        """Raise Overloaded if the worker cannot accept ``streams`` more streams."""
        worker = self._worker
        limit = self._limits.max_streams
        if len(worker.epoch.listeners) + sum(self._adopting.values()) + streams > limit:
            raise Overloaded(f"{worker.component_id} has {limit} streams ({self._limits.flags})")

    async def _start(self, stream: _DecodeStream, submit: Submit, sampling: SamplingParams) -> None:
        """Adopt or open the ticket and queue the stream. Never cancelled, because an adopted ticket must be
        released."""
        try:
            grammar = None
            if submit.grammar:
                answer = submit.token_ids[submit.prompt_tokens :]
                grammar = await self._worker.compiled(submit.grammar, answer, frozenset(submit.stop_token_ids))

            def begin(ticket: AdoptedTicket) -> tuple[Sequence, dict[int, SequenceListener]]:
                sequence, listeners = self._begin(stream, submit, sampling, ticket)
                if grammar is not None:
                    sequence.follow_grammar(grammar)
                return sequence, listeners

            started = await self._worker.run_sequence(
                submit.adapter,
                hold=lambda epoch: self._hold(stream, submit, epoch),
                begin=begin,
                wanted=lambda: self._streams.get(submit.key) is stream,
            )
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (each stream has an end, whatever failed)
            if self._drop(submit.key) is not None:
                self._fail(submit.key, as_pillion_error(error, "Decode"))
            return
        if started is not None:
            stream.progress, ticket = started
            # On this delta, the gateway may release its own hold of the ticket.
            self._pending_delta(submit.key).pinned_blocks = len(ticket.chain_slots)

    async def _hold(self, stream: _DecodeStream, submit: Submit, epoch: WorkerEpoch) -> tuple[AdoptedTicket, bytes]:
        """Adopt the gateway's ticket and wait for its blocks, or open a ticket; return it and the hash of its last
        block. Raises as :class:`Tickets` does, but MemoryShort if the node is out of memory."""
        stream.tickets = epoch.tickets
        total_blocks = self._worker.blocks_of(len(submit.token_ids))
        if submit.ticket_id:
            return await self._adopt_ticket(stream, submit, epoch, total_blocks)
        began_s, attributes = time.monotonic(), {"pillion.pinned_blocks": 0}
        try:
            ticket, last_hash = await epoch.tickets.open(
                stream.seq_id,
                submit.block_hashes,
                total_blocks,
                resume=submit.attempt > 1,
                priority=submit.priority,
                expected_blocks=submit.expected_blocks,
                state_pages=self._worker.model.backend.layout.state_pages,
                known_blocks=submit.known_blocks,
                flow=bounded_flow(submit.flow.key, submit.flow.weight),
            )
            attributes["pillion.pinned_blocks"] = len(ticket.chain_slots)
        except DeadlineExceeded:
            node_id = self._worker.attachment.node_id
            message = f"no KV memory came free at {node_id} within {MEMORY_WAIT_S:.0f} s"
            raise MemoryShort(message, retry_after_ms=1000) from None
        except Overloaded as error:
            raise MemoryShort(error.message, error.retry_after_ms) from None
        finally:
            record("kv.pin", stream.trace, began_s, time.monotonic(), attributes)
        return ticket, last_hash

    async def _adopt_ticket(
        self, stream: _DecodeStream, submit: Submit, epoch: WorkerEpoch, total_blocks: int
    ) -> tuple[AdoptedTicket, bytes]:
        """Adopt the submit's ticket, and wait for its awaited blocks unless the stream has ended meanwhile."""
        ticket, last_hash = await epoch.tickets.adopt(
            submit.ticket_id, total_blocks, awaited_blocks=submit.awaited_blocks
        )
        if len(ticket.chain_slots) >= submit.awaited_blocks or self._streams.get(submit.key) is not stream:
            return ticket, last_hash
        if submit.adapter:
            epoch.expect_adapter(submit.adapter)
        return await epoch.tickets.await_chain(stream.seq_id, ticket, submit.awaited_blocks)

    def _begin(
        self,
        stream: _DecodeStream,
        submit: Submit,
        sampling: SamplingParams,
        ticket: AdoptedTicket,
    ) -> tuple[Sequence, dict[int, SequenceListener]]:
        """Return the sequence of a stream with its ticket, and the listeners, by seq_id, of it and of its parallel
        samples that are not cancelled. Raises Overloaded if the worker cannot accept them any more."""
        stream.parallel_samples = tuple(
            sample for sample in stream.parallel_samples if self._streams.get(sample.key) is sample
        )
        if _waits(submit):
            self._check_room(1 + len(stream.parallel_samples))
        model, seeds = self._worker.model, {sample.key: sample.seed for sample in submit.siblings}
        sequence = Sequence(
            ticket,
            self._worker.block_size,
            time.monotonic(),
            seq_id=stream.seq_id,
            token_ids=np.fromiter(submit.token_ids, np.int32, len(submit.token_ids)),
            parent_hash=submit.root_hash,
            prompt_tokens=submit.prompt_tokens,
            sampling=sampling,
            max_model_len=self._worker.max_model_len,
            rope_shift=rope_shift(
                submit.prompt_tokens + submit.max_tokens, model.prepared.original_tokens, model.prepared.max_model_len
            ),
            priority=bounded(submit.priority),
            parallel_samples=tuple(
                ParallelSampleSpec(sample.seq_id, seeds[sample.key]) for sample in stream.parallel_samples
            ),
            scored_tokens=submit.scored_tokens,
            adapter=submit.adapter,
            pooling=read_pooling(submit),
            keeps_blocks=not model.whole_texts,
            kept_tokens=tuple(submit.kept_tokens),
            vocab_size=model.backend.vocab_size,
            flow=bounded_flow(submit.flow.key, submit.flow.weight),
        )
        return sequence, {listener.seq_id: listener for listener in (stream, *stream.parallel_samples)}

    def _open(self, submit: Submit, key: int) -> _DecodeStream:
        """Register a stream under ``key``, with the submit's deadline."""
        trace = telemetry.from_traceparent(submit.traceparent)
        stream = self._streams[key] = _DecodeStream(self, trace, key, self._worker.next_id())
        if submit.timeout_ms:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(submit.timeout_ms / 1000, self._time_out, key)
        return stream

    def _drop(self, key: int) -> _DecodeStream | None:
        """Remove and return a stream; None if there is none. Parallel samples that have not started are cancelled
        without a delta."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return None
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.tickets is not None and stream.progress is None:
            stream.tickets.stop_waiting(stream.seq_id)
        if not stream.generated:
            for sample in stream.parallel_samples:
                if self._drop(sample.key) is not None:
                    self._worker.epoch.cancel(sample.seq_id)
        return stream

    def _time_out(self, key: int) -> None:
        if key in self._streams:
            self._end(key, DeadlineExceeded("the request's deadline has passed"))

    def _end(self, key: int, error: PillionError) -> None:
        """End a stream with an error in its next delta."""
        stream = self._drop(key)
        if stream is not None:
            self._worker.epoch.cancel(stream.seq_id)
        self._fail(key, error)

    def _fail(self, key: int, error: PillionError) -> None:
        self._pending_delta(key).error.CopyFrom(_error_of(error))
        if len(self._pending) >= MAX_PENDING_DELTAS:
            self._room.clear()

    def _pending_delta(self, key: int) -> DecodeDelta:
        """Return the delta of a stream in the next message, for the caller to add to."""
        self._awake.set()
        delta = self._pending.get(key)
        if delta is None:
            delta = self._pending[key] = DecodeDelta(key=key)
        return delta


def _waits(submit: Submit) -> bool:
    """Return whether the stream may have to wait for prefilled blocks or memory before it is scheduled."""
    return bool(submit.awaited_blocks) or not submit.ticket_id


def _error_of(error: PillionError) -> DecodeError:
    retryable = isinstance(error, NotFound | Conflict | Overloaded | Unavailable | Internal) and not isinstance(
        error, BrokenGrammar | BrokenModel | MemoryShort
    )
    retry_after_ms = error.retry_after_ms if isinstance(error, Overloaded) else 0
    return DecodeError(code=error.code, message=error.message, retryable=retryable, retry_after_ms=retry_after_ms)


def _timings_of(progress: SequenceProgress) -> DecodeTimings:
    return DecodeTimings(
        tail_tokens=progress.tail_tokens,
        tail_steps=progress.tail_steps,
        queue_ms=max(0.0, (progress.first_step_s or progress.ended_s) - progress.arrived_s) * 1000,
        preemptions=progress.preemptions,
        guessed_tokens=progress.drafted_tokens,
        accepted_tokens=progress.accepted_tokens,
    )


def check_submit(submit: Submit, block_size: int, vocab_size: int, max_model_len: int) -> SamplingParams:
    """Check the fields of a submit, and return its sampling parameters. Raises InvalidRequest with every violation.

    Gateways check their clients' requests already; these checks protect the step loop from a broken or older gateway.
    """
    sampling = read_sampling(submit)
    violations = [*_shape(submit, block_size, vocab_size, max_model_len), *_sampling(sampling, submit, vocab_size)]
    if submit.pooled or submit.pooled_rows or submit.pooled_ids or submit.second_from:
        violations += _pooling(submit, vocab_size)
    if violations:
        raise InvalidRequest.of(*violations)
    return sampling


def _shape(submit: Submit, block_size: int, vocab_size: int, max_model_len: int) -> Iterator[FieldViolation]:
    total = len(submit.token_ids)
    if not 1 <= total < max_model_len:
        yield FieldViolation("token_ids", f"{total} tokens; from 1 to {max_model_len - 1} can be continued")
    elif max(submit.token_ids) >= vocab_size:
        yield FieldViolation("token_ids", f"an id is outside the vocabulary of {vocab_size}")
    if not 1 <= submit.prompt_tokens <= total:
        yield FieldViolation("prompt_tokens", f"{submit.prompt_tokens} of {total} tokens")
    elif total - submit.prompt_tokens >= max(submit.max_tokens, 1):
        yield FieldViolation("max_tokens", f"{submit.max_tokens}; {total - submit.prompt_tokens} are generated already")
    if submit.scored_tokens >= max(submit.prompt_tokens, 1):
        yield FieldViolation("scored_tokens", f"{submit.scored_tokens} after the first of {submit.prompt_tokens}")
    count = submit.prompt_tokens * (1 + submit.sampling.prompt_logprobs) * submit.sampling.HasField("prompt_logprobs")
    if count > MAX_PROMPT_LOGPROBS:
        yield FieldViolation("sampling.prompt_logprobs", f"{count} log probabilities; at most {MAX_PROMPT_LOGPROBS}")
    if len(submit.root_hash) != HASH_BYTES:
        yield FieldViolation("root_hash", f"{len(submit.root_hash)} bytes; {HASH_BYTES} are needed")
    if submit.awaited_blocks:
        yield from _awaited(submit, total)
    if len(submit.block_hashes) % HASH_BYTES or len(submit.block_hashes) > (total - 1) // block_size * HASH_BYTES:
        yield FieldViolation("block_hashes", f"{len(submit.block_hashes)} bytes for {total} tokens")
    if len(submit.grammar) > MAX_GRAMMAR_BYTES or len(submit.grammar.encode()) > MAX_GRAMMAR_BYTES:
        yield FieldViolation("grammar", f"more than {MAX_GRAMMAR_BYTES} bytes")
    if len(submit.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation("stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS}")
    if submit.bad_words:
        yield from _bad_words(submit.bad_words, vocab_size)
    yield from scheduling_violations(submit)


def _awaited(submit: Submit, total: int) -> Iterator[FieldViolation]:
    if submit.awaited_blocks > total:
        yield FieldViolation("awaited_blocks", f"{submit.awaited_blocks} blocks of a text of {total} tokens")
    if not submit.ticket_id:
        yield FieldViolation("awaited_blocks", "needs a ticket_id, under which the blocks are committed")


def _bad_words(words: Collection[TokenSequence], vocab_size: int) -> Iterator[FieldViolation]:
    if len(words) > MAX_BAD_SEQUENCES or not all(1 <= len(word.token_ids) <= MAX_BAD_TOKENS for word in words):
        text = f"at most {MAX_BAD_SEQUENCES} sequences of 1 to {MAX_BAD_TOKENS} tokens"
        yield FieldViolation("bad_words", text)
    elif any(max(word.token_ids) >= vocab_size for word in words):
        yield FieldViolation("bad_words", f"an id is outside the vocabulary of {vocab_size}")


def scheduling_violations(request: Submit | RunPrefillRequest) -> Iterator[FieldViolation]:
    """Yield the violations of the scheduling fields that a Submit and a RunPrefillRequest have in common."""
    if len(request.kept_tokens) > MAX_KEPT_POSITIONS:
        yield FieldViolation("kept_tokens", f"{len(request.kept_tokens)} positions; at most {MAX_KEPT_POSITIONS}")
    if len(request.flow.key) > MAX_FLOW_KEY_BYTES:
        yield FieldViolation("flow.key", f"{len(request.flow.key)} bytes; at most {MAX_FLOW_KEY_BYTES}")


def _pooling(submit: Submit, vocab_size: int) -> Iterator[FieldViolation]:
    """Yield the violations of the pooling fields."""
    pooled = read_pooling(submit) is not None
    end = submit.pooled_first + submit.pooled_rows
    if submit.pooled_rows and end > submit.prompt_tokens:
        yield FieldViolation("pooled_rows", f"rows up to {end} of {submit.prompt_tokens} tokens")
    if submit.second_from >= max(submit.prompt_tokens, 1):
        yield FieldViolation(
            "second_from", f"a second text from {submit.second_from} of {submit.prompt_tokens} tokens on"
        )
    if pooled and (submit.max_tokens or submit.siblings or submit.sampling.HasField("prompt_logprobs")):
        yield FieldViolation("pooled", "a stream that ends with a vector generates nothing and scores nothing")
    if len(submit.pooled_ids) > MAX_POOLED_IDS or (submit.pooled_ids and not submit.pooled):
        text = f"{len(submit.pooled_ids)} tokens; at most {MAX_POOLED_IDS}, and only with pooled"
        yield FieldViolation("pooled_ids", text)
    elif submit.pooled_ids and max(submit.pooled_ids) >= vocab_size:
        yield FieldViolation("pooled_ids", f"an id is outside the vocabulary of {vocab_size}")


def _sampling(params: SamplingParams, submit: Submit, vocab_size: int) -> Iterator[FieldViolation]:
    """Yield the violations of the sampling fields. Fields unknown to an older gateway are unset, and have no effect."""
    if params.temperature is None or params.top_p is None or params.top_k is None or params.seed is None:
        yield FieldViolation("sampling", "temperature, top_p, top_k and seed must be resolved")
        return
    yield from range_violations(params, vocab_size)
    if not 0 <= (params.min_tokens or 0) <= submit.max_tokens:
        yield FieldViolation("sampling.min_tokens", f"{params.min_tokens} is not in [0, {submit.max_tokens}]")
