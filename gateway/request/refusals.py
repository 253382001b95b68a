"""Rejected requests and ignored fields, by tenant and client.

    a refusal ------------> a row of the table, a span, and a log line (at most MAX_LINES_PER_S)
    a field without effect -> a row of the table

All of it is bounded. Each tenant has its own rows, so that none can evict another's; callers without a key share one
tenant's rows.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

from pillion.observability import telemetry

log = logging.getLogger("pillion.gateway.refusals")

# Rows per tenant; LRU.
MAX_ROWS = 128
MAX_TENANTS = 1024
MAX_NAME_CHARS = 100
# Logged refusals per second; the next logged line counts those that were not.
MAX_LINES_PER_S = 5
STRANGERS = "(no key)"
NO_EFFECT = "no effect"
_UNPRINTABLE = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an API: the API's path or gRPC method, the tenant, and the client's User-Agent."""

    api: str
    tenant: str
    client: str


@dataclass(frozen=True, slots=True)
class Sent:
    """What was rejected or ignored. ``status`` is the HTTP status, 0 for an ignored field; ``reason`` is the error's
    code, or NO_EFFECT."""

    caller: Caller
    field: str
    status: int
    reason: str


@dataclass(slots=True)
class Met:
    """How often, and when first and last, in Unix seconds."""

    times: int
    first_s: float
    last_s: float


def shown(text: str) -> str:
    """Return a client's text as logs and pages show it: printable, at most MAX_NAME_CHARS long."""
    return _UNPRINTABLE.sub("?", text[:MAX_NAME_CHARS])


class Refusals:
    """The table of one gateway process; for the event loop only."""

    def __init__(self) -> None:
        self.since_s = time.time()
        self._tenants: OrderedDict[str, OrderedDict[Sent, Met]] = OrderedDict()
        self._second = 0
        self._lines = 0
        self._silent = 0

    def refused(
        self, caller: Caller, status: int, reason: str, field: str, request_id: str, parent: Context | None
    ) -> None:
        """Record a rejected call. ``field`` is the field at fault, or ""; ``parent`` is the client's trace."""
        sent = self._note(caller, field, status, reason)
        _trace(sent, parent)
        now = int(time.monotonic())
        if now != self._second:
            self._second, self._lines = now, 0
        if self._lines >= MAX_LINES_PER_S:
            self._silent += 1
            return
        self._lines += 1
        values = {"api": sent.caller.api, "status": status, "reason": sent.reason, "field": sent.field}
        values |= {"tenant": sent.caller.tenant, "client": sent.caller.client, "request_id": request_id}
        more = f"; {self._silent} refusals before it were not logged" if self._silent else ""
        self._silent = 0
        words = ", ".join(f"{name} {value}" for name, value in values.items() if value != "")
        log.info("refused: %s%s", words, more, extra={"fields": values})

    def without_effect(self, caller: Caller, fields: Iterable[str]) -> None:
        """Record the fields of one call that were ignored."""
        for field in fields:
            self._note(caller, field, 0, NO_EFFECT)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, most frequent first, as the operators' page shows them."""
        rows = [(sent, met) for own in self._tenants.values() for sent, met in own.items()]
        for sent, met in sorted(rows, key=lambda row: -row[1].times):
            yield {
                "tenant": sent.caller.tenant,
                "client": sent.caller.client,
                "api": sent.caller.api,
                "field": sent.field,
                "status": sent.status or None,
                "reason": sent.reason,
                "times": met.times,
                "first": int(met.first_s),
                "last": int(met.last_s),
            }

    def _note(self, caller: Caller, field: str, status: int, reason: str) -> Sent:
        caller = Caller(shown(caller.api), caller.tenant, shown(caller.client))
        sent = Sent(caller, shown(field), status, shown(reason))
        own = _newest(self._tenants, caller.tenant, OrderedDict(), MAX_TENANTS)
        met = _newest(own, sent, Met(0, time.time(), 0.0), MAX_ROWS)
        met.times += 1
        met.last_s = time.time()
        return sent


def _newest(table: OrderedDict[Any, Any], key: Any, new: Any, most: int) -> Any:
    """Return a table's entry, ``new`` if there is none, and mark it as the newest; the table keeps ``most``."""
    found = table.setdefault(key, new)
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
    return found


def _trace(sent: Sent, parent: Context | None) -> None:
    """Write the span of a refusal."""
    span = telemetry.tracer().start_span(f"refuse {sent.caller.api}", context=parent, kind=SpanKind.SERVER)
    if span.is_recording():
        span.set_attributes(
            {
                "http.response.status_code": sent.status,
                "error.type": sent.reason,
                "user_agent.original": sent.caller.client,
                "pillion.field": sent.field,
            }
        )
        span.set_status(Status(StatusCode.ERROR))
    span.end()
