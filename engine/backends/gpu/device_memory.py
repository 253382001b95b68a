"""GPU memory mapped by several processes as torch tensors, and copies of small arrays."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from pillion.errors import ConfigError
from pillion.kvstore.gpu.cuda_segment import DeviceMapping


@runtime_checkable
class DevicePool(Protocol):
    """A pool in a GPU's memory, mapped into this process."""

    @property
    def address(self) -> int:
        """The pool's address on the device."""

    @property
    def size_bytes(self) -> int:
        """The number of bytes from ``address`` on."""


@runtime_checkable
class DividedPool(Protocol):
    """A pool divided over GPUs: each shard has every slot's KV of some heads.

    Attributes:
        shares: KV heads of each shard.
    """

    @property
    def shares(self) -> Sequence[range]: ...

    def shard(self, index: int) -> DeviceMapping:
        """Map a shard into this process, once. Raises ConfigError if this process's GPU cannot access it."""


def _with_interface(memory: DevicePool, name: str) -> SimpleNamespace:
    """Return an object with the array interface (version 3) ``name``, by which torch and numpy wrap a pool's memory."""
    interface = {"shape": (memory.size_bytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}
    # The tensor references this object, which references the mapping.
    return SimpleNamespace(memory=memory, **{name: interface})


def tensor_at(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """Return a tensor uint8 [size_bytes] over mapped memory of ``device``, without a copy. The tensor keeps ``memory``
    alive.

    In Triton's interpreter the memory is the host's. Raises ConfigError for memory of another device.
    """
    if device.type == "cuda":
        tensor = torch.as_tensor(_with_interface(memory, "__cuda_array_interface__"), device=device)
        # Torch silently copies memory of another device.
        if tensor.data_ptr() != memory.address:
            raise ConfigError(
                f"the KV node's memory is not on {device}: choose the GPU by CUDA_VISIBLE_DEVICES for both"
            )
        return tensor
    return torch.from_numpy(np.asarray(_with_interface(memory, "__array_interface__")))


def distant_tensor(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """Return a tensor uint8 [size_bytes] over another GPU's memory, mapped for kernels of ``device``. The caller keeps
    ``memory`` alive.

    Its device is ``device``: for a tensor of the other GPU, torch would create a context there, of 0.3 to 0.5 GB, for
    which pools leave no memory.
    """
    storage = torch._C._construct_storage_from_data_pointer(memory.address, device, memory.size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small array to the device asynchronously, through pinned memory, which torch frees after the copy."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host. The result is valid once the work queued on the device has ended."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)


def event_on(device: torch.device) -> Any:
    """Return a CUDA event at the end of the work queued on the current stream."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
