"""Log lines as text for people, or as JSON objects for collectors, with trace ids.

The end of a process breaks other processes' calls to it. Depending on the moment, gRPC and asyncio log a traceback for
such a call; :func:`in_one_line` reduces it to one line.

A record may have ``fields``, the values of its message as a dictionary: they become keys of the JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from types import TracebackType

from opentelemetry import trace


class JsonFormatter(logging.Formatter):
    """Formats records as JSON. ``time`` is RFC 3339 in UTC; a recorded span adds ``trace_id`` and ``span_id``."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "component": self._component,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            entry |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def in_one_line(record: logging.LogRecord) -> bool:
    """Logging filter: reduce a library's record about a call with a dead peer to a warning of one line. Return whether
    to write the record."""
    error = record.exc_info[1] if record.exc_info else None
    # gRPC's exceptions for failed calls, compared by name to avoid importing gRPC.
    if error is not None and any(kind.__name__ in ("AioRpcError", "ExecuteBatchError") for kind in type(error).__mro__):
        reason = error.details() if hasattr(error, "details") else str(error)
        record.msg, record.args = "%s: %s", (_first_line(record.getMessage()), _first_line(reason or ""))
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def logs_json() -> bool:
    """Return whether this process logs JSON, so that it should write no plain text to standard error."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("pillion").critical("an unhandled error", exc_info=(kind, error, trace))


def set_up_logging(level: str, form: str = "text", component: str = "") -> None:
    """Log to standard error, one line per record; ``form`` is "text" or "json".

    The level "debug" only applies to Pillion's loggers, since libraries, mainly gRPC, would write 14 of 15 lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter(component) if form == "json" else text)
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own, logging.INFO), handlers=[handler])
    logging.getLogger("pillion").setLevel(own)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    for library in ("grpc._cython.cygrpc", "grpc.aio", "grpc.aio._call", "asyncio"):
        logging.getLogger(library).addFilter(in_one_line)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
