"""Record of one request as its client saw it, and statistics over many. Sans-IO.

    due --- lag, held by the cap ---> sent ------> first token -- gap -- next message ... last token
    |<--------------------- TTFT ---------------------->|<------------- decode ------------>|
    |<--------------------------------------- e2e ----------------------------------------->|

Every latency counts from ``due``, the intended arrival. A late client, or a cap on requests in flight, therefore
lengthens latencies, instead of hiding them (coordinated omission). The client's own lateness is reported
separately.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OK = "ok"
# Min delay of a request that counts as held back by the cap on requests in flight.
HELD_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record of one request. Times are in seconds since the run's begin.

    Attributes:
        held_s: delay by the cap on requests in flight.
        messages: (time, tokens) of each message with tokens; 1 token if the server does not report the number.
        prompt_tokens, cached_tokens, output_tokens: the server's counts; without them, as requested, 0, and as
            received.
        asked_tokens: requested length of the answer.
        status: "ok", or the kind of failure; ``error`` is its message.
    """

    number: int
    session: int
    turn: int
    due_s: float
    held_s: float
    sent_s: float
    ended_s: float
    messages: tuple[tuple[float, int], ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    status: str = OK
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if the request was answered with at least one token."""
        return self.status == OK

    @property
    def ttft_s(self) -> float:
        """Time from the intended arrival to the first token; infinite without a token."""
        return self.messages[0][0] - self.due_s if self.messages else math.inf

    @property
    def e2e_s(self) -> float:
        """Time from the intended arrival to the last token; infinite for a failed request."""
        return self.messages[-1][0] - self.due_s if self.ok and self.messages else math.inf

    @property
    def itl_s(self) -> list[float]:
        """Gaps between messages. A message of several tokens makes one gap, because they arrive together."""
        return [after[0] - before[0] for before, after in itertools.pairwise(self.messages)]

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first message; 0 for a single message."""
        if len(self.messages) < 2:
            return 0.0
        later = max(1, self.output_tokens - self.messages[0][1])
        return (self.messages[-1][0] - self.messages[0][0]) / later

    @property
    def lag_s(self) -> float:
        """Delay by which the client itself sent the request late."""
        return self.sent_s - self.due_s - self.held_s


@dataclass(frozen=True, slots=True)
class Run:
    """Observations of one run.

    Attributes:
        records: in order of their intended arrival.
        duration_s: from the begin to the end of the last answer.
        cpu_s: processor time of this process during the run.
        stalls_s: lateness of a timer of the event loop, sampled every 50 ms.
        unsent: turns that were not sent because the previous one failed.
    """

    records: tuple[Record, ...]
    duration_s: float
    cpu_s: float
    stalls_s: tuple[float, ...]
    unsent: int = 0


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated linearly like numpy's default. Raises ValueError without values."""
    if not values:
        raise ValueError("an empty list has no percentile")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = min(int(rank), len(ordered) - 1)
    if ordered[low] == (above := ordered[min(low + 1, len(ordered) - 1)]):
        return ordered[low]
    return ordered[low] + (above - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum, in ms, of values in seconds; None without values."""
    if not values:
        return None
    percentiles = {f"p{percent}": percentile(values, percent) * 1000 for percent in (50, 90, 95, 99)}
    return {"mean": statistics.fmean(values) * 1000, **percentiles, "max": max(values) * 1000}


def summarize(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """Return the run's statistics: rates over ``duration_s``, latencies in ms over the answered requests."""
    answered = [record for record in records if record.ok]
    tokens_in = sum(record.prompt_tokens for record in answered)
    tokens_out = sum(record.output_tokens for record in answered)
    cached = sum(record.cached_tokens for record in answered)
    seconds = max(duration_s, 1e-9)
    last_due_s = max((record.due_s for record in records), default=0.0)
    return {
        "requests": len(records),
        "ok": len(answered),
        "errors": errors(records),
        "short_answers": sum(0 < record.output_tokens < record.asked_tokens for record in answered),
        "duration_s": duration_s,
        "offered_requests_per_s": len(records) / last_due_s if last_due_s else None,
        "requests_per_s": len(answered) / seconds,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "input_tokens_per_s": tokens_in / seconds,
        "output_tokens_per_s": tokens_out / seconds,
        "cached_tokens": cached,
        "hit_rate": cached / tokens_in if tokens_in else 0.0,
        "ttft_ms": distribution([record.ttft_s for record in answered]),
        "itl_ms": distribution([gap for record in answered for gap in record.itl_s]),
        "tpot_ms": distribution([record.tpot_s for record in answered if len(record.messages) > 1]),
        "e2e_ms": distribution([record.e2e_s for record in answered]),
    }


def errors(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return the number of errors by kind, and the message of the first of each."""
    counts = Counter(record.status for record in records if not record.ok)
    first = {record.status: record.error for record in reversed(records)}
    return {status: {"count": count, "first": first[status]} for status, count in counts.most_common()}


def client_figures(run: Run) -> dict[str, Any]:
    """Return the client's own processor time and lateness in a run."""
    tokens = sum(tokens for record in run.records for _, tokens in record.messages)
    held = [record.held_s for record in run.records]
    return {
        "cpu_share": run.cpu_s / max(run.duration_s, 1e-9),
        "cpu_us_per_token": run.cpu_s / tokens * 1e6 if tokens else None,
        "lag_ms": distribution([record.lag_s for record in run.records]),
        "loop_stall_ms": distribution(run.stalls_s),
        "held_ms": distribution(held),
        "held_requests": sum(wait > HELD_S for wait in held),
    }


def bottleneck(client: dict[str, Any], ttft_ms: dict[str, float] | None) -> str:
    """Return why the client may have limited the run instead of the server; "" if nothing suggests that."""
    reasons = []
    if client["cpu_share"] > 0.8:
        reasons.append(f"it used {client['cpu_share']:.0%} of one core")
    late = max((client[name] or {"p99": 0.0})["p99"] for name in ("lag_ms", "loop_stall_ms"))
    # Lateness of 10 ms or 10% of the time to the first token distorts latencies little.
    if late > max(10.0, 0.1 * (ttft_ms["p50"] if ttft_ms else 0.0)):
        reasons.append(f"it was late by {late:.0f} ms (p99)")
    return " and ".join(reasons)
