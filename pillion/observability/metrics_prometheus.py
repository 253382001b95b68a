"""A component's metrics as a page for Prometheus, under their own names and under vLLM's.

Own names follow OpenTelemetry's rules for Prometheus: underscores for dots, the unit after the name, ``_total`` after a
counter. vLLM's names are for autoscalers, dashboards and endpoint pickers; each repeats a metric of Pillion, with
``model_name`` as a label where vLLM has it. The gateway shows requests and tokens, workers their queues
and steps, KV nodes the usage of the pool.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from pillion.observability import metric_catalog as names
from pillion.observability import metrics
from pillion.observability.metrics import Distribution, Labels, Values
from pillion.settings.speculative_config import MAX_SPECULATIVE_TOKENS

_FAMILIES = {"histogram": HistogramMetricFamily, "counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


def prometheus_name(metric: metrics.Metric) -> str:
    """Return a metric's name on Prometheus's page, without a counter's ``_total``."""
    name, units = metric.name.replace(".", "_"), {"s": "seconds", "By": "bytes"}
    unit = "ratio" if metric.unit == "1" and metric.kind == "gauge" else units.get(metric.unit, "")
    return f"{name}_{unit}" if unit and not name.endswith(unit) else name


def to_prometheus(values: Values) -> Iterator[Metric]:
    """Convert collected values to metrics of Prometheus's client library."""
    for metric, cells in values.items():
        labels = [label.replace(".", "_") for label in metric.labels]
        yield _family(prometheus_name(metric), metric, labels, cells)


def _family(name: str, metric: metrics.Metric, labels: list[str], cells: Mapping[Labels, Any]) -> Metric:
    family: Any = _FAMILIES[metric.kind](name, metric.help, labels=labels)
    for own_labels, value in cells.items():
        if isinstance(value, Distribution):
            family.add_metric(own_labels, _buckets(value), value.total)
        else:
            family.add_metric(own_labels, value)
    result: Metric = family
    return result


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return a histogram's buckets as (upper bound, cumulative count); the last bound is infinity."""
    bounds = map(floatToGoString, (*distribution.bounds, math.inf))
    return list(zip(bounds, map(float, accumulate(distribution.counts)), strict=True))


@dataclass(frozen=True, slots=True)
class _Alias:
    """A metric of vLLM: the sum of the points of ``metric`` whose ``label`` has one of ``values``, by model.

    If vLLM has that label as well, under the name ``vllm_label``, the sums are also by its value.
    """

    name: str
    metric: metrics.Metric
    label: str = ""
    values: tuple[str, ...] = ()
    vllm_label: str = ""


ALIASES = (
    _Alias("vllm:num_requests_running", names.MODEL_REQUESTS, "state", ("running",)),
    _Alias("vllm:num_requests_waiting", names.MODEL_REQUESTS, "state", ("waiting",)),
    _Alias("vllm:num_requests_running", names.SEQUENCES, "state", ("running",)),
    _Alias("vllm:num_requests_waiting", names.SEQUENCES, "state", ("waiting",)),
    _Alias("vllm:kv_cache_usage_perc", names.MODEL_KV_USAGE),
    _Alias("vllm:kv_cache_usage_perc", names.KV_USAGE),
    # Older name, still used by dashboards.
    _Alias("vllm:gpu_cache_usage_perc", names.MODEL_KV_USAGE),
    _Alias("vllm:prompt_tokens", names.PROMPT_TOKENS),
    _Alias("vllm:generation_tokens", names.GENERATED_TOKENS),
    _Alias("vllm:prefix_cache_queries", names.PROMPT_TOKENS),
    _Alias("vllm:prefix_cache_hits", names.PROMPT_TOKENS, "source", ("pool", "fetched", "restored", "bucket")),
    _Alias("vllm:num_preemptions", names.REQUEST_PREEMPTIONS),
    _Alias("vllm:num_preemptions", names.PREEMPTIONS),
    _Alias("vllm:request_success", names.REQUESTS, "outcome", ("stop", "length", "cancelled"), "finished_reason"),
    _Alias("vllm:spec_decode_num_draft_tokens", names.DRAFT_TOKENS),
    _Alias("vllm:spec_decode_num_accepted_tokens", names.DRAFT_TOKENS, "outcome", ("accepted",)),
    _Alias("vllm:spec_decode_num_draft_tokens", names.STEP_BUDGET, "use", ("speculative",)),
    _Alias("vllm:spec_decode_num_accepted_tokens", names.ACCEPTED),
    _Alias(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        names.ACCEPTED,
        "position",
        tuple(map(str, range(MAX_SPECULATIVE_TOKENS))),
        "position",
    ),
    _Alias("vllm:time_to_first_token_seconds", names.TTFT),
    _Alias("vllm:inter_token_latency_seconds", names.ITL),
    # Older name, still used by dashboards.
    _Alias("vllm:time_per_output_token_seconds", names.ITL),
    _Alias("vllm:request_time_per_output_token_seconds", names.TPOT),
    _Alias("vllm:e2e_request_latency_seconds", names.DURATION, "error.type", ("",)),
    _Alias("vllm:request_queue_time_seconds", names.QUEUE_TIME),
    _Alias("vllm:request_prefill_time_seconds", names.PREFILL_TIME),
    _Alias("vllm:request_decode_time_seconds", names.DECODE_TIME),
    _Alias("vllm:request_inference_time_seconds", names.INFERENCE_TIME),
    _Alias("vllm:request_prompt_tokens", names.REQUEST_PROMPT_TOKENS),
    _Alias("vllm:request_generation_tokens", names.ANSWER_TOKENS),
    _Alias("vllm:request_max_num_generation_tokens", names.LONGEST_ANSWER_TOKENS),
    _Alias("vllm:request_params_max_tokens", names.MAX_TOKENS),
    _Alias("vllm:request_params_n", names.ANSWERS),
)


def to_vllm(values: Values) -> Iterator[Metric]:
    """Yield the values of metrics that vLLM has, under vLLM's names."""
    for alias in ALIASES:
        if alias.metric in values:
            yield _aliased(alias, values[alias.metric])
    if names.ADAPTER_SLOTS in values:
        yield _lora_info(values)


def _lora_info(values: Values) -> Metric:
    """Return vLLM's single point that lists adapters in its labels, with the time as value. Requests do not wait for
    adapters at a gateway, so none is listed as waiting."""
    (slots,) = values[names.ADAPTER_SLOTS].values()
    running = ",".join(sorted(adapter for (adapter,) in values.get(names.ADAPTER_REQUESTS, {})))
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of the requests that run.", labels=labels)
    info.add_metric([f"{slots:g}" if isinstance(slots, int | float) else "", running, ""], time.time())
    return info


def _aliased(alias: _Alias, cells: Mapping[Labels, Any]) -> Metric:
    metric = alias.metric
    labels = ["model_name"] * (names.MODEL in metric.labels) + [alias.vllm_label] * bool(alias.vllm_label)
    summed: dict[Labels, Any] = {}
    for own_labels, value in cells.items():
        labelled = dict(zip(metric.labels, own_labels, strict=True))
        if not alias.label or labelled[alias.label] in alias.values:
            model = (labelled[names.MODEL],) if names.MODEL in labelled else ()
            key = (*model, labelled[alias.label]) if alias.vllm_label else model
            summed[key] = summed[key] + value if key in summed else value
    return _family(alias.name, metric, labels, summed)
