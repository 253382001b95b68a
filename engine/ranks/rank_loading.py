"""Loading of workers of several ranks on the CPU kernels, and of each rank's shard."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pillion.config import PrepareFlags, WorkerFlags
from pillion.engine.backends.cpu.cpu_loading import choose_kernels, core_share, load_cpu_share, log_kernels
from pillion.engine.backends.devices import check_gpu_ranks
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.models.model_work import pair_tokens
from pillion.errors import ConfigError
from pillion.host.core_lending_table import CoreShare
from pillion.host.cores import parse_cores
from pillion.kernels.cpu.language.isa import Isa
from pillion.kvstore.memory.domain import CPU
from pillion.observability.log_format import logs_json

if TYPE_CHECKING:
    from pillion.engine.backends.cpu.cpu_model import CpuModel
    from pillion.engine.ranks.cpu_rank import CpuRankBackend
    from pillion.engine.ranks.rank_memory import RankMember, RankMemory
    from pillion.engine.ranks.ranked_backend import ShareBackend

log = logging.getLogger("pillion.worker")


def check_ranks(flags: PrepareFlags | WorkerFlags, device: str, prepared: PreparedModel) -> None:
    """Raise ConfigError if ``--tensor-parallel-size`` ranks cannot run the model on this device."""
    size = flags.tensor_parallel_size
    config = load_config(prepared.folder)
    ModelShard.of(config, 0, size)
    needs = f"--tensor-parallel-size {size} needs"
    if sys.platform != "linux":
        raise ConfigError(f"{needs} Linux")
    if device != CPU:
        check_gpu_ranks(config, size)
    elif isinstance(flags, WorkerFlags) and flags.enable_expert_parallel:
        raise ConfigError("--enable-expert-parallel needs GPUs")
    elif reason := choose_kernels(flags, prepared)[1]:
        raise ConfigError(f"{needs} the CPU kernels: {reason}")


def load_ranks(flags: WorkerFlags, prepared: PreparedModel, threads: int) -> LoadedModel:
    """Load a worker of several ranks on the CPU kernels, in rank 0's process; all ranks load concurrently. Raises
    ConfigError."""
    from pillion.engine.ranks import rank_processes
    from pillion.engine.ranks.rank_memory import RankMember, RankMemory
    from pillion.engine.ranks.ranked_backend import RankedBackend

    size, config, share = flags.tensor_parallel_size, load_config(prepared.folder), core_share(flags)
    # Twice the budget, since decodes may exceed it; untouched pages are never allocated.
    memory = RankMemory.create(config, size, 2 * flags.step_budget_tokens + whole_prompt_tokens(flags, prepared))
    member = RankMember(ModelShard.of(config, 0, size), memory, rank_processes.STEP_SILENCE_MS)
    keeping = replace(share, borrows=False) if share is not None else None
    ranks = rank_processes.RankProcesses(size, worker_label(flags), memory)
    with ranks.loading(loading_order(flags, threads, size=size), memory.fd):
        own, isa = _cpu_share(flags, prepared, threads, member, keeping)
    log.info("%d ranks share the model, processes %s beside this one", size, ranks.pids())
    backend = RankedBackend(own, ranks)
    return LoadedModel(prepared, backend, f"cpu/{isa.label}", ranks=ranks, pair_tokens=pair_tokens(config))


def loading_order(flags: WorkerFlags, threads: int, **more: int) -> dict[str, Any]:
    """Return the LOAD message to a worker's other processes: flags, threads, log settings, and ``more``."""
    return {
        "flags": {field.name: getattr(flags, field.name) for field in fields(WorkerFlags)},
        "threads": threads,
        "log_level": logging.getLevelName(log.getEffectiveLevel()),
        "log_format": "json" if logs_json() else "text",
        **more,
    }


def whole_prompt_tokens(flags: WorkerFlags, prepared: PreparedModel) -> int:
    """Return the max length of a prompt without chunked prefill; 0 with it."""
    return 0 if flags.enable_chunked_prefill else flags.max_model_len or prepared.max_model_len


def worker_label(flags: WorkerFlags) -> str:
    """Return the label of a worker's ranks in process lists."""
    return flags.component_id or f"worker-{os.getpid()}"


def load_share(flags: WorkerFlags, order: dict[str, Any], memory_fd: int) -> tuple[ShareBackend, RankMemory]:
    """Load the shard of a rank above 0 on the CPU kernels by rank 0's LOAD message ``order``, and map the ranks'
    memory. Raises ConfigError."""
    from pillion.engine.ranks.rank_memory import RankMember, RankMemory

    prepared, memory = prepare(flags, log.info), RankMemory.open(os.dup(memory_fd))
    shard = ModelShard.of(load_config(prepared.folder), order["rank"], order["size"])
    return _cpu_share(flags, prepared, order["threads"], RankMember(shard, memory))[0], memory


def _cpu_share(
    flags: WorkerFlags, prepared: PreparedModel, threads: int, member: RankMember, share: CoreShare | None = None
) -> tuple[CpuRankBackend, Isa]:
    """Return a rank's backend, with its share of the worker's ``threads``, and the instruction set of its kernels.
    Raises ConfigError."""
    from pillion.engine.ranks.cpu_rank import CpuRankBackend

    shard = member.shard
    model, threads, cores = load_shard(flags, prepared, shard, threads, shard.rank, shard.size)
    log_kernels(model, threads, share)
    return CpuRankBackend(model, threads, cores, share, member=member), model.isa


def load_shard(
    flags: WorkerFlags, prepared: PreparedModel, shard: ModelShard, threads: int, process: int, processes: int
) -> tuple[CpuModel, int, tuple[int, ...]]:
    """Load the shard of one of a worker's processes. Return it with the process's number of threads, and its cores, out
    of the worker's. Raises ConfigError."""
    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        raise ConfigError(reason)
    threads, cores = shared_cores(threads, parse_cores(flags.cpu_affinity), process, processes)
    return load_cpu_share(flags, prepared, isa, shard), threads, cores


def shared_cores(threads: int, cores: Sequence[int], rank: int, ranks: int) -> tuple[int, tuple[int, ...]]:
    """Return the threads of a rank and their cores, out of a worker's ``threads`` and ``cores``, which has one per
    thread or is empty. With more ranks than threads, each rank has one thread, and some share a core."""
    if threads < ranks:
        return 1, tuple(cores[rank % threads : rank % threads + 1])
    first, last = (rank * threads // ranks, (rank + 1) * threads // ranks)
    return last - first, tuple(cores[first:last])
