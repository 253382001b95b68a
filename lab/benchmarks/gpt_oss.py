"""A decode step of gpt-oss-20b's shape beside a streaming read of the weights and the KV that it touches.

    python -m lab.benchmarks.gpt_oss

The weights are random: experts in MXFP4 and all other matrices in bfloat16, as in openai/gpt-oss-20b, 13 GiB in all. Of
a layer's 32 experts a step of one stream touches 4. One layer is packed, and the others are copies of it in memory of
their own. Steps and reads alternate, and a figure is the quickest run of each, because whatever else runs on the
machine only adds to it. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lab.benchmarks.cpu_limits import ReadAll
from lab.benchmarks.cpu_steps import BLOCK_SIZE, SINK_THREADS, CpuStepBench
from lab.benchmarks.report import save, show_table
from pillion.config import ModelFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import CpuModel, model_builder, plan_model
from pillion.engine.backends.cpu.cpu_weights import WIDE_KINDS, InMemoryMatrices, MatrixPacker
from pillion.engine.checkpoints.checkpoint import decoder_tensors
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.checkpoints.weights import DTYPES, load_final_norm, load_layer
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import whole_model
from pillion.errors import ConfigError
from pillion.kernels.cpu.attention.kv_layout import LAYOUT_VERSION
from pillion.kernels.cpu.language.isa import Isa, choose_isa, host_features
from pillion.kernels.cpu.products.gemm import Gemm
from pillion.kernels.cpu.runtime.compiler import compile_kernels
from pillion.kernels.cpu.runtime.program import Operation, aligned_bytes
from pillion.kernels.step import StepBatch
from pillion.kernels.torch.quantized_matrix import Matrix, QuantizedMatrix
from pillion.kernels.torch.torch_linear import Linear

# The config of openai/gpt-oss-20b, as far as it says something about shapes.
SHAPE: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
# Inputs that share a scale in MXFP4, and the exponents of random scales, at which nothing overflows.
MXFP4_GROUP, LEAST_EXPONENT, MOST_EXPONENT = 32, -9, -6
# Plain weights are of this size.
WEIGHT = 0.02
CONTEXTS = (264, 4096)
# ReadAll reads multiples of so many bytes.
READ_BYTES = 65_536


class RandomTensors:
    """Random tensors in the place of a checkpoint's; matrices of experts are in MXFP4."""

    def __init__(self, config: ModelConfig) -> None:
        self._checkpoint_names = decoder_tensors(config)
        self._random = torch.Generator().manual_seed(0)

    def has(self, key: str) -> bool:
        """Returns whether the model has a tensor of that name."""
        return key in self._checkpoint_names

    def take(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a plain tensor."""
        return torch.empty(self._shape(key), dtype=dtype).uniform_(-WEIGHT, WEIGHT, generator=self._random)

    def take_matrix(self, key: str, dtype: torch.dtype) -> Matrix:
        """Returns a matrix, in MXFP4 where it is an expert's."""
        if ".experts." not in key:
            return self.take(key, dtype)
        rows, columns = self._shape(key)
        codes = torch.randint(16, (rows, columns), dtype=torch.uint8, generator=self._random)
        shape = rows, columns // MXFP4_GROUP
        exponents = torch.randint(LEAST_EXPONENT, MOST_EXPONENT + 1, shape, generator=self._random)
        return QuantizedMatrix("fp4_e2m1", codes, torch.exp2(exponents.float()), MXFP4_GROUP)

    def _shape(self, key: str) -> tuple[int, ...]:
        stacked = self._checkpoint_names[key][0]
        shapes = [one.shape if one.part is None else one.shape[1:] for one in stacked]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]


def random_weights(config: ModelConfig, dtype: str) -> InMemoryMatrices:
    """Returns packed weights, whose layers after the first one are copies of it."""
    held, source, wide = InMemoryMatrices(), RandomTensors(config), DTYPES[dtype]
    packer = MatrixPacker(held, config, whole_model(config), WIDE_KINDS[dtype])
    with torch.inference_mode():
        # What takes room while it is packed comes first.
        packer.linear("lm_head", Linear.plain(source.take("lm_head", wide), None))
        packer.norm("final_norm", load_final_norm(source, config, wide))
        packer.layer("layers.0.", layers_of(config)[0], load_layer(source, config, wide, 0, Linear.plain))
        for layer in range(1, config.num_layers):
            copy_layer(held, layer)
        # All steps are of one token, so that the system gives memory to a few pages of the embedding only.
        embedding = torch.zeros(config.vocab_size, config.hidden_size, dtype=wide)
        embedding[:16].uniform_(-1, 1)
        held.tensor("embedding", embedding)
    return held


def copy_layer(held: InMemoryMatrices, layer: int) -> None:
    """Makes ``layer`` a copy of the first one, in memory of its own."""
    prefix = f"layers.{layer}."
    for name in [name for name in held.tensors if name.startswith("layers.0.")]:
        held.tensor(prefix + name.removeprefix("layers.0."), held.tensors[name].clone())
    for name in [name for name in held.numbers if name.startswith("layers.0.")]:
        held.number(prefix + name.removeprefix("layers.0."), held.numbers[name])


def random_model(prepared: PreparedModel, isa: Isa) -> CpuModel:
    """Returns the model with random weights, and with the kernel of the streaming read beside its own."""
    config = load_config(prepared.folder)
    layout, shard = kv_layout(prepared, BLOCK_SIZE, LAYOUT_VERSION), whole_model(config)
    weights = random_weights(config, prepared.dtype)
    plan = plan_model(model_builder(config, weights, layout, prepared.dtype, prepared.max_model_len, shard))
    code = ModelCache().make("kernels")
    kernels = compile_kernels([*(one.spec for one in plan.operations), ReadAll()], isa, cache_folder=code)
    length = prepared.max_model_len
    return CpuModel(config, shard, isa, layout, prepared.dtype, length, weights, plan, kernels, False, code)


def reads(model: CpuModel, batch: StepBatch) -> list[Operation]:
    """Returns a streaming read of what a step of one stream touches: the matrices that it multiplies by, as many
    experts as its token has, and the keys and values that it sees. The embedding's row, norms and biases are left
    out."""
    sink = np.ones(16 * SINK_THREADS, np.float32)

    def read(data: Any, size: int) -> Operation:
        return Operation(ReadAll(), {"data": data, "sink": sink, "bytes": size // READ_BYTES * READ_BYTES})

    found = []
    for operation in model.plan.operations:
        if isinstance(operation.spec, Gemm):
            values = operation.values
            touched = min(batch.num_tokens * values["x"].each, values["num_groups"])
            found.append(read(values["weights"], values["group_bytes"] * touched))
    context, layout = int(batch.context_lens[0]), model.layout
    token_bytes = layout.block_bytes // (layout.block_size * layout.num_layers)
    seen = sum(min(window or context, context) for window in model.config.sliding_windows)
    kv = aligned_bytes(max(READ_BYTES, seen * token_bytes))
    kv[:] = 0
    return [*found, read(kv, len(kv))]


def measure(bench: CpuStepBench, context: int, rounds: int) -> dict[str, float]:
    """Returns the figures of steps at one context."""
    backend: CpuBackend = bench.backend
    batch = bench.decode(1, context)
    operations = reads(backend.model, batch)
    size = sum(operation.values["bytes"] for operation in operations)
    backend.forward(batch)
    read_all = backend.again(operations)
    read_all()
    step_s = read_s = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        backend.forward(batch)
        middle = time.perf_counter()
        read_all()
        step_s, read_s = min(step_s, middle - begin), min(read_s, time.perf_counter() - middle)
    return {"step_ms": step_s * 1e3, "read_ms": read_s * 1e3, "gb": size / 1e9, "share_of_read": read_s / step_s}


def main() -> None:
    """Measure, print, and write results/gpt_oss.json where the model has all of its layers."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.gpt_oss", description=__doc__)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    isa = choose_isa(args.kernels, host_features())
    if isa is None:
        raise ConfigError("there are no kernels for this processor")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": args.layers}))
        flags = ModelFlags(model=name, load_format="dummy", dtype="bfloat16", max_model_len=max(CONTEXTS))
        model = random_model(prepare(flags), isa)
    bench = CpuStepBench(CpuBackend(model, args.threads))
    found = {str(context): measure(bench, context, args.rounds) for context in CONTEXTS}
    bench.backend.close()
    gib = model.weights.nbytes / 2**30
    table = Table(title=f"gpt-oss-20b's shape, {args.layers} layers, {gib:.1f} GiB, {isa.name}, {args.threads} threads")
    for heading in ("context", "step ms", "read ms", "GB", "GB/s of the step", "share of the read's rate"):
        table.add_column(heading, justify="right")
    for context, row in found.items():
        rate = row["gb"] / row["step_ms"] * 1e3
        cells = (f"{row['step_ms']:.1f}", f"{row['read_ms']:.1f}", f"{row['gb']:.2f}", f"{rate:.1f}")
        table.add_row(context, *cells, f"{row['share_of_read']:.2f}")
    show_table(table)
    if args.layers == SHAPE["num_hidden_layers"]:
        save("gpt_oss", {"kernels": isa.name, "threads": args.threads, "contexts": found})


if __name__ == "__main__":
    main()
