"""Computes the KV pool's size in blocks and tokens before anything starts; raises an error if one request does not
fit."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pillion.config import OfflineFlags, ServeFlags
from pillion.errors import ConfigError
from pillion.settings.node_limits import NodeLimits

DECODE_STOCK_BLOCKS = 16
# Without an explicit maximum length, it is lowered to the pool's capacity, but not below this number of tokens.
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
    beside_blocks: int = 0,
    reserve_percent: int = NodeLimits.decode_reserve_percent,
) -> PoolFit:
    """Compute the size of the pool that ``flags`` describe, whose bytes are resolved. ``step_bytes`` of the machine's
    memory are reserved for the largest steps of its workers. A request needs ``beside_blocks`` besides those of its
    tokens.

    Raises ConfigError if the pool cannot hold one request of full length, or the machine cannot hold the pool.
    """
    kv_pool_bytes = flags.kv_pool_bytes
    total = kv_pool_bytes // block_bytes
    stock = DECODE_STOCK_BLOCKS * decode_workers
    # Blocks for running decodes only: their reserve, and the free slots that workers lease ahead.
    kept = total * reserve_percent // 100 + stock
    held = (total - kept - 1 - beside_blocks) * flags.block_size
    if not flags.max_model_len and held >= MIN_FITTED_LEN_TOKENS:
        max_model_len_tokens = min(max_model_len_tokens, held)
    needed = max_model_len_tokens // flags.block_size + 1 + beside_blocks
    if total < needed + kept:
        # The reserve grows with the pool, so the minimum pool solves total * (1 - reserve) = request + stock.
        least = -(-(needed + stock) * 100 // (100 - reserve_percent)) + 1
        raise ConfigError(
            f"--kv-pool-bytes {human_bytes(kv_pool_bytes)} holds {total} blocks, but one request of "
            f"{max_model_len_tokens} tokens needs {needed} in addition to {kept} reserved for decodes: "
            f"give at least {least * block_bytes} bytes or lower --max-model-len"
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
    """Format a number of bytes for people: ``1610612736`` -> ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
