"""What chats compute again because only whole blocks of their histories are found.

    python -m lab.benchmarks.partial_blocks

Counts: made conversations, whose lengths have about the means that were published of real ones, with a short system
prompt that all of one kind share. A turn's prompt is all before it, and the new message; what has KV is all but the
last token of the answer before. Of that whole blocks are found, up to 15 tokens are computed again, and a decode
worker that keeps partial blocks copies those after an answer (:mod:`pillion.engine.scheduling.partial_blocks`); those
where a shared system prompt ends inside of a block are computed.

Times: the first tokens of second turns on a running cluster of one decode worker, where the same conversations leave
a partial block of 0 to 15 tokens, with --partial-block-percent 0 and 1: where it is copied, the
time does not grow with it.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from lab.benchmarks.report import save, show_table, spread
from lab.testbed.cluster import served
from lab.testbed.plain_model import plain_folder
from pillion import Client

BLOCK_TOKENS = 16
# Tokens that a chat template adds to each message.
TEMPLATE_TOKENS = 5
SIGMA = 1.0
CONVERSATIONS = 20_000
# System prompts of each kind of chat, and their mean length.
SYSTEM_PROMPTS, SYSTEM_TOKENS = 20, 150


@dataclass(frozen=True, slots=True)
class ChatKind:
    """Means over conversations: turns, and tokens of a message and of an answer."""

    turns: float
    message_tokens: float
    answer_tokens: float


# About what is said of LMSYS-Chat-1M (Zheng et al., 2023), of ShareGPT and of WildChat (Zhao et al., 2024).
KINDS = {
    "LMSYS-Chat-1M": ChatKind(2.0, 70, 215),
    "ShareGPT": ChatKind(3.5, 95, 350),
    "WildChat": ChatKind(2.5, 295, 440),
    "agents, 8 turns of 1,500 tokens": ChatKind(8.0, 1500, 200),
}


@dataclass(slots=True)
class TurnTokens:
    """Tokens over all turns: of prompts; computed where whole blocks are found; and among these the known ones after
    an answer, and where a system prompt ends."""

    prompt: int = 0
    computed: int = 0
    after_answer: int = 0
    after_system: int = 0


def length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)))


def count(kind: ChatKind, seed: int) -> TurnTokens:
    """Counts all turns of made conversations in an endless pool."""
    draw, total = random.Random(seed), TurnTokens()
    systems = [length(draw, SYSTEM_TOKENS) + TEMPLATE_TOKENS for _ in range(SYSTEM_PROMPTS)]
    for _ in range(CONVERSATIONS):
        known = text = draw.choice(systems)
        first = True
        while True:
            text += length(draw, kind.message_tokens) + 2 * TEMPLATE_TOKENS
            again = known % BLOCK_TOKENS
            total.prompt += text
            total.computed += text - known + again
            if first:
                total.after_system += again
            else:
                total.after_answer += again
            first = False
            text += length(draw, kind.answer_tokens)
            known = text - 1
            if draw.random() < 1 / kind.turns:
                break
    return total


def first_token_s(client: Client, prompt: Sequence[int]) -> float:
    begun_s = time.perf_counter()
    next(iter(client.generate(prompt, temperature=0.0, max_tokens=1, ignore_eos=True)))
    return time.perf_counter() - begun_s


def second_turns(client: Client, draw: random.Random, partial_tokens: int, new: int, rounds: int) -> Iterator[float]:
    """Times to the first token of second turns, whose histories end so many tokens into a block."""
    for _ in range(rounds):
        tokens = 10 * BLOCK_TOKENS + partial_tokens
        history = [draw.randrange(1000, 40_000) for _ in range(tokens - 7)]
        for delta in client.generate(history, temperature=0.0, max_tokens=8, ignore_eos=True):
            history += delta.token_ids
        yield first_token_s(client, [*history, *(draw.randrange(1000, 40_000) for _ in range(new))])


def timed(percent: int, new: int, rounds: int) -> dict[int, list[float]]:
    """Measures on a cluster of one decode worker that keeps partial blocks in so much of its pool, by their tokens."""
    found: dict[int, list[float]] = {}
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        flags: tuple[str, ...] = ("--dtype", "bfloat16", "--prefill-workers", "0", "--cpu-threads", "2")
        flags += ("--partial-block-percent", str(percent))
        with (
            served(pathlib.Path(name), str(plain_folder()), *flags, split_policy="colocated") as cluster,
            Client(cluster.target) as client,
        ):
            list(second_turns(client, draw, 8, new, 5))
            # Lengths take turns, so that what else the machine does meets all of them.
            for _ in range(rounds):
                for partial_tokens in (0, 5, 10, 15):
                    found.setdefault(partial_tokens, []).extend(second_turns(client, draw, partial_tokens, new, 1))
    return found


def main() -> None:
    """Count, time, print, write results/partial_blocks.json."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.partial_blocks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="second turns of each length; 0: only count")
    parser.add_argument("--new", type=int, default=40, help="tokens of a second turn's message")
    parser.add_argument("--name", default="partial_blocks", help="name of the result file")
    args = parser.parse_args()
    counts = {name: count(kind, 34) for name, kind in KINDS.items()}
    table = Table("chats", "computed, of the prompt", "known, after an answer", "known, after a system prompt")
    for name, one in counts.items():
        shares = (one.computed / one.prompt, one.after_answer / one.computed, one.after_system / one.computed)
        table.add_row(name, *(f"{share:.1%}" for share in shares))
    show_table(table)
    shown = {
        name: {
            "prompt_tokens": one.prompt,
            "computed_tokens": one.computed,
            "known_after_answers": one.after_answer / one.computed,
            "known_after_systems": one.after_system / one.computed,
        }
        for name, one in counts.items()
    }
    times = {percent: timed(percent, args.new, args.rounds) for percent in ((0, 1) if args.rounds else ())}
    by_partial: dict[str, dict[str, dict[str, float]]] = {}
    for percent, found in times.items():
        by_partial[f"{percent} %"] = {str(tokens): spread(seconds) for tokens, seconds in found.items()}
        for tokens, seconds in found.items():
            first_ms = statistics.median(seconds) * 1000
            print(f"{percent} % kept, {tokens} tokens in a partial block: first token after {first_ms:.1f} ms")
    print(save(args.name, {"chats": shown, "new_tokens": args.new, "second_turn_s": by_partial}))


if __name__ == "__main__":
    main()
