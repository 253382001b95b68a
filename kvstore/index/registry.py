"""Registers components in Redis: which ones live, and the table of KV nodes by which the index's entries are read.

    every component --Registry.heartbeat--> its record, for ttl_ms
    gateway, KV node --Registry.components--> records of all live components
    gateway, KV node --Registry.nodes--> NodeTable: entry --> node id

An *entry* is node number and boot epoch of a KV node, 4 bytes each. An entry that does not stand in the table is void:
its node is dead or has restarted. Time is Redis's own (TIME), so clocks of machines do not matter. It stands still
while nobody's heartbeat arrives: then Redis takes none, and a component's silence says nothing (lua/registry.lua).
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
# One heartbeat takes at most this many lost components out of the registry.
MAX_FORGOTTEN_COMPONENTS = 100
KVNODE = "kvnode"
# Such a function returns the address of each node's gRPC services by node id.
Addresses = Callable[[], Awaitable[Mapping[str, str]]]

REGISTRY_KEYS = (keys.COMPONENTS, keys.EXPIRY, keys.NUMBERS, keys.NODES)


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Answers a heartbeat. ``known`` is False after too long a silence, or when Redis has lost its memory;
    ``node_number`` is a KV node's number for entries (4 bytes), empty for others."""

    known: bool
    node_number: bytes


class NodeTable:
    """Maps entries to the node ids of every KV node that lived when Redis was asked, at ``read_s`` on the event loop's
    clock."""

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
        """Returns the entries of all live nodes."""
        return frozenset(self._nodes)

    def node_id(self, entry: bytes) -> str | None:
        """Returns the node of an entry, None if the entry is void."""
        found = self._nodes.get(entry)
        return found[0] if found else None

    def doubtful(self, entry: bytes, now: float) -> bool:
        """Returns whether a newer table may differ: the entry is not in this one, or its node's heartbeat is
        overdue."""
        found = self._nodes.get(entry)
        return found is None or found[1] < now


class ReadRecords:
    """Holds the records of live components as they were read last. Sans-IO.

    Attributes:
        since_ms: the time from which on heartbeats are new, by Redis's clock; 0 asks for all records.
    """

    def __init__(self) -> None:
        self.since_ms = 0
        # For each id this holds the record's bytes, and the record; None where the bytes cannot be read.
        self._known: dict[bytes, tuple[bytes, ComponentRecord | None]] = {}

    def read(self, raw: Any) -> bool:
        """Reads an answer of the script "components" to ``since_ms``. Returns whether all components that live are
        known now, and no others. If not, the caller asks for all records. Raises ValueError or TypeError for an answer
        that cannot be read."""
        now_ms, count, listing = raw
        before = self._known
        if self.since_ms == 0:
            self._known = {}
        for line in as_bytes(listing).split(b"\n") if listing else ():
            component_id, _, row = line.partition(b"\t")
            self._known[component_id] = _read_row(row, now_ms, before.get(component_id))
        # Every new component has sent a heartbeat, so all that live are known; where none has left, the numbers are
        # equal. A server whose clock is behind stores heartbeats that seem old.
        asked_all, enough = self.since_ms == 0, len(self._known) == count and now_ms >= self.since_ms
        self.since_ms = now_ms if enough else 0
        return enough or asked_all

    def all(self) -> list[ComponentRecord]:
        """Returns the records of live components, each with its heartbeat's age when it was read. A record stays the
        same object until the next heartbeat."""
        return [record for _, record in self._known.values() if record is not None]


class Registry(RedisScripts):
    """Calls the registry. A component that beats here counts as lost after a silence of ``ttl_ms``. Every call raises
    Unavailable when Redis does not answer, or refuses.

    Attributes:
        refusal: why Redis did not take the last heartbeat that was sent here; empty where it took it, or where none was
            sent.
    """

    scripts = ("heartbeat", "leave", "components", "nodes")

    def __init__(self, redis_url: RedisServerAt, ttl_ms: int) -> None:
        super().__init__(redis_url)
        self.refusal = ""
        self._ttl_ms = ttl_ms
        self._records = ReadRecords()
        self._reading = asyncio.Lock()

    async def heartbeat(self, record: ComponentRecord) -> HeartbeatAnswer:
        """Registers ``record`` until its time to live is over."""
        epoch = struct.pack(">I", record.boot_epoch) if record.role == KVNODE else b""
        args: list[bytes | str | int] = [
            record.component_id,
            record.to_json(),
            self._ttl_ms,
            epoch,
            MAX_FORGOTTEN_COMPONENTS,
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
        """Takes a component out of the registry at once."""
        await self._link.call("leave", ScriptCall(REGISTRY_KEYS, [component_id]), int, deadline_ms=REGISTRY_DEADLINE_MS)

    async def components(self) -> list[ComponentRecord]:
        """Returns the records of live components, each with its heartbeat's age when it was read. A record stays the
        same object until its next heartbeat. Only new ones are transferred and parsed."""
        records = self._records
        # Only one reading runs at a time, because an answer holds only what is new since the question before it.
        async with self._reading:
            for _ in range(2):
                call = ScriptCall(REGISTRY_KEYS, [f"{records.since_ms}"])
                if await self._link.call("components", call, records.read, deadline_ms=REGISTRY_DEADLINE_MS):
                    break
            return records.all()

    async def nodes(self) -> NodeTable:
        """Returns the live KV nodes."""
        call, now = ScriptCall(REGISTRY_KEYS, []), asyncio.get_running_loop().time()
        return await self._link.call("nodes", call, lambda raw: NodeTable(raw, now), deadline_ms=REGISTRY_DEADLINE_MS)


def _read_heartbeat(raw: Any) -> HeartbeatAnswer:
    known, number = raw
    return HeartbeatAnswer(bool(int(known)), as_bytes(number))


def _read_row(
    row: bytes, now_ms: int, before: tuple[bytes, ComponentRecord | None] | None
) -> tuple[bytes, ComponentRecord | None]:
    """Reads "heartbeat-ms record"; the same record as before is not parsed again."""
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
