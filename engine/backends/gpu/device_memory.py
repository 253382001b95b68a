"""Turns GPU memory that several processes map into torch tensors, and sends small arrays to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pillion.engine.backends.backend import DevicePool
from pillion.errors import ConfigError


def _with_interface(memory: DevicePool, name: str) -> SimpleNamespace:
    """Describes memory by the array interface, version 3, through which torch (CUDA) and numpy use foreign memory."""
    interface = {"shape": (memory.size_bytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}
    # The tensor holds this object, and this object holds the mapping.
    return SimpleNamespace(memory=memory, **{name: interface})


def tensor_at(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """Returns a tensor uint8 [size_bytes] over mapped memory of ``device``, without a copy. It holds ``memory``.

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


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copies a few numbers to the device without waiting: torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def event_on(device: torch.device) -> Any:
    """Returns a CUDA event that stands for the end of all that was queued on the current stream so far."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
