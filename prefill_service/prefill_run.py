"""One prefill range on a prefill worker, from its ticket to its last acknowledgement.

checked --> ticket adopted --> chunk computed --> committed --> acknowledged --> ... --> ticket released
                                    cancelled at any time: acknowledged chunks stay committed, other slots are freed
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from itertools import accumulate

import numpy as np
from opentelemetry.context import Context

from pillion.engine.scheduling.block_chain import AdoptedTicket, ChunkDone
from pillion.engine.scheduling.sequence import Sequence, rope_shift
from pillion.engine.scheduling.step_plan import Update
from pillion.engine.streams.stream_session import scheduling_violations
from pillion.engine.worker import worker_epoch
from pillion.engine.worker.worker import Worker
from pillion.engine.worker.worker_telemetry import record
from pillion.errors import FieldViolation, InvalidRequest, PillionError
from pillion.kvstore.hashing import HASH_BYTES
from pillion.rules.priority import bounded, bounded_flow
from pillion.v1.common_pb2 import Queued
from pillion.v1.prefill_pb2 import ChunkAck, RunPrefillRequest


class PrefillRun:
    """A prefill range on the worker, and the listener of its sequence. ``trace``: the caller's trace context."""

    def __init__(self, worker: Worker, trace: Context) -> None:
        self.trace = trace
        self._worker = worker
        self._seq_id = worker.next_id()
        # End of the previous chunk; the range's arrival before the first.
        self._previous_s = 0.0
        self._chunk_tokens: tuple[int, ...] = ()
        self._end_tokens = 0
        # Bounded: one entry per chunk, plus one for the start and one for the end.
        self._results: asyncio.Queue[ChunkAck | PillionError | None] = asyncio.Queue()
        self._over = False

    async def acks(self, prefill_range: RunPrefillRequest) -> AsyncGenerator[ChunkAck, None]:
        """Run a prefill range and yield its acknowledgements; closing the iterator cancels it. Raises NotFound,
        Overloaded, Unavailable or Internal."""
        self._chunk_tokens, self._end_tokens = tuple(prefill_range.chunk_tokens), prefill_range.start_tokens
        starting = asyncio.create_task(self._start(prefill_range))
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            # Shielded: an adopted ticket must be released, even if the caller goes away meanwhile.
            await asyncio.shield(starting)
            while (result := await self._next()) is not None:
                if isinstance(result, PillionError):
                    raise result
                yield result
                if result.HasField("queued"):
                    continue
                self._end_tokens = result.end_tokens
                if result.chunk_index == len(self._chunk_tokens) - 1:
                    # Do not wait for the sequence's end, which comes only between two steps.
                    return
        finally:
            self.cancel()

    async def _next(self) -> ChunkAck | PillionError | None:
        """Return the next result, or a heartbeat with the queue position if there is none for QUEUE_HEARTBEAT_MS and
        steps go on."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(worker_epoch.QUEUE_HEARTBEAT_MS / 1000):
                    return await self._results.get()
            position = (await self._worker.epoch.positions()).get(self._seq_id)
            if position is not None and self._results.empty():
                return ChunkAck(end_tokens=self._end_tokens, queued=Queued(position=position))

    def cancel(self) -> None:
        """End the range, because the caller has gone (I8). Idempotent."""
        self._over = True
        self._worker.epoch.cancel(self._seq_id)

    async def _start(self, prefill_range: RunPrefillRequest) -> None:
        block_size, start_tokens = self._worker.block_size, prefill_range.start_tokens
        start, end = start_tokens // block_size, (start_tokens + len(prefill_range.token_ids)) // block_size
        state_blocks = self._worker.model.backend.layout.working_pages
        started = await self._worker.run_sequence(
            prefill_range.adapter,
            hold=lambda epoch: epoch.tickets.adopt(
                prefill_range.ticket_id,
                end + state_blocks,
                start_block=start,
                first_lease_blocks=end - start + state_blocks,
            ),
            begin=lambda ticket: (self._sequence(prefill_range, ticket), {self._seq_id: self}),
            wanted=lambda: not self._over,
        )
        if started is not None:
            self._previous_s = started[0].arrived_s

    def _sequence(self, prefill_range: RunPrefillRequest, ticket: AdoptedTicket) -> Sequence:
        start_tokens = prefill_range.start_tokens
        tokens = np.zeros(start_tokens + len(prefill_range.token_ids), dtype=np.int32)
        tokens[start_tokens:] = prefill_range.token_ids
        prepared = self._worker.model.prepared
        return Sequence(
            ticket,
            self._worker.block_size,
            time.monotonic(),
            seq_id=self._seq_id,
            token_ids=tokens,
            parent_hash=prefill_range.parent_hash,
            start_tokens=start_tokens,
            chunk_ends=tuple(accumulate(self._chunk_tokens, initial=start_tokens))[1:],
            priority=bounded(prefill_range.priority),
            rope_shift=rope_shift(prefill_range.text_tokens, prepared.original_tokens, prepared.max_model_len),
            adapter=prefill_range.adapter,
            kept_tokens=tuple(prefill_range.kept_tokens),
            flow=bounded_flow(prefill_range.flow.key, prefill_range.flow.weight),
        )

    def on_begun(self) -> None:
        self._results.put_nowait(ChunkAck(end_tokens=self._end_tokens, queued=Queued()))

    def on_update(self, update: Update) -> None:
        if update.ending is not None:
            self._results.put_nowait(update.ending.error)

    def on_chunk(self, chunk: ChunkDone) -> None:
        tokens = self._chunk_tokens[chunk.index]
        attributes = {"pillion.chunk.index": chunk.index, "pillion.chunk.tokens": tokens}
        record("prefill.chunk", self.trace, chunk.started_s, chunk.computed_s, attributes)
        ack = ChunkAck(
            chunk_index=chunk.index,
            end_tokens=chunk.end_tokens,
            queue_ms=max(0.0, chunk.started_s - self._previous_s) * 1000,
            compute_ms=(chunk.computed_s - chunk.started_s) * 1000,
        )
        self._previous_s = chunk.computed_s
        self._results.put_nowait(ack)


def check_range(prefill_range: RunPrefillRequest, worker: Worker) -> None:
    """Check the fields of a prefill range. Raises InvalidRequest with every violation."""
    if violations := tuple(_violations(prefill_range, worker)):
        raise InvalidRequest.of(*violations)


def _violations(prefill_range: RunPrefillRequest, worker: Worker) -> Iterator[FieldViolation]:
    block_size, vocab_size = worker.block_size, worker.model.backend.vocab_size
    total = len(prefill_range.token_ids)
    split = prefill_range.start_tokens + total
    if not total or total % block_size:
        yield FieldViolation("token_ids", f"{total} tokens; a multiple of the block size {block_size} is needed")
    elif max(prefill_range.token_ids) >= vocab_size:
        yield FieldViolation("token_ids", f"an id is outside the vocabulary of {vocab_size}")
    if prefill_range.start_tokens % block_size:
        yield FieldViolation(
            "start_tokens", f"{prefill_range.start_tokens} is no multiple of the block size {block_size}"
        )
    if split >= worker.max_model_len:
        text = f"the prefill range ends at {split}, the model's end is {worker.max_model_len}"
        yield FieldViolation("token_ids", text)
    if any(count == 0 or count % block_size for count in prefill_range.chunk_tokens):
        yield FieldViolation("chunk_tokens", f"each must be a multiple of the block size {block_size}")
    elif sum(prefill_range.chunk_tokens) != total:
        yield FieldViolation(
            "chunk_tokens", f"they add up to {sum(prefill_range.chunk_tokens)}, the prefill range has {total} tokens"
        )
    yield from scheduling_violations(prefill_range)
    if len(prefill_range.parent_hash) != HASH_BYTES:
        yield FieldViolation("parent_hash", f"{len(prefill_range.parent_hash)} bytes; {HASH_BYTES} are needed")
