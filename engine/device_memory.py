"""Memory of a GPU that other processes map too, as torch sees it."""

from __future__ import annotations

from typing import Any

import torch

from engine.backend import DevicePool


class _Span:
    """Speaks the CUDA array interface, version 3, by which torch takes memory that is not its own."""

    def __init__(self, memory: DevicePool) -> None:
        # Held, because the tensor holds this object: while it lives, the mapping does.
        self._memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.size_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def tensor_at(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """uint8 [size_bytes] over mapped memory, without a copy; it holds ``memory`` while it lives."""
    if device.type == "cuda":
        return torch.as_tensor(_Span(memory), device=device)
    # A driver without a device (tests) maps host memory.
    import ctypes

    array = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    return torch.frombuffer(array, dtype=torch.uint8)
