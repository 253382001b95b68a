"""A GPU's memory as a segment: what :mod:`pillion.kvstore.memory.segment` is for host memory.

node     create --> export: the descriptor that workers get --> map, for its own copies
worker   descriptor --> import --> map: the same memory, at an address of its own
the end  of the last of them, however it comes, gives the memory back to the device
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

from pillion.errors import ConfigError
from pillion.kvstore.memory.cuda_driver import CudaError, Device, Driver


class Hold:
    """Somebody may still write to a mapping, whatever becomes of its owner."""


class DeviceMapping:
    """Device memory in this process. Made by :func:`map_device`, or by a node's segment.

    Attributes:
        address: of its first byte, for kernels and copies; no pointer that the host could follow.
        size_bytes: how much is mapped.
        device_index: the device as this process counts: torch's ``cuda:N``.
        device: for copies.
    """

    def __init__(self, device: Device, handle: int, size_bytes: int) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.device_index = device.index
        self.address = device.map(handle, size_bytes)
        self._held: weakref.WeakSet[Hold] = weakref.WeakSet()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All of it as bytes (CUDA Array Interface, version 3, of Numba): ``torch.as_tensor(mapping, device=...)`` is
        a view of it. Views are void once it is closed."""
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def hold(self) -> Hold:
        """While it lives, :meth:`close` leaves the memory mapped."""
        hold = Hold()
        self._held.add(hold)
        return hold

    def close(self) -> None:
        """No kernel and no copy uses it any more. What is held stays mapped until the process ends. Idempotent."""
        if self.address and not self._held:
            self.device.unmap(self.address, self.size_bytes)
            self.address = 0


def map_device(fd: int, size_bytes: int, device_uuid: str, library: str = "") -> DeviceMapping:
    """Maps what another process made on the device of that name; the descriptor stays the caller's.

    ``library``: another driver than the system's. Raises ConfigError.
    """
    device = Driver(library).device_of(device_uuid)
    handle = device.import_fd(fd)
    try:
        return DeviceMapping(device, handle, size_bytes)
    finally:
        # The mapping holds the memory.
        device.release(handle)


class DeviceSegment:
    """Owns memory of ``device``, at least ``size_bytes``: a descriptor of it, and a mapping.

    Raises ConfigError where the device has not so much left.
    """

    def __init__(self, device: Device, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ConfigError(f"{size_bytes} bytes of a GPU's memory hold nothing")
        self.size_bytes = device.rounded(size_bytes)
        self._fd = -1
        with contextlib.ExitStack() as undo:
            try:
                handle = device.create(self.size_bytes)
                undo.callback(device.release, handle)
                self._fd = device.export_fd(handle)
                undo.callback(self._close_fd)
                self.mapping = DeviceMapping(device, handle, self.size_bytes)
                device.release(handle)
            except CudaError as error:
                free, total = device.memory_info()
                raise ConfigError(
                    f"cannot make {self.size_bytes} bytes on CUDA device {device.index}, of whose {total} bytes "
                    f"{free} are free: {error.message}"
                ) from None
            undo.pop_all()

    def fileno(self) -> int:
        """The descriptor, to be sent."""
        return self._fd

    def close(self) -> None:
        """Gives up the node's own hold; workers that map the memory keep it. Idempotent."""
        self.mapping.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
