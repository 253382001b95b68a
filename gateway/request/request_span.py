"""A request's trace span at the gateway."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context

from pillion.gateway.request.job import Job
from pillion.observability import telemetry
from pillion.types import GenerateRequest

# Of the model's name as the client wrote it; it may be no model at all.
MAX_NAME_CHARS = 100


def begin(request: GenerateRequest, parent: Context | None) -> trace.Span:
    """Under the client's ``parent``, as soon as the request is here."""
    name = f"generate {request.model[:MAX_NAME_CHARS]}".rstrip()
    return telemetry.tracer().start_span(name, context=parent, kind=trace.SpanKind.SERVER)


def describe(span: trace.Span, job: Job, is_chat: bool) -> None:
    """What the request asks for, by the conventions for generative AI. Never its content."""
    if not span.is_recording():
        return
    sampling = job.resolved.sampling
    span.update_name(f"generate {job.model}")
    said = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "pillion",
        "gen_ai.request.model": job.model,
        "gen_ai.response.model": job.model,
        "gen_ai.response.id": job.request_id,
        "gen_ai.request.max_tokens": job.resolved.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": True,
        # By its convention only where it is not 1.
        "gen_ai.request.choice.count": job.answers if job.answers > 1 else None,
    }
    span.set_attributes({key: value for key, value in said.items() if value is not None})


def end_badly(span: trace.Span, error: BaseException) -> None:
    """Of a request that never began."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(trace.StatusCode.ERROR, str(error))
    span.end()
