"""How fast blocks come from another process's pool: NIXL and gRPC beside memcpy, for requests of several sizes.

    memcpy   one thread copies the same blocks between two mapped pools of its own process
    kernel   process_vm_readv alone, block by block: the upper limit of UCX's "cma" between two processes
    nixl     NixlPlane.read, from call to return on the event loop
    grpc     DataPlane.read, likewise

Every request reads blocks in random order into random slots, so that little is left in the caches. The ways alternate
over rounds, so that a drift of the machine's speed meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rich.table import Table

from lab.benchmarks.report import save, show_table
from pillion.kvstore.exchange.peers import Peers
from pillion.kvstore.exchange.plane import BlockShape, DataPlane
from pillion.kvstore.memory.memory import HostMemory
from pillion.kvstore.memory.segment import Segment, map_shared
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane

KIB = 1024
SIZES_KIB = (256, 1024, 16 * 1024, 256 * 1024)
TARGET = 0.8

Way = Callable[[tuple[int, ...], tuple[int, ...]], Awaitable[None]]


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class MappedPool:
    """A pool in shared memory whose pages are all resident."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.segment = Segment(num_slots * block_bytes)
        self.memory = map_shared(self.segment.fileno(), num_slots * block_bytes)
        for slot in range(num_slots):
            self.memory[slot * block_bytes : (slot + 1) * block_bytes] = bytes([slot % 251]) * block_bytes
        self.pool = HostMemory(self.memory, num_slots, block_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def memcpy_way(source: MappedPool, own: MappedPool) -> Way:
    """Copies within this process: the reference of all other ways."""
    size = own.block_bytes

    async def copy(remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        for theirs, mine in zip(remote, local, strict=True):
            ctypes.memmove(own.address + mine * size, source.address + theirs * size, size)

    return copy


def kernel_way(pid: int, pool_address: int, own: MappedPool) -> Way:
    """Copies by process_vm_readv(2), one call per block."""
    libc, size = ctypes.CDLL(None, use_errno=True), own.block_bytes

    async def copy(remote: tuple[int, ...], local: tuple[int, ...]) -> None:
        for theirs, mine in zip(remote, local, strict=True):
            here = _IoVector(own.address + mine * size, size)
            there = _IoVector(pool_address + theirs * size, size)
            if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != size:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

    return copy


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all request sizes; returns one row per size."""
    from lab.testbed.plane_source import NAMESPACE, chain_of, running_source

    size, num_slots = args.block_kib * KIB, args.pool_mib * KIB // args.block_kib
    own, other = MappedPool(num_slots, size), MappedPool(num_slots, size)
    planes: list[DataPlane] = [NixlPlane(own.pool), DataPlane(own.pool)]
    with running_source("nixl", num_slots=num_slots, block_bytes=size) as source:

        async def directory() -> Mapping[str, str]:
            return {source.node_id: source.address}

        async def first() -> DataPlane:
            return planes[0]

        peers = Peers("reader", BlockShape(size, NAMESPACE), directory, first)
        peer = await peers.get(source.node_id, 60.0)
        pinned = await peer.pin(b"".join(chain_of(num_slots)[0]), 0, 60.0)

        def plane_way(plane: DataPlane) -> Way:
            return lambda remote, local: plane.read(peer.pool, peer.read_blocks, pinned.ticket_id, remote, local)

        ways = {
            "memcpy": memcpy_way(other, own),
            "kernel": kernel_way(source.process.pid, peer.pool.pool_address, own),
            **{plane.name: plane_way(plane) for plane in planes},
        }
        await ways["nixl"]((0,), (0,))
        rows = [await measure_size(kib, kib // args.block_kib, num_slots, ways, args) for kib in SIZES_KIB]
        await peers.aclose()
    for plane in planes:
        plane.close()
    return rows


async def measure_size(
    kib: int, blocks: int, num_slots: int, ways: dict[str, Way], args: argparse.Namespace
) -> dict[str, Any]:
    """Measures one size; returns medians over rounds. The ratio is the median of the rounds' ratios."""
    chooser = random.Random(kib)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(max(args.rounds, min(args.most_rounds, args.round_mib * KIB // kib))):
        for name, way in ways.items():
            remote = tuple(chooser.sample(range(num_slots), blocks))
            local = tuple(chooser.sample(range(num_slots), blocks))
            begin = time.perf_counter()
            await way(remote, local)
            taken[name].append(time.perf_counter() - begin)
    speed = {name: kib * KIB / statistics.median(values) / 1e9 for name, values in taken.items()}
    best = {name: kib * KIB / min(values) / 1e9 for name, values in taken.items()}
    ratio = {
        name: statistics.median(base / own for base, own in zip(taken["memcpy"], values, strict=True))
        for name, values in taken.items()
    }
    return {"kib": kib, "blocks": blocks, "gb_per_s": speed, "best_gb_per_s": best, "of_memcpy": ratio}


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table(title=f"blocks from another process's pool, GB/s (share of memcpy; target {TARGET} from 1 MiB on)")
    for heading in ("request", "blocks", "memcpy", "kernel", "nixl", "grpc"):
        table.add_column(heading, justify="right")
    for row in rows:
        speed, ratio = row["gb_per_s"], row["of_memcpy"]
        others = [f"{speed[name]:.2f} ({ratio[name]:.2f})" for name in ("kernel", "nixl", "grpc")]
        table.add_row(f"{row['kib']} KiB", str(row["blocks"]), f"{speed['memcpy']:.2f}", *others)
    show_table(table)


def main() -> None:
    """Measure, print, write results/kv_plane.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-kib", type=int, default=256)
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7, help="fewest rounds of a size")
    parser.add_argument("--most-rounds", type=int, default=200)
    parser.add_argument(
        "--round-mib",
        type=int,
        default=512,
        help="MiB of one size and way over all rounds, within the bounds of rounds",
    )
    args = parser.parse_args()
    rows = asyncio.run(measure(args))
    show(rows)
    save("kv_plane", {**vars(args), "rows": rows})


if __name__ == "__main__":
    main()
