"""Defines the requests of a simulation, and how their clients saw them. Sans-IO."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pillion.errors import ConfigError
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.loadgen.figures import Record
from pillion.loadgen.traces import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Request:
    """Describes one arrival, ``at_s`` seconds after the begin, of a client of ``tenant``. ``blocks`` are the numbers of
    its prompt's whole blocks of TRACE_BLOCK_TOKENS tokens; two prompts whose first n numbers are the same begin alike.
    Where ``blocks`` are empty, no prompt begins like another one. The client waits for its whole answer for
    ``timeout_s``, or for ever where that is 0. It allows so many tokens as the answer has, or ``allowed_tokens``, where
    the answer ends by itself."""

    number: int
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    timeout_s: float = 0.0
    allowed_tokens: int = 0
    tenant: Tenant = OPEN


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """Holds what a request's client saw: the seconds from arrival to the first token, and between tokens.

    ``reason`` is that of the planner, or the error where the request ``failed``. ``cached_tokens`` of its prompt were
    found, ``prefilled_tokens`` computed by prefill workers; ``replays`` says how often it began again on another
    worker.
    """

    request: Request
    ttft_s: float
    gaps_s: Sequence[float]
    reason: str = ""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    failed: bool = False
    replays: int = 0

    def bench_record(self) -> Record:
        """Returns this request as `pillion bench` would have recorded it."""
        request, first_s = self.request, self.request.at_s + self.ttft_s
        times = () if self.failed else tuple(itertools.accumulate(self.gaps_s, initial=first_s))
        return Record(
            number=request.number,
            session=request.number,
            turn=0,
            due_s=request.at_s,
            held_s=0.0,
            sent_s=request.at_s,
            ended_s=times[-1] if times else first_s,
            messages=tuple((at_s, 1) for at_s in times),
            prompt_tokens=request.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=len(times),
            asked_tokens=request.answer_tokens,
            status="failed" if self.failed else "ok",
            error=self.reason if self.failed else "",
        )


def requests_of(trace: Sequence[TraceRequest], *, speed: float = 1.0, max_model_len: int = 0) -> list[Request]:
    """Returns the requests of a trace, ``speed`` times as fast as they were recorded, from time 0 on. Those that need
    more than ``max_model_len`` tokens are left out, unless that is 0. Raises ConfigError where none is left."""
    kept = [row for row in trace if not 0 < max_model_len < row.input_length + row.output_length]
    if not kept:
        raise ConfigError("the trace has no request that fits")
    first = kept[0].timestamp
    made = []
    for number, row in enumerate(kept):
        # Only the prompt's full blocks can be cached.
        blocks = row.hash_ids[: row.input_length // TRACE_BLOCK_TOKENS]
        at_s = (row.timestamp - first) / 1000 / speed
        made.append(Request(number, at_s, row.input_length, row.output_length, blocks))
    return made


def shared_tokens(blocks: int) -> int:
    """Returns the number of tokens of so many whole blocks of a trace."""
    return blocks * TRACE_BLOCK_TOKENS
