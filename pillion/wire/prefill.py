"""Converters of the prefill service (protos/pillion/v1/prefill.proto)."""

from __future__ import annotations

from dataclasses import dataclass

from pillion.v1 import prefill_pb2
from pillion.wire.common import hello_to_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Whole blocks of one prompt for one prefill worker, cut into chunks; see RunSpanRequest for each field."""

    request_id: str
    attempt: int
    ticket_id: int
    parent_hash: bytes
    start_tokens: int
    token_ids: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    priority: int = 0

    @property
    def split_tokens(self) -> int:
        """Where the span ends in the prompt."""
        return self.start_tokens + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAck:
    """Every token before ``end_tokens`` is committed under the ticket."""

    chunk_index: int
    end_tokens: int
    queue_ms: float
    compute_ms: float


def span_from_pb(message: prefill_pb2.RunSpanRequest) -> Span:
    """Field by field."""
    return Span(
        request_id=message.request_id,
        attempt=message.attempt,
        ticket_id=message.ticket_id,
        parent_hash=message.parent_hash,
        start_tokens=message.start_tokens,
        token_ids=tuple(message.token_ids),
        chunk_tokens=tuple(message.chunk_tokens),
        priority=message.priority,
    )


def span_to_pb(span: Span, component_id: str) -> prefill_pb2.RunSpanRequest:
    """``component_id`` names the speaker in the hello."""
    return prefill_pb2.RunSpanRequest(
        hello=hello_to_pb(component_id),
        request_id=span.request_id,
        attempt=span.attempt,
        ticket_id=span.ticket_id,
        parent_hash=span.parent_hash,
        start_tokens=span.start_tokens,
        token_ids=span.token_ids,
        chunk_tokens=span.chunk_tokens,
        priority=span.priority,
    )


def ack_from_pb(message: prefill_pb2.ChunkAck) -> ChunkAck:
    """Field by field."""
    return ChunkAck(
        chunk_index=message.chunk_index,
        end_tokens=message.end_tokens,
        queue_ms=message.queue_ms,
        compute_ms=message.compute_ms,
    )


def ack_to_pb(ack: ChunkAck) -> prefill_pb2.ChunkAck:
    """Field by field."""
    return prefill_pb2.ChunkAck(
        chunk_index=ack.chunk_index, end_tokens=ack.end_tokens, queue_ms=ack.queue_ms, compute_ms=ack.compute_ms
    )
