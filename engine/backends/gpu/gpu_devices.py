"""The GPUs of this machine, and their assignment to processes.

They are counted by the driver API, so that a supervisor needs no torch. With TRITON_INTERPRET=1 ``--device cuda`` needs
no GPU: kernels run in Triton's interpreter, in host memory.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from pillion.errors import ConfigError
from pillion.kvstore.gpu.cuda_driver import CudaDriver

# Exists if NVIDIA's kernel module is loaded.
REAL_DRIVER = Path("/proc/driver/nvidia/version")


@cache
def device_count() -> int:
    """Count the GPUs that this process may use; 0 without a driver."""
    try:
        return CudaDriver().count()
    except ConfigError:
        return 0


def interpreted() -> bool:
    """Return whether GPU kernels run in Triton's interpreter on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_for_each(processes: int) -> bool:
    """Return whether each of a worker's ``processes`` processes (ranks times stages) has a separate GPU; process p has
    the p-th visible one."""
    return 1 < processes <= device_count()


def devices_of(processes: int) -> int:
    """Return the number of GPUs that a worker of ``processes`` processes uses."""
    return processes if gpu_for_each(processes) else 1


def first_gpu(rank: int) -> dict[str, str]:
    """Return the environment of a process whose ``cuda:0`` is this process's ``cuda:rank``, followed by the other
    GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [part.strip() for part in named.split(",")] if named else [str(index) for index in range(device_count())]
    # The driver ignores all names after an unknown one.
    devices = devices[: device_count()]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join([devices[rank], *devices[:rank], *devices[rank + 1 :]])}


def gpu_uuid() -> str:
    """Return the UUID of this process's GPU, "" without one."""
    return CudaDriver().uuid_of(0) if device_count() else ""
