"""Traces with the statistics of the three published by Mooncake (Qin et al., FAST 2025), if these are not available.

    python -m lab.benchmarks.mooncake trace.jsonl --workload conversation

Table 2 of the paper has the number of requests, mean lengths, the hit share of an endless cache, and the arrivals: by
recorded times, or a Poisson process. Quantiles of lengths, times between turns and numbers of shared prefixes are
measured on the published files of `conversation` and `synthetic`; nothing is copied. Of `toolagent` only Table 2 is
used: the spread of its lengths, and that a few long tool prompts are shared, are assumptions.

Lengths are two halves of log-normal distributions around their median. A conversation is some turns, each with all
previous text; a document has several questions. Conversations begin with one of some system prompts (Zipf).
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from lab.benchmarks.traces import TraceText, write_trace
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Halves:
    """A distribution around ``median``: below it log-normal with standard deviation ``low`` of the logarithm, above it
    with ``high``; draws are limited to ``most``."""

    median: float
    low: float
    high: float
    most: float = math.inf

    def draw(self, rng: random.Random) -> float:
        step = rng.gauss(0.0, 1.0)
        return min(self.most, self.median * math.exp(step * (self.low if step < 0 else self.high)))

    def tokens(self, rng: random.Random) -> int:
        """Draw a number of tokens."""
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextKind:
    """One kind of sessions.

    Attributes:
        share: of all sessions.
        system_prompts, zipf, system: number of system prompts (0: none), exponent of their popularity, their lengths.
        first: further tokens of the first request.
        more: tokens that each later request adds.
        turns: mean number of requests (geometric).
        gap_s: seconds between two of them.
        grows: requests contain all previous ones with their answers; else only the first one's text.
    """

    share: float
    system_prompts: int = 0
    zipf: float = 1.0
    system: Halves = Halves(1, 0, 0)
    first: Halves
    more: Halves
    answer: Halves
    turns: float
    gap_s: Halves
    grows: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace's statistics. Requests arrive over ``seconds``; times are rounded to ``stamp_s``. ``mean_input``,
    ``mean_output`` and ``hit_share`` are Table 2's, which tests compare with the result."""

    requests: int
    seconds: float
    stamp_s: float
    kinds: tuple[TextKind, ...]
    mean_input: int
    mean_output: int
    hit_share: float


WORKLOADS = {
    "conversation": Workload(
        requests=12_031,
        seconds=3537.0,
        stamp_s=3.0,
        kinds=(
            TextKind(
                share=1.0,
                system_prompts=1,
                system=Halves(600, 0, 0),
                first=Halves(5600, 1.5, 1.12, 123_000),
                more=Halves(472, 1.5, 1.75, 60_000),
                answer=Halves(350, 1.6, 0.5, 2000),
                turns=1.6,
                gap_s=Halves(123.0, 0.85, 1.05),
            ),
        ),
        mean_input=12_035,
        mean_output=343,
        hit_share=0.40,
    ),
    "toolagent": Workload(
        requests=23_608,
        seconds=3537.0,
        stamp_s=3.0,
        kinds=(
            TextKind(
                share=1.0,
                system_prompts=60,
                zipf=1.0,
                system=Halves(3600, 0.35, 0.35, 16_000),
                first=Halves(1500, 1.4, 1.35, 100_000),
                more=Halves(600, 1.2, 1.3, 20_000),
                answer=Halves(90, 1.2, 1.2, 2000),
                turns=1.25,
                gap_s=Halves(30.0, 1.0, 1.0),
            ),
        ),
        mean_input=8596,
        mean_output=182,
        hit_share=0.59,
    ),
    "synthetic": Workload(
        requests=3993,
        seconds=1022.0,
        stamp_s=0.001,
        kinds=(
            TextKind(
                share=0.65,
                first=Halves(90, 1.1, 1.6, 20_000),
                more=Halves(60, 1.1, 1.2, 5000),
                answer=Halves(140, 1.5, 0.9, 900),
                turns=1.2,
                gap_s=Halves(52.0, 1.4, 1.3),
            ),
            TextKind(
                share=0.35,
                first=Halves(21_500, 0.7, 0.6, 190_000),
                more=Halves(40, 1.0, 1.0, 1000),
                answer=Halves(65, 1.7, 1.2, 900),
                turns=3.4,
                gap_s=Halves(52.0, 1.4, 1.3),
                grows=False,
            ),
        ),
        mean_input=15_325,
        mean_output=149,
        hit_share=0.66,
    ),
}


def generate_like(workload: Workload, seed: int, requests: int = 0) -> list[TraceRequest]:
    """Return ``requests`` trace lines in order of time, by default the workload's number; fewer at the same rate."""
    rng, ids = random.Random(seed), itertools.count()
    count = requests or workload.requests
    until_s = workload.seconds * count / workload.requests
    systems = {id(kind): _systems(kind, rng, ids) for kind in workload.kinds}
    per_session = sum(kind.share * kind.turns for kind in workload.kinds)
    # Include sessions that began before the trace.
    lead_s = 3600.0
    rate = workload.requests / workload.seconds / per_session
    made: list[TraceRequest] = []
    begin_s = -lead_s
    while begin_s < until_s:
        begin_s += rng.expovariate(rate)
        [kind] = rng.choices(workload.kinds, [one.share for one in workload.kinds])
        for at_s, text, answered in _session(kind, rng, ids, systems[id(kind)], begin_s):
            if 0 <= at_s < until_s:
                stamp_ms = math.floor(at_s / workload.stamp_s) * workload.stamp_s * 1000
                made.append(TraceRequest(round(stamp_ms), text.tokens, answered, text.hash_ids()))
    made.sort(key=lambda row: row.timestamp)
    return made[:count]


def _systems(kind: TextKind, rng: random.Random, ids: Iterator[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return each system prompt's whole blocks, and the tokens after them."""
    found = []
    for _ in range(kind.system_prompts):
        tokens = kind.system.tokens(rng)
        found.append((tuple(itertools.islice(ids, tokens // TRACE_BLOCK_TOKENS)), tokens % TRACE_BLOCK_TOKENS))
    return found


def _session(
    kind: TextKind,
    rng: random.Random,
    ids: Iterator[int],
    systems: Sequence[tuple[tuple[int, ...], int]],
    at_s: float,
) -> Iterator[tuple[float, TraceText, int]]:
    """Yield a session's requests: time, text, and length of the answer. Read the text before the next request, which
    changes it."""
    shared: tuple[tuple[int, ...], int] = ((), 0)
    if systems:
        [shared] = rng.choices(systems, [1 / rank**kind.zipf for rank in range(1, len(systems) + 1)])
    text = TraceText(ids, shared[0], shared[1] + kind.first.tokens(rng))
    whole, rest = tuple(text.blocks), text.tokens % TRACE_BLOCK_TOKENS
    while True:
        answered = kind.answer.tokens(rng)
        yield at_s, text, answered
        if rng.random() < 1 / kind.turns:
            return
        more = kind.more.tokens(rng)
        if kind.grows:
            text.grow(answered + more)
        else:
            text = TraceText(ids, whole, rest + more)
        at_s += kind.gap_s.draw(rng)


def described(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Summarize a trace: requests, seconds, mean lengths, quantiles of the input, and the hit share of an endless
    cache."""
    seen: set[int] = set()
    cached = 0
    for row in trace:
        blocks = row.hash_ids[: row.input_length // TRACE_BLOCK_TOKENS]
        cached += TRACE_BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(seen.__contains__, blocks))
        seen.update(blocks)
    inputs = sorted(row.input_length for row in trace)
    return {
        "requests": len(trace),
        "seconds": (trace[-1].timestamp - trace[0].timestamp) / 1000,
        "mean_input": statistics.fmean(inputs),
        "p50_input": inputs[len(inputs) // 2],
        "p90_input": inputs[len(inputs) * 9 // 10],
        "mean_output": statistics.fmean(row.output_length for row in trace),
        "hit_share": cached / sum(inputs),
    }


def main() -> None:
    """Write a trace to a file, and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="conversation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=0, help="0: as many as the published trace has")
    args = parser.parse_args()
    trace = generate_like(WORKLOADS[args.workload], args.seed, args.requests)
    write_trace(args.path, trace)
    for name, value in described(trace).items():
        Console().print(f"{name}: {value:,.2f}")


if __name__ == "__main__":
    main()
