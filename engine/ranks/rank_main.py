"""Process of a rank above 0, which executes rank 0's messages until the connection ends.

    started, tied to its parent --> LOAD --> POOL --> STEP, STEP, ... --> rank 0 closes, or is gone --> it ends

The process has no scheduler, no registry record and no connection to clients. Rank 0 handles signals for the whole
process group (Ctrl-C, a service manager's SIGTERM).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from pillion.config import WorkerFlags
from pillion.engine.backends.backend import BackendLost, PackedAdapter, bound_adapters
from pillion.engine.backends.devices import resolve_device
from pillion.engine.ranks.rank_messages import (
    RankLink,
    RankMessage,
    bytes_of,
    close_all,
    error_to_bytes,
    step_from_bytes,
)
from pillion.engine.ranks.rank_processes import AbortableMemory
from pillion.engine.ranks.ranked_backend import ShareBackend
from pillion.errors import ConfigError, Internal
from pillion.host.cores import lower_priority
from pillion.kvstore.client.attachment import Attachment, MapDevice
from pillion.kvstore.memory.domain import CPU
from pillion.observability.log_format import set_up_logging
from pillion.supervisor.lifeline import tie_to_parent

log = logging.getLogger("pillion.worker")


class LoadedShare(NamedTuple):
    """A process's shard of the model, the memory in which it waits for other processes, and the function that maps a
    pool on GPUs."""

    backend: ShareBackend
    memory: AbortableMemory
    map_device: MapDevice | None = None


LoadShare = Callable[..., LoadedShare]


class Rank:
    """A rank's side of both connections to rank 0. ``load`` loads its shard by a LOAD message."""

    def __init__(self, steps: RankLink, packing: RankLink, load: LoadShare) -> None:
        self._steps, self._packing, self._load = steps, packing, load
        self._loaded: LoadedShare | None = None
        self._attachment: Attachment | None = None
        self._packed: dict[int, PackedAdapter] = {}
        self._answers: dict[RankMessage, Callable[[bytearray, list[int]], bytes]] = {
            RankMessage.LOAD: self._on_load,
            RankMessage.POOL: self._on_pool,
            RankMessage.ADAPTERS: self._on_adapters,
            RankMessage.WARM_UP: self._on_warm_up,
            RankMessage.STEP: self._on_step,
            RankMessage.PLACE: self._on_place,
            RankMessage.PACK: self._on_pack,
        }

    def run(self) -> None:
        """Serve rank 0 until it closes the connection."""
        threading.Thread(target=self._pack_adapters, name="pillion-adapter", daemon=True).start()
        self._serve(self._steps)

    def _serve(self, link: RankLink) -> None:
        while True:
            try:
                kind, payload, descriptors = link.receive()
                link.send(*self._answer(kind, payload, descriptors))
            except ConnectionError:
                return

    def _pack_adapters(self) -> None:
        # Low priority, because steps need the cores; the thread still competes with them for the GIL.
        try:
            lower_priority()
            self._serve(self._packing)
        except BaseException:
            log.exception("this rank's packing failed")
            os._exit(1)

    def _answer(self, kind: RankMessage, payload: bytearray, descriptors: list[int]) -> tuple[RankMessage, bytes]:
        try:
            return RankMessage.OK, self._answers[kind](payload, descriptors)
        except ConfigError as error:
            return RankMessage.REFUSED, error_to_bytes(error)
        except Exception as error:
            if not isinstance(error, BackendLost):
                log.exception("this rank failed")
            if kind is not RankMessage.PACK and self._loaded is not None:
                self._loaded.memory.abort()
            return RankMessage.FAILED, error_to_bytes(error)
        finally:
            close_all(descriptors)

    @property
    def _backend(self) -> ShareBackend:
        if self._loaded is None:
            raise Internal("a rank must load first")
        return self._loaded.backend

    def _on_load(self, payload: bytearray, descriptors: list[int]) -> bytes:
        about = json.loads(payload)
        set_up_logging(about["log_level"], about["log_format"], about["name"])
        self._loaded = self._load(about, *descriptors)
        return b""

    def _on_pool(self, payload: bytearray, descriptors: list[int]) -> bytes:
        backend, map_device = self._backend, self._loaded.map_device if self._loaded is not None else None
        self._attachment = joined = Attachment.joined(
            bytes(payload), descriptors, backend.layout.block_bytes, map_device
        )
        backend.bind_pool(joined.pool, joined.num_slots)
        return b""

    def _on_adapters(self, payload: bytearray, descriptors: list[int]) -> bytes:
        self._backend.bind_adapters(**json.loads(payload))
        return b""

    def _on_warm_up(self, payload: bytearray, descriptors: list[int]) -> bytes:
        self._backend.warm_up(**json.loads(payload))
        return b""

    def _on_step(self, payload: bytearray, descriptors: list[int]) -> bytes:
        backend, (batch, copies) = self._backend, step_from_bytes(payload)
        if backend.max_steps_in_flight > 1:
            # No need to wait: rank 0 finishes its step no sooner, and has at most two in flight.
            backend.launch(batch, copies, None)
        else:
            backend.forward(batch)
        return b""

    def _on_place(self, payload: bytearray, descriptors: list[int]) -> bytes:
        about = json.loads(payload)
        bound_adapters(self._backend.adapters).place(about["slot"], self._packed[about["number"]])
        return b""

    def _on_pack(self, payload: bytearray, descriptors: list[int]) -> bytes:
        about = json.loads(payload)
        for number in about["dropped"]:
            self._packed.pop(number, None)
        adapters = bound_adapters(self._backend.adapters)
        packed = adapters.build(about["digest"], about["about"], bytes_of(descriptors[0]))
        self._packed[about["number"]] = packed
        return str(packed.nbytes).encode()


def run_rank(arguments: list[str], load: LoadShare, kind: type[Rank] = Rank) -> None:
    """Run a rank until it ends, then exit the process. ``arguments``: a label, rank 0's process id, and the descriptors
    of both connections; ``kind`` serves them."""
    _, parent, *descriptors = arguments
    tie_to_parent(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    steps, packing = (RankLink(socket.socket(fileno=int(descriptor))) for descriptor in descriptors)
    kind(steps, packing, load).run()
    logging.shutdown()
    # Skip the threads and destructors, to free the memory at once.
    os._exit(0)


def load_rank(order: dict[str, Any], *descriptors: int) -> LoadedShare:
    """Load the share of a rank above 0 by rank 0's order, on the device of its flags. Raises ConfigError."""
    flags = WorkerFlags(**order["flags"])
    if resolve_device(flags) == CPU:
        from pillion.engine.ranks.rank_loading import load_share

        return LoadedShare(*load_share(flags, order, *descriptors))
    from pillion.engine.gpu_ranks.gpu_rank_loading import load_gpu_share
    from pillion.kvstore.gpu.mapped_memory import map_pool

    return LoadedShare(*load_gpu_share(flags, order, *descriptors), map_pool)


if __name__ == "__main__":
    run_rank(sys.argv[1:], load_rank)
