"""The real cluster under a saturating load, by split policy: output tokens/s, ITL, TTFT.

Needs the servers' packages (Redis, gRPC, OpenTelemetry ...); a row names missing ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.line import rank
from lab.benchmarks.gpu.needs import missing_packages
from lab.benchmarks.gpu.shapes import shape_of, write_model

if TYPE_CHECKING:
    from lab.testbed.cluster import ServedCluster

POLICIES = {
    "colocated": ("--split-policy=colocated", "--prefill-workers=0"),
    "disaggregated": ("--split-policy=disaggregated", "--prefill-workers=1"),
    "auto": ("--split-policy=auto", "--prefill-workers=1"),
}
READY_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """A closed loop of ``streams`` clients with ``rounds`` requests each."""

    streams: int
    rounds: int
    prompt_tokens: int
    answer_tokens: int


FULL, SMOKE = ClusterLoad(128, 3, 1024, 256), ClusterLoad(1, 1, 24, 2)


def run(bench: Bench) -> None:
    """Measure each policy."""
    missing = missing_packages()
    if missing:
        bench.report(Row("end to end", None, "", note=f"not measured: needs {', '.join(missing)}"))
        return
    for policy in ("colocated",) if bench.smoke and not bench.only else POLICIES:
        name = f"end to end, {policy}"
        bench.attempt(name, partial(_measure, bench, name, policy, _pretended(bench.smoke)))


def _pretended(smoke: bool) -> dict[str, str]:
    """Return a smoke run's environment with a fake CUDA driver; {} otherwise."""
    if not smoke:
        return {}
    from lab.testbed import fake_cuda

    return fake_cuda.environment(FAKE_CUDA_TOUCHABLE="1", FAKE_CUDA_TOTAL_BYTES=str(2**28))


def _measure(bench: Bench, name: str, policy: str, environment: Mapping[str, str]) -> None:
    from lab.testbed import cluster as support

    load = SMOKE if bench.smoke else FULL
    budget = 64 if bench.smoke else 2048
    flags = (
        *POLICIES[policy],
        "--device=cuda",
        "--load-format=dummy",
        "--dtype=bfloat16",
        f"--max-num-seqs={load.streams}",
        f"--max-num-batched-tokens={max(budget, load.streams)}",
        f"--max-num-batched-prefill-tokens={budget}",
        f"--max-model-len={max(64, 2 * (load.prompt_tokens + load.answer_tokens))}",
        f"--max-inflight-requests={2 * load.streams}",
        *(("--heartbeat-timeout-ms=30000", "--chunk-size=32") if bench.smoke else ()),
    )
    support.READY_TIMEOUT_S = READY_TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        model = write_model(Path(folder) / "dummy", shape_of(bench.smoke))
        with _environment(environment), support.served(Path(folder), str(model), *flags) as served:
            if not bench.smoke:
                asyncio.run(_ask_all(served.target, ClusterLoad(load.streams, 1, load.prompt_tokens, 8), 1))
            before, began_s = _cores(served), time.perf_counter()
            seen = asyncio.run(_ask_all(served.target, load, 2))
            took_s = time.perf_counter() - began_s
            used = {name: (spent_s - before[name]) / took_s for name, spent_s in _cores(served).items()}
    tokens = sum(1 + len(gaps) for _, gaps in seen)
    first = sorted(first_s for first_s, _ in seen)
    gaps = sorted(gap for _, each in seen for gap in each)
    more = {
        "requests": len(seen),
        "itl_p50_ms": 1e3 * rank(gaps, 50),
        "itl_p99_ms": 1e3 * rank(gaps, 99),
        "ttft_p50_ms": 1e3 * statistics.median(first),
        "ttft_p99_ms": 1e3 * rank(first, 99),
        **{f"{name}_cores": cores for name, cores in used.items()},
    }
    note = "ITL p99 {itl_p99_ms:.1f} ms, TTFT p50 {ttft_p50_ms:.0f} ms".format(**more)
    bench.report(Row(name, tokens / took_s, "output tokens/s", note=note, more=more))


def _cores(served: ServedCluster) -> dict[str, float]:
    """Return the core seconds used by each part of a cluster, and by this process as its clients."""
    found = {"clients": time.process_time()}
    for role in ("gateway", "decode", "prefill", "kvnode"):
        times = [process.cpu_times() for process in served.components(role)]
        found[role] = sum(each.user + each.system for each in times)
    return found


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


async def _ask_all(target: str, load: ClusterLoad, seed: int) -> list[tuple[float, list[float]]]:
    """Run a load; return each request's seconds to its first token and between tokens."""
    from pillion import AsyncClient

    found: list[tuple[float, list[float]]] = []

    async def stream(client: AsyncClient, number: int) -> None:
        draw = random.Random(1000 * seed + number)
        for _ in range(load.rounds):
            prompt = [draw.randrange(2, 250) for _ in range(load.prompt_tokens)]
            begun_s, last_s, first_s = time.perf_counter(), 0.0, 0.0
            gaps: list[float] = []
            async for delta in client.generate(prompt, temperature=0.0, max_tokens=load.answer_tokens, ignore_eos=True):
                if not delta.token_ids:
                    continue
                now_s = time.perf_counter()
                count = len(delta.token_ids)
                if last_s:
                    gaps += [(now_s - last_s) / count] * count
                else:
                    first_s = now_s - begun_s
                    gaps += [0.0] * (count - 1)
                last_s = now_s
            found.append((first_s, gaps))

    async with AsyncClient(target) as client:
        await asyncio.gather(*(stream(client, number) for number in range(load.streams)))
    return found
