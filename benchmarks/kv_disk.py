"""The disk tier beside plain files: bytes written and read per second, and how long a node needs to start with many
blocks on its disk.

The plain figures write one file from end to end and read it again, block by block with the same system calls, without
header, checksum, rename or one file per block. Reads come from the page cache unless it is dropped (``--cold``, root
only), so a difference is due to the tier and not to the device. Rounds alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import random
import shutil
import tempfile
import time
from typing import Any

from rich.table import Table

from benchmarks.report import save, show_table, spread
from pillion.kvstore.memory.memory import block_checksum
from pillion.kvstore.tiers.disk import DiskTier, open_disk_tier
from pillion.kvstore.tiers.disk_files import DiskFolder
from pillion.kvstore.tiers.tiers import BlockName

NAMESPACE = bytes(32)
MIB = 2**20
# Blocks of one store or load of the tier.
BATCH_BYTES = 16 * MIB


async def opened(path: pathlib.Path, block_bytes: int, max_bytes: int) -> DiskTier:
    return await open_disk_tier(DiskFolder(path), namespace=NAMESPACE, block_bytes=block_bytes, disk_bytes=max_bytes)


def blocks_of(count: int, block_bytes: int) -> list[tuple[BlockName, memoryview]]:
    """Return the blocks of one chain, each with bytes of its own."""
    data = random.Random(1).randbytes(block_bytes)
    made, parent = [], b""
    for number in range(count):
        block_hash = number.to_bytes(4, "big") + random.Random(number).randbytes(28)
        payload = memoryview(number.to_bytes(8, "big") + data[8:])
        made.append((BlockName(block_hash, parent, block_hash, block_checksum(payload)), payload))
        parent = block_hash
    # The first digits choose the folder, so they are random as in a real hash.
    return [(BlockName(n.hash[::-1], n.parent[::-1], n.segment[::-1], n.checksum), p) for n, p in made]


def drop_cache(cold: bool) -> None:
    os.sync()
    if cold:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")


def plain(path: pathlib.Path, blocks: list[tuple[BlockName, memoryview]], cold: bool) -> tuple[float, float]:
    """Write and read one plain file; return the bytes per second of both."""
    total = sum(len(data) for _, data in blocks)
    target = memoryview(bytearray(len(blocks[0][1])))
    begin = time.perf_counter()
    with (path / "plain").open("wb", buffering=0) as file:
        for _, data in blocks:
            file.write(data)
    wrote = time.perf_counter() - begin
    drop_cache(cold)
    begin = time.perf_counter()
    with (path / "plain").open("rb", buffering=0) as file:
        while file.readinto(target):
            pass
    read = time.perf_counter() - begin
    (path / "plain").unlink()
    return total / wrote, total / read


async def tiered(path: pathlib.Path, blocks: list[tuple[BlockName, memoryview]], cold: bool) -> tuple[float, float]:
    """Store and load the blocks through the tier, batch by batch; return the bytes per second of both."""
    block_bytes = len(blocks[0][1])
    total = sum(len(data) for _, data in blocks)
    tier = await opened(path / "tier", block_bytes, 4 * total)
    batch = max(1, BATCH_BYTES // block_bytes)
    chunks = [blocks[start : start + batch] for start in range(0, len(blocks), batch)]
    begin = time.perf_counter()
    for chunk in chunks:
        assert not await tier.store(chunk)
    wrote = time.perf_counter() - begin
    drop_cache(cold)
    targets = [memoryview(bytearray(block_bytes)) for _ in range(batch)]
    begin = time.perf_counter()
    for chunk in chunks:
        assert await tier.load([name.hash for name, _ in chunk], targets) == len(chunk)
    read = time.perf_counter() - begin
    await tier.close()
    shutil.rmtree(path / "tier")
    return total / wrote, total / read


async def restart(path: pathlib.Path, count: int, block_bytes: int, cold: bool) -> tuple[float, float]:
    """Measure the seconds until a tier with ``count`` blocks serves, and until it has announced them all."""
    blocks = blocks_of(count, block_bytes)
    bound = count * (block_bytes + 8192)
    tier = await opened(path, block_bytes, bound)
    for start in range(0, count, 1000):
        assert not await tier.store(blocks[start : start + 1000])
    await tier.close()
    drop_cache(cold)
    begin = time.perf_counter()
    tier = await opened(path, block_bytes, bound)
    ready = time.perf_counter() - begin
    assert len(tier) == count
    names = list(tier.names())
    named = time.perf_counter() - begin
    assert [name.hash for name in names[:2]] == [name.hash for name, _ in blocks[:2]]
    await tier.close()
    return ready, named


async def measure(args: argparse.Namespace, path: pathlib.Path) -> dict[str, Any]:
    rates = []
    for block_bytes in args.block_bytes:
        blocks = blocks_of(args.total_mib * MIB // block_bytes, block_bytes)
        found: dict[str, list[float]] = {"plain_write": [], "plain_read": [], "tier_write": [], "tier_read": []}
        for _ in range(args.rounds):
            for way, (wrote, read) in (
                ("plain", plain(path, blocks, args.cold)),
                ("tier", await tiered(path, blocks, args.cold)),
            ):
                found[f"{way}_write"].append(wrote / MIB)
                found[f"{way}_read"].append(read / MIB)
        rates.append({"block_bytes": block_bytes, **{key: spread(values) for key, values in found.items()}})
    ready, named = await restart(path / "many", args.blocks, args.small_block_bytes, args.cold)
    return {
        "rates_mib_per_s": rates,
        "restart": {
            "blocks": args.blocks,
            "block_bytes": args.small_block_bytes,
            "ready_s": ready,
            "all_named_s": named,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="disk tier, MiB/s (median of rounds)")
    for heading in ("block", "plain write", "tier write", "share", "plain read", "tier read", "share"):
        table.add_column(heading, justify="right")
    for row in result["rates_mib_per_s"]:
        middle = {key: row[key]["median"] for key in row if key != "block_bytes"}
        table.add_row(
            f"{row['block_bytes'] // 1024} KiB",
            *(
                text
                for way in ("write", "read")
                for text in (
                    f"{middle[f'plain_{way}']:.0f}",
                    f"{middle[f'tier_{way}']:.0f}",
                    f"{middle[f'tier_{way}'] / middle[f'plain_{way}']:.2f}",
                )
            ),
        )
    show_table(table)
    table = Table(title="start with blocks on disk")
    for heading in ("blocks", "bytes each", "serves after s", "all named after s"):
        table.add_column(heading, justify="right")
    row = result["restart"]
    table.add_row(str(row["blocks"]), str(row["block_bytes"]), f"{row['ready_s']:.2f}", f"{row['all_named_s']:.2f}")
    show_table(table)


def main() -> None:
    """Measure, print, write results/kv_disk.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to write; default: the system's folder for temporary files")
    parser.add_argument("--block-bytes", type=int, nargs="+", default=[65_536, 368_640, 2_097_152])
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--small-block-bytes", type=int, default=1024)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before reads (root)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-disk-", dir=args.folder) as folder:
        result = asyncio.run(measure(args, pathlib.Path(folder)))
    show(result)
    save("kv_disk", {"cold": args.cold, "total_mib": args.total_mib, "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()
