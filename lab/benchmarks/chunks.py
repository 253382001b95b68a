"""What the token budget of a GPU's steps buys and costs, in simulated time: fixed budgets beside the one that grows
where nobody decodes.

One co-located worker, with the production scheduler, runs steps that cost what an H100's data sheet lets expect of them
(:mod:`pillion.engine.backends.gpu.gpu_roofline`); no GPU was measured. It learns their cost, as real workers do, from
steps with some noise. "fixed" budgets have no target (--target-itl-ms 0); "dynamic" is what is there by default.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.benchmarks.report import save, show_table
from lab.fleets.traffic import ClientRecord, Request
from lab.fleets.world import FleetConfig, simulate, simulate_closed
from pillion.config import AUTO, ServeFlags
from pillion.engine.backends.gpu.gpu_roofline import DeviceRates, expected_cost
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.loadgen.figures import percentile

# NVIDIA's data sheet of the H100 SXM: dense bfloat16.
H100 = DeviceRates(bytes_per_s=3.35e12, operations_per_s=989e12, memory_bytes=80 * 10**9)
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
# Keys and values of 32 layers and 8 heads of 128 bfloat16 values.
KV_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
FIXED_TOKENS = (256, 512, 2048, 8192)
# Prompts and answers are lognormal around these medians with this deviation of the logarithm. Of the documents' load,
# every so many requests has a long prompt.
CHAT_TOKENS, ANSWER_TOKENS, DEVIATION = 1000, 200, 0.6
DOCUMENT_TOKENS, EACH_DOCUMENT, LONGEST_PROMPT = 16_000, 8, 65_536


def h100_cost() -> tuple[float, ...]:
    """Returns what a step of Llama 3 8B is expected to cost on an H100."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_3_8B))
        prepared = PreparedModel(
            folder=Path(folder),
            name="llama-3-8b",
            fingerprint="",
            dtype="bfloat16",
            max_model_len=131_072,
            vocab_size=128_256,
            eos_token_ids=(),
            bos_token_id=None,
        )
        return tuple(expected_cost(H100, prepared, KV_TOKEN_BYTES))


def requests(count: int, rate: float, each_document: int, seed: int) -> list[Request]:
    """Arrivals of a Poisson process; all budgets get the same ones. ``each_document``: 0 for chats alone."""
    draw, at_s, found = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += draw.expovariate(rate)
        median = DOCUMENT_TOKENS if each_document and number % each_document == each_document - 1 else CHAT_TOKENS
        prompt = min(LONGEST_PROMPT, max(16, round(median * draw.lognormvariate(0.0, DEVIATION))))
        found.append(Request(number, at_s, prompt, max(16, round(ANSWER_TOKENS * draw.lognormvariate(0.0, DEVIATION)))))
    return found


def fleet(cost_s: tuple[float, ...], tokens: int, target_itl_ms: float | str) -> FleetConfig:
    """One co-located worker on a GPU; 0 tokens leave the budget to the device."""
    flags = ServeFlags(
        device="cuda",
        prefill_workers=0,
        decode_workers=1,
        max_num_batched_tokens=tokens,
        target_itl_ms=target_itl_ms,
        max_num_seqs=128,
        max_inflight_requests=100_000,
        max_inflight_tokens=10**12,
    )
    return FleetConfig(flags=flags, prefill_cost_s=cost_s, decode_cost_s=cost_s, one_node=True)


def figures(records: Sequence[ClientRecord], seconds: float) -> dict[str, float]:
    """Returns the table's columns."""
    gaps_ms = [gap * 1000 for record in records for gap in record.gaps_s]
    ttfts_ms = [record.ttft_s * 1000 for record in records]
    tokens = sum(record.request.prompt_tokens + record.request.answer_tokens for record in records)
    return {
        "ttft_p50_ms": percentile(ttfts_ms, 50),
        "ttft_p99_ms": percentile(ttfts_ms, 99),
        "itl_p50_ms": percentile(gaps_ms, 50),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "tokens_per_s": tokens / seconds,
        "failed": sum(record.failed for record in records),
    }


def sweep(args: argparse.Namespace, cost_s: tuple[float, ...]) -> list[dict[str, Any]]:
    """Simulates each load with each budget."""
    loads: dict[str, tuple[int, float, int]] = {
        "documents, one after the other": (1, 1000.0, 1),
        f"{args.rate:g} chats a second": (0, args.rate, 0),
        f"{args.document_rate:g} chats and documents a second": (EACH_DOCUMENT, args.document_rate, 0),
        "chats and documents, 64 at once": (EACH_DOCUMENT, 1000.0, 64),
    }
    budgets: list[tuple[str, int, float | str]] = [(f"fixed {tokens}", tokens, 0.0) for tokens in FIXED_TOKENS]
    budgets += [("dynamic", 0, AUTO), *((f"dynamic, {target:g} ms", 0, target) for target in args.targets)]
    rows = []
    for (load, (each, rate, at_once)), (name, tokens, target) in itertools.product(loads.items(), budgets):
        count = args.requests // 10 if at_once == 1 else args.requests
        arrivals, config = requests(count, rate, each, args.seed), fleet(cost_s, tokens, target)
        if at_once:
            records, seconds = simulate_closed(config, arrivals, at_once)
        else:
            records, _ = simulate(config, arrivals)
            seconds = max(record.request.at_s + record.ttft_s + sum(record.gaps_s) for record in records)
        used = config.settled().flags.max_num_batched_tokens
        rows.append({"load": load, "budget": name, "tokens": used, **figures(records, seconds)})
    return rows


def main() -> None:
    """Simulate, print, write results/chunks.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests of each load")
    parser.add_argument("--rate", type=float, default=12.0, help="chats in a second")
    parser.add_argument("--document-rate", type=float, default=4.0, help="chats and documents in a second")
    parser.add_argument("--targets", type=float, nargs="*", default=[25.0, 50.0], help="values of --target-itl-ms")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cost_s = h100_cost()
    rows = sweep(args, cost_s)
    for load, found in itertools.groupby(rows, key=lambda row: row["load"]):
        table = Table(title=load)
        for heading in ("budget", "tokens", "TTFT p50, p99 ms", "ITL p50, p99 ms", "tokens/s"):
            table.add_column(heading, justify="right")
        for row in found:
            table.add_row(
                row["budget"],
                f"{row['tokens']:,}",
                f"{row['ttft_p50_ms']:,.0f}, {row['ttft_p99_ms']:,.0f}",
                f"{row['itl_p50_ms']:.1f}, {row['itl_p99_ms']:.1f}",
                f"{row['tokens_per_s']:,.0f}",
            )
        show_table(table)
    save("chunks", {"load": vars(args), "step_cost_s": cost_s, "rows": rows})


if __name__ == "__main__":
    main()
