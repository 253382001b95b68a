"""Registry of live components in Redis, and the table of KV nodes by which entries of the index are resolved.

    every component --Registry.heartbeat--> its record, for ttl_ms
    gateway, KV node --Registry.components--> records of all live components
    gateway, KV node --Registry.nodes--> NodeTable: entry --> node id

An *entry* is the number and the boot epoch of a KV node, 4 bytes each. An entry missing from the table is void: its
node is dead or has restarted. Times are Redis's (TIME), so the machines' clocks do not matter. The registry's time
stops while Redis gets no heartbeat at all: then Redis probably accepts none, and silence is no proof
(lua/registry.lua).
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pillion.errors import Unavailable
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.redis_link import RedisScripts, ScriptCall, as_bytes
from pillion.kvstore.index.redis_url import RedisServerAt
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.index")

REGISTRY_DEADLINE_MS = 1000
Addresses = Callable[[], Awaitable[Mapping[str, str]]]

REGISTRY_KEYS = (keys.COMPONENTS, keys.EXPIRY, keys.NUMBERS, keys.NODES)


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Answer to a heartbeat. ``known`` is False if the component had no live record: after a long silence, or if Redis
    lost its data. ``node_number`` is a KV node's number for entries (4 bytes), empty for other components."""

    known: bool
    node_number: bytes


class NodeTable:
    """Node ids of live KV nodes, by entry, as read from Redis at ``read_s`` on the event loop's clock."""

    def __init__(self, raw: Any = (0,), read_s: float = float("-inf")) -> None:
        now_ms, *rows = raw
        self.read_s = read_s
        self._nodes: dict[bytes, tuple[str, float]] = {}
        for node_id, value in zip(rows[::2], rows[1::2], strict=True):
            lost_ms = value[keys.ENTRY_BYTES :]
            if lost_ms.isdigit() and int(lost_ms) > now_ms:
                lost_s = read_s + (int(lost_ms) - now_ms) / 1000
                self._nodes[value[: keys.ENTRY_BYTES]] = (node_id.decode(errors="replace"), lost_s)

    def entries(self) -> frozenset[bytes]:
        return frozenset(self._nodes)

    def node_id(self, entry: bytes) -> str | None:
        """Return the node id of an entry; None for a void entry."""
        node = self._nodes.get(entry)
        return node[0] if node else None

    def doubtful(self, entry: bytes, now: float) -> bool:
        """Return whether a newer table may differ for an entry: it is missing, or its node's heartbeat is overdue."""
        node = self._nodes.get(entry)
        return node is None or node[1] < now


class ReadRecords:
    """Records of live components as last read; only changes are read. Sans-IO.

    Attributes:
        since_ms: time by Redis's clock from which on heartbeats are to be read next; 0 for all records.
    """

    def __init__(self) -> None:
        self.since_ms = 0
        # By component id: the record's bytes, and the record, None if it could not be decoded.
        self._known: dict[bytes, tuple[bytes, ComponentRecord | None]] = {}

    def read(self, raw: Any) -> bool:
        """Decode an answer of the script "components" for ``since_ms``. Return whether exactly the live components are
        known now; if not, ``since_ms`` is 0. Raises ValueError or TypeError for an answer that cannot be decoded."""
        now_ms, count, listing = raw
        before = self._known
        if self.since_ms == 0:
            self._known = {}
        for line in as_bytes(listing).split(b"\n") if listing else ():
            component_id, _, row = line.partition(b"\t")
            self._known[component_id] = _read_row(row, now_ms, before.get(component_id))
        # New components have sent heartbeats, so all live ones are known; equal counts mean that none has left. If the
        # server's clock went back, its new heartbeats look old.
        asked_all, complete = self.since_ms == 0, len(self._known) == count and now_ms >= self.since_ms
        self.since_ms = now_ms if complete else 0
        return complete or asked_all

    def all(self) -> list[ComponentRecord]:
        """Return the records of live components, each with its heartbeat's age when it was read. A record stays the
        same object until its next heartbeat."""
        return [record for _, record in self._known.values() if record is not None]


class Registry(RedisScripts):
    """Client of the registry. A component that sends its heartbeats by this client counts as lost after ``ttl_ms`` of
    silence. Calls raise Unavailable if Redis does not answer, or refuses.

    Attributes:
        refusal: why Redis did not accept this client's last heartbeat; "" if it did, or before the first.
    """

    scripts = ("heartbeat", "leave", "components", "nodes")

    def __init__(self, redis_url: RedisServerAt, ttl_ms: int) -> None:
        super().__init__(redis_url)
        self.refusal = ""
        self._ttl_ms = ttl_ms
        self._records = ReadRecords()
        self._reading = asyncio.Lock()

    async def heartbeat(self, record: ComponentRecord) -> HeartbeatAnswer:
        """Register a component for ``ttl_ms``."""
        epoch = struct.pack(">I", record.boot_epoch) if record.role == "kvnode" else b""
        args: list[bytes | str | int] = [
            record.component_id,
            record.to_json(),
            self._ttl_ms,
            epoch,
            # Max expired components to remove in this call.
            100,
        ]
        call = ScriptCall(REGISTRY_KEYS, args)
        try:
            answer = await self._link.call("heartbeat", call, _read_heartbeat, deadline_ms=REGISTRY_DEADLINE_MS)
        except Unavailable as error:
            self.refusal = error.message
            raise
        self.refusal = ""
        return answer

    async def leave(self, component_id: str) -> None:
        """Remove a component at once."""
        await self._link.call("leave", ScriptCall(REGISTRY_KEYS, [component_id]), int, deadline_ms=REGISTRY_DEADLINE_MS)

    async def components(self) -> list[ComponentRecord]:
        """Return the records of live components, each with its heartbeat's age when it was read. A record stays the
        same object until its next heartbeat. Only changed records are transferred and parsed."""
        records = self._records
        # One read at a time, because an answer has only the changes since the previous one.
        async with self._reading:
            for _ in range(2):
                call = ScriptCall(REGISTRY_KEYS, [f"{records.since_ms}"])
                if await self._link.call("components", call, records.read, deadline_ms=REGISTRY_DEADLINE_MS):
                    break
            return records.all()

    async def nodes(self) -> NodeTable:
        call, now = ScriptCall(REGISTRY_KEYS, []), asyncio.get_running_loop().time()
        return await self._link.call("nodes", call, lambda raw: NodeTable(raw, now), deadline_ms=REGISTRY_DEADLINE_MS)


def _read_heartbeat(raw: Any) -> HeartbeatAnswer:
    known, number = raw
    return HeartbeatAnswer(bool(int(known)), as_bytes(number))


def _read_row(
    row: bytes, now_ms: int, before: tuple[bytes, ComponentRecord | None] | None
) -> tuple[bytes, ComponentRecord | None]:
    """Decode a row, "heartbeat-ms record"; return the record's bytes and the record, None if it is invalid. A record
    that equals ``before`` is not parsed again."""
    beat_ms, _, text = row.partition(b" ")
    known = before is not None and before[0] == text
    try:
        record = before[1] if before is not None and known else ComponentRecord.from_json(text)
        if record is not None:
            record = msgspec.structs.replace(record, heartbeat_age_ms=max(0, now_ms - int(beat_ms)))
    except ValueError as error:
        if not known:
            log.warning("dropped a broken component record: %s", error)
        record = None
    return text, record
