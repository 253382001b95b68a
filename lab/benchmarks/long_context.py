"""One very long prompt by chunked prefill: memory over time, and speed by position.

    python -m lab.benchmarks.long_context --tokens 131072

`pillion serve` with the demo model in bfloat16, whose rotary embedding is scaled as Llama 3's, so that the text may be
that long; real processes, with the prompt computed by the prefill worker, chunk by chunk, on all cores. Once a second
the KV node is asked how many blocks are committed, which is how far the prompt is, and the kernel what memory each
process has: its own (RssAnon), files that it maps (RssFile: weights, libraries) and memory that it shares (RssShmem:
the pool, which its users all count). At the end some tokens are generated behind the prompt, and the prompt is asked
for again, which finds its KV in the pool. Attention makes the time quadratic in the length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lab.benchmarks.plot import Chart, line_charts
from lab.benchmarks.report import PICTURES, save, show_table
from lab.testbed.cluster import ServedCluster, served
from lab.testbed.plain_model import plain_folder
from pillion import Client, Timings
from pillion.kvstore.client.node_client import NodeClient

BLOCK_TOKENS = 16
SAMPLE_S = 1.0
# Tokens that are generated behind the prompt.
ANSWER_TOKENS = 16
# Speeds are means over so many equal parts of the prompt.
PARTS = 32
MIB = 2**20
ROLES = ("prefill", "decode", "kvnode", "gateway")


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen at one moment: seconds since the request began, tokens whose KV is committed, and the memory of
    each role's processes in MiB: own, mapped files, shared."""

    at_s: float
    tokens: int
    memory_mib: dict[str, tuple[float, float, float]]


def scaled_model(folder: pathlib.Path, tokens: int) -> str:
    """Makes the demo model in ``folder``, with Llama 3's scaling for texts of ``tokens`` tokens."""
    shutil.copytree(plain_folder(), folder, copy_function=os.symlink)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    trained = settings["max_position_embeddings"]
    scaling = {
        "rope_type": "llama3",
        "factor": max(1.0, tokens / trained),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": trained,
    }
    settings |= {
        "max_position_embeddings": tokens + 64,
        "rope_parameters": settings["rope_parameters"] | scaling,
    }
    path.unlink()
    path.write_text(json.dumps(settings))
    return str(folder)


def memory_mib(pids: Sequence[int]) -> tuple[float, float, float]:
    """Memory of some processes in MiB: own, mapped files, shared. One that has ended counts nothing."""
    total = [0.0, 0.0, 0.0]
    for pid in pids:
        try:
            lines = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
            for place, name in enumerate(("RssAnon", "RssFile", "RssShmem")):
                total[place] += int(lines[name].split()[0]) / 1024
        except (OSError, KeyError):
            continue
    return total[0], total[1], total[2]


class Observer(threading.Thread):
    """Takes samples of a cluster until it is ended."""

    def __init__(self, cluster: ServedCluster, begun_s: float) -> None:
        super().__init__(daemon=True)
        self.samples: list[Seen] = []
        self._pids = {role: [one.pid for one in cluster.components(role)] for role in ROLES}
        self._address = f"unix:{next(cluster.folder.rglob('kvnode*.sock'))}"
        self._begun_s = begun_s
        self._over = threading.Event()

    def run(self) -> None:
        asyncio.run(self._watch())

    def end(self) -> None:
        self._over.set()
        self.join()

    async def _watch(self) -> None:
        node = NodeClient(self._address, "long-context")
        try:
            before = (await node.status()).committed_blocks_ever
            over = False
            while not over:
                # The last sample is taken after the end.
                over = self._over.is_set()
                tokens = ((await node.status()).committed_blocks_ever - before) * BLOCK_TOKENS
                memory = {role: memory_mib(pids) for role, pids in self._pids.items()}
                self.samples.append(Seen(time.perf_counter() - self._begun_s, tokens, memory))
                await asyncio.to_thread(self._over.wait, SAMPLE_S)
        finally:
            await node.aclose()


def ask(target: str, prompt: Sequence[int], max_tokens: int) -> tuple[float, float, Timings]:
    """Returns seconds to the first token, seconds for each further one, and the answer's timings."""
    with Client(target) as client:
        begun_s, times = time.perf_counter(), []
        for delta in client.generate(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True):
            if delta.token_ids:
                times.append(time.perf_counter())
    assert delta.timings is not None
    return times[0] - begun_s, (times[-1] - times[0]) / (max_tokens - 1), delta.timings


def speeds(samples: Sequence[Seen], tokens: int) -> list[tuple[float, float]]:
    """(position, tokens/s) of equal parts of the prompt, each from a sample to a sample."""
    found, at = [], samples[0]
    for sample in samples[1:]:
        if sample.tokens - at.tokens >= tokens / PARTS:
            position = (sample.tokens + at.tokens) / 2
            found.append((position, (sample.tokens - at.tokens) / (sample.at_s - at.at_s)))
            at = sample
    return found


def draw(path: pathlib.Path, samples: Sequence[Seen], by_position: Sequence[tuple[float, float]]) -> None:
    """Draws memory over time, and speed by position."""
    shown = samples[:: max(1, len(samples) // 64)]
    own = {
        f"{role}: own": [(sample.at_s, sample.memory_mib[role][0]) for sample in shown]
        for role in ("prefill", "decode", "gateway")
    }
    pool = {
        "pages of the pool that the prefill worker has": [(one.at_s, one.memory_mib["prefill"][2]) for one in shown]
    }
    line_charts(
        path,
        [
            Chart("The pool", "seconds", "MiB", pool),
            Chart("Memory of processes", "seconds", "MiB", own),
            Chart("Speed", "position in the prompt", "tokens/s", {"prefill": by_position}),
        ],
    )


def main() -> None:
    """Computes one prompt, prints, and writes results/NAME.json and docs/long-context.svg."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.long_context", description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill chunk")
    parser.add_argument("--name", default="long_context", help="name of the result file")
    parser.add_argument("--picture", type=pathlib.Path, default=PICTURES / "long-context.svg")
    args = parser.parse_args()
    draw_ids = random.Random(128)
    prompt = [draw_ids.randrange(1000, 40_000) for _ in range(args.tokens)]
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        model = scaled_model(folder / "model", args.tokens + ANSWER_TOKENS)
        flags = ("--dtype", "bfloat16", "--max-model-len", str(args.tokens + 2 * ANSWER_TOKENS), "--chunk-size")
        # A tenth of the pool is kept for decodes.
        pool_bytes = (args.tokens * 8 // 7 + 4096) * 30 * 2 * 3 * 64 * 2
        with served(folder, model, *flags, str(args.chunk), "--kv-pool-bytes", str(pool_bytes)) as cluster:
            ask(cluster.target, prompt[: 2 * args.chunk], 2)
            observer = Observer(cluster, time.perf_counter())
            observer.start()
            try:
                first_s, each_s, timings = ask(cluster.target, prompt[::-1], ANSWER_TOKENS)
            finally:
                observer.end()
            again_s, _, found = ask(cluster.target, prompt[::-1], 2)
    samples = observer.samples
    by_position = speeds(samples, args.tokens)
    peak = {role: max(sample.memory_mib[role][0] for sample in samples) for role in ROLES}
    start = {role: samples[0].memory_mib[role][0] for role in ROLES}
    table = Table("what", "figure")
    table.add_row("tokens, of them computed by the prefill worker", f"{args.tokens}, {timings.prefilled_tokens}")
    table.add_row("first token s; found in the pool", f"{first_s:.1f}; {again_s:.2f} ({found.cached_tokens} cached)")
    table.add_row("tokens/s in the first and the last part", f"{by_position[0][1]:.0f}, {by_position[-1][1]:.0f}")
    table.add_row("ms a token behind it", f"{each_s * 1000:.0f}")
    for role in ROLES:
        table.add_row(f"own memory of {role}, MiB: start, most", f"{start[role]:.0f}, {peak[role]:.0f}")
    show_table(table)
    draw(args.picture, samples, by_position)
    result: dict[str, Any] = {
        "tokens": args.tokens,
        "chunk_tokens": args.chunk,
        "first_token_s": first_s,
        "found_again_s": again_s,
        "found_again_tokens": found.cached_tokens,
        "prefilled_tokens": timings.prefilled_tokens,
        "answer_s_per_token": each_s,
        "pool_bytes": pool_bytes,
        "own_mib": {role: {"start": start[role], "most": peak[role]} for role in ROLES},
        "tokens_per_s": by_position,
    }
    print(save(args.name, result))


if __name__ == "__main__":
    main()
