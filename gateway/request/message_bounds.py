"""What a request may hold, counted in its bytes before any object is made of them (I7).

    bytes: MAX_REQUEST_BYTES --> strings, fields, ids: counted here --> objects --> each field by itself: validation.py
                                          | over LOOP_BYTES all of it runs on a thread
                                          '-- the event loop goes on

A body of eight megabytes may be two million objects: they take a second to make, and the interpreter makes them in one
piece. So both ports count first: JSON by its strings, which every name of a field and every text is, and a message of
gRPC by its fields. Lists of numbers are counted by their commas where they are read, against the model's own bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.grammars.shapes import MAX_SHAPE_BYTES
from pillion.gateway.request.validation import MAX_MESSAGES, MAX_PROMPT_IDS, MAX_REQUEST_BYTES, check_size
from pillion.gateway.tokens.tokenizer import LOOP_BYTES

# What may wait for a thread, of all clients together.
MAX_WAITING_BYTES = 64 * MAX_REQUEST_BYTES
# Names and texts of a body: four for each of the most messages, or seven where its content is a list of one part.
MAX_STRINGS = 8 * MAX_MESSAGES
# Brackets and braces of a body that open something, those within its texts included: passing over eight megabytes of
# them takes 60 ms in one call.
MAX_BRACKETS = 2**20
# Fields of a message of gRPC, those of its conversation included.
MAX_FIELDS = 4 * MAX_MESSAGES
# Stop strings and biases, as many and as long as they may be, take half of what there is beside a shape.
MAX_SAMPLING_BYTES = 64 * 2**10 + MAX_SHAPE_BYTES

# What a field of bytes holds: a message, whose own fields are listed by number; or, by its name, the sampling
# parameters or ids.
_SAMPLING = "sampling"
_Fields = Mapping[int, Any]
# GenerateRequest of protos/pillion/v1/gateway.proto.
_GENERATE: _Fields = {
    3: "token_ids",
    4: {3: {}},
    5: _SAMPLING,
    9: {2: {1: "resume.answers.token_ids"}},
    11: {1: {}},
}
# WarmPrefixRequest has one.
_WARM: _Fields = {1: _GENERATE}
# Kinds of fields. The two others are the marks around a group; what is between them counts like any field.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Every byte of a number but its last one.
_CONTINUED = bytes(range(128, 256))


def holds_too_many_strings(body: bytes) -> bool:
    """Whether a JSON body surely holds more than MAX_STRINGS strings; never true for one that holds as many or fewer.

    Every string has two quotes. One that is escaped does not count; neither does the last one of a string that ends in
    a backslash, so a body of such strings may hold twice as many.
    """
    most = 2 * MAX_STRINGS
    return body.count(b'"') > most and body.count(b'"') - body.count(b'\\"') > most


def holds_too_many_brackets(body: bytes) -> bool:
    """Whether a JSON body holds more than MAX_BRACKETS brackets and braces that open something."""
    return len(body) > MAX_BRACKETS and body.count(b"[") + body.count(b"{") > MAX_BRACKETS


def check_generate_message(raw: bytes) -> None:
    """Counts the fields of a serialized GenerateRequest, up to MAX_FIELDS. One that is not well-formed passes up to
    where it is broken; reading it refuses it. Raises InvalidRequest."""
    _check(raw, _GENERATE)


def check_warm_message(raw: bytes) -> None:
    """Counts the fields of a serialized WarmPrefixRequest in the same way. Raises InvalidRequest."""
    _check(raw, _WARM)


def _check(raw: bytes, fields: _Fields) -> None:
    check_size(len(raw))
    if len(raw) > LOOP_BYTES:
        _count(raw, 0, len(raw), fields, Counter())


def _count(raw: bytes, at: int, end: int, fields: _Fields, counts: Counter[str]) -> None:
    """Counts the fields between two places of a message. Raises InvalidRequest."""
    while at < end:
        counts["fields"] += 1
        if counts["fields"] > MAX_FIELDS:
            raise InvalidRequest.of(FieldViolation("messages", f"the request holds more than {MAX_FIELDS} fields"))
        tag, at = _varint(raw, at, end)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(raw, at, end)
            stop = min(at + size, end)
            _count_inside(raw, at, stop, fields.get(tag >> 3), counts)
            at = stop
        elif kind == _VARINT:
            _, at = _varint(raw, at, end)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind > _FIXED32:
            # There is no such kind: nothing is read from here on.
            return


def _count_inside(raw: bytes, at: int, end: int, holds: Any, counts: Counter[str]) -> None:
    if holds == _SAMPLING:
        counts[_SAMPLING] += end - at
        if counts[_SAMPLING] > MAX_SAMPLING_BYTES:
            raise InvalidRequest.of(FieldViolation("sampling", f"it is larger than {MAX_SAMPLING_BYTES} bytes"))
    elif isinstance(holds, str):
        counts[holds] += len(raw[at:end].translate(None, _CONTINUED))
        if counts[holds] > MAX_PROMPT_IDS:
            raise InvalidRequest.of(FieldViolation(holds, f"more than {MAX_PROMPT_IDS} items"))
    elif holds is not None:
        _count(raw, at, end, holds, counts)


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; one that is cut short, or too long, ends the message."""
    value = shift = 0
    while at < end and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, end
