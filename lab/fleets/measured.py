"""Reads from a running cluster's registry the step costs that its workers have measured, for a simulated fleet of such
machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import ConfigError
from pillion.gateway.planning.plan_cost import middle_model
from pillion.kvstore.index.redis_url import without_password
from pillion.kvstore.index.registry import Registry
from pillion.wire.registry import ComponentRecord

REGISTRY_TIMEOUT_MS = 5000


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Holds the cost of steps of either kind of worker (StepCost.weights_s), empty where no such worker has served, and
    the bytes of a KV block."""

    prefill_cost_s: tuple[float, ...]
    decode_cost_s: tuple[float, ...]
    block_bytes: int


def costs_of(records: Sequence[ComponentRecord]) -> MeasuredCosts:
    """Returns the costs that workers report: where several workers of a kind serve, those of the median worker, as a
    gateway chooses it. A kind that has not served takes the other's."""
    prefill, decode = (middle_model([one for one in records if one.role == role]) for role in ("prefill", "decode"))
    block_bytes = max((one.block_bytes for one in records), default=0)
    return MeasuredCosts(tuple(prefill or decode or ()), tuple(decode or prefill or ()), block_bytes)


def measured_costs(redis_url: str) -> MeasuredCosts:
    """Returns the costs that the workers of a cluster report. Raises ConfigError where no worker reports costs, and for
    a bad URL; Unavailable where Redis does not answer."""

    async def read() -> list[ComponentRecord]:
        registry = Registry(redis_url, REGISTRY_TIMEOUT_MS)
        try:
            return list(await registry.components())
        finally:
            await registry.aclose()

    found = costs_of(asyncio.run(read()))
    if not found.decode_cost_s:
        raise ConfigError(f"--redis-url {without_password(redis_url)}: no worker there has served a request yet")
    return found
