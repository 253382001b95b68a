"""Chunks of a long prompt through the whole model, against products of the layers' own shapes."""

from __future__ import annotations

import statistics

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.model import RandomModel, RunningBackend
from lab.benchmarks.gpu.shapes import BatchEntry

TARGET = ">= 0.65"
ROUNDS = 5


def run(bench: Bench) -> None:
    """Measure prompts of 2K and of 8K tokens in chunks of 2K, and one chunk of 8K."""
    chunk, chunks = (8, 2) if bench.smoke else (2048, 4)
    model = RandomModel(bench, max_tokens=chunk * chunks, max_seqs=4, max_model_len=chunk * chunks + 64)
    rate = _rate(bench, model, chunk)
    running = model.backend(chunk * chunks + 64)
    for size, count in ((chunk, 1), (chunk, chunks), (chunk * chunks, 1)):
        name = f"prefill of {count * size} tokens in chunks of {size}"

        def measure(size: int = size, count: int = count, name: str = name) -> None:
            _prompt(bench, model, running, name, size, count, rate)

        bench.attempt(name, measure)
    running.close()


def _rate(bench: Bench, model: RandomModel, chunk: int) -> float:
    """Measure the FLOP/s of a layer's four products, one after the other."""
    shapes = model.shape.products.values()
    seconds = sum(2.0 * chunk * a * b / bench.product_rate(chunk, a, b) for a, b in shapes)
    return sum(2.0 * chunk * a * b for a, b in shapes) / seconds


def _prompt(
    bench: Bench, model: RandomModel, running: RunningBackend, name: str, chunk: int, count: int, rate: float
) -> None:
    steps = [running.tables.batch([BatchEntry(chunk, at * chunk, at + 1 == count)]) for at in range(count)]
    rounds = 1 if bench.smoke else ROUNDS
    pace = running.pace(steps * (rounds + 1))
    # The first round warms up. Later chunks take longer, so compare whole rounds.
    seconds = pace.device[-rounds * count :] or pace.landed[-rounds * count :]
    whole = [sum(seconds[begin : begin + count]) for begin in range(0, len(seconds), count)]
    shape, tokens = model.shape, chunk * count
    attention = 4.0 * tokens * (tokens + 1) / 2 * shape.heads * shape.head_dim * shape.layers
    head = 2.0 * shape.hidden * shape.vocab
    flops = model.flops(tokens) + attention + head
    took_s = statistics.median(whole)
    more = {
        "tokens_per_s": tokens / took_s,
        "tflop_per_s": flops / took_s / 1e12,
        "attention_share_of_flops": attention / flops,
        "launch_ms": statistics.median(pace.launch) * 1e3,
        "min_ms": min(whole) * 1e3,
        "max_ms": max(whole) * 1e3,
    }
    share = flops / rate / took_s
    bench.report(Row(name, took_s * 1e3, "ms", share, "the layers' products at their own rate", TARGET, more=more))
