"""NIXL's agent with one registered pool: the few calls that the data plane needs, without NIXL's types.

NIXL is an optional package (extra "nixl"); it is imported when an agent is made, which takes about a second. Whoever
makes an agent makes all calls to it, one at a time: it has no lock.
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
from typing import Any

from kvstore.plane import PeerPool
from pillion.errors import ConfigError, Unavailable

log = logging.getLogger("pillion.kvnode")

SELF_CHECK_S = 10.0
PROBE_BYTES = 64

# Where the user has not decided. Emulated reads are no one-sided reads: see kvstore.nixl_plane. Logs belong to stderr.
_ENVIRONMENT = {
    "UCX_PROTO_EMULATION_ENABLE": "n",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "FATAL",
}
_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_OWN = "NIXL_INIT_AGENT"
_BACKEND = "UCX"


def nixl_trouble() -> str:
    """Why NIXL cannot be used here, empty where it can: imports it and reads one block of own memory through it."""
    if sys.platform != "linux":
        return f"there is none for {sys.platform}"
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    memory[: mmap.PAGESIZE] = b"\x5a" * mmap.PAGESIZE
    try:
        agent = NixlAgent(memory, 2, mmap.PAGESIZE)
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
    """One agent and its pool: ``num_slots`` blocks of ``block_bytes`` from the beginning of ``memory``.

    Raises ConfigError if NIXL does not import, or cannot register the memory.
    """

    def __init__(self, memory: mmap.mmap, num_slots: int, block_bytes: int) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if len(memory) < num_slots * block_bytes:
            raise ConfigError(f"{num_slots} slots of {block_bytes} bytes do not fit into {len(memory)} bytes")
        self._block_bytes = block_bytes
        self._view: Any = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._view)
        # Unique, so that a restarted node is a new agent to everybody.
        self.name = f"pillion-{secrets.token_hex(8)}"
        try:
            self._numpy: Any = importlib.import_module("numpy")
            api = _import_api()
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._nixl: Any = api.nixl_agent(self.name, config)
            self._scratch: Any = ctypes.create_string_buffer(PROBE_BYTES)
            regions = [
                (self.address, num_slots * block_bytes, 0, ""),
                (ctypes.addressof(self._scratch), PROBE_BYTES, 0, ""),
            ]
            self._registered: Any = self._nixl.register_memory(regions, "DRAM", [_BACKEND])
            self.blocks: Any = self._prepare(_OWN, self.address, num_slots)
            self.metadata: bytes = self._nixl.get_agent_metadata()
        except ImportError as error:
            raise ConfigError(f"nixl does not import ({error}); it is the package's extra 'nixl'") from None
        except Exception as error:  # noqa: BLE001  (NIXL's errors have no common root but Exception)
            raise ConfigError(f"NIXL cannot use the pool: {error!r}") from None

    def add(self, pool: PeerPool) -> tuple[str, Any]:
        """Makes a source known: its agent's name, and all its slots as one list."""
        name = _text(self._nixl.add_remote_agent(pool.nixl_metadata))
        try:
            return name, self._prepare(name, pool.pool_address, pool.num_slots)
        except Exception:
            self.disconnect(name)
            raise

    def probe(self, agent_name: str, pool: PeerPool) -> tuple[Any, bool]:
        """Starts to read a few bytes of the source into memory that nothing else uses."""
        size = min(PROBE_BYTES, self._block_bytes)
        here = self._nixl.get_xfer_descs([(ctypes.addressof(self._scratch), size, 0)], "DRAM")
        there = self._nixl.get_xfer_descs([(pool.pool_address, size, 0)], "DRAM")
        return self._start(self._nixl.initialize_xfer("READ", here, there, agent_name, b"", [_BACKEND]))

    def own_blocks(self, num_slots: int) -> Any:
        """The own slots as if they were a source's."""
        return self._prepare(self.name, self.address, num_slots)

    def post(self, local: tuple[int, ...], blocks: Any, remote: tuple[int, ...]) -> tuple[Any, bool]:
        """Starts one transfer; says whether it is over already."""
        array, int32 = self._numpy.array, self._numpy.int32
        handle = self._nixl.make_prepped_xfer(
            "READ", self.blocks, array(local, dtype=int32), blocks, array(remote, dtype=int32), b"", [_BACKEND]
        )
        return self._start(handle)

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR; raises what NIXL raises when a peer is lost."""
        return _text(self._nixl.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """A transfer that is over, or a list that nothing uses."""
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001
            log.warning("NIXL keeps a handle: %r", error)

    def disconnect(self, agent_name: str) -> None:
        """Closes the peer's endpoint by force."""
        try:
            self._nixl.remove_remote_agent(agent_name)
        except Exception as error:  # noqa: BLE001
            log.debug("NIXL could not disconnect: %r", error)

    def progress(self) -> None:
        """Lets UCX answer those who want to connect, and see that a peer is lost."""
        try:
            self._nixl.get_new_notifs([_BACKEND])
        except Exception as error:  # noqa: BLE001
            log.debug("NIXL: %r", error)

    def close(self) -> None:
        """The memory may be unmapped then."""
        self.release(self.blocks)
        with contextlib.suppress(Exception):
            self._nixl.deregister_memory(self._registered, [_BACKEND])
        self._nixl = self.blocks = self._registered = self._view = self._scratch = None

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

    def _prepare(self, agent_name: str, address: int, num_slots: int) -> Any:
        size = self._block_bytes
        strided = self._numpy.array([[address, size, 0, size, num_slots]], dtype=self._numpy.uint64)
        return self._nixl.prep_xfer_dlist(agent_name, strided, "DRAM", [_BACKEND])


def _import_api() -> Any:
    """One of NIXL's builds. The package ``nixl`` itself would import torch (4 s, 190 MB) to choose between them by the
    CUDA version; for blocks in host memory any of them does."""
    for build in _BUILDS:
        try:
            api = importlib.import_module(f"{build}._api")
            # It greets on standard output, which is not its own.
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
        except ModuleNotFoundError as error:
            if error.name != build:
                raise
    raise ImportError("none of its builds is installed")


def _read_own(agent: NixlAgent) -> None:
    blocks = agent.own_blocks(2)
    handle, done = agent.post((1,), blocks, (0,))
    deadline_s = time.monotonic() + SELF_CHECK_S
    while not done:
        if time.monotonic() > deadline_s:
            raise Unavailable(f"nothing came within {SELF_CHECK_S:.0f} s")
        done = agent.state(handle) == "DONE"
    agent.release(handle)
    agent.release(blocks)


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said
