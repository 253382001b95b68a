"""Loading of a worker's model on the backend for its flags. Imports only the modules of that backend, because some are
heavy or optional.

encoder                        torch, text by text
several ranks or stages        several processes, on the CPU kernels or on GPUs
GPU                            the GPU kernels
otherwise                      the CPU kernels if they support the model, else torch
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pillion.config import PrepareFlags, WorkerFlags
from pillion.engine.backends.cpu.cpu_loading import (
    choose_kernels,
    core_share,
    load_cpu_share,
    load_for_cpu,
    log_kernels,
)
from pillion.engine.backends.devices import resolve_device, with_budgets
from pillion.engine.backends.loaded_model import LoadedModel
from pillion.engine.backends.step_memory import check_host_steps
from pillion.engine.checkpoints.model_cache import ModelCache
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel, is_prepared, prepare
from pillion.engine.models.config_json import read_json
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.engine.models.model_work import pair_tokens
from pillion.engine.models.vector_head import VectorHead
from pillion.engine.ranks.rank_loading import check_ranks
from pillion.engine.stages.stage_loading import check_stages
from pillion.engine.states.states_check import check_states
from pillion.errors import ConfigError
from pillion.host.cores import parse_cores
from pillion.kernels.cpu.language.isa import Isa
from pillion.kvstore.memory.domain import CPU

log = logging.getLogger("pillion.worker")

TORCH_BFLOAT16 = (
    "torch's bfloat16 products depend on the number of rows: a replayed or preempted stream may continue with another"
    " token if two are almost equally likely; the CPU kernels do not have this limit, and --dtype float32 hardly does"
)


def load_model(flags: WorkerFlags, threads: int) -> LoadedModel:
    """Load the model of a worker on the device that its flags choose. Raises ConfigError for models and combinations of
    flags that are not supported."""
    flags = with_budgets(flags)
    device, prepared = resolve_device(flags), prepare(flags, log.info)
    config = load_config(prepared.folder)
    if config.encoder is not None:
        return _load_encoder(flags, threads, device, prepared)
    from pillion.engine.checkpoints.checkpoint import chooses_tokens
    from pillion.engine.checkpoints.weights import load_labels

    has_head = flags.load_format == "dummy" or chooses_tokens(prepared.folder, config)
    if not has_head and (device != CPU or flags.pipeline_parallel_size > 1):
        raise ConfigError(f"{prepared.name} has no LM head, which GPUs and stages require")
    _check(flags, device, prepared, config)
    loaded = _load_decoder(flags, threads, device, prepared, config)
    labels = None if has_head else load_labels(prepared.folder, config)
    return replace(loaded, chooses_tokens=has_head, head=None if labels is None else VectorHead(labels.numpy()))


def _load_encoder(flags: WorkerFlags, threads: int, device: str, prepared: PreparedModel) -> LoadedModel:
    """Load an encoder on torch. Raises ConfigError for flags that encoders do not support."""
    if device != CPU or flags.processes > 1 or flags.enable_lora or flags.kv_cache_dtype != "auto":
        raise ConfigError(
            f"{prepared.name} is an encoder, which runs on the CPU in one process: without --tensor-parallel-size,"
            " --pipeline-parallel-size, --enable-lora and --kv-cache-dtype"
        )
    from pillion.engine.encoders.encoder_backend import load_encoder

    return load_encoder(prepared, flags.block_size, threads)


def check_processes(flags: PrepareFlags | WorkerFlags, device: str, prepared: PreparedModel) -> None:
    """Raise ConfigError if the model cannot be divided over the ranks or stages of a worker on this device."""
    if isinstance(flags, WorkerFlags) and flags.pipeline_parallel_size > 1:
        check_stages(flags, device, prepared)
    elif flags.tensor_parallel_size > 1:
        check_ranks(flags, device, prepared)


def _check(flags: WorkerFlags, device: str, prepared: PreparedModel, config: ModelConfig) -> None:
    """Raise ConfigError for unsupported combinations of flags and decoder; log notes on precision."""
    if config.linear is not None:
        check_states(flags, device, config)
    check_processes(flags, device, prepared)
    if flags.enable_lora:
        check_adapters(config)
    if device == CPU:
        check_host_steps(flags, prepared)
    for note in precision_notes(prepared, device):
        log.warning("%s", note)
    if config.quantization is not None:
        log.info("weights: %s", config.quantization.words)


def _load_decoder(
    flags: WorkerFlags, threads: int, device: str, prepared: PreparedModel, config: ModelConfig
) -> LoadedModel:
    if device != CPU:
        if flags.pipeline_parallel_size > 1:
            from pillion.engine.gpu_stages.gpu_stage_loading import load_gpu_stages

            return load_gpu_stages(flags, prepared, threads)
        if flags.tensor_parallel_size > 1:
            from pillion.engine.gpu_ranks.gpu_rank_loading import load_gpu_ranks

            return load_gpu_ranks(flags, prepared, threads)
        from pillion.engine.backends.gpu.gpu_worker import load_gpu_worker

        return load_gpu_worker(flags, prepared)
    if flags.pipeline_parallel_size > 1:
        from pillion.engine.stages.stage_loading import load_stages

        return load_stages(flags, prepared, threads)
    if flags.tensor_parallel_size > 1:
        from pillion.engine.ranks.rank_loading import load_ranks

        return load_ranks(flags, prepared, threads)
    isa, reason = choose_kernels(flags, prepared)
    if isa is None:
        if flags.batch_invariant:
            raise ConfigError(f"--batch-invariant needs a GPU or the CPU kernels: {reason}")
        level = logging.INFO if flags.cpu_kernels == "torch" else logging.WARNING
        log.log(level, "all operators run on torch, %d threads: %s", threads, reason)
        if prepared.dtype == "bfloat16":
            log.warning("%s", TORCH_BFLOAT16)
        from pillion.engine.backends.torch_backend import TorchBackend

        return LoadedModel(prepared, TorchBackend(prepared, flags.block_size, threads))
    from pillion.engine.backends.cpu.cpu_backend import CpuBackend

    share, model = core_share(flags), load_cpu_share(flags, prepared, isa)
    log_kernels(model, threads, share)
    backend = CpuBackend(model, threads, parse_cores(flags.cpu_affinity)[:threads], share)
    owned = threads / share.lending_table.cores if share is not None else 0.0
    return LoadedModel(prepared, backend, f"cpu/{isa.label}", owned, pair_tokens=pair_tokens(config))


def precision_notes(prepared: PreparedModel, device: str = "cpu") -> Iterator[str]:
    """Yield a sentence per reason for answers that differ from those of transformers with this checkpoint."""
    saved, config = read_json(prepared.folder / "config.json"), load_config(prepared.folder)
    half = (saved.get("dtype") or saved.get("torch_dtype")) == "float16"
    # Not if quantized: the codes and scales do not depend on the type.
    if prepared.dtype == "bfloat16" and half and config.quantization is None:
        yield (
            "the checkpoint is float16, of whose 11 significant bits bfloat16 keeps 8;"
            " --dtype float32 computes with exactly its weights"
        )
    if config.quantization is not None:
        yield from config.quantization.rounding_notes(device, latents=config.latents is not None)
    for rope in config.ropes:
        if 0 < rope.switches_at < prepared.max_model_len:
            yield (
                f"requests whose prompt and max_tokens (by default, all of --max-model-len) are above"
                f" {rope.switches_at} tokens get other rotary frequencies ({rope.kind}), from their first token on"
            )


def make_ready(flags: PrepareFlags, progress: Progress) -> PreparedModel:
    """Create all files that workers of a machine share: the prepared model and, for the CPU kernels, the packed weights
    and machine code of each rank.

    Weights that are already packed are only loaded if adapters are enabled, since loading takes seconds. Machine code
    that is still missing, e.g. after an update, is compiled by the first worker.
    """
    prepared = prepare(flags, progress)
    packs = resolve_device(flags) == CPU and choose_kernels(flags, prepared)[0] is not None
    if not packs and flags.load_format != "dummy":
        # Otherwise packing checks all tensors.
        _check_tensors(prepared)
    for isa, shard in _shards_to_load(flags, prepared):
        model = load_for_cpu(flags, prepared, isa, progress, shard)
        if flags.enable_lora:
            from pillion.engine.adapters.cpu_adapters import compile_adapter_kernels

            compile_adapter_kernels(model, progress)
    return prepared


def _check_tensors(prepared: PreparedModel) -> None:
    """Raise ConfigError if a decoder's files lack a tensor, or have one of a wrong shape."""
    from pillion.engine.checkpoints.checkpoint import open_checkpoint

    config = load_config(prepared.folder)
    if config.encoder is None:
        with open_checkpoint(prepared.folder, config):
            pass


def is_ready(flags: PrepareFlags) -> bool:
    """Return whether :func:`make_ready` has nothing to load. Takes milliseconds, imports no torch, and raises
    ConfigError like :func:`make_ready`."""
    return is_prepared(flags) and not _shards_to_load(flags, prepare(flags))


def shares_weights(flags: WorkerFlags) -> bool:
    """Return whether processes with the same model share the memory of its weights, as those on the CPU kernels do.
    Raises ConfigError like :func:`load_model`."""
    if resolve_device(flags) != CPU or flags.processes > 1:
        return False
    return choose_kernels(flags, prepare(flags, log.info))[0] is not None


def _shards_to_load(flags: PrepareFlags, prepared: PreparedModel) -> list[tuple[Isa, ModelShard]]:
    """Return the shards that must be loaded to pack weights or compile code for the CPU kernels: those that are not
    packed yet; with adapters all, since only a loaded model shows which code is missing. [] on other backends."""
    device, size = resolve_device(flags), flags.tensor_parallel_size
    if flags.enable_lora:
        check_adapters(load_config(prepared.folder))
    if size > 1:
        check_ranks(flags, device, prepared)
    isa = choose_kernels(flags, prepared)[0] if device == "cpu" else None
    if isa is None:
        return []
    cache, shards = ModelCache(), shares_of(load_config(prepared.folder), size)
    packed = [cache.packed_weights(prepared.fingerprint, f"cpu{shard.name}").exists() for shard in shards]
    return [(isa, shard) for shard, is_packed in zip(shards, packed, strict=True) if flags.enable_lora or not is_packed]


def shares_of(config: ModelConfig, size: int) -> Sequence[ModelShard]:
    """Return the shards of a worker's ``size`` ranks. Raises ConfigError if the model is not divisible by them."""
    return [ModelShard.of(config, rank, size) for rank in range(size)]


def check_adapters(config: ModelConfig) -> None:
    """Raise ConfigError for a model that does not support adapters."""
    if config.values_are_keys:
        raise ConfigError(f"{config.family}: --enable-lora is not supported yet if values are keys (attention_k_eq_v)")
    if config.value_width:
        raise ConfigError(f"{config.family}: --enable-lora is not supported yet if values are narrower than keys")
