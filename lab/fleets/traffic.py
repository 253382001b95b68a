"""Requests of a simulation, and how their clients saw them. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import ConfigError
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Request:
    """An arrival ``at_s`` seconds after the start, of a client of ``tenant``. ``blocks``: numbers of its prompt's whole
    blocks of TRACE_BLOCK_TOKENS tokens; equal leading numbers are a shared prefix."""

    number: int
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: Tenant = OPEN


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """What a request's client saw: seconds from arrival to the first token, and between tokens.

    ``reason``: the planner's, or the error if the request ``failed``. Of its prompt ``cached_tokens`` were found and
    ``prefilled_tokens`` computed by prefill workers. ``replays``: restarts on another worker.
    """

    request: Request
    ttft_s: float
    gaps_s: Sequence[float]
    reason: str = ""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    failed: bool = False
    replays: int = 0


def requests_of(trace: Sequence[TraceRequest], *, speed: float = 1.0, max_model_len: int = 0) -> list[Request]:
    """Return the requests of a trace from time 0 on, ``speed`` times as fast as recorded, without those above
    ``max_model_len`` tokens (0: no limit). Raises ConfigError if none is left."""
    kept = [row for row in trace if not 0 < max_model_len < row.input_length + row.output_length]
    if not kept:
        raise ConfigError("the trace has no request that fits")
    first = kept[0].timestamp
    made = []
    for number, row in enumerate(kept):
        # Only whole blocks of a prompt can be cached.
        blocks = row.hash_ids[: row.input_length // TRACE_BLOCK_TOKENS]
        at_s = (row.timestamp - first) / 1000 / speed
        made.append(Request(number, at_s, row.input_length, row.output_length, blocks))
    return made
