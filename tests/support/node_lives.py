"""Restarts of a KV node over one pool: a real keeper process, and a node in this process that ends and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from lab.testbed.conditions import WITHIN_S, until, wait_for
from pillion.config import KVNodeFlags
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient
from pillion.kvstore.gpu.mapped_memory import map_pool
from pillion.kvstore.hashing import HASH_BYTES, split_hashes
from pillion.kvstore.ledger.ledger import Ledger
from pillion.kvstore.node.kv_node import KVNode
from pillion.kvstore.pool_survival.keeper_client import KeeperDescriptors, PoolKeeper
from pillion.kvstore.pool_survival.owned_segment import OWNER, OwnedSegment
from pillion.kvstore.pool_survival.slot_table import SlotTable
from pillion.kvstore.pool_survival.surviving_pool import table_words
from pillion.v1.kvnode_pb2 import CommitRun, NodeStatus
from tests.support.kv_hosts import (
    BLOCK_BYTES,
    KV_HEADS,
    KV_ROWS,
    NAMESPACE,
    NUM_SLOTS,
    content,
    read_slot,
    write_slot,
)


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


@contextlib.contextmanager
def shared_keeper() -> Iterator[str]:
    """Run a keeper for the nodes of a module, which have distinct names; yield its socket's path."""
    with tempfile.TemporaryDirectory(prefix="pillion-") as folder, running_keeper(f"{folder}/keeper.sock"):
        yield f"{folder}/keeper.sock"


def parents_of(ledger: Ledger) -> dict[bytes, bytes]:
    """Return the hash of each committed block's parent by the block's own."""
    return {block.hash: block.parent.hash if block.parent else b"" for block in ledger.tree.by_hash.values()}


class Lives:
    """Consecutive processes of one node, each with a worker and a gateway session."""

    def __init__(self, folder: str, keeper_socket: str, **flags: Any) -> None:
        self.flags = KVNodeFlags(
            node_id=f"kv-{folder}",
            node_listen=f"unix:{folder}/node.sock",
            attach_socket=f"{folder}/attach.sock",
            keeper_socket=keeper_socket,
            kv_pool_bytes=NUM_SLOTS * BLOCK_BYTES,
            heartbeat_timeout_ms=600_000,
            kv_transport="grpc",
            **flags,
        )
        self.node: KVNode | None = None
        self.workers: list[Attachment] = []

    def kept(self) -> KeeperDescriptors | None:
        """Return the keeper's descriptors for this node, which the caller closes."""
        return PoolKeeper(self.flags.keeper_socket).take(self.flags.node_id)

    def of(self, **flags: Any) -> KVNodeFlags:
        """Return this node's flags, with overrides."""
        return replace(self.flags, **flags)

    async def begin(self, **flags: Any) -> KVNode:
        await self.end()
        self.node = await start_kvnode(self.of(**flags))
        return self.node

    async def end(self, grace_s: float = 0.0) -> None:
        """Stop the node; calls that have not ended after the grace are cancelled."""
        node, self.node = self.node, None
        if node is not None:
            await node.stop(grace_s)

    async def worker(self, namespace: str = NAMESPACE, processes: int = 1) -> Attachment:
        made = await asyncio.to_thread(
            attach,
            self.flags.attach_socket,
            component_id="worker",
            role="decode",
            block_bytes=BLOCK_BYTES,
            timeout_s=WITHIN_S,
            namespace=namespace,
            kv_rows=KV_ROWS,
            kv_heads=KV_HEADS,
            map_device=map_pool,
            processes=processes,
            block_tokens=1,
        )
        self.workers.append(made)
        return made

    async def renew(
        self, worker: Attachment, timeout_s: float = WITHIN_S, given_up: threading.Event | None = None
    ) -> None:
        await asyncio.to_thread(worker.renew, self.flags.attach_socket, timeout_s, given_up or threading.Event())

    @contextlib.asynccontextmanager
    async def opened(self, hashes: bytes) -> AsyncIterator[tuple[NodeClient, int, int]]:
        """Open a gateway's ticket: return a client, the ticket, and its number of pinned blocks."""
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
        """Return the cached length of a chain, after verifying its blocks."""
        async with self.opened(hashes) as (client, ticket_id, pinned):
            chain = (await client.adopt(worker.epoch, ticket_id, 0)).chain_slots
            assert len(chain) == pinned
            for slot, block_hash in zip(chain, split_hashes(hashes), strict=False):
                assert read_slot(worker, slot) == content(block_hash)
            await client.release(worker.epoch, [ticket_id])
        return pinned

    async def commit(self, worker: Attachment, hashes: bytes) -> tuple[int, ...]:
        """Compute a chain, and wait until it would outlive the node, if that runs here; return its slots."""
        slots = await self.compute(worker, hashes)
        if self.node is not None:
            await self.safe()
        return slots

    async def compute(self, worker: Attachment, hashes: bytes) -> tuple[int, ...]:
        """Compute a chain; return the slots of the blocks that were missing."""
        names = split_hashes(hashes)
        async with self.opened(hashes) as (client, ticket_id, pinned):
            slots = tuple((await client.adopt(worker.epoch, ticket_id, len(names) - pinned)).leased_slots)
            for slot, block_hash in zip(slots, names[pinned:], strict=True):
                write_slot(worker, slot, content(block_hash))
            run = CommitRun(ticket_id=ticket_id, slots=slots, block_hashes=b"".join(names[pinned:]))
            (result,) = await client.commit(worker.epoch, [run])
            assert not result.refusal
            await client.release(worker.epoch, [ticket_id])
        return slots

    async def safe(self) -> None:
        """Wait until all committed blocks would outlive the node, which runs in this process."""
        assert self.node is not None
        life = self.node.pool.survival
        await until("the blocks to be in the table", lambda: not life.blocks.unsealed(1))
        await until("the keeper to have the pool", lambda: not life._keeper.lost())


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


class NodeProcess:
    """The node of a :class:`Lives` in a separate process, which can be killed."""

    def __init__(self, lives: Lives, environ: dict[str, str]) -> None:
        self.lives, self._environ = lives, environ
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        flags = self.lives.flags
        named = {
            "--node-id": flags.node_id,
            "--node-listen": flags.node_listen,
            "--attach-socket": flags.attach_socket,
            "--keeper-socket": flags.keeper_socket,
            "--kv-pool-bytes": str(flags.kv_pool_bytes),
            "--kv-device": flags.kv_device,
            "--kv-transport": flags.kv_transport,
            "--heartbeat-timeout-ms": str(flags.heartbeat_timeout_ms),
        }
        argv = [sys.executable, "-m", "pillion", "kvnode", *(f"{name}={value}" for name, value in named.items())]
        self._process = subprocess.Popen(argv, env=self._environ)

    def kill(self) -> None:
        """Kill it by SIGKILL; return when it has exited."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def status(self) -> NodeStatus:
        client = NodeClient(self.lives.flags.node_listen, "test")
        try:
            return await client.status(timeout_s=WITHIN_S)
        finally:
            await client.aclose()

    def waited_for(self) -> list[int]:
        """Return the ids of the processes that the next node process would wait for."""
        kept = self.lives.kept()
        if kept is None:
            return []
        with contextlib.closing(kept):
            return [place for place, _ in kept.processes]

    def in_table(self) -> int:
        """Return the number of blocks that would outlive this process, by the keeper's table."""
        kept = self.lives.kept()
        if kept is None:
            return 0
        with (
            contextlib.closing(kept),
            contextlib.closing(OwnedSegment.from_descriptor(os.dup(kept.memories[-1]))) as table,
        ):
            return len(SlotTable.open(table_words(table)).blocks())


async def killed_and_recovered(lives: Lives, environ: dict[str, str], hashes: bytes) -> None:
    """Kill a node process with a pool on GPUs, with this process as its worker: all blocks return with their bytes, in
    this process's original mapping. Kill another one while the pool is mapped nowhere."""
    blocks = len(hashes) // HASH_BYTES
    node = NodeProcess(lives, environ)
    try:
        node.begin()
        worker = await lives.worker()
        assert worker.pool_id
        mapped = worker.pool
        await lives.commit(worker, hashes)
        await until("all blocks to be in the table", lambda: node.in_table() == blocks)
        node.kill()
        await until("the node's end to be seen", lambda: worker.node_gone)
        node.begin()
        await lives.renew(worker)
        assert worker.pool is mapped
        assert await lives.hits(worker, hashes) == blocks
        assert (await node.status()).recovered_blocks == blocks
        worker.close()
        # This process lives on; only its node's record shows that it no longer uses the pool.
        await until("the keeper to wait for no worker", lambda: node.waited_for() == [OWNER])
        node.kill()
        node.begin()
        assert await lives.hits(await lives.worker(), hashes) == blocks
    finally:
        node.kill()
