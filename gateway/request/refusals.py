"""Keeps a trace of what clients send in vain: what was refused, and which fields had no effect, by tenant and client.

    a refusal ------------> a row of the table, a span, and a log line (at most MAX_LINES_PER_S)
    a field without effect -> a row of the table

All of it is bounded, whatever clients send: each tenant has rows of its own, so that nobody
can push out what others sent, and those without a key share one tenant's rows.
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

# Each tenant has at most so many rows; the one that was met longest ago makes room.
MAX_ROWS = 128
MAX_TENANTS = 1024
# A client's name is what it sends as User-Agent; names, paths and fields are cut to so many characters.
MAX_NAME_CHARS = 100
# So many refusals are logged in a second; the next line that is logged says how many were not.
MAX_LINES_PER_S = 5
# The tenant of calls whose key is missing or unknown.
STRANGERS = "(no key)"
NO_EFFECT = "no effect"
_UNPRINTABLE = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Caller:
    """Says who called what: the API as its path or its gRPC method, the tenant, and the client's User-Agent."""

    api: str
    tenant: str
    client: str


@dataclass(frozen=True, slots=True)
class Sent:
    """Names what was sent in vain. ``status`` is the refusal's HTTP status, 0 for a field without effect; ``reason`` is
    the error's code, or NO_EFFECT."""

    caller: Caller
    field: str
    status: int
    reason: str


@dataclass(slots=True)
class Met:
    """Counts how often something was sent, and says when, in Unix seconds."""

    times: int
    first_s: float
    last_s: float


def shown(text: str) -> str:
    """Returns a client's text as logs and pages show it: printable, and at most MAX_NAME_CHARS long."""
    return _UNPRINTABLE.sub("?", text[:MAX_NAME_CHARS])


class Refusals:
    """Holds the table of one gateway process. It is used in the event loop alone."""

    def __init__(self) -> None:
        self.since_s = time.time()
        self._tenants: OrderedDict[str, OrderedDict[Sent, Met]] = OrderedDict()
        self._second = 0
        self._lines = 0
        self._silent = 0

    def refused(
        self, caller: Caller, status: int, reason: str, field: str, request_id: str, parent: Context | None
    ) -> None:
        """Notes a call that is answered with an error. ``field`` is the one that is to blame, or ""; ``parent`` is the
        client's trace."""
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
        """Notes fields of one call that had no effect."""
        for field in fields:
            self._note(caller, field, 0, NO_EFFECT)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows, those that were met most often first, as the page for operators shows them."""
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
    """Returns a table's entry, ``new`` where there is none, and makes it the one that leaves last of ``most``."""
    found = table.setdefault(key, new)
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
    return found


def _trace(sent: Sent, parent: Context | None) -> None:
    """Writes the span of a refusal, which begins and ends now."""
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
