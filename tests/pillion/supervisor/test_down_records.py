"""What the registry is told about components that are down, and how a gateway uses it."""

from __future__ import annotations

import asyncio
import contextlib

from lab.testbed.conditions import until
from pillion.cli.talk import component_lines
from pillion.config import DecodeFlags
from pillion.gateway.ui.cluster_figures import state_of
from pillion.observability import metric_catalog as names
from pillion.supervisor.down_records import register_down
from pillion.supervisor.supervisor import Down
from pillion.wire.registry import DOWN
from tests.support.fake_components import record, running_fake_cluster

WHY = "decode-9 died 6 times within 60 s"


async def test_a_gateway_lists_down_components_and_serves_with_the_others() -> None:
    async with running_fake_cluster("The answer.") as fakes:
        flags = DecodeFlags(redis_url=fakes.redis.url, heartbeat_ms=20, heartbeat_timeout_ms=600_000)
        found = [Down("decode-9", WHY, 40.4)]
        telling = asyncio.create_task(register_down(lambda: found, flags.redis_url, flags))
        try:

            async def shown() -> str:
                components = (await fakes.client.status()).components
                return next((one.trouble for one in components if one.component_id == "decode-9"), "")

            assert await until("it to be shown", shown) == f"{WHY}; restarting in 40 s"
            status = await fakes.client.status()
            [down] = [one for one in status.components if one.role == DOWN]
            assert state_of(down, ()) == "down"
            assert any(down.trouble in line for line in component_lines(status))
            assert fakes.gateway.meters.collect()[names.COMPONENTS_DOWN] == {("decode-9",): 1}
            assert "".join([delta.text async for delta in fakes.client.generate("x")]) == "The answer."
            # It says itself that it is back, which nobody overwrites any more.
            found.clear()
            await fakes.registry.heartbeat(record("decode-9", "decode", f"unix:{fakes.folder}/decode.sock"))
            await until("it to be back", lambda: not fakes.gateway.cluster.view.of(DOWN))
            assert names.COMPONENTS_DOWN not in fakes.gateway.meters.collect()
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


async def test_an_unresponsive_registry_is_updated_later() -> None:
    asked = asyncio.Event()

    def down() -> list[Down]:
        asked.set()
        return [Down("decode-9", WHY, 1.0)]

    flags = DecodeFlags(redis_url="redis://127.0.0.1:1/0", heartbeat_ms=1)
    telling = asyncio.create_task(register_down(down, flags.redis_url, flags))
    try:
        for _ in range(2):
            await until("another look", asked.is_set)
            asked.clear()
        assert not telling.done()
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
