"""Loading of a GPU backend from a worker's flags: weights, compiled kernels and workspace, but no pool.

The order matters, because the KV node allocates its pool in the GPU's free memory when the first worker attaches:

    weights (memory shared through the KV node, filled by the first worker) -> buffers -> workspace -> (attach)

Ranks do this concurrently, and rank 0 attaches when all have finished. Communication with the KV node is in
gpu_worker.py, because this module is also imported by tests on GPU machines that have only torch and triton.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator

import torch

from pillion.config import MAX_WAITING_PREFILLS, DecodeFlags, PrefillFlags, WorkerFlags
from pillion.engine.adapters.adapter_rows import adapter_shapes
from pillion.engine.adapters.adapter_targets import listed_targets
from pillion.engine.backends.backend import LAYOUT_VERSION, KVLayout, kv_layout
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_devices import devices_of, interpreted
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_roofline import expected_on_gpu
from pillion.engine.backends.gpu.gpu_weights import GetMemory, load_gpu_weights
from pillion.engine.backends.step_memory import step_bytes
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.gpu_ranks.rank_group import GpuRankGroup
from pillion.engine.gpu_states.rank_states import rank_layout
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.layer_operations import MAX_MIXED_ROWS
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard, whole_model
from pillion.engine.scheduling.scheduler import scored_rows
from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import ConfigError
from pillion.kernels.gpu.attention.latent_attention import widths_fit
from pillion.kernels.gpu.attention.paged_attention import MAX_HEAD_DIM, MIN_HEAD_DIM
from pillion.kernels.gpu.products.fp8_product import computes_in_fp8
from pillion.kernels.gpu_states.state_places import CHUNKS_LAYOUT_VERSION
from pillion.kernels.state_pieces import CHUNK, PIECE_COLUMNS, STATE_LAYOUT_VERSION

log = logging.getLogger("pillion.worker")

# Max parallel samples of a prompt, whose first tokens are sampled in one step; the gateway's limit.
MAX_ANSWERS = 128
FP8_LAYOUT_VERSION = "fp8-rows-1"


def cost_on_gpu(flags: WorkerFlags, prepared: PreparedModel) -> StepModel | None:
    """Return the estimated cost of a worker's steps; None in Triton's interpreter."""
    return None if interpreted() else expected_on_gpu(flags, prepared, devices_of(flags.processes))[0]


def load_gpu_backend(
    flags: WorkerFlags,
    limits: GpuLimits,
    prepared: PreparedModel,
    memory: GetMemory,
    progress: Progress,
    ranks: GpuRankGroup | None = None,
    *,
    shard: ModelShard | None = None,
    divided: bool = False,
    make: Callable[..., GpuBackend] = GpuBackend,
) -> tuple[GpuBackend, str]:
    """Return the backend and the name of its kernels.

    Args:
        memory: allocates memory for weights.
        ranks: the worker's other ranks, if any.
        shard: of the model, by default that of the rank or all of it.
        divided: True if each rank has a shard of the pool.
        make: constructs the backend, with the arguments of :class:`GpuBackend`.

    Raises ConfigError for models and flags that are not supported, and if memory is short.
    """
    began_s = time.monotonic()
    config = load_config(prepared.folder)
    shard = shard or (whole_model(config) if ranks is None else ranks.shard)
    device = step_device()
    layout = rank_layout(gpu_layout(prepared, flags.block_size, flags.kv_cache_dtype), config, shard, divided=divided)
    check_operations(config)
    check_limits(device, layout)
    in_fp8 = _in_fp8(flags, config, prepared, device)
    weights = load_gpu_weights(
        prepared.folder,
        config,
        fingerprint=prepared.fingerprint,
        dtype=prepared.dtype,
        shard=shard,
        memory=memory,
        dummy=flags.load_format == "dummy",
        in_fp8=in_fp8,
        join=not _adapts_mixtures(flags, config),
        progress=progress,
    )
    rows = limits.max_samples + limits.max_scored
    needed = step_bytes(shard.local(config), prepared.dtype, limits.max_tokens, rows, mixed_rows=MAX_MIXED_ROWS)
    with fit_in_memory(limits.max_tokens, needed, device) as size:
        model = GpuModel(
            weights,
            prepared.max_model_len,
            limits.max_tokens,
            max(MAX_ANSWERS, 1 + limits.num_speculative_tokens) * limits.max_seqs,
            max_samples=rows,
            ranks=ranks,
            shard=shard,
            invariant=flags.batch_invariant,
        )
        backend = make(model, layout, limits, enforce_eager=flags.enforce_eager)
        progress("compiling the GPU kernels")
        backend.allocate_workspace()
    progress(f"steps of up to {limits.max_tokens} tokens take up to {size} beside weights; the KV pool gets the rest")
    arch = "interpreter" if device.type == "cpu" else "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    share = "" if shard.whole else f"rank {shard.rank} of {shard.size}: "
    if shard.layers is not None:
        share += f"layers {shard.layers.start} to {shard.layers.stop - 1}: "
    progress(
        f"{share}all operators run on the GPU kernels {arch}; weights {weights.plan.nbytes / 2**20:.0f} MiB; "
        f"ready in {time.monotonic() - began_s:.1f} s"
    )
    return backend, f"gpu/{arch}"


@contextlib.contextmanager
def fit_in_memory(tokens: int, needed: int, device: torch.device) -> Iterator[str]:
    """Context in which the buffers of a step of ``tokens`` tokens are allocated; yields their size ``needed`` as text.
    Raises ConfigError if the GPU has less, or runs out of memory."""
    lower = "lower --max-num-batched-tokens or --max-num-batched-prefill-tokens"
    size = f"{needed / 2**20:.0f} MiB"
    too_large = f"a step of {tokens} tokens of this model takes up to {size} beside weights, and the GPU has"
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        raise ConfigError(f"{too_large} {free / 2**20:.0f} MiB left: {lower}")
    try:
        yield size
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{too_large} no more: {lower}") from error


def _adapts_mixtures(flags: WorkerFlags, config: ModelConfig) -> bool:
    """Return whether adapters may change experts or shared experts."""
    if not flags.enable_lora:
        return False
    shapes = adapter_shapes(config, listed_targets(flags.lora_target_modules))
    return any(".shared." in name or shape.experts for name, shape in shapes.items())


def _in_fp8(flags: WorkerFlags, config: ModelConfig, prepared: PreparedModel, device: torch.device) -> bool:
    """Return whether linear layers multiply FP8 by FP8: if the checkpoint prescribes it and the device supports it."""
    quantization = config.quantization
    if quantization is None or not quantization.fp8_rows or prepared.dtype != "bfloat16":
        return False
    if flags.batch_invariant or not computes_in_fp8(device):
        condition = "with --batch-invariant" if flags.batch_invariant else "on this GPU"
        log.warning("the checkpoint expects inputs of layers in FP8, but they are not quantized %s", condition)
        return False
    log.info("linear layers multiply in FP8, with inputs quantized as in the checkpoint's config")
    return True


def gpu_layout(prepared: PreparedModel, block_size: int, kv_cache_dtype: str = "auto") -> KVLayout:
    """Return the layout of a model's slots for the GPU kernels."""
    inside = FP8_LAYOUT_VERSION if kv_cache_dtype == "fp8" else LAYOUT_VERSION
    if load_config(prepared.folder).linear is not None:
        inside += f"/{STATE_LAYOUT_VERSION}/{CHUNKS_LAYOUT_VERSION}"
    return kv_layout(prepared, block_size, inside, kv_cache_dtype, state_chunk=CHUNK)


def step_device() -> torch.device:
    """Return the device of this process's steps: the first visible GPU, which differs between ranks that have one each
    (:func:`pillion.engine.backends.gpu.gpu_devices.first_gpu`)."""
    return torch.device("cpu" if interpreted() else "cuda:0")


def check_limits(device: torch.device, layout: KVLayout) -> None:
    """Raise ConfigError if the CUDA build of torch or a C compiler is missing, or if no kernel supports the layout."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch cannot use the GPU; install the CUDA build of torch")
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    if device.type == "cuda" and not any(shutil.which(name) for name in compilers if name):
        raise ConfigError("--device cuda: Triton builds its launchers with a C compiler; install gcc, or set CC")
    block_size, widths = layout.block_size, {layout.head_dim}
    if layout.layers:
        widths = {heads.head_dim for heads in layout.layers if heads is not None}
    for head_dim in widths if layout.planes > 1 else ():
        if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % MIN_HEAD_DIM:
            raise ConfigError(f"the GPU kernels attend heads of 16, 32, 48 ... {MAX_HEAD_DIM} values, not {head_dim}")
    if block_size not in (16, 32, 64, 128):
        raise ConfigError(f"the GPU kernels need --block-size 16, 32, 64 or 128, not {block_size}")
    if layout.state_bytes and layout.state_layout is None:
        raise ConfigError(
            f"pieces of states do not fit into blocks of {block_size} tokens, or a head has no multiple of "
            f"{PIECE_COLUMNS} values, which the GPU kernels need; use --device cpu"
        )


def check_operations(config: ModelConfig) -> None:
    """Raise ConfigError if a layer has an operation without a GPU kernel."""
    latents = config.latents
    if latents is not None and latents.index is not None:
        raise ConfigError(f"{config.family}: no GPU kernel selects tokens by an indexer; use --device cpu")
    if latents is not None and not widths_fit(latents.kv_lora_rank, latents.qk_rope_head_dim):
        widths = f"{latents.kv_lora_rank} latents and {latents.qk_rope_head_dim} rotated values"
        raise ConfigError(f"{config.family}: the GPU kernels do not attend over {widths}; use --device cpu")


def limits_of(flags: WorkerFlags, prepared: PreparedModel) -> GpuLimits:
    """Return the limits of a decode or prefill worker's steps."""
    if isinstance(flags, DecodeFlags):
        tokens, seqs, draft_tokens = (
            flags.max_num_batched_tokens,
            flags.max_num_seqs,
            flags.speculative_config.num_speculative_tokens,
        )
        samples = min(tokens, seqs * (1 + draft_tokens))
        scored = min(tokens - samples, scored_rows(prepared.vocab_size))
    else:
        assert isinstance(flags, PrefillFlags)
        tokens, draft_tokens, samples = flags.max_num_batched_prefill_tokens, 0, 0
        seqs = min(MAX_WAITING_PREFILLS, tokens)
        # Embedding requests may need logits of their last tokens.
        scored = min(seqs, scored_rows(prepared.vocab_size))
    return GpuLimits(
        max_tokens=tokens,
        max_seqs=seqs,
        max_samples=samples,
        max_scored=scored,
        max_model_len=prepared.max_model_len,
        num_speculative_tokens=draft_tokens,
    )
