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
    """A pool divided over GPUs: each shard has the pieces of some KV heads of every slot.

    Attributes:
        shares: the KV heads of each shard.
    """

    @property
    def shares(self) -> Sequence[range]: ...

    def shard(self, index: int) -> DeviceMapping:
        """Map a shard into this process, once. Raises ConfigError if this process's GPU cannot access it."""


def _with_interface(memory: DevicePool, name: str) -> SimpleNamespace:
    """Describe a pool's memory by the array interface, version 3, through which torch (CUDA) and numpy use foreign
    memory."""
    interface = {"shape": (memory.size_bytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}
    # The tensor references this object, which references the mapping.
    return SimpleNamespace(memory=memory, **{name: interface})


def tensor_at(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """Return a tensor uint8 [size_bytes] over mapped memory of ``device``, without a copy. The tensor keeps ``memory``
    alive.

    In Triton's interpreter the memory is the host's. Raises ConfigError for memory of another device.
    """
    if device.type == "cuda":
        found = torch.as_tensor(_with_interface(memory, "__cuda_array_interface__"), device=device)
        # Torch silently copies memory of another device.
        if found.data_ptr() != memory.address:
            raise ConfigError(
                f"the KV node's memory is not on {device}: choose the GPU by CUDA_VISIBLE_DEVICES for both"
            )
        return found
    return torch.from_numpy(np.asarray(_with_interface(memory, "__array_interface__")))


def distant_tensor(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """Return a tensor uint8 [size_bytes] over memory of another GPU that is mapped for kernels of ``device``, labelled
    as that device's memory. The caller keeps ``memory`` alive.

    With the other GPU's label torch would create a context there, of 0.3 to 0.5 GB that no pool leaves free.
    """
    storage = torch._C._construct_storage_from_data_pointer(memory.address, device, memory.size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a few numbers to the device asynchronously: torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Start to copy values to the host; they are valid once the queued work of the device has ended."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)


def event_on(device: torch.device) -> Any:
    """Return a CUDA event for the end of the work queued on the current stream."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
