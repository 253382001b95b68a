"""Makes CUDA's driver API callable by ctypes: the few calls that a node and its workers need for a GPU's memory,
without torch.

    CudaDevice --primary context, which torch uses too--> create --> map --> copy on a CudaStream --> unmap --> release
                                                        +-- export --> descriptor --socket--> import --> map

Memory is made with the virtual memory API and is shared as a file descriptor. So it crosses the attach socket as host
memory does, needs no common PID or IPC namespace, and lives until its last user is gone, also when the process
that made it was killed. (A legacy IPC handle's importer reads freed memory then.)

Calls release the interpreter's lock, so a thread that waits for a copy holds up no other. Names and numbers are those
of cuda.h (CUDA Driver API, sections "Virtual Memory Management" and "Memory Management").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Any

from pillion.errors import ConfigError

LIBRARY = "libcuda.so.1"

# Callers handle this CUresult, and treat all others as failures.
OUT_OF_MEMORY = 2

ATTRIBUTE_VIRTUAL_MEMORY = 102
ATTRIBUTE_FILE_DESCRIPTORS = 103
ATTRIBUTE_RDMA = 110
ATTRIBUTE_FABRIC = 128
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
HANDLE_FILE_DESCRIPTOR = 1
HANDLE_FABRIC = 8
GRANULARITY_MINIMUM = 0
ACCESS_READ_WRITE = 3
STREAM_NON_BLOCKING = 1
HOST_REGISTER_PORTABLE = 1
MEMORY_HOST = 1
MEMORY_DEVICE = 2
_UUID_BYTES = 16


class CudaError(ConfigError):
    """Says that a call of CUDA's driver failed; ``result`` is its CUresult."""

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result


class Location(ctypes.Structure):
    """Mirrors CUDA's struct CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """Mirrors CUDA's struct CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """Mirrors CUDA's struct CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("alloc_flags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    """Mirrors CUDA's struct CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class PitchedCopy(ctypes.Structure):
    """Mirrors CUDA's struct CUDA_MEMCPY2D: ``height`` rows of ``width`` bytes, on each side at a pitch of its own."""

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


# These are all functions of the driver that are used, under their exported names, with their arguments; each returns a
# CUresult.
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
    """Returns the version of CUDA that this machine's driver has, 0 where there is no driver."""
    try:
        return CudaDriver().version
    except ConfigError:
        return 0


class CudaDriver:
    """Is the loaded and initialized library: LIBRARY, or the one that is named.

    Raises ConfigError if there is none, or no device that it can use.

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
            raise ConfigError(f"no CUDA driver that can be used: {error}") from None
        self.call("cuInit", 0)
        self.version = self.read(c_int, "cuDriverGetVersion")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library. Raises CudaError unless it succeeds."""
        result = getattr(self._library, name)(*arguments)
        if result:
            error = c_char_p()
            known = self._library.cuGetErrorName(result, byref(error)) == 0 and error.value
            raise CudaError(f"{name} failed: {error.value.decode() if known and error.value else result}", result)

    def read(self, kind: Any, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument is a place for its result of a ctypes ``kind``; returns the result."""
        result = kind()
        self.call(name, byref(result), *arguments)
        value: int = result.value
        return value

    def count(self) -> int:
        """Returns the number of devices that this process sees."""
        return self.read(c_int, "cuDeviceGetCount")

    def device(self, index: int) -> CudaDevice:
        """Opens the device that torch calls cuda:``index``. Raises ConfigError if there is no such device."""
        if not 0 <= index < self.count():
            raise ConfigError(f"there is no CUDA device {index}: this process sees {self.count()}")
        return CudaDevice(self, index)

    def index_of(self, device_uuid: str) -> int:
        """Returns the number of a device by its UUID. Raises ConfigError if this process does not see it."""
        for index in range(self.count()):
            if self.uuid_of(index) == device_uuid:
                return index
        raise ConfigError(f"this process does not see the CUDA device {device_uuid}: CUDA_VISIBLE_DEVICES may hide it")

    def uuid_of(self, index: int) -> str:
        """Returns the UUID of the device at ``index``; for a part of a device (MIG), the part's."""
        raw = (c_char * _UUID_BYTES)()
        self.call("cuDeviceGetUuid_v2", byref(raw), self.read(c_int, "cuDeviceGet", index))
        return str(uuid.UUID(bytes=bytes(raw)))


class CudaDevice:
    """Represents one device and its primary context, which torch uses too; the context is made here if it does not
    exist yet.

    Attributes:
        index: the device's number in this process.
        uuid: the device's name in every process.
        granularity: every allocation's size is a multiple of it, in bytes.
    """

    def __init__(self, driver: CudaDriver, index: int) -> None:
        self.driver, self.index, self.uuid = driver, index, driver.uuid_of(index)
        self._number = driver.read(c_int, "cuDeviceGet", index)
        for attribute in (ATTRIBUTE_VIRTUAL_MEMORY, ATTRIBUTE_FILE_DESCRIPTORS):
            if not self._attribute(attribute):
                raise ConfigError(f"CUDA device {index} cannot share memory by file descriptors")
        self._context: int | None = driver.read(c_void_p, "cuDevicePrimaryCtxRetain", self._number)
        prop = byref(self._prop())
        with self.current():
            self.granularity = driver.read(c_size_t, "cuMemGetAllocationGranularity", prop, GRANULARITY_MINIMUM)

    def close(self) -> None:
        """Releases the device's context, which ends with its last user in this process. Idempotent."""
        if self._context is not None:
            self._context = None
            self.driver.call("cuDevicePrimaryCtxRelease_v2", self._number)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this device the current one of this thread within the block."""
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def reaches(self, other: int) -> bool:
        """Returns whether kernels of this device can read and write the memory of the device at index ``other``."""
        if other == self.index:
            return True
        number = self.driver.read(c_int, "cuDeviceGet", other)
        return bool(self.driver.read(c_int, "cuDeviceCanAccessPeer", self._number, number))

    def memory_info(self) -> tuple[int, int]:
        """Returns (free, total) bytes of the device, over all processes."""
        free, total = c_size_t(), c_size_t()
        with self.current():
            self.driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def rounded(self, size_bytes: int) -> int:
        """Returns the size of the allocation that holds ``size_bytes``."""
        return -(-size_bytes // self.granularity) * self.granularity

    def create(self, size_bytes: int) -> int:
        """Allocates memory, a multiple of ``granularity``, and returns its handle. Raises CudaError."""
        handle = c_ulonglong()
        # Network adapters can reach the memory directly, and UCX before 1.22, which knows no descriptors, can map it in
        # other processes, if the device can do that and the system permits it: fabric handles need NVIDIA's IMEX.
        rdma, fabric = bool(self._attribute(ATTRIBUTE_RDMA)), bool(self._attribute(ATTRIBUTE_FABRIC))
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
        """Releases a handle. Memory is freed with its last handle, mapping and descriptor, in any process."""
        self.driver.call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """Returns a descriptor of the memory, the caller's to close."""
        fd = self.driver.read(c_int, "cuMemExportToShareableHandle", handle, HANDLE_FILE_DESCRIPTOR, 0)
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> int:
        """Returns a handle of the memory behind a descriptor, which stays the caller's."""
        with self.current():
            return self.driver.read(c_ulonglong, "cuMemImportFromShareableHandle", c_void_p(fd), HANDLE_FILE_DESCRIPTOR)

    def map(self, handle: int, size_bytes: int) -> int:
        """Maps memory, maybe that of another device that this one reaches, for reading and writing by this device;
        returns its address in this process's contexts."""
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
        """Unmaps memory that nothing uses any more."""
        with self.current():
            self.driver.call("cuMemUnmap", address, size_bytes)
            self.driver.call("cuMemAddressFree", address, size_bytes)

    def register(self, address: int, size_bytes: int) -> None:
        """Pins host memory, so that copies from and to it need no detour."""
        with self.current():
            self.driver.call("cuMemHostRegister_v2", address, size_bytes, HOST_REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Unpins host memory, before it is unmapped."""
        with self.current():
            self.driver.call("cuMemHostUnregister", address)

    def _attribute(self, attribute: int) -> int:
        return self.driver.read(c_int, "cuDeviceGetAttribute", attribute, self._number)

    def _prop(self, rdma: bool = False, fabric: bool = False) -> AllocationProp:
        return AllocationProp(
            type=ALLOCATION_PINNED,
            requested_handle_types=HANDLE_FILE_DESCRIPTOR | (HANDLE_FABRIC if fabric else 0),
            location=Location(LOCATION_DEVICE, self._number),
            alloc_flags=AllocationFlags(gpu_direct_rdma_capable=rdma),
        )


class CudaStream:
    """Represents a stream of a device: copies that are started here run in the order of the calls, concurrently with
    other streams. Addresses are plain numbers; both sides of a copy must stay as they are until :meth:`synchronize` has
    returned."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current():
            self._stream: int | None = device.driver.read(c_void_p, "cuStreamCreate", STREAM_NON_BLOCKING)

    def to_host(self, target: int, source: int, size_bytes: int) -> None:
        self._copy("cuMemcpyDtoHAsync_v2", target, source, size_bytes)

    def to_device(self, target: int, source: int, size_bytes: int) -> None:
        self._copy("cuMemcpyHtoDAsync_v2", target, source, size_bytes)

    def within(self, target: int, source: int, size_bytes: int) -> None:
        self._copy("cuMemcpyDtoDAsync_v2", target, source, size_bytes)

    def rows_to_host(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Copies ``rows`` rows of ``width`` bytes; a pitch is the number of bytes from row to row."""
        self._copy_rows(
            PitchedCopy(
                source_type=MEMORY_DEVICE,
                source_device=source,
                source_pitch=source_pitch,
                target_type=MEMORY_HOST,
                target_host=target,
                target_pitch=target_pitch,
                width=width,
                height=rows,
            )
        )

    def rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Copies rows as :meth:`rows_to_host` does, in the other direction."""
        self._copy_rows(
            PitchedCopy(
                source_type=MEMORY_HOST,
                source_host=source,
                source_pitch=source_pitch,
                target_type=MEMORY_DEVICE,
                target_device=target,
                target_pitch=target_pitch,
                width=width,
                height=rows,
            )
        )

    def synchronize(self) -> None:
        """Returns when all copies that were started are done. Raises CudaError if one failed."""
        with self._device.current():
            self._device.driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Destroys the stream, on which no copy may run any more. Idempotent."""
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
