"""A KV node that other nodes read from, as a process: a filled pool, the KVPlane service, sessions.

    python -m lab.testbed.plane_source NODE_ID LISTEN TRANSPORT BOOT NUM_SLOTS BLOCK_BYTES FLIPPED_SLOT

It prints its address and serves until it is killed. Its only chain has a block in every slot, in shuffled order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from lab.testbed.redis import spawn
from pillion.errors import NotFound
from pillion.kvstore.exchange.plane import DataPlane
from pillion.kvstore.exchange.plane_servicer import SERVICE_NAME, KVPlaneServicer
from pillion.kvstore.memory.memory import HostMemory, block_checksum
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from pillion.net.rpc import start_server
from pillion.v1 import kvnode_pb2, kvnode_pb2_grpc, kvplane_pb2_grpc
from pillion.v1.kvplane_pb2 import MeetReply, PinBlocksReply
from pillion.wire.common import hello_to_pb

NAMESPACE = b"n" * 32


def block_of(boot: int, slot: int, block_bytes: int) -> bytes:
    """Return the bytes of a slot of the source with boot number ``boot``."""
    return hashlib.blake2b(f"{boot}:{slot}".encode()).digest() * (block_bytes // 64)


def chain_of(num_slots: int) -> tuple[list[bytes], list[int]]:
    """Return the chain's hashes and the slot of each block."""
    slots = list(range(num_slots))
    random.Random(1).shuffle(slots)
    return [hashlib.sha256(b"%d" % slot).digest() for slot in slots], slots


@dataclass
class SourceProcess:
    """A running source. ``signal`` accepts SIGSTOP and SIGCONT as well."""

    process: subprocess.Popen[str]
    node_id: str
    address: str

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_source(
    transport: str,
    *,
    node_id: str = "source",
    listen: str = "127.0.0.1:0",
    boot: int = 1,
    num_slots: int = 64,
    block_bytes: int = 65536,
    flipped_slot: int = -1,
) -> SourceProcess:
    """Start a source, which the caller kills."""
    words = [node_id, listen, transport, boot, num_slots, block_bytes, flipped_slot]
    command = [sys.executable, "-m", "lab.testbed.plane_source", *map(str, words)]
    process = spawn(command, stdout=subprocess.PIPE, stderr=None, text=True)
    assert process.stdout is not None
    with process.stdout:
        address = process.stdout.readline().strip()
    if not address:
        process.kill()
    assert address, "the source did not start"
    return SourceProcess(process, node_id, address)


@contextlib.contextmanager
def running_source(transport: str, **options: Any) -> Iterator[SourceProcess]:
    """Run a source, with the options of :func:`start_source`, and kill it at the end."""
    started = start_source(transport, **options)
    try:
        yield started
    finally:
        started.kill()


class FilledPool:
    """A :class:`pillion.kvstore.exchange.exchanged_pool.ExchangedPool` whose one chain fills the pool."""

    def __init__(self, node_id: str, transport: str, boot: int, num_slots: int, block_bytes: int, flipped: int) -> None:
        self._mapped = map_shared(Segment(num_slots * block_bytes).fileno(), num_slots * block_bytes)
        self.memory = HostMemory(self._mapped, num_slots, block_bytes)
        for slot in range(num_slots):
            self._mapped[slot * block_bytes : (slot + 1) * block_bytes] = block_of(boot, slot, block_bytes)
        self._sums = [block_checksum(self.memory.block(slot)) for slot in range(num_slots)]
        if flipped >= 0:
            self._mapped[flipped * block_bytes + block_bytes // 2] ^= 4
        kind = NixlPlane if transport == "nixl" else DataPlane
        plane: DataPlane = kind(self.memory)
        self._plane = plane
        self._description = MeetReply(
            hello=hello_to_pb(node_id),
            boot_epoch=boot,
            num_slots=num_slots,
            block_bytes=block_bytes,
            kv_namespace=NAMESPACE,
            pool_address=plane.pool_address,
            nixl_metadata=plane.nixl_metadata,
        )
        self._chain, self._order = chain_of(num_slots)
        self._made = 0
        # By ticket id: epoch, nonce and slots.
        self.tickets: dict[int, tuple[int, int, frozenset[int]]] = {}

    async def describe(self) -> MeetReply:
        return self._description

    async def pin_chain(
        self, epoch: int, nonce: int, hashes: list[bytes], first_block: int, timeout_s: float
    ) -> PinBlocksReply:
        count = sum(1 for wanted, here in zip(hashes, self._chain, strict=False) if wanted == here)
        self._made += 1
        self.tickets[self._made] = (epoch, nonce, frozenset(self._order[:count]))
        wanted = self._order[first_block:count]
        return PinBlocksReply(ticket_id=self._made, slots=wanted, checksums=[self._sums[slot] for slot in wanted])

    def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
        if ticket_id not in self.tickets or self.tickets[ticket_id][0] != epoch:
            raise NotFound(f"ticket {ticket_id} is not held")
        return self.tickets[ticket_id][2]


class SessionNode(kvnode_pb2_grpc.KVNodeServicer):
    """The KVNode calls of a reader: sessions, releases and the number of tickets. Others are unimplemented."""

    def __init__(self, node_id: str, pool: FilledPool) -> None:
        self._node_id, self._pool, self._epochs = node_id, pool, 0

    async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._epochs += 1
        yield kvnode_pb2.SessionEvent(hello=hello_to_pb(self._node_id), epoch=self._epochs)
        await asyncio.Event().wait()

    async def ReleaseTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
        for ticket, (epoch, nonce, _) in list(self._pool.tickets.items()):
            if epoch == request.epoch and (ticket in request.ticket_ids or nonce in request.nonces):
                del self._pool.tickets[ticket]
        return kvnode_pb2.ReleaseTicketReply()

    async def GetNodeStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        return kvnode_pb2.NodeStatus(node_id=self._node_id, tickets=len(self._pool.tickets))


async def _serve() -> None:
    node_id, listen, transport = sys.argv[1:4]
    boot, num_slots, block_bytes, flipped = map(int, sys.argv[4:8])
    pool: Any = FilledPool(node_id, transport, boot, num_slots, block_bytes, flipped)
    plane = KVPlaneServicer(lambda: pool)
    made: Any = SessionNode
    node = made(node_id, pool)
    server = await start_server(
        listen,
        [
            (SERVICE_NAME, lambda server: kvplane_pb2_grpc.add_KVPlaneServicer_to_server(plane, server)),
            ("pillion.v1.KVNode", lambda server: kvnode_pb2_grpc.add_KVNodeServicer_to_server(node, server)),
        ],
    )
    print(server.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
