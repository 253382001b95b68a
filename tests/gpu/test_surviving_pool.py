"""A KV node killed with its pool on a real GPU, and the driver's treatment of memory whose creator is dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from lab.testbed import fake_cuda
from lab.testbed.fake_cuda import NATIVE, DeviceBytes
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.gpu.cuda_segment import map_device
from pillion.kvstore.hashing import chain_hashes
from tests.support.kv_hosts import ROOT
from tests.support.node_lives import Lives, ended, killed_and_recovered, running_keeper

pytestmark = pytest.mark.skipif(not NATIVE, reason="test_surviving_cuda.py does this with the fake driver")

# Creates device memory, writes to it, sends its descriptor, and waits for its end.
MAKER = """
import socket, sys
from pillion.kvstore.gpu.cuda_driver import CudaDriver
from pillion.kvstore.gpu.cuda_segment import DeviceSegment
from lab.testbed.fake_cuda import DeviceBytes
made = DeviceSegment(CudaDriver().device(0), 2**21)
DeviceBytes(made.mapping).write(0, b"still here")
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [str(made.size_bytes).encode()], [made.fileno()])
sys.stdin.read()
"""


def test_a_descriptor_alone_keeps_the_memory_of_a_process_that_was_killed():
    near, far = socket.socketpair()
    argv = [sys.executable, "-c", MAKER, str(far.fileno())]
    with near, far:
        maker = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[far.fileno()], env=fake_cuda.environment())
        said, (descriptor,), _, _ = socket.recv_fds(near, 100, 1)
        maker.send_signal(signal.SIGKILL)
        maker.communicate()
    mapping = map_device(descriptor, int(said), CudaDriver().uuid_of(0))
    os.close(descriptor)
    with contextlib.closing(mapping):
        assert DeviceBytes(mapping).read(0, 10) == b"still here"


@pytest.mark.parametrize("kv_device", ["cuda", "cuda:0,cuda:0"])
def test_blocks_outlive_a_node_that_is_killed(kv_device):
    async def run(folder: str) -> None:
        async with ended(Lives(folder, f"{folder}/keeper.sock", kv_device=kv_device)) as lives:
            await killed_and_recovered(lives, fake_cuda.environment(), chain_hashes(ROOT, range(24), 1))

    with tempfile.TemporaryDirectory(prefix="pillion-") as folder, running_keeper(f"{folder}/keeper.sock"):
        asyncio.run(run(folder))
