"""Memory of a GPU that other processes map too, as torch sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pillion.engine.backends.backend import DevicePool
from pillion.errors import ConfigError


class _Span:
    """Speaks the array interfaces, version 3, by which torch (CUDA) and numpy take memory that is not their own."""

    def __init__(self, memory: DevicePool, name: str) -> None:
        # Held, because the tensor holds this object: while it lives, the mapping does.
        self._memory = memory
        about: dict[str, Any] = {
            "shape": (memory.size_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }
        setattr(self, name, about)


def tensor_at(memory: DevicePool, device: torch.device) -> torch.Tensor:
    """uint8 [size_bytes] over mapped memory, without a copy; it holds ``memory`` while it lives. Raises ConfigError for
    memory of another device.

    In the interpreter, and under a driver without a device (tests), that is memory of the host.
    """
    if device.type == "cuda":
        found = torch.as_tensor(_Span(memory, "__cuda_array_interface__"), device=device)
        # torch copies what is on another device.
        if found.data_ptr() != memory.address:
            raise ConfigError(
                f"the KV node's memory is not on {device}: choose the GPU by CUDA_VISIBLE_DEVICES for both"
            )
        return found
    return torch.from_numpy(np.asarray(_Span(memory, "__array_interface__")))
