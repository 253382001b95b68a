"""A node that others read from, as a process of its own: a filled pool, the KVPlane service, sessions.

    python -m tests.support.plane_source NODE_ID LISTEN TRANSPORT BOOT NUM_SLOTS BLOCK_BYTES FLIPPED_SLOT

It prints its address and serves until it is killed. Its one chain has a block in every slot, in shuffled order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

NAMESPACE = b"n" * 32
START_TIMEOUT_S = 60.0


def block_of(boot: int, slot: int, block_bytes: int) -> bytes:
    """What the source of that boot has in that slot."""
    return hashlib.blake2b(f"{boot}:{slot}".encode()).digest() * (block_bytes // 64)


def chain_of(num_slots: int) -> tuple[list[bytes], list[int]]:
    """Hashes of the chain and the slot of each block."""
    slots = list(range(num_slots))
    random.Random(1).shuffle(slots)
    return [hashlib.sha256(b"%d" % slot).digest() for slot in slots], slots


@dataclass
class SourceProcess:
    """A started one. ``signal`` also takes SIGSTOP and SIGCONT."""

    process: subprocess.Popen[str]
    node_id: str
    address: str

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_source(
    transport: str,
    *,
    node_id: str = "source",
    listen: str = "127.0.0.1:0",
    boot: int = 1,
    num_slots: int = 64,
    block_bytes: int = 65536,
    flipped_slot: int = -1,
) -> Iterator[SourceProcess]:
    """Starts one; it is killed in the end, whatever became of it."""
    words = [node_id, listen, transport, boot, num_slots, block_bytes, flipped_slot]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.plane_source", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the source did not start"
        yield SourceProcess(process, node_id, address)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


async def _serve() -> None:
    from kvstore.checksum import block_checksum
    from kvstore.plane import BlockShape, PeerPool, Pinned, choose_plane
    from kvstore.plane_servicer import SERVICE_NAME, KVPlaneServicer
    from kvstore.segment import Segment, map_shared
    from pillion.errors import NotFound
    from pillion.rpc import start_server
    from pillion.v1 import kvnode_pb2, kvnode_pb2_grpc, kvplane_pb2_grpc
    from pillion.wire.common import hello_to_pb

    node_id, listen, transport = sys.argv[1:4]
    boot, num_slots, block_bytes, flipped = map(int, sys.argv[4:8])
    segment = Segment(num_slots * block_bytes)
    mapped = map_shared(segment.fileno(), num_slots * block_bytes)
    for slot in range(num_slots):
        mapped[slot * block_bytes : (slot + 1) * block_bytes] = block_of(boot, slot, block_bytes)
    view = memoryview(mapped)
    sums = [block_checksum(view[slot * block_bytes : (slot + 1) * block_bytes]) for slot in range(num_slots)]
    if flipped >= 0:
        mapped[flipped * block_bytes + block_bytes // 2] ^= 4
    plane = choose_plane(transport, mapped, num_slots, block_bytes)
    known, order = chain_of(num_slots)
    tickets: dict[int, tuple[int, int, frozenset[int]]] = {}

    class FilledPool:
        memory = view

        async def describe(self) -> tuple[PeerPool, BlockShape]:
            facts = PeerPool(node_id, boot, num_slots, block_bytes, plane.pool_address, plane.nixl_metadata)
            return facts, BlockShape(block_bytes, NAMESPACE)

        async def pin_chain(self, epoch: int, nonce: int, hashes: list[bytes], first_block: int) -> Pinned:
            count = sum(1 for said, have in zip(hashes, known, strict=False) if said == have)
            chain = order[:count]
            ticket = len(tickets) + 1
            tickets[ticket] = (epoch, nonce, frozenset(chain))
            wanted = chain[first_block:]
            return Pinned(ticket, tuple(wanted), tuple(sums[slot] for slot in wanted))

        def pinned_slots(self, epoch: int, ticket_id: int) -> frozenset[int]:
            if ticket_id not in tickets or tickets[ticket_id][0] != epoch:
                raise NotFound(f"ticket {ticket_id} is not held")
            return tickets[ticket_id][2]

    class Node(kvnode_pb2_grpc.KVNodeServicer):
        epochs = 0

        async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            self.epochs += 1
            yield kvnode_pb2.SessionEvent(hello=hello_to_pb(node_id), epoch=self.epochs)
            await asyncio.Event().wait()

        async def ReleaseTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
            for ticket, (epoch, nonce, _) in list(tickets.items()):
                if epoch == request.epoch and (ticket in request.ticket_ids or nonce in request.nonces):
                    del tickets[ticket]
            return kvnode_pb2.ReleaseTicketReply()

        async def GetNodeStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
            return kvnode_pb2.NodeStatus(node_id=node_id, tickets=len(tickets))

    pool = FilledPool()
    services = [
        (
            SERVICE_NAME,
            lambda server: kvplane_pb2_grpc.add_KVPlaneServicer_to_server(KVPlaneServicer(lambda: pool), server),
        ),
        ("pillion.v1.KVNode", lambda server: kvnode_pb2_grpc.add_KVNodeServicer_to_server(Node(), server)),
    ]
    server = await start_server(listen, services)
    print(server.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
