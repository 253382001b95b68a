"""Refuses flags that cannot work, in one line each, before anything starts."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from pillion.cli.flags import option_name
from pillion.config import parse_split_policy
from pillion.cores import MAX_CPU_THREADS, parse_cores
from pillion.errors import ConfigError
from pillion.net.addresses import is_local
from pillion.sampling_ranges import MAX_SPECULATIVE_TOKENS
from pillion.served_models import other_models

MAX_PORT = 65535
MAX_WORKERS = 64
MAX_BLOCK_SIZE_TOKENS = 1024
MAX_PERCENT = 90
# Below the least, a stream's own messages may not fit; above the most, gRPC's 32-bit sizes end.
MIN_MESSAGE_BYTES = 64 * 2**10
MAX_MESSAGE_BYTES = 2**31 - 1

# Least and most of each number; None: no upper bound.
_RANGES: dict[str, tuple[int, int | None]] = {
    "heartbeat_ms": (10, None),
    "heartbeat_timeout_ms": (50, None),
    "fence_kill_after_s": (0, None),
    "max_model_len": (0, None),
    "block_size": (1, MAX_BLOCK_SIZE_TOKENS),
    # 0: the device's default.
    "kv_pool_bytes": (0, None),
    "gpu_memory_utilization": (0, 1),
    "host_bytes": (0, None),
    "decode_reserve_percent": (0, MAX_PERCENT),
    "max_waiting_tickets": (1, None),
    "cpu_threads": (0, MAX_CPU_THREADS),
    "max_num_batched_prefill_tokens": (1, None),
    "max_waiting_spans": (1, None),
    "max_num_batched_tokens": (1, None),
    "max_num_seqs": (1, None),
    "max_waiting_seqs": (1, None),
    "target_itl_ms": (0, None),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
    "http_port": (0, MAX_PORT),
    "grpc_port": (0, MAX_PORT),
    "chunk_size": (1, None),
    "max_inflight_requests": (1, None),
    "max_inflight_tokens": (1, None),
    "max_running_requests": (0, None),
    "max_attempts": (1, None),
    "max_message_bytes": (MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    "drain_timeout_s": (0, None),
    # -1: as many as suit the device.
    "prefill_workers": (-1, MAX_WORKERS),
    "decode_workers": (1, MAX_WORKERS),
    "gateway_workers": (1, MAX_WORKERS),
}


def check_flags(flags: Any) -> None:
    """Raises ConfigError for the first flag, or pair of flags, that cannot work."""
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    for name, value in values.items():
        if name in _RANGES:
            _check_range(name, value, *_RANGES[name])
    if values["heartbeat_timeout_ms"] <= values["heartbeat_ms"]:
        raise ConfigError("--heartbeat-timeout-ms must be longer than --heartbeat-ms")
    if "chunk_size" in values and values["chunk_size"] % values["block_size"]:
        raise ConfigError(
            f"--chunk-size {values['chunk_size']} is not a multiple of --block-size {values['block_size']}"
        )
    if values.get("max_num_batched_prefill_tokens", values.get("block_size", 0)) < values.get("block_size", 0):
        raise ConfigError("--max-num-batched-prefill-tokens is smaller than one block")
    if values.get("max_num_batched_tokens", 1) < values.get("max_num_seqs", 1):
        raise ConfigError("--max-num-batched-tokens must hold one token for each of --max-num-seqs")
    parse_cores(values.get("cpu_affinity", ""))
    _check_tls(values)
    for name in ("listen", "node_listen"):
        if name in values:
            _check_listen(name, values)
    if "also_model" in values:
        other_models(flags)
    if "split_policy" in values:
        share = parse_split_policy(values["split_policy"])
        if share and values.get("prefill_workers") == 0:
            raise ConfigError("--prefill-workers 0 needs --split-policy colocated or auto")


def _check_tls(values: dict[str, Any]) -> None:
    internal = [values[f"internal_tls_{name}"] for name in ("cert", "key", "ca")]
    if any(internal) and not all(internal):
        raise ConfigError("--internal-tls-cert, --internal-tls-key and --internal-tls-ca belong together")
    if bool(values.get("tls_cert")) != bool(values.get("tls_key")):
        raise ConfigError("--tls-cert and --tls-key belong together")
    if values.get("tls_ca") and not values.get("tls_cert"):
        raise ConfigError("--tls-ca needs --tls-cert and --tls-key")


def _check_listen(name: str, values: dict[str, Any]) -> None:
    if is_local(values[name]) or values["internal_tls_cert"] or values["insecure_internal"]:
        return
    raise ConfigError(
        f"{option_name(name)} {values[name]} can be reached from other machines, and components trust whoever "
        "reaches them: give --internal-tls-cert, -key and -ca, or --insecure-internal where the network is trusted"
    )


def _check_range(name: str, value: float, least: int, most: int | None) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{option_name(name)} {value} is not a finite number")
    if value < least:
        raise ConfigError(f"{option_name(name)} {value} is less than {least}")
    if most is not None and value > most:
        raise ConfigError(f"{option_name(name)} {value} is more than {most}")
