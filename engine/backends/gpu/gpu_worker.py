"""Loading of a GPU worker of one process, with weights in memory shared by the KV node."""

from __future__ import annotations

import logging

from pillion.config import WorkerFlags
from pillion.engine.backends.gpu.device_memory import tensor_at
from pillion.engine.backends.gpu.gpu_devices import gpu_uuid
from pillion.engine.backends.gpu.gpu_loading import cost_on_gpu, limits_of, load_gpu_backend, step_device
from pillion.engine.backends.gpu.gpu_weights import GetMemory, WeightMemory
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.errors import ConfigError
from pillion.kvstore.gpu.mapped_memory import map_pool, share_region

log = logging.getLogger("pillion.worker")

# Max wait for another worker to fill the region.
WEIGHTS_TIMEOUT_S = 600.0


def load_gpu_worker(flags: WorkerFlags, prepared: PreparedModel) -> LoadedModel:
    """Load a worker of one process. Raises ConfigError for models and flags that are not supported."""
    memory = region_memory(flags.attach_socket)
    backend, operators = load_gpu_backend(flags, limits_of(flags, prepared), prepared, memory, log.info)
    return LoadedModel(prepared, backend, operators, expected_cost=cost_on_gpu(flags, prepared), map_device=map_pool)


def region_memory(attach_socket: str) -> GetMemory:
    """Return a function that maps a region for weights on this process's GPU, which the KV node owns and shares among
    its workers."""

    def get(key: str, size_bytes: int) -> WeightMemory:
        device = step_device()
        region = share_region(attach_socket, key, size_bytes, WEIGHTS_TIMEOUT_S, device_uuid=gpu_uuid())
        if device.type == "cuda" and region.device_memory is None:
            raise ConfigError(
                "this worker computes on a GPU, but the pool of its KV node is in host memory: --kv-device cuda"
            )
        return WeightMemory(tensor_at(region, device), region.must_fill, region.filled, region.close)

    return get
