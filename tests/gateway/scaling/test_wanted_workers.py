"""What the gateway tells its forecast of wanted workers, and shows of it."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from lab.testbed.conditions import until
from pillion.errors import ConfigError, Overloaded
from pillion.gateway.scaling.arrival_history import TICK_S
from pillion.observability import metric_catalog as names
from tests.support.fake_components import running_fake_cluster
from tests.support.planner_components import COST


async def test_requests_are_counted_told_and_forecast() -> None:
    async with running_fake_cluster("abc", max_inflight_requests=2) as fakes:
        forecaster = fakes.gateway.cluster.forecaster
        assert forecaster.arrivals() == ()
        for _ in range(3):
            [delta async for delta in fakes.client.generate("x" * 9)]
        [(model, count)] = forecaster.arrivals()
        assert count == 3
        fakes.decode.gate.clear()
        streams = [asyncio.create_task(anext(fakes.client.generate("x"))) for _ in range(2)]
        await until("two submits", lambda: len(fakes.decode.submits) == 5)
        with pytest.raises(Overloaded):
            await anext(fakes.client.generate("x"))
        # More workers would have served the one that was refused.
        assert forecaster.arrivals() == ((model, 6),)
        fakes.decode.gate.set()
        await asyncio.gather(*streams)

        async def told() -> bool:
            return any(one.arrivals == ((model, 6),) for one in await fakes.registry.components())

        await until("the heartbeat to say so", told)
        fleet = [replace(one, step_cost_s=COST) for one in fakes.gateway.cluster.view if one.role != "gateway"]
        for number in (1, 2):
            forecaster.tick(time.monotonic() + number * 2 * TICK_S, fleet, fakes.gateway.component_id)
        values = fakes.gateway.meters.collect()
        assert values[names.WANTED_WORKERS] == {(model, "prefill"): 1, (model, "decode"): 1}
        assert 0 < values[names.FORECAST_LOAD][model, "decode"] < 1
        assert values[names.FORECAST_ARRIVALS][model, "present"] > 0


async def test_objectives_that_say_nothing_are_one_line() -> None:
    with pytest.raises(ConfigError, match="--slo"):
        async with running_fake_cluster(slo="e2e=30"):
            pass
