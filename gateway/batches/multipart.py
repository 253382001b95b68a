"""Incremental parser of multipart/form-data uploads."""

from __future__ import annotations

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pillion.gateway.http_api.http_errors import ApiError, refused

FORM_TYPE = "multipart/form-data"
MAX_FORM_FIELDS = 8
MAX_FORM_VALUE_BYTES = 1024


class UploadForm(msgspec.Struct):
    """Form of POST /v1/files.

    Attributes:
        file: JSON lines, each a request, with a filename.
        purpose: "batch".
        expires_after: "created_at" in expires_after[anchor], and the lifetime in expires_after[seconds], at most 30
            days.
    """

    file: str
    purpose: str
    expires_after: str = ""


class FormReader:
    """Parser of one form with a file.

    Attributes:
        fields: values of the other fields, complete after :meth:`end`.
        filename: the file's name; None before the file starts.

    Raises ApiError for another content type than multipart/form-data.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != FORM_TYPE.encode() or not boundary:
            raise ApiError(415, f"the body must be sent as Content-Type: {FORM_TYPE}")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._ended = False
        self._header = self._value = self._disposition = b""
        self._name = ""
        self._is_file = False
        self._content: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _unreadable(error) from None

    def feed(self, chunk: bytes) -> bytes:
        """Parse the next chunk of the form; return the file's bytes in it. Raises ApiError."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _unreadable(error) from None
        content, self._content = b"".join(self._content), []
        return content

    def end(self) -> None:
        """End the form. Raises ApiError if it is incomplete or has no file."""
        if not self._ended:
            raise ApiError(400, "the form is incomplete", code="invalid_form")
        if self.filename is None:
            raise refused("file", "this field is required", "missing_required_parameter")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise refused("file", "only one file per upload")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            return
        if not self._name or self._name in self.fields or len(self.fields) >= MAX_FORM_FIELDS:
            raise refused(self._name[:100], "this field is repeated, or there are too many fields")
        self.fields[self._name] = ""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._content.append(data[start:end])
            return
        self.fields[self._name] += data[start:end].decode("utf-8", "replace")
        if len(self.fields[self._name]) > MAX_FORM_VALUE_BYTES:
            raise refused(self._name[:100], f"longer than {MAX_FORM_VALUE_BYTES} bytes")

    def _end(self) -> None:
        self._ended = True


def _unreadable(error: FormParserError) -> ApiError:
    return ApiError(400, f"the form cannot be read: {error}", code="invalid_form")
