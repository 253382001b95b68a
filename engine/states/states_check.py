"""Check of flags for models with states, before their weights are read."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.config import StepFlags, WorkerFlags
from pillion.engine.backends.gpu.gpu_devices import gpu_for_each
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kvstore.memory.domain import CPU

LOOKED_UP = ("ngram", "suffix")


def check_states(flags: WorkerFlags, device: str, config: ModelConfig) -> None:
    """Raise ConfigError if a worker's flags ask for something that models with states do not support yet."""
    found = next(_refused(flags, device), None)
    if found is not None:
        raise ConfigError(f"{config.family}: {found} is not supported yet for models whose layers have states")


def _refused(flags: WorkerFlags, device: str) -> Iterator[str]:
    if device != CPU and flags.pipeline_parallel_size > 1 and gpu_for_each(flags.processes):
        # Shards of a divided pool have the states of some heads, not of some layers.
        yield f"--pipeline-parallel-size {flags.pipeline_parallel_size} with a GPU for each stage"
    together = [f"--tensor-parallel-size {flags.tensor_parallel_size}"] * (flags.tensor_parallel_size > 1)
    together += [f"--pipeline-parallel-size {flags.pipeline_parallel_size}"] * (flags.pipeline_parallel_size > 1)
    for size in together:
        if flags.kv_cache_dtype != "auto":
            yield f"{size} with --kv-cache-dtype {flags.kv_cache_dtype}"
        if flags.enable_lora:
            yield f"{size} with --enable-lora"
        if method := _model_that_drafts(flags):
            yield f"{size} with drafts by the method {method}"


def _model_that_drafts(flags: WorkerFlags) -> str:
    """Return the drafting method if it needs another model, else ""."""
    method = flags.speculative_config.method if isinstance(flags, StepFlags) else ""
    return "" if method in LOOKED_UP else method
