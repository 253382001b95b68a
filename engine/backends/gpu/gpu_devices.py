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


def gpu_for_each(ranks: int) -> bool:
    """Returns whether each rank of a worker has a GPU of its own: rank r the r-th that this process sees."""
    return 1 < ranks <= device_count()


def devices_of(ranks: int) -> int:
    """Returns how many GPUs share the work of a worker of so many ranks."""
    return ranks if gpu_for_each(ranks) else 1


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
    def pool_device(ranks: int) -> str:
        if gpu_for_each(ranks):
            return ",".join(f"cuda:{index}" for index in range(ranks))
        return "cpu" if interpreted() and not device_count() else "cuda"

    @staticmethod
    def step_tokens(flags: WorkerFlags) -> int:
        from pillion.engine.backends.gpu.gpu_roofline import step_tokens

        return 0 if interpreted() else step_tokens(flags, devices_of(flags.tensor_parallel_size))

    @staticmethod
    def check_ranks(ranks: int) -> None:
        if 1 < (count := device_count()) < ranks:
            raise ConfigError(
                f"--tensor-parallel-size {ranks} needs a GPU for each rank, and there are {count}; choose one by"
                " CUDA_VISIBLE_DEVICES, on which all ranks compute, or a smaller size"
            )

    @staticmethod
    def words() -> str:
        return f"Triton's on {device_count() or 'no'} GPU"
