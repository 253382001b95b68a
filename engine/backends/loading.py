"""Chooses and loads the backend that runs a worker's model, by the worker's flags and the processor."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pillion.config import ComputeFlags, PrepareFlags, WorkerFlags
from pillion.core_board import CoreBoard, CoreShare
from pillion.cores import MAX_CPU_THREADS, parse_cores, shared_cores, usable_cores
from pillion.engine.backends.backend import Backend, ShareBackend
from pillion.engine.backends.devices import device_count, first_gpu, gpu_for_each, resolve_device
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel, is_prepared, prepare
from pillion.engine.models.config_json import read_json
from pillion.engine.models.model_config import ModelConfig, load_config
from pillion.engine.models.quantization import OWN_METHOD, Quantization
from pillion.engine.models.rank_split import RankSplit
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import LANES, Isa, choose_isa, host_features
from pillion.kvstore.hashing import namespace_base
from pillion.observability.log_format import logs_json

if TYPE_CHECKING:
    from pillion.engine.adapters.adapter_reader import AdapterReader
    from pillion.engine.backends.cpu.cpu_backend import CpuBackend, CpuModel
    from pillion.engine.ranks.rank_memory import RankMember, RankMemory
    from pillion.engine.ranks.rank_processes import RankProcesses
    from pillion.kvstore.client.attachment import Attachment

log = logging.getLogger("pillion.worker")

TORCH_BFLOAT16 = (
    "torch's products in bfloat16 round by the number of rows: a stream that is replayed or preempted may go on with"
    " another token where two are nearly as likely; the CPU kernels have no such limit, and --dtype float32 hardly any"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the backend that runs it.

    ``operators`` names the kernels in logs and metrics. ``core_share`` is the share that the worker owns of its board's
    cores; 0: it has no board, or borrows none of its cores. ``ranks`` are the worker's other processes, or None.
    """

    prepared: PreparedModel
    backend: Backend
    operators: str = "torch"
    core_share: float = 0.0
    ranks: RankProcesses | None = None

    def bind_pool(self, attachment: Attachment) -> None:
        """Has every process of the worker map the pool and use it."""
        if self.ranks is not None:
            if not isinstance(attachment.pool, memoryview):
                attachment.name_processes(self.ranks.pids())
            self.ranks.map_pool(*attachment.handed_over())
        self.backend.bind_pool(attachment.pool, attachment.num_slots)

    def namespace(self) -> bytes:
        """Returns the 32 bytes that a request's root hash begins with (I2)."""
        layout = self.backend.layout
        return namespace_base(
            fingerprint=self.prepared.fingerprint,
            dtype=layout.dtype,
            layout=layout.version,
            block_size=layout.block_size,
        )

    def adapter_reader(self, max_rank: int) -> AdapterReader:
        """What reads adapters up to ``max_rank`` for the backend."""
        from pillion.engine.adapters.adapter_reader import AdapterReader
        from pillion.engine.checkpoints.weights import qkv_order

        order = qkv_order(load_config(self.prepared.folder))
        return AdapterReader(
            str(self.prepared.folder),
            "float32" if self.prepared.dtype == "float32" else "bfloat16",
            max_rank,
            None if order is None else order.tolist(),
            self.backend.adapter_form(),
        )


# Loads a model by a worker's flags and number of threads. Called in a thread; raises ConfigError.
BackendFactory = Callable[[WorkerFlags, int], LoadedModel]


def load_model(flags: WorkerFlags, threads: int) -> LoadedModel:
    """The default factory: GPU kernels on device "cuda", else CPU kernels if they can run the model, else torch."""
    device, prepared = resolve_device(flags), prepare(flags, log.info)
    check_ranks(flags, device, prepared)
    for note in precision_notes(prepared, device):
        log.warning("%s", note)
    quantization = load_config(prepared.folder).quantization
    if quantization is not None:
        log.info("weights: %s", quantization.words)
    if device == "cuda":
        from pillion.engine.backends.gpu.gpu_loading import limits_of, load_gpu_backend

        if flags.tensor_parallel_size > 1:
            return _load_gpu_ranks(flags, prepared)
        return LoadedModel(prepared, *load_gpu_backend(flags, limits_of(flags, prepared), prepared, log.info))
    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        # Torch that was not requested is worth a warning: the kernels are faster.
        level = logging.INFO if flags.cpu_kernels == "torch" else logging.WARNING
        log.log(level, "all operators run on torch, %d threads: %s", threads, reason)
        if prepared.dtype == "bfloat16":
            log.warning("%s", TORCH_BFLOAT16)
        from pillion.engine.backends.torch_backend import TorchBackend

        return LoadedModel(prepared, TorchBackend(prepared, flags.block_size, threads))
    if flags.tensor_parallel_size > 1:
        return _load_ranks(flags, prepared, isa, threads)
    share = core_share(flags)
    backend = _cpu_backend(flags, prepared, isa, threads, share)
    owned = threads / share.board.cores if share is not None else 0.0
    return LoadedModel(prepared, backend, f"cpu/{isa.name}", owned)


def _cpu_backend(
    flags: WorkerFlags,
    prepared: PreparedModel,
    isa: Isa,
    threads: int,
    share: CoreShare | None = None,
    member: RankMember | None = None,
) -> CpuBackend:
    """The backend of a whole worker, with ``threads`` threads, or of one of its ranks, with its share of them."""
    import torch

    from pillion.engine.backends.cpu.cpu_backend import CpuBackend

    # Torch only passes arrays on: its own threads would be in the way.
    torch.set_num_threads(1)
    cores: Sequence[int] = parse_cores(flags.cpu_affinity)
    split = RankSplit.of(load_config(prepared.folder), 0, 1) if member is None else member.split
    threads, cores = shared_cores(threads, cores, split.rank, split.size)
    model = _load_for_cpu(flags, prepared, isa, log.info, split)
    log.info(
        "all operators run on the CPU kernels %s, %d threads%s; weights %.0f MiB, shared by all workers; KV in %s",
        isa.name,
        threads,
        " and those of idle workers" if share is not None and share.borrows else "",
        model.weights.nbytes / 2**20,
        model.layout.dtype,
    )
    return CpuBackend(model, threads, cores, share, member)


def _load_ranks(flags: WorkerFlags, prepared: PreparedModel, isa: Isa, threads: int) -> LoadedModel:
    """A worker of several processes, of which this one is rank 0. All of them load at the same time."""
    from pillion.engine.ranks import rank_processes
    from pillion.engine.ranks.rank_memory import RankMember, RankMemory
    from pillion.engine.ranks.ranked_backend import RankedBackend

    size, config, share = flags.tensor_parallel_size, load_config(prepared.folder), core_share(flags)
    # Decodes may be more than the budget; memory that no step touches is not taken.
    longest = 0 if flags.enable_chunked_prefill else flags.max_model_len or prepared.max_model_len
    memory = RankMemory.create(config, size, 2 * flags.step_budget_tokens + longest)
    member = RankMember(RankSplit.of(config, 0, size), memory, rank_processes.STEP_SILENCE_MS)
    keeping = replace(share, borrows=False) if share is not None else None
    order = {**_order(flags), "threads": threads}
    ranks = rank_processes.RankProcesses(size, flags.component_id or f"worker-{os.getpid()}", memory)
    try:
        with ranks.loading(order, memory.fd):
            own = _cpu_backend(flags, prepared, isa, threads, keeping, member)
    except BaseException:
        ranks.close()
        raise
    log.info("%d ranks share the model, processes %s beside this one", size, ranks.pids())
    return LoadedModel(prepared, RankedBackend(own, ranks), f"cpu/{isa.name}", ranks=ranks)


def _load_gpu_ranks(flags: WorkerFlags, prepared: PreparedModel) -> LoadedModel:
    """A worker of several processes on GPUs, one for each or one for all, of which this one is rank 0."""
    from pillion.engine.backends.gpu.gpu_loading import join_ranks, limits_of, load_gpu_backend
    from pillion.engine.ranks.rank_memory import RankMemory
    from pillion.engine.ranks.rank_processes import RankProcesses
    from pillion.engine.ranks.ranked_backend import RankedGpuBackend

    size, config, limits = flags.tensor_parallel_size, load_config(prepared.folder), limits_of(flags, prepared)
    # No step writes to it: it says whether a rank has ended.
    memory, apart = RankMemory.create(config, size, 1), gpu_for_each(size)
    environ = first_gpu if apart else lambda rank: None
    ranks = RankProcesses(size, flags.component_id or f"worker-{os.getpid()}", memory, environ)
    meeting = os.memfd_create("pillion-meeting", os.MFD_CLOEXEC)
    try:
        with ranks.loading({**_order(flags), "limits": asdict(limits), "apart": apart}, memory.fd, meeting):
            group = join_ranks(RankSplit.of(config, 0, size), meeting, memory, apart=apart)
            own, operators = load_gpu_backend(flags, limits, prepared, log.info, group)
    except BaseException:
        ranks.close()
        raise
    finally:
        os.close(meeting)
    where = "a GPU each" if apart else "one GPU"
    log.info("%d ranks on %s share the model, processes %s beside this one", size, where, ranks.pids())
    return LoadedModel(prepared, RankedGpuBackend(own, ranks), operators, ranks=ranks)


def _order(flags: WorkerFlags) -> dict[str, Any]:
    """What each rank has to know of the worker."""
    return {
        "flags": {field.name: getattr(flags, field.name) for field in fields(WorkerFlags)},
        "size": flags.tensor_parallel_size,
        "log_level": logging.getLevelName(log.getEffectiveLevel()),
        "log_format": "json" if logs_json() else "text",
    }


def load_share(order: dict[str, Any], memory_fd: int, meeting: int = -1) -> tuple[ShareBackend, RankMemory]:
    """What a rank above 0 runs, and the ranks' memory, by rank 0's order. ``meeting``: on GPUs, a descriptor by which
    the ranks find each other. Raises ConfigError."""
    from pillion.engine.ranks.rank_memory import RankMember, RankMemory

    flags = WorkerFlags(**order["flags"])
    device, prepared = resolve_device(flags), prepare(flags, log.info)
    memory = RankMemory.open(os.dup(memory_fd))
    split = RankSplit.of(load_config(prepared.folder), order["rank"], order["size"])
    if device == "cuda":
        from pillion.engine.backends.gpu.gpu_backend import GpuLimits
        from pillion.engine.backends.gpu.gpu_loading import join_ranks, load_gpu_backend

        group = join_ranks(split, meeting, memory, apart=order["apart"])
        return load_gpu_backend(flags, GpuLimits(**order["limits"]), prepared, log.info, group)[0], memory
    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        raise ConfigError(reason)
    return _cpu_backend(flags, prepared, isa, order["threads"], member=RankMember(split, memory)), memory


def check_ranks(flags: PrepareFlags | WorkerFlags, device: str, prepared: PreparedModel) -> None:
    """Raises ConfigError where ``--tensor-parallel-size`` ranks cannot run the model here."""
    size = flags.tensor_parallel_size
    if size == 1:
        return
    RankSplit.of(load_config(prepared.folder), 0, size)
    needs = f"--tensor-parallel-size {size} needs"
    if sys.platform != "linux":
        raise ConfigError(f"{needs} Linux")
    if device == "cuda":
        if 1 < (count := device_count()) < size:
            raise ConfigError(
                f"{needs} a GPU for each rank, and there are {count}; choose one by CUDA_VISIBLE_DEVICES, on which all"
                " ranks compute, or a smaller size"
            )
        return
    _, reason = choose_kernels(flags, prepared)
    if reason:
        raise ConfigError(f"{needs} the CPU kernels: {reason}")


def core_share(flags: WorkerFlags) -> CoreShare | None:
    """The worker's cores on the board that it was told of. Only speed depends on the board, so a worker that cannot
    open it computes on its own cores and says so."""
    if not flags.core_board:
        return None
    try:
        return CoreShare(CoreBoard.open(flags.core_board), flags.first_core)
    except ConfigError as error:
        log.warning("this worker borrows and lends no cores: %s", error)
        return None


def precision_notes(prepared: PreparedModel, device: str = "cpu") -> Iterator[str]:
    """Yields a sentence for each reason why answers are not those of the checkpoint in transformers."""
    saved, config = read_json(prepared.folder / "config.json"), load_config(prepared.folder)
    half = (saved.get("dtype") or saved.get("torch_dtype")) == "float16"
    # Codes and their scales stay what they are in each type.
    if prepared.dtype == "bfloat16" and half and config.quantization is None:
        yield (
            "the checkpoint is float16, of whose 11 significant bits bfloat16 keeps 8;"
            " --dtype float32 computes with exactly its weights"
        )
    if config.quantization is not None:
        yield from _rounding_notes(config.quantization, device, config.moe is not None)
    for rope in config.ropes:
        if 0 < rope.switches_at < prepared.max_model_len:
            yield (
                f"requests whose prompt and max_tokens (by default, all of --max-model-len) are above"
                f" {rope.switches_at} tokens get other rotary frequencies ({rope.kind}), from their first token on"
            )


def _rounding_notes(quantization: Quantization, device: str, experts: bool) -> Iterator[str]:
    rounded, ways = quantization.activations, quantization.row_schemes
    if device == "cuda" and quantization.method == OWN_METHOD and ways:
        yield (
            "--quantization int8-dynamic rounds the inputs of linear layers on CPUs only; here they are not rounded,"
            " which is nearer to the unquantized model"
        )
    elif device == "cuda" and ways:
        rounded |= {"int8"}
    if rounded:
        yield (
            f"the checkpoint's producer also rounds the inputs of quantized layers to {' and '.join(sorted(rounded))};"
            " here they are not rounded, which is nearer to the unquantized model"
        )
    if device == "cpu" and experts and "static" in ways:
        yield (
            "inputs of experts are rounded to int8 only where all experts of a layer have the same scale for them; else"
            " they are not rounded, which is nearer to the unquantized model"
        )


def make_ready(flags: PrepareFlags, progress: Progress) -> PreparedModel:
    """Makes everything that is made once: the model, and for the CPU kernels packed weights and machine code, those of
    each rank.

    If the weights are packed already, and adapters are not asked for, nothing is loaded, which would take seconds at
    every start. Machine code that is missing then, for example after an update, is compiled by the first worker.
    """
    prepared = prepare(flags, progress)
    for isa, split in _left_to_make(flags, prepared):
        model = _load_for_cpu(flags, prepared, isa, progress, split)
        if flags.enable_lora:
            from pillion.engine.backends.cpu.cpu_backend import compile_adapter_kernels

            compile_adapter_kernels(model, progress)
    return prepared


def is_ready(flags: PrepareFlags) -> bool:
    """Whether :func:`make_ready` would have nothing to load. The answer takes milliseconds and imports no torch.

    Raises ConfigError as :func:`make_ready` does.
    """
    return is_prepared(flags) and not _left_to_make(flags, prepare(flags))


def shares_weights(flags: WorkerFlags) -> bool:
    """Whether a second process that loads the same model takes next to no memory for it: the CPU kernels map weights
    that all processes of a machine share. Raises ConfigError as :func:`load_model` does."""
    if resolve_device(flags) == "cuda" or flags.tensor_parallel_size > 1:
        return False
    return choose_kernels(flags, prepare(flags, log.info))[0] is not None


def _left_to_make(flags: PrepareFlags, prepared: PreparedModel) -> list[tuple[Isa, RankSplit]]:
    """The ranks that are to be loaded for the CPU kernels, where these run the model: those whose weights are not
    packed yet. With adapters these are all ranks: only a loaded model can tell which machine code is missing."""
    device, size = resolve_device(flags), flags.tensor_parallel_size
    check_ranks(flags, device, prepared)
    isa = choose_kernels(flags, prepared)[0] if device == "cpu" else None
    if isa is None:
        return []
    config, cache = load_config(prepared.folder), ModelCache()
    splits = [RankSplit.of(config, rank, size) for rank in range(size)]
    packed = [cache.packed_weights(prepared.fingerprint, split.cpu_name).exists() for split in splits]
    return [(isa, split) for split, there in zip(splits, packed, strict=True) if flags.enable_lora or not there]


def _load_for_cpu(
    flags: ComputeFlags, prepared: PreparedModel, isa: Isa, progress: Progress, split: RankSplit
) -> CpuModel:
    from pillion.engine.backends.cpu.cpu_backend import load_cpu_model

    return load_cpu_model(
        prepared,
        flags.block_size,
        isa,
        kv_cache_dtype=flags.kv_cache_dtype,
        progress=progress,
        split=split,
    )


def choose_kernels(flags: ComputeFlags, prepared: PreparedModel) -> tuple[Isa | None, str]:
    """Returns the instruction set whose kernels run the model, or None and the reason why torch runs it.

    Raises ConfigError for kernels that this processor cannot run, and for KV in 8 bits without the CPU kernels.
    """
    isa = choose_isa(flags.cpu_kernels, host_features())
    if isa is None:
        chosen = flags.cpu_kernels == "torch"
        reason = "--cpu-kernels torch" if chosen else "there are no kernels for this processor"
    else:
        reason = unsupported(load_config(prepared.folder), flags.block_size)
    if isa is not None and not reason:
        return isa, ""
    if flags.kv_cache_dtype != "auto":
        raise ConfigError(f"--kv-cache-dtype {flags.kv_cache_dtype} needs a GPU or the CPU kernels: {reason}")
    return None, reason


def unsupported(config: ModelConfig, block_size: int) -> str:
    """Returns why the CPU kernels cannot run a model of this shape, or ""."""
    if config.head_dim % LANES:
        return f"attention needs heads of a multiple of {LANES} values, not {config.head_dim}"
    if block_size % LANES:
        return f"attention needs blocks of a multiple of {LANES} tokens, not {block_size}"
    return ""


def thread_count(flags: WorkerFlags) -> int:
    """Returns ``--cpu-threads``, or the number of cores in ``--cpu-affinity``, or of those this process may use."""
    return flags.cpu_threads or len(parse_cores(flags.cpu_affinity)) or min(usable_cores(), MAX_CPU_THREADS)
