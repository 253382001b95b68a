"""Client-side tracing: a span of kind CLIENT around each call, by OpenTelemetry's conventions for generative AI.

begin --> the call carries the span's context --> the call ends or fails --> the span ends

Unless the program or OTEL_* variables request spans, only the API's no-op span is created.
"""

from __future__ import annotations

from typing import Any

import grpc
from opentelemetry import trace

from pillion.observability import telemetry
from pillion.tasks import OwnTasks
from pillion.types import GenerateRequest

# Characters of a model's name in a span; the caller may send any text.
MAX_NAME_CHARS = 100
_ending = OwnTasks()


def begin(request: GenerateRequest) -> trace.Span:
    """Start the span of a Generate call, under the caller's current span."""
    operation = "chat" if request.messages else "text_completion"
    model = request.model[:MAX_NAME_CHARS]
    span = telemetry.client_tracer().start_span(f"{operation} {model}".rstrip(), kind=trace.SpanKind.CLIENT)
    if span.is_recording():
        named = {"gen_ai.request.model": model} if model else {}
        span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "pillion", **named})
    return span


def end_with(span: trace.Span, call: Any) -> None:
    """End the span when the blocking ``call`` ends."""
    if span.is_recording() and not call.add_callback(lambda: _end(span, call.code())):
        _end(span, call.code())


def end_with_async(span: trace.Span, call: grpc.aio.Call) -> None:
    """End the span when the asyncio ``call`` ends."""
    if span.is_recording():
        _ending.begin(_end_after(span, call), "client span")


async def _end_after(span: trace.Span, call: grpc.aio.Call) -> None:
    _end(span, await call.code())


def _end(span: trace.Span, code: grpc.StatusCode) -> None:
    span.set_attribute("rpc.response.status_code", code.name)
    if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
        span.set_attribute("error.type", code.name)
        span.set_status(trace.StatusCode.ERROR)
    span.end()
