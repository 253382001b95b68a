"""The driver's binding against cuda.h, against misuse, and across real processes."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from lab.testbed import fake_cuda
from lab.testbed.fake_cuda import NATIVE, DeviceBytes
from pillion.errors import ConfigError
from pillion.kvstore.gpu import cuda_driver
from pillion.kvstore.gpu.cuda_driver import (
    AccessDesc,
    AllocationFlags,
    AllocationProp,
    CudaDevice,
    CudaDriver,
    CudaError,
    CudaStream,
    Location,
    PitchedCopy,
)
from pillion.kvstore.gpu.cuda_segment import DeviceSegment, map_device

MIB = 2**20
ROWS = {
    "srcMemoryType": "source_type",
    "srcHost": "source_host",
    "srcDevice": "source_device",
    "srcPitch": "source_pitch",
    "dstMemoryType": "target_type",
    "dstHost": "target_host",
    "dstDevice": "target_device",
    "dstPitch": "target_pitch",
    "WidthInBytes": "width",
    "Height": "height",
}

# Maps the memory behind a descriptor, changes a byte, says what it read; then waits for the parent's end.
CHILD = """
import sys
from pillion.kvstore.gpu.cuda_segment import map_device
from lab.testbed.fake_cuda import DeviceBytes
mapped = map_device(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
bytes_ = DeviceBytes(mapped)
print(bytes_.read(MIB := 2**20, 5).decode(), flush=True)
bytes_.write(MIB, b"HELLO")
print("written", flush=True)
sys.stdin.read()
"""
FOLLOW = """
import ctypes, sys
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.gpu.cuda_segment import DeviceSegment
segment = DeviceSegment(CudaDriver().device(0), 2**21)
print("mapped", flush=True)
ctypes.string_at(segment.mapping.address, 1)
print("followed", flush=True)
"""


@pytest.fixture
def device() -> CudaDevice:
    return CudaDriver(fake_cuda.library()).device(0)


def test_layouts_and_constants_match_cuda_h(tmp_path: pathlib.Path) -> None:
    structures = {"CUmemLocation": Location, "CUmemAllocationProp": AllocationProp, "CUmemAccessDesc": AccessDesc}
    structures["CUDA_MEMCPY2D"] = PitchedCopy
    offsets = {
        "offsetof(CUmemAllocationProp, requestedHandleTypes)": AllocationProp.requested_handle_types.offset,
        "offsetof(CUmemAllocationProp, location)": AllocationProp.location.offset,
        "offsetof(CUmemAllocationProp, win32HandleMetaData)": AllocationProp.win32_handle_metadata.offset,
        "offsetof(CUmemAllocationProp, allocFlags)": AllocationProp.alloc_flags.offset,
        "offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)": AllocationProp.alloc_flags.offset
        + AllocationFlags.gpu_direct_rdma_capable.offset,
        "offsetof(CUmemAccessDesc, flags)": AccessDesc.flags.offset,
        "CUDA_ERROR_OUT_OF_MEMORY": cuda_driver.OUT_OF_MEMORY,
        "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_driver.DeviceAttribute.VIRTUAL_MEMORY,
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": cuda_driver.DeviceAttribute.FILE_DESCRIPTORS,
        "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": cuda_driver.DeviceAttribute.RDMA,
        "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED": cuda_driver.DeviceAttribute.FABRIC,
        "CU_MEM_HANDLE_TYPE_FABRIC": cuda_driver.HandleType.FABRIC,
        "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_driver.ALLOCATION_PINNED,
        "CU_MEM_LOCATION_TYPE_DEVICE": cuda_driver.LOCATION_DEVICE,
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_driver.HandleType.FILE_DESCRIPTOR,
        "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_driver.GRANULARITY_MINIMUM,
        "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_driver.ACCESS_READ_WRITE,
        **{f"offsetof(CUDA_MEMCPY2D, {theirs})": getattr(PitchedCopy, ours).offset for theirs, ours in ROWS.items()},
        "CU_MEMORYTYPE_HOST": cuda_driver.CopySide.HOST,
        "CU_MEMORYTYPE_DEVICE": cuda_driver.CopySide.DEVICE,
        "CU_STREAM_NON_BLOCKING": cuda_driver.STREAM_NON_BLOCKING,
        "CU_MEMHOSTREGISTER_PORTABLE": cuda_driver.HOST_REGISTER_PORTABLE,
        **{f"sizeof({name})": ctypes.sizeof(kind) for name, kind in structures.items()},
    }
    lines = "\n".join(f'printf("%lld\\n", (long long)({name}));' for name in offsets)
    source = tmp_path / "layout.c"
    source.write_text(
        f"#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{ {lines} return 0; }}"
    )
    made = str(tmp_path / "layout")
    subprocess.run(["cc", f"-I{fake_cuda.header_folder()}", str(source), "-o", made], check=True)
    output = subprocess.run([made], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(offsets, map(int, output), strict=True)) == offsets


def test_symbols_match_the_declarations_of_cuda_h() -> None:
    """What the header calls by a plain name and exports with a version is asked for with that version."""
    header = (fake_cuda.header_folder() / "cuda.h").read_text()
    for name in cuda_driver.SIGNATURES:
        plain = name.removesuffix("_v2")
        # Headers before CUDA 13 declare some functions under both names.
        second = f"{plain}_v2" in header
        assert (second and f"#define {plain} " in header) <= (name != plain) <= second, name


@pytest.mark.skipif(NATIVE, reason="what a real device permits is not known")
@pytest.mark.parametrize(("fabric", "kinds"), [("", 1), ("2", 1), ("1", 9)])
def test_memory_has_fabric_handles_where_the_system_permits_them(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, fabric: str, kinds: int
) -> None:
    """UCX maps memory with such a handle in other processes, and older ones no other."""
    if fabric:
        monkeypatch.setenv("FAKE_CUDA_FABRIC", fabric)
    segment = DeviceSegment(device, MIB)
    assert fake_cuda.handle_types() == kinds
    segment.close()


def test_memory_is_what_was_written(device: CudaDevice) -> None:
    segment = DeviceSegment(device, 3 * MIB)
    assert segment.size_bytes == 4 * MIB == device.rounded(3 * MIB)
    bytes_ = DeviceBytes(segment.mapping)
    bytes_.write(3 * MIB - 5, b"hello")
    assert bytes_.read(3 * MIB - 5, 5) == b"hello"
    stream = CudaStream(device)
    stream.within(segment.mapping.address, segment.mapping.address + 3 * MIB - 5, 5)
    stream.synchronize()
    stream.close()
    assert bytes_.read(0, 5) == b"hello"
    segment.close()
    segment.close()
    device.close()
    device.close()


def test_device_memory_is_exposed_as_bytes(device: CudaDevice) -> None:
    """Under CUDA a tensor is a view of it; elsewhere the description is all that can be looked at."""
    segment = DeviceSegment(device, MIB)
    DeviceBytes(segment.mapping).write(5, b"hello")
    if NATIVE and torch.cuda.is_available():
        tensor = torch.as_tensor(segment.mapping, device=f"cuda:{device.index}")
        assert tensor.data_ptr() == segment.mapping.address
        assert (tensor.dtype, tensor.numel()) == (torch.uint8, segment.size_bytes)
        assert bytes(tensor[5:10].cpu().tolist()) == b"hello"
        del tensor
    output = segment.mapping.__cuda_array_interface__
    assert output["data"] == (segment.mapping.address, False)
    assert (output["shape"], output["typestr"], output["version"]) == ((2 * MIB,), "|u1", 3)
    segment.close()


def test_device_memory_is_freed_with_its_last_user(device: CudaDevice) -> None:
    free, total = device.memory_info()
    assert 0 < free <= total
    segment = DeviceSegment(device, 64 * MIB)
    mapped = map_device(segment.fileno(), segment.size_bytes, device.uuid, fake_cuda.library())
    segment.close()
    assert device.memory_info()[0] < free - 32 * MIB, "it is still mapped"
    mapped.close()
    mapped.close()
    assert device.memory_info()[0] > free - 32 * MIB


def test_held_memory_stays_mapped(device: CudaDevice) -> None:
    segment = DeviceSegment(device, MIB)
    hold = segment.mapping.hold()
    bytes_ = DeviceBytes(segment.mapping)
    segment.close()
    bytes_.write(0, b"x")
    del hold
    segment.close()
    assert segment.mapping.address == 0


def test_a_descriptor_crosses_processes_and_outlives_its_maker(device: CudaDevice) -> None:
    segment = DeviceSegment(device, 4 * MIB)
    bytes_ = DeviceBytes(segment.mapping)
    bytes_.write(MIB, b"hello")
    fd = segment.fileno()
    assert not os.get_inheritable(fd)
    command = [sys.executable, "-c", CHILD, str(fd), str(segment.size_bytes), device.uuid]
    pipe, place = subprocess.PIPE, pathlib.Path.cwd()
    child = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, pass_fds=[fd], env=fake_cuda.environment(), cwd=place
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "hello\n"
        assert child.stdout.readline() == "written\n"
        assert bytes_.read(MIB, 5) == b"HELLO"
    finally:
        child.kill()
        child.communicate()
    assert bytes_.read(MIB, 5) == b"HELLO"
    segment.close()


def test_the_host_cannot_follow_a_device_address() -> None:
    command = [sys.executable, "-c", FOLLOW]
    done = subprocess.run(command, capture_output=True, text=True, env=fake_cuda.environment(), check=False)
    assert done.stdout == "mapped\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_impossible_segments_are_refused_in_one_line(device: CudaDevice) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        DeviceSegment(device, 0)
    with pytest.raises(ConfigError, match="of whose") as caught:
        DeviceSegment(device, device.memory_info()[1] * 2)
    assert "\n" not in caught.value.message


@pytest.mark.skipif(NATIVE, reason="a real driver may not survive it")
def test_misuse_is_an_error(device: CudaDevice, tmp_path: pathlib.Path) -> None:
    segment = DeviceSegment(device, 2 * MIB)
    stream, other, new = CudaStream(device), CudaStream(device), ctypes.create_string_buffer(b"new", 3)
    back = ctypes.create_string_buffer(3)
    with pytest.raises(CudaError, match="cuMemcpyDtoHAsync"):
        stream.to_host(ctypes.addressof(back), 4096, 3)
    stream.to_device(segment.mapping.address, ctypes.addressof(new), 3)
    other.to_host(ctypes.addressof(back), segment.mapping.address, 3)
    other.synchronize()
    assert back.raw == bytes(3), "who does not wait for a copy sees what was there before"
    with pytest.raises(CudaError, match="cuMemUnmap"):
        segment.close()
    stream.synchronize()
    with (tmp_path / "file").open("wb") as file, pytest.raises(CudaError, match="Import"):
        device.import_fd(file.fileno())
    segment.close()
    with pytest.raises(CudaError, match="cuMemUnmap"):
        device.unmap(4096, 2 * MIB)
    with pytest.raises(CudaError, match="cuMemRelease"):
        device.release(987654)
    with pytest.raises(CudaError, match="Unregister"):
        device.unregister(4096)
    stream.close()
    stream.close()


def test_a_missing_driver_or_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no usable CUDA driver") as caught:
        CudaDriver("libcuda-that-is-nowhere.so.1")
    assert "\n" not in caught.value.message
    driver = CudaDriver(fake_cuda.library())
    with pytest.raises(ConfigError, match="no CUDA device 99"):
        driver.device(99)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        driver.index_of("00000000-0000-0000-0000-000000000000")
    # Some other library of that name.
    with pytest.raises(ConfigError, match="no usable CUDA driver"):
        CudaDriver("libc.so.6")
