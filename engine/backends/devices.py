"""Resolution of "auto" in the device flags, once when a process starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from pillion.config import ComputeFlags, OfflineFlags, PrefillFlags, ServeFlags, StepFlags, WorkerFlags
from pillion.engine.backends.gpu import gpu_devices
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kvstore.memory.domain import CPU, DEFAULT_HOST_POOL_BYTES

F = TypeVar("F", bound=ComputeFlags)
W = TypeVar("W", bound=WorkerFlags)
# Default token budgets on a CPU, where larger steps increase no throughput (docs/decisions/scheduling.md). Higher for
# an offline LLM: all prompts arrive at once, and latency per token does not matter.
CPU_DECODE_TOKENS = 256
CPU_PREFILL_TOKENS = CPU_LLM_TOKENS = 512


def resolve_device(flags: ComputeFlags) -> str:
    """Return "cpu" or "cuda". Raises ConfigError for a missing GPU, and for flags that the device does not support."""
    device, interpreted = flags.device, gpu_devices.interpreted()
    if interpreted and device != CPU and gpu_devices.REAL_DRIVER.exists():
        raise ConfigError("TRITON_INTERPRET=1 is for machines without a GPU: unset it, or say --device cpu")
    if device == "auto":
        device = "cuda" if gpu_devices.device_count() else CPU
    elif device == "cuda" and not interpreted and not gpu_devices.device_count():
        raise ConfigError("--device cuda: no NVIDIA GPU can be used here")
    if device == "cuda" and flags.kv_cache_dtype == "int8":
        raise ConfigError("--kv-cache-dtype int8 is for the CPU kernels; on a GPU, use fp8")
    if device == CPU and flags.load_format != "auto":
        raise ConfigError(f"--load-format {flags.load_format} needs a GPU")
    return device


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that this process can use."""
    return gpu_devices.device_count()


def pool_device(device: str, processes: int = 1) -> str:
    """Return the value of ``--kv-device`` for workers on ``device`` with at most ``processes`` processes (ranks times
    stages)."""
    if device == CPU:
        return CPU
    if gpu_devices.gpu_for_each(processes):
        return ",".join(f"cuda:{index}" for index in range(processes))
    return CPU if gpu_devices.interpreted() and not gpu_devices.device_count() else "cuda"


def check_gpu_ranks(config: ModelConfig, ranks: int, stages: int = 1) -> None:
    """Raise ConfigError if a worker of ``stages`` stages of ``ranks`` ranks cannot run on this machine's GPUs."""
    size = f"--tensor-parallel-size {ranks}" if stages == 1 else f"--pipeline-parallel-size {stages}"
    if gpu_devices.gpu_for_each(ranks * stages) and (config.layer_heads or config.kv_sources):
        raise ConfigError(
            f"{config.family}: {size} on {ranks * stages} GPUs divides blocks by KV heads, in which layers of this"
            " model differ; choose one GPU by CUDA_VISIBLE_DEVICES, on which all processes compute"
        )
    if 1 < (count := gpu_devices.device_count()) < ranks * stages:
        each = "rank" if stages == 1 else "stage" if ranks == 1 else "rank of each stage"
        raise ConfigError(
            f"{size} needs a GPU for each {each}, and there are {count}; choose one by"
            f" CUDA_VISIBLE_DEVICES, on which all {each.partition(' ')[0]}s compute, or a smaller size"
        )


def resolved(flags: F) -> F:
    """Return the flags of a cluster or an LLM without "auto". Raises ConfigError like :func:`resolve_device`.

    The budgets of steps on a GPU stay 0: each worker computes its own after it has loaded the model
    (:func:`with_budgets`)."""
    device = resolve_device(flags)
    flags = replace(flags, device=device)
    if device == CPU:
        flags = replace(flags, **cpu_budgets(flags))
    if isinstance(flags, ServeFlags | OfflineFlags) and not flags.kv_pool_bytes and pool_device(device) == CPU:
        flags = replace(flags, kv_pool_bytes=DEFAULT_HOST_POOL_BYTES)
    if isinstance(flags, ServeFlags) and flags.prefill_workers < 0:
        flags = replace(flags, prefill_workers=1 if device == CPU else 0)
    return flags


def with_budgets(flags: W) -> W:
    """Return a worker's flags with the token budget of its steps set. Raises ConfigError like :func:`resolve_device`,
    and for a model that cannot be prepared."""
    if flags.step_budget_tokens:
        return flags
    budgets, device, tokens = cpu_budgets(flags), resolve_device(flags), 0
    if device != CPU and not gpu_devices.interpreted():
        from pillion.engine.backends.gpu.gpu_roofline import step_tokens

        tokens = step_tokens(flags, gpu_devices.devices_of(flags.processes))
    return replace(flags, **{name: max(tokens, least) if tokens else least for name, least in budgets.items()})


def cpu_budgets(flags: object) -> dict[str, Any]:
    """Return the CPU's default budgets for those that ``flags`` leave unset, by flag name, but at least the minimum of
    a step. ``flags``: those of a worker, a cluster or an offline LLM."""
    budgets: dict[str, Any] = {}
    if isinstance(flags, StepFlags) and not flags.max_num_batched_tokens:
        usual = CPU_LLM_TOKENS if isinstance(flags, OfflineFlags) else CPU_DECODE_TOKENS
        budgets["max_num_batched_tokens"] = max(usual, flags.max_num_seqs)
    if isinstance(flags, PrefillFlags) and not flags.max_num_batched_prefill_tokens:
        budgets["max_num_batched_prefill_tokens"] = max(CPU_PREFILL_TOKENS, flags.block_size)
    return budgets
