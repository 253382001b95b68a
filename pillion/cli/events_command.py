"""``pillion events``: what comes into a KV node's pool and leaves it, as lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click

from pillion.client.client import Client
from pillion.errors import ConfigError


def run_events(address: str, once: bool) -> None:
    """Prints a node's blocks and their changes until Ctrl-C; with ``once``, the blocks it has now. Raises
    PillionError."""
    asyncio.run(_print_events(address, once))


def find_node(name: str, reach: dict[str, Any]) -> str:
    """The address of a cluster's KV node, by its name; of its only one without. ``reach`` is
    :class:`pillion.Client`'s. Raises ConfigError where no node is meant, or several may be, and PillionError."""
    with Client(**reach) as client:
        nodes = {one.component_id: one.address for one in client.status().components if one.role == "kvnode"}
    known = ", ".join(f"{one} ({address})" for one, address in sorted(nodes.items())) or "none"
    if name and name not in nodes:
        raise ConfigError(f"{name!r} is no KV node of this cluster, whose KV nodes are: {known}")
    if not name and len(nodes) != 1:
        raise ConfigError(f"name the KV node to follow; this cluster's are: {known}")
    return nodes[name] if name else next(iter(nodes.values()))


async def _print_events(address: str, once: bool) -> None:
    from pillion.kvstore.client.block_follower import BlockFollower
    from pillion.kvstore.client.node_client import NodeClient

    client = NodeClient(address, "pillion events")
    follower = BlockFollower(client)
    printer = EventLines()
    try:
        if once:
            # An address that does not answer is an error here, and no reason to wait.
            await client.status()
        async with contextlib.aclosing(follower.follow()) as messages:
            async for message in messages:
                for line in printer.lines(message):
                    click.echo(json.dumps(line))
                if once and follower.current:
                    return
    finally:
        await client.aclose()


class EventLines:
    """Makes lines of messages. A reader that forgets everything at "cleared", adds at "stored" and removes at "removed"
    has the node's blocks at each "current" line and after it."""

    def __init__(self) -> None:
        self._in_snapshot = False

    def lines(self, message: Any) -> Iterator[dict[str, Any]]:
        """Yields what a message (BlockChanges) says."""
        from pillion.kvstore.client.block_mirror import changes_of
        from pillion.v1.kvnode_pb2 import BlockChanges

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
