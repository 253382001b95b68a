"""PromQL queries checked against the catalog: metrics, their labels, and the labels of the resulting series.

text --promql_parser--> tree --labels_of--> names of the result's labels, or QueryError

An unknown metric, label or label value gives an empty graph in Grafana and an alert that never fires, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import promql_parser
from promql_parser import AggModifierType, LabelModifierType, MatchOp, VectorMatchCardinality

# Labels that Prometheus and service discovery add to every series: compose's role, Kubernetes' names.
TARGET_LABELS = frozenset({"job", "instance", "role", "namespace", "pod", "container"})
MACROS = {"$__rate_interval": "1m", "$__range": "1h"}


class QueryError(AssertionError):
    """The query would show nothing, or something else than intended."""


@dataclass(frozen=True)
class Sample:
    """A metric name for queries.

    Attributes: labels: without those of TARGET_LABELS. values: of some labels, all possible values.
    """

    labels: frozenset[str]
    kind: str
    values: Mapping[str, Set[str]] = field(default_factory=dict)


Samples = Mapping[str, Sample]


def labels_of(query: str, samples: Samples) -> frozenset[str]:
    """Return the labels of the resulting series. Raises QueryError."""
    for macro, value in MACROS.items():
        query = query.replace(macro, value)
    try:
        tree = promql_parser.parse(query)
    except ValueError as error:
        raise QueryError(f"{error}: {query}") from None
    return _labels(tree, samples, "")


def _labels(tree: Any, samples: Samples, inside: str) -> frozenset[str]:
    """Visit a node. ``inside``: the function that a selector is an argument of."""
    match tree:
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return frozenset()
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            return _labels(tree.expr, samples, inside)
        case promql_parser.MatrixSelector():
            return _selected(tree.vector_selector, samples, inside)
        case promql_parser.VectorSelector():
            return _selected(tree, samples, inside)
        case promql_parser.Call():
            return _called(tree, samples)
        case promql_parser.AggregateExpr():
            return _aggregated(tree, samples)
        case promql_parser.BinaryExpr():
            return _combined(tree, samples)
    raise QueryError(f"nothing is known of {type(tree).__name__}")


def _selected(selector: Any, samples: Samples, inside: str) -> frozenset[str]:
    sample = samples.get(selector.name)
    if sample is None:
        raise QueryError(f"no metric is called {selector.name}")
    if (sample.kind == "counter") != (inside in ("rate", "irate", "increase")) and inside != "absent":
        raise QueryError(f"{selector.name} is a {sample.kind}: not for {inside or 'use as it is'}")
    for matcher in selector.matchers.matchers:
        if matcher.name not in sample.labels | TARGET_LABELS:
            raise QueryError(f"{selector.name} has no label {matcher.name}")
        there = sample.values.get(matcher.name)
        if there is not None and not matcher.value.startswith("$"):
            _check_value(selector.name, matcher, there)
    return sample.labels | TARGET_LABELS


def _check_value(name: str, matcher: Any, there: Set[str]) -> None:
    regular = matcher.op in (MatchOp.Re, MatchOp.NotRe)
    for wanted in matcher.value.split("|") if regular else [matcher.value]:
        if not any(re.fullmatch(wanted, value) if regular else wanted == value for value in there):
            raise QueryError(f"{name} never has {matcher.name}={wanted!r}")


def _called(call: Any, samples: Samples) -> frozenset[str]:
    found: frozenset[str] = frozenset().union(*(_labels(arg, samples, call.func.name) for arg in call.args))
    if call.func.name == "histogram_quantile":
        if "le" not in found:
            raise QueryError("a quantile needs buckets and their le")
        return found - {"le"}
    return frozenset() if call.func.name in ("absent", "vector") else found


def _is_number(tree: Any) -> bool:
    match tree:
        case promql_parser.NumberLiteral():
            return True
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            return _is_number(tree.expr)
        case promql_parser.BinaryExpr():
            return _is_number(tree.lhs) and _is_number(tree.rhs)
    return False


def _aggregated(tree: Any, samples: Samples) -> frozenset[str]:
    found = _labels(tree.expr, samples, "")
    if tree.modifier is None:
        return frozenset()
    named = frozenset(tree.modifier.labels)
    if not named <= found:
        raise QueryError(f"there is no {', '.join(sorted(named - found))} to aggregate by")
    return named if tree.modifier.type == AggModifierType.By else found - named


def _combined(tree: Any, samples: Samples) -> frozenset[str]:
    left, right = _labels(tree.lhs, samples, ""), _labels(tree.rhs, samples, "")
    modifier = tree.modifier
    if _is_number(tree.lhs):
        return right
    if _is_number(tree.rhs):
        return left
    matching = modifier.matching if modifier is not None else None
    if matching is None:
        if left != right and str(tree.op) != "or":
            raise QueryError(f"the sides of {tree.op} differ in {', '.join(sorted(left ^ right))}")
        return left
    named = frozenset(matching.labels)
    if matching.type == LabelModifierType.Include and not named <= left & right:
        raise QueryError(f"not on both sides: {', '.join(sorted(named - (left & right)))}")
    if matching.type == LabelModifierType.Exclude and left - named != right - named:
        raise QueryError(f"the sides of {tree.op} differ in more than {', '.join(sorted(named))}")
    if modifier.card == VectorMatchCardinality.ManyToOne:
        brought = frozenset(modifier.group_labels)
        if not brought <= right:
            raise QueryError(f"group_left cannot bring {', '.join(sorted(brought - right))}")
        return left | brought
    if modifier.card == VectorMatchCardinality.OneToMany:
        raise QueryError("write the side with more series on the left")
    return named if matching.type == LabelModifierType.Include else left - named
