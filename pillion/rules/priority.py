"""Defines the one order in which requests wait, wherever they wait: by priority, aged so that nobody starves; and among
the prompts that a worker computes, by length, bounded in the same way. Between tenants the order is that of their
shares, which a worker keeps by what a request's :class:`Flow` says of its tenant."""

from __future__ import annotations

from typing import NamedTuple

# A wait of this length makes up for one level of priority. So every wait is bounded: a request that arrived
# PRIORITY_AGING_S later for each level of difference is never served first.
PRIORITY_AGING_S = 10.0
# A prompt that would take one second by itself gives way to shorter ones that come up to LENGTH_PATIENCE seconds after
# it. So a short prompt does not wait behind a long one, and a long one waits in proportion to its own length at most.
LENGTH_PATIENCE = 3.0
# The largest priority of a request, and with a minus the smallest; 0 is the default, smaller is more urgent.
MAX_PRIORITY = 100
# In the counter of a tenant, a generated token counts for this many prompt tokens, as in the evaluation of the Virtual
# Token Counter's paper (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588).
OUTPUT_COST = 2
# A tenant's weight is at most MAX_WEIGHT; a worker counts a smaller one than MIN_FLOW_WEIGHT as that.
MAX_WEIGHT = 1000.0
MIN_FLOW_WEIGHT = 1e-6
# The key of a flow has at most so many bytes.
MAX_FLOW_KEY_BYTES = 32


class Flow(NamedTuple):
    """Says whose a request is among all that a worker has, without saying who that is: ``key`` is opaque, and empty
    where tenants are not told apart. A flow of ``weight`` 2 gets twice what one of 1 gets where both wait."""

    key: bytes = b""
    weight: float = 1.0


NO_FLOW = Flow()


def rank_of(priority: int) -> int:
    """Return 0 for a request that is more urgent than usual, 1 for a usual one, and 2 for one in the background, for
    which nobody waits. Between tenants, shares decide among the requests of one rank."""
    return 0 if priority < 0 else 1 + (priority >= MAX_PRIORITY)


def queue_order(priority: int, arrived_s: float) -> float:
    """Return a request's place in any waiting queue: the smallest goes first. The place never changes while a request
    waits, so a sorted queue stays sorted: for each level of less urgency, a request counts as having arrived
    PRIORITY_AGING_S later."""
    return arrived_s + priority * PRIORITY_AGING_S


def prompt_order(order: float, work_s: float) -> float:
    """Return the place of a prompt among others that a worker computes, where ``order`` is its place in other queues:
    for each second that its rest takes by itself it counts as having arrived LENGTH_PATIENCE seconds later."""
    return order + work_s * LENGTH_PATIENCE


def bounded(priority: int) -> int:
    """Return ``priority`` cut to the range that a request may have: the gateway has checked it, but a broken peer may
    send anything."""
    return max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))


def bounded_flow(key: bytes, weight: float) -> Flow:
    """Return the flow of a request by what a gateway says of it; an older one says nothing, and a broken one may say
    anything of the weight."""
    return Flow(key, max(MIN_FLOW_WEIGHT, min(weight, MAX_WEIGHT)) if weight > 0 else 1.0)
