"""Tells facts about the device, and checks arguments, for all launchers.

Kernels run natively on a CUDA device, or, with ``TRITON_INTERPRET=1`` in the environment before this package is
imported, in Triton's interpreter on CPU tensors: slowly, and for tests.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from pillion.errors import Internal

# In Triton's interpreter, kernels are run as on this architecture.
INTERPRETED_ARCH = 90
# When kernels run in Triton's interpreter, plans are made for a device of this many multiprocessors.
INTERPRETED_PROCESSORS = 4


def interpreting() -> bool:
    """Returns whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def arch_of(device: torch.device) -> int:
    """Returns the compute capability of a CUDA device as one number, such as 90."""
    if device.type != "cuda":
        return INTERPRETED_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def processors_of(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check(fits: bool, words: str) -> None:
    """Raises Internal with ``words`` if a launcher was called wrongly, which only a defect can do."""
    if not fits:
        raise Internal(words)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] | torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Raises Internal unless ``tensor`` is contiguous and has this shape (None: any size), type and device."""
    types = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(want in (None, have) for want, have in zip(shape, sizes, strict=True))
    check(fits, f"{name} is {list(sizes)}, not {list(shape)}")
    check(tensor.dtype in types, f"{name} is of {tensor.dtype}, not one of {types}")
    check(tensor.is_contiguous(), f"{name} is not contiguous")
    check(device is None or tensor.device == device, f"{name} is on {tensor.device}, not on {device}")


def check_pool_device(pool: torch.Tensor, device: torch.device) -> None:
    """Raises Internal for a pool that kernels on ``device`` cannot use. It may be in another GPU's memory, which its
    owner has mapped for this one; what is launched runs on the current device, wherever a pool is."""
    check(pool.device.type == device.type, f"pool is on {pool.device}, not on {device}")
