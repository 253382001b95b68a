"""One process of the MPS section: streams that decode, a prompt that is prefilled, or both in the same steps.

    python -m lab.benchmarks.gpu.worker decode|prefill [--smoke]

The process prints "ready", then answers each line ``ROLE SECONDS`` on its standard input with a line of JSON: the step
times in ms and the tokens of prompts that it ran meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from lab.benchmarks.gpu.bench import Bench
from lab.benchmarks.gpu.calls import sampled_rows
from lab.benchmarks.gpu.model import RandomModel, RunningBackend
from lab.benchmarks.gpu.shapes import BatchEntry, decodes

STREAMS, CONTEXT, PROMPT, CHUNK, MIXED_CHUNK = 64, 1024, 8192, 2048, 512
# The number of steps between two readings of the clock.
STEPS_AT_ONCE = 16
WARM_UP_S = 0.5
SMOKE = (2, 20, 16, 8, 8)


class Work:
    """Batches of each role, which are repeated for a given time."""

    def __init__(self, running: RunningBackend, *, smoke: bool) -> None:
        streams, context, prompt, chunk, small = SMOKE if smoke else (STREAMS, CONTEXT, PROMPT, CHUNK, MIXED_CHUNK)
        self._running, tables = running, running.tables
        self._at_once = 2 if smoke else STEPS_AT_ONCE
        alone = decodes(streams, context)
        self._batches = {
            "decode": [tables.batch(alone)],
            "prefill": [tables.batch([BatchEntry(chunk, begin, False)]) for begin in range(0, prompt, chunk)],
            "mixed": [tables.batch([*alone, BatchEntry(small, begin, False)]) for begin in range(0, prompt, small)],
        }
        self._chunks = {"decode": 0, "prefill": chunk, "mixed": small}

    def run(self, role: str, seconds: float) -> dict[str, object]:
        """Runs steps of ``role``; returns their times in ms, and the tokens of prompts."""
        batches, chunk = self._batches[role], self._chunks[role]
        rows = [sampled_rows(len(batch.sample_rows)) for batch in batches]
        began_s, times, steps = time.perf_counter(), list[float](), 0
        while not steps or time.perf_counter() < began_s + seconds:
            many = batches * max(1, self._at_once // len(batches))
            pace = self._running.pace(many, rows * (len(many) // len(batches)))
            times += [1e3 * each for each in pace.landed]
            steps += len(many)
        return {
            "role": role,
            "step_ms": times,
            "prompt_tokens": steps * chunk,
            "seconds": time.perf_counter() - began_s,
        }


def main() -> None:
    """Serves the lines of standard input until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("decode", "prefill"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    streams, context, prompt, chunk, small = SMOKE if args.smoke else (STREAMS, CONTEXT, PROMPT, CHUNK, MIXED_CHUNK)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        bench = Bench(smoke=args.smoke, rows=Path(folder) / "rows")
        tokens = max(chunk, streams + small)
        model = RandomModel(bench, max_tokens=tokens, max_seqs=streams + 1, max_model_len=max(prompt, context) + 64)
        running = model.backend(streams * (context + 16) + prompt + 16)
        work = Work(running, smoke=args.smoke)
        # This compiles the kernels that no graph holds.
        for role in () if args.smoke else ("decode", "prefill", "mixed"):
            work.run(role, WARM_UP_S)
        print("ready", flush=True)
        for line in sys.stdin:
            role, seconds = line.split()
            print(json.dumps(work.run(role, float(seconds))), flush=True)
        running.close()


if __name__ == "__main__":
    main()
