"""The one order in which requests wait, wherever they wait: by priority, aged so that none starves; and, among the
prompts that a worker computes, by length, limited in the same way. Tenants are ordered by their shares, which a worker
derives from the :class:`Flow` of a request."""

from __future__ import annotations

from typing import NamedTuple

# A wait of this length compensates one level of priority. So every wait is limited: a request that arrived
# PRIORITY_AGING_S later per level of difference is never served first.
PRIORITY_AGING_S = 10.0
# A prompt that takes one second by itself yields to shorter ones that arrive up to LENGTH_PATIENCE seconds later. So
# short prompts do not wait for long ones, and a long one waits at most in proportion to its length.
LENGTH_PATIENCE = 3.0
# The largest priority of a request; its negative is the smallest. 0 is the default, and smaller is more urgent.
MAX_PRIORITY = 100
# A generated token counts as this many prompt tokens in the counter of a tenant, as in the evaluation of the Virtual
# Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588).
OUTPUT_COST = 2
# A worker raises smaller weights to MIN_FLOW_WEIGHT.
MAX_WEIGHT = 1000.0
MIN_FLOW_WEIGHT = 1e-6
MAX_FLOW_KEY_BYTES = 32


class Flow(NamedTuple):
    """A request's share among all requests of a worker, without an identity: ``key`` is opaque, and empty if tenants
    are not distinguished. A flow of ``weight`` 2 gets twice as much as one of 1 while both wait."""

    key: bytes = b""
    weight: float = 1.0


NO_FLOW = Flow()


def rank_of(priority: int) -> int:
    """Return 0 for a request that is more urgent than usual, 1 for a usual one, and 2 for background work, which nobody
    waits for. Within a rank, shares decide between tenants."""
    return 0 if priority < 0 else 1 + (priority >= MAX_PRIORITY)


def queue_order(priority: int, arrived_s: float) -> float:
    """Return a request's place in any waiting queue: the smallest is served first. The place never changes while a
    request waits, so a sorted queue stays sorted: each level of lower urgency counts as an arrival PRIORITY_AGING_S
    later."""
    return arrived_s + priority * PRIORITY_AGING_S


def prompt_order(order: float, work_s: float) -> float:
    """Return the place of a prompt among those that a worker computes, given its place ``order`` in other queues: each
    second that its rest takes by itself counts as an arrival LENGTH_PATIENCE seconds later."""
    return order + work_s * LENGTH_PATIENCE


def bounded(priority: int) -> int:
    """Return ``priority`` limited to the allowed range: the gateway has checked it, but a broken peer may send
    anything."""
    return max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))


def bounded_flow(key: bytes, weight: float) -> Flow:
    """Return the flow that a gateway sent for a request; older gateways send none, and broken ones may send any
    weight."""
    return Flow(key, max(MIN_FLOW_WEIGHT, min(weight, MAX_WEIGHT)) if weight > 0 else 1.0)
