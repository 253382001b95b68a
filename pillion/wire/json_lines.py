"""Encodes and parses messages of one JSON line each, sent over Unix sockets together with descriptors."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from pillion.errors import InvalidRequest
from pillion.wire.common import check_protocol

T = TypeVar("T")

# msgspec 0.22 can crash in a garbage collection while two threads build the decoder of one type.
_building = threading.Lock()
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def line_to_bytes(message: msgspec.Struct) -> bytes:
    """Encode one message."""
    return msgspec.json.encode(message) + b"\n"


def message_of(line: bytes, kind: type[T], speaker: str) -> T:
    """Parse one message. Raises InvalidRequest, which names the ``speaker``, for a line that is not of this kind, and
    Conflict for an incompatible protocol, which is checked before the other fields, because their names and types
    depend on it."""
    try:
        fields = msgspec.json.decode(line)
        if isinstance(fields, dict) and isinstance(fields.get("protocol"), int):
            names = (fields.get(name) for name in ("component_id", "node_id", "name"))
            check_protocol(fields["protocol"], next((name for name in names if name and isinstance(name, str)), ""))
        with _building:
            decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.json.Decoder(kind))
        message: T = decoder.decode(line)
        return message
    except ValueError as error:
        raise InvalidRequest(f"{speaker} speaks one line of JSON; this one is wrong: {error}") from None
