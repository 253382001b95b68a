"""Log lines for people, or one JSON object each for collectors; both know the trace that they belong to.

A record may carry ``fields``, a dictionary of what its message says in words: they are keys of the JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from opentelemetry import trace

_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """``time`` is RFC 3339 in UTC; ``trace_id`` and ``span_id`` are there within a recorded span."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "component": self._component,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            said |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def set_up_logging(level: str, form: str = "text", component: str = "") -> None:
    """One line per record on standard error; ``form`` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component) if form == "json" else logging.Formatter(_TEXT, "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Its greetings say what our own lines say.
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
