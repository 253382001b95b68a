"""Components' counts match their work (budgets, pools and prompts add up), and so do their log lines."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from pillion import errors
from pillion.engine.scheduling.step_plan import Outcome, StepPlan
from pillion.engine.worker.worker_telemetry import StepMeter, StepUse, load_readings
from pillion.gateway.request.request_telemetry import RequestMeter, count_refused, model_readings
from pillion.gateway.request.request_telemetry import readings as under_way
from pillion.kernels.step import Sampled
from pillion.kvstore.node.kv_node import metric_readings as books
from pillion.observability import metric_catalog as names
from pillion.observability.log_format import JsonFormatter
from pillion.observability.metrics import Distribution, Meters, Metric, Reading
from pillion.types import Timings, Usage
from pillion.wire.registry import WorkerLoad
from tests.engine.drafts.test_drafts import OracleDrafter
from tests.support.examples import examples
from tests.support.scheduler_harness import BLOCK, SchedulerHarness, prompt


def values(meters: Meters, metric: Metric) -> dict[tuple[str, ...], float | Distribution]:
    return meters.collect().get(metric, {})


def only(meters: Meters, metric: Metric) -> Distribution:
    (value,) = values(meters, metric).values()
    assert isinstance(value, Distribution)
    return value


def by_labels(readings: Iterable[Reading], metric: Metric) -> dict[str, float]:
    return {"/".join(labels): value for found, labels, value in readings if found is metric}


class MeteredLine(SchedulerHarness):
    """An offline line with a meter where a worker has it: between a step and its commit."""

    def __init__(self, budget: int, wrong: int, slots: int = 200) -> None:
        super().__init__(slots=slots, budget=budget, max_num_seqs=4, drafter=OracleDrafter(wrong))
        self.meters = Meters()
        self.meter = StepMeter(self.meters)
        self.budgets = 0

    def run_plan(self, plan: StepPlan) -> Sampled:
        sampled = super().run_plan(plan)
        used = self.meter.count_step(plan, 0.02, ok=True)
        assert sum(used.values()) == plan.budget_tokens
        assert used[StepUse.IDLE] == plan.budget_tokens - plan.num_tokens
        self.budgets += plan.budget_tokens
        return sampled

    def receive(self, outcome: Outcome) -> None:
        super().receive(outcome)
        self.meter.count_outcome(outcome)


@settings(max_examples=examples(25))
@given(
    budget=st.integers(6, 24),
    wrong=st.integers(0, 4),
    slots=st.sampled_from([18, 200]),
    prompts=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.booleans()), min_size=1, max_size=6),
)
@example(budget=16, wrong=0, slots=14, prompts=[(9, 24, False)] * 3)
# The outcome of a step had nothing but a preemption.
@example(budget=15, wrong=0, slots=18, prompts=[(16, 1, False), (24, 1, False), (20, 6, False), (1, 1, False)])
def test_step_compositions_add_up(budget: int, wrong: int, slots: int, prompts: list[tuple[int, int, bool]]) -> None:
    line = MeteredLine(budget, wrong, slots)
    for seed, (length, count, is_prefill) in enumerate(prompts):
        if is_prefill and length >= BLOCK:
            whole = length // BLOCK * BLOCK
            line.submit(prompt(seed + 1, whole), 0, chunks=(whole,))
        else:
            line.submit(prompt(seed + 1, length), count)
        line.step()
    line.finish()
    used = {use: int(tokens) for (use,), tokens in values(line.meters, names.STEP_BUDGET).items()}  # type: ignore[arg-type]
    assert sum(used.values()) == line.budgets
    streams = [stream for stream in line.records.values() if not stream.chunks]
    accepted = sum(int(tokens) for tokens in values(line.meters, names.ACCEPTED).values())  # type: ignore[call-overload]
    wasted = sum(int(tokens) for tokens in values(line.meters, names.WASTED).values())  # type: ignore[call-overload]
    (preemptions,) = values(line.meters, names.PREEMPTIONS).values()
    assert accepted + wasted == used["speculative"]
    assert preemptions == line.preemptions
    # Each answer's first token comes out of its prompt tail, and one more each time that it came back from a
    # preemption.
    firsts = len(streams) + line.preemptions
    assert sum(len(stream.token_ids) for stream in streams) <= firsts + used["decode"] + accepted
    if not line.preemptions:
        assert sum(len(stream.token_ids) for stream in streams) == firsts + used["decode"] + accepted
        assert used["tail"] + used["prefill"] <= sum(len(stream.prompt) for stream in line.records.values())
    assert only(line.meters, names.STEP_DURATION).count == values(line.meters, names.STEPS)[("ok",)]


def test_failed_steps_are_counted_separately() -> None:
    meters = Meters()
    StepMeter(meters).count_step(StepPlan(budget_tokens=8), 0.5, ok=False)
    assert values(meters, names.STEPS) == {("ok",): 0, ("failed",): 1}
    assert values(meters, names.STEP_BUDGET)[StepUse.IDLE,] == 8


def test_worker_queue_lengths_are_exported() -> None:
    line = SchedulerHarness(budget=8, max_num_seqs=2)
    for seed in range(3):
        line.submit(prompt(seed + 1, 6), 4)
    line.step()
    scheduler = line.scheduler
    found = list(load_readings(WorkerLoad(**scheduler.queues.load(scheduler.budget)), max_num_seqs=2))
    assert by_labels(found, names.SEQUENCES) == {"running": 2, "decoding": 1, "waiting": 1}
    assert by_labels(found, names.FREE_SEQUENCES) == {"": 0}
    assert by_labels(found, names.QUEUED_TOKENS) == {"": 3 * 6 - 8}


def test_a_pools_states_add_up() -> None:
    line = SchedulerHarness(slots=32, budget=8)
    for seed in range(2):
        line.submit(prompt(seed + 1, 12), 6)
    seen = set()
    for _ in itertools.takewhile(lambda _: line.scheduler.sequences, range(100)):
        status = line.ledger.status()
        found = list(books(status))
        states = by_labels(found, names.KV_BLOCKS)
        assert sum(states.values()) == status.total_blocks == 32
        seen |= {state for state, blocks in states.items() if blocks}
        (usage,) = by_labels(found, names.KV_USAGE).values()
        held = states["leased"] + states["quarantined"] + sum(by_labels(found, names.KV_HELD).values())
        assert usage == min(1.0, held / 32)
        line.step()
        line.answer()
    assert seen >= {"free", "leased", "committed"}
    line.settle()
    assert by_labels(books(line.ledger.status()), names.KV_USAGE) == {"": 0.0}


def metered(answers: int = 1) -> tuple[Meters, RequestMeter]:
    meters = Meters()
    return meters, RequestMeter(meters, "demo", "chat", 100.0, answers)


def test_tokens_that_arrive_together_share_their_latency() -> None:
    meters, request = metered()
    request.tokens(0, 2, 100.3)
    request.tokens(0, 1, 100.35)
    request.tokens(0, 4, 100.55)
    usage = Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=7)
    timings = Timings(prefilled_tokens=8, tail_tokens=2, admission_ms=20, decode_queue_ms=30)
    request.ended(100.6, usage, timings, ["length"], None)
    assert only(meters, names.TTFT).total == pytest.approx(0.3)
    itl = only(meters, names.ITL)
    # All but the first, and without a wait for the one that came with it; their sum is the stream's time.
    assert itl.count == 6
    assert itl.counts[0] == 1
    assert itl.total == pytest.approx(0.25)
    assert sum(itl.counts[: names.ITL_BOUNDS.index(0.075) + 1]) == 6
    tpot = only(meters, names.TPOT)
    assert (tpot.count, tpot.total) == (1, pytest.approx(0.25 / 6))
    assert only(meters, names.DURATION).total == pytest.approx(0.6)
    assert only(meters, names.QUEUE_TIME).total == pytest.approx(0.05)
    assert only(meters, names.SPLIT).total == pytest.approx(0.8)
    assert values(meters, names.GENERATED_TOKENS) == {("demo",): 7}
    assert values(meters, names.REPLAYS) == {("demo",): 0}


def test_a_finished_request_is_in_histograms_of_its_length_and_its_phases() -> None:
    meters = Meters()
    request = RequestMeter(meters, "demo", "chat", 100.0, 2, max_tokens=40)
    request.tokens(0, 1, 100.3)
    request.tokens(1, 3, 100.4)
    request.tokens(0, 1, 101.0)
    usage = Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=5, guessed_tokens=4, accepted_tokens=3)
    timings = Timings(tail_tokens=10, admission_ms=150, decode_queue_ms=50, preemptions=2)
    request.ended(101.5, usage, timings, ["stop", "stop"], None)
    totals = {
        names.REQUEST_PROMPT_TOKENS: (1, 10),
        names.ANSWER_TOKENS: (2, 2 + 3),
        names.LONGEST_ANSWER_TOKENS: (1, 3),
        names.MAX_TOKENS: (1, 40),
        names.ANSWERS: (1, 2),
        names.PREFILL_TIME: (1, pytest.approx(0.1)),
        names.DECODE_TIME: (1, pytest.approx(0.7)),
        names.INFERENCE_TIME: (1, pytest.approx(0.8)),
    }
    assert {metric: (only(meters, metric).count, only(meters, metric).total) for metric in totals} == totals
    assert values(meters, names.REQUEST_PREEMPTIONS) == {("demo",): 2}
    assert values(meters, names.DRAFT_TOKENS) == {("demo", "accepted"): 3, ("demo", "rejected"): 1}
    failed, request = metered()
    request.ended(101.0, Usage(10, 0, 0), Timings(), [""], errors.Unavailable("no worker"))
    assert not any(values(failed, metric) for metric in totals)


def test_requests_queued_at_workers_count_as_waiting() -> None:
    found = by_labels(model_readings("demo", running=5, waiting=2, queued=3, kv_usage=0.5), names.MODEL_REQUESTS)
    assert found == {"demo/running": 2, "demo/waiting": 5}
    assert not by_labels(model_readings("demo", 0, 0, 3, None), names.MODEL_KV_USAGE)
    assert set(by_labels(model_readings("demo", 0, 0, 3, None), names.MODEL_REQUESTS).values()) == {0}


def test_several_answers_have_one_first_token() -> None:
    meters, request = metered(answers=2)
    request.tokens(1, 1, 100.2)
    request.tokens(0, 1, 100.4)
    request.tokens(0, 1, 100.5)
    request.tokens(1, 1, 101.2)
    request.ended(101.2, Usage(4, 0, 4), Timings(tail_tokens=4, replays=2), ["stop", "stop"], None)
    assert (only(meters, names.TTFT).count, only(meters, names.TTFT).total) == (1, pytest.approx(0.2))
    assert only(meters, names.ITL).total == pytest.approx(0.1 + 1.0)
    assert only(meters, names.TPOT).count == 2
    assert values(meters, names.REPLAYS) == {("demo",): 2}
    assert values(meters, names.REQUESTS) == {("demo", "stop"): 1}


@pytest.mark.parametrize(
    ("error", "reasons", "outcome", "kind"),
    [
        (None, ["length"], "length", ""),
        (errors.Cancelled("gone"), [""], "cancelled", ""),
        (errors.Unavailable("no worker"), [""], "Unavailable", "Unavailable"),
    ],
)
def test_outcomes_of_requests(error: errors.PillionError | None, reasons: list[str], outcome: str, kind: str) -> None:
    meters, request = metered()
    request.ended(101.0, Usage(10, 0, 0), Timings(), reasons, error)
    assert values(meters, names.REQUESTS) == {("demo", outcome): 1}
    assert list(values(meters, names.DURATION)) == [("chat", "demo", kind)]
    # Without a token, what of the prompt was computed is known only where the request ended by itself (max_tokens=0).
    assert (values(meters, names.PROMPT_TOKENS) == {}) == (error is not None)


@given(st.tuples(*[st.integers(0, 500)] * 6))
def test_sources_add_up_to_the_prompt(tokens: tuple[int, ...]) -> None:
    pool, fetched, restored, bucket, prefilled, prompt_tail = tokens
    meters, request = metered()
    request.tokens(0, 1, 100.1)
    usage = Usage(sum(tokens), pool + fetched + restored + bucket, 1)
    timings = Timings(
        prefilled_tokens=prefilled,
        tail_tokens=prompt_tail,
        fetched_tokens=fetched,
        restored_tokens=restored,
        bucket_tokens=bucket,
    )
    request.ended(100.2, usage, timings, ["stop"], None)
    found = {source: value for (_, source), value in values(meters, names.PROMPT_TOKENS).items()}
    sources = ("pool", "fetched", "restored", "bucket", "prefill", "tail")
    assert tuple(found[source] for source in sources) == tokens


def test_refusals_name_the_bound_and_not_the_tenant() -> None:
    meters = Meters()
    count_refused(
        meters, errors.Overloaded("too much", 100, (errors.QuotaViolation("acme/requests_per_minute", "60"),))
    )
    count_refused(meters, errors.Overloaded("full", 100, (errors.QuotaViolation("max_inflight_requests", "512"),)))
    count_refused(meters, errors.NotFound("no such model"))
    assert set(values(meters, names.REJECTED)) == {
        ("Overloaded: requests_per_minute",),
        ("Overloaded: max_inflight_requests",),
        ("NotFound",),
    }
    assert by_labels(under_way(5, 2, False, True), names.REQUESTS_NOW) == {"running": 3, "waiting": 2}
    assert by_labels(under_way(5, 2, False, True), names.INDEX_UP) == {"": 0.0}
    assert by_labels(under_way(5, 2, False, True), names.REGISTRY_WRITABLE) == {"": 1.0}


def record(**more: object) -> logging.LogRecord:
    made = logging.LogRecord("pillion.gateway", logging.WARNING, "file", 1, "a %s\nof two lines", ("word",), None)
    made.__dict__ |= more
    return made


def test_json_lines_have_their_trace_id() -> None:
    formatter = JsonFormatter("gateway-0")
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        text = formatter.format(record(created=0.25, msecs=250.0, fields={"replays": 1, "path": object}))
    assert "\n" not in text
    entry = json.loads(text)
    context = span.get_span_context()
    assert entry["trace_id"] == f"{context.trace_id:032x}"
    assert entry["span_id"] == f"{context.span_id:016x}"
    assert (entry["level"], entry["component"], entry["logger"]) == ("warning", "gateway-0", "pillion.gateway")
    assert entry["message"] == "a word\nof two lines"
    assert entry["time"] == "1970-01-01T00:00:00.250Z"
    assert entry["replays"] == 1


def test_json_lines_include_exceptions_and_no_trace_id_without_a_trace() -> None:
    try:
        raise ValueError("it broke")
    except ValueError as error:
        text = JsonFormatter("x").format(record(exc_info=(type(error), error, error.__traceback__)))
    entry = json.loads(text)
    assert "trace_id" not in entry
    assert "ValueError: it broke" in entry["exception"]
