"""KV nodes as Redis sees them: manual heartbeats and announcements, with test timeouts."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, TypeVar

from lab.testbed.conditions import until
from pillion.kvstore.hashing import SEGMENT_BLOCKS, chain_hashes, split_hashes
from pillion.kvstore.index import redis_keys as keys
from pillion.kvstore.index.index import Index, PrefixHit
from pillion.kvstore.index.redis_writer import AnnounceResult, IndexWriter, SweepPlace
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.ledger.records import IndexEvent
from pillion.wire.registry import ComponentRecord

ROOT = bytes(32)
TTL_MS = 60_000
PATIENT_DEADLINE_MS = 30_000

Caller = TypeVar("Caller", Registry, Index, IndexWriter)


def patient(caller: Caller) -> Caller:
    """Return a client of a single-server Redis with longer deadlines, for a test that needs every answer.

    A component tolerates a late Redis, and on a busy machine a sound Redis may take a second.
    """
    call_each = caller._link.call_each

    async def patiently(*words: Any, deadline_ms: float) -> Any:
        return await call_each(*words, deadline_ms=max(deadline_ms, PATIENT_DEADLINE_MS))

    caller._link.call_each = patiently  # type: ignore[method-assign]
    pool = caller._link._client.connection_pool  # type: ignore[union-attr]
    pool.connection_kwargs["socket_connect_timeout"] = PATIENT_DEADLINE_MS / 1000
    return caller


class Chain:
    """A chain of blocks with one token each."""

    def __init__(self, tokens: Iterable[int], root: bytes = ROOT) -> None:
        self.packed = chain_hashes(root, list(tokens), 1)
        self.hashes = split_hashes(self.packed)

    def __len__(self) -> int:
        return len(self.hashes)

    def head(self, blocks: int) -> bytes:
        return self.packed[: blocks * 32]

    def segment(self, block: int) -> bytes:
        return self.hashes[block // SEGMENT_BLOCKS * SEGMENT_BLOCKS]

    def pairs(self, first: int = 0, end: int | None = None) -> list[tuple[bytes, bytes]]:
        return [(self.hashes[i], self.segment(i)) for i in range(first, len(self) if end is None else end)]

    def events(self, first: int = 0, end: int | None = None, *, here: bool = True) -> list[IndexEvent]:
        return [IndexEvent(block, here, segment) for block, segment in self.pairs(first, end)]

    def bucket(self, block: int) -> bytes:
        return keys.bucket(self.segment(block))

    def field(self, block: int) -> bytes:
        return self.hashes[block][: keys.FIELD_BYTES]


def node_record(node_id: str, boot_epoch: int = 1) -> ComponentRecord:
    return ComponentRecord(
        component_id=node_id, role="kvnode", address="unix:x", node_id=node_id, boot_epoch=boot_epoch
    )


class FakeNode:
    """A node that sends heartbeats and announcements on demand."""

    def __init__(self, url: str, node_id: str, boot_epoch: int = 1, ttl_ms: int = TTL_MS) -> None:
        self.registry, self.writer = Registry(url, ttl_ms), IndexWriter(url)
        self.record = node_record(node_id, boot_epoch)
        self.entry = b""

    async def beat(self) -> bool:
        beat = await self.registry.heartbeat(self.record)
        self.entry = beat.node_number + struct.pack(">I", self.record.boot_epoch)
        return beat.known

    async def has(self, chain: Chain, first: int = 0, end: int | None = None) -> AnnounceResult:
        return await self.writer.announce(self.entry, chain.events(first, end))

    async def lost(self, chain: Chain, first: int = 0, end: int | None = None) -> AnnounceResult:
        return await self.writer.announce(self.entry, chain.events(first, end, here=False))

    async def sweep_all(self, chain: Chain) -> None:
        """Return all groups in which the chain has blocks."""

        async def live() -> frozenset[bytes]:
            return (await self.registry.nodes()).entries()

        for name in sorted({keys.group_of(chain.bucket(block)) for block in range(len(chain))}):
            place = SweepPlace(next(n for n in range(keys.GROUPS) if keys.group_name(n) == name))
            group = place.group
            while place.group == group:
                place, _ = await self.writer.sweep(place, live)

    async def until_lost(self) -> None:
        """Wait until its record has expired, by Redis's clock."""

        async def lost() -> bool:
            return self.entry not in (await self.registry.nodes()).entries()

        await until(f"{self.record.node_id} to be lost", lost)

    async def aclose(self) -> None:
        await self.registry.aclose()
        await self.writer.aclose()


async def fake_nodes(url: str, *names: str) -> list[FakeNode]:
    nodes = [FakeNode(url, name, boot_epoch=number + 1) for number, name in enumerate(names)]
    for node in nodes:
        await node.beat()
    return nodes


async def found(index: Index, asked: bytes, blocks: int, *, available: bool | None = None) -> bool:
    """Return True if the index lists this number of blocks for node "a", and none for others."""
    hits = await index.longest_prefix(asked)
    good = hits == ([PrefixHit("a", blocks)] if blocks else [])
    return good and (available is None or index.available is available)


async def until_found(index: Index, asked: bytes, blocks: int, *, available: bool | None = None) -> None:
    """Wait until the index lists that."""
    await until(f"{blocks} blocks at a", lambda: found(index, asked, blocks, available=available))
