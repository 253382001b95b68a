"""Load clients for any streaming server: `pillion bench`'s driver with a closed loop or a trace, and figures of a run.

On a small machine the driver runs on the server's cores, so its processor time is measured (``driver_cpu_share``).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pillion.loadgen.drive import LoadDriver
from pillion.loadgen.figures import Run, summarize
from pillion.loadgen.load import LoadConfig, LoadSession, make_sessions
from pillion.loadgen.target import LoadTarget

# Ordinary token ids of the demo model, above its special tokens.
TOKEN_RANGE = (1000, 40_000)


class DrivenLoad(Protocol):
    """A load for the driver: ``concurrency`` sessions at any time, or None to send each at its own time."""

    @property
    def concurrency(self) -> int | None:
        """Number of concurrent sessions."""

    def sessions(self, seed: int) -> list[LoadSession]:
        """Return the sessions, determined by load and seed."""


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """``requests`` answers of ``output_tokens`` each, ``concurrency`` of them at any time."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        """Tokens in, tokens out and concurrency, e.g. "256/128 x 8"."""
        return f"{self.input_tokens}/{self.output_tokens} x {self.concurrency}"

    def sessions(self, seed: int) -> list[LoadSession]:
        """Return sessions of one random prompt each, all different, determined by load and seed."""
        # A seed per load: shared prefixes between loads would hit a prefix cache.
        own = random.Random(f"{self.name} {seed}").getrandbits(48)
        config = LoadConfig(
            input_len=str(self.input_tokens),
            output_len=str(self.output_tokens),
            requests=self.requests,
            concurrency=self.concurrency,
            token_range=TOKEN_RANGE,
            seed=own,
        )
        return make_sessions(config)


async def measure(target: LoadTarget, sessions: Sequence[LoadSession], concurrency: int | None) -> Run:
    """Send all sessions, ``concurrency`` at a time or each when it is due, and close the target.

    Raises RuntimeError for a failed request, and for an answer shorter or longer than requested, whose rate would not
    compare.
    """
    try:
        run = await LoadDriver(target, sessions, concurrency=concurrency).run()
    finally:
        await target.aclose()
    for record in run.records:
        if not record.ok:
            raise RuntimeError(f"{record.status}: {record.error}")
        if record.output_tokens != record.asked_tokens:
            raise RuntimeError(f"an answer has {record.output_tokens} tokens instead of {record.asked_tokens}")
    return run


def plain_step_s(load: ClosedLoad, run: Run) -> float:
    """Return the median seconds between tokens of streams whose prompts are done."""
    # Skip a stream's first tokens, during which other prompts are computed.
    return statistics.median(gap for record in run.records for gap in record.itl_s[load.output_tokens // 3 :])


def figures(load: ClosedLoad, run: Run) -> dict[str, float]:
    """Return a run's figures: rates in tokens per second, latencies in milliseconds."""
    summary = summarize(run.records, run.duration_s)
    ttft, itl = summary["ttft_ms"], summary["itl_ms"] or {"p50": 0.0, "p99": 0.0, "max": 0.0}
    found = {
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "itl_p50_ms": itl["p50"],
        "itl_p99_ms": itl["p99"],
        "itl_max_ms": itl["max"],
        "stream_decode_tokens_per_s": statistics.median(
            1 / record.tpot_s if record.tpot_s else 0.0 for record in run.records
        ),
        "tokens_per_message": summary["output_tokens"] / sum(len(record.messages) for record in run.records),
        "driver_cpu_share": run.cpu_s / run.duration_s,
    }
    if load.concurrency == 1:
        # Without other requests, the time to the first token is the prompt's.
        found["prefill_tokens_per_s"] = load.input_tokens / found["ttft_p50_ms"] * 1000
    return found
