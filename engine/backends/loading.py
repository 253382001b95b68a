"""Chooses and loads the backend that runs a worker's model, by the worker's flags and the processor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pillion.config import ComputeFlags, WorkerFlags
from pillion.core_board import CoreBoard, CoreShare
from pillion.cores import MAX_CPU_THREADS, parse_cores, usable_cores
from pillion.engine.backends.backend import Backend
from pillion.engine.backends.devices import resolve_device
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.engine.models.config_json import read_json
from pillion.engine.models.model_config import ModelConfig, load_config
from pillion.engine.models.quantization import OWN_METHOD, Quantization
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import LANES, Isa, choose_isa, host_features
from pillion.kvstore.hashing import namespace_base

if TYPE_CHECKING:
    from pillion.engine.adapters.adapter_reader import AdapterReader
    from pillion.engine.backends.cpu.cpu_backend import CpuModel

log = logging.getLogger("pillion.worker")

TORCH_BFLOAT16 = (
    "torch's products in bfloat16 round by the number of rows: a stream that is replayed or preempted may go on with"
    " another token where two are nearly as likely; the CPU kernels have no such limit, and --dtype float32 hardly any"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the backend that runs it.

    ``operators`` names the kernels in logs and metrics. ``core_share`` is the share that the worker owns of its board's
    cores; 0: it has no board.
    """

    prepared: PreparedModel
    backend: Backend
    operators: str = "torch"
    core_share: float = 0.0

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
    for note in precision_notes(prepared, device):
        log.warning("%s", note)
    quantization = load_config(prepared.folder).quantization
    if quantization is not None:
        log.info("weights: %s", quantization.words)
    if device == "cuda":
        from pillion.engine.backends.gpu.gpu_loading import load_gpu_backend

        return LoadedModel(prepared, *load_gpu_backend(flags, prepared, log.info))
    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        # Torch that was not requested is worth a warning: the kernels are faster.
        level = logging.INFO if flags.cpu_kernels == "torch" else logging.WARNING
        log.log(level, "all operators run on torch, %d threads: %s", threads, reason)
        if prepared.dtype == "bfloat16":
            log.warning("%s", TORCH_BFLOAT16)
        from pillion.engine.backends.torch_backend import TorchBackend

        return LoadedModel(prepared, TorchBackend(prepared, flags.block_size, threads))
    import torch

    from pillion.engine.backends.cpu.cpu_backend import CpuBackend

    # Torch only passes arrays on, so that its own threads have nothing to do.
    torch.set_num_threads(1)
    model = _load_for_cpu(flags, prepared, isa, log.info)
    share = _core_share(flags)
    log.info(
        "all operators run on the CPU kernels %s, %d threads%s; weights %.0f MiB, shared by all workers; KV in %s",
        isa.name,
        threads,
        " and those of idle workers" if share else "",
        model.weights.nbytes / 2**20,
        model.layout.dtype,
    )
    backend = CpuBackend(model, threads, parse_cores(flags.cpu_affinity), share)
    owned = threads / share.board.cores if share is not None else 0.0
    return LoadedModel(prepared, backend, f"cpu/{isa.name}", owned)


def _core_share(flags: WorkerFlags) -> CoreShare | None:
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


def make_ready(flags: ComputeFlags, progress: Progress) -> PreparedModel:
    """Makes everything that is made once: the model, and for the CPU kernels packed weights and machine code.

    If the weights are packed already nothing is loaded, which would take seconds at every start. Machine code that is
    missing then, for example after an update, is compiled by the first worker.
    """
    prepared = prepare(flags, progress)
    if resolve_device(flags) == "cuda":
        return prepared
    isa, _ = choose_kernels(flags, prepared)
    if isa is not None and not ModelCache().packed_weights(prepared.fingerprint, "cpu").exists():
        _load_for_cpu(flags, prepared, isa, progress)
    return prepared


def _load_for_cpu(flags: ComputeFlags, prepared: PreparedModel, isa: Isa, progress: Progress) -> CpuModel:
    from pillion.engine.backends.cpu.cpu_backend import load_cpu_model

    return load_cpu_model(
        prepared,
        flags.block_size,
        isa,
        kv_cache_dtype=flags.kv_cache_dtype,
        progress=progress,
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
