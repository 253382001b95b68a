"""Gain of draft tokens: the offline engine with each drafting method beside the same engine without any.

Engines answer the same prompts in turn, so that other work slows all of them; a method's gain is the median of the
rounds' ratios. Texts: *ordinary*: sampled stories, new in each round; *greedy*: greedy stories; *repeating*: a function
that occurs three times in the prompt and that the model writes again; *again*: the first round's stories, for methods
that remember answers. Except in *again* each round has a cache salt. *Saved*: tokens accepted from drafts, without a
step for them. Answers of all methods must be equal, token by token.
"""

from __future__ import annotations

import argparse
import inspect
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lab.benchmarks import report
from lab.benchmarks.report import save, show
from pillion import LLM, RequestOutput, SamplingParams

OFF = "off"
CONFIGS: dict[str, dict[str, Any]] = {
    OFF: {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 16},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
STREAMS = (1, 16)
TEXTS = ("ordinary", "greedy", "repeating", "again")
FUNCTIONS = (report.machine, report.spread, report.save, report.show_table)
SUBJECTS = ("a ferry", "two brothers", "an old map", "the last train", "a lighthouse", "a garden", "rain", "a violin")


def prompt_of(text: str, stream: int) -> str:
    if text == "repeating":
        return f"# Number {stream}\n" + 3 * inspect.getsource(FUNCTIONS[stream % len(FUNCTIONS)])
    asked = f"Tell a long story about {SUBJECTS[stream % len(SUBJECTS)]} in the year {1900 + stream}."
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def answers(llm: LLM, text: str, streams: int, number: int, tokens: int) -> tuple[float, list[RequestOutput]]:
    """Return the seconds and answers of one round; the prompts' KV is cached before."""
    params = SamplingParams(
        temperature=0.0 if text in ("greedy", "repeating") else 1.0, max_tokens=tokens, ignore_eos=True
    )
    salt = "again" if text == "again" else f"{text} {streams} {number}"
    seeds = range(streams) if text == "again" else range(1000 * number, 1000 * number + streams)
    prompts = [{"prompt": prompt_of(text, stream), "cache_salt": salt} for stream in range(streams)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    begin = time.perf_counter()
    found = llm.generate(prompts, [replace(params, seed=seed) for seed in seeds], use_tqdm=False)
    return time.perf_counter() - begin, found


def shares(found: Sequence[RequestOutput]) -> tuple[int, int]:
    """Return the numbers of drafted and of accepted tokens."""
    timings = [one.timings for one in found if one.timings is not None]
    return sum(one.guessed_tokens for one in timings), sum(one.accepted_tokens for one in timings)


def measure(engines: dict[str, LLM], text: str, streams: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Return each method's figures for one text and number of streams."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    drafted, accepted = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    # Round 0 warms up, and is the one that *again* repeats.
    for number in range(rounds + 1):
        said = None
        for name, llm in engines.items():
            seconds, found = answers(llm, text, streams, number, tokens)
            ids = [one.outputs[0].token_ids for one in found]
            if said is not None and ids != said:
                raise SystemExit(f"{name} answers otherwise than {OFF}: {text}, {streams} streams")
            said = ids
            if number:
                rates[name].append(streams * tokens / seconds)
                new, right = shares(found)
                drafted[name] += new
                accepted[name] += right
    return {
        name: {
            "tokens_per_s": statistics.median(rates[name]),
            "ratio": statistics.median(mine / off for mine, off in zip(rates[name], rates[OFF], strict=True)),
            "ratio_of_best": max(rates[name]) / max(rates[OFF]),
            "drafted_share": drafted[name] / (rounds * streams * tokens),
            "saved_share": accepted[name] / (rounds * streams * tokens),
            "accepted_share": accepted[name] / drafted[name] if drafted[name] else 0.0,
        }
        for name in engines
    }


def show_methods(rows: dict[str, dict[str, Any]], title: str) -> None:
    figures = ("tokens_per_s", "ratio", "ratio_of_best", "drafted_share", "accepted_share", "saved_share")
    show(title, [
        {"text, streams": load, "method": name} | {each: row[each] for each in figures}
        for load, methods in rows.items() for name, row in methods.items()
    ])  # fmt: skip


def main() -> None:
    """Measure, print a table, write results/drafts.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="", help="also draft with this model (method draft_model)")
    parser.add_argument("--eagle-head", default="", help="also draft with this EAGLE-3 head (method eagle3)")
    parser.add_argument("--num-speculative-tokens", type=int, default=5, help="of the draft model and the head")
    parser.add_argument("--methods", nargs="*", choices=[name for name in CONFIGS if name != OFF])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    wanted = {name: CONFIGS[name] for name in (OFF, *(CONFIGS if args.methods is None else args.methods))}
    for method, model in (("draft_model", args.draft_model), ("eagle3", args.eagle_head)):
        if model:
            wanted[method] = {"method": method, "model": model, "num_speculative_tokens": args.num_speculative_tokens}
    options = {"max_num_seqs": max(args.streams), "cpu_threads": args.threads, "max_model_len": 2048}
    engines: dict[str, LLM] = {}
    rows: dict[str, dict[str, Any]] = {}
    try:
        for name, config in wanted.items():
            engines[name] = LLM(args.model, **options, **({"speculative_config": config} if config else {}))
        for text in args.texts:
            for streams in args.streams:
                rows[f"{text} {streams}"] = measure(engines, text, streams, args.rounds, args.tokens)
    finally:
        for llm in engines.values():
            llm.close()
    show_methods(rows, f"draft tokens: {args.model}, {args.threads} threads, answers of {args.tokens} tokens")
    path = save(
        "drafts", {"model": pathlib.Path(args.model).name, "threads": args.threads, "tokens": args.tokens, "rows": rows}
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
