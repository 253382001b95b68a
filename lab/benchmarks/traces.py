"""Generated requests in the form of the Mooncake traces (Qin et al., FAST 2025).

:mod:`pillion.loadgen.traces` has the form and its reader; `pillion bench --workload trace` replays a file.

    chat       one of some system prompts (Zipf), then turns: each repeats the conversation so far and adds to it
    document   a long text with one or a few questions in short succession

A seed determines the whole trace. Nothing is copied from real traces: shares and lengths are assumptions, stated in
:class:`Mix`. Real traces in this form can be read as they are; others are converted (--csv).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import math
import pathlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from pillion.loadgen.traces import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The composition of a trace.

    Attributes:
        sessions_per_s: rate of new chats and documents (Poisson).
        chat_share: share of chats among the sessions.
        system_prompts, zipf: number of system prompts, and the exponent of their popularity.
        system_tokens, turn_tokens, answer_tokens, document_tokens: medians of log-normal lengths with ``sigma``.
        turns, questions: mean number of turns of a chat and questions about a document (geometric).
        think_s, reread_s: mean time between two of them (exponential).
        max_tokens: longest input; a chat ends there.
    """

    sessions_per_s: float = 1.0
    chat_share: float = 0.8
    system_prompts: int = 50
    zipf: float = 1.1
    system_tokens: int = 2000
    turn_tokens: int = 300
    answer_tokens: int = 200
    document_tokens: int = 16_000
    sigma: float = 0.8
    turns: float = 4.0
    questions: float = 1.3
    think_s: float = 60.0
    reread_s: float = 30.0
    max_tokens: int = 128_000


class TraceText:
    """A session's text so far: numbers of whole blocks, and the number of tokens."""

    def __init__(self, ids: Iterator[int], shared: tuple[int, ...], tokens: int) -> None:
        self._ids = ids
        self.blocks = list(shared)
        self.tokens = len(shared) * TRACE_BLOCK_TOKENS
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        self.blocks += itertools.islice(self._ids, self.tokens // TRACE_BLOCK_TOKENS - len(self.blocks))

    def hash_ids(self) -> tuple[int, ...]:
        partial = [next(self._ids)] if self.tokens % TRACE_BLOCK_TOKENS else []
        return (*self.blocks, *partial)


def generate(seed: int, requests: int, mix: Mix | None = None) -> list[TraceRequest]:
    mix = mix or Mix()
    rng, ids = random.Random(seed), itertools.count()
    prompts = []
    for _ in range(mix.system_prompts):
        tokens = _length(rng, mix.system_tokens, mix.sigma)
        shared = tuple(itertools.islice(ids, tokens // TRACE_BLOCK_TOKENS))
        prompts.append((shared, tokens - len(shared) * TRACE_BLOCK_TOKENS))
    weights = [1 / rank**mix.zipf for rank in range(1, mix.system_prompts + 1)]
    made: list[TraceRequest] = []
    begin_s = 0.0
    while len(made) < 2 * requests:
        begin_s += rng.expovariate(mix.sessions_per_s)
        if rng.random() < mix.chat_share:
            [(shared, rest)] = rng.choices(prompts, weights)
            made += _session(rng, mix, TraceText(ids, shared, rest), begin_s, mix.turns, mix.think_s)
        else:
            text = TraceText(ids, (), min(_length(rng, mix.document_tokens, mix.sigma), mix.max_tokens // 2))
            made += _session(rng, mix, text, begin_s, mix.questions, mix.reread_s, keeps_growing=False)
    # Generate twice the requests, so that new sessions begin until the end.
    made.sort(key=lambda request: request.timestamp)
    return made[:requests]


def _session(
    rng: random.Random, mix: Mix, text: TraceText, at_s: float, mean: float, gap_s: float, *, keeps_growing: bool = True
) -> Iterator[TraceRequest]:
    """Yield a geometric number of requests with mean ``mean``, each about all of ``text``."""
    while True:
        asked = _length(rng, mix.turn_tokens, mix.sigma)
        answered = _length(rng, mix.answer_tokens, mix.sigma)
        if keeps_growing:
            text.grow(asked)
            yield TraceRequest(round(at_s * 1000), text.tokens, answered, text.hash_ids())
            text.grow(answered)
        else:
            # Questions follow the document directly, so they share only its blocks.
            question = TraceText(text._ids, tuple(text.blocks), text.tokens % TRACE_BLOCK_TOKENS + asked)
            yield TraceRequest(round(at_s * 1000), question.tokens, answered, question.hash_ids())
        if rng.random() < 1 / mean or text.tokens > mix.max_tokens:
            return
        at_s += rng.expovariate(1 / gap_s)


def _length(rng: random.Random, median: int, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))


def from_csv(path: pathlib.Path) -> list[TraceRequest]:
    """Read a trace of BurstGPT (Wang et al., 2024) or one of Azure's LLM inference traces, by its columns. Raises
    ValueError for any other table."""
    with path.open(encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        columns = set(table.fieldnames or ())
        if {"Timestamp", "Request tokens", "Response tokens"} <= columns:
            read = [(float(row["Timestamp"]) * 1000, row["Request tokens"], row["Response tokens"]) for row in table]
        elif {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
            read = [(_epoch_ms(row["TIMESTAMP"]), row["ContextTokens"], row["GeneratedTokens"]) for row in table]
        else:
            raise ValueError(f"{path} has the columns neither of BurstGPT nor of Azure's traces")
    return [TraceRequest(at_ms, int(float(asked)), int(float(answered))) for at_ms, asked, answered in read]


def _epoch_ms(text: str) -> float:
    when = datetime.datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp() * 1000


def write_trace(path: pathlib.Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace in Mooncake's form, one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--csv", type=pathlib.Path, help="write this trace of BurstGPT or Azure in Mooncake's form")
    args = parser.parse_args()
    write_trace(args.path, from_csv(args.csv) if args.csv else generate(args.seed, args.requests))


if __name__ == "__main__":
    main()
