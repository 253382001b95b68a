"""Resolution of "auto" and default budgets in flags, once per process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from pillion.config import ComputeFlags, OfflineFlags, PrefillFlags, ServeFlags, StepFlags, WorkerFlags
from pillion.engine.backends.gpu import gpu_devices
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import choose_isa, host_features
from pillion.kvstore.memory.domain import CPU, DEFAULT_HOST_POOL_BYTES

F = TypeVar("F", bound=ComputeFlags)
W = TypeVar("W", bound=WorkerFlags)
# Default token budgets of a step on a CPU (docs/decisions/scheduling.md). The larger one applies to prefill workers, to
# an offline LLM, whose prompts arrive together, and with matrix tiles, where reading the weights takes a larger share.
CPU_DECODE_TOKENS, CPU_LARGE_STEP_TOKENS = 256, 512


def resolve_device(flags: ComputeFlags) -> str:
    """Return "cpu" or "cuda". Raises ConfigError for a missing GPU, and for flags that the device does not support."""
    device, interpreted = flags.device, gpu_devices.interpreted()
    if interpreted and device != CPU and gpu_devices.REAL_DRIVER.exists():
        raise ConfigError("TRITON_INTERPRET=1 is for machines without a GPU: unset it, or use --device cpu")
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
    """Return the default of ``--kv-device`` for workers on ``device`` of at most ``processes`` processes (ranks times
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
        flags = replace(flags, **cpu_budgets(flags, tiles=_has_tiles(flags)))
    if isinstance(flags, ServeFlags | OfflineFlags) and not flags.kv_pool_bytes and pool_device(device) == CPU:
        flags = replace(flags, kv_pool_bytes=DEFAULT_HOST_POOL_BYTES)
    if isinstance(flags, ServeFlags) and flags.prefill_workers < 0:
        flags = replace(flags, prefill_workers=1 if device == CPU else 0)
    return flags


def with_budgets(flags: W) -> W:
    """Return a worker's flags with a token budget per step, computed if none is set. Raises ConfigError like
    :func:`resolve_device`, and for a model that cannot be prepared."""
    if flags.step_budget_tokens:
        return flags
    device, tokens = resolve_device(flags), 0
    budgets = cpu_budgets(flags, tiles=device == CPU and _has_tiles(flags))
    if device != CPU and not gpu_devices.interpreted():
        from pillion.engine.backends.gpu.gpu_roofline import step_tokens

        tokens = step_tokens(flags, gpu_devices.devices_of(flags.processes))
    return replace(flags, **{name: max(tokens, budget) for name, budget in budgets.items()})


def _has_tiles(flags: ComputeFlags) -> bool:
    """Return whether the CPU kernels use matrix tiles (AMX). Raises ConfigError for ``--cpu-kernels`` that this
    processor cannot run."""
    isa = choose_isa(flags.cpu_kernels, host_features())
    return isa is not None and isa.matrix_tiles and flags.dtype != "float32"


def cpu_budgets(flags: object, *, tiles: bool = False) -> dict[str, Any]:
    """Return the CPU's defaults, by flag name, of the step budgets that ``flags`` (of a worker, a cluster or an offline
    LLM) leave unset: at least a decode of each sequence, or a block of a prompt. ``tiles``: kernels use matrix
    tiles."""
    budgets: dict[str, Any] = {}
    if isinstance(flags, StepFlags) and not flags.max_num_batched_tokens:
        default = CPU_LARGE_STEP_TOKENS if tiles or isinstance(flags, OfflineFlags) else CPU_DECODE_TOKENS
        budgets["max_num_batched_tokens"] = max(default, flags.max_num_seqs)
    if isinstance(flags, PrefillFlags) and not flags.max_num_batched_prefill_tokens:
        budgets["max_num_batched_prefill_tokens"] = max(CPU_LARGE_STEP_TOKENS, flags.block_size)
    return budgets
