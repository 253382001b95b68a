"""The GPUs of this machine, and their assignment to processes.

They are counted through the driver, so that a supervisor needs no torch. With TRITON_INTERPRET=1 ``--device cuda``
needs no GPU: the kernels run in Triton's interpreter, in host memory.
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
    """Return whether each process of a worker (a rank, a stage, or a rank of one) has a separate GPU: process p the
    p-th visible one."""
    return 1 < processes <= device_count()


def devices_of(processes: int) -> int:
    """Return the number of GPUs of a worker of ``processes`` processes."""
    return processes if gpu_for_each(processes) else 1


def first_gpu(rank: int) -> dict[str, str]:
    """Return the environment of a process whose first GPU, torch's ``cuda:0``, is ``cuda:rank`` of this process,
    followed by the other GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    seen = [part.strip() for part in named.split(",")] if named else [str(index) for index in range(device_count())]
    # The driver ignores all names after an unknown one.
    seen = seen[: device_count()]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join([seen[rank], *seen[:rank], *seen[rank + 1 :]])}


def gpu_uuid() -> str:
    """Return the UUID of this process's GPU, "" without one."""
    return CudaDriver().uuid_of(0) if device_count() else ""
