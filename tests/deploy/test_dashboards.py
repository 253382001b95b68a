"""Dashboards, alert rules and the queries of autoscalers use only metrics, labels and values that exist."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
import yaml

import docs.make
from deploy.grafana import make
from pillion import errors
from pillion.engine.worker import worker_telemetry
from pillion.gateway.admission.tenants import QUOTAS
from pillion.gateway.request import request_telemetry
from pillion.kvstore.node.kv_node import metric_readings
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Meters, Metric
from pillion.observability.metrics_prometheus import ALIASES, prometheus_name
from pillion.types import FinishReason
from pillion.v1.kvnode_pb2 import NodeStatus
from pillion.wire.registry import WorkerLoad
from tests.support.compose import ROOT
from tests.support.promql import QueryError, Sample, labels_of

DASHBOARDS = {path.stem: path for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))}
ALERTS = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ROLES = frozenset({"gateway", "kvnode", "prefill", "decode"})


def known_values() -> dict[tuple[str, str], set[str]]:
    """Return all values of a metric's label, by the names of both, where the code lists them."""
    meters = Meters()
    worker_telemetry.StepMeter(meters)
    meters.watch(lambda: worker_telemetry.load_readings(WorkerLoad(), 1))
    meters.watch(lambda: metric_readings(NodeStatus()))
    meters.watch(lambda: request_telemetry.readings(0, 0, True, True))
    found: dict[tuple[str, str], set[str]] = {}
    for metric, cells in meters.collect().items():
        for labels in cells:
            for label, value in zip(metric.labels, labels, strict=True):
                found.setdefault((metric.name, label), set()).add(value)
    kinds = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    found[names.REQUESTS.name, "outcome"] = {reason.value for reason in FinishReason} | {"cancelled"} | kinds
    found[names.REJECTED.name, "reason"] = kinds | {f"Overloaded: {quota}" for quota in QUOTAS}
    found[names.BUILD.name, "role"] = set(ROLES)
    return found


def sample_names(metric: Metric) -> tuple[str, ...]:
    """Return all names of the metric that a query may use."""
    name = prometheus_name(metric)
    if metric.kind == "histogram":
        return tuple(f"{name}_{suffix}" for suffix in ("bucket", "sum", "count"))
    return (f"{name}_total",) if metric.kind == "counter" else (name,)


def _samples() -> dict[str, Sample]:
    values = known_values()
    found = {"up": Sample(frozenset(), "gauge")}
    for metric in names.CATALOG:
        labels = {label.replace(".", "_"): values.get((metric.name, label)) for label in metric.labels}
        known_labels = {label: known for label, known in labels.items() if known}
        found |= _of(sample_names(metric), metric.kind, frozenset(labels), known_labels, metric.bounds)
    for alias in ALIASES:
        labels = {"model_name"} if names.MODEL in alias.metric.labels else set()
        labels |= {alias.vllm_label} if alias.vllm_label else set()
        made = [name.replace(prometheus_name(alias.metric), alias.name) for name in sample_names(alias.metric)]
        found |= _of(made, alias.metric.kind, frozenset(labels), {}, alias.metric.bounds)
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    for family in registry.collect():
        found |= {one.name: Sample(frozenset(), family.type) for one in family.samples}
    return found


def _of(made: Any, kind: str, labels: frozenset[str], values: Any, bounds: Any) -> dict[str, Sample]:
    found = {}
    for name in made:
        if kind == "histogram" and name.endswith("_bucket"):
            bucket_values = {**values, "le": {*(str(float(bound)) for bound in bounds), "+Inf"}}
            found[name] = Sample(labels | {"le"}, "counter", bucket_values)
        else:
            found[name] = Sample(labels, "counter" if kind == "histogram" else kind, values)
    return found


SAMPLES = _samples()


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def legend_labels(text: str) -> set[str]:
    """Return the labels in a Grafana legend or a Prometheus annotation."""
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}", text))


def test_dashboards_are_up_to_date() -> None:
    assert {path.name: path.read_text() for path in DASHBOARDS.values()} == make.render(), "run make dashboards"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_queries_use_known_labels(name: str) -> None:
    found = json.loads(DASHBOARDS[name].read_text())
    choices = {variable["name"] for variable in found["templating"]["list"]}
    for panel in panels(found):
        for target in panel["targets"]:
            labels = labels_of(target["expr"], SAMPLES)
            assert legend_labels(target["legendFormat"]) <= labels, panel["title"]
            variables = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert variables <= choices, panel["title"]
        assert len({target["legendFormat"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]
    for variable in found["templating"]["list"]:
        if variable["type"] == "query":
            query, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
            counted = SAMPLES[query.partition("{")[0]].kind == "counter"
            selected = f"rate({query}[1m])" if counted else query
            assert label in labels_of(selected, SAMPLES)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_panels_do_not_overlap(name: str) -> None:
    found = json.loads(DASHBOARDS[name].read_text())
    assert found["uid"] == name
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        assert panel["title"]
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, "panels lie on each other"
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels(found):
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
    titles = [panel["title"] for panel in panels(found)]
    assert len(set(titles)) == len(titles)


def test_every_metric_is_on_a_dashboard_or_in_an_alert() -> None:
    """Each metric is on a dashboard or in an alert."""
    queries = " ".join(path.read_text() for path in DASHBOARDS.values()) + str(ALERTS)
    unseen = {metric.name for metric in names.CATALOG if prometheus_name(metric) not in queries}
    assert not unseen


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts(rule: dict[str, Any]) -> None:
    labels = labels_of(rule["expr"], SAMPLES)
    assert rule["labels"]["severity"] in ("critical", "warning")
    annotations = rule["annotations"]
    assert annotations["summary"]
    assert len(annotations["description"]) > 60, "say what to do"
    assert legend_labels(annotations["summary"]) | legend_labels(annotations["description"]) <= labels
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


def test_the_runbook_has_every_alert() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^\| `(Pillion\w+)` \|", text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]


def test_the_docs_have_every_metric() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert docs.make.BEGIN in text
    assert docs.make.render(text) == text, "run make dashboards"
    assert all(f"`{alias.name}" in text for alias in ALIASES)


def test_autoscaler_queries_are_valid() -> None:
    charts = pytest.importorskip("tests.support.charts", reason="Helm's library has no wheel for this machine")
    scaled = {"autoscaling": {"enabled": True, "itlP99Ms": 100, "busyPercent": 50, "queuedTokensPerPod": 8192}}
    rendered = charts.render({"pools": {"prefill": scaled, "decode": scaled}})
    queries = [
        trigger["metadata"]["query"]
        for manifest in rendered
        if manifest["kind"] == "ScaledObject"
        for trigger in manifest["spec"]["triggers"]
    ]
    assert len(queries) >= 7
    assert sum("pillion_step_duration_seconds_sum" in query for query in queries) == 1
    for query in queries:
        assert labels_of(query, SAMPLES) == frozenset(), "a scaler wants one number"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("sum(pillion_kv_usage)", "no metric is called"),
        ("sum(rate(pillion_steps[1m]))", "no metric is called"),
        ("sum by (model) (pillion_sequences)", "there is no model"),
        ('pillion_sequences{state="runing"}', "never has"),
        ('rate(pillion_inter_token_latency_seconds_bucket{le="0.11"}[1m])', "never has"),
        ("pillion_steps_total", "is a counter"),
        ("rate(pillion_kv_usage_ratio[1m])", "is a gauge"),
        ("histogram_quantile(0.5, sum(rate(pillion_step_duration_seconds_bucket[1m])))", "le"),
        ("sum(pillion_sequences) / pillion_free_sequences", "differ in"),
        ("pillion_sequences * on (part) pillion_build_info", "not on both sides"),
        ("pillion_sequences * on (job, instance) group_left (name) pillion_build_info", "cannot bring name"),
        ("sum(rate(pillion_steps_total))", "expected type matrix"),
    ],
)
def test_the_query_check_finds_errors(query: str, words: str) -> None:
    with pytest.raises(QueryError, match=re.escape(words)):
        labels_of(query, SAMPLES)
