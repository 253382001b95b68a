"""Max memory of a worker's step, besides weights and KV pool. Imports no torch.

A step's allocations grow with its tokens (rows of activations) and its rows of logits. Both are bounded, so the memory
is too: a worker logs it at its start, a GPU's KV pool leaves it free, and a token budget that needs more than is
available is rejected at the start instead of failing later.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from pillion.config import MAX_STEP_TOKENS, OfflineFlags, PrefillFlags, ServeFlags, StepFlags, WorkerFlags
from pillion.engine.backends.backend import kv_layout
from pillion.engine.checkpoints.prepare import PreparedModel
from pillion.engine.models.config_parser import load_config
from pillion.engine.models.families import layers_of
from pillion.engine.models.layer_states import state_bytes, states_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.scheduling.scheduler import scored_rows
from pillion.errors import ConfigError
from pillion.kernels.cpu.language.isa import choose_isa, host_features

log = logging.getLogger("pillion.worker")

# Bytes per token of a step's integer arrays (tokens, positions, slots, work items of attention), rounded up.
TOKEN_RECORD_BYTES = 512
FREE_MEMORY, CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def step_bytes(
    config: ModelConfig, dtype: str, tokens: int, logit_rows: int, ranks: int = 1, mixed_rows: int = MAX_STEP_TOKENS
) -> int:
    """Return the max bytes, on any backend, of a step of ``tokens`` tokens, ``logit_rows`` of which have logits: rows
    of ``dtype``, and float32 rows of some operators. Each of ``ranks`` processes has the residual stream and two
    partial sums of it. ``mixed_rows``: tokens that a mixture of experts computes at a time; all of them on the CPU
    kernels."""
    item = 4 if dtype == "float32" else 2
    hidden = config.hidden_size
    # Layers of different shapes have separate buffers.
    heads = sum(config.num_heads * kind.head_dim for kind in config.all_heads)
    projected = heads + sum(2 * kind.kv_heads * kind.head_dim for kind in config.all_heads)
    inner = max(config.widest_mlp, hidden)
    row = ranks * (item * 4 * hidden + 12 * hidden) + (8 * ranks * hidden if ranks > 1 else 0)
    row += item * (2 * projected + 2 * heads + 4 * inner) + 4 * projected
    if config.linear is not None:
        values = config.linear.heads * config.linear.head_dim or hidden
        queries_keys = 2 * config.linear.key_heads * config.linear.key_dim
        row += 4 * (4 * values + 3 * queries_keys) + item * values
    if config.token_inputs is not None:
        row += ranks * 3 * 4 * config.num_layers * config.token_inputs.width
    mixed = 0
    if config.moe is not None:
        # A token's row is copied for each of its experts, and one expert may get all tokens.
        moe, each = config.moe, config.moe.experts_per_token
        mixed = each * (item * (3 * hidden + moe.intermediate_size) + 4 * hidden)
        mixed += item * 4 * moe.intermediate_size + 8 * moe.num_experts
    # Logits are float32; the output projection may write another type first.
    logits = logit_rows * config.vocab_size * 8
    return tokens * (row + TOKEN_RECORD_BYTES) + min(tokens, mixed_rows) * mixed + logits


def head_bytes(layer: ModelConfig, states: int, dtype: str, tokens: int, rows: int) -> int:
    """Return the max bytes, without weights, of an EAGLE head of one ``layer`` on a GPU, for passes of ``tokens``
    tokens, ``rows`` of which draft: those of a step, the embeddings and hidden states that are its inputs, the logits
    of draft ids, and ``states`` values per token that the model's steps store for it."""
    item = 4 if dtype == "float32" else 2
    logits = rows * (8 * layer.vocab_size + item * layer.hidden_size)
    return step_bytes(layer, dtype, tokens, rows) + tokens * item * (2 * layer.hidden_size + states) + logits


def logit_rows_of(flags: WorkerFlags | ServeFlags | OfflineFlags, vocab_size: int) -> int:
    """Return the max rows of a step with logits: sampled rows, and rows that score prompts."""
    if not isinstance(flags, StepFlags):
        return 0
    tokens, draft_tokens = flags.max_num_batched_tokens, flags.speculative_config.num_speculative_tokens
    sampled = min(tokens, flags.max_num_seqs * (1 + draft_tokens))
    return min(tokens, sampled + scored_rows(vocab_size))


def steps_bytes(flags: WorkerFlags | ServeFlags | OfflineFlags, prepared: PreparedModel) -> int:
    """Return the bytes of the largest steps of all workers that ``flags`` configure, together."""
    config, total, ranks = load_config(prepared.folder), 0, flags.tensor_parallel_size
    serve = flags if isinstance(flags, ServeFlags) else None
    if isinstance(flags, StepFlags):
        rows, count = logit_rows_of(flags, prepared.vocab_size), serve.decode_workers if serve else 1
        total += count * step_bytes(config, prepared.dtype, flags.max_num_batched_tokens, rows, ranks)
        if config.linear is not None and _copies_states(flags, prepared):
            total += count * flags.max_num_seqs * state_bytes(states_of(layers_of(config)))
    if isinstance(flags, PrefillFlags):
        count = serve.prefill_workers if serve else 1
        ranks = (serve and serve.prefill_tensor_parallel_size) or ranks
        tokens, stages = flags.max_num_batched_prefill_tokens, flags.pipeline_parallel_size
        # Each stage runs another step, and has a buffer of float32 rows per step in flight to send.
        passed = (stages - 1) * ranks * tokens * 4 * config.hidden_size
        total += count * stages * (step_bytes(config, prepared.dtype, tokens, 0, ranks) + passed)
    return total


def _copies_states(flags: WorkerFlags | ServeFlags | OfflineFlags, prepared: PreparedModel) -> bool:
    """Return whether a step copies the states of its sequences, as torch's operators do; the CPU kernels access them in
    place."""
    kernels = choose_isa(flags.cpu_kernels, host_features())
    return kernels is None or kv_layout(prepared, flags.block_size).state_layout is None


def check_host_steps(flags: WorkerFlags, prepared: PreparedModel) -> None:
    """Log the host memory of the largest step. Raises ConfigError if less is available."""
    needed, available = steps_bytes(flags, prepared), free_bytes()
    if available and needed > available:
        flag = "--max-num-batched-tokens" if isinstance(flags, StepFlags) else "--max-num-batched-prefill-tokens"
        raise ConfigError(
            f"a step of {flags.step_budget_tokens} tokens of this model takes up to {needed / 2**20:.0f} MiB beside "
            f"weights and KV pool, and {available / 2**20:.0f} MiB are free: lower {flag}"
        )
    log.info(
        "steps of up to %d tokens take up to %.1f MiB beside weights and KV pool",
        flags.step_budget_tokens,
        needed / 2**20,
    )


def free_bytes() -> int:
    """Return the bytes of host memory available to this process; 0 if the system does not report it."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = FREE_MEMORY.read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(CGROUP_LIMIT.read_text()))
    return min(limits, default=0)
