"""Dashboards and their JSON for Grafana.

Dashboard(rows of Panels with Queries) --build--> Grafana's model
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Of Grafana 12.
SCHEMA_VERSION = 41
GRID_WIDTH, PANEL_HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """A PromQL query of a panel, and the legend of its series, with labels as ``{{label}}``."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A chart: ``text`` is its description, ``width`` is in columns of 24."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str
    stacked: bool = False
    width: int = 8
    maximum: float | None = None


@dataclass(frozen=True)
class Variable:
    """A selector at the top of a dashboard, with all values of a label."""

    name: str
    label: str
    values: str


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. ``rows`` are headings with panels, three abreast by default."""

    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def build(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard's JSON model."""
    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": "prometheus"},
    }
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["pillion"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["pillion"], "title": "Pillion", "includeVars": False}],
        "templating": {"list": [datasource, *map(_variable, dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": variable.values, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Yield panels and row headings in reading order."""
    number, x, y = 1, 0, 0
    for heading, panels in dashboard.rows:
        place = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": heading, "collapsed": False, "gridPos": place, "panels": []}
        number, x, y = number + 1, 0, y + 1
        for panel in panels:
            if x + panel.width > GRID_WIDTH:
                x, y = 0, y + PANEL_HEIGHT
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": PANEL_HEIGHT})
            number, x = number + 1, x + panel.width
        y += PANEL_HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    drawn = {
        "fillOpacity": 40 if panel.stacked else 5,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": drawn}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for place, query in enumerate(panel.queries)
        ],
    }
