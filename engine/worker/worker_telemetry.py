"""A worker's telemetry: metrics of its steps, and trace spans of steps and streams.

Spans are recorded afterwards, on the event loop, from times that the scheduler recorded, so they do not delay steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context

from pillion.engine.scheduling.sequence import SequenceProgress
from pillion.engine.scheduling.step_plan import Outcome, StepPlan
from pillion.observability import metric_catalog as names
from pillion.observability import telemetry
from pillion.observability.metrics import Counter, Meters, Reading
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS
from pillion.wire.registry import WorkerLoad

# Max links of a step's span; OpenTelemetry's own limit is 128.
MAX_LINKS = 64


class StepUse(StrEnum):
    """Use of a step's tokens; IDLE is the unused rest of the budget."""

    DECODE = "decode"
    TAIL = "tail"
    PREFILL = "prefill"
    SPECULATIVE = "speculative"
    FORCED = "forced"
    IDLE = "idle"


class StepMeter:
    """Metrics of a worker's steps over all its epochs. ``count_step`` is called on the step thread, ``count_outcome``
    on the event loop."""

    def __init__(self, meters: Meters) -> None:
        self._duration = meters.distribution(names.STEP_DURATION)
        self._steps = {ok: meters.counter(names.STEPS, "ok" if ok else "failed") for ok in (True, False)}
        self._tokens: dict[str, Counter] = {use: meters.counter(names.STEP_BUDGET, use) for use in StepUse}
        self._preemptions = meters.counter(names.PREEMPTIONS)
        offsets = range(MAX_SPECULATIVE_TOKENS)
        self._accepted = [meters.counter(names.ACCEPTED, str(offset)) for offset in offsets]
        self._wasted = [meters.counter(names.WASTED, str(offset)) for offset in offsets]
        self._forced = meters.counter(names.FORCED)
        self._late_masks = meters.counter(names.LATE_MASKS)
        self._evicted_adapters = meters.counter(names.ADAPTER_EVICTIONS)

    def count_step(self, plan: StepPlan, seconds: float, ok: bool) -> dict[str, int]:
        """Count a step that has ended and is not committed yet. Return its tokens by use."""
        self._duration.observe(seconds)
        self._steps[ok].add()
        used = tokens_by_use(plan)
        for use, tokens in used.items():
            self._tokens[use].add(tokens)
        return used

    def totals(self) -> dict[str, Any]:
        """Return the totals of :meth:`count_step` as fields of a ComponentRecord."""
        duration = self._duration.now()
        tokens = {f"step_{use}_tokens": int(cell.value) for use, cell in self._tokens.items()}
        return {"steps": duration.count, "steps_ms": round(duration.total * 1000, 3), **tokens}

    def count_outcome(self, outcome: Outcome) -> None:
        """Count the preemptions, verified draft tokens, forced tokens, late masks and evicted adapters of an
        outcome."""
        self._preemptions.add(outcome.preemptions)
        for drafted, accepted in outcome.judged_draft_tokens:
            for counter in (*self._accepted[:accepted], *self._wasted[accepted:drafted]):
                counter.add(1)
        self._forced.add(outcome.forced_tokens)
        self._late_masks.add(outcome.late_masks)
        self._evicted_adapters.add(outcome.evicted_adapters)


def tokens_by_use(plan: StepPlan) -> dict[str, int]:
    """Return the tokens of an uncommitted step by use. They add up to the budget, or more if the decodes exceed it."""
    used: dict[str, int] = dict.fromkeys(StepUse, 0)
    for chunk in plan.scheduled:
        sequence = chunk.sequence
        if sequence.is_prefill:
            used[StepUse.PREFILL] += chunk.count
        elif not sequence.decoding:
            used[StepUse.TAIL] += chunk.count
        else:
            used[StepUse.DECODE] += 1
            used[StepUse.FORCED if sequence.forced else StepUse.SPECULATIVE] += chunk.count - 1
    used[StepUse.IDLE] = max(0, plan.budget_tokens - plan.num_tokens)
    return used


def load_readings(load: WorkerLoad, max_num_seqs: int) -> Iterator[Reading]:
    """Yield the gauges of a worker's load."""
    yield names.FREE_SEQUENCES, (), max(0, max_num_seqs - load.running_requests)
    yield from load.readings()


def record(
    name: str,
    parent: Context,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, int | float | str] | None = None,
    events: Sequence[tuple[str, float]] = (),
) -> None:
    """Record a finished span under ``parent``, if that is recorded. ``events``: names and times. Times are
    time.monotonic()."""
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return
    _make_span(name, parent, start_s, end_s, attributes or {}, events=events)


def record_stream(parent: Context, progress: SequenceProgress, generated_tokens: int) -> None:
    """Record a span for each stage that a stream reached on a decode worker: queue, prompt tail, decode."""
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
    """Record a step, with its tokens by use, as a separate trace with links to its requests' sampled spans
    (``parents``)."""
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
    wall_ns = time.time_ns() - time.monotonic_ns()
    begin = wall_ns + int(start_s * 1e9)
    span = telemetry.tracer().start_span(name, parent, start_time=begin, attributes=dict(attributes), links=links)
    for event, at_s in events:
        span.add_event(event, timestamp=wall_ns + int(at_s * 1e9))
    span.end(end_time=wall_ns + int(end_s * 1e9))
