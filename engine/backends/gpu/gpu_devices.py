"""Finds the GPUs of this machine: which process uses which, and what "--device" and "auto" mean where there are some.

They are counted through the driver, so that a supervisor without torch can do it, too. With TRITON_INTERPRET=1
``--device cuda`` needs no GPU: the kernels run in Triton's interpreter, on the host's memory.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from pillion.config import ComputeFlags, WorkerFlags
from pillion.errors import ConfigError
from pillion.kvstore.gpu.cuda_driver import CudaDriver

# This file exists where NVIDIA's kernel module is loaded.
REAL_DRIVER = Path("/proc/driver/nvidia/version")


@cache
def device_count() -> int:
    """Counts the GPUs that this process may use; 0 without a driver."""
    try:
        return CudaDriver().count()
    except ConfigError:
        return 0


def interpreted() -> bool:
    """Returns whether GPU kernels run in Triton's interpreter on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_for_each(processes: int) -> bool:
    """Returns whether each process of a worker (a rank, a stage, or a rank of one) has a GPU of its own: process p the
    p-th that this process sees."""
    return 1 < processes <= device_count()


def devices_of(processes: int) -> int:
    """Returns how many GPUs share the work of a worker of so many processes."""
    return processes if gpu_for_each(processes) else 1


def first_gpu(rank: int) -> dict[str, str]:
    """Returns the environment of a process whose first GPU, torch's ``cuda:0``, is the ``cuda:rank`` of this process;
    the other GPUs follow."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    seen = [part.strip() for part in named.split(",")] if named else [str(index) for index in range(device_count())]
    # The driver stops at the first name that it does not know.
    seen = seen[: device_count()]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join([seen[rank], *seen[:rank], *seen[rank + 1 :]])}


def gpu_uuid() -> str:
    """Returns the UUID of the GPU on which this process computes, "" where it has none."""
    return CudaDriver().uuid_of(0) if device_count() else ""


class Gpus:
    """Implements :class:`pillion.engine.backends.devices.Devices` for GPUs."""

    @staticmethod
    def resolve(flags: ComputeFlags) -> str:
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

    @staticmethod
    def pool_device(processes: int) -> str:
        if gpu_for_each(processes):
            return ",".join(f"cuda:{index}" for index in range(processes))
        return "cpu" if interpreted() and not device_count() else "cuda"

    @staticmethod
    def step_tokens(flags: WorkerFlags) -> int:
        from pillion.engine.backends.gpu.gpu_roofline import step_tokens

        return 0 if interpreted() else step_tokens(flags, devices_of(flags.processes))

    @staticmethod
    def check_ranks(ranks: int, stages: int = 1) -> None:
        if 1 < (count := device_count()) < ranks * stages:
            each = "rank" if stages == 1 else "stage" if ranks == 1 else "rank of each stage"
            size = f"--tensor-parallel-size {ranks}" if stages == 1 else f"--pipeline-parallel-size {stages}"
            raise ConfigError(
                f"{size} needs a GPU for each {each}, and there are {count}; choose one by"
                f" CUDA_VISIBLE_DEVICES, on which all {each.partition(' ')[0]}s compute, or a smaller size"
            )

    @staticmethod
    def words() -> str:
        return f"Triton's on {device_count() or 'no'} GPU"
