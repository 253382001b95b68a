"""`python -m lab.benchmarks.kv_fetch`: how long many blocks take from one node to another by gRPC over TCP.

Two real node processes with a real Redis; the bench is gateway and worker of both. Beside each fetch the source is
asked for its status over and over: the longest answer is how long the fetch kept its event loop from others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from lab.benchmarks.kv_node import TicketDriver
from lab.benchmarks.report import save, show_table
from lab.testbed.redis import RedisServer
from pillion.errors import PillionError
from pillion.kvstore.client.attachment import attach
from pillion.kvstore.client.node_client import NodeClient

LENGTHS_BLOCKS = (1024, 8192)
SIZES_KIB = (4, 64)
NODES = ("source", "reader")
# The bound of the fetch that is measured; the default of --fetch-timeout-ms is a column of the table.
LONGEST_S = 60.0
DEFAULT_S = 2.0
ASK_EVERY_S = 0.002


@contextlib.contextmanager
def running_nodes(folder: str, block_kib: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two node processes that find each other, by name."""
    redis = RedisServer(pathlib.Path(folder))
    redis.start()
    nodes = {}
    try:
        for name in NODES:
            flags = [f"--node-id={name}", "--node-listen=127.0.0.1:0", f"--attach-socket={folder}/{name}.sock"]
            flags += [f"--kv-pool-bytes={(max(LENGTHS_BLOCKS) + 8) * block_kib * 1024}", "--decode-reserve-percent=0"]
            flags += ["--kv-transport=grpc", f"--fetch-timeout-ms={LONGEST_S * 1000:.0f}", "--log-level=warning"]
            flags += ["--low-watermark-percent=0", "--heartbeat-timeout-ms=60000", f"--redis-url={redis.url}"]
            nodes[name] = subprocess.Popen([sys.executable, "-m", "pillion", "kvnode", *flags])
        yield nodes
    finally:
        for node in nodes.values():
            node.terminate()
            node.wait(10)
        redis.kill()


async def open_driver(folder: str, name: str, block_bytes: int) -> TicketDriver:
    """Returns gateway and worker of one node."""
    worker = await asyncio.to_thread(
        attach, f"{folder}/{name}.sock", component_id="bench", role="decode", block_bytes=block_bytes, timeout_s=30.0,
        namespace="00" * 32,
    )  # fmt: skip
    client = NodeClient(worker.node_address, "bench")
    return TicketDriver(client, await client.open_session(), worker, itertools.count(1))


async def measure_size(block_kib: int, rounds: int) -> list[dict[str, Any]]:
    """Measures all lengths with blocks of one size."""
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, running_nodes(folder, block_kib) as nodes:
        source, reader = [await open_driver(folder, name, block_kib * 1024) for name in NODES]
        rows = []
        for blocks in LENGTHS_BLOCKS:
            taken = [await measure_fetch(source, reader, nodes["source"].pid, blocks) for _ in range(rounds)]
            medians = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
            worst_s = max(one["seconds"] for one in taken)
            rows.append({"block_kib": block_kib, "blocks": blocks, **medians, "worst_s": worst_s})
        for driver in (source, reader):
            await driver.session.aclose()
            await driver.client.aclose()
            driver.worker.close()
    return rows


async def measure_fetch(source: TicketDriver, reader: TicketDriver, source_pid: int, blocks: int) -> dict[str, float]:
    """Fills the source with a new chain and fetch all of it."""
    hashes = source.prompt(blocks)
    await source.release(await source.fill(hashes, 512))
    ticket = await reader.client.open_ticket(reader.session.epoch, hashes, blocks + 1)
    for _ in range(200):
        # The registry may not name the source yet; a short chain shows it, and is met then.
        with contextlib.suppress(PillionError):
            met = await reader.client.prefetch(
                reader.session.epoch, ticket.ticket_id, hashes[:32], ["source"], timeout_s=5.0
            )
            if met.blocks:
                break
        await asyncio.sleep(0.05)
    asking = asyncio.create_task(longest_answer_s(source))
    await asyncio.sleep(10 * ASK_EVERY_S)
    began, cpu_s = time.perf_counter(), _cpu_s(source_pid)
    brought = await reader.client.prefetch(
        reader.session.epoch, ticket.ticket_id, hashes, ["source"], timeout_s=LONGEST_S
    )
    seconds, cpu_s = time.perf_counter() - began, _cpu_s(source_pid) - cpu_s
    asking.cancel()
    longest_s = await asking
    assert brought.blocks == blocks, f"{brought.blocks} of {blocks} blocks came"
    await reader.client.release(reader.session.epoch, [ticket.ticket_id])
    return {"seconds": seconds, "source_cpu_s": cpu_s, "longest_answer_s": longest_s}


async def longest_answer_s(source: TicketDriver) -> float:
    """Asks the source for its status until this task is cancelled; returns the longest time of an answer."""
    longest_s = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.perf_counter()
            await source.client.status()
            longest_s = max(longest_s, time.perf_counter() - began)
            await asyncio.sleep(ASK_EVERY_S)
    return longest_s


def _cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print, write results/kv_fetch.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = [row for kib in SIZES_KIB for row in asyncio.run(measure_size(kib, args.rounds))]
    table = Table(title=f"a prefix from another node over TCP, medians (target: within {DEFAULT_S:g} s)")
    for heading in ("block", "blocks", "s", "worst s", "MB/s", "source's CPU s", "longest answer ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        size = row["block_kib"] * 1024 * row["blocks"] / 1e6
        table.add_row(
            f"{row['block_kib']} KiB", str(row["blocks"]), f"{row['seconds']:.2f}", f"{row['worst_s']:.2f}",
            f"{size / row['seconds']:.0f}", f"{row['source_cpu_s']:.2f}", f"{row['longest_answer_s'] * 1000:.0f}",
        )  # fmt: skip
    show_table(table)
    save("kv_fetch", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
