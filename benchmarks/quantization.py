"""What 8-bit weights and 8-bit KV cost in accuracy: perplexity, and how often the likeliest token stays the likeliest.

The texts are this project's LICENSE and docs/architecture.md, cut into windows; each token but the first of a window is
predicted from those before it. The CPU kernels with bfloat16 weights, with int8 weights, and with KV in 8 bits under
bfloat16 weights are compared with float32 on torch.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.cpu_steps import CpuStepBench, kernels_bench, torch_bench
from benchmarks.report import save, show_table
from pillion.config import ModelFlags
from pillion.engine.checkpoints.prepare import PreparedModel, prepare

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXTS = ("LICENSE", "docs/architecture.md")


@dataclass(frozen=True, slots=True)
class NextTokenScores:
    """A backend's log probabilities [T - 1, vocab] of a window's next tokens, and those tokens [T - 1]."""

    logprobs: torch.Tensor
    targets: torch.Tensor


def windows(prepared: PreparedModel, tokens: int) -> dict[str, list[list[int]]]:
    """Return each text's token ids, cut into whole windows."""
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    found = {}
    for name in TEXTS:
        ids = tokenizer.encode((ROOT / name).read_text("utf-8"), add_special_tokens=False).ids
        found[name] = [ids[begin : begin + tokens] for begin in range(0, len(ids) - tokens + 1, tokens)]
    return found


def judge(bench: CpuStepBench, ids: list[int]) -> NextTokenScores:
    """Score one window."""
    batch = bench.chunk(len(ids), 0)
    rows = np.arange(len(ids), dtype=np.int32)
    logits = bench.backend.forward(replace(batch, token_ids=np.array(ids, np.int32), sample_rows=rows))
    return NextTokenScores(torch.log_softmax(logits[:-1].float(), -1), torch.tensor(ids[1:]))


def compare(exact: NextTokenScores, other: NextTokenScores) -> dict[str, float]:
    """Compare two backends on one window; return sums over its tokens."""
    chosen = other.logprobs.gather(-1, other.targets[:, None])
    divergence = (exact.logprobs.exp() * (exact.logprobs - other.logprobs)).sum(-1)
    return {
        "tokens": float(len(other.targets)),
        "surprise": float(-chosen.sum()),
        "agreed": float((exact.logprobs.argmax(-1) == other.logprobs.argmax(-1)).sum()),
        "divergence": float(divergence.sum()),
    }


def main() -> None:
    """Measure, print, write results/quantization.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(2)
    prepared = {dtype: prepare(ModelFlags(model=args.model, dtype=dtype), print) for dtype in ("float32", "bfloat16")}
    engines = {
        "float32, torch": torch_bench(prepared["float32"], 2),
        "bfloat16": kernels_bench(prepared["bfloat16"], 2),
        "int8": kernels_bench(prepared["bfloat16"], 2, quantization="int8"),
        "bfloat16, KV fp8": kernels_bench(prepared["bfloat16"], 2, kv_cache_dtype="fp8"),
        "bfloat16, KV int8": kernels_bench(prepared["bfloat16"], 2, kv_cache_dtype="int8"),
    }
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for name, texts in windows(prepared["float32"], args.window).items():
        for ids in texts:
            exact = judge(engines["float32, torch"], ids)
            for engine, bench in engines.items():
                total = sums.setdefault((name, engine), {})
                for key, value in compare(exact, judge(bench, ids)).items():
                    total[key] = total.get(key, 0.0) + value
    rows = [figures(name, engine, total) for (name, engine), total in sums.items()]
    show(rows)
    save("quantization", {"model": args.model, "window_tokens": args.window, "rows": rows})


def figures(text: str, engine: str, total: dict[str, float]) -> dict[str, Any]:
    """Return a row of the table."""
    tokens = total["tokens"]
    return {
        "text": text,
        "weights": engine,
        "tokens": int(tokens),
        "perplexity": math.exp(total["surprise"] / tokens),
        "top1_agreement": total["agreed"] / tokens,
        "kl_divergence": total["divergence"] / tokens,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="accuracy beside float32 on torch")
    for heading in ("text", "weights", "tokens", "perplexity", "top-1 agreement", "KL divergence"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["text"],
            row["weights"],
            str(row["tokens"]),
            f"{row['perplexity']:.3f}",
            f"{row['top1_agreement']:.2%}",
            f"{row['kl_divergence']:.5f}",
        )
    show_table(table)


if __name__ == "__main__":
    main()
