"""A step of 16 streams on layers with a state, beside a streaming read of their weights and states.

    python -m lab.benchmarks.cpu_states

Layers have the shapes of Qwen3-Next-80B (gated delta rule), Granite 4.0-H-Tiny (Mamba-2) and LFM2-1.2B (convolutions)
with random weights in bfloat16; their MLPs and experts are left out. A model has four such layers, so that no weight is
in a cache when its turn comes again. What a step writes, as many bytes as the states that it reads, is no part of the
read. Steps and reads alternate, and a figure is the quickest run of each, because whatever else runs on the machine
only adds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table

from lab.benchmarks.cpu_limits import PeakDots, ReadAll
from lab.benchmarks.cpu_steps import BLOCK_SIZE, PAGE_BYTES, SINK_THREADS, dots_rate, fastest
from lab.benchmarks.gpt_oss import READ_BYTES, RandomTensors, copy_layer
from lab.benchmarks.report import save, show_table
from pillion.config import ModelFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.backends.cpu.cpu_backend import CpuBackend
from pillion.engine.backends.cpu.cpu_model import CpuModel, model_builder, plan_model
from pillion.engine.backends.cpu.cpu_weights import InMemoryMatrices, MatrixPacker
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.checkpoints.weights import load_final_norm, load_layer
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
from pillion.kernels.cpu.states.convolutions import Convolve
from pillion.kernels.step import StateSlots, StepBatch
from pillion.kernels.torch.torch_linear import Linear

STREAMS, LAYERS = 16, 4
COMMON = {
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS + 1,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mlp_only_layers": [*range(LAYERS + 1)],
        "layer_types": ["linear_attention"] * LAYERS + ["full_attention"],
    },
    "Granite-4.0-H-Tiny": {
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "head_dim": 128,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "layer_types": ["mamba"] * LAYERS + ["attention"],
    },
    "LFM2-1.2B": {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "head_dim": 64,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv"] * LAYERS + ["full_attention"],
    },
}


class StateBench:
    """A model of one shape over a filled pool, after one step of all streams."""

    def __init__(self, shape: dict[str, Any], isa: Isa, threads: int) -> None:
        with tempfile.TemporaryDirectory(prefix="pil-") as name:
            (pathlib.Path(name) / "config.json").write_text(json.dumps({**COMMON, **shape}))
            prepared = prepare(ModelFlags(model=name, load_format="dummy", dtype="bfloat16", max_model_len=64))
            config = load_config(prepared.folder)
            layout = kv_layout(prepared, BLOCK_SIZE, LAYOUT_VERSION)
            shard, length, weights = whole_model(config), prepared.max_model_len, random_weights(config)
            plan = plan_model(model_builder(config, weights, layout, prepared.dtype, length, shard))
            code = ModelCache().make("kernels")
            specs = [*(one.spec for one in plan.operations), ReadAll(), PeakDots("bf16")]
            kernels = compile_kernels(specs, isa, cache_folder=code)
            model = CpuModel(config, shard, isa, layout, prepared.dtype, length, weights, plan, kernels, False, code)
        self.backend = CpuBackend(model, threads)
        self._run()

    def _run(self) -> None:
        """Runs a step, in which each stream's state is read in some slots and written into others."""
        layout = self.backend.layout
        pages = layout.state_pages
        slots = STREAMS * (1 + 2 * pages)
        pool = aligned_bytes(slots * layout.block_bytes, PAGE_BYTES)
        self._states = pool[STREAMS * layout.block_bytes :].view(np.float32)
        self._states[:] = 1e-3
        self.backend.bind_pool(pool.data, slots)
        order = np.random.default_rng(0).permutation(2 * STREAMS * pages).astype(np.int32) + STREAMS
        reads, writes = order.reshape(2, STREAMS, pages)
        batch = StepBatch(
            token_ids=np.full(STREAMS, 5, np.int32),
            positions=np.full(STREAMS, 7, np.int32),
            query_starts=np.arange(STREAMS + 1, dtype=np.int32),
            context_lens=np.full(STREAMS, 8, np.int32),
            block_tables=np.arange(STREAMS, dtype=np.int32)[:, None],
            sample_rows=np.arange(STREAMS, dtype=np.int32),
            states=StateSlots(reads.copy(), writes.copy()),
        )
        self.backend.forward(batch)

    def measure(self, rounds: int, threads: int) -> dict[str, float]:
        """Returns the quickest of all layers' steps and of the read, in ms a layer, what they read, and the parts of a
        step beside what limits them."""
        operations = [one for layer in mixers(self.backend.model.plan.operations) for one in layer]
        products = [one for one in operations if isinstance(one.spec, Gemm)]
        others = [one for one in operations if not isinstance(one.spec, Gemm)]
        weights = [one.values["weights"] for one in products]
        reads = [self._read(data, data.numel() * data.element_size()) for data in weights]
        state_bytes = STREAMS * self.backend.layout.state_bytes
        of_states = self._read(self._states, state_bytes)
        parts = [operations, [*reads, of_states], products, others, [of_states]]
        runs, best, rate = [self.backend.again(part) for part in parts], [float("inf")] * len(parts), 0.0
        for _ in range(rounds):
            best = [min(least, fastest(run, 1)) for least, run in zip(best, runs, strict=True)]
            rate = max(rate, dots_rate(self.backend, threads, "bf16"))
        step, read, multiplied, rest, states = (seconds * 1e3 / LAYERS for seconds in best)
        work = sum(2 * STREAMS * data.numel() for data in weights) / LAYERS
        return {
            "step_ms": step,
            "read_ms": read,
            "ratio": step / read,
            "mib": sum(one.values["bytes"] for one in parts[1]) / LAYERS / 2**20,
            "states_mib": state_bytes / LAYERS / 2**20,
            "products_ms": multiplied,
            "registers_ms": work / rate * 1e3,
            "others_ms": rest,
            "states_read_ms": states,
        }

    @staticmethod
    def _read(data: Any, size: int) -> Operation:
        sink = np.ones(16 * SINK_THREADS, np.float32)
        return Operation(ReadAll(), {"data": data, "sink": sink, "bytes": size // READ_BYTES * READ_BYTES})


_COLUMNS = (
    "step_ms",
    "read_ms",
    "mib",
    "states_mib",
    "ratio",
    "products_ms",
    "registers_ms",
    "others_ms",
    "states_read_ms",
)


def random_weights(config: ModelConfig) -> InMemoryMatrices:
    """Returns packed weights, in which layers with a state after the first one are copies of it."""
    held, source, wide = InMemoryMatrices(), RandomTensors(config), torch.bfloat16
    packer = MatrixPacker(held, config, whole_model(config), "bf16")
    with torch.inference_mode():
        held.tensor("embedding", torch.zeros(config.vocab_size, config.hidden_size, dtype=wide))
        packer.linear("lm_head", Linear.plain(source.take("lm_head", wide), None))
        packer.norm("final_norm", load_final_norm(source, config, wide))
        for layer in (0, LAYERS):
            packer.layer(
                f"layers.{layer}.", layers_of(config)[layer], load_layer(source, config, wide, layer, Linear.plain)
            )
        for layer in range(1, LAYERS):
            copy_layer(held, layer)
    return held


def mixers(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Yields the operations of each layer with a state, from the products before its convolution to the one after."""
    for place, operation in enumerate(operations):
        if isinstance(operation.spec, Convolve):
            begin = end = place
            while isinstance(operations[begin - 1].spec, Gemm):
                begin -= 1
            while not isinstance(operations[end].spec, Gemm):
                end += 1
            yield operations[begin : end + 1]


def main() -> None:
    """Measure, print, and write results/cpu_states.json."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.cpu_states", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    isa = choose_isa(args.kernels, host_features())
    if isa is None:
        raise ConfigError("there are no kernels for this processor")
    found = {}
    for name, shape in SHAPES.items():
        bench = StateBench(shape, isa, args.threads)
        found[name] = bench.measure(args.rounds, args.threads)
        bench.backend.close()
    table = Table(title=f"a layer with a state, {STREAMS} streams, {isa.name}, {args.threads} threads")
    headings = ("shape", "step ms", "read ms", "MiB", "of which states", "step / read")
    for heading in (*headings, "products ms", "registers ms", "the rest ms", "states' read ms"):
        table.add_column(heading, justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in _COLUMNS))
    show_table(table)
    save("cpu_states", {"kernels": isa.name, "threads": args.threads, "shapes": found})


if __name__ == "__main__":
    main()
