"""Metrics and trace spans of requests: token times, sources of the prompt's KV, outcomes.

RequestMeter (one per request)  arrived --tokens--> ... --ended-->
TenantSums                      usage of ended requests by tenant
begin_span ... describe_span    the request's trace span; a RequestRunner ends it, or end_refused_span
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from pillion.errors import Cancelled, Overloaded, PillionError
from pillion.gateway.request.admitted_request import AdmittedRequest
from pillion.gateway.request.refusals import MAX_NAME_CHARS
from pillion.observability import metric_catalog as names
from pillion.observability import telemetry
from pillion.observability.metrics import OTHER, Meters, Metric, Reading
from pillion.types import GenerateRequest, Timings, Usage
from pillion.wire.registry import ComponentRecord

# Max tenants with their own sums; all later ones share the sum of OTHER.
MAX_TENANTS = 64


class BroughtTokens(NamedTuple):
    """Prompt tokens whose blocks were fetched to the decode worker's node: from other nodes, from the node's own lower
    tiers, and from a bucket. The field names are values of the metric label ``source``."""

    fetched: int = 0
    restored: int = 0
    bucket: int = 0


@dataclass(eq=False)
class RequestMeter:
    """Records the metrics of one request. Times are monotonic seconds.

    Args:
        answers: number of generated answers.
        max_tokens: max tokens per answer.
    """

    _meters: Meters
    _model: str
    _operation: str
    _arrived_s: float
    answers: InitVar[int]
    max_tokens: int = 0

    def __post_init__(self, answers: int) -> None:
        self._itl = self._meters.distribution(names.ITL, self._model)
        self._generated = self._meters.counter(names.GENERATED_TOKENS, self._model)
        self._first_s, self._last_s, self._counts = [0.0] * answers, [0.0] * answers, [0] * answers

    def first_s(self) -> float:
        """Return the time of the first token of any answer; 0.0 without one."""
        return min(filter(None, self._first_s), default=0.0)

    def last_s(self) -> float:
        """Return the time of the last token of any answer; 0.0 without one."""
        return max(self._last_s, default=0.0)

    def tokens(self, index: int, count: int, now_s: float) -> None:
        """Record ``count`` tokens that an answer got at once; the time since its previous tokens is divided evenly
        among them."""
        self._generated.add(count)
        if self._counts[index]:
            self._itl.observe((now_s - self._last_s[index]) / count, count)
        else:
            if not any(self._counts):
                self._meters.distribution(names.TTFT, self._operation, self._model).observe(now_s - self._arrived_s)
            self._first_s[index] = now_s
            if count > 1:
                # Tokens that come with the first one have no inter-token latency.
                self._itl.observe(0.0, count - 1)
        self._last_s[index] = now_s
        self._counts[index] += count

    def ended(
        self,
        now_s: float,
        usage: Usage,
        timings: Timings,
        reasons: Sequence[str],
        error: PillionError | None,
    ) -> None:
        """Record the end of the request; called once. ``reasons`` are the answers' finish reasons, "" for an answer
        that did not finish."""
        model, meters = self._model, self._meters
        kind = "" if error is None or isinstance(error, Cancelled) else type(error).__name__
        meters.distribution(names.DURATION, self._operation, model, kind).observe(now_s - self._arrived_s)
        for first_s, last_s, count in zip(self._first_s, self._last_s, self._counts, strict=True):
            if count > 1:
                per_token_s = (last_s - first_s) / (count - 1)
                meters.distribution(names.TPOT, self._operation, model).observe(per_token_s)
        outcome = kind or ("cancelled" if error is not None else next(iter(reasons), "stop"))
        meters.counter(names.REQUESTS, model, outcome).add()
        # Recorded even if 0: Prometheus computes a rate from the value before an increase.
        meters.counter(names.REPLAYS, model).add(timings.replays)
        if error is None or any(self._counts):
            self._prompt(usage, timings)
        if error is None:
            self._finished(usage, timings)

    def _finished(self, usage: Usage, timings: Timings) -> None:
        """Record the tokens and times of a successful request."""
        waited_s = (timings.admission_ms + timings.decode_queue_ms) / 1000
        first_s, last_s = self.first_s(), self.last_s()
        observed: list[tuple[Metric, float]] = [
            (names.REQUEST_PROMPT_TOKENS, usage.prompt_tokens),
            (names.LONGEST_ANSWER_TOKENS, max(self._counts, default=0)),
            (names.MAX_TOKENS, self.max_tokens),
            (names.ANSWERS, len(self._counts)),
            *((names.ANSWER_TOKENS, count) for count in self._counts),
        ]
        if first_s:
            begun_s = min(first_s, self._arrived_s + waited_s)
            observed += [
                (names.PREFILL_TIME, first_s - begun_s),
                (names.DECODE_TIME, last_s - first_s),
                (names.INFERENCE_TIME, last_s - begun_s),
            ]
        for metric, value in observed:
            self._meters.distribution(metric, self._model).observe(value)
        self._meters.counter(names.REQUEST_PREEMPTIONS, self._model).add(timings.preemptions)
        if usage.guessed_tokens:
            rejected = usage.guessed_tokens - usage.accepted_tokens
            for outcome, tokens in (("accepted", usage.accepted_tokens), ("rejected", rejected)):
                self._meters.counter(names.DRAFT_TOKENS, self._model, outcome).add(tokens)

    def _prompt(self, usage: Usage, timings: Timings) -> None:
        model, meters = self._model, self._meters
        waited_ms = timings.admission_ms + timings.decode_queue_ms
        meters.distribution(names.QUEUE_TIME, model).observe(waited_ms / 1000)
        brought = BroughtTokens(timings.fetched_tokens, timings.restored_tokens, timings.bucket_tokens)
        sources = {
            "pool": max(0, usage.cached_tokens - sum(brought)),
            **brought._asdict(),
            "prefill": timings.prefilled_tokens,
            "tail": timings.tail_tokens,
        }
        for source, tokens in sources.items():
            meters.counter(names.PROMPT_TOKENS, model, source).add(tokens)
        computed = timings.prefilled_tokens + timings.tail_tokens
        if computed:
            meters.distribution(names.SPLIT, model).observe(timings.prefilled_tokens / computed)


def operation_of(admitted: AdmittedRequest) -> str:
    """Return OpenTelemetry's ``gen_ai.operation.name`` of a request."""
    if admitted.pooling is not None:
        return "embeddings"
    return "chat" if admitted.asked.messages else "text_completion"


class TenantSums:
    """Usage of ended requests by tenant, since the gateway started."""

    def __init__(self) -> None:
        self._of: dict[str, Usage] = {}

    def add(self, tenant: str, usage: Usage) -> None:
        name = tenant if tenant in self._of or len(self._of) < MAX_TENANTS else OTHER
        self._of[name] = self._of.get(name, Usage(0, 0, 0)) + usage

    @property
    def of(self) -> Mapping[str, Usage]:
        """The sums by tenant; "" is the only tenant of a gateway without keys."""
        return self._of

    def readings(self) -> Iterator[Reading]:
        for tenant, usage in self._of.items():
            kinds = (usage.computed_tokens, usage.cached_tokens, usage.completion_tokens)
            for kind, tokens in zip(("computed", "cached", "generated"), kinds, strict=True):
                yield names.TENANT_TOKENS, (tenant, kind), tokens
            for tier, held in usage.kv_byte_seconds().items():
                yield names.TENANT_KV, (tenant, tier), held


def count_refused(meters: Meters, error: PillionError) -> None:
    """Count a refused request by error and, if Overloaded, by the limit that was reached."""
    violations = error.quotas if isinstance(error, Overloaded) else ()
    bound = violations[0].subject.rpartition("/")[2] if violations else ""
    kind = type(error).__name__
    meters.counter(names.REJECTED, f"{kind}: {bound}" if bound else kind).add()


def readings(running: int, waiting: int, index_available: bool, registry_writable: bool) -> Iterator[Reading]:
    yield names.REQUESTS_NOW, ("running",), running - waiting
    yield names.REQUESTS_NOW, ("waiting",), waiting
    yield names.INDEX_UP, (), float(index_available)
    yield names.REGISTRY_WRITABLE, (), float(registry_writable)


def model_readings(model: str, running: int, waiting: int, queued: int, kv_usage: float | None) -> Iterator[Reading]:
    """Yield the gauges of one model: requests ``running`` at workers, of which ``queued`` wait in the workers' queues,
    and requests ``waiting`` at this gateway. ``kv_usage`` is None if no pool is known."""
    queued = min(queued, running)
    yield names.MODEL_REQUESTS, (model, "running"), running - queued
    yield names.MODEL_REQUESTS, (model, "waiting"), waiting + queued
    if kv_usage is not None:
        yield names.MODEL_KV_USAGE, (model,), kv_usage


def down_readings(records: Iterable[ComponentRecord]) -> Iterator[Reading]:
    for record in records:
        yield names.COMPONENTS_DOWN, (record.component_id,), 1


def version_readings(versions: Mapping[tuple[str, int, bool], int]) -> Iterator[Reading]:
    """Yield the gauge of components by version, protocol, and whether the gateway uses them."""
    for (version, protocol, used), count in versions.items():
        yield names.COMPONENTS, (version, str(protocol), "yes" if used else "no"), count


def begin_span(request: GenerateRequest, parent: Context | None, *, streamed: bool) -> trace.Span:
    """Start the request's span under the client's ``parent``."""
    asked = request.model[:MAX_NAME_CHARS]
    attributes: dict[str, bool | str] = {"gen_ai.request.stream": streamed, "gen_ai.request.model": asked}
    name = f"generate {asked}".rstrip()
    return telemetry.tracer().start_span(name, context=parent, kind=trace.SpanKind.SERVER, attributes=attributes)


def describe_span(span: trace.Span, admitted: AdmittedRequest, operation: str, name: str) -> None:
    """Add the request's parameters, without its content, to its span, by OpenTelemetry's conventions for generative AI.
    ``name`` is the adapter's or the model's name in answers."""
    sampling = admitted.sampling
    span.update_name(f"generate {admitted.model}")
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pillion",
        "gen_ai.request.model": admitted.asked.model[:MAX_NAME_CHARS] or name,
        "gen_ai.response.model": name,
        "gen_ai.response.id": admitted.request_id,
        "gen_ai.request.max_tokens": admitted.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        # By convention, omitted if 1.
        "gen_ai.request.choice.count": admitted.answers if admitted.answers > 1 else None,
    }
    span.set_attributes({key: value for key, value in attributes.items() if value is not None})


def end_refused_span(span: trace.Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(trace.StatusCode.ERROR, str(error))
    span.end()
