"""Studies of fleets on a recorded trace: the effect of a flag, and the number of workers needed.

    compare    the same requests in several fleets that differ in flags
    capacity   the fewest workers of each kind that meet objectives

Only SIMULATED_FLAGS of `pillion serve` have an effect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.fleets.figures import FleetFigures, GoodBounds, figures_of
from lab.fleets.traffic import ClientRecord, Request
from lab.fleets.world import FleetConfig, simulate
from pillion.config import ServeFlags
from pillion.engine.scheduling.step_model import StepModel
from pillion.errors import ConfigError

SIMULATED_FLAGS = (
    *("prefill_workers", "decode_workers", "gateway_workers", "block_size", "kv_pool_bytes", "max_model_len", "device"),
    *("max_num_batched_tokens", "max_num_batched_prefill_tokens", "max_num_seqs", "target_itl_ms", "split_policy"),
    *("chunk_size", "max_inflight_requests", "max_inflight_tokens"),
    *("enable_prefix_caching", "heartbeat_ms"),
)
MAX_FLEET_WORKERS = 10_000
MAX_FLEET_GATEWAYS = 64
# Fleets of a comparison.
MAX_COMPARED_FLEETS = 64
# Shares of prefill workers to try.
PREFILL_SHARES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class FleetVariant:
    """One fleet of a comparison: its distinguishing flags in words, and its clients' view."""

    name: str
    records: Sequence[ClientRecord]
    figures: FleetFigures


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """Numbers of workers, and the figures with them."""

    prefills: int
    decodes: int
    figures: FleetFigures
    enough: bool

    @property
    def workers(self) -> int:
        return self.prefills + self.decodes


@dataclass(frozen=True, slots=True)
class Capacity:
    """The fewest sufficient workers, or None if MAX_FLEET_WORKERS are not enough, and all numbers tried."""

    best: CapacityPoint | None
    tried: tuple[CapacityPoint, ...]


def with_flags(config: FleetConfig, values: Mapping[str, Any]) -> FleetConfig:
    """Return the fleet with other values of some flags. Raises ConfigError for flags without effect and for too many
    workers."""
    for name in values:
        if name not in SIMULATED_FLAGS:
            names = ", ".join("--" + one.replace("_", "-") for one in SIMULATED_FLAGS)
            raise ConfigError(f"--{name.replace('_', '-')} changes nothing in the simulation; these do: {names}")
    flags: ServeFlags = replace(config.flags, **values)
    if not 1 <= flags.decode_workers + max(0, flags.prefill_workers) <= MAX_FLEET_WORKERS or flags.decode_workers < 1:
        raise ConfigError(f"a simulated fleet has 1 decode worker at least, and {MAX_FLEET_WORKERS} workers at most")
    if not 1 <= flags.gateway_workers <= MAX_FLEET_GATEWAYS:
        raise ConfigError(f"--gateway-workers {flags.gateway_workers} is not from 1 to {MAX_FLEET_GATEWAYS}")
    blocks = config.node_blocks
    if flags.kv_pool_bytes and not config.block_bytes:
        raise ConfigError("--kv-pool-bytes needs the size of a block: --block-bytes")
    if flags.kv_pool_bytes:
        blocks = flags.kv_pool_bytes // config.block_bytes
    return replace(config, flags=flags, node_blocks=blocks)


def compare(
    config: FleetConfig,
    requests: Sequence[Request],
    changes: Mapping[str, Sequence[tuple[str, Any]]],
    objectives: GoodBounds,
    told: Callable[[FleetVariant], None] = lambda variant: None,
) -> list[FleetVariant]:
    """Simulate the requests with each combination of flags. ``changes``: values by flag, as text and parsed.

    All are compared with the first combination. ``told`` is called with each fleet's result. Raises ConfigError.
    """
    names = list(changes)
    chosen = list(itertools.product(*(changes[name] for name in names)))
    if len(chosen) > MAX_COMPARED_FLEETS:
        raise ConfigError(f"{len(chosen)} combinations of flags are more than {MAX_COMPARED_FLEETS}")
    fleets = [with_flags(config, {name: value for name, (_, value) in zip(names, one, strict=True)}) for one in chosen]
    # Reject wrong values before the first simulation, which may take minutes.
    for fleet in fleets:
        fleet.check()
    found: list[FleetVariant] = []
    for fleet, one in zip(fleets, chosen, strict=True):
        words = [f"{name.replace('_', '-')}={text}" for name, (text, _) in zip(names, one, strict=True)
                 if len(changes[name]) > 1]  # fmt: skip
        records, _ = simulate(fleet, fitting(requests, fleet.flags.max_model_len))
        same = found[0].records if found and len(found[0].records) == len(records) else ()
        found.append(FleetVariant(" ".join(words) or "as given", records, figures_of(records, objectives, same)))
        told(found[-1])
    return found


def fitting(requests: Sequence[Request], max_model_len: int) -> Sequence[Request]:
    """Return the requests of at most ``max_model_len`` tokens (0: all). Raises ConfigError if none is left."""
    if not max_model_len:
        return requests
    kept = [one for one in requests if one.prompt_tokens + one.answer_tokens <= max_model_len]
    if not kept:
        raise ConfigError(f"no request of the trace fits --max-model-len {max_model_len}")
    return kept


def capacity(
    config: FleetConfig,
    requests: Sequence[Request],
    objectives: GoodBounds,
    told: Callable[[CapacityPoint], None] = lambda point: None,
    shares: Sequence[float] = PREFILL_SHARES,
) -> Capacity:
    """Return the fewest workers with which ``objectives.attainment`` of the requests is good.

    For each share of prefill workers the number is doubled until it is enough, then bisected, as if it were monotonic;
    around the best, one worker less of either kind is tried. ``told`` is called with each point.
    """
    tried: dict[tuple[int, int], CapacityPoint] = {}
    requests = fitting(requests, config.flags.max_model_len)

    def enough(prefills: int, decodes: int) -> bool:
        if (prefills, decodes) not in tried:
            fleet = with_flags(config, {"prefill_workers": prefills, "decode_workers": decodes})
            records, _ = simulate(fleet, requests)
            figures = figures_of(records, objectives)
            point = CapacityPoint(prefills, decodes, figures, figures.good_share >= objectives.attainment)
            tried[prefills, decodes] = point
            told(point)
        return tried[prefills, decodes].enough

    best: tuple[int, int] | None = None
    for share in shares:
        most = MAX_FLEET_WORKERS if best is None else sum(best) - 1
        found = _least_workers(share, _workers_at_least(config, requests), most, enough)
        best = found or best
    while best is not None:
        less = next((one for one in _one_less(*best) if enough(*one)), None)
        if less is None:
            break
        best = less
    points = tuple(sorted(tried.values(), key=lambda point: (point.workers, point.prefills)))
    return Capacity(tried[best] if best is not None else None, points)


def _one_less(prefills: int, decodes: int) -> Iterator[tuple[int, int]]:
    if prefills > 0:
        yield prefills - 1, decodes
    if decodes > 1:
        yield prefills, decodes - 1


def _least_workers(share: float, least: int, most: int, enough: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """Return the smallest sufficient number of workers up to ``most``, of which a share prefills."""

    def split(workers: int) -> tuple[int, int]:
        prefills = min(workers - 1, max(1, round(workers * share))) if share else 0
        return prefills, workers - prefills

    low, high = 0, max(1 + bool(share), least)
    while high <= most and not enough(*split(high)):
        low, high = high, high * 2
    if high > most:
        high = most
        if high <= low or not enough(*split(high)):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if middle < 1 + bool(share):
            break
        if enough(*split(middle)):
            high = middle
        else:
            low = middle
    return split(high)


def _workers_at_least(config: FleetConfig, requests: Sequence[Request]) -> int:
    """Return the start of the search: half the workers that prompts would keep busy without a single prefix hit."""
    model = StepModel._make(config.decode_cost_s)
    size = config.settled().flags.max_num_batched_prefill_tokens
    seconds = sum(model.range_s(0, request.prompt_tokens, size) for request in requests)
    return max(1, math.ceil(seconds / max(1.0, requests[-1].at_s) / 2)) if requests else 1
