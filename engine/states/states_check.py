"""Check of a worker's flags for models with recurrent states, before the weights are read."""

from __future__ import annotations

from collections.abc import Iterator

from pillion.config import StepFlags, WorkerFlags
from pillion.engine.backends.gpu.gpu_devices import gpu_for_each
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kvstore.memory.domain import CPU


def check_states(flags: WorkerFlags, device: str, config: ModelConfig) -> None:
    """Raise ConfigError for a combination of flags that models with recurrent states do not support yet."""
    unsupported = next(_unsupported(flags, device), None)
    if unsupported is not None:
        raise ConfigError(f"{config.family}: {unsupported} is not supported yet for models whose layers have states")


def _unsupported(flags: WorkerFlags, device: str) -> Iterator[str]:
    """Yield the unsupported combinations of flags."""
    if device != CPU and flags.pipeline_parallel_size > 1 and gpu_for_each(flags.processes):
        # A pool divided among GPUs is sharded by heads; pipeline stages would need it sharded by layers.
        yield f"--pipeline-parallel-size {flags.pipeline_parallel_size} with a GPU for each stage"
    sizes = [f"--tensor-parallel-size {flags.tensor_parallel_size}"] * (flags.tensor_parallel_size > 1)
    sizes += [f"--pipeline-parallel-size {flags.pipeline_parallel_size}"] * (flags.pipeline_parallel_size > 1)
    for size in sizes:
        if flags.kv_cache_dtype != "auto":
            yield f"{size} with --kv-cache-dtype {flags.kv_cache_dtype}"
        if flags.enable_lora:
            yield f"{size} with --enable-lora"
        if method := _model_based_method(flags):
            yield f"{size} with drafts by the method {method}"


def _model_based_method(flags: WorkerFlags) -> str:
    """Return the drafting method if it needs a draft model or head, else ""."""
    method = flags.speculative_config.method if isinstance(flags, StepFlags) else ""
    return "" if method in ("ngram", "suffix") else method
