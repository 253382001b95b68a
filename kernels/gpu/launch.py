"""Properties of the device, and checks of arguments, for all launchers.

Kernels run natively on a CUDA device, or, with ``TRITON_INTERPRET=1`` in the environment before this package is
imported, in Triton's interpreter on CPU tensors: slowly, and for tests.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from pillion.errors import Internal

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Multiprocessors of the interpreter's imaginary device.
INTERPRETED_PROCESSORS = 4


@cache
def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def arch_of(device: torch.device) -> int:
    """Return the compute capability of a CUDA device as one number, such as 90; 90 for Triton's interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def cdiv(total: int, size: int) -> int:
    """Return ceil(total / size). Triton's function of this name takes several microseconds on the host."""
    return -(-total // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number`` (1 or more)."""
    return 1 << (number - 1).bit_length()


def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check(fits: bool, words: str, *values: object) -> None:
    """Raise Internal unless ``fits``, if a launcher is called with wrong arguments. The message ``words`` is formatted
    with ``values`` only then, because this runs some twenty times per launch."""
    if not fits:
        raise Internal(words.format(*(list(value) if isinstance(value, torch.Size) else value for value in values)))


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] | torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Raise Internal unless ``tensor`` is contiguous and has this shape (None: any size), type and device."""
    sizes, dtype = tensor.shape, tensor.dtype
    fits = len(sizes) == len(shape)
    for expected, actual in zip(shape, sizes, strict=False):
        fits = fits and expected in (None, actual)
    check(fits, "{} is {}, not {}", name, sizes, list(shape))
    fits = dtype in dtypes if isinstance(dtypes, tuple) else dtype == dtypes
    check(fits, "{} is of {}, not {}", name, dtype, dtypes)
    check(tensor.is_contiguous(), "{} is not contiguous", name)
    if device is not None:
        check(tensor.device == device, "{} is on {}, not on {}", name, tensor.device, device)


def check_pool_device(pool: torch.Tensor, device: torch.device) -> None:
    """Raise Internal for a pool that kernels on ``device`` cannot access. It may be in another GPU's memory, mapped for
    this one: kernels run on the current device, wherever the pool is."""
    check(pool.device.type == device.type, "pool is on {}, not on {}", pool.device, device)


def check_pool(
    pool: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] | torch.dtype,
    device: torch.device,
) -> None:
    """Raise Internal unless a pool [slots, layers, ...] has this shape (None: any size) and type, and is accessible to
    ``device``. Slots and layers may have any stride, because a slot may contain layers of other shapes."""
    check_pool_device(pool, device)
    sizes, strides, dtype = pool.shape, pool.stride(), pool.dtype
    fits, step = len(sizes) == len(shape), 1
    for want, have in zip(shape, sizes, strict=False):
        fits = fits and want in (None, have)
    check(fits, "pool is {}, not {}", sizes, list(shape))
    check(dtype in dtypes if isinstance(dtypes, tuple) else dtype == dtypes, "pool is of {}, not {}", dtype, dtypes)
    for have, stride in zip(sizes[:1:-1], strides[:1:-1], strict=True):
        fits = fits and stride == step
        step *= have
    check(fits, "a layer of pool is not contiguous")


def scales_of(pool: torch.Tensor) -> torch.Tensor:
    """View a pool of bytes, some of which are scales, as one row of float32."""
    return pool.as_strided((len(pool) * pool.stride(0),), (1,)).view(torch.float32)
