"""A prefill and a decode process on one GPU, without and with NVIDIA's Multi-Process Service, against one that is both.

Without MPS the GPU belongs to one process at a time, in slices of milliseconds; with it, kernels of both run side by
side. Each process has weights and a pool of its own here, which does not change their effect on each other's steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.line import rank

CONTROL = "nvidia-cuda-mps-control"
PHASE_S, SMOKE_PHASE_S = 6.0, 0.0
CONTROL_TIMEOUT_S = 20.0
# The share of the multiprocessors that the prefill process may use in the last phase.
PREFILL_PERCENT = 70
# MPS knows two priorities: 0, and this one below it.
BELOW_NORMAL = "1"


def run(bench: Bench) -> None:
    """Measures each way to share the GPU."""
    bench.attempt("two processes, no MPS", lambda: _phase(bench, "no MPS", {}, {}, alone=True))
    limited = f"MPS, prefill below decode's priority and on {PREFILL_PERCENT} %"
    for name, limit in (("MPS", {}), (limited, _limit(PREFILL_PERCENT))):

        def measure(name: str = name, limit: Mapping[str, str] = limit) -> None:
            if bench.smoke or shutil.which(CONTROL) is None:
                note = "not measured: a smoke run" if bench.smoke else f"not measured: needs {CONTROL}"
                bench.report(Row(f"two processes, {name}", None, "", note=note))
                return
            with daemon() as environment:
                _phase(bench, name, environment, limit, alone=False)

        bench.attempt(f"two processes, {name}", measure)


def _limit(percent: int) -> dict[str, str]:
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent), "CUDA_MPS_CLIENT_PRIORITY": BELOW_NORMAL}


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Runs MPS for the processes that get the yielded environment."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        known = {**os.environ, **environment}
        subprocess.run([CONTROL, "-d"], env=known, check=True, timeout=CONTROL_TIMEOUT_S)
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run([CONTROL], input=b"quit\n", env=known, check=False, timeout=CONTROL_TIMEOUT_S)


class _Worker:
    """A process of :mod:`lab.benchmarks.gpu.worker`."""

    def __init__(self, role: str, smoke: bool, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "lab.benchmarks.gpu.worker", role, *(["--smoke"] if smoke else [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            cwd=Path(__file__).resolve().parents[3],
        )

    def wait_ready(self) -> None:
        """Waits until the process is ready. Raises RuntimeError where it ends instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError(f"a worker ended with {self._process.wait()}")

    def begin(self, role: str, seconds: float) -> None:
        """Starts a run of ``role``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{role} {seconds}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the run's result. Raises RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Ends the process by closing its input, and by force after a while."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CONTROL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _phase(bench: Bench, name: str, environment: Mapping[str, str], limit: Mapping[str, str], *, alone: bool) -> None:
    seconds = SMOKE_PHASE_S if bench.smoke else PHASE_S
    decode = _Worker("decode", bench.smoke, environment)
    prefill = _Worker("prefill", bench.smoke, {**environment, **limit})
    try:
        for worker in (decode, prefill):
            worker.wait_ready()
        if alone:
            for worker, role in ((decode, "decode"), (prefill, "prefill"), (decode, "mixed")):
                worker.begin(role, seconds)
                _report(bench, {"mixed": "one process, mixed steps"}.get(role, f"{role} alone"), worker.answer())
        # The prefill runs longer, so that it overlaps with every decode step.
        prefill.begin("prefill", seconds + 1.0 * bool(seconds))
        decode.begin("decode", seconds)
        for worker, role in ((decode, "decode"), (prefill, "prefill")):
            _report(bench, f"two processes, {name}: {role}", worker.answer())
    finally:
        for worker in (decode, prefill):
            worker.end()


def _report(bench: Bench, name: str, found: dict[str, Any]) -> None:
    steps = sorted(found["step_ms"])
    more = {"steps": len(steps), "step_p99_ms": rank(steps, 99), "step_max_ms": steps[-1]}
    note = f"p99 {more['step_p99_ms']:.2f} ms"
    if found["prompt_tokens"]:
        more["prompt_tokens_per_s"] = found["prompt_tokens"] / found["seconds"]
        note += f", {more['prompt_tokens_per_s']:.0f} prompt tokens/s"
    bench.report(Row(name, statistics.median(steps), "ms a step", note=note, more=more))
