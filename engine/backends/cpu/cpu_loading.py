"""Choice of the CPU kernels for a model, and loading of a process's share. Imports torch only in functions, because
supervisors import this module to check what a machine supports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pillion.config import ComputeFlags, WorkerFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.checkpoints.model_files import Progress
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_shard import ModelShard
from pillion.errors import ConfigError
from pillion.host.core_lending_table import CoreLendingTable, CoreShare
from pillion.host.cores import MAX_CPU_THREADS, parse_cores, usable_cores
from pillion.kernels.cpu.attention.cpu_attention_plan import MAX_SELECTED_TOKENS
from pillion.kernels.cpu.language.isa import ATTENTION_PLANS, LANES, Isa, choose_isa, host_features
from pillion.kernels.cpu.products.tiles import PANEL_COLUMNS
from pillion.kernels.state_pieces import PIECE_COLUMNS

if TYPE_CHECKING:
    from pillion.engine.backends.cpu.cpu_model import CpuModel

log = logging.getLogger("pillion.worker")


def load_cpu_share(flags: WorkerFlags, prepared: PreparedModel, isa: Isa, shard: ModelShard | None = None) -> CpuModel:
    """Load ``shard`` of a model, by default all of it, for the CPU kernels, and limit torch to one thread."""
    import torch

    # Torch computes next to nothing here, and its threads would compete with the kernels.
    torch.set_num_threads(1)
    return load_for_cpu(flags, prepared, isa, log.info, shard)


def load_for_cpu(
    flags: ComputeFlags, prepared: PreparedModel, isa: Isa, progress: Progress, shard: ModelShard | None
) -> CpuModel:
    """Load ``shard`` of a model, by default all of it, packing its weights unless they are packed."""
    from pillion.engine.backends.cpu.cpu_model import load_cpu_model

    return load_cpu_model(
        prepared,
        flags.block_size,
        isa,
        kv_cache_dtype=flags.kv_cache_dtype,
        progress=progress,
        shard=shard,
    )


def log_kernels(model: CpuModel, threads: int, share: CoreShare | None) -> None:
    """Log the kernels, threads and cores of a process."""
    log.info(
        "all operators run on the CPU kernels %s, %d threads%s; weights %.0f MiB, shared by all workers; KV in %s",
        model.isa.label,
        threads,
        " and those of idle workers" if share is not None and share.borrows else "",
        model.weights.nbytes / 2**20,
        model.layout.dtype,
    )


def core_share(flags: WorkerFlags) -> CoreShare | None:
    """Open the core lending table, and return the worker's cores in it; None without a table. If it cannot be opened,
    logs a warning and returns None, since only speed depends on it."""
    if not flags.core_lending_table:
        return None
    try:
        return CoreShare(CoreLendingTable.open(flags.core_lending_table), flags.first_core)
    except ConfigError as error:
        log.warning("this worker borrows and lends no cores: %s", error)
        return None


def choose_kernels(flags: ComputeFlags, prepared: PreparedModel) -> tuple[Isa | None, str]:
    """Return the instruction set of the kernels that run the model and "", or None and the reason for torch.

    Raises ConfigError for kernels that this processor cannot run, and for 8-bit KV without the CPU kernels.
    """
    config = load_config(prepared.folder)
    exact = flags.exact_weights or config.quantization is None
    isa = choose_isa(flags.cpu_kernels, host_features(), exact_codes=exact)
    if isa is None:
        by_flag = flags.cpu_kernels == "torch"
        reason = "--cpu-kernels torch" if by_flag else "there are no kernels for this processor"
    else:
        reason = unsupported(config, flags.block_size)
        layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype)
        index = None if config.latents is None else config.latents.index
        if not reason and index is not None:
            reason = _unsupported_index(flags.kv_cache_dtype, prepared.max_model_len)
        if not reason and config.linear is not None and layout.state_layout is None:
            reason = f"pieces of states do not fit into blocks of {flags.block_size} tokens"
    if isa is not None and not reason:
        return isa, ""
    if flags.kv_cache_dtype != "auto":
        raise ConfigError(f"--kv-cache-dtype {flags.kv_cache_dtype} needs a GPU or the CPU kernels: {reason}")
    return None, reason


def unsupported(config: ModelConfig, block_size: int) -> str:
    """Return the reason why the CPU kernels cannot run a model of this shape, or ""."""
    if config.encoder is not None:
        return "encoders run on torch"
    if config.linear is not None and config.linear.head_dim % PIECE_COLUMNS:
        return f"states need heads of a multiple of {PIECE_COLUMNS} values, not {config.linear.head_dim}"
    latents = config.latents
    if latents is not None and (latents.kv_lora_rank % PANEL_COLUMNS or latents.v_head_dim % PANEL_COLUMNS):
        return f"products by head need a multiple of {PANEL_COLUMNS} latents and values"
    if latents is not None and latents.qk_rope_head_dim % LANES:
        return f"attention over latents rotates a multiple of {LANES} values, not {latents.qk_rope_head_dim}"
    if latents is not None and latents.index is not None and latents.index.dim % LANES:
        return f"index keys need a multiple of {LANES} values, not {latents.index.dim}"
    if config.token_inputs is not None and config.token_inputs.width % LANES:
        return f"embeddings for each layer need a multiple of {LANES} values, not {config.token_inputs.width}"
    unsupported_dims = [heads.head_dim for heads in config.all_heads if heads.head_dim % LANES]
    if unsupported_dims:
        return f"attention needs heads of a multiple of {LANES} values, not {unsupported_dims[0]}"
    if len(config.kv_head_counts) > ATTENTION_PLANS:
        return f"layers have {len(config.kv_head_counts)} different numbers of KV heads"
    if block_size % LANES:
        return f"attention needs blocks of a multiple of {LANES} tokens, not {block_size}"
    return ""


def _unsupported_index(kv_cache_dtype: str, max_model_len: int) -> str:
    """Return the reason why the CPU kernels cannot select tokens by an indexer, or ""."""
    if kv_cache_dtype != "auto":
        return "KV with index keys cannot be stored in 8 bits"
    if max_model_len > MAX_SELECTED_TOKENS:
        return f"tokens are selected of at most {MAX_SELECTED_TOKENS}; set --max-model-len"
    return ""


def thread_count(flags: WorkerFlags) -> int:
    """Return ``--cpu-threads``; if 0, the number of cores in ``--cpu-affinity``, or of usable cores."""
    return flags.cpu_threads or len(parse_cores(flags.cpu_affinity)) or min(usable_cores(), MAX_CPU_THREADS)
