"""The peer of :mod:`lab.benchmarks.gpu.peer`: transformers' continuous batching under a closed loop of streams.

It is used as transformers' own ``generate_batch`` uses it, with its defaults, but for two things: a stream asks again
as soon as its answer has ended, where ``generate_batch`` is given all requests at once, and no answer ends early.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from lab.benchmarks.gpu.line import EngineLoad, LoopFigures
from pillion.engine.backends.gpu.gpu_weights import DUMMY_SPREAD

# After this time no stream asks again; what has ended by then counts.
MAX_LOOP_S = 40.0
RESULT_TIMEOUT_S = 1.0
# On a CPU the cache's size is not found out from the memory that is free.
SMOKE_BLOCKS, SMOKE_BATCH_TOKENS = 16, 64


def random_model(config: Mapping[str, Any], device: torch.device) -> Any:
    """Makes transformers' model of a config.json, in bfloat16, with the random weights of ``--load-format dummy``."""
    named = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**named), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, DUMMY_SPREAD)
    return model


class PeerLoop:
    """One load on a model."""

    def __init__(self, model: Any, load: EngineLoad) -> None:
        self._model, self._load = model, load
        self._draw = random.Random(0)
        self._left = load.streams * load.rounds
        self.about = ""

    def run(self) -> LoopFigures:
        """Runs the load. Raises RuntimeError where a request failed."""
        load, model = self._load, self._model
        hints = WorkloadHints(
            max_prompt_length=load.prompt_tokens, max_generated_length=load.answer_tokens, num_requests=load.streams
        )
        on_cpu = model.device.type == "cpu"
        sizes = {"num_blocks": SMOKE_BLOCKS, "max_batch_tokens": SMOKE_BATCH_TOKENS} if on_cpu else {}
        with model.continuous_batching_context_manager(
            # No token has the number -1, so every answer is as long as asked for.
            generation_config=GenerationConfig(
                max_new_tokens=load.answer_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**sizes),
            workload_hints=hints,
        ) as manager:
            self.about = f"transformers {transformers.__version__}, {model.config._attn_implementation} attention"
            return self._asked(manager)

    def _ask(self, manager: Any) -> None:
        self._left -= 1
        prompt = [self._draw.randrange(2, 250) for _ in range(self._load.prompt_tokens)]
        manager.add_request(prompt, max_new_tokens=self._load.answer_tokens, record_timestamps=True, eos_token_id=-1)

    def _asked(self, manager: Any) -> LoopFigures:
        began_s, done, under_way = time.perf_counter(), [], 0
        while self._left or under_way:
            while under_way < self._load.streams and self._left:
                self._ask(manager)
                under_way += 1
            found = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if found is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
                continue
            if not found.is_finished():
                continue
            if found.error is not None:
                raise RuntimeError(f"transformers failed a request: {found.error}")
            done.append(found)
            under_way -= 1
            if time.perf_counter() - began_s > MAX_LOOP_S:
                self._left = 0
                self.about += f", stopped asking after {MAX_LOOP_S:.0f} s"
        took_s = time.perf_counter() - began_s
        # Both clocks are time.perf_counter.
        first = sorted(each.timestamps[0] - each.created_time for each in done)
        gaps = sorted(b - a for each in done for a, b in pairwise(each.timestamps))
        return LoopFigures(sum(len(each.generated_tokens) for each in done), took_s, first, gaps)
