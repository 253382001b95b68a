"""Time to the first token of a long prompt by the tier of its KV, beside computing it.

    computed     kv-a, which is empty
    pool         kv-a, again
    other node   kv-b, just started; blocks come from kv-a's pool by gRPC over TCP
    disk         kv-c, restarted; blocks come from its disk; --cold (root only) drops the page cache before
    bucket       kv-d, just started; blocks come from an S3 service (rclone's), written by kv-a

Real processes, one decode worker at a time with all cores. Each prompt generates one token, with a fetch timeout of a
minute. A tier's cost is the time to the first token less that in the pool; its limit is a plain memory copy of the same
bytes in the same run. The demo model's position limit is raised for longer prompts, which does not change times.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from lab.benchmarks.report import save, show_table, spread
from lab.testbed.conditions import wait_for
from lab.testbed.defaults import NODE
from lab.testbed.hosts import Hosts, hosts
from lab.testbed.plain_model import plain_folder
from lab.testbed.s3_service import s3_service
from pillion import Client

BLOCK_TOKENS = 16
# Percentage of the pool that nodes keep free, the flags' maximum.
LOW_PERCENT = 90
# Limits of the nodes that read.
LIMITS = {
    "fetch_timeout_s": 60.0,
    "max_fetch_bytes": 16 * 2**30,
    "low_watermark_percent": LOW_PERCENT,
    "high_watermark_percent": LOW_PERCENT,
}
# Prompts that warm a new worker, and their length.
WARMING = 4
WARMING_TOKENS = 300


@dataclass
class Measured:
    """Figures of one length's prompt from one tier, in seconds."""

    first_token_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)


def long_model(folder: pathlib.Path, tokens: int) -> str:
    """Write the demo model to ``folder`` with a position limit for prompts of ``tokens`` tokens."""
    shutil.copytree(plain_folder(), folder, copy_function=os.symlink)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["max_position_embeddings"] = max(settings["max_position_embeddings"], tokens + 64)
    path.unlink()
    path.write_text(json.dumps(settings))
    return str(folder)


def tokens_of(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def ask(target: str, prompt: list[int], into: Measured) -> None:
    with Client(target) as client:
        begun_s = time.perf_counter()
        last = list(client.generate(prompt, temperature=0.0, max_tokens=1, ignore_eos=True))[-1]
    into.first_token_s.append(time.perf_counter() - begun_s)
    assert last.usage is not None
    into.cached_tokens.append(last.usage.cached_tokens)


def copy_s(total_bytes: int) -> float:
    """Return the seconds of the fastest of five plain copies."""
    source, target = torch.ones(total_bytes, dtype=torch.uint8), torch.empty(total_bytes, dtype=torch.uint8)
    taken = []
    for _ in range(5):
        begun_s = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - begun_s)
    return min(taken)


class Tiers:
    """The nodes, one of which at a time has a decode worker, and the measurements by length and tier."""

    def __init__(self, cluster: Hosts, args: argparse.Namespace, target: str) -> None:
        self._cluster, self._args, self._target = cluster, args, target
        self._worker = ""
        self._fillers = 0
        # Prompts of different lengths share no prefix.
        self.prompts = {length: tokens_of(f"prompt {length}", length) for length in args.lengths}
        self.measured: dict[int, dict[str, Measured]] = {length: {} for length in args.lengths}

    def measure(self, tier: str, length: int) -> None:
        """Send one prompt, whose KV is only at ``tier``. Raises AssertionError if it was computed."""
        into = self.measured[length].setdefault(tier, Measured())
        ask(self._target, self.prompts[length], into)
        seconds, cached = into.first_token_s[-1], into.cached_tokens[-1]
        # The block of the last token is always computed.
        assert tier == "computed" or cached >= length - BLOCK_TOKENS, f"{tier}: {cached} of {length} tokens were cached"
        print(f"{length} tokens, {tier}: {seconds:.2f} s, {cached} cached", flush=True)

    def bring_all(self) -> None:
        for length in self._args.lengths:
            ask(self._target, self.prompts[length], Measured())

    def serve_at(self, node_id: str) -> None:
        """Move the decode worker to a node, and warm it."""
        if self._worker:
            self._cluster.stop(self._worker)
        self._worker = self._cluster.worker("decode", node_id, "--cpu-threads", str(len(os.sched_getaffinity(0))))
        self._cluster.sees(self._target, self._worker)
        for _ in range(WARMING):
            self.fill(WARMING_TOKENS)

    def stop(self, node_id: str) -> None:
        """End a node, which loses its pool, with its decode worker."""
        self._cluster.stop(self._worker)
        self._worker = ""
        self._cluster.stop(node_id)

    def fill(self, tokens: int) -> None:
        """Compute a new prompt."""
        self._fillers += 1
        ask(self._target, tokens_of(f"filler {self._fillers}", tokens), Measured())


def run(args: argparse.Namespace, folder: pathlib.Path) -> tuple[Tiers, int]:
    """Measure everything; return it with the bytes of a block."""
    most = max(args.lengths)
    model = long_model(folder / "model", most)
    with s3_service(folder / "s3") as service:
        common = ("--model", model, "--dtype", "bfloat16", "--max-model-len", str(most + 32))
        with hosts(folder, *common, forked=False) as cluster:
            pool = ("--kv-transport", "grpc", "--kv-pool-bytes", args.pool)
            bucket = ("--object-url", service.direct_url())
            cluster.node("kv-a", "--kv-transport", "grpc", "--kv-pool-bytes", args.pool, *bucket)
            cluster.defaults = {NODE: LIMITS}
            target = cluster.gateway("--split-policy", "colocated")
            tiers = Tiers(cluster, args, target)
            tiers.serve_at("kv-a")
            for length in args.lengths:
                for tier in ("computed", *["pool"] * args.rounds):
                    tiers.measure(tier, length)
            status = cluster.node_status("kv-a")
            wait_for(
                "the bucket to have all", lambda: cluster.node_status("kv-a").object_blocks >= status.committed_blocks
            )
            disk = ("--disk-path", str(folder / "disk"), "--disk-bytes", "16GiB")
            cluster.node("kv-c", *pool, *disk)
            tiers.serve_at("kv-c")
            # Spill everything to the disk: fetch the prompts from kv-a, then evict them by others.
            tiers.bring_all()
            tiers.fill(BLOCK_TOKENS * status.total_blocks * (100 - LOW_PERCENT + 2) // 100)
            tiers.stop("kv-c")
            for tier, node_id, flags in (
                ("other node", "kv-b", ()),
                ("disk", "kv-c", disk),
                ("bucket", "kv-d", bucket),
            ):
                if tier == "disk":
                    cluster.stop("kv-a")
                for _ in range(args.rounds):
                    cluster.node(node_id, *pool, *flags)
                    tiers.serve_at(node_id)
                    if tier == "disk" and args.cold:
                        os.sync()
                        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")
                    for length in args.lengths:
                        tiers.measure(tier, length)
                    tiers.stop(node_id)
            return tiers, status.block_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.tiers", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32_768], help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", default="1280MiB", help="size of each node's pool")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before the disk is read")
    parser.add_argument("--name", default="tiers", help="name of the result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        tiers, block_bytes = run(args, pathlib.Path(name))
    table = Table("tokens", "from", "first token s", "of computing", "moved at GB/s", "of a plain copy")
    result: dict[str, Any] = {"cold": args.cold, "rounds": args.rounds, "lengths": {}}
    for length, by_tier in tiers.measured.items():
        total_bytes = length // BLOCK_TOKENS * block_bytes
        computed_s = by_tier["computed"].first_token_s[0]
        in_pool_s, limit = statistics.median(by_tier["pool"].first_token_s), total_bytes / copy_s(total_bytes)
        rows = {}
        for tier, measured in by_tier.items():
            taken_s = statistics.median(measured.first_token_s)
            moved = total_bytes / (taken_s - in_pool_s) if tier not in ("computed", "pool") else None
            rows[tier] = {
                "first_token_s": spread(measured.first_token_s),
                "share_of_computing": taken_s / computed_s,
                "bytes_per_s": moved,
                "share_of_copy": moved and moved / limit,
                "cached_tokens": measured.cached_tokens,
            }
            speed = (f"{moved / 1e9:.2f}", f"{moved / limit:.2f}") if moved else ("", "")
            table.add_row(str(length), tier, f"{taken_s:.2f}", f"{taken_s / computed_s:.3f}", *speed)
        result["lengths"][length] = {"bytes": total_bytes, "copy_bytes_per_s": limit, "tiers": rows}
    show_table(table)
    print(save(args.name, result))


if __name__ == "__main__":
    main()
