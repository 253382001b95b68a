"""`python -m lab.benchmarks.kv_node`: what a KV node's calls cost, over real gRPC to a node of its own process.

Beside each figure stands its floor in the same run: an empty call to the same node. Blocks are tiny and never written,
since these calls move slot numbers only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lab.benchmarks.report import save, show_table, spread
from pillion.kvstore.client.attachment import Attachment, attach
from pillion.kvstore.client.node_client import NodeClient, NodeSession
from pillion.kvstore.hashing import HASH_BYTES, chain_hashes, split_hashes
from pillion.kvstore.ledger.ledger import SESSION, Ledger
from pillion.loadgen.figures import percentile
from pillion.v1.kvnode_pb2 import CommitRun

BLOCK_BYTES = 64
NUM_SLOTS = 200_000
CHAIN_BLOCKS = 2048
COMMIT_BLOCKS = 32
BATCH_BLOCKS = 512
REQUESTS = 4
ROOT = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class TicketDriver:
    """A client of the node that acts as gateway and as worker."""

    client: NodeClient
    session: NodeSession
    worker: Attachment
    seed: Iterator[int]

    def prompt(self, blocks: int) -> bytes:
        """Returns the block hashes of a new prompt."""
        first = next(self.seed)
        return chain_hashes(ROOT, [first, *range(blocks - 1)], 1)

    async def fill(self, hashes: bytes, batch: int) -> int:
        """Opens a ticket, leases its slots and commits the chain, ``batch`` blocks a call; returns the ticket's id."""
        count = len(hashes) // HASH_BYTES
        ticket = await self.client.open_ticket(self.session.epoch, hashes, count + 1)
        slots = (await self.client.adopt(self.worker.epoch, ticket.ticket_id, count)).leased_slots
        for at in range(0, count, batch):
            piece = hashes[at * HASH_BYTES : (at + batch) * HASH_BYTES]
            await self.commit(ticket.ticket_id, slots[at : at + batch], piece)
        return ticket.ticket_id

    async def commit(self, ticket_id: int, slots: Sequence[int], hashes: bytes) -> float:
        """Commits blocks after the ticket's tail; returns the seconds of the call."""
        begin = time.perf_counter()
        (result,) = await self.client.commit(
            self.worker.epoch, [CommitRun(ticket_id=ticket_id, slots=slots, block_hashes=hashes)]
        )
        seconds = time.perf_counter() - begin
        assert list(result.slots) == list(slots), result.refusal
        return seconds

    async def release(self, ticket_id: int) -> None:
        """Releases the ticket as gateway and as worker."""
        for epoch in (self.session.epoch, self.worker.epoch):
            await self.client.release(epoch, [ticket_id])


def main() -> None:
    """Prints a table and writes results/kv_node.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with running_node() as folder:
        result = asyncio.run(measure(folder, args.rounds))
    table = Table(title="A KV node's calls over gRPC (medians of rounds)")
    for name in ("call", "p50 ms", "p99 ms", "target"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for row in result["calls"]:
        table.add_row(row["call"], f"{row['p50_ms']:.3f}", f"{row['p99_ms']:.3f}", row["target"])
    show_table(table)
    rate = "{median:,.0f} blocks/s ({min:,.0f} to {max:,.0f})".format(**result["lease_commit_blocks_per_s"])
    print(f"lease + commit, {BATCH_BLOCKS} blocks a call: {rate}")
    print(f"written to {save('kv_node', result)}")


@contextmanager
def running_node() -> Iterator[str]:
    """A node process with tiny blocks; yields the folder of its sockets."""
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        argv = [sys.executable, "-m", "pillion", "kvnode", f"--node-listen=unix:{folder}/node.sock"]
        argv += [f"--attach-socket={folder}/attach.sock", f"--kv-pool-bytes={NUM_SLOTS * BLOCK_BYTES}"]
        process = subprocess.Popen([*argv, "--log-level=warning"], env={**os.environ, "PILLION_REDIS_URL": ""})
        try:
            yield folder
        finally:
            process.terminate()
            process.wait(10)


async def measure(folder: str, rounds: int) -> dict[str, Any]:
    """Measures all figures."""
    worker = await asyncio.to_thread(
        attach, f"{folder}/attach.sock", component_id="bench", role="decode", block_bytes=BLOCK_BYTES, timeout_s=20.0
    )
    client = NodeClient(worker.node_address, "bench")
    session = await client.open_session()
    driver = TicketDriver(client, session, worker, itertools.count(1))
    try:
        return {
            "calls": [
                await _call("empty call (heartbeat)", "", rounds, lambda: client.heartbeat(worker.epoch)),
                await _commits(driver, rounds),
                await _pins(driver, rounds),
                await _tail_pins(rounds),
            ],
            "lease_commit_blocks_per_s": spread([await _throughput(driver) for _ in range(rounds)]),
        }
    finally:
        await session.aclose()
        await client.aclose()
        worker.close()


async def _call(name: str, target: str, rounds: int, work: Callable[[], Awaitable[Any]], times: int = 300) -> Any:
    samples = []
    for _ in range(rounds):
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            answer = await work()
            # Some work returns its own seconds, where preparation does not count.
            seconds.append(answer if isinstance(answer, float) else time.perf_counter() - begin)
        samples.append(seconds)
    return {
        "call": name,
        "target": target,
        "p50_ms": statistics.median(percentile(seconds, 50) for seconds in samples) * 1000,
        "p99_ms": statistics.median(percentile(seconds, 99) for seconds in samples) * 1000,
    }


async def _commits(driver: TicketDriver, rounds: int) -> Any:
    async def once() -> float:
        hashes = driver.prompt(COMMIT_BLOCKS)
        ticket = await driver.client.open_ticket(driver.session.epoch, hashes, COMMIT_BLOCKS + 1)
        adopted = await driver.client.adopt(driver.worker.epoch, ticket.ticket_id, COMMIT_BLOCKS)
        seconds = await driver.commit(ticket.ticket_id, adopted.leased_slots, hashes)
        await driver.release(ticket.ticket_id)
        return seconds

    return await _call(f"commit of {COMMIT_BLOCKS} blocks", "< 0.5 p50", rounds, once)


async def _pins(driver: TicketDriver, rounds: int) -> Any:
    hashes = driver.prompt(CHAIN_BLOCKS)
    await driver.release(await driver.fill(hashes, BATCH_BLOCKS))

    async def once() -> None:
        ticket = await driver.client.open_ticket(driver.session.epoch, hashes, CHAIN_BLOCKS + 1)
        assert ticket.pinned_blocks == CHAIN_BLOCKS
        await driver.client.release(driver.session.epoch, [ticket.ticket_id])

    return await _call(f"open + release a ticket on {CHAIN_BLOCKS} blocks", "", rounds, once, times=100)


async def _tail_pins(rounds: int) -> Any:
    """Measure, in this process, the ledger's pin of a chain by its tail, which nothing else pins."""
    ledger = Ledger(itertools.count(1).__next__, 10)
    ledger.shape(NUM_SLOTS)
    holder = ledger.attach("bench", SESSION)
    packed = chain_hashes(ROOT, range(CHAIN_BLOCKS), 1)
    ticket = ledger.admit(holder, 1, split_hashes(packed), CHAIN_BLOCKS + 1)
    assert ticket is not None
    slots = ledger.adopt(holder, ticket.ticket_id, CHAIN_BLOCKS).leased_slots
    ledger.commit(holder, [CommitRun(ticket_id=ticket.ticket_id, slots=slots, block_hashes=packed)])
    tail = ticket.last_block
    assert tail is not None
    ledger.release(holder, [ticket.ticket_id])

    async def once() -> None:
        ledger.tree.pin(tail)
        ledger.tree.unpin(tail)

    return await _call(f"pin + unpin {CHAIN_BLOCKS} blocks by their tail (no call)", "< 1 p50", rounds, once)


async def _throughput(driver: TicketDriver) -> float:
    """Measures blocks per second with REQUESTS requests side by side, which hides the client's own work."""
    prompts = [driver.prompt(CHAIN_BLOCKS) for _ in range(10 * REQUESTS)]

    async def some(mine: list[bytes]) -> None:
        for hashes in mine:
            await driver.release(await driver.fill(hashes, BATCH_BLOCKS))

    begin = time.perf_counter()
    await asyncio.gather(*(some(prompts[at::REQUESTS]) for at in range(REQUESTS)))
    return len(prompts) * CHAIN_BLOCKS / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
