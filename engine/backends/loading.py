"""Chooses and loads the backend that runs a worker's model, by the worker's flags and the processor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from pillion.config import ComputeFlags, PrepareFlags, WorkerFlags
from pillion.core_lending_table import CoreLendingTable, CoreShare
from pillion.cores import MAX_CPU_THREADS, parse_cores, usable_cores
from pillion.engine.backends.backend import Backend, kv_layout
from pillion.engine.backends.devices import resolve_device, with_budgets
from pillion.engine.backends.step_memory import check_host_steps
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel, is_prepared, prepare
from pillion.engine.models.config_json import read_json
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.engine.models.model_work import pair_tokens
from pillion.engine.models.vector_head import Labeller, VectorHead
from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import ATTENTION_PLANS, LANES, Isa, choose_isa, host_features
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS
from pillion.kernels.cpu.states.pieces import PIECE_COLUMNS
from pillion.kvstore.hashing import namespace_base
from pillion.kvstore.memory.domain import CPU
from pillion.observability.metrics import Reading
from pillion.rooms import Seam, entered_one

if TYPE_CHECKING:
    from pillion.engine.backends.cpu.cpu_backend import CpuModel
    from pillion.kvstore.client.attachment import Attachment

log = logging.getLogger("pillion.worker")

TORCH_BFLOAT16 = (
    "torch's products in bfloat16 round by the number of rows: a stream that is replayed or preempted may go on with"
    " another token where two are nearly as likely; the CPU kernels have no such limit, and --dtype float32 hardly any"
)


class OtherProcesses(Protocol):
    """Represents the other processes of a worker that has several (the rooms "ranks" and "stages")."""

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """Arranges that ``on_lost`` is called with a reason when a process is lost, in any thread; at once where one is
        lost already."""

    def pids(self) -> list[int]:
        """Returns the processes' ids."""

    def map_pool(self, line: bytes, descriptors: Sequence[int]) -> None:
        """Makes the other processes map the pool, by the line and descriptors that this one's attachment has handed
        over."""

    def readings(self) -> Iterator[Reading]:
        """Yields the metrics of the other processes."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Holds a model and the backend that runs it.

    ``operators`` names the kernels in logs and metrics. ``core_share`` is the share that the worker owns of its lending
    table's cores; 0: it has no lending table, or borrows none of its cores. ``ranks`` are the worker's other processes,
    or None. ``expected_cost`` is what a step costs by the device's rates, None where they are not known;
    ``pair_tokens`` is the cost of a query-key pair in tokens by the model's shape, 0 where it is not known. A model
    that does not ``choose_tokens`` gives vectors alone, of which ``head`` makes the logits of labels in a classifier.
    One of ``whole_texts`` computes each text in one step, and nothing of it is kept.
    """

    prepared: PreparedModel
    backend: Backend
    operators: str = "torch"
    core_share: float = 0.0
    ranks: OtherProcesses | None = None
    expected_cost: StepModel | None = None
    pair_tokens: float = 0.0
    chooses_tokens: bool = True
    head: Labeller | None = None
    whole_texts: bool = False

    def bind_pool(self, attachment: Attachment) -> None:
        """Makes every process of the worker map the pool and use it."""
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

    def adapter_reader(self, max_rank: int) -> Any:
        """Returns the object that reads adapters up to ``max_rank`` for the backend; it is sent to the process that
        reads them."""
        return entered_one(ADAPTER_READER)(self, max_rank)


# The room "adapters" makes an object that reads adapters up to a rank for a model.
ADAPTER_READER = Seam[Callable[[LoadedModel, int], Any]]("engine.backends.adapter_reader")


# A room loads a worker of one process that computes on another device than the CPU.
DEVICE_LOADER = Seam[Callable[[WorkerFlags, PreparedModel], LoadedModel]]("engine.backends.loader")


class ProcessLoader(Protocol):
    """Loads models of workers that are several processes."""

    def check(self, flags: WorkerFlags, device: str, prepared: PreparedModel) -> None:
        """Raises ConfigError where the processes that the flags ask for cannot run the model on this device."""

    def load(self, flags: WorkerFlags, device: str, prepared: PreparedModel, threads: int) -> LoadedModel:
        """Starts the other processes and loads this one's share, as :func:`load_model` does."""


class RankLoader(ProcessLoader, Protocol):
    """Loads models whose layers several processes of a worker share (the room "ranks")."""

    def shares(self, config: ModelConfig, size: int) -> Sequence[ModelShard]:
        """Returns the share of the model that each process computes. Raises ConfigError for a model that ``size``
        processes cannot share."""

    def check(self, flags: PrepareFlags | WorkerFlags, device: str, prepared: PreparedModel) -> None:
        """Does what :class:`ProcessLoader` says, before a worker starts, too."""


RANKS = Seam[RankLoader]("engine.backends.ranks")
# The room "encoders" loads an encoder for blocks of so many tokens and so many threads.
ENCODER_LOADER = Seam[Callable[[PreparedModel, int, int], LoadedModel]]("engine.backends.encoders")
# The room "states" raises ConfigError for what a worker's flags ask of a model with states, and it cannot do.
STATES = Seam[Callable[[WorkerFlags, str, ModelConfig], None]]("engine.backends.states")
# The room "stages" loads workers whose processes have some of the layers each.
STAGES = Seam[ProcessLoader]("engine.backends.stages")


def rank_loader(size: int) -> RankLoader:
    """Returns the loader of workers of ``size`` processes. Raises ConfigError where there is none."""
    return entered_one(RANKS)


def process_loader(flags: WorkerFlags) -> ProcessLoader | None:
    """Returns the loader of a worker of several processes; None for one of a single process. Raises ConfigError where
    there is none."""
    if flags.pipeline_parallel_size > 1:
        return entered_one(STAGES)
    return rank_loader(flags.tensor_parallel_size) if flags.tensor_parallel_size > 1 else None


def shares_of(config: ModelConfig, size: int) -> Sequence[ModelShard]:
    """Returns the share of a model that each of a worker's ``size`` processes computes. Raises ConfigError if they
    cannot share it."""
    return [whole_model(config)] if size == 1 else rank_loader(size).shares(config, size)


# Such a function loads a model by a worker's flags and number of threads. It runs in a thread, and raises ConfigError.
BackendFactory = Callable[[WorkerFlags, int], LoadedModel]


def load_model(flags: WorkerFlags, threads: int) -> LoadedModel:
    """Loads a model as workers do by default: with a device's kernels where the flags name one, else CPU kernels if
    they can run the model, else torch."""
    flags = with_budgets(flags)
    device, prepared, loader = resolve_device(flags), prepare(flags, log.info), process_loader(flags)
    config = load_config(prepared.folder)
    if config.encoder is not None:
        return _load_encoder(flags, threads, device, prepared, loader)
    from pillion.engine.checkpoints.checkpoint import chooses_tokens
    from pillion.engine.checkpoints.weights import load_labels

    chooses = flags.load_format == "dummy" or chooses_tokens(prepared.folder, config)
    if not chooses and (device != CPU or flags.pipeline_parallel_size > 1):
        raise ConfigError(f"{prepared.name} has no head that chooses tokens, which GPUs and stages need so far")
    found = _load(flags, threads, device, prepared, config, loader)
    labels = None if chooses else load_labels(prepared.folder, config)
    return replace(found, chooses_tokens=chooses, head=None if labels is None else VectorHead(labels.numpy()))


def _load_encoder(
    flags: WorkerFlags, threads: int, device: str, prepared: PreparedModel, loader: ProcessLoader | None
) -> LoadedModel:
    if device != CPU or loader is not None or flags.enable_lora or flags.kv_cache_dtype != "auto":
        raise ConfigError(
            f"{prepared.name} is an encoder, which runs on the CPU in one process: without --tensor-parallel-size,"
            " --pipeline-parallel-size, --enable-lora and --kv-cache-dtype"
        )
    return entered_one(ENCODER_LOADER)(prepared, flags.block_size, threads)


def _load(
    flags: WorkerFlags,
    threads: int,
    device: str,
    prepared: PreparedModel,
    config: ModelConfig,
    loader: ProcessLoader | None,
) -> LoadedModel:
    if config.linear is not None:
        entered_one(STATES)(flags, device, config)
    if loader is not None:
        loader.check(flags, device, prepared)
    if flags.enable_lora:
        check_adapters(config)
    if device == CPU:
        check_host_steps(flags, prepared)
    for note in precision_notes(prepared, device):
        log.warning("%s", note)
    if config.quantization is not None:
        log.info("weights: %s", config.quantization.words)
    if loader is not None:
        return loader.load(flags, device, prepared, threads)
    if device != CPU:
        return entered_one(DEVICE_LOADER)(flags, prepared)
    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        # That torch runs is worth a warning where nobody asked for it, because the CPU kernels are faster.
        level = logging.INFO if flags.cpu_kernels == "torch" else logging.WARNING
        log.log(level, "all operators run on torch, %d threads: %s", threads, reason)
        if prepared.dtype == "bfloat16":
            log.warning("%s", TORCH_BFLOAT16)
        from pillion.engine.backends.torch_backend import TorchBackend

        return LoadedModel(prepared, TorchBackend(prepared, flags.block_size, threads))
    from pillion.engine.backends.cpu.cpu_backend import CpuBackend

    share, model = core_share(flags), load_cpu_share(flags, prepared, isa)
    tell_of_kernels(model, threads, share)
    backend = CpuBackend(model, threads, parse_cores(flags.cpu_affinity)[:threads], share)
    owned = threads / share.lending_table.cores if share is not None else 0.0
    return LoadedModel(prepared, backend, f"cpu/{isa.name}", owned, pair_tokens=pair_tokens(config))


def load_cpu_share(flags: WorkerFlags, prepared: PreparedModel, isa: Isa, shard: ModelShard | None = None) -> CpuModel:
    """Loads the share of a model that this process computes on the CPU kernels: ``shard``, or the whole model."""
    import torch

    # Torch only passes arrays on here, and its own threads would be in the kernels' way.
    torch.set_num_threads(1)
    return _load_for_cpu(flags, prepared, isa, log.info, shard)


def tell_of_kernels(model: CpuModel, threads: int, share: CoreShare | None) -> None:
    """Logs with which kernels, threads and cores a process runs its model."""
    log.info(
        "all operators run on the CPU kernels %s, %d threads%s; weights %.0f MiB, shared by all workers; KV in %s",
        model.isa.name,
        threads,
        " and those of idle workers" if share is not None and share.borrows else "",
        model.weights.nbytes / 2**20,
        model.layout.dtype,
    )


def core_share(flags: WorkerFlags) -> CoreShare | None:
    """Opens the lending table that the flags name, and returns the worker's cores in it. Only speed depends on the
    table, so a worker that cannot open it computes on its own cores and logs that."""
    if not flags.core_lending_table:
        return None
    try:
        return CoreShare(CoreLendingTable.open(flags.core_lending_table), flags.first_core)
    except ConfigError as error:
        log.warning("this worker borrows and lends no cores: %s", error)
        return None


def precision_notes(prepared: PreparedModel, device: str = "cpu") -> Iterator[str]:
    """Yields a sentence for each reason why answers are not those of the checkpoint in transformers."""
    saved, config = read_json(prepared.folder / "config.json"), load_config(prepared.folder)
    half = (saved.get("dtype") or saved.get("torch_dtype")) == "float16"
    # The codes and scales of quantized matrices are the same in each type.
    if prepared.dtype == "bfloat16" and half and config.quantization is None:
        yield (
            "the checkpoint is float16, of whose 11 significant bits bfloat16 keeps 8;"
            " --dtype float32 computes with exactly its weights"
        )
    if config.quantization is not None:
        yield from config.quantization.rounding_notes(
            device, experts=config.moe is not None, latents=config.latents is not None
        )
    for rope in config.ropes:
        if 0 < rope.switches_at < prepared.max_model_len:
            yield (
                f"requests whose prompt and max_tokens (by default, all of --max-model-len) are above"
                f" {rope.switches_at} tokens get other rotary frequencies ({rope.kind}), from their first token on"
            )


def make_ready(flags: PrepareFlags, progress: Progress) -> PreparedModel:
    """Makes everything that is made only once on a machine: the model, and for the CPU kernels packed weights and
    machine code, those of each rank.

    If the weights are packed already, and adapters are not asked for, nothing is loaded, which would take seconds at
    every start. Machine code that is missing then, for example after an update, is compiled by the first worker.
    """
    prepared = prepare(flags, progress)
    packs = resolve_device(flags) == CPU and choose_kernels(flags, prepared)[0] is not None
    if not packs and flags.load_format != "dummy":
        # Where weights are packed, packing has looked at all of them.
        _check_tensors(prepared)
    for isa, shard in _left_to_make(flags, prepared):
        model = _load_for_cpu(flags, prepared, isa, progress, shard)
        if flags.enable_lora:
            from pillion.engine.backends.cpu.cpu_backend import COMPILE_ADAPTERS

            entered_one(COMPILE_ADAPTERS)(model, progress)
    return prepared


def _check_tensors(prepared: PreparedModel) -> None:
    """Raises ConfigError where a decoder's files lack a tensor, or have one of another shape than the config says."""
    from pillion.engine.checkpoints.checkpoint import open_checkpoint

    config = load_config(prepared.folder)
    if config.encoder is None:
        with open_checkpoint(prepared.folder, config):
            pass


def is_ready(flags: PrepareFlags) -> bool:
    """Says whether :func:`make_ready` would have nothing to load. The answer takes milliseconds and imports no torch.

    Raises ConfigError where :func:`make_ready` does.
    """
    return is_prepared(flags) and not _left_to_make(flags, prepare(flags))


def shares_weights(flags: WorkerFlags) -> bool:
    """Returns whether a second process that loads the same model takes next to no memory for it: the CPU kernels map
    weights that all processes of a machine share. Raises ConfigError where :func:`load_model` does."""
    if resolve_device(flags) != CPU or process_loader(flags) is not None:
        return False
    return choose_kernels(flags, prepare(flags, log.info))[0] is not None


def _left_to_make(flags: PrepareFlags, prepared: PreparedModel) -> list[tuple[Isa, ModelShard]]:
    """Returns the shares that are to be loaded for the CPU kernels, where these run the model: those whose weights are
    not packed yet. With adapters these are all shares, because only a loaded model can tell which machine code is
    missing."""
    device, size = resolve_device(flags), flags.tensor_parallel_size
    if flags.enable_lora:
        check_adapters(load_config(prepared.folder))
    if size > 1:
        rank_loader(size).check(flags, device, prepared)
    isa = choose_kernels(flags, prepared)[0] if device == "cpu" else None
    if isa is None:
        return []
    cache, shards = ModelCache(), shares_of(load_config(prepared.folder), size)
    packed = [cache.packed_weights(prepared.fingerprint, f"cpu{shard.name}").exists() for shard in shards]
    return [(isa, shard) for shard, there in zip(shards, packed, strict=True) if flags.enable_lora or not there]


def _load_for_cpu(
    flags: ComputeFlags, prepared: PreparedModel, isa: Isa, progress: Progress, shard: ModelShard | None
) -> CpuModel:
    from pillion.engine.backends.cpu.cpu_backend import load_cpu_model

    return load_cpu_model(
        prepared,
        flags.block_size,
        isa,
        kv_cache_dtype=flags.kv_cache_dtype,
        progress=progress,
        shard=shard,
    )


def choose_kernels(flags: ComputeFlags, prepared: PreparedModel) -> tuple[Isa | None, str]:
    """Returns the instruction set whose kernels run the model, or None and the reason why torch runs it.

    Raises ConfigError for kernels that this processor cannot run, and for KV in 8 bits without the CPU kernels.
    """
    config = load_config(prepared.folder)
    isa = choose_isa(flags.cpu_kernels, host_features())
    if isa is None:
        chosen = flags.cpu_kernels == "torch"
        reason = "--cpu-kernels torch" if chosen else "there are no kernels for this processor"
    else:
        reason = unsupported(config, flags.block_size)
        layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype)
        if not reason and config.linear is not None and layout.state_layout is None:
            reason = f"pieces of states do not fit into blocks of {flags.block_size} tokens"
    if isa is not None and not reason:
        return isa, ""
    if flags.kv_cache_dtype != "auto":
        raise ConfigError(f"--kv-cache-dtype {flags.kv_cache_dtype} needs a GPU or the CPU kernels: {reason}")
    return None, reason


def check_adapters(config: ModelConfig) -> None:
    """Raises ConfigError for a model that cannot have adapters yet."""
    if config.values_are_keys:
        raise ConfigError(f"{config.family}: --enable-lora is not there yet where values are keys (attention_k_eq_v)")


def unsupported(config: ModelConfig, block_size: int) -> str:
    """Returns why the CPU kernels cannot run a model of this shape, or ""."""
    if config.encoder is not None:
        return "encoders run on torch"
    if config.linear is not None and config.linear.head_dim % PIECE_COLUMNS:
        return f"states need heads of a multiple of {PIECE_COLUMNS} values, not {config.linear.head_dim}"
    latents = config.latents
    if latents is not None and (latents.rank % PANEL_COLUMNS or latents.values % PANEL_COLUMNS):
        return f"products by head need a multiple of {PANEL_COLUMNS} latents and values"
    if latents is not None and latents.rotary % LANES:
        return f"attention over latents rotates a multiple of {LANES} values, not {latents.rotary}"
    if config.token_inputs is not None and config.token_inputs.width % LANES:
        return f"embeddings for each layer need a multiple of {LANES} values, not {config.token_inputs.width}"
    odd = [heads.head_dim for heads in config.all_heads if heads.head_dim % LANES]
    if odd:
        return f"attention needs heads of a multiple of {LANES} values, not {odd[0]}"
    if len(config.kv_head_counts) > ATTENTION_PLANS:
        return f"layers have {len(config.kv_head_counts)} different numbers of KV heads"
    if block_size % LANES:
        return f"attention needs blocks of a multiple of {LANES} tokens, not {block_size}"
    return ""


def thread_count(flags: WorkerFlags) -> int:
    """Returns ``--cpu-threads``, or the number of cores in ``--cpu-affinity``, or of those this process may use."""
    return flags.cpu_threads or len(parse_cores(flags.cpu_affinity)) or min(usable_cores(), MAX_CPU_THREADS)
