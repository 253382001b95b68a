"""Lines of a batch's files: a request of the input, an entry of the journal, an answer of the output. Sans-IO (I9).

input   {"custom_id", "method", "url", "body"}
journal CRC32 as 8 hex digits | number of the input's line | 1: an error, 0: an answer | the output's line
output  {"id", "custom_id", "response": {"status_code", "request_id", "body"} | null, "error": null | {...}}
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from pillion.gateway.batches.batch_records import BatchError
from pillion.gateway.http_api.request_bodies import BOM

# OpenAI's limits.
MAX_BATCH_LINES = 50_000
MAX_CUSTOM_ID_CHARS = 512
# Max errors reported for an invalid input.
MAX_INPUT_ERRORS = 100

_encode = msgspec.json.Encoder().encode


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a batch's input."""

    custom_id: str
    method: str
    url: str
    body: Raw


_read_request = msgspec.json.Decoder(BatchLine).decode


def read_request(raw: bytes) -> BatchLine:
    """Parse a line of the input. Raises ValueError and RecursionError."""
    return _read_request(raw.removeprefix(BOM))


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A line's result in the journal.

    Attributes:
        number: number of the input's line, from 1.
        failed: whether the result is an error.
        line: the output's line, without "\\n".
    """

    number: int
    failed: bool
    line: bytes

    def encoded(self) -> bytes:
        """Return the entry as a line of the journal."""
        rest = b"%d %d %s\n" % (self.number, self.failed, self.line)
        return b"%08x %s" % (zlib.crc32(rest), rest)


def whole_entries(lines: Iterable[bytes]) -> Iterator[tuple[JournalEntry, int]]:
    """Yield a journal's entries with their sizes in bytes, up to the first one that a crash has torn."""
    for raw in lines:
        checksum, _, rest = raw.partition(b" ")
        if not raw.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(rest):
            return
        number, failed, line = rest[:-1].split(b" ", 2)
        yield JournalEntry(int(number), failed == b"1", line), len(raw)


class InputCheck:
    """Validator of an input's lines, in order.

    Args:
        endpoint: the batch's endpoint; each line's url must equal it.
        max_line_bytes: max length of a line.

    Attributes:
        number: number of the last line, from 1.
        spans: line number -> offset and length in bytes, of each request.
        errors: errors so far.
    """

    def __init__(self, endpoint: str, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._ids: set[str] = set()
        self.number = 0
        self.spans: dict[int, tuple[int, int]] = {}
        self.errors: list[BatchError] = []
        self._offset = 0

    @property
    def exhausted(self) -> bool:
        """True if no further error would be reported, so that the rest need not be read."""
        return len(self.errors) >= MAX_INPUT_ERRORS or len(self.spans) > MAX_BATCH_LINES

    def add(self, raw: bytes) -> None:
        """Check the next line, which ends with "\\n" or is the last one. Empty lines are counted and skipped."""
        self.number += 1
        offset, self._offset = self._offset, self._offset + len(raw)
        if not raw.removeprefix(BOM).strip():
            return
        self.spans[self.number] = offset, len(raw)
        code, message, param = self._error_of(raw)
        if code:
            self.errors.append(BatchError(code=code, message=message, line=self.number, param=param))

    def end(self) -> tuple[BatchError, ...]:
        """Return the errors of the input, once all lines are added."""
        if not self.spans:
            return (BatchError(code="empty_file", message="the input has no request"),)
        if len(self.spans) > MAX_BATCH_LINES:
            text = f"the input has more than {MAX_BATCH_LINES} requests"
            return (BatchError(code="too_many_requests", message=text), *self.errors)
        self._ids.clear()
        return tuple(self.errors)

    def _error_of(self, raw: bytes) -> tuple[str, str, str | None]:
        """Return the code, message and field of a line's error; the code is "" for a valid line."""
        if len(raw) > self._max_line_bytes:
            return "line_too_long", f"the line is longer than {self._max_line_bytes} bytes", None
        try:
            line = read_request(raw)
        except (ValueError, RecursionError) as error:
            # The parser's message may repeat what the client sent.
            return "invalid_json_line", f"the line cannot be read: {str(error)[:500]}", None
        if not line.custom_id or len(line.custom_id) > MAX_CUSTOM_ID_CHARS:
            return "invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        if line.custom_id in self._ids:
            return "duplicate_custom_id", f"the custom_id {line.custom_id!r} was used before", "custom_id"
        self._ids.add(line.custom_id)
        if line.method != "POST":
            return "invalid_method", "method must be POST", "method"
        if line.url != self._endpoint:
            return "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url"
        if not bytes(line.body).startswith(b"{"):
            return "invalid_body", "body must be a JSON object", "body"
        return "", "", None


def output_line(batch_id: str, number: int, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Encode the output file's line for a call's answer or error."""
    response = {"status_code": status, "request_id": request_id, "body": Raw(body)}
    return _encode({"id": _line_id(batch_id, number), "custom_id": custom_id, "response": response, "error": None})


def unserved_line(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Encode the output file's line for a request that was never answered."""
    error = {"code": code, "message": message}
    return _encode({"id": _line_id(batch_id, number), "custom_id": custom_id, "response": None, "error": error})


def request_id(batch_id: str, number: int) -> str:
    """Return the request id under which a line runs."""
    return f"{batch_id}-{number}"


def _line_id(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
