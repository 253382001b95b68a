"""Loading of prefill workers of several stages on the CPU kernels, and of each process's share of the model."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pillion.config import PrefillFlags, WorkerFlags
from pillion.engine.backends.cpu.cpu_loading import choose_kernels, core_share, log_kernels
from pillion.engine.backends.devices import check_gpu_ranks, pool_device
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_work import pair_tokens
from pillion.engine.ranks.rank_loading import load_shard, loading_order, whole_prompt_tokens, worker_label
from pillion.engine.stages.stage_shares import StagePlace
from pillion.errors import ConfigError, InvalidRequest
from pillion.kvstore.memory.domain import CPU
from pillion.kvstore.memory.head_shares import shares_of

if TYPE_CHECKING:
    from pillion.engine.ranks.rank_memory import RankMemory
    from pillion.engine.ranks.rank_processes import AbortableMemory
    from pillion.engine.stages.cpu_stage import StageShare
    from pillion.engine.stages.stage_rows import StageLink

log = logging.getLogger("pillion.worker")

# Socket pairs per gap between stages and rank: (end of the stage before, end of the stage after).
Pairs = Sequence[Sequence[tuple[socket.socket, socket.socket]]]


def _check_devices(flags: WorkerFlags, device: str, config: ModelConfig) -> None:
    """Raise ConfigError if the processes of all stages cannot run on the machine's GPUs."""
    stages, heads = flags.pipeline_parallel_size, config.num_kv_heads
    check_gpu_ranks(config, flags.tensor_parallel_size, stages)
    shards = pool_device(device, flags.processes).count(",") + 1
    try:
        shares_of(heads, shards)
    except InvalidRequest as error:
        # With a GPU per process, the KV node's pool is divided over all of them.
        raise ConfigError(f"--pipeline-parallel-size {stages} on {shards} GPUs: {error}") from None


def check_stages(flags: WorkerFlags, device: str, prepared: PreparedModel) -> None:
    """Raise ConfigError if ``--pipeline-parallel-size`` stages cannot run the model on this device."""
    size = flags.pipeline_parallel_size
    needs = f"--pipeline-parallel-size {size} needs"
    if not isinstance(flags, PrefillFlags):
        raise ConfigError(f"{needs} a prefill worker: a decode step would wait for one stage after the other")
    config = load_config(prepared.folder)
    if config.kv_sources or config.token_inputs is not None:
        raise ConfigError(
            f"{config.family}: --pipeline-parallel-size {size} is not supported for layers that share keys and"
            " values, or have embeddings of their own"
        )
    latents = config.latents
    if latents is not None and not all(latents.selecting):
        raise ConfigError(
            f"{config.family}: --pipeline-parallel-size {size} is not supported for layers that share a selection of"
            " tokens"
        )
    StagePlace.of(0, size, flags.tensor_parallel_size).shard(config)
    if sys.platform != "linux":
        raise ConfigError(f"{needs} Linux")
    if device != CPU:
        _check_devices(flags, device, config)
    elif reason := choose_kernels(flags, prepared)[1]:
        raise ConfigError(f"{needs} the CPU kernels: {reason}")


def load_stages(flags: WorkerFlags, prepared: PreparedModel, threads: int) -> LoadedModel:
    """Load a worker of several stages on the CPU kernels, as its first process. All load concurrently."""
    from pillion.engine.ranks.rank_memory import RankMemory
    from pillion.engine.stages.stage_rows import StageLink, StageRows
    from pillion.engine.stages.staged_backend import StagedBackend, StageProcesses

    stages, ranks, config = flags.pipeline_parallel_size, flags.tensor_parallel_size, load_config(prepared.folder)
    # Fits the longest prompt if prompts are not chunked; untouched pages are never allocated.
    max_tokens = max(flags.step_budget_tokens, whole_prompt_tokens(flags, prepared))
    rows = StageRows.create(stages, ranks, max_tokens, hidden_bytes(config))
    rank_memories = [RankMemory.create(config, ranks, max_tokens) for _ in range(stages if ranks > 1 else 0)]
    order = loading_order(flags, threads, max_tokens=max_tokens)
    pairs: Pairs = [[socket.socketpair() for _ in range(ranks)] for _ in range(stages - 1)]
    link = StageLink(StagePlace.of(0, stages, ranks), rows, *_beside(StagePlace.of(0, stages, ranks), pairs))
    processes = StageProcesses(stages, ranks, worker_label(flags), _StageMemory(link, rank_memories))

    def each(process: int) -> list[int]:
        place = StagePlace.of(process, stages, ranks)
        sockets = [one.fileno() for one in _beside(place, pairs) if one is not None]
        return [rows.fd, *sockets, *(memory.fd for memory in rank_memories[place.stage : place.stage + 1])]

    with processes.loading(order, each=each):
        # Processes have duplicates by now; theirs must be the last, so that a process's exit closes them.
        for sock in (end for between in pairs for pair in between for end in pair):
            if sock is not pairs[0][0][0]:
                sock.close()
        own = _share(flags, prepared, threads, link, *rank_memories[:1])
    log.info("%d stages of %d ranks share the model, processes %s beside this", stages, ranks, processes.pids())
    operators = f"cpu/{own.model.isa.label}, {stages} stages"
    backend = StagedBackend(own, processes)
    return LoadedModel(prepared, backend, operators, ranks=processes, pair_tokens=pair_tokens(config))


class _StageMemory:
    """Memory and connections common to a worker's processes, as
    :class:`pillion.engine.ranks.rank_processes.AbortableMemory`."""

    def __init__(self, link: StageLink, rank_memories: Sequence[RankMemory]) -> None:
        self._link, self._rank_memories = link, rank_memories

    def abort(self) -> None:
        """End all waits for other ranks of a stage, and this process's for other stages."""
        self._link.abort()
        for memory in self._rank_memories:
            memory.abort()

    def close(self) -> None:
        self._link.close()
        for memory in self._rank_memories:
            memory.close()


def load_stage(
    flags: WorkerFlags, order: dict[str, Any], rows_fd: int, *more: int
) -> tuple[StageShare, AbortableMemory]:
    """Load a process's share on the CPU kernels by the first process's order. ``more``: descriptors of its sockets, and
    of the memory of its stage's ranks. Raises ConfigError."""
    from pillion.engine.ranks.rank_memory import RankMemory
    from pillion.engine.stages.stage_rows import StageLink, StageRows

    prepared = prepare(flags, log.info)
    stages, ranks = flags.pipeline_parallel_size, flags.tensor_parallel_size
    place, given = StagePlace.of(order["rank"], stages, ranks), iter(more)
    row_bytes = hidden_bytes(load_config(prepared.folder))
    rows = StageRows(os.dup(rows_fd), stages, ranks, order["max_tokens"], row_bytes)
    before = socket.socket(fileno=os.dup(next(given))) if place.stage else None
    after = socket.socket(fileno=os.dup(next(given))) if place.stage < stages - 1 else None
    rank_memories = [RankMemory.open(os.dup(descriptor)) for descriptor in given]
    link = StageLink(place, rows, before, after)
    return _share(flags, prepared, order["threads"], link, *rank_memories), _StageMemory(link, rank_memories)


def _share(
    flags: WorkerFlags, prepared: PreparedModel, threads: int, link: StageLink, rank_memory: RankMemory | None = None
) -> StageShare:
    """Return a process's backend, with its share of the worker's ``threads``. ``rank_memory`` is that of the stage's
    ranks, if several. Raises ConfigError."""
    from pillion.engine.ranks.rank_memory import RankMember
    from pillion.engine.ranks.rank_processes import STEP_SILENCE_MS
    from pillion.engine.stages.cpu_stage import CpuStageBackend, CpuStageRankBackend

    place, shard = link.place, link.place.shard(load_config(prepared.folder))
    model, threads, cores = load_shard(flags, prepared, shard, threads, place.process, place.stages * place.ranks)
    # Each stage keeps the worker's cores while it computes; none borrows, since steps arrive one by one.
    share = core_share(flags) if place.rank == 0 else None
    share = replace(share, borrows=False) if share is not None else None
    log_kernels(model, threads, share)
    if rank_memory is None:
        return CpuStageBackend(model, threads, cores, share, link)
    return CpuStageRankBackend(model, threads, cores, share, link, RankMember(shard, rank_memory, STEP_SILENCE_MS))


def hidden_bytes(config: ModelConfig) -> int:
    """Return the size of a row of the residual stream in the kernels' buffer."""
    from pillion.kernels.cpu.runtime.program import Buffer

    return Buffer("tokens.hidden", -(-config.hidden_size // 32) * 32, "float32", "tokens").stride


def _beside(place: StagePlace, pairs: Pairs) -> tuple[socket.socket | None, socket.socket | None]:
    """Return a process's sockets to the stage before and to the next one."""
    before = pairs[place.stage - 1][place.rank][1] if place.stage else None
    after = pairs[place.stage][place.rank][0] if place.stage < place.stages - 1 else None
    return before, after
