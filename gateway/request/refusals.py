"""Table of rejected requests and ignored fields, by tenant and client, for operators.

    a rejected request -----> a row of the table, a span, and a log line (at most MAX_LINES_PER_S)
    a field without effect -> a row of the table

The table is bounded. Each tenant has its own rows, so that none can evict another's; callers without a key share the
rows of STRANGERS.
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

# Max rows per tenant, evicted by LRU.
MAX_ROWS = 128
MAX_TENANTS = 1024
MAX_NAME_CHARS = 100
# Max log lines per second; the next line has the number of omitted ones.
MAX_LINES_PER_S = 5
STRANGERS = "(no key)"
NO_EFFECT = "no effect"
_UNPRINTABLE = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of an API: path or gRPC method, tenant, and the client's User-Agent."""

    api: str
    tenant: str
    client: str


@dataclass(frozen=True, slots=True)
class RefusalKey:
    """Key of a row: what was rejected or ignored. ``status`` is the HTTP status, 0 for an ignored field; ``reason`` is
    the error's code, or NO_EFFECT."""

    caller: Caller
    field: str
    status: int
    reason: str


@dataclass(slots=True)
class Occurrences:
    """Number of occurrences, and times of the first and the last, in Unix seconds."""

    times: int
    first_s: float
    last_s: float


def shown(text: str) -> str:
    """Return a client's text for logs and pages: at most MAX_NAME_CHARS characters, unprintable ones as "?"."""
    return _UNPRINTABLE.sub("?", text[:MAX_NAME_CHARS])


class Refusals:
    """The table of one gateway process. Used on the event loop only."""

    def __init__(self) -> None:
        self.since_s = time.time()
        self._tenants: OrderedDict[str, OrderedDict[RefusalKey, Occurrences]] = OrderedDict()
        self._second = 0
        self._lines = 0
        self._unlogged = 0

    def refused(
        self, caller: Caller, status: int, reason: str, field: str, request_id: str, parent: Context | None
    ) -> None:
        """Record a rejected call. ``field`` is the invalid field, or ""; ``parent`` is the client's trace context."""
        key = self._note(caller, field, status, reason)
        _trace(key, parent)
        now = int(time.monotonic())
        if now != self._second:
            self._second, self._lines = now, 0
        if self._lines >= MAX_LINES_PER_S:
            self._unlogged += 1
            return
        self._lines += 1
        values = {"api": key.caller.api, "status": status, "reason": key.reason, "field": key.field}
        values |= {"tenant": key.caller.tenant, "client": key.caller.client, "request_id": request_id}
        more = f"; {self._unlogged} refusals before it were not logged" if self._unlogged else ""
        self._unlogged = 0
        text = ", ".join(f"{name} {value}" for name, value in values.items() if value != "")
        log.info("refused: %s%s", text, more, extra={"fields": values})

    def without_effect(self, caller: Caller, fields: Iterable[str]) -> None:
        """Record the fields of one call that were ignored."""
        for field in fields:
            self._note(caller, field, 0, NO_EFFECT)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as JSON objects, the most frequent first."""
        rows = [(key, occurrences) for own in self._tenants.values() for key, occurrences in own.items()]
        for key, occurrences in sorted(rows, key=lambda row: -row[1].times):
            yield {
                "tenant": key.caller.tenant,
                "client": key.caller.client,
                "api": key.caller.api,
                "field": key.field,
                "status": key.status or None,
                "reason": key.reason,
                "times": occurrences.times,
                "first": int(occurrences.first_s),
                "last": int(occurrences.last_s),
            }

    def _note(self, caller: Caller, field: str, status: int, reason: str) -> RefusalKey:
        caller = Caller(shown(caller.api), caller.tenant, shown(caller.client))
        key = RefusalKey(caller, shown(field), status, shown(reason))
        own = _touch(self._tenants, caller.tenant, OrderedDict(), MAX_TENANTS)
        occurrences = _touch(own, key, Occurrences(0, time.time(), 0.0), MAX_ROWS)
        occurrences.times += 1
        occurrences.last_s = time.time()
        return key


def _touch(table: OrderedDict[Any, Any], key: Any, new: Any, limit: int) -> Any:
    """Return a table's entry, ``new`` if it is missing, as its most recently used; evict entries above ``limit``."""
    entry = table.setdefault(key, new)
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)
    return entry


def _trace(key: RefusalKey, parent: Context | None) -> None:
    """Write the span of a refusal."""
    span = telemetry.tracer().start_span(f"refuse {key.caller.api}", context=parent, kind=SpanKind.SERVER)
    if span.is_recording():
        span.set_attributes(
            {
                "http.response.status_code": key.status,
                "error.type": key.reason,
                "user_agent.original": key.caller.client,
                "pillion.field": key.field,
            }
        )
        span.set_status(Status(StatusCode.ERROR))
    span.end()
