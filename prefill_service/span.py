"""One span on a prefill worker, from its ticket to its last acknowledgement.

checked --> ticket adopted --> chunk computed --> committed --> acknowledged --> ... --> hold released
                                    cancel at any time: what is acknowledged stands, the rest is freed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import accumulate

import numpy as np
from opentelemetry.context import Context

from pillion.engine.scheduling.sequence import SequenceSpec
from pillion.engine.scheduling.step_plan import ChunkDone, Update
from pillion.engine.worker.step_spans import record
from pillion.engine.worker.worker import Worker
from pillion.errors import PillionError
from pillion.priority import bounded
from pillion.wire.prefill import ChunkAck, Span


class SpanRun:
    """Runs a span and listens to its sequence. ``trace`` is the caller's context."""

    def __init__(self, worker: Worker, span: Span, trace: Context) -> None:
        self.trace = trace
        self._worker = worker
        self._span = span
        self._seq_id = worker.next_id()
        self._before_s = 0.0
        # At most one entry per chunk and the end.
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
            while (result := await self._results.get()) is not None:
                if isinstance(result, PillionError):
                    raise result
                yield result
                if result.chunk_index == len(self._span.chunk_tokens) - 1:
                    # All is committed. The sequence's own end comes between two steps, which may be long.
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """The caller has gone: end the span (I8). Idempotent."""
        self._over = True
        self._worker.epoch.cancel(self._seq_id)

    async def _start(self) -> None:
        span, worker = self._span, self._worker
        epoch = worker.epoch
        start, end = span.start_tokens // worker.block_size, span.split_tokens // worker.block_size
        holding, tail_hash = await epoch.tickets.adopt(span.ticket_id, end, start_block=start, guess_blocks=end - start)
        tokens = np.zeros(span.split_tokens, dtype=np.int32)
        tokens[span.start_tokens :] = span.token_ids
        ends = tuple(accumulate(span.chunk_tokens, initial=span.start_tokens))[1:]
        spec = SequenceSpec(
            seq_id=self._seq_id,
            token_ids=tokens,
            parent_hash=span.parent_hash,
            start_tokens=span.start_tokens,
            chunk_ends=ends,
            priority=bounded(span.priority),
        )
        sequence = epoch.make(spec, holding, tail_hash)
        if self._over:
            epoch.tickets.let_go(holding)
            return
        self._before_s = sequence.progress.arrived_s
        epoch.add(sequence, self)

    def on_update(self, update: Update) -> None:
        """Note that the span is computed, or has failed."""
        if update.ending is not None:
            self._results.put_nowait(update.ending.error)

    def on_chunk(self, chunk: ChunkDone) -> None:
        """Acknowledge a committed chunk."""
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
