"""The CUDA driver of tests: the machine's own if it has a GPU, else fake_cuda.c beside this file.

The fake is compiled with Triton's header, so its prototypes are NVIDIA's; tests that need it are skipped without a C
compiler. Processes find it by the loader's path, like a real driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

from pillion.errors import ConfigError
from pillion.kvstore.gpu import cuda_driver
from pillion.kvstore.gpu.cuda_driver import CudaDriver, CudaStream
from pillion.kvstore.gpu.cuda_segment import DeviceMapping

SOURCE = pathlib.Path(__file__).with_name("fake_cuda.c")


def _native() -> bool:
    try:
        return CudaDriver().count() > 0
    except ConfigError:
        return False


NATIVE = _native()


def header_folder() -> pathlib.Path:
    """Return a folder with cuda.h. Skips the test without one, or without a C compiler."""
    spec = importlib.util.find_spec("triton")
    found = pathlib.Path(spec.origin).parent / "backends/nvidia/include" if spec and spec.origin else None
    if found is None or not (found / "cuda.h").exists() or not shutil.which("cc"):
        pytest.skip("the fake CUDA driver needs a C compiler and Triton's cuda.h")
    return found


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder that is removed with this process."""
    return tempfile.TemporaryDirectory(prefix="pillion-fake-cuda-")


@functools.cache
def library() -> str:
    """Return the path or name of the driver's library. Skips the test if there is none."""
    if NATIVE:
        return cuda_driver.LIBRARY
    made = pathlib.Path(_folder().name, cuda_driver.LIBRARY)
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread")
    command = ["cc", *flags, f"-I{header_folder()}", str(SOURCE), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(made)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that finds the same driver."""
    path = {} if NATIVE else {"LD_LIBRARY_PATH": str(pathlib.Path(library()).parent)}
    return {**os.environ, **path, **more}


def copied_bytes() -> int:
    """Return the bytes that this process has copied from, to and on devices; only the fake counts them."""
    counter = ctypes.CDLL(library()).fake_cuda_copied_bytes
    counter.restype = ctypes.c_ulonglong
    return int(counter())


def fail_next_copy() -> None:
    """Make the next wait for a copy fail in this process (fake only)."""
    ctypes.CDLL(library()).fake_cuda_fail_next(719)


def handle_types() -> int:
    """Return the kinds of handles (CUmemAllocationHandleType) of this process's last allocation."""
    return int(ctypes.CDLL(library()).fake_cuda_handle_types())


class DeviceBytes:
    """A mapping's bytes as a kernel would see them; each access copies them."""

    def __init__(self, mapping: DeviceMapping) -> None:
        self._mapping = mapping

    def read(self, start: int, size_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(size_bytes)
        with contextlib.closing(CudaStream(self._mapping.device)) as stream:
            stream.to_host(ctypes.addressof(buffer), self._mapping.address + start, size_bytes)
            stream.synchronize()
        return buffer.raw

    def write(self, start: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        with contextlib.closing(CudaStream(self._mapping.device)) as stream:
            stream.to_device(self._mapping.address + start, ctypes.addressof(buffer), len(data))
            stream.synchronize()
