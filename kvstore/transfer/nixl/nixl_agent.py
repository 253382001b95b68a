"""Wrapper of a NIXL agent with one registered pool, which hides NIXL's types from the data plane.

NIXL is an optional package (extra "nixl"), imported when an agent is created, which takes about a second. An agent has
no lock: use it from the thread that created it, or hand it to another thread for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from pillion.errors import ConfigError, Unavailable
from pillion.kvstore.gpu.cuda_driver import driver_version
from pillion.kvstore.memory.memory import CUDA, HOST, HostMemory, PoolMemory
from pillion.v1.kvplane_pb2 import MeetReply

log = logging.getLogger("pillion.kvnode")

SELF_CHECK_TIMEOUT_S = 10.0
# Size of a test read that shows whether a source can be read one-sided.
PROBE_BYTES = 64

# Defaults for UCX's environment variables. Emulated reads are not one-sided
# (pillion.kvstore.transfer.nixl.nixl_plane), and logs belong on stderr. A pool is registered once and stays mapped, so
# UCX need not patch the process's mmap and malloc to track its memory.
_ENVIRONMENT = {
    "UCX_PROTO_EMULATION_ENABLE": "n",
    "UCX_MEM_EVENTS": "n",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "FATAL",
}
_KINDS = {HOST: "DRAM", CUDA: "VRAM"}
_BACKEND = "UCX"


def why_nixl_unusable() -> str:
    """Import NIXL and read one block of own memory through it. Return why NIXL is unusable, "" if it works."""
    if sys.platform != "linux":
        return f"there is none for {sys.platform}"
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory[: mmap.PAGESIZE] = b"\x5a" * mmap.PAGESIZE
    try:
        agent = NixlAgent(HostMemory(memory, 2, mmap.PAGESIZE))
    except ConfigError as error:
        return error.message
    try:
        _read_own(agent)
        if memory[mmap.PAGESIZE :] != memory[: mmap.PAGESIZE]:
            return "a block that was read through it differs"
    except Exception as error:  # noqa: BLE001  (NIXL's errors have no common root but Exception)
        return f"its self-check failed: {error!r}"
    finally:
        agent.close()
    return ""


class NixlAgent:
    """An agent with its pool, which may be on a GPU. Raises ConfigError if NIXL does not import or cannot register the
    memory."""

    def __init__(self, memory: PoolMemory) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._block_bytes = memory.block_bytes
        # Keeps the memory mapped while it is registered.
        self._hold: Any = memory.hold()
        self.address = memory.address
        self._own = MeetReply(
            num_slots=memory.num_slots,
            pool_address=memory.address,
            memory_kind=memory.kind,
            device_index=memory.device_index,
        )
        self._numpy: Any = None
        self._nixl: Any = None
        self._scratch: Any = ctypes.create_string_buffer(PROBE_BYTES)
        self._registered: list[Any] = []
        self.blocks: Any = None
        self.metadata = b""
        # Unique, so that a restarted node is a new agent to its peers.
        self.name = f"pillion-{secrets.token_hex(8)}"
        try:
            with memory.on_device():
                self._register(memory)
        except ImportError as error:
            raise ConfigError(f"nixl does not import ({error}); it is the package's extra 'nixl'") from None
        except Exception as error:  # noqa: BLE001  (NIXL's errors have no common root but Exception)
            raise ConfigError(f"NIXL cannot use the pool: {error!r}") from None

    def add(self, pool: MeetReply) -> tuple[str, Any]:
        """Add a source; return its agent's name, and the handle of NIXL's list of all its slots."""
        name = _text(self._nixl.add_remote_agent(pool.nixl_metadata))
        try:
            return name, self._prepare(name, pool)
        except Exception:
            self.disconnect(name)
            raise

    def probe(self, agent_name: str, pool: MeetReply) -> tuple[Any, bool]:
        """Start reading PROBE_BYTES of the source into memory outside the pool; return as :meth:`post` does."""
        size = min(PROBE_BYTES, self._block_bytes)
        target = self._nixl.get_xfer_descs([(ctypes.addressof(self._scratch), size, 0)], "DRAM")
        source = self._nixl.get_xfer_descs([(pool.pool_address, size, pool.device_index)], _KINDS[pool.memory_kind])
        return self._start(self._nixl.initialize_xfer("READ", target, source, agent_name, b"", [_BACKEND]))

    def own_blocks(self) -> Any:
        """Return the handle of NIXL's list of this node's own slots, for reading them like a source's."""
        return self._prepare(self.name, self._own)

    def post(self, local: tuple[int, ...], blocks: Any, remote: tuple[int, ...]) -> tuple[Any, bool]:
        """Start reading slots ``remote`` of the list ``blocks`` into own slots ``local``; return the transfer's handle,
        and whether it is finished already."""
        array, int32 = self._numpy.array, self._numpy.int32
        handle = self._nixl.make_prepped_xfer(
            "READ", self.blocks, array(local, dtype=int32), blocks, array(remote, dtype=int32), b"", [_BACKEND]
        )
        return self._start(handle)

    def state(self, handle: Any) -> str:
        """Return a transfer's state: DONE, PROC or ERR. Raises NIXL's error when a peer is lost."""
        return _text(self._nixl.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Free the handle of a finished transfer, or of a list of slots that is no longer used."""
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001
            log.warning("NIXL keeps a handle: %r", error)

    def disconnect(self, agent_name: str) -> None:
        """Close a peer's endpoint by force."""
        try:
            self._nixl.remove_remote_agent(agent_name)
        except Exception as error:  # noqa: BLE001
            log.debug("NIXL could not disconnect: %r", error)

    def progress(self) -> None:
        """Let UCX answer connecting peers and detect lost ones."""
        try:
            self._nixl.get_new_notifs([_BACKEND])
        except Exception as error:  # noqa: BLE001
            log.debug("NIXL: %r", error)

    def close(self) -> None:
        """Deregister the memory, which may be unmapped afterwards."""
        self.release(self.blocks)
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(registered, [_BACKEND])
        self._registered.clear()
        self._nixl = self.blocks = self._hold = self._scratch = None

    def _register(self, memory: PoolMemory) -> None:
        self._numpy = importlib.import_module("numpy")
        api = _import_api()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        self._nixl = api.nixl_agent(self.name, config)
        pool = [(memory.address, memory.num_slots * memory.block_bytes, memory.device_index, "")]
        scratch = [(ctypes.addressof(self._scratch), PROBE_BYTES, 0, "")]
        self._registered = [
            self._nixl.register_memory(pool, _KINDS[memory.kind], [_BACKEND]),
            self._nixl.register_memory(scratch, "DRAM", [_BACKEND]),
        ]
        self.blocks = self._prepare("NIXL_INIT_AGENT", self._own)
        self.metadata = self._nixl.get_agent_metadata()

    def _start(self, handle: Any) -> tuple[Any, bool]:
        try:
            state = _text(self._nixl.transfer(handle))
        except Exception:
            self.release(handle)
            raise
        if state == "ERR":
            self.release(handle)
            raise Unavailable("the transfer cannot be started")
        return handle, state == "DONE"

    def _prepare(self, agent_name: str, pool: MeetReply) -> Any:
        size = self._block_bytes
        row = [pool.pool_address, size, pool.device_index, size, pool.num_slots]
        strided = self._numpy.array([row], dtype=self._numpy.uint64)
        return self._nixl.prep_xfer_dlist(agent_name, strided, _KINDS[pool.memory_kind], [_BACKEND])


def _builds() -> Sequence[str]:
    """Return NIXL's builds, the one for this CUDA driver first; for host memory any of them works."""
    version = driver_version()
    return ("nixl_cu12", "nixl_cu13", "nixl_rocm") if 0 < version < 13_000 else ("nixl_cu13", "nixl_cu12", "nixl_rocm")


def _import_api() -> Any:
    """Import one of NIXL's builds. The package ``nixl`` itself would import torch (4 s, 190 MB) to choose one."""
    for build in _builds():
        try:
            api = importlib.import_module(f"{build}._api")
            # NIXL logs a greeting to standard output, which belongs to the caller.
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
        except ModuleNotFoundError as error:
            if error.name != build:
                raise
    raise ImportError("none of its builds is installed")


def _read_own(agent: NixlAgent) -> None:
    blocks = agent.own_blocks()
    handle, done = agent.post((1,), blocks, (0,))
    deadline_s = time.monotonic() + SELF_CHECK_TIMEOUT_S
    while not done:
        if time.monotonic() > deadline_s:
            raise Unavailable(f"nothing came within {SELF_CHECK_TIMEOUT_S:.0f} s")
        done = agent.state(handle) == "DONE"
    agent.release(handle)
    agent.release(blocks)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
