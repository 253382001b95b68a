"""Computes what the largest step of a worker takes of memory, beside weights and KV pool. Imports no torch.

Everything that a step allocates grows with its tokens (rows of activations) or with the rows whose logits it computes.
Both are bounded, so the memory is, too: it is told when a worker starts, the KV pool may not take it, and a budget for
which it does not suffice is refused then, and not by a step that fails later.
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

# What the arrays of a step (tokens, positions, places, work of attention) take for each token, rounded up.
TOKEN_RECORD_BYTES = 512
FREE_MEMORY, CGROUP_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def step_bytes(
    config: ModelConfig, dtype: str, tokens: int, logit_rows: int, ranks: int = 1, mixed_rows: int = MAX_STEP_TOKENS
) -> int:
    """Return the most bytes that a step of ``tokens`` tokens takes, of which ``logit_rows`` have logits, on any
    backend: rows of ``dtype``, and those in float32 that some operators need. Each of ``ranks`` processes has the
    residual stream, and two partial sums of it. Mixtures of experts are computed ``mixed_rows`` tokens at a time; the
    CPU kernels compute all at once."""
    item = 4 if dtype == "float32" else 2
    hidden = config.hidden_size
    # Rows of layers that differ have memory of their own.
    heads = sum(config.num_heads * kind.head_dim for kind in config.all_heads)
    projected = heads + sum(2 * kind.kv_heads * kind.head_dim for kind in config.all_heads)
    inner = max(config.widest_mlp, hidden)
    row = ranks * (item * 4 * hidden + 12 * hidden) + (8 * ranks * hidden if ranks > 1 else 0)
    row += item * (2 * projected + 2 * heads + 4 * inner) + 4 * projected
    if config.linear is not None:
        values = config.linear.heads * config.linear.head_dim or hidden
        sides = 2 * config.linear.key_heads * config.linear.key_dim
        row += 4 * (4 * values + 3 * sides) + item * values
    if config.token_inputs is not None:
        row += ranks * 3 * 4 * config.num_layers * config.token_inputs.width
    mixed = 0
    if config.moe is not None:
        # A token's row is copied for each of its experts, and an expert may get all tokens.
        moe, each = config.moe, config.moe.experts_per_token
        mixed = each * (item * (3 * hidden + moe.intermediate_size) + 4 * hidden)
        mixed += item * 4 * moe.intermediate_size + 8 * moe.num_experts
    # Logits are float32, and the output projection may write them in another type before.
    logits = logit_rows * config.vocab_size * 8
    return tokens * (row + TOKEN_RECORD_BYTES) + min(tokens, mixed_rows) * mixed + logits


def head_bytes(layer: ModelConfig, states: int, dtype: str, tokens: int, rows: int) -> int:
    """Return the most bytes that an EAGLE head of one ``layer`` takes on a GPU beside its weights: those of a pass of
    ``tokens`` tokens, ``rows`` of which draft, with a token beside each state and logits of draft ids; and the
    ``states`` values of each token that the model's steps keep."""
    item = 4 if dtype == "float32" else 2
    logits = rows * (8 * layer.vocab_size + item * layer.hidden_size)
    return step_bytes(layer, dtype, tokens, rows) + tokens * item * (2 * layer.hidden_size + states) + logits


def logit_rows_of(flags: WorkerFlags | ServeFlags | OfflineFlags, vocab_size: int) -> int:
    """Return the most rows of a step that have logits: those that choose tokens, and those that score prompts."""
    if not isinstance(flags, StepFlags):
        return 0
    tokens, draft_tokens = flags.max_num_batched_tokens, flags.speculative_config.num_speculative_tokens
    chosen = min(tokens, flags.max_num_seqs * (1 + draft_tokens))
    return min(tokens, chosen + scored_rows(vocab_size))


def steps_bytes(flags: WorkerFlags | ServeFlags | OfflineFlags, prepared: PreparedModel) -> int:
    """Return the bytes that the largest steps of all workers that ``flags`` describe take together."""
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
        # Each stage computes a step of its own, and passes on float32 rows, which have a place for each step under way.
        passed = (stages - 1) * ranks * tokens * 4 * config.hidden_size
        total += count * stages * (step_bytes(config, prepared.dtype, tokens, 0, ranks) + passed)
    return total


def _copies_states(flags: WorkerFlags | ServeFlags | OfflineFlags, prepared: PreparedModel) -> bool:
    """Return whether a step has a copy of the state of each of its sequences, as on torch's operators. The CPU kernels
    read and write states where they are."""
    kernels = choose_isa(flags.cpu_kernels, host_features())
    return kernels is None or kv_layout(prepared, flags.block_size).state_layout is None


def check_host_steps(flags: WorkerFlags, prepared: PreparedModel) -> None:
    """Log what the largest step takes of a host's memory. Raises ConfigError where the host has less."""
    needed, left = steps_bytes(flags, prepared), free_bytes()
    if left and needed > left:
        flag = "--max-num-batched-tokens" if isinstance(flags, StepFlags) else "--max-num-batched-prefill-tokens"
        raise ConfigError(
            f"a step of {flags.step_budget_tokens} tokens of this model takes up to {needed / 2**20:.0f} MiB beside "
            f"weights and KV pool, and {left / 2**20:.0f} MiB are free: lower {flag}"
        )
    log.info(
        "steps of up to %d tokens take up to %.1f MiB beside weights and KV pool",
        flags.step_budget_tokens,
        needed / 2**20,
    )


def free_bytes() -> int:
    """Return the bytes that this process may still take of the host's memory; 0 where the system does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = FREE_MEMORY.read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        found.append(int(CGROUP_LIMIT.read_text()))
    return min(found, default=0)
