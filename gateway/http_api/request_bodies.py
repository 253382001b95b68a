"""Decompression of bodies while they arrive, and removal of images that no model will see (no I/O).

chunk --Content-Encoding--> decompressed, about STEP_BYTES at a time --ImageCutter--> without images, max MAX_BODY_BYTES

An agent resends the screenshots of all turns with each turn, although the models here read text only. Their base64 is
dropped, so that it takes no memory and does not end the conversation, but only in fields that contain nothing but an
image: image parts of messages and of tool results, identified by the keys above them. Everything that a model reads,
e.g. texts, arguments and inputs of tools, has other keys and is never changed.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pillion.gateway.http_api.http_errors import ApiError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Max size of a body without dropped images; Anthropic's limit.
MAX_BODY_BYTES = 32 * 2**20
# Max size of a body as sent, and after decompression, images included.
MAX_SENT_BYTES = 4 * MAX_BODY_BYTES
# Max commas of a body, one per item but the first. The parser runs without interruption on a thread and holds the GIL.
# Its time depends on the number of items more than on their size; for this number it is about 30 ms.
MAX_COMMAS = 2**21
# Max decompressed bytes per step, so that a decompression bomb is detected early.
STEP_BYTES = 256 * 2**10
# Max structural characters to scan for images, and max depth; a body beyond them is no conversation.
MAX_STRUCTURAL_CHARS, MAX_DEPTH = 2**18, 64
# Smaller bodies are not scanned for images.
SMALL_BYTES = 16 * 2**10
# UTF-8 byte order mark, which Windows programs write before JSON.
BOM = b"\xef\xbb\xbf"

# Paths in a body, where "[]" is an item of a list: _URLS of strings that may be an image's data URL, _SOURCES of an
# image's base64 in Anthropic's form.
_PART = ("messages", "[]", "content", "[]")
_RESULT_PART = (*_PART, "content", "[]")
_ITEM_PARTS = (("input", "[]", "content", "[]"), ("input", "[]", "output", "[]"))
_URLS = frozenset(
    (*path, *end)
    for path in (_PART, _RESULT_PART, ("messages", "[]", "images", "[]"), *_ITEM_PARTS)
    for end in (("image_url",), ("image_url", "url"))
)
_SOURCES = frozenset((*path, "source", "data") for path in (_PART, _RESULT_PART))
_LAST_KEYS = frozenset(path[-1] for path in (*_URLS, *_SOURCES))

_STRUCTURAL = re.compile(rb'["{}\[\]:,]')
_IN_STRING = re.compile(rb'(?>[^"\\]*(?:\\[\s\S][^"\\]*)*)')
_IMAGE_URL = re.compile(rb"data:image/[a-zA-Z0-9.+-]{1,32};base64,")
# Bytes that suffice to match _IMAGE_URL.
_IMAGE_URL_BYTES = 64


@dataclass(slots=True)
class _Container:
    """An object or list whose end has not been scanned.

    Attributes:
        key: last key of an object, "[]" for a list.
        strings: an object's strings "type" and "media_type".
        image: range of a string in the object that may be an image, as the object's type is not known yet.
    """

    key: str = ""
    strings: dict[str, bytes] = field(default_factory=dict)
    image: tuple[int, int] = (0, 0)

    def is_image(self) -> bool:
        """Return True if the object describes an image in base64."""
        return self.strings.get("type") == b"base64" and self.strings.get("media_type", b"").startswith(b"image/")


@dataclass(eq=False)
class ImageCutter:
    """Incremental scanner that removes images from a body's JSON. ``kept`` is the result so far.

    It scans each byte once, for strings and structural characters only, and removes nothing but the inside of strings,
    so valid JSON stays valid.
    """

    kept: bytearray = field(default_factory=bytearray)
    _open: list[_Container] = field(default_factory=lambda: [_Container()])
    _structural_chars: int = 0
    _position: int = 0
    # Start of the current string, after its quote; None between strings.
    _string_start: int | None = None
    # Last string if it is short; a key if a colon follows.
    _last: bytes = b""
    # Whether the rest of the current string is removed.
    _drops: bool = False
    # Whether the current string may be an image's URL; decided when enough of it has arrived.
    _maybe_url: bool = False

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the body."""
        self.kept += data
        if len(self.kept) <= SMALL_BYTES:
            return
        while self._position < len(self.kept) and self._structural_chars < MAX_STRUCTURAL_CHARS:
            if not (self._between() if self._string_start is None else self._inside()):
                return

    def _between(self) -> bool:
        """Scan to the next structural character between strings. Return False if there is none yet."""
        token = _STRUCTURAL.search(self.kept, self._position)
        if token is None:
            self._position = len(self.kept)
            return False
        self._structural_chars += 1
        self._position = token.end()
        match token[0]:
            case b'"':
                self._begin_string()
            case b":":
                self._open[-1].key = self._last.decode("latin-1")
            case b",":
                if self._open[-1].key != "[]":
                    self._open[-1].key = ""
            case b"{" | b"[":
                self._open.append(_Container("[]" if token[0] == b"[" else ""))
                self._structural_chars += MAX_STRUCTURAL_CHARS * (len(self._open) > MAX_DEPTH)
            case _ if len(self._open) > 1:
                self._end_container(self._open.pop())
        return True

    def _begin_string(self) -> None:
        self._string_start, container = self._position, self._open[-1]
        if container.key in _LAST_KEYS:
            path = tuple(one.key for one in self._open[1:])
            self._maybe_url = path in _URLS
            if path in _SOURCES:
                self._drops = container.is_image()
                container.image = (self._position, 0)

    def _inside(self) -> bool:
        """Scan the current string. Return False if its end has not arrived."""
        assert self._string_start is not None
        if self._maybe_url:
            if len(self.kept) - self._string_start < _IMAGE_URL_BYTES and self.kept.find(b'"', self._string_start) < 0:
                return False
            self._maybe_url = False
            if url := _IMAGE_URL.match(self.kept, self._string_start):
                self._drops, self._position = True, url.end()
        rest = _IN_STRING.match(self.kept, self._position)
        assert rest is not None
        end = rest.end()
        if self._drops:
            del self.kept[self._position : end]
            end = self._position
        self._position = end
        # At the end of the received bytes, or before a backslash whose escape is incomplete.
        if end == len(self.kept) or self.kept[end] != ord('"'):
            return False
        self._end_string(end)
        return True

    def _end_string(self, end: int) -> None:
        assert self._string_start is not None
        container, size = self._open[-1], end - self._string_start
        # All keys and types that matter are shorter.
        self._last = bytes(self.kept[self._string_start : end]) if size <= 32 else b""
        if container.key in ("type", "media_type"):
            container.strings[container.key] = self._last
        if container.image[0] == self._string_start and not self._drops:
            container.image = (self._string_start, end)
        self._string_start, self._drops, self._position = None, False, end + 1

    def _end_container(self, container: _Container) -> None:
        begin, end = container.image
        if begin < end and container.is_image():
            del self.kept[begin:end]
            self._position -= end - begin


def _gzip() -> Any:
    # 16: gzip format; 15: the max window.
    return zlib.decompressobj(16 + 15)


def _zstd() -> Any:
    # RFC 8878 asks decoders to support windows of up to 8 MiB.
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}


def _decompress(stream: Any, data: bytes) -> Iterator[bytes]:
    """Yield the decompressed ``data``, about STEP_BYTES at a time. Raises EOFError for bytes after the stream's end."""
    more = True
    while more:
        part = stream.decompress(data, STEP_BYTES)
        yield part
        # zstd buffers its unread input; zlib expects it to be passed again.
        data = getattr(stream, "unconsumed_tail", b"")
        more = not stream.eof and (len(part) == STEP_BYTES or bool(data))
    if stream.unused_data:
        raise EOFError


class BodyReader:
    """Reader of one body: decompresses its chunks, and removes images and a byte order mark.

    Args:
        encoding: the Content-Encoding, in lower case; "" and "identity" for none.

    Raises ApiError for an unknown encoding.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", *_DECOMPRESSORS):
            known = ", ".join(sorted(("identity", *_DECOMPRESSORS)))
            raise ApiError(415, f"Content-Encoding: {encoding[:100]!r} is not supported; use one of {known}")
        self._encoding = encoding
        self._decompressor = _DECOMPRESSORS[encoding]() if encoding in _DECOMPRESSORS else None
        self._sent_bytes = self._commas = 0
        self._cutter = ImageCutter()

    @property
    def compressed(self) -> bool:
        """True if the body is compressed."""
        return self._decompressor is not None

    @property
    def kept_bytes(self) -> int:
        """Size of the body so far, without images."""
        return len(self._cutter.kept)

    def feed(self, data: bytes) -> None:
        """Add the next bytes as received; may take milliseconds. Raises ApiError for a body that is too large or cannot
        be decompressed."""
        try:
            for part in (data,) if self._decompressor is None else _decompress(self._decompressor, data):
                self._sent_bytes += len(part)
                self._commas += part.count(b",")
                self._cutter.feed(part)
                if self.kept_bytes > MAX_BODY_BYTES or self._sent_bytes > MAX_SENT_BYTES:
                    raise too_large()
        except (zlib.error, zstd.ZstdError, EOFError):
            raise _corrupt_error(self._encoding) from None

    def whole(self) -> bytes:
        """Return the body.

        Raises ApiError for truncated compressed data, and for too many items: only a client whose whole body was read
        is sure to receive the error.
        """
        if self._decompressor is not None and not self._decompressor.eof:
            raise _corrupt_error(self._encoding)
        if self._commas > MAX_COMMAS:
            raise ApiError(413, f"the body has more than {MAX_COMMAS} items", code="request_too_large")
        return bytes(self._cutter.kept.removeprefix(BOM))


def too_large() -> ApiError:
    """Return the error for a body above MAX_BODY_BYTES or MAX_SENT_BYTES, with status 413."""
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")


def _corrupt_error(encoding: str) -> ApiError:
    text = f"Content-Encoding: the body is truncated, or not compressed as {encoding}"
    return ApiError(400, text, code="invalid_value")
