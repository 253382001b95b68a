"""A closed loop of clients over any streaming server, and the figures that its answers make.

The driver keeps only times and token counts while a stream runs, because on a small machine it shares the server's
cores; what it costs is measured (``driver_cpu_share``).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from benchmarks.report import percentile

# Ordinary vocabulary of the demo model; special tokens come first in it.
TOKEN_RANGE = (1000, 40_000)

# Streams one answer to token ids with exactly so many tokens: yields how many tokens each message brought.
Stream = Callable[[Sequence[int], int], AsyncIterator[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server: ``requests`` answers of ``output_tokens``, ``concurrency`` of them at any time."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        """As "256/128 x 8": lengths in and out, and streams at once."""
        return f"{self.input_tokens}/{self.output_tokens} x {self.concurrency}"

    def prompts(self, seed: int) -> list[list[int]]:
        """Random token ids, no two prompts alike; the same for the same load and seed."""
        draw = random.Random(f"{self.name} {seed}")
        return [[draw.randrange(*TOKEN_RANGE) for _ in range(self.input_tokens)] for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as its client saw it: when it was asked (seconds), and (time, tokens) of each message."""

    asked_s: float
    messages: tuple[tuple[float, int], ...]

    @property
    def tokens(self) -> int:
        """All of it."""
        return sum(count for _, count in self.messages)

    @property
    def ttft_ms(self) -> float:
        """From the question to the first message with a token."""
        return (self.messages[0][0] - self.asked_s) * 1000

    @property
    def itl_ms(self) -> list[float]:
        """Gaps between messages. A message of several tokens is one gap: its reader waits for all of them at once."""
        times = [at for at, _ in self.messages]
        return [(after - before) * 1000 for before, after in itertools.pairwise(times)]

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate of one stream after its first message; 0 where there was no other."""
        first, last = self.messages[0], self.messages[-1]
        seconds = last[0] - first[0]
        return (self.tokens - first[1]) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of one load, and the processor time in seconds that the driver took of ``seconds``."""

    answers: tuple[Answer, ...]
    seconds: float
    driver_cpu_s: float


async def drive(stream: Stream, load: Load, seed: int) -> Run:
    """Each of ``load.concurrency`` clients asks again as soon as it is answered, until all prompts are gone.

    Raises RuntimeError for an answer of another length than was asked for: rates would not compare.
    """
    waiting = load.prompts(seed)[::-1]
    answers: list[Answer] = []

    async def client() -> None:
        while waiting:
            prompt, asked = waiting.pop(), time.perf_counter()
            messages = [
                (time.perf_counter(), tokens) async for tokens in stream(prompt, load.output_tokens) if tokens > 0
            ]
            answer = Answer(asked, tuple(messages))
            if answer.tokens != load.output_tokens:
                raise RuntimeError(f"{load.name}: an answer has {answer.tokens} tokens")
            answers.append(answer)

    cpu, begin = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(client())
    return Run(tuple(answers), time.perf_counter() - begin, time.process_time() - cpu)


def figures(load: Load, run: Run) -> dict[str, float]:
    """What one run says: rates in tokens per second, latencies in milliseconds."""
    ttft = [answer.ttft_ms for answer in run.answers]
    itl = [gap for answer in run.answers for gap in answer.itl_ms] or [0.0]
    tokens, messages = sum(a.tokens for a in run.answers), sum(len(a.messages) for a in run.answers)
    found = {
        "output_tokens_per_s": tokens / run.seconds,
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_p99_ms": percentile(ttft, 99),
        "itl_p50_ms": statistics.median(itl),
        "itl_p99_ms": percentile(itl, 99),
        "itl_max_ms": max(itl),
        "stream_decode_tokens_per_s": statistics.median(answer.decode_tokens_per_s for answer in run.answers),
        "tokens_per_message": tokens / messages,
        "driver_cpu_share": run.driver_cpu_s / run.seconds,
    }
    if load.concurrency == 1:
        # Nothing else runs, so the time to the first token is the prompt's.
        found["prefill_tokens_per_s"] = load.input_tokens / found["ttft_p50_ms"] * 1000
    return found
