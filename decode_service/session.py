"""One gateway's connection to a decode worker: its streams, and the deltas that are sent next.

    submit --> checked --> ticket adopted --> its chain is there --> queued, prompt tail, decode --> finished | failed
                  |              |                     |                        |
                  +--------------+-----error-----------+------------------------+-----> last delta
    cancel, or the connection's end: silence

A submit comes while a prefill worker is still at work on its span: this worker then waits at the KV node for the blocks
that the span will commit, so the node's answer is the whole hand-off.

A submit's forks are streams from its first token on. If the submit ends before that, they end with it, and only its
own key gets a delta.

All updates of a stream since the last message are merged into one delta, so a slow gateway costs one entry per stream;
one message carries all streams' deltas of a step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
from opentelemetry.context import Context

from pillion.engine.grammars.answer_grammar import AnswerGrammar
from pillion.engine.scheduling.block_chain import ChunkDone
from pillion.engine.scheduling.sequence import ForkSpec, SequenceProgress, SequenceSpec
from pillion.engine.scheduling.step_plan import Update
from pillion.engine.worker.step_spans import record_stream
from pillion.engine.worker.tickets import Tickets
from pillion.engine.worker.worker import Worker
from pillion.errors import (
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
from pillion.grammar_limits import MAX_GRAMMAR_BYTES
from pillion.observability import telemetry
from pillion.priority import bounded
from pillion.sampling_ranges import MAX_PROMPT_LOGPROBS, range_violations
from pillion.v1.common_pb2 import Queued
from pillion.v1.decode_pb2 import DecodeBatch, DecodeDelta, DecodeError, DecodeTimings, Submit
from pillion.wire.errors import as_pillion_error
from pillion.wire.public import finish_to_pb, logprob_to_pb, sampling_from_pb

log = logging.getLogger("pillion.decode")

# Streams that wait for their chains, over all connections; they hold no sequence of the worker yet.
MAX_AWAITING = 4096
# Refusals that nobody has read yet; with more of them, no further command is read from the connection.
MAX_UNREAD_REFUSALS = 1024
ROOT_HASH_BYTES = 32
MAX_STOP_TOKEN_IDS = 1024
_RETRYABLE = (NotFound, Conflict, Overloaded, Unavailable, Internal)


class _DecodeStream:
    """One submit that is alive, or one of its forks; listens to its sequence."""

    def __init__(self, session: DecodeSession, submit: Submit, key: int, fork: ForkSpec) -> None:
        """``key`` names the stream on the connection, ``fork`` on the worker."""
        self.session = session
        self.submit = submit
        self.key = key
        self.fork = fork
        self.seq_id = fork.seq_id
        self.forks: tuple[_DecodeStream, ...] = ()
        self.trace: Context = telemetry.from_traceparent(submit.traceparent)
        self.timer: asyncio.TimerHandle | None = None
        # Set from the adoption of the ticket on; a fork has none.
        self.tickets: Tickets | None = None
        self.generated = 0
        # Of its guesses, how many the gateway knows of.
        self.told_guesses = 0
        # The step thread writes it; here it is only read.
        self.progress: SequenceProgress | None = None

    def tell_timings(self, new_tokens: int) -> bool:
        """Whether a delta that is not the last one has timings, since a stream that the gateway ends has no last delta:
        that of the first tokens has, and one before which guesses were judged. These count as told then."""
        if self.progress is None:
            return False
        told, self.told_guesses = self.told_guesses, self.progress.guessed_tokens
        return told < self.told_guesses or self.generated == new_tokens

    def on_begun(self) -> None:
        self.session.tell_begun(self.key)

    def on_update(self, update: Update) -> None:
        self.generated += len(update.token_ids)
        self.progress = update.progress or self.progress
        ending = update.ending
        if ending is not None and update.progress is not None:
            record_stream(self.trace, update.progress, self.generated)
        self.session.add_update(self.key, update)

    def on_chunk(self, chunk: ChunkDone) -> None:
        raise AssertionError("streams have no chunks")


class DecodeSession:
    """One connection; :meth:`close` is called at its end, however it ends.

    ``max_streams`` bounds the streams of all connections of the worker, which share ``adopting``: for each adoption
    under way the number of streams that it is for.
    """

    def __init__(self, worker: Worker, max_streams: int, adopting: dict[asyncio.Task[None], int]) -> None:
        self._worker = worker
        self._max_streams = max_streams
        self._streams: dict[int, _DecodeStream] = {}
        self._adopting = adopting
        # The next delta of each stream that has one.
        self._pending: dict[int, DecodeDelta] = {}
        # Those of them that hold log probabilities of prompts.
        self._scored: set[int] = set()
        self._awake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._finishing = False

    # Commands.

    async def submit(self, submit: Submit) -> None:
        """Start a stream; an error is its only delta. InvalidRequest, for a key in use, ends the connection."""
        await self._room.wait()
        keys = (submit.key, *(fork.key for fork in submit.forks))
        if len(set(keys)) < len(keys):
            raise InvalidRequest("a submit and its forks need a key each")
        for key in keys:
            if key in self._streams or key in self._pending:
                raise InvalidRequest(f"key {key} is in use on this connection")
        try:
            worker = self._worker
            worker.check_open()
            check_submit(submit, vocab_size=worker.model.backend.vocab_size, max_model_len=worker.max_model_len)
            if submit.forks and submit.prompt_tokens != len(submit.token_ids):
                raise InvalidRequest("only a prompt without an answer forks")
            if submit.awaited_blocks:
                if len(self._adopting) >= MAX_AWAITING:
                    raise Overloaded(f"{worker.component_id} awaits {MAX_AWAITING} chains already")
            else:
                self._check_room(len(keys))
        except PillionError as error:
            self._fail(submit.key, error)
            return
        stream = self._open(submit, submit.key, submit.sampling.seed)
        forks = [self._open(submit, fork.key, fork.seed) for fork in submit.forks]
        stream.forks = tuple(forks)
        task = asyncio.create_task(self._start(stream))
        # A stream takes its place when its chain is there.
        self._adopting[task] = 0 if submit.awaited_blocks else len(keys)
        task.add_done_callback(self._adopting.pop)

    def cancel(self, key: int) -> None:
        """End a stream without a delta. Unknown keys are ignored: the stream may have ended by itself a moment ago."""
        stream = self._drop(key)
        self._pending.pop(key, None)
        if stream is None:
            return
        self._worker.epoch.cancel(stream.seq_id)
        if stream.progress is not None:
            # A stop string is found by the gateway, which then cancels: the usual end of a stream, for its trace.
            record_stream(stream.trace, replace(stream.progress, ended_s=time.monotonic()), stream.generated)

    def close(self) -> None:
        """The connection is over: so is everything submitted on it (I8). Idempotent."""
        self._closed = True
        for key in tuple(self._streams):
            self.cancel(key)
        self._awake.set()

    def finish(self) -> None:
        """The worker stops: send the pending deltas, then end the connection."""
        self._finishing = True
        self._awake.set()

    # Deltas.

    async def deltas(self) -> AsyncIterator[DecodeBatch]:
        """Batches of deltas, one per step that had updates, and one more for each stream whose prompt is scored; ends
        with :meth:`close` or :meth:`finish`."""
        while not self._closed:
            await self._awake.wait()
            self._awake.clear()
            pending, self._pending = self._pending, {}
            self._room.set()
            scored, self._scored = self._scored, set()
            for key in scored & pending.keys():
                # It may be large, so its message holds nothing else.
                yield DecodeBatch(deltas=[pending.pop(key)])
            if pending:
                yield DecodeBatch(deltas=pending.values())
            if self._finishing and not self._pending:
                return

    def add_update(self, key: int, update: Update) -> None:
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
            if stream is not None and stream.tell_timings(len(update.token_ids)):
                assert stream.progress is not None
                delta.timings.CopyFrom(_timings_of(stream.progress))
            return
        self._drop(key)
        delta.finish_reason = finish_to_pb(ending.reason)
        if ending.error is not None:
            delta.error.CopyFrom(_error_of(ending.error))
            if isinstance(ending.error, BrokenModel):
                log.error("a request failed: %s", ending.error)
        if update.progress is not None:
            delta.timings.CopyFrom(_timings_of(update.progress))

    def tell_begun(self, key: int) -> None:
        """Says that the prompt of a stream is being computed: place 0 of the line."""
        self._pending_delta(key).queued.CopyFrom(Queued())

    async def tell_queued(self) -> None:
        """Adds a sign of life for every stream that waits for its turn or its prompt, if steps go on."""
        if not self._streams:
            return
        positions = await self._worker.epoch.positions()
        for key, stream in self._streams.items():
            position = positions.get(stream.seq_id)
            if position is not None:
                self._pending_delta(key).queued.CopyFrom(Queued(position=position))

    # Inside.

    def _check_room(self, streams: int) -> None:
        worker = self._worker
        if len(worker.epoch.listeners) + sum(self._adopting.values()) + streams > self._max_streams:
            raise Overloaded(
                f"{worker.component_id} has {self._max_streams} streams (--max-num-seqs + --max-waiting-seqs)"
            )

    async def _start(self, stream: _DecodeStream) -> None:
        """Adopt the ticket and queue the stream. Never cancelled: what was adopted must end up somewhere."""
        submit, worker = stream.submit, self._worker
        try:
            grammar = await _grammar_of(submit, worker)
            await worker.bring_adapter(submit.adapter)
            if self._streams.get(submit.key) is not stream:
                return
            total_blocks = len(submit.token_ids) // worker.block_size + 1
            epoch = worker.epoch
            tickets = stream.tickets = epoch.tickets
            holding, tail_hash = await tickets.adopt(
                submit.ticket_id, total_blocks, awaited_blocks=submit.awaited_blocks
            )
            with tickets.watched(holding):
                if len(holding.chain_slots) < submit.awaited_blocks and self._streams.get(submit.key) is stream:
                    if submit.adapter:
                        epoch.preload(submit.adapter)
                    holding, tail_hash = await tickets.await_chain(holding, submit.awaited_blocks)
                if self._streams.get(submit.key) is not stream:
                    tickets.let_go(holding)
                    return
                stream.forks = tuple(fork for fork in stream.forks if self._streams.get(fork.key) is fork)
                if submit.awaited_blocks:
                    try:
                        self._check_room(1 + len(stream.forks))
                    except Overloaded:
                        tickets.let_go(holding)
                        raise
                sequence = epoch.make(_spec_of(stream, worker), holding, tail_hash, grammar)
                stream.progress = sequence.progress
                epoch.add(sequence, stream, {fork.seq_id: fork for fork in stream.forks})
        except Exception as error:  # noqa: BLE001  (a stream must not stay without an end, whatever has failed)
            if self._drop(submit.key) is not None:
                self._fail(submit.key, as_pillion_error(error, "Decode"))
            return
        # An empty delta: the worker holds the ticket now, so the gateway may let go of it.
        self._pending_delta(submit.key)

    def _open(self, submit: Submit, key: int, seed: int) -> _DecodeStream:
        stream = self._streams[key] = _DecodeStream(self, submit, key, ForkSpec(self._worker.next_id(), seed))
        if submit.timeout_ms:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(submit.timeout_ms / 1000, self._time_out, key)
        return stream

    def _drop(self, key: int) -> _DecodeStream | None:
        """Remove a stream; forks that have not begun go with their stream, without a delta."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return None
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.tickets is not None and stream.progress is None:
            stream.tickets.stop_awaiting(stream.submit.ticket_id)
        if not stream.generated:
            for fork in stream.forks:
                if self._drop(fork.key) is not None:
                    self._worker.epoch.cancel(fork.seq_id)
        return stream

    def _time_out(self, key: int) -> None:
        stream = self._drop(key)
        if stream is not None:
            self._worker.epoch.cancel(stream.seq_id)
            self._fail(key, DeadlineExceeded("the request's time is over"))

    def _fail(self, key: int, error: PillionError) -> None:
        self._pending_delta(key).error.CopyFrom(_error_of(error))
        if len(self._pending) >= MAX_UNREAD_REFUSALS:
            self._room.clear()

    def _pending_delta(self, key: int) -> DecodeDelta:
        self._awake.set()
        delta = self._pending.get(key)
        if delta is None:
            delta = self._pending[key] = DecodeDelta(key=key)
        return delta


async def _grammar_of(submit: Submit, worker: Worker) -> AnswerGrammar | None:
    """The place in its grammar of a submit's answer, which is compiled on a thread. Raises InvalidRequest for a grammar
    that does not compile or that refuses the answer so far."""
    if not submit.grammar:
        return None
    if worker.grammars is None:
        raise InvalidRequest(f"the answer has a grammar, which {worker.component_id} cannot follow; its log says why")
    answer, stop_token_ids = submit.token_ids[submit.prompt_tokens :], frozenset(submit.stop_token_ids)
    return await asyncio.wrap_future(worker.grammars.start(submit.grammar, answer, stop_token_ids))


def _spec_of(stream: _DecodeStream, worker: Worker) -> SequenceSpec:
    submit = stream.submit
    return SequenceSpec(
        seq_id=stream.seq_id,
        token_ids=np.fromiter(submit.token_ids, np.int32, len(submit.token_ids)),
        parent_hash=submit.root_hash,
        prompt_tokens=submit.prompt_tokens,
        sampling=sampling_from_pb(submit.sampling),
        stop_token_ids=frozenset(submit.stop_token_ids),
        max_tokens=submit.max_tokens,
        max_model_len=worker.max_model_len,
        rope_shift=worker.model.prepared.rope_shift(submit.prompt_tokens + submit.max_tokens),
        priority=bounded(submit.priority),
        forks=tuple(other.fork for other in stream.forks),
        scored_tokens=submit.scored_tokens,
        adapter=submit.adapter,
    )


def _error_of(error: PillionError) -> DecodeError:
    retryable = isinstance(error, _RETRYABLE) and not isinstance(error, BrokenModel)
    return DecodeError(code=error.code, message=error.message, retryable=retryable)


def _timings_of(progress: SequenceProgress) -> DecodeTimings:
    return DecodeTimings(
        tail_tokens=progress.tail_tokens,
        tail_steps=progress.tail_steps,
        queue_ms=max(0.0, (progress.first_step_s or progress.ended_s) - progress.arrived_s) * 1000,
        preemptions=progress.preemptions,
        guessed_tokens=progress.guessed_tokens,
        accepted_tokens=progress.accepted_tokens,
    )


def check_submit(submit: Submit, *, vocab_size: int, max_model_len: int) -> None:
    """Check a submit before anything is done for it. Raises InvalidRequest with every violation.

    A gateway has checked its clients' requests already; these checks keep a broken or older gateway from the step loop.
    """
    violations = (*_shape(submit, vocab_size, max_model_len), *_sampling(submit, vocab_size))
    if violations:
        raise InvalidRequest.of(*violations)


def _shape(submit: Submit, vocab_size: int, max_model_len: int) -> Iterator[FieldViolation]:
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
        yield FieldViolation("scored_tokens", f"{submit.scored_tokens} behind the first of {submit.prompt_tokens}")
    asked = submit.prompt_tokens * (1 + submit.sampling.prompt_logprobs) * submit.sampling.HasField("prompt_logprobs")
    if asked > MAX_PROMPT_LOGPROBS:
        yield FieldViolation("sampling.prompt_logprobs", f"{asked} log probabilities; at most {MAX_PROMPT_LOGPROBS}")
    if len(submit.root_hash) != ROOT_HASH_BYTES:
        yield FieldViolation("root_hash", f"{len(submit.root_hash)} bytes; {ROOT_HASH_BYTES} are needed")
    if submit.awaited_blocks > total:
        yield FieldViolation("awaited_blocks", f"{submit.awaited_blocks} blocks cannot hold {total} tokens")
    if len(submit.grammar) > MAX_GRAMMAR_BYTES or len(submit.grammar.encode()) > MAX_GRAMMAR_BYTES:
        yield FieldViolation("grammar", f"more than {MAX_GRAMMAR_BYTES} bytes")
    if len(submit.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation("stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS}")


def _sampling(submit: Submit, vocab_size: int) -> Iterator[FieldViolation]:
    """Violations of the sampling fields. A field that an older gateway does not know is unset and does nothing."""
    params = sampling_from_pb(submit.sampling)
    if params.temperature is None or params.top_p is None or params.top_k is None or params.seed is None:
        yield FieldViolation("sampling", "temperature, top_p, top_k and seed must be resolved")
        return
    yield from range_violations(params, vocab_size)
    if not 0 <= (params.min_tokens or 0) <= submit.max_tokens:
        yield FieldViolation("sampling.min_tokens", f"{params.min_tokens} is not in [0, {submit.max_tokens}]")
