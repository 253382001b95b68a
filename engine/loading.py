"""From flags to a model and the backend that runs it: the one place where a worker chooses its backend."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from engine.backend import Backend
from engine.prepare import PreparedModel, prepare
from kvstore.hashing import namespace_base
from pillion.config import WorkerFlags

log = logging.getLogger("pillion.worker")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the backend that runs it."""

    prepared: PreparedModel
    backend: Backend

    def namespace(self) -> bytes:
        """32 bytes over which a request's root hash is made (I2)."""
        layout = self.backend.layout
        return namespace_base(
            fingerprint=self.prepared.fingerprint,
            dtype=layout.dtype,
            layout=layout.version,
            block_size=layout.block_size,
        )


# From a worker's flags and the number of threads it may use. Called in a thread; raises ConfigError.
BackendFactory = Callable[[WorkerFlags, int], LoadedModel]


def torch_backend(flags: WorkerFlags, threads: int) -> LoadedModel:
    """The default factory: prepare the model of ``flags`` and load it into torch."""
    import torch

    from engine.torch_backend import TorchBackend

    torch.set_num_threads(threads)
    prepared = prepare(flags, log.info)
    return LoadedModel(prepared, TorchBackend(prepared, flags.block_size, threads))


def thread_count(flags: WorkerFlags) -> int:
    """``--cpu-threads``, or as many as there are cores that this process may use."""
    if flags.cpu_threads:
        return flags.cpu_threads
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
