"""One span on a prefill worker, from its ticket to its last acknowledgement.

checked --> ticket adopted --> chunk computed --> committed --> acknowledged --> ... --> hold released
                                    cancel at any time: what is acknowledged stands, the rest is freed
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from itertools import accumulate

import numpy as np
from opentelemetry.context import Context

from pillion.engine.scheduling.block_chain import ChunkDone
from pillion.engine.scheduling.sequence import SequenceSpec
from pillion.engine.scheduling.step_plan import Update
from pillion.engine.worker import worker_epoch
from pillion.engine.worker.step_spans import record
from pillion.engine.worker.worker import Worker
from pillion.errors import FieldViolation, InvalidRequest, PillionError
from pillion.priority import bounded
from pillion.v1.common_pb2 import Queued
from pillion.v1.prefill_pb2 import ChunkAck, RunSpanRequest

PARENT_HASH_BYTES = 32


class SpanRun:
    """Runs a span and listens to its sequence. ``trace`` is the caller's context."""

    def __init__(self, worker: Worker, span: RunSpanRequest, trace: Context) -> None:
        self.trace = trace
        self._worker = worker
        self._span = span
        self._seq_id = worker.next_id()
        self._before_s = 0.0
        self._end_tokens = span.start_tokens
        # At most one entry per chunk, the beginning and the end.
        self._results: asyncio.Queue[ChunkAck | PillionError | None] = asyncio.Queue()
        self._over = False

    async def acks(self) -> AsyncGenerator[ChunkAck, None]:
        """Run the span; closing the iterator cancels it. Raises NotFound, Overloaded, Unavailable, Internal."""
        starting = asyncio.create_task(self._start())
        # Its failure is raised below, or ignored where the caller has gone.
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            # Shielded: what was adopted must end up somewhere, even if the caller goes away meanwhile.
            await asyncio.shield(starting)
            while (result := await self._next()) is not None:
                if isinstance(result, PillionError):
                    raise result
                yield result
                if result.HasField("queued"):
                    continue
                self._end_tokens = result.end_tokens
                if result.chunk_index == len(self._span.chunk_tokens) - 1:
                    # All is committed. The sequence's own end comes between two steps, which may be long.
                    return
        finally:
            self.cancel()

    async def _next(self) -> ChunkAck | PillionError | None:
        """The next result, or a sign of life where the span waits for it for long and the worker's steps go on."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(worker_epoch.QUEUE_HEARTBEAT_MS / 1000):
                    return await self._results.get()
            position = (await self._worker.epoch.positions()).get(self._seq_id)
            if position is not None and self._results.empty():
                return ChunkAck(end_tokens=self._end_tokens, queued=Queued(position=position))

    def cancel(self) -> None:
        """The caller has gone: end the span (I8). Idempotent."""
        self._over = True
        self._worker.epoch.cancel(self._seq_id)

    async def _start(self) -> None:
        span, worker = self._span, self._worker
        await worker.bring_adapter(span.adapter)
        epoch = worker.epoch
        split_tokens = span.start_tokens + len(span.token_ids)
        start, end = span.start_tokens // worker.block_size, split_tokens // worker.block_size
        holding, tail_hash = await epoch.tickets.adopt(span.ticket_id, end, start_block=start, guess_blocks=end - start)
        with epoch.tickets.watched(holding):
            tokens = np.zeros(split_tokens, dtype=np.int32)
            tokens[span.start_tokens :] = span.token_ids
            ends = tuple(accumulate(span.chunk_tokens, initial=span.start_tokens))[1:]
            spec = SequenceSpec(
                seq_id=self._seq_id,
                token_ids=tokens,
                parent_hash=span.parent_hash,
                start_tokens=span.start_tokens,
                chunk_ends=ends,
                priority=bounded(span.priority),
                rope_shift=self._worker.model.prepared.rope_shift(span.text_tokens),
                adapter=span.adapter,
            )
            sequence = epoch.make(spec, holding, tail_hash)
            if self._over:
                epoch.tickets.let_go(holding)
                return
            self._before_s = sequence.progress.arrived_s
            epoch.add(sequence, self)

    def on_begun(self) -> None:
        # Place 0 of the line: it is being computed.
        self._results.put_nowait(ChunkAck(end_tokens=self._end_tokens, queued=Queued()))

    def on_update(self, update: Update) -> None:
        if update.ending is not None:
            self._results.put_nowait(update.ending.error)

    def on_chunk(self, chunk: ChunkDone) -> None:
        tokens = self._span.chunk_tokens[chunk.index]
        attributes = {"pillion.chunk.index": chunk.index, "pillion.chunk.tokens": tokens}
        record("prefill.chunk", self.trace, chunk.started_s, chunk.computed_s, attributes)
        ack = ChunkAck(
            chunk_index=chunk.index,
            end_tokens=chunk.end_tokens,
            queue_ms=max(0.0, chunk.started_s - self._before_s) * 1000,
            compute_ms=(chunk.computed_s - chunk.started_s) * 1000,
        )
        self._before_s = chunk.computed_s
        self._results.put_nowait(ack)


def check_span(span: RunSpanRequest, worker: Worker) -> None:
    """Check a span before anything is done for it. Raises InvalidRequest with every violation."""
    violations = tuple(_violations(span, worker.block_size, worker.model.backend.vocab_size, worker.max_model_len))
    if violations:
        raise InvalidRequest.of(*violations)


def _violations(span: RunSpanRequest, block_size: int, vocab_size: int, max_model_len: int) -> Iterator[FieldViolation]:
    total = len(span.token_ids)
    split = span.start_tokens + total
    if not total or total % block_size:
        yield FieldViolation("token_ids", f"{total} tokens; a multiple of the block size {block_size} is needed")
    elif max(span.token_ids) >= vocab_size:
        yield FieldViolation("token_ids", f"an id is outside the vocabulary of {vocab_size}")
    if span.start_tokens % block_size:
        yield FieldViolation("start_tokens", f"{span.start_tokens} is no multiple of the block size {block_size}")
    if split >= max_model_len:
        yield FieldViolation("token_ids", f"the span ends at {split}, the model's end is {max_model_len}")
    if any(count == 0 or count % block_size for count in span.chunk_tokens):
        yield FieldViolation("chunk_tokens", f"each must be a multiple of the block size {block_size}")
    elif sum(span.chunk_tokens) != total:
        yield FieldViolation("chunk_tokens", f"they add up to {sum(span.chunk_tokens)}, the span has {total} tokens")
    if len(span.parent_hash) != PARENT_HASH_BYTES:
        yield FieldViolation("parent_hash", f"{len(span.parent_hash)} bytes; {PARENT_HASH_BYTES} are needed")
