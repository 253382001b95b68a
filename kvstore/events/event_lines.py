"""A node's block events as lines of JSON, for ``pillion events``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.events.block_follower import BlockFollower
from pillion.kvstore.events.block_mirror import changes_of
from pillion.v1.kvnode_pb2 import BlockChanges


def run_events(address: str, once: bool, echo: Callable[[str], None]) -> None:
    """Print a node's blocks and their changes with ``echo`` until Ctrl-C; with ``once``, only the current blocks.
    Raises PillionError."""
    asyncio.run(_print_events(address, once, echo))


async def _print_events(address: str, once: bool, echo: Callable[[str], None]) -> None:
    client = NodeClient(address, "pillion events")
    follower = BlockFollower(client)
    printer = EventLines()
    try:
        if once:
            # Fails at once if no node answers; the follower would retry.
            await client.status()
        async with contextlib.aclosing(follower.follow()) as messages:
            async for message in messages:
                for line in printer.lines(message):
                    echo(json.dumps(line))
                if once and follower.current:
                    return
    finally:
        await client.aclose()


class EventLines:
    """Converts messages to JSON lines. A reader that clears its set at "cleared", adds at "stored" and removes at
    "removed" has the node's blocks from each "current" line on."""

    def __init__(self) -> None:
        self._in_snapshot = False

    def lines(self, message: BlockChanges) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream's next message, each as a JSON object."""
        if message.HasField("pool"):
            pool = message.pool
            yield {
                "event": "pool",
                "node_id": pool.node_id,
                "kv_namespace": pool.kv_namespace.hex(),
                "block_tokens": pool.block_tokens,
                "kv_device": pool.kv_device,
            }
        snapshot = message.kind != BlockChanges.KIND_CHANGES
        if snapshot and not self._in_snapshot:
            yield {"event": "cleared", "log_epoch": f"{message.log_epoch:016x}", "number": message.number}
        self._in_snapshot = message.kind == BlockChanges.KIND_SNAPSHOT_PART
        changes = list(changes_of(message))
        number = message.number if snapshot else message.number - len(changes)
        for change in changes:
            number += not snapshot
            line = {
                "event": "stored" if change.stored else "removed",
                "number": number,
                "hash": change.block_hash.hex(),
            }
            yield line | ({"parent": change.parent.hex()} if change.stored else {})
        if message.kind == BlockChanges.KIND_SNAPSHOT_END:
            yield {"event": "current", "number": number, "blocks": message.blocks}
