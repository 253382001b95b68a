"""A mixed load, short chats and long prompts that arrive at random, and its figures: split_sim and herding use it.

Arrivals are a Poisson process; everything follows from the seed, so that each policy meets the very same requests at
the same times. A request is good if its first token came in time for its length and the 99th percentile of its own gaps
between tokens kept to the target. Goodput is good requests per second of arrivals.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from lab.fleets.traffic import ClientRecord, Request
from pillion.loadgen.figures import percentile


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the load and its targets."""
    parser.add_argument("--seconds", type=float, default=45.0, help="length of the arrivals of each rate")
    parser.add_argument("--long-share", type=float, default=0.2, help="share of requests with a long prompt")
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--short-tokens", type=int, nargs=2, default=[30, 200])
    parser.add_argument("--answer-tokens", type=int, nargs=2, default=[32, 96])
    parser.add_argument(
        "--ttft-ms",
        type=float,
        default=1000.0,
        help="target of the time to the first token, plus --ttft-token-ms for each prompt token",
    )
    parser.add_argument("--ttft-token-ms", type=float, default=2.0)
    parser.add_argument(
        "--itl-ms", type=float, default=120.0, help="target of the 99th percentile of a request's gaps between tokens"
    )
    parser.add_argument("--seed", type=int, default=1)


def arrivals(args: argparse.Namespace, rate: float, seed: int) -> list[Request]:
    """Draws Poisson arrivals of ``rate`` requests a second, for ``args.seconds``."""
    draw = random.Random(f"arrivals {rate} {seed}")
    found: list[Request] = []
    now = draw.expovariate(rate)
    while now < args.seconds:
        long = draw.random() < args.long_share
        prompt = args.long_tokens if long else draw.randint(*args.short_tokens)
        found.append(Request(len(found), now, prompt, draw.randint(*args.answer_tokens)))
        now += draw.expovariate(rate)
    return found


def good(args: argparse.Namespace, record: ClientRecord) -> bool:
    """Returns whether a request met both targets."""
    ttft_ms = args.ttft_ms + args.ttft_token_ms * record.request.prompt_tokens
    gaps_ms = [gap * 1000 for gap in record.gaps_s] or [0.0]
    return bool(record.ttft_s * 1000 <= ttft_ms and percentile(gaps_ms, 99) <= args.itl_ms)


def figures(args: argparse.Namespace, answers: Sequence[ClientRecord]) -> dict[str, Any]:
    """Returns the figures of one run. Latencies are in milliseconds."""
    gaps = [gap * 1000 for record in answers for gap in record.gaps_s] or [0.0]
    long = [record for record in answers if record.request.prompt_tokens == args.long_tokens]
    short = [record for record in answers if record.request.prompt_tokens != args.long_tokens]

    def ttft(group: Sequence[ClientRecord]) -> dict[str, float]:
        times = [record.ttft_s * 1000 for record in group] or [0.0]
        return {"p50": statistics.median(times), "p99": percentile(times, 99)}

    return {
        "requests": len(answers),
        "goodput_per_s": sum(good(args, record) for record in answers) / args.seconds,
        "good_share": sum(good(args, record) for record in answers) / max(1, len(answers)),
        "ttft_short_ms": ttft(short),
        "ttft_long_ms": ttft(long),
        "itl_ms": {"p50": statistics.median(gaps), "p99": percentile(gaps, 99)},
        "prefilled_share": sum(s.prefilled_tokens for s in answers)
        / max(1, sum(s.request.prompt_tokens for s in answers)),
    }
