"""Loading of a worker's ranks on GPUs, with a GPU per rank or one shared GPU."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace
from typing import Any

from pillion.config import WorkerFlags
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_devices import first_gpu, gpu_for_each
from pillion.engine.backends.gpu.gpu_loading import cost_on_gpu, limits_of, load_gpu_backend, step_device
from pillion.engine.backends.gpu.gpu_worker import region_memory
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.ranks.rank_loading import loading_order, worker_label
from pillion.engine.ranks.rank_memory import RankMemory
from pillion.engine.ranks.rank_processes import RankProcesses
from pillion.engine.ranks.ranked_backend import RankedAheadBackend
from pillion.errors import ConfigError
from pillion.kvstore.gpu.mapped_memory import map_pool

log = logging.getLogger("pillion.worker")


def load_gpu_ranks(flags: WorkerFlags, prepared: PreparedModel, threads: int) -> LoadedModel:
    """Load a tensor-parallel worker, as its rank 0."""
    order = loading_order(flags, threads, size=flags.tensor_parallel_size)
    size, config, limits = flags.tensor_parallel_size, load_config(prepared.folder), limits_of(flags, prepared)
    # Steps do not use this memory; it only signals a rank's exit.
    memory, apart = RankMemory.create(config, size, 1), gpu_for_each(size)
    environ = first_gpu if apart else lambda rank: None
    ranks = RankProcesses(size, worker_label(flags), memory, environ)
    rendezvous = os.memfd_create("pillion-rendezvous", os.MFD_CLOEXEC)
    try:
        with ranks.loading({**order, "limits": asdict(limits), "apart": apart}, memory.fd, rendezvous):
            shard = rank_shard(flags, ModelShard.of(config, 0, size), config)
            group = join_ranks(shard, rendezvous, memory, apart=apart)
            weights = region_memory(flags.attach_socket)
            own, operators = load_gpu_backend(flags, limits, prepared, weights, log.info, group, divided=apart)
    finally:
        os.close(rendezvous)
    where = "a GPU each" if apart else "one GPU"
    log.info("%d ranks on %s share the model, processes %s beside this one", size, where, ranks.pids())
    backend, expected = RankedAheadBackend(own, ranks), cost_on_gpu(flags, prepared)
    return LoadedModel(prepared, backend, operators, ranks=ranks, expected_cost=expected, map_device=map_pool)


def load_gpu_share(
    flags: WorkerFlags, order: dict[str, Any], memory_fd: int, rendezvous: int
) -> tuple[GpuBackend, RankMemory]:
    """Load a rank above 0; return its backend and the ranks' memory. ``order``: its rank, the size and the limits;
    ``rendezvous``: fd for joining the ranks. Raises ConfigError."""
    prepared, memory = prepare(flags, log.info), RankMemory.open(os.dup(memory_fd))
    config = load_config(prepared.folder)
    shard = rank_shard(flags, ModelShard.of(config, order["rank"], order["size"]), config)
    group = join_ranks(shard, rendezvous, memory, apart=order["apart"])
    weights, limits, apart = region_memory(flags.attach_socket), GpuLimits(**order["limits"]), order["apart"]
    return load_gpu_backend(flags, limits, prepared, weights, log.info, group, divided=apart)[0], memory


def rank_shard(flags: WorkerFlags, shard: ModelShard, config: ModelConfig) -> ModelShard:
    """Return a process's shard, with whole experts if ``flags`` enable expert parallelism. Raises ConfigError for fewer
    experts than ranks."""
    if not flags.enable_expert_parallel or shard.whole or config.moe is None:
        return shard
    if config.moe.num_experts < shard.size:
        raise ConfigError(f"--enable-expert-parallel: {config.moe.num_experts} experts are fewer than the ranks")
    return replace(shard, whole_experts=True)


def join_ranks(shard: ModelShard, rendezvous: int, memory: RankMemory, *, apart: bool) -> GpuRankGroup:
    """Join the worker's ranks by the fd ``rendezvous``. ``memory`` signals a rank's exit; ``apart``: each rank has its
    own GPU. Raises ConfigError."""
    device = step_device()
    own_device = apart and device.type == "cuda"
    return GpuRankGroup.join(shard, rendezvous, device, own_device=own_device, aborted=lambda: memory.aborted)
