"""Reads the hints about KV that a client or a router sends with a request, in the envelope that vLLM has for them
(`kv_hints`, vllm-project/vllm#53423). Sans-IO.

    {"protocol_version": "0.1", "message_id": "m", "actions": [
        {"action_id": "a", "action_type": "kv.retain", "action_version": "0.1", "payload": {"ttl_seconds": 30}}]}

The envelope says nothing of actions; a consumer passes over those that it does not know. Known here are kv.retain,
whose time is `ttl_seconds` or that of its longest `directives` (`duration`), and kv.evict: the conversation is over.
They hold for the whole prompt and its answer, from the answer's end on. Which blocks a router names counts for nothing,
because a tenant's hint reaches its own request's blocks alone. Of several known actions the last one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest

MAX_TEXT_CHARS = 65_536
MAX_ACTIONS = 64
MAX_DIRECTIVES = 64
MAX_NAME_CHARS = 512
# A client may ask for so long, and gets it where it names no time.
MAX_HINT_S = 3600.0
RETAIN, EVICT = "kv.retain", "kv.evict"
# Versions of this major number are read.
MAJOR_VERSION = "0", "1"


def read_hints(text: str) -> float | None:
    """Returns for how many seconds an envelope, as JSON, asks to keep its conversation's KV, 0 where it is let go; None
    where it asks for nothing that is known here. Raises InvalidRequest, which names the wrong field."""
    if len(text) > MAX_TEXT_CHARS:
        raise _wrong("kv_hints", f"it has at most {MAX_TEXT_CHARS} characters")
    try:
        envelope = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong("kv_hints", "it is JSON") from None
    _texts(envelope, "kv_hints", ("protocol_version", "message_id"))
    actions = envelope.get("actions")
    if not isinstance(actions, list) or len(actions) > MAX_ACTIONS:
        raise _wrong("kv_hints.actions", f"it is a list of at most {MAX_ACTIONS} actions")
    found: float | None = None
    for number, action in enumerate(actions):
        field = f"kv_hints.actions[{number}]"
        _texts(action, field, ("action_id", "action_type", "action_version"))
        payload = action.get("payload", {})
        if not isinstance(payload, dict):
            raise _wrong(f"{field}.payload", "it is an object")
        kind = action["action_type"]
        if kind in (RETAIN, EVICT) and action["action_version"].partition(".")[0] not in MAJOR_VERSION:
            raise _wrong(f"{field}.action_version", f"versions {' and '.join(MAJOR_VERSION)} of {kind} are known")
        if kind == RETAIN:
            found = _retain_s(payload, f"{field}.payload")
        elif kind == EVICT:
            found = 0.0
    return found


def _retain_s(payload: Mapping[str, Any], field: str) -> float:
    directives = payload.get("directives")
    if directives is None:
        return _seconds(payload.get("ttl_seconds"), f"{field}.ttl_seconds")
    if not isinstance(directives, list) or not 0 < len(directives) <= MAX_DIRECTIVES:
        raise _wrong(f"{field}.directives", f"it is a list of 1 to {MAX_DIRECTIVES} directives")
    longest = 0.0
    for number, directive in enumerate(directives):
        if not isinstance(directive, dict):
            raise _wrong(f"{field}.directives[{number}]", "it is an object")
        longest = max(longest, _seconds(directive.get("duration"), f"{field}.directives[{number}].duration"))
    return longest


def _seconds(value: Any, field: str) -> float:
    if value is None:
        return MAX_HINT_S
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MAX_HINT_S:
        raise _wrong(field, f"it is a number of seconds above 0, at most {MAX_HINT_S:.0f}")
    return float(value)


def _texts(value: Any, field: str, names: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise _wrong(field, "it is an object")
    for name in names:
        text = value.get(name)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME_CHARS:
            raise _wrong(f"{field}.{name}", f"it is a text of 1 to {MAX_NAME_CHARS} characters")


def _wrong(field: str, description: str) -> InvalidRequest:
    return InvalidRequest.of(FieldViolation(field, description))
