"""GPU memory as a segment, like :mod:`pillion.kvstore.memory.segment` for host memory.

node     create --> export: the descriptor for workers --> map, for the node's own copies
worker   descriptor --> import --> map: the same memory at another address
keeper   descriptor only: a restarted node imports and maps it
the driver frees the memory with its last handle, mapping and descriptor, even if processes are killed
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

from pillion.errors import ConfigError
from pillion.kvstore.gpu.cuda_driver import CudaDevice, CudaDriver, CudaError


class MappingHold:
    """Keeps device memory mapped after the owner has closed the mapping, for transfers that may still write to it."""


class DeviceMapping:
    """Device memory mapped by this process. Created by :func:`map_device` or a node's segment.

    Attributes:
        address: device address of its first byte, for kernels and copies.
        size_bytes: size of the mapping.
        device_index: index in this process of the device that has the memory, torch's ``cuda:N``.
        device: the device that maps it, which may be another one that reaches the memory.
    """

    divided = False

    def __init__(self, device: CudaDevice, handle: int, size_bytes: int, home_index: int | None = None) -> None:
        """Map the memory. ``home_index`` is the device that has it, by default ``device``."""
        self.device = device
        self.size_bytes = size_bytes
        self.device_index = device.index if home_index is None else home_index
        self.address = device.map(handle, size_bytes)
        self._holds: weakref.WeakSet[MappingHold] = weakref.WeakSet()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The mapped bytes, by Numba's CUDA Array Interface 3, for ``torch.as_tensor(mapping, device=...)``; the
        tensor is invalid once the mapping is closed."""
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def hold(self) -> MappingHold:
        """Return an object during whose lifetime :meth:`close` leaves the memory mapped."""
        hold = MappingHold()
        self._holds.add(hold)
        return hold

    def close(self) -> None:
        """Unmap the memory, which must be unused. With a hold it stays mapped until the process ends. Idempotent."""
        if self.address and not self._holds:
            self.device.unmap(self.address, self.size_bytes)
            self.address = 0


def map_device(
    fd: int, size_bytes: int, device_uuid: str, library: str = "", *, reader_index: int | None = None
) -> DeviceMapping:
    """Map memory that another process created on the device with this UUID; the caller keeps the descriptor.

    ``library`` overrides the system's driver. ``reader_index`` is the device whose kernels use the memory, by default
    the one that has it. Raises ConfigError, also if the reading device cannot reach the other's memory.
    """
    driver = CudaDriver(library)
    home = driver.index_of(device_uuid)
    device = driver.device(home if reader_index is None else reader_index)
    if not device.reaches(home):
        raise ConfigError(
            f"CUDA device {device.index} cannot reach the memory of CUDA device {home}, where the KV node has a part of"
            " its pool, because there is no peer access between them; serve with as many ranks as the pool has GPUs"
            " (--tensor-parallel-size), or give each size a KV node of its own"
        )
    handle = device.import_fd(fd)
    try:
        return DeviceMapping(device, handle, size_bytes, home)
    finally:
        # The mapping outlives the handle.
        device.release(handle)


class DeviceSegment:
    """At least ``size_bytes`` of a device's memory: a descriptor, and the node's own mapping. Raises ConfigError if the
    device lacks memory."""

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ConfigError(f"a GPU segment of {size_bytes} bytes is empty")
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
                    f"cannot allocate {self.size_bytes} bytes on CUDA device {device.index}, of whose {total} bytes "
                    f"{free} are free: {error.message}"
                ) from None
            undo.pop_all()

    @classmethod
    def from_descriptor(cls, device: CudaDevice, descriptor: int, size_bytes: int) -> DeviceSegment:
        """Map an earlier process's memory behind ``descriptor``, which the caller closes. ``size_bytes``: the size that
        process requested. Raises ConfigError if the memory cannot be mapped with that size."""
        segment = cls.__new__(cls)
        segment.size_bytes, segment._fd = device.rounded(size_bytes), -1
        handle = device.import_fd(descriptor)
        try:
            segment.mapping = DeviceMapping(device, handle, segment.size_bytes)
        finally:
            device.release(handle)
        segment._fd = os.dup(descriptor)
        return segment

    def fileno(self) -> int:
        """Return the descriptor to send to workers."""
        return self._fd

    def close(self) -> None:
        """Unmap the memory and close the descriptor; workers' mappings stay. Idempotent."""
        self.mapping.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
