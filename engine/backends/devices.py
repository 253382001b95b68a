"""Resolves "auto" in the flags about devices, once when a process starts.

GPUs are counted through the driver, so that a supervisor without torch can do it, too. With TRITON_INTERPRET=1
``--device cuda`` needs no GPU: the kernels run in Triton's interpreter, on the host's memory.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from pillion.config import ComputeFlags, OfflineFlags, ServeFlags
from pillion.errors import ConfigError
from pillion.kvstore.memory.cuda_driver import CudaDriver
from pillion.kvstore.memory.domain import DEFAULT_HOST_POOL_BYTES

# Exists where NVIDIA's kernel module is loaded.
REAL_DRIVER = Path("/proc/driver/nvidia/version")

F = TypeVar("F", bound=ComputeFlags)


@cache
def device_count() -> int:
    """Counts the GPUs that this process may use; 0 without a driver."""
    try:
        return CudaDriver().count()
    except ConfigError:
        return 0


def interpreted() -> bool:
    """Whether GPU kernels run in Triton's interpreter on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve_device(flags: ComputeFlags) -> str:
    """Returns "cpu" or "cuda". Raises ConfigError for a missing GPU, and for flags that the device does not support."""
    device = flags.device
    if interpreted() and device != "cpu" and REAL_DRIVER.exists():
        raise ConfigError("TRITON_INTERPRET=1 is for machines without a GPU: unset it, or say --device cpu")
    if device == "auto":
        device = "cuda" if device_count() else "cpu"
    elif device == "cuda" and not interpreted() and not device_count():
        raise ConfigError("--device cuda: no NVIDIA GPU can be used here")
    if device == "cuda" and flags.kv_cache_dtype == "int8":
        raise ConfigError("--kv-cache-dtype int8 is for the CPU kernels; on a GPU, use fp8")
    if device == "cpu" and flags.load_format != "auto":
        raise ConfigError(f"--load-format {flags.load_format} needs a GPU")
    return device


def gpu_for_each(ranks: int) -> bool:
    """Whether each rank of a worker has a GPU of its own: rank r the r-th that this process sees."""
    return 1 < ranks <= device_count()


def first_gpu(rank: int) -> dict[str, str]:
    """The environment of a process whose first GPU, torch's ``cuda:0``, is this process's ``cuda:rank``; it sees the
    others behind that."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    seen = [part.strip() for part in named.split(",")] if named else [str(index) for index in range(device_count())]
    # The driver stops at the first name that it does not know.
    seen = seen[: device_count()]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join([seen[rank], *seen[:rank], *seen[rank + 1 :]])}


def gpu_uuid() -> str:
    """The UUID of the GPU on which this process computes, "" where it has none."""
    return CudaDriver().uuid_of(0) if device_count() else ""


def pool_device(device: str, ranks: int = 1) -> str:
    """Returns the devices on which the KV node of workers on ``device``, of at most ``ranks`` ranks, keeps its pool:
    ``--kv-device``."""
    if device == "cuda" and gpu_for_each(ranks):
        return ",".join(f"cuda:{index}" for index in range(ranks))
    return "cpu" if interpreted() and not device_count() else device


def resolved(flags: F) -> F:
    """Returns the flags of a cluster or an LLM without "auto". Raises ConfigError like :func:`resolve_device`."""
    device = resolve_device(flags)
    flags = replace(flags, device=device)
    if isinstance(flags, ServeFlags | OfflineFlags) and not flags.kv_pool_bytes and pool_device(device) == "cpu":
        flags = replace(flags, kv_pool_bytes=DEFAULT_HOST_POOL_BYTES)
    if isinstance(flags, ServeFlags) and flags.prefill_workers < 0:
        flags = replace(flags, prefill_workers=0 if device == "cuda" else 1)
    return flags
