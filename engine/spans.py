"""Trace spans made afterwards, on asyncio's thread, from times that the scheduler noted: the step pays nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context

from engine.sequence import Marks
from pillion import telemetry


def record(
    name: str,
    parent: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, int | str] | None = None,
    events: Mapping[str, float] | None = None,
) -> None:
    """A finished span under ``parent``; nothing when that is not being recorded. Times are time.monotonic()'s."""
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return
    wall_ns = time.time_ns() - time.monotonic_ns()
    span = telemetry.tracer().start_span(
        name, context=parent, start_time=wall_ns + int(start_s * 1e9), attributes=dict(attributes or {})
    )
    for event, at_s in (events or {}).items():
        span.add_event(event, timestamp=wall_ns + int(at_s * 1e9))
    span.end(end_time=wall_ns + int(end_s * 1e9))


def record_stream(parent: Context, marks: Marks, generated_tokens: int) -> None:
    """The way of a stream through a decode worker: queue, remnant, decode. What it did not reach is left out."""
    end_s = marks.ended_s
    record("decode.queue", parent, marks.arrived_s, marks.first_step_s or end_s)
    if not marks.first_step_s:
        return
    remnant = {"pillion.remnant.tokens": marks.remnant_tokens, "pillion.remnant.steps": marks.remnant_steps}
    record("decode.remnant", parent, marks.first_step_s, marks.first_token_s or end_s, remnant)
    if marks.first_token_s:
        said = {"gen_ai.usage.output_tokens": generated_tokens, "pillion.preemptions": marks.preemptions}
        record("decode", parent, marks.first_token_s, end_s, said, {"first token": marks.first_token_s})
