"""Accuracy of quantized weights and KV: perplexity, divergence, agreement of the most likely token.

The text is Python's documentation of its language, cut into windows; each token but the first of a window is predicted
from those before it. All weights run on the CPU kernels and are compared with float32 on torch. The demo model's
channels are shuffled (`lab.benchmarks.shuffled_model`), since its weights have been quantized before. ``--rounded``:
weights in 8 and 4 bits, and the model as stored, also run as products of matrix tiles read them, rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from dataclasses import replace

import torch
from tokenizers import Tokenizer

from lab.benchmarks.accuracy import WINDOW_TOKENS, Accuracy, TextScorer, text_windows
from lab.benchmarks.report import save, show
from lab.benchmarks.shuffled_model import save_shuffled_model
from lab.testbed.plain_model import plain_folder
from pillion.config import ModelFlags
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import load_cpu_model
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import choose_isa, host_features

BLOCK_SIZE = 16
# Rows of the table: --quantization, --quantization-group-size, --kv-cache-dtype and --activation-quantization.
KINDS = {
    "bfloat16": ("none", "auto", "auto", "auto"),
    "int8": ("int8", "auto", "auto", "auto"),
    "int8, groups of 32": ("int8", "32", "auto", "auto"),
    "int8-dynamic": ("int8-dynamic", "auto", "auto", "auto"),
    "int4, groups of 32": ("int4", "32", "auto", "auto"),
    "int4, groups of 128": ("int4", "128", "auto", "auto"),
    "int8, inputs int8": ("int8", "auto", "auto", "int8"),
    "int8, groups of 32, inputs int8": ("int8", "32", "auto", "int8"),
    "int4, groups of 32, inputs int8": ("int4", "32", "auto", "int8"),
    "int4, groups of 128, inputs int8": ("int4", "128", "auto", "int8"),
    "bfloat16, KV fp8": ("none", "auto", "fp8", "auto"),
    "bfloat16, KV int8": ("none", "auto", "int8", "auto"),
}


def scorer(prepared: PreparedModel, threads: int, kv_cache_dtype: str, *, rounds_codes: bool = False) -> TextScorer:
    """Return a scorer on the CPU kernels. Raises ConfigError if this processor has none."""
    isa = choose_isa("auto", host_features())
    if isa is None or (rounds_codes and not isa.matrix_tiles):
        raise ConfigError("there are no such kernels for this processor")
    isa = replace(isa, rounds_codes=rounds_codes)
    return TextScorer(CpuBackend(load_cpu_model(prepared, BLOCK_SIZE, isa, kv_cache_dtype=kv_cache_dtype), threads))


def main() -> None:
    """Measure, print, write results/quantization.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="rows of the table")
    parser.add_argument("--rounded", action="store_true", help="also round each weight of 4 and 8 bits to bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = plain_folder(args.model)
        if args.model == "demo":
            folder = save_shuffled_model(folder, pathlib.Path(name, "shuffled"))
        exact = prepare(ModelFlags(model=str(folder), dtype="float32"), print)
        scorers = {"float32, torch": TextScorer(TorchBackend(exact, BLOCK_SIZE, args.threads))}
        for kind in args.kinds:
            quantization, group, kv, inputs = KINDS[kind]
            flags = ModelFlags(
                model=str(folder),
                dtype="bfloat16",
                quantization=quantization,
                quantization_group_size=group,
                activation_quantization=inputs,
            )
            prepared = prepare(flags, print)
            scorers[kind] = scorer(prepared, args.threads, kv)
            if args.rounded and quantization.startswith("int"):
                scorers[f"{kind}, rounded"] = scorer(prepared, args.threads, kv, rounds_codes=True)
        if args.rounded:
            stored = prepare(ModelFlags(model=args.model, dtype="bfloat16"), print)
            scorers["as stored"] = scorer(stored, args.threads, "auto")
            scorers["as stored, rounded"] = scorer(stored, args.threads, "auto", rounds_codes=True)
        found = {kind: Accuracy() for kind in scorers}
        for ids in text_windows(Tokenizer.from_file(str(folder / "tokenizer.json")), args.windows):
            wanted = scorers["float32, torch"].score(ids)
            for kind, each in scorers.items():
                found[kind].add(ids, wanted, each.score(ids))
    shown = [
        {"weights": kind, "tokens": each.tokens, "perplexity": f"{each.perplexity:.3f}"}
        | {"top-1 agreement": f"{each.agreement:.2%}", "KL divergence": f"{each.mean_divergence:.5f}"}
        for kind, each in found.items()
    ]
    show("accuracy beside float32 on torch", shown)
    rows = [
        {"weights": kind, "tokens": each.tokens, "perplexity": each.perplexity}
        | {"top1_agreement": each.agreement, "kl_divergence": each.mean_divergence}
        for kind, each in found.items()
    ]
    save("quantization", {"model": args.model, "window_tokens": WINDOW_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
