"""CUDA's driver API through ctypes: the few calls that a node and its workers need for GPU memory, without torch.

    CudaDevice --primary context, shared with torch--> create --> map --> copy on a CudaStream --> unmap --> release
                                                        +-- export --> descriptor --socket--> import --> map

Memory is created with the virtual memory API and shared as a file descriptor. So it crosses the attach socket like host
memory, needs no common PID or IPC namespace, and lives until its last user is gone, even if the process that created it
was killed (with legacy IPC handles, the importer would then read freed memory).

Calls release the GIL, so a thread that waits for a copy blocks no other. Names and numbers are those of cuda.h (CUDA
Driver API, sections "Virtual Memory Management" and "Memory Management").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from enum import IntEnum, IntFlag
from typing import Any

from pillion.errors import ConfigError

LIBRARY = "libcuda.so.1"

# Values of cuda.h's enumerations and flags.
OUT_OF_MEMORY = 2
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
GRANULARITY_MINIMUM = 0
ACCESS_READ_WRITE = 3
STREAM_NON_BLOCKING = 1
HOST_REGISTER_PORTABLE = 1
_UUID_BYTES = 16


class DeviceAttribute(IntEnum):
    """CUDA's CUdevice_attribute."""

    CLOCK_KHZ = 13
    MULTIPROCESSORS = 16
    MEMORY_CLOCK_KHZ = 36
    BUS_BITS = 37
    MAJOR = 75
    MINOR = 76
    VIRTUAL_MEMORY = 102
    FILE_DESCRIPTORS = 103
    RDMA = 110
    FABRIC = 128


class HandleType(IntFlag):
    """CUDA's CUmemAllocationHandleType."""

    FILE_DESCRIPTOR = 1
    FABRIC = 8


class CopySide(IntEnum):
    """CUDA's CUmemorytype: the memory on one side of a copy."""

    HOST = 1
    DEVICE = 2


class CudaError(ConfigError):
    """Failure of a call to CUDA's driver; ``result`` is its CUresult."""

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result


class Location(ctypes.Structure):
    """CUDA's struct CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """CUDA's struct CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """CUDA's struct CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("alloc_flags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    """CUDA's struct CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class PitchedCopy(ctypes.Structure):
    """CUDA's struct CUDA_MEMCPY2D: ``height`` rows of ``width`` bytes, with a pitch per side."""

    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_type", c_int),
        ("source_host", c_void_p),
        ("source_device", c_ulonglong),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("target_x", c_size_t),
        ("target_y", c_size_t),
        ("target_type", c_int),
        ("target_host", c_void_p),
        ("target_device", c_ulonglong),
        ("target_array", c_void_p),
        ("target_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(c_char * _UUID_BYTES), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(AllocationProp), c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_ulonglong, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_ulonglong, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(PitchedCopy), c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


def driver_version() -> int:
    """Return the driver's CUDA version, 0 without a driver."""
    try:
        return CudaDriver().version
    except ConfigError:
        return 0


class CudaDriver:
    """The loaded and initialized driver library, LIBRARY by default.

    Raises ConfigError if there is none, or no usable device.

    Attributes:
        version: CUDA's version; 13000 is 13.0.
    """

    def __init__(self, library: str = "") -> None:
        try:
            self._library: Any = ctypes.CDLL(library or LIBRARY)
            for name, arguments in SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as error:
            raise ConfigError(f"no usable CUDA driver: {error}") from None
        self.call("cuInit", 0)
        self.version = self.read(c_int, "cuDriverGetVersion")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library. Raises CudaError unless it succeeds."""
        result = getattr(self._library, name)(*arguments)
        if result:
            error = c_char_p()
            known = self._library.cuGetErrorName(result, byref(error)) == 0 and error.value
            raise CudaError(f"{name} failed: {error.value.decode() if known and error.value else result}", result)

    def read(self, kind: Any, name: str, *arguments: Any) -> int:
        """Call a function whose first argument is an output pointer of the ctypes ``kind``; return its result."""
        result = kind()
        self.call(name, byref(result), *arguments)
        value: int = result.value
        return value

    def count(self) -> int:
        """Return the number of devices visible to this process."""
        return self.read(c_int, "cuDeviceGetCount")

    def device(self, index: int) -> CudaDevice:
        """Open the device that is torch's cuda:``index``. Raises ConfigError if there is none."""
        if not 0 <= index < self.count():
            raise ConfigError(f"there is no CUDA device {index}: this process sees {self.count()}")
        return CudaDevice(self, index)

    def index_of(self, device_uuid: str) -> int:
        """Return the index of a device by its UUID. Raises ConfigError if it is not visible to this process."""
        for index in range(self.count()):
            if self.uuid_of(index) == device_uuid:
                return index
        raise ConfigError(f"this process does not see the CUDA device {device_uuid}: CUDA_VISIBLE_DEVICES may hide it")

    def uuid_of(self, index: int) -> str:
        """Return the UUID of the device at ``index``; for a part of a device (MIG), the part's."""
        raw = (c_char * _UUID_BYTES)()
        self.call("cuDeviceGetUuid_v2", byref(raw), self.read(c_int, "cuDeviceGet", index))
        return str(uuid.UUID(bytes=bytes(raw)))


class CudaDevice:
    """A device and its primary context, which is shared with torch and created here if needed.

    Attributes:
        index: the device's index in this process.
        uuid: identifies the device in every process.
        granularity: allocation sizes are multiples of this, in bytes.
    """

    def __init__(self, driver: CudaDriver, index: int) -> None:
        self.driver, self.index, self.uuid = driver, index, driver.uuid_of(index)
        self._number = driver.read(c_int, "cuDeviceGet", index)
        for attribute in (DeviceAttribute.VIRTUAL_MEMORY, DeviceAttribute.FILE_DESCRIPTORS):
            if not self._attribute(attribute):
                raise ConfigError(f"CUDA device {index} cannot share memory by file descriptors")
        self._context: int | None = driver.read(c_void_p, "cuDevicePrimaryCtxRetain", self._number)
        prop = byref(self._prop())
        with self.current():
            self.granularity = driver.read(c_size_t, "cuMemGetAllocationGranularity", prop, GRANULARITY_MINIMUM)

    def close(self) -> None:
        """Release the device's context, which lives until its last user in this process. Idempotent."""
        if self._context is not None:
            self._context = None
            self.driver.call("cuDevicePrimaryCtxRelease_v2", self._number)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this device the thread's current one while the context is open."""
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def reaches(self, other: int) -> bool:
        """Return whether kernels of this device can read and write the memory of the device at index ``other``."""
        if other == self.index:
            return True
        number = self.driver.read(c_int, "cuDeviceGet", other)
        return bool(self.driver.read(c_int, "cuDeviceCanAccessPeer", self._number, number))

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device, over all processes."""
        free, total = c_size_t(), c_size_t()
        with self.current():
            self.driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def rounded(self, size_bytes: int) -> int:
        """Return ``size_bytes`` rounded up to the allocation granularity."""
        return -(-size_bytes // self.granularity) * self.granularity

    def create(self, size_bytes: int) -> int:
        """Allocate memory, a multiple of ``granularity``, and return its handle. Raises CudaError."""
        handle = c_ulonglong()
        # If device and system permit it: RDMA lets network adapters reach the memory directly, and fabric handles
        # (which need NVIDIA's IMEX) let UCX before 1.22, which cannot use descriptors, map it in other processes.
        rdma = bool(self._attribute(DeviceAttribute.RDMA))
        fabric = bool(self._attribute(DeviceAttribute.FABRIC))
        attempts = dict.fromkeys([(rdma, fabric), (rdma, False), (False, False)])
        for last, attempt in enumerate(attempts, 1 - len(attempts)):
            prop = byref(self._prop(*attempt))
            try:
                with self.current():
                    self.driver.call("cuMemCreate", byref(handle), size_bytes, prop, 0)
                break
            except CudaError as error:
                if last == 0 or error.result == OUT_OF_MEMORY:
                    raise
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle. Memory is freed with its last handle, mapping and descriptor in any process."""
        self.driver.call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """Return a descriptor of the memory; the caller closes it."""
        fd = self.driver.read(c_int, "cuMemExportToShareableHandle", handle, HandleType.FILE_DESCRIPTOR, 0)
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> int:
        """Return a handle of the memory behind a descriptor, which the caller closes."""
        with self.current():
            return self.driver.read(
                c_ulonglong, "cuMemImportFromShareableHandle", c_void_p(fd), HandleType.FILE_DESCRIPTOR
            )

    def map(self, handle: int, size_bytes: int) -> int:
        """Map memory of this device, or of a device that it reaches, for reading and writing by this device; return its
        address, which is valid in all contexts of this process."""
        access = AccessDesc(Location(LOCATION_DEVICE, self._number), ACCESS_READ_WRITE)
        with self.current(), contextlib.ExitStack() as undo:
            address = self.driver.read(c_ulonglong, "cuMemAddressReserve", size_bytes, 0, 0, 0)
            undo.callback(self.driver.call, "cuMemAddressFree", address, size_bytes)
            self.driver.call("cuMemMap", address, size_bytes, 0, handle, 0)
            undo.callback(self.driver.call, "cuMemUnmap", address, size_bytes)
            self.driver.call("cuMemSetAccess", address, size_bytes, byref(access), 1)
            undo.pop_all()
        return address

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap memory, which must be unused."""
        with self.current():
            self.driver.call("cuMemUnmap", address, size_bytes)
            self.driver.call("cuMemAddressFree", address, size_bytes)

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory for direct copies."""
        with self.current():
            self.driver.call("cuMemHostRegister_v2", address, size_bytes, HOST_REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Unpin host memory, before unmapping it."""
        with self.current():
            self.driver.call("cuMemHostUnregister", address)

    def _attribute(self, attribute: int) -> int:
        return self.driver.read(c_int, "cuDeviceGetAttribute", attribute, self._number)

    def _prop(self, rdma: bool = False, fabric: bool = False) -> AllocationProp:
        return AllocationProp(
            type=ALLOCATION_PINNED,
            requested_handle_types=HandleType.FILE_DESCRIPTOR | (HandleType.FABRIC if fabric else 0),
            location=Location(LOCATION_DEVICE, self._number),
            alloc_flags=AllocationFlags(gpu_direct_rdma_capable=rdma),
        )


class CudaStream:
    """A stream of a device. Copies run in the order of the calls, concurrently with other streams. Addresses are
    integers. Source and target of a copy must not change until :meth:`synchronize` returns."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current():
            self._stream: int | None = device.driver.read(c_void_p, "cuStreamCreate", STREAM_NON_BLOCKING)

    def to_host(self, target: int, source: int, size_bytes: int) -> None:
        """Start copying device memory to host memory."""
        self._copy("cuMemcpyDtoHAsync_v2", target, source, size_bytes)

    def to_device(self, target: int, source: int, size_bytes: int) -> None:
        """Start copying host memory to device memory."""
        self._copy("cuMemcpyHtoDAsync_v2", target, source, size_bytes)

    def within(self, target: int, source: int, size_bytes: int) -> None:
        """Start copying within the device's memory."""
        self._copy("cuMemcpyDtoDAsync_v2", target, source, size_bytes)

    def rows_to_host(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Start copying ``rows`` rows of ``width`` bytes to host memory; a pitch is the distance between rows in
        bytes."""
        self._copy_rows(
            PitchedCopy(
                source_type=CopySide.DEVICE,
                source_device=source,
                source_pitch=source_pitch,
                target_type=CopySide.HOST,
                target_host=target,
                target_pitch=target_pitch,
                width=width,
                height=rows,
            )
        )

    def rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Start copying rows to device memory, with arguments as for :meth:`rows_to_host`."""
        self._copy_rows(
            PitchedCopy(
                source_type=CopySide.HOST,
                source_host=source,
                source_pitch=source_pitch,
                target_type=CopySide.DEVICE,
                target_device=target,
                target_pitch=target_pitch,
                width=width,
                height=rows,
            )
        )

    def synchronize(self) -> None:
        """Wait for all copies. Raises CudaError if one failed."""
        with self._device.current():
            self._device.driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Destroy the stream, with no copy running. Idempotent."""
        if self._stream is not None:
            with self._device.current():
                self._device.driver.call("cuStreamDestroy_v2", self._stream)
            self._stream = None

    def _copy(self, name: str, target: int, source: int, size_bytes: int) -> None:
        with self._device.current():
            self._device.driver.call(name, target, source, size_bytes, self._stream)

    def _copy_rows(self, rows: PitchedCopy) -> None:
        with self._device.current():
            self._device.driver.call("cuMemcpy2DAsync_v2", byref(rows), self._stream)
