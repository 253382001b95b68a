"""Computes the KV pool's capacity in tokens before anything starts, and checks that one request fits."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pillion.config import OfflineFlags, ServeFlags
from pillion.errors import ConfigError
from pillion.settings.node_limits import NodeLimits

# Free slots that a decode worker leases ahead.
DECODE_STOCK_BLOCKS = 16
# Without --max-model-len, the maximum length is lowered to the pool's capacity, but not below this.
MIN_FITTED_LEN_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PoolFit:
    """The capacity of a pool.

    Attributes:
        total_tokens: tokens whose KV fits in the pool.
        max_model_len_tokens: tokens of the longest request, limited by the model or --max-model-len; without the flag,
            also by the pool.
        step_bytes: memory besides the pool for the largest steps of all workers.
    """

    total_tokens: int
    max_model_len_tokens: int
    step_bytes: int


def fit_pool(
    flags: ServeFlags | OfflineFlags,
    block_bytes: int,
    max_model_len_tokens: int,
    decode_workers: int,
    step_bytes: int = 0,
    working_blocks: int = 0,
    reserve_percent: int = NodeLimits.decode_reserve_percent,
) -> PoolFit:
    """Compute the capacity of the pool. ``flags`` must be resolved. ``step_bytes``: memory of the largest steps of all
    workers. ``working_blocks``: blocks that a request needs besides its tokens' KV.

    Raises ConfigError if the pool cannot hold one request of full length, or the machine cannot hold the pool.
    """
    kv_pool_bytes = flags.kv_pool_bytes
    total = kv_pool_bytes // block_bytes
    stock = DECODE_STOCK_BLOCKS * decode_workers
    # Blocks for running decodes only: their reserve, and the free slots that workers lease ahead.
    reserved = total * reserve_percent // 100 + stock
    capacity_tokens = (total - reserved - 1 - working_blocks) * flags.block_size
    if not flags.max_model_len and capacity_tokens >= MIN_FITTED_LEN_TOKENS:
        max_model_len_tokens = min(max_model_len_tokens, capacity_tokens)
    needed = max_model_len_tokens // flags.block_size + 1 + working_blocks
    if total < needed + reserved:
        # The reserve grows with the pool, so the minimum pool solves total * (1 - reserve) = request + stock.
        min_blocks = -(-(needed + stock) * 100 // (100 - reserve_percent)) + 1
        raise ConfigError(
            f"--kv-pool-bytes {human_bytes(kv_pool_bytes)} holds {total} blocks, but one request of "
            f"{max_model_len_tokens} tokens needs {needed} in addition to {reserved} reserved for decodes: "
            f"give at least {min_blocks * block_bytes} bytes or lower --max-model-len"
        )
    machine = machine_bytes()
    if machine and kv_pool_bytes + step_bytes > machine:
        steps = f" and the workers' largest steps, {human_bytes(step_bytes)}, are" if step_bytes else " is"
        raise ConfigError(
            f"--kv-pool-bytes {human_bytes(kv_pool_bytes)}{steps} more than this machine's memory, "
            f"{human_bytes(machine)}"
        )
    return PoolFit(total * flags.block_size, max_model_len_tokens, step_bytes)


def machine_bytes() -> int:
    """Return the bytes of physical memory, 0 if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def human_bytes(count: float) -> str:
    """Format a number of bytes with a unit: ``1610612736`` -> ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
