"""Registers components that are down because they flap and wait long for their next start.

A live component's own heartbeats overwrite these records. After the supervisor's death they expire like all records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from pillion.errors import PillionError
from pillion.supervisor.supervisor import Down


async def register_down(down: Callable[[], Iterable[Down]], redis_url: str, flags: Any) -> None:
    """Register components that are down, until cancelled. ``flags`` are a component's; they set the interval and the
    lifetime of heartbeats.

    While Redis does not answer, nothing is registered.
    """
    from pillion.kvstore.index.registry import Registry
    from pillion.wire.registry import DOWN, ComponentRecord

    registry = Registry(redis_url, flags.heartbeat_timeout_ms)
    try:
        while True:
            await asyncio.sleep(flags.heartbeat_ms / 1000)
            for component in down():
                trouble = f"{component.why}; restarting in {component.left_s:.0f} s"
                record = ComponentRecord(component_id=component.component_id, role=DOWN, address="", trouble=trouble)
                with contextlib.suppress(PillionError):
                    await registry.heartbeat(record)
    finally:
        await registry.aclose()
