"""The limit by weight: the order of waiters, work above the limit, and waits that end early."""

from __future__ import annotations

import asyncio

import pytest

from pillion.rules.weighted_limit import WeightedLimit


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_waiters_enter_in_order_and_oversized_ones_alone() -> None:
    limit, entered = WeightedLimit(10), []

    async def enter(weight: int) -> None:
        await limit.take(weight)
        entered.append(weight)

    tasks = [asyncio.create_task(enter(weight)) for weight in (6, 5, 1, 12, 2)]
    await settle()
    # The 1 would fit, and waits behind the 5.
    assert entered == [6]
    limit.release(6)
    await settle()
    assert entered == [6, 5, 1]
    limit.release(5)
    await settle()
    assert entered == [6, 5, 1]
    limit.release(1)
    await settle()
    assert entered == [6, 5, 1, 12]
    limit.release(12)
    await asyncio.gather(*tasks)
    assert entered == [6, 5, 1, 12, 2]


async def test_a_cancelled_wait_admits_the_next_waiter() -> None:
    limit = WeightedLimit(10)
    await limit.take(8)
    waiting = asyncio.create_task(limit.take(5))
    await settle()
    behind = asyncio.create_task(limit.take(2))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await behind
    with pytest.raises(RuntimeError, match="amid"):
        async with limit.taken(0):
            raise RuntimeError("amid")
    limit.release(10)
    async with limit.taken(10):
        pass
    await asyncio.wait_for(limit.take(10), 30)
