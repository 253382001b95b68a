"""Makes trace spans afterwards, on asyncio's thread, from times that the scheduler noted: they cost a step nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context

from pillion.engine.scheduling.sequence import SequenceProgress
from pillion.observability import telemetry

# One step's span has at most this many links; OpenTelemetry's own bound is 128.
MAX_LINKS = 64


def record(
    name: str,
    parent: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, int | float | str] | None = None,
    events: Sequence[tuple[str, float]] = (),
) -> None:
    """Record a finished span under ``parent``, if that is recorded. Times are those of time.monotonic()."""
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return
    _make_span(name, parent, start_s, end_s, attributes or {}, events=events)


def record_stream(parent: Context, progress: SequenceProgress, generated_tokens: int) -> None:
    """Record the stages that a stream has reached on a decode worker: queue, prompt tail, decode."""
    end_s = progress.ended_s
    ready = [("adapter ready", progress.adapter_s)] if progress.adapter_s else []
    record("decode.queue", parent, progress.arrived_s, progress.first_step_s or end_s, events=ready)
    if not progress.first_step_s:
        return
    prompt_tail = {"pillion.prompt_tail.tokens": progress.tail_tokens, "pillion.prompt_tail.steps": progress.tail_steps}
    record("decode.prompt_tail", parent, progress.first_step_s, progress.first_token_s or end_s, prompt_tail)
    if progress.first_token_s:
        attributes = {
            "gen_ai.usage.output_tokens": generated_tokens,
            "pillion.decode.steps": progress.token_steps,
            "pillion.decode.longest_gap_ms": round(progress.longest_gap_s * 1000, 3),
            "pillion.preemptions": progress.preemptions,
        }
        events = [("first token", progress.first_token_s), *(("preempted", at_s) for at_s in progress.preempted_s)]
        record("decode", parent, progress.first_token_s, end_s, attributes, events)


def record_step(start_s: float, end_s: float, tokens: Mapping[str, int], parents: Iterable[Context]) -> None:
    """Record a step as a trace of its own, with its ``tokens`` by use, linked to those of the requests that it carried
    (``parents``) that are recorded."""
    contexts = (trace.get_current_span(parent).get_span_context() for parent in parents)
    links = [trace.Link(context) for context in contexts if context.is_valid and context.trace_flags.sampled]
    if not links:
        return
    attributes = {f"pillion.step.{use}_tokens": count for use, count in tokens.items()}
    _make_span("step", Context(), start_s, end_s, attributes, links=links[:MAX_LINKS])


def _make_span(
    name: str,
    parent: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, int | float | str],
    *,
    links: Sequence[trace.Link] = (),
    events: Sequence[tuple[str, float]] = (),
) -> None:
    # This difference leads from time.monotonic() to the time of day.
    wall_ns = time.time_ns() - time.monotonic_ns()
    begin = wall_ns + int(start_s * 1e9)
    span = telemetry.tracer().start_span(name, parent, start_time=begin, attributes=dict(attributes), links=links)
    for event, at_s in events:
        span.add_event(event, timestamp=wall_ns + int(at_s * 1e9))
    span.end(end_time=wall_ns + int(end_s * 1e9))
