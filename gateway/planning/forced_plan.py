"""The plan that an operator forces on one request: ``policy=colocated``, ``split=1024``, ``node=kv-1``, joined by
commas. Sans-IO (I9)."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from pillion.errors import ConfigError, FieldViolation, InvalidRequest
from pillion.gateway.planning.cluster_snapshot import SplitPolicy, parse_policy
from pillion.wire.public import PLAN_HEADER


class ForcedPlan(NamedTuple):
    """Constraints on one request's plan. ``policy`` None is the gateway's; ``node_id`` is the only KV node whose
    workers may be used, "" for any."""

    policy: SplitPolicy | None = None
    node_id: str = ""


def parse_plan(text: str) -> ForcedPlan:
    """Parse an operator's plan. Raises InvalidRequest for an unknown or repeated part, and for both a policy and a
    split."""
    names, plan = [], ForcedPlan()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        names.append(name)
        if name == "node" and value:
            plan = plan._replace(node_id=value)
        elif name == "split" and value.isdecimal() and len(value) < 10:
            plan = plan._replace(policy=SplitPolicy(f"split:{value}", Fraction(1), int(value)))
        elif name == "policy":
            try:
                plan = plan._replace(policy=parse_policy(value))
            except ConfigError as error:
                raise InvalidRequest.of(FieldViolation(PLAN_HEADER, error.message)) from None
        else:
            reason = f"{part.strip()[:80]!r} is not policy=POLICY, split=TOKENS or node=ID"
            raise InvalidRequest.of(FieldViolation(PLAN_HEADER, reason))
    if len(set(names)) < len(names) or {"policy", "split"} <= set(names):
        raise InvalidRequest.of(FieldViolation(PLAN_HEADER, "a plan has one node at most, and one policy or one split"))
    return plan
