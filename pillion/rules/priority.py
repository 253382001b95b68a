"""Order of requests in all queues: by priority, aged so that none starves; and, among the prompts that a worker
computes, also by length, aged in the same way. Tenants are ordered by their shares, which a worker derives from a
request's :class:`Flow`."""

from __future__ import annotations

from typing import NamedTuple

# Wait that compensates for one level of priority. So every wait is limited: a more urgent request that arrives more
# than PRIORITY_AGING_S per level later is served later.
PRIORITY_AGING_S = 10.0
# A prompt that takes one second by itself yields to much shorter ones that arrive up to LENGTH_PATIENCE seconds later.
# So short prompts overtake long ones, and a long prompt's wait for them is limited in proportion to its length.
LENGTH_PATIENCE = 3.0
# Largest priority; the smallest is -MAX_PRIORITY. The default is 0, and smaller is more urgent.
MAX_PRIORITY = 100
# A generated token counts as this many prompt tokens in the counter of a tenant, as in the evaluation of the Virtual
# Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588).
OUTPUT_COST = 2
# Range of a flow's weight; a worker clamps weights to it.
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
    """Return 0 for a request that is more urgent than usual, 1 for a usual one, and 2 for background work, which no
    user waits for. Within a rank, shares decide between tenants."""
    return 0 if priority < 0 else 1 + (priority >= MAX_PRIORITY)


def queue_order(priority: int, arrived_s: float) -> float:
    """Return a request's sort key in any queue; the smallest is served first. Each level of lower urgency counts as an
    arrival PRIORITY_AGING_S later. The key never changes while the request waits, so a sorted queue stays sorted."""
    return arrived_s + priority * PRIORITY_AGING_S


def prompt_order(order: float, work_s: float) -> float:
    """Return a prompt's sort key among those that a worker computes, given its key ``order`` in other queues. Each
    second that the rest of the prompt takes by itself counts as an arrival LENGTH_PATIENCE seconds later."""
    return order + work_s * LENGTH_PATIENCE


def bounded(priority: int) -> int:
    """Return ``priority`` clamped to the allowed range: gateways check it, but a broken one may send any number."""
    return max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))


def bounded_flow(key: bytes, weight: float) -> Flow:
    """Return the flow that a gateway sent for a request; older gateways send none, and broken ones may send any
    weight."""
    return Flow(key, max(MIN_FLOW_WEIGHT, min(weight, MAX_WEIGHT)) if weight > 0 else 1.0)
