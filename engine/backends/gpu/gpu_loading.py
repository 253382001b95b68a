"""Makes a GPU backend from a worker's flags: with compiled kernels and workspace, and without a pool.

The order matters, because the KV node makes its pool of the GPU's free memory when the first worker attaches:

    weights (a region that the KV node shares out, filled by the first worker) -> buffers -> workspace -> (attach)

Ranks of one worker do all of that at the same time, and rank 0 attaches when all have done it.
"""

from __future__ import annotations

import os
import shutil
import time

import torch

from pillion.config import DecodeFlags, PrefillFlags, WorkerFlags
from pillion.engine.backends.backend import LAYOUT_VERSION, KVLayout, kv_layout
from pillion.engine.backends.devices import gpu_uuid, interpreted
from pillion.engine.backends.gpu.device_memory import tensor_at
from pillion.engine.backends.gpu.gpu_backend import GpuBackend, GpuLimits
from pillion.engine.backends.gpu.gpu_model import GpuModel
from pillion.engine.backends.gpu.gpu_weights import GetMemory, WeightMemory, load_gpu_weights
from pillion.engine.backends.gpu.rank_group import GpuRankGroup
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.model_config import load_config
from pillion.engine.models.rank_split import RankSplit
from pillion.engine.ranks.rank_memory import RankMemory
from pillion.engine.scheduling.scheduler import scored_rows
from pillion.errors import ConfigError
from pillion.kernels.gpu.attention.paged_attention import LEAST_HEAD_DIM, MOST_HEAD_DIM
from pillion.kvstore.client.attachment import share_region

# Longest time that a worker waits for another one to fill the weights' region.
WEIGHTS_TIMEOUT_S = 600.0
# Most answers to one prompt, whose first tokens one step chooses.
MAX_ANSWERS = 128
FP8_LAYOUT_VERSION = "fp8-rows-1"


def load_gpu_backend(
    flags: WorkerFlags,
    limits: GpuLimits,
    prepared: PreparedModel,
    progress: Progress,
    ranks: GpuRankGroup | None = None,
) -> tuple[GpuBackend, str]:
    """Returns the backend and the name of its kernels. ``ranks``: the worker's other ranks, where it has any. Raises
    ConfigError for models and flags it cannot run."""
    began_s = time.monotonic()
    config = load_config(prepared.folder)
    split = RankSplit.of(config, 0, 1) if ranks is None else ranks.split
    device = step_device()
    inside = FP8_LAYOUT_VERSION if flags.kv_cache_dtype == "fp8" else LAYOUT_VERSION
    layout = kv_layout(prepared, flags.block_size, inside, flags.kv_cache_dtype)
    check_limits(device, layout)
    weights = load_gpu_weights(
        prepared.folder,
        config,
        fingerprint=prepared.fingerprint,
        dtype=prepared.dtype,
        split=split,
        memory=region_memory(flags.attach_socket, device),
        dummy=flags.load_format == "dummy",
        progress=progress,
    )
    model = GpuModel(
        weights,
        prepared.max_model_len,
        limits.max_tokens,
        MAX_ANSWERS * limits.max_tokens,
        max_samples=limits.max_samples + limits.max_scored,
        ranks=ranks,
    )
    backend = GpuBackend(model, layout, limits, enforce_eager=flags.enforce_eager)
    progress("compiling the GPU kernels")
    backend.take_workspace()
    arch = "interpreter" if device.type == "cpu" else "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    share = "" if split.whole else f"rank {split.rank} of {split.size}: "
    progress(
        f"{share}all operators run on the GPU kernels {arch}; weights {weights.plan.nbytes / 2**20:.0f} MiB; "
        f"ready in {time.monotonic() - began_s:.1f} s"
    )
    return backend, f"gpu/{arch}"


def step_device() -> torch.device:
    """The device of this process's steps: the first GPU that it sees, which is another one in each rank where each has
    a GPU (:func:`pillion.engine.backends.devices.first_gpu`)."""
    return torch.device("cpu" if interpreted() else "cuda:0")


def join_ranks(split: RankSplit, meeting: int, memory: RankMemory, *, apart: bool) -> GpuRankGroup:
    """Meets the other ranks of the worker by the descriptor ``meeting``; ``memory`` says whether one has ended.
    ``apart``: whether each rank has a GPU of its own. Raises ConfigError."""
    device = step_device()
    own_device = apart and device.type == "cuda"
    return GpuRankGroup.join(split, meeting, device, own_device=own_device, aborted=lambda: memory.aborted)


def check_limits(device: torch.device, layout: KVLayout) -> None:
    """Raises ConfigError if the CUDA build of torch or a C compiler is missing, and for shapes without a kernel."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch cannot use the GPU; install the CUDA build of torch")
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    if device.type == "cuda" and not any(shutil.which(name) for name in compilers if name):
        raise ConfigError("--device cuda: Triton builds its launchers with a C compiler; install gcc, or set CC")
    head_dim, block_size = layout.head_dim, layout.block_size
    if not LEAST_HEAD_DIM <= head_dim <= MOST_HEAD_DIM or head_dim % LEAST_HEAD_DIM:
        raise ConfigError(f"the GPU kernels attend heads of 16, 32, 48 ... 256 values, not {head_dim}")
    if block_size not in (16, 32, 64, 128):
        raise ConfigError(f"the GPU kernels need --block-size 16, 32, 64 or 128, not {block_size}")


def limits_of(flags: WorkerFlags, prepared: PreparedModel) -> GpuLimits:
    """The limits of a worker's steps, by the flags of its kind."""
    if isinstance(flags, DecodeFlags):
        tokens, seqs, guesses = (
            flags.max_num_batched_tokens,
            flags.max_num_seqs,
            flags.speculative_config.num_speculative_tokens,
        )
        samples = min(tokens, seqs * (1 + guesses))
        scored = min(tokens - samples, scored_rows(prepared.vocab_size))
    else:
        assert isinstance(flags, PrefillFlags)
        tokens, guesses, samples, scored = flags.max_num_batched_prefill_tokens, 0, 0, 0
        seqs = min(flags.max_waiting_spans, tokens)
    return GpuLimits(
        max_tokens=tokens,
        max_seqs=seqs,
        max_samples=samples,
        max_scored=scored,
        max_model_len=prepared.max_model_len,
        num_speculative_tokens=guesses,
    )


def region_memory(attach_socket: str, device: torch.device) -> GetMemory:
    """Returns a function that gets memory for weights: a region on this process's GPU that the KV node owns and all its
    workers map."""

    def get(key: str, size_bytes: int) -> WeightMemory:
        region = share_region(attach_socket, key, size_bytes, WEIGHTS_TIMEOUT_S, device_uuid=gpu_uuid())
        if device.type == "cuda" and region.device_memory is None:
            raise ConfigError(
                "this worker computes on a GPU, its KV node keeps blocks in host memory: --kv-device cuda"
            )
        return WeightMemory(tensor_at(region, device), region.must_fill, region.filled, region.close)

    return get
