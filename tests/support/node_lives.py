"""A KV node's lives over one pool, one after the other, in this process, with a real keeper and workers that attach."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from pillion.config import KVNodeFlags
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.hashing import HASH_BYTES, split_hashes
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.node.kv_node import KVNode, start_kvnode
from pillion.v1.kvnode_pb2 import CommitRun
from testbed.conditions import WITHIN_S, until, wait_for
from tests.support.kv_hosts import BLOCK_BYTES, NAMESPACE, NUM_SLOTS, content


@contextlib.contextmanager
def running_keeper(path: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "pillion", "keeper", path])
    try:

        def listens() -> bool:
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.connect(path)
                return True
            return False

        wait_for("the keeper to listen", listens)
        yield process
    finally:
        process.kill()
        process.wait()


def parents_of(ledger: Ledger) -> dict[bytes, bytes]:
    """The hash of each committed block's parent by the block's own."""
    return {block.hash: block.parent.hash if block.parent else b"" for block in ledger.tree.by_hash.values()}


class Lives:
    """A node's lives, one after the other, with a worker and a gateway's session of each."""

    def __init__(self, folder: str, keeper_socket: str) -> None:
        self.flags = KVNodeFlags(
            node_id=f"kv-{folder}",
            node_listen=f"unix:{folder}/node.sock",
            attach_socket=f"{folder}/attach.sock",
            keeper_socket=keeper_socket,
            kv_pool_bytes=NUM_SLOTS * BLOCK_BYTES,
            heartbeat_timeout_ms=600_000,
        )
        self.node: KVNode | None = None
        self.workers: list[Attachment] = []

    async def begin(self, **flags: Any) -> KVNode:
        await self.end()
        self.node = await start_kvnode(replace(self.flags, **flags))
        return self.node

    async def end(self) -> None:
        node, self.node = self.node, None
        if node is not None:
            await node.stop(0.0)

    async def worker(self, namespace: str = NAMESPACE) -> Attachment:
        made = await asyncio.to_thread(
            attach,
            self.flags.attach_socket,
            component_id="worker",
            role="decode",
            block_bytes=BLOCK_BYTES,
            timeout_s=WITHIN_S,
            namespace=namespace,
            block_tokens=1,
        )
        self.workers.append(made)
        return made

    async def renew(self, worker: Attachment) -> None:
        words = (self.flags.attach_socket, "worker", "decode", NAMESPACE, WITHIN_S)
        await asyncio.to_thread(worker.renew, *words, threading.Event())

    @contextlib.asynccontextmanager
    async def opened(self, hashes: bytes) -> AsyncIterator[tuple[NodeClient, int, int]]:
        """A gateway's ticket: a client, the ticket, and how many blocks of the chain it pins."""
        client = NodeClient(self.flags.node_listen, "gateway")
        session = await client.open_session(WITHIN_S, wait_for_node=True)
        total = len(hashes) // HASH_BYTES + 1
        ticket = await client.open_ticket(session.epoch, hashes, total, timeout_s=WITHIN_S)
        try:
            yield client, ticket.ticket_id, ticket.pinned_blocks
        finally:
            await client.release(session.epoch, [ticket.ticket_id])
            await session.aclose()
            await client.aclose()

    async def hits(self, worker: Attachment, hashes: bytes) -> int:
        """How much of a chain is there; each block holds what its hash says."""
        async with self.opened(hashes) as (client, ticket_id, pinned):
            chain = (await client.adopt(worker.epoch, ticket_id, 0)).chain_slots
            assert len(chain) == pinned
            for slot, block_hash in zip(chain, split_hashes(hashes), strict=False):
                assert bytes(worker.memory[slot * BLOCK_BYTES :][:BLOCK_BYTES]) == content(block_hash)
            await client.release(worker.epoch, [ticket_id])
        return pinned

    async def commit(self, worker: Attachment, hashes: bytes) -> tuple[int, ...]:
        """Computes a chain, and waits until it would outlive the node; returns its slots."""
        slots = await self.compute(worker, hashes)
        assert self.node is not None
        keeping = self.node.pool.keeping
        assert keeping is not None
        await until("the blocks to be in the table", lambda: not keeping.blocks.unsealed(1))
        await until("the keeper to have the pool", lambda: not keeping._keeper.lost())
        return slots

    async def compute(self, worker: Attachment, hashes: bytes) -> tuple[int, ...]:
        """Computes a chain; returns the slots of the blocks that were not there."""
        names = split_hashes(hashes)
        async with self.opened(hashes) as (client, ticket_id, pinned):
            slots = tuple((await client.adopt(worker.epoch, ticket_id, len(names) - pinned)).leased_slots)
            for slot, block_hash in zip(slots, names[pinned:], strict=True):
                worker.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = content(block_hash)
            run = CommitRun(ticket_id=ticket_id, slots=slots, block_hashes=b"".join(names[pinned:]))
            (result,) = await client.commit(worker.epoch, [run])
            assert not result.refusal
            await client.release(worker.epoch, [ticket_id])
        return slots


@contextlib.asynccontextmanager
async def ended(made: Lives) -> AsyncIterator[Lives]:
    try:
        yield made
        if made.node is not None:
            made.node.check_integrity()
    finally:
        for worker in made.workers:
            worker.close()
        await made.end()
