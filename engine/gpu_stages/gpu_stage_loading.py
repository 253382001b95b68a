"""Loading of a prefill worker's stages on GPUs, with a GPU each or one shared GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pillion.config import WorkerFlags
from pillion.engine.backends.gpu.gpu_backend import GpuLimits
from pillion.engine.backends.gpu.gpu_devices import first_gpu, gpu_for_each
from pillion.engine.backends.gpu.gpu_loading import cost_on_gpu, limits_of, load_gpu_backend, step_device
from pillion.engine.backends.gpu.gpu_worker import region_memory
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.gpu_ranks.gpu_rank_loading import join_ranks, rank_shard
from pillion.engine.gpu_stages.gpu_stage_backend import GpuStageBackend
from pillion.engine.gpu_stages.gpu_stage_link import GpuStageLink, StageRendezvous
from pillion.engine.models.config_parser import load_config
from pillion.engine.ranks.rank_loading import loading_order, worker_label
from pillion.engine.ranks.rank_memory import RankMemory
from pillion.engine.stages.stage_shares import StagePlace
from pillion.engine.stages.staged_backend import StagedBackend, StageProcesses
from pillion.kvstore.gpu.mapped_memory import map_pool

log = logging.getLogger("pillion.worker")


def load_gpu_stages(flags: WorkerFlags, prepared: PreparedModel, threads: int) -> LoadedModel:
    """Load a pipeline-parallel worker, as its first process."""
    stages, ranks, limits = flags.pipeline_parallel_size, flags.tensor_parallel_size, limits_of(flags, prepared)
    # Steps do not use this memory; it only signals a process's exit.
    memory = RankMemory.create(load_config(prepared.folder), flags.processes, 1)
    apart, rendezvous = gpu_for_each(flags.processes), StageRendezvous.create(stages, ranks)
    environ = first_gpu if apart else lambda process: None
    try:
        processes = StageProcesses(stages, ranks, worker_label(flags), memory, environ)

        def each(process: int) -> list[int]:
            return [memory.fd, *rendezvous.of(StagePlace.of(process, stages, ranks))]

        order = {**loading_order(flags, threads), "limits": asdict(limits), "apart": apart}
        with processes.loading(order, each=each):
            place = StagePlace.of(0, stages, ranks)
            own, operators = load_share_of(flags, limits, prepared, place, memory, rendezvous.of(place), apart=apart)
    finally:
        rendezvous.close()
    where = "a GPU each" if apart else "one GPU"
    log.info(
        "%d stages of %d ranks on %s share the model, processes %s beside this",
        stages,
        ranks,
        where,
        processes.pids(),
    )
    backend, expected = StagedBackend(own, processes), cost_on_gpu(flags, prepared)
    return LoadedModel(
        prepared,
        backend,
        f"{operators}, {stages} stages",
        ranks=processes,
        expected_cost=expected,
        map_device=map_pool,
    )


def load_gpu_stage(
    flags: WorkerFlags, order: dict[str, Any], memory_fd: int, *descriptors: int
) -> tuple[GpuStageBackend, RankMemory]:
    """Load another process of a worker; return its backend and the memory that signals exits. ``order``: its index and
    the limits; ``descriptors``: fds for joining the other processes. Raises ConfigError."""
    prepared = prepare(flags, log.info)
    place = StagePlace.of(order["rank"], flags.pipeline_parallel_size, flags.tensor_parallel_size)
    memory, limits = RankMemory.open(os.dup(memory_fd)), GpuLimits(**order["limits"])
    return load_share_of(flags, limits, prepared, place, memory, descriptors, apart=order["apart"])[0], memory


def load_share_of(
    flags: WorkerFlags,
    limits: GpuLimits,
    prepared: PreparedModel,
    place: StagePlace,
    memory: RankMemory,
    rendezvous: Sequence[int],
    *,
    apart: bool,
) -> tuple[GpuStageBackend, str]:
    """Join the other processes and load the one at ``place``; return its backend and the name of its kernels.
    ``rendezvous``: fds from :meth:`StageRendezvous.of`; ``memory`` signals exits; ``apart``: each process has its own
    GPU. Raises ConfigError."""
    config, device, fds = load_config(prepared.folder), step_device(), list(rendezvous)
    shard = rank_shard(flags, place.shard(config), config)
    group = join_ranks(shard, fds.pop(0), memory, apart=apart) if place.ranks > 1 else None
    own_device = apart and device.type == "cuda"
    link = GpuStageLink.join(place, fds, device, own_device=own_device, aborted=lambda: memory.aborted)
    make = partial(GpuStageBackend, link=link)
    backend, operators = load_gpu_backend(
        flags, limits, prepared, region_memory(flags.attach_socket), log.info, group, shard=shard, make=make
    )
    assert isinstance(backend, GpuStageBackend)
    return backend, operators
