"""`python -m lab.benchmarks.kv_handoff`: from the last chunk's commit on a prefill worker to the first step on the
decode worker, in the real cluster. No block is copied on the way: the pool is one memory, and slot numbers change
hands.

The times come from the components' own traces: from the end of the last `kv.commit` span to the start of the
`decode.prompt_tail` span. The cluster runs one request at a time, so nothing else is in the step. Beside the hand-off
stands a floor of the same run: an empty call between two processes. The hand-off is half a call, the node's answer to a
worker that waits, and then the worker's step loop has to wake up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.table import Table

from lab.benchmarks.cluster import prompts
from lab.benchmarks.report import save, show_table
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.otlp import EXPORT_DELAY_MS, Receiver, collecting
from pillion import AsyncClient, Client
from pillion.loadgen.figures import percentile

MODEL = "demo"
# The exporters send the last spans within this time.
SETTLE_S = 2.0


def handoffs_ms(receiver: Receiver) -> list[float]:
    """Returns each traced request's time from its last commit on the prefill worker to its first decode step."""
    found = []
    for trace in receiver.traces().values():
        committed = [s.end_time_unix_nano for name, s in trace if (name, s.name) == ("pillion-prefill", "kv.commit")]
        began = [span.start_time_unix_nano for _, span in trace if span.name == "decode.prompt_tail"]
        if committed and began:
            found.append((began[0] - max(committed)) / 1e6)
    return found


@contextmanager
def exporting(delay_ms: int = EXPORT_DELAY_MS) -> Iterator[Receiver]:
    """Runs a receiver and point the standard variables at it meanwhile; see :meth:`Receiver.environ`."""
    with collecting() as receiver:
        variables = receiver.environ(delay_ms)
        os.environ.update(variables)
        try:
            yield receiver
        finally:
            for name in variables:
                del os.environ[name]


def main() -> None:
    """Starts the cluster, sends requests one after the other, and writes results/kv_handoff.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--input-len", type=int, default=33)
    args = parser.parse_args()
    with (
        exporting() as receiver,
        tempfile.TemporaryDirectory(prefix="pil-") as folder,
        served(pathlib.Path(folder), MODEL, "--split-policy", "disaggregated") as cluster,
    ):
        floor = asyncio.run(_empty_call(cluster.target))
        with Client(cluster.target) as client:
            for ids in prompts(7, args.requests, args.input_len):
                list(client.generate(ids, temperature=0.0, max_tokens=2, ignore_eos=True))
        time.sleep(SETTLE_S)
        bytes_copied = _bytes_between_nodes(cluster)
    found = sorted(handoffs_ms(receiver))
    result = {
        "requests": len(found),
        "input_tokens": args.input_len,
        "handoff_ms": {f"p{percent}": percentile(found, percent) for percent in (50, 90, 99)},
        "empty_call_ms": floor,
        "bytes_copied": bytes_copied,
    }
    table = Table(title=f"Hand-off of {len(found)} prompts, ms")
    for name in ("", "p50", "p90", "p99"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("last commit to first step", *(f"{value:.2f}" for value in result["handoff_ms"].values()))
    table.add_row("an empty call", *(f"{value:.2f}" for value in floor.values()))
    show_table(table)
    print(f"bytes copied: {bytes_copied}; written to {save('kv_handoff', result)}")


async def _empty_call(target: str) -> dict[str, float]:
    times_ms = []
    async with AsyncClient(target) as client:
        for _ in range(200):
            begin = time.perf_counter()
            await client.models()
            times_ms.append((time.perf_counter() - begin) * 1000)
    return {"p50": statistics.median(times_ms), "p90": percentile(times_ms, 90), "p99": percentile(times_ms, 99)}


def _bytes_between_nodes(cluster: ServedCluster) -> int:
    """Returns the bytes of all blocks that a node fetched or wrote to a lower tier."""
    status = cluster.node_status()
    brought = status.fetched_blocks + status.restored_blocks + status.bucket_blocks
    return int((brought + status.spilled_blocks) * status.block_bytes)


if __name__ == "__main__":
    main()
