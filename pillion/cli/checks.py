"""Checks of flags, alone and in combination, before anything starts. Errors are one line."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from pillion.cli.flags import option_name
from pillion.config import (
    GatewayFlags,
    ServeFlags,
    check_conflicts,
    check_public_access,
    parse_origins,
    parse_split_policy,
)
from pillion.errors import ConfigError
from pillion.host.cores import parse_cores
from pillion.net.addresses import is_local
from pillion.settings.served_models import other_models


def check_flags(flags: Any) -> None:
    """Raise ConfigError for the first invalid flag or combination of flags."""
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    for field in fields(flags):
        if field.metadata["minimum"] is not None:
            _check_range(field.name, values[field.name], field.metadata["minimum"], field.metadata["maximum"])
    if values["heartbeat_timeout_ms"] <= values["heartbeat_ms"]:
        raise ConfigError("--heartbeat-timeout-ms must be longer than --heartbeat-ms")
    if "chunk_size" in values and values["chunk_size"] % values["block_size"]:
        raise ConfigError(
            f"--chunk-size {values['chunk_size']} is not a multiple of --block-size {values['block_size']}"
        )
    if 0 < values.get("max_num_batched_prefill_tokens", 0) < values.get("block_size", 0):
        raise ConfigError("--max-num-batched-prefill-tokens is smaller than one block")
    if 0 < values.get("max_num_batched_tokens", 0) < values.get("max_num_seqs", 1):
        raise ConfigError("--max-num-batched-tokens must be at least --max-num-seqs")
    parse_cores(values.get("cpu_affinity", ""))
    _check_tls(values)
    for name in ("listen", "node_listen"):
        if name in values:
            _check_listen(name, values)
    parse_origins(values.get("allowed_origins", ()))
    check_conflicts(flags)
    if isinstance(flags, GatewayFlags):
        check_public_access(flags)
        _check_edge(flags)
    if "also_model" in values:
        other_models(flags)
    if "split_policy" in values:
        share = parse_split_policy(values["split_policy"])
        if share and values.get("prefill_workers") == 0:
            raise ConfigError("--prefill-workers 0 needs --split-policy colocated or auto")


def _check_edge(flags: GatewayFlags) -> None:
    """Refuse flags that a gateway would refuse only after all other components have started."""
    if flags.gateway_workers > 1 and not isinstance(flags, ServeFlags):
        raise ConfigError("--gateway-workers is a flag of pillion serve: start several pillion gateway --share-ports")


def _check_tls(values: dict[str, Any]) -> None:
    internal = [values[f"internal_tls_{name}"] for name in ("cert", "key", "ca")]
    if any(internal) and not all(internal):
        raise ConfigError("--internal-tls-cert, --internal-tls-key and --internal-tls-ca must be given together")
    if bool(values.get("tls_cert")) != bool(values.get("tls_key")):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    if values.get("tls_ca") and not values.get("tls_cert"):
        raise ConfigError("--tls-ca needs --tls-cert and --tls-key")


def _check_listen(name: str, values: dict[str, Any]) -> None:
    if is_local(values[name]) or values["internal_tls_cert"] or values["insecure_internal"]:
        return
    raise ConfigError(
        f"{option_name(name)} {values[name]} can be reached from other machines, and components trust all their "
        "clients: give --internal-tls-cert, -key and -ca, or --insecure-internal if the network is trusted"
    )


def _check_range(name: str, value: float, minimum: float, maximum: float | None) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{option_name(name)} {value} is not a finite number")
    if value < minimum:
        raise ConfigError(f"{option_name(name)} {value} is less than {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{option_name(name)} {value} is more than {maximum}")
