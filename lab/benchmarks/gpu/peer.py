"""Pillion's engine beside transformers' continuous batching, in the same run: the same shapes, requests and GPU.

Both are libraries here: Pillion's scheduler over its GPU backend (:mod:`lab.benchmarks.gpu.line`), and transformers'
``ContinuousBatchingManager`` over its paged KV (:mod:`lab.benchmarks.gpu.peer_loop`). Neither has a server in front;
what Pillion's costs is measured end to end. Each gets random weights of the same spread, a closed loop of streams with
prompts of random tokens, greedy answers of a fixed length, and the GPU's memory for itself.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from lab.benchmarks.gpu.bench import Bench, Row
from lab.benchmarks.gpu.line import EngineLoad, EngineLoop, LoopFigures, report_loop
from lab.benchmarks.gpu.mixture_shapes import QWEN3_30B, TINY_MIXTURE
from lab.benchmarks.gpu.model import BLOCK_SIZE, RandomModel
from lab.benchmarks.gpu.shapes import LLAMA_8B, TINY

LOADS = (EngineLoad(32, 2, 1024, 256, 2048), EngineLoad(128, 2, 1024, 256, 2048))
SMOKE_LOADS = (EngineLoad(2, 1, 20, 3, 24),)
WARM_UP = EngineLoad(4, 1, 256, 8, 512)
# Spare blocks for each stream, so that no stream is preempted.
SPARE_BLOCKS = 16
FASTER, SMOOTHER = ">= 2.0", "<= 0.1"


def run(bench: Bench) -> None:
    """Measures each model with each load, first Pillion's engine, then transformers."""
    llama, mixture = (TINY.config(), TINY_MIXTURE) if bench.smoke else (LLAMA_8B.config(), QWEN3_30B)
    for name, config in {"Llama 3 8B": llama, "Qwen3-30B-A3B": mixture}.items():

        def measure(name: str = name, config: Mapping[str, Any] = config) -> None:
            ours = _ours(bench, name, config)
            _free(bench)
            _theirs(bench, name, config, ours)

        bench.attempt(name, measure)
        _free(bench)


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _ours(bench: Bench, name: str, config: Mapping[str, Any]) -> list[LoopFigures]:
    loads = SMOKE_LOADS if bench.smoke else LOADS
    longest = max(load.prompt_tokens + load.answer_tokens for load in loads)
    streams = max(load.streams for load in loads)
    budget = max(load.step_tokens for load in loads)
    model = RandomModel(bench, max_tokens=budget, max_seqs=streams, max_model_len=longest + BLOCK_SIZE, config=config)
    room = streams * (longest + SPARE_BLOCKS * BLOCK_SIZE)
    running = model.backend(room)
    try:
        if not bench.smoke:
            EngineLoop(running.backend, room // BLOCK_SIZE, WARM_UP).run()
        found = []
        for load in loads:
            found.append(EngineLoop(running.backend, room // BLOCK_SIZE, load).run())
            report_loop(bench, f"{name}, {load.streams} streams, Pillion's engine", found[-1])
        return found
    finally:
        running.close()


def _theirs(bench: Bench, name: str, config: Mapping[str, Any], ours: list[LoopFigures]) -> None:
    try:
        # This import takes seconds, and other sections run where transformers is not installed.
        from lab.benchmarks.gpu.peer_loop import PeerLoop, random_model
    except ImportError as error:
        bench.report(Row(f"{name}, transformers", None, "", note=f"not measured: it cannot be imported: {error}"))
        return
    model = random_model(config, bench.device)
    for load, own in zip(SMOKE_LOADS if bench.smoke else LOADS, ours, strict=True):
        loop = PeerLoop(model, load)
        found = loop.run()
        title = f"{name}, {load.streams} streams"
        report_loop(bench, f"{title}, transformers", found, loop.about)
        share = own.tokens_per_s / found.tokens_per_s
        bench.report(Row(f"{title}: Pillion's tokens a second", share, "times theirs", share, "theirs", FASTER))
        share = own.p99_s / found.p99_s
        bench.report(Row(f"{title}: Pillion's p99 between tokens", share, "of theirs", share, "theirs", SMOOTHER))
