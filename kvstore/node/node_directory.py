"""A KV node's view of the other nodes of its cluster, and its own entries in Redis: its record and its blocks.

Without Redis, a node has no view of other nodes, and announces nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from pillion.config import KVNodeFlags
from pillion.errors import ConfigError, PillionError
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.index.announcer import Announcer, new_boot_epoch
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.ledger.records import IndexEvent
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.kvnode")

TWIN_TIMEOUT_S = 2.0


class NodeDirectory:
    """A node's connection to the registry and the index. Used on the node's event loop only."""

    def __init__(self, flags: KVNodeFlags) -> None:
        self._flags = flags
        self._registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms) if flags.redis_url else None
        self._index: Index | None = None
        self._announcer: Announcer | None = None
        self._boot_epoch = new_boot_epoch()

    @property
    def boot_epoch(self) -> int:
        """Boot epoch of this node's entries in the index."""
        return self._announcer.boot_epoch if self._announcer else self._boot_epoch

    async def addresses(self) -> Mapping[str, str]:
        """Return node id -> address of all live nodes. Raises Unavailable."""
        components = await self._registry.components() if self._registry is not None else []
        return {component.node_id: component.address for component in components if component.role == "kvnode"}

    async def others(self) -> list[ComponentRecord]:
        """Return the records of the other live nodes that are not leaving. Raises Unavailable."""
        components = await self._registry.components() if self._registry is not None else []
        return [
            one for one in components if one.role == "kvnode" and one.node_id != self._flags.node_id and not one.leaving
        ]

    async def look_up(self, hashes: bytes) -> dict[str, int]:
        """Return the leading blocks of a chain on each node according to the index, by node id."""
        if self._index is None:
            self._index = Index(self._flags.redis_url)
        return {hit.node_id: hit.blocks for hit in await self._index.longest_prefix(hashes)}

    async def refuse_duplicate(self, own_address: str) -> None:
        """Raise ConfigError if another live node has this node's id, since they would overwrite each other's index
        entries.

        A record is no proof, because that of this node's previous process remains for a moment. Only a node that
        answers at another address counts.
        """
        node_id = self._flags.node_id
        try:
            known = await self.addresses()
        except PillionError as error:
            log.warning(
                "the registry does not answer, so it is unknown whether %s is taken: %s", node_id, error.message
            )
            return
        address = known.get(node_id, own_address)
        if address == own_address:
            return
        twin = NodeClient(address, node_id)
        try:
            twin_id = (await twin.status(timeout_s=TWIN_TIMEOUT_S)).node_id
        except PillionError as error:
            log.info("a record of %s at %s belongs to a node that has ended: %s", node_id, address, error.message)
            return
        finally:
            await twin.aclose()
        if twin_id == node_id:
            raise ConfigError(
                f"--node-id {node_id} is taken: a KV node of this name serves at {address}; give each node a name of"
                " its own"
            )

    async def announce(
        self, record: Callable[[int], ComponentRecord], hashes: Callable[[], Iterable[tuple[bytes, bytes]]]
    ) -> None:
        """Announce this node and its blocks until cancelled. ``record`` returns the node's record for a boot epoch, and
        ``hashes`` the (hash, segment) of all blocks."""
        self._announcer = Announcer(
            self._flags.redis_url,
            heartbeat_s=self._flags.heartbeat_ms / 1000,
            ttl_ms=self._flags.heartbeat_timeout_ms,
            record=record,
            hashes=hashes,
        )
        await self._announcer.run()

    def push(self, events: list[IndexEvent]) -> None:
        """Queue arrivals and evictions of blocks for the index."""
        if self._announcer is not None:
            self._announcer.push(events)

    def beat_now(self) -> bool:
        """Send the next heartbeat at once; return False if this node sends no heartbeats."""
        if self._announcer is not None:
            self._announcer.beat_now()
        return self._announcer is not None

    async def leave(self) -> None:
        """Remove this node from the registry, after :meth:`announce` was cancelled. Idempotent."""
        announcer, self._announcer = self._announcer, None
        if announcer is not None:
            await announcer.leave()

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._registry is not None:
            await self._registry.aclose()
        if self._index is not None:
            await self._index.aclose()
