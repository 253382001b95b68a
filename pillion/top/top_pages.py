"""Reads metrics pages for `pillion top`: their URLs, and their text in the terms of the metric catalog.

    --pages HOST:9500-9503 --locate--> URLs --(fetched by pillion.top.top)--> text --parse--> Page

Sans-IO (I9). The Prometheus client library parses the text; the SDK's own dependencies do not have it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pillion.errors import ConfigError
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Labels, Metric, Snapshot, Values

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# These are the ports of a gateway whose flags name no others.
USUAL_GRPC_PORT, USUAL_HTTP_PORT = 50051, 8000
# A view of more components than this is a job for Prometheus.
MAX_PAGES = 256
PLACE = re.compile(r"(?P<host>[^/]+):(?P<first>\d{1,5})(-(?P<last>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class ComponentPage:
    """Holds one component's metrics. ``component_id`` and ``role`` are empty on a page that is not Pillion's."""

    component_id: str = ""
    role: str = ""
    values: Values = field(default_factory=dict)


def locate(places: Iterable[str], target: str) -> tuple[str, ...]:
    """Returns URLs of pages, in order and once each.

    Args:
        places: URLs, HOST:PORT, or HOST:FIRST-LAST for one page on each of these ports. Where it is empty and the
            gateway has its usual gRPC port, the page on its usual HTTP port. The HTTP port of another gateway is not
            known, and the usual one may be another cluster's.
        target: the gateway's address, as :class:`pillion.Client` takes it.

    Raises ConfigError.
    """
    found = [url for place in places for url in _expand(place)]
    if not found:
        scheme = "https" if target.startswith("grpcs://") else "http"
        host, _, port = target.rpartition("//")[2].rpartition(":")
        if port == str(USUAL_GRPC_PORT):
            found = [f"{scheme}://{host}:{USUAL_HTTP_PORT}/metrics"]
    if len(found) > MAX_PAGES:
        raise ConfigError(f"--pages: {len(found)} pages, and {MAX_PAGES} are the most")
    return tuple(dict.fromkeys(found))


def _expand(place: str) -> list[str]:
    if "://" in place:
        try:
            parts = urlsplit(place)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"--pages: {place!r} is no http or https URL")
        return [parts._replace(path=parts.path if parts.path not in ("", "/") else "/metrics").geturl()]
    match = PLACE.fullmatch(place)
    if match is None:
        raise ConfigError(f"--pages: {place!r} is not a URL, HOST:PORT or HOST:FIRST-LAST")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if not 0 < first <= last < 65536 or last - first >= MAX_PAGES:
        raise ConfigError(f"--pages: {place!r} is no range of at most {MAX_PAGES} ports")
    return [f"http://{match['host']}:{port}/metrics" for port in range(first, last + 1)]


def parse(text: str) -> ComponentPage:
    """Reads a page's text in the catalog's terms; metrics that are not in the catalog are left out.

    Raises ValueError on text that is no page, ImportError where the client library is missing.
    """
    from prometheus_client.parser import text_string_to_metric_families

    from pillion.observability.metrics_prometheus import prometheus_name

    known = {prometheus_name(metric): metric for metric in names.CATALOG}
    values: Values = {}
    for family in text_string_to_metric_families(text):
        metric = known.get(family.name)
        if metric is not None:
            read = _histogram if metric.kind == "histogram" else _plain
            values[metric] = read(metric, family.samples)
    about = next(iter(values.get(names.BUILD, ())), None)
    build = dict(zip(names.BUILD.labels, about, strict=True)) if about else {}
    return ComponentPage(build.get("component", ""), build.get("role", ""), values)


def _labels(metric: Metric, sample: Sample) -> Labels:
    return tuple(sample.labels.get(label.replace(".", "_"), "") for label in metric.labels)


def _plain(metric: Metric, samples: Iterable[Sample]) -> dict[Labels, float | Snapshot]:
    return {_labels(metric, sample): sample.value for sample in samples}


def _histogram(metric: Metric, samples: Iterable[Sample]) -> dict[Labels, float | Snapshot]:
    """Reads histograms with the page's own bounds, which may be another version's. A page has no extremes: they stay
    0."""
    below: dict[Labels, dict[float, int]] = {}
    totals: dict[Labels, float] = {}
    for sample in samples:
        labels = _labels(metric, sample)
        if sample.name.endswith("_bucket"):
            below.setdefault(labels, {})[float(sample.labels["le"])] = int(sample.value)
        elif sample.name.endswith("_sum"):
            totals[labels] = sample.value
    found: dict[Labels, float | Snapshot] = {}
    for labels, buckets in below.items():
        bounds, counts = zip(*sorted(buckets.items()), strict=True)
        own = tuple(after - before for before, after in itertools.pairwise((0, *counts)))
        found[labels] = Snapshot(bounds[:-1], own, totals.get(labels, 0.0), 0.0, 0.0)
    return found
