"""Decompression of bodies while they arrive, and removal of images that no model will see (no I/O).

chunk --Content-Encoding--> decompressed, about STEP_BYTES at a time --ImageCutter--> kept, at most MAX_BODY_BYTES

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
# Max zstd window (8 MiB), which RFC 8878 asks every decoder to support.
ZSTD_WINDOW_LOG = 23
# Max structural characters to scan for images, and max depth: beyond them, a body is not a conversation.
MAX_PIECES, MAX_DEPTH = 2**18, 64
SMALL_BYTES = 16 * 2**10
# UTF-8 byte order mark, which Windows programs write before JSON.
BOM = b"\xef\xbb\xbf"
MAX_NAME_BYTES = 32

# Paths of images' texts; "[]" is an item of a list.
_PART = ("messages", "[]", "content", "[]")
_RESULT_PART = (*_PART, "content", "[]")
_ITEM_PARTS = (("input", "[]", "content", "[]"), ("input", "[]", "output", "[]"))
_URLS = frozenset(
    (*place, *end)
    for place in (_PART, _RESULT_PART, ("messages", "[]", "images", "[]"), *_ITEM_PARTS)
    for end in (("image_url",), ("image_url", "url"))
)
_SOURCES = frozenset((*place, "source", "data") for place in (_PART, _RESULT_PART))
_LAST_KEYS = frozenset(place[-1] for place in (*_URLS, *_SOURCES))

_PIECE = re.compile(rb'["{}\[\]:,]')
_IN_STRING = re.compile(rb'(?>[^"\\]*(?:\\[\s\S][^"\\]*)*)')
_IMAGE_URL = re.compile(rb"data:image/[a-zA-Z0-9.+-]{1,32};base64,")
_IMAGE_URL_BYTES = 64


@dataclass(slots=True)
class _Open:
    """An object or list that is open. ``key`` is the last key of an object, and "[]" in a list.

    Attributes:
        said: short strings of an object, by key.
        image: range of a possible image's text in the object, until its type is known.
    """

    key: str = ""
    said: dict[str, bytes] = field(default_factory=dict)
    image: tuple[int, int] = (0, 0)

    def holds_image(self) -> bool:
        """Return True if the object describes an image in base64."""
        return self.said.get("type") == b"base64" and self.said.get("media_type", b"").startswith(b"image/")


@dataclass(eq=False)
class ImageCutter:
    """Collector of a body's JSON without images. ``kept`` is the result so far.

    It tracks strings and brackets only, each byte once, and removes nothing but the inside of strings, so valid JSON
    stays valid.
    """

    kept: bytearray = field(default_factory=bytearray)
    _open: list[_Open] = field(default_factory=lambda: [_Open()])
    _pieces: int = 0
    _at: int = 0
    # Start of the current string, after its quote; None between strings.
    _string: int | None = None
    # Last string, which is a key if a colon follows.
    _last: bytes = b""
    _drops: bool = False
    # Whether the current string may be an image's URL; decided when enough of it has arrived.
    _judges: bool = False

    def feed(self, data: bytes) -> None:
        """Collect the next bytes of the body."""
        self.kept += data
        if len(self.kept) <= SMALL_BYTES:
            return
        while self._at < len(self.kept) and self._pieces < MAX_PIECES:
            if not (self._between() if self._string is None else self._inside()):
                return

    def _between(self) -> bool:
        """Scan to the next structural character between strings. Return False if there is none yet."""
        found = _PIECE.search(self.kept, self._at)
        if found is None:
            self._at = len(self.kept)
            return False
        self._pieces += 1
        self._at = found.end()
        match found[0]:
            case b'"':
                self._begin_string()
            case b":":
                self._open[-1].key = self._last.decode("latin-1")
            case b",":
                if self._open[-1].key != "[]":
                    self._open[-1].key = ""
            case b"{" | b"[":
                self._open.append(_Open("[]" if found[0] == b"[" else ""))
                self._pieces += MAX_PIECES * (len(self._open) > MAX_DEPTH)
            case _ if len(self._open) > 1:
                self._end_object(self._open.pop())
        return True

    def _begin_string(self) -> None:
        self._string, above = self._at, self._open[-1]
        if above.key in _LAST_KEYS:
            place = tuple(one.key for one in self._open[1:])
            self._judges = place in _URLS
            if place in _SOURCES:
                self._drops = above.holds_image()
                above.image = (self._at, 0)

    def _inside(self) -> bool:
        """Scan the current string. Return False if its end has not arrived."""
        assert self._string is not None
        if self._judges:
            if len(self.kept) - self._string < _IMAGE_URL_BYTES and self.kept.find(b'"', self._string) < 0:
                return False
            self._judges = False
            if found := _IMAGE_URL.match(self.kept, self._string):
                self._drops, self._at = True, found.end()
        found = _IN_STRING.match(self.kept, self._at)
        assert found is not None
        end = found.end()
        if self._drops:
            del self.kept[self._at : end]
            end = self._at
        self._at = end
        # A trailing backslash is half of an escape.
        if end == len(self.kept) or self.kept[end] != ord('"'):
            return False
        self._end_string(end)
        return True

    def _end_string(self, end: int) -> None:
        assert self._string is not None
        above, size = self._open[-1], end - self._string
        self._last = bytes(self.kept[self._string : end]) if size <= MAX_NAME_BYTES else b""
        if above.key in ("type", "media_type"):
            above.said[above.key] = self._last
        if above.image[0] == self._string and not self._drops:
            above.image = (self._string, end)
        self._string, self._drops, self._at = None, False, end + 1

    def _end_object(self, ended: _Open) -> None:
        begin, end = ended.image
        if begin < end and ended.holds_image():
            del self.kept[begin:end]
            self._at -= end - begin


def _gzip() -> Any:
    # 31: gzip header.
    return zlib.decompressobj(31)


def _zstd() -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


_INFLATERS: dict[str, Callable[[], Any]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}


def _inflated(stream: Any, data: bytes) -> Iterator[bytes]:
    """Yield decompressed bytes, in parts of about STEP_BYTES. Raises EOFError for bytes after the end."""
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
    """Collector of one body from its chunks.

    Args:
        encoding: its Content-Encoding, in lower case; "" and "identity" for none.

    Raises ApiError for an unknown encoding.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", *_INFLATERS):
            known = ", ".join(sorted(("identity", *_INFLATERS)))
            raise ApiError(415, f"Content-Encoding: {encoding[:100]!r} is not supported; use one of {known}")
        self._encoding = encoding
        self._inflater = _INFLATERS[encoding]() if encoding in _INFLATERS else None
        self._sent_bytes = self._commas = 0
        self._cutter = ImageCutter()

    @property
    def packed(self) -> bool:
        """True if the body is compressed."""
        return self._inflater is not None

    @property
    def kept_bytes(self) -> int:
        """Size of the body so far, without images."""
        return len(self._cutter.kept)

    def feed(self, data: bytes) -> None:
        """Add the next bytes as received; may take milliseconds. Raises ApiError for a body that is too large or cannot
        be decompressed."""
        try:
            for part in (data,) if self._inflater is None else _inflated(self._inflater, data):
                self._sent_bytes += len(part)
                self._commas += part.count(b",")
                self._cutter.feed(part)
                if self.kept_bytes > MAX_BODY_BYTES or self._sent_bytes > MAX_SENT_BYTES:
                    raise too_large()
        except (zlib.error, zstd.ZstdError, EOFError):
            raise _not_packed(self._encoding) from None

    def whole(self) -> bytes:
        """Return the body.

        Raises ApiError for truncated compressed data, and for too many items: only a client whose whole body was read
        is sure to receive the error.
        """
        if self._inflater is not None and not self._inflater.eof:
            raise _not_packed(self._encoding)
        if self._commas > MAX_COMMAS:
            raise ApiError(413, f"the body has more than {MAX_COMMAS} items", code="request_too_large")
        return bytes(self._cutter.kept.removeprefix(BOM))


def too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")


def _not_packed(encoding: str) -> ApiError:
    text = f"Content-Encoding: the body is truncated, or not compressed as {encoding}"
    return ApiError(400, text, code="invalid_value")
