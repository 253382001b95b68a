"""Tells the registry which components are down because they flap and wait long for their next start.

A component that lives sends its own heartbeats, which overwrite what is told here. A record expires like any other when
its supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from pillion.errors import PillionError
from pillion.supervisor.supervisor import Down


async def tell_down(down: Callable[[], Iterable[Down]], redis_url: str, flags: Any) -> None:
    """Tell the registry about components that are down, until it is cancelled. ``flags`` are a component's; they say
    how often heartbeats come and how long one is valid.

    While Redis does not answer, nothing is told.
    """
    from pillion.kvstore.index.registry import Registry
    from pillion.wire.registry import DOWN, ComponentRecord

    registry = Registry(redis_url, flags.heartbeat_timeout_ms)
    try:
        while True:
            await asyncio.sleep(flags.heartbeat_ms / 1000)
            for one in down():
                trouble = f"{one.why}; it is started again in {one.left_s:.0f} s"
                record = ComponentRecord(component_id=one.component_id, role=DOWN, address="", trouble=trouble)
                with contextlib.suppress(PillionError):
                    await registry.heartbeat(record)
    finally:
        await registry.aclose()
