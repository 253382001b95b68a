"""A call as its client sees it: a span of kind CLIENT around it, by the conventions for generative AI.

begin --> its context travels with the call --> the call ends, however it does --> the span ends

Where nobody records, nothing is made but the API's no-op span.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from opentelemetry import trace

from pillion.observability import telemetry
from pillion.types import GenerateRequest

# Longest model name that a span shows; it is the caller's own word.
MAX_NAME_CHARS = 100
# Of calls under way: a task that nobody holds may vanish.
_ending: set[asyncio.Task[None]] = set()
_FINE = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)


def begin(request: GenerateRequest) -> trace.Span:
    """The span of a Generate call, under the caller's own."""
    operation = "chat" if request.messages else "text_completion"
    span = telemetry.tracer().start_span(
        f"{operation} {request.model[:MAX_NAME_CHARS]}".rstrip(), kind=trace.SpanKind.CLIENT
    )
    if span.is_recording():
        span.set_attribute("gen_ai.operation.name", operation)
        span.set_attribute("gen_ai.provider.name", "pillion")
        if request.model:
            span.set_attribute("gen_ai.request.model", request.model[:MAX_NAME_CHARS])
    return span


def end_with(span: trace.Span, call: Any) -> None:
    """The span ends when the blocking ``call`` does."""
    if span.is_recording() and not call.add_callback(lambda: _end(span, call.code())):
        _end(span, call.code())


def end_with_async(span: trace.Span, call: grpc.aio.Call) -> None:
    """The same for an asyncio call, whose status is told on its loop."""
    if span.is_recording():
        task = asyncio.create_task(_end_after(span, call), name="client span")
        _ending.add(task)
        task.add_done_callback(_ending.discard)


async def _end_after(span: trace.Span, call: grpc.aio.Call) -> None:
    _end(span, await call.code())


def _end(span: trace.Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.response.status_code", code.name)
    if code not in _FINE:
        span.set_attribute("error.type", code.name)
        span.set_status(trace.StatusCode.ERROR)
    span.end()
