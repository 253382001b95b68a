"""NIXL's agent with one registered pool: the few calls that the data plane needs, without NIXL's types.

NIXL is an optional package (extra "nixl"); it is imported when an agent is made, which takes a second or two. Whoever
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

# Where the user has not decided. TCP's fragments of 8 KiB cost more than half of its speed; logs belong to stderr.
_ENVIRONMENT = {
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "ERROR",
}
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
            api = importlib.import_module("nixl._api")
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._nixl: Any = api.nixl_agent(self.name, config)
            self._registered: Any = self._nixl.register_memory(
                [(self.address, num_slots * block_bytes, 0, "")], "DRAM", [_BACKEND]
            )
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

    def own_blocks(self, num_slots: int) -> Any:
        """The own slots as if they were a source's."""
        return self._prepare(self.name, self.address, num_slots)

    def post(self, local: tuple[int, ...], blocks: Any, remote: tuple[int, ...]) -> tuple[Any, bool]:
        """Starts one transfer; says whether it is over already."""
        array, int32 = self._numpy.array, self._numpy.int32
        handle = self._nixl.make_prepped_xfer(
            "READ", self.blocks, array(local, dtype=int32), blocks, array(remote, dtype=int32), b"", [_BACKEND]
        )
        state = self._nixl.transfer(handle)
        if state == "ERR":
            self.release(handle)
            raise Unavailable("the transfer cannot be started")
        return handle, state == "DONE"

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

    def nudge(self, agent_name: str) -> None:
        """Wakes a source that has to answer by itself. A lost one is found out by the transfer."""
        with contextlib.suppress(Exception):
            self._nixl.send_notif(agent_name, b"read")

    def was_nudged(self) -> bool:
        """Lets UCX work, and says whether some reader is at it."""
        try:
            return bool(self._nixl.get_new_notifs([_BACKEND]))
        except Exception as error:  # noqa: BLE001
            log.debug("NIXL: %r", error)
            return False

    def close(self) -> None:
        """The memory may be unmapped then."""
        self.release(self.blocks)
        with contextlib.suppress(Exception):
            self._nixl.deregister_memory(self._registered, [_BACKEND])
        self._nixl = self.blocks = self._registered = self._view = None

    def _prepare(self, agent_name: str, address: int, num_slots: int) -> Any:
        size = self._block_bytes
        strided = self._numpy.array([[address, size, 0, size, num_slots]], dtype=self._numpy.uint64)
        return self._nixl.prep_xfer_dlist(agent_name, strided, "DRAM", [_BACKEND])


def _read_own(agent: NixlAgent) -> None:
    blocks = agent.own_blocks(2)
    handle, done = agent.post((1,), blocks, (0,))
    deadline_s = time.monotonic() + SELF_CHECK_S
    while not done:
        if time.monotonic() > deadline_s:
            raise Unavailable(f"nothing came within {SELF_CHECK_S:.0f} s")
        agent.was_nudged()
        done = agent.state(handle) == "DONE"
    agent.release(handle)
    agent.release(blocks)


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said
