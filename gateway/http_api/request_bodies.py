"""Reads the bytes of a body as they come: inflates them, and leaves out images that no model will see (no I/O).

chunk --Content-Encoding--> inflated, about STEP_BYTES at a time --ImageCutter--> kept, at most MAX_BODY_BYTES

An agent's conversation brings the screenshots of all its turns again with each turn, though the models here read texts
alone. Their base64 is dropped where it stands in a field that holds nothing but an image, so that it takes no memory
and does not end the conversation: in the image parts of a message and of a tool's result, by the keys above them. What
a model reads, such as texts, arguments and the inputs of tools, stands under other keys and is never touched.
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

# A body has at most this many bytes without the images that are left out, as at Anthropic.
MAX_BODY_BYTES = 32 * 2**20
# This many bytes of a body may come, or come out of its compression, images included.
MAX_SENT_BYTES = 4 * MAX_BODY_BYTES
# The parser works in one piece, on a thread, and holds the interpreter's lock. The time that it takes depends on the
# number of items more than on their size, and for so many it is about 30 ms. Each item but the first follows a comma.
MAX_COMMAS = 2**21
# Compressed bytes become at most this many at once, so that a body that swells is noticed early.
STEP_BYTES = 256 * 2**10
# A body may make its reader keep 8 MiB of what came before, which is what RFC 8878 asks of everybody.
ZSTD_WINDOW_LOG = 23
# Images are looked for in the first pieces of a body's structure: beyond this, a body holds no conversation.
MAX_PIECES, MAX_DEPTH = 2**18, 64
# A body of this size is read as it is, for nothing is gained.
SMALL_BYTES = 16 * 2**10
# The mark of UTF-8 that Windows' programs write before JSON.
BOM = b"\xef\xbb\xbf"
# A key or a type that matters is shorter than this.
MAX_NAME_BYTES = 32

# The text of an image stands at these places; "[]" is an item of a list.
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
    """Describes an object or a list that has begun: its ``key`` is the last one of an object, and "[]" in a list.

    Attributes:
        said: the short texts of an object, by key.
        image: where the text of an image may stand in the object, before the object has said what it is.
    """

    key: str = ""
    said: dict[str, bytes] = field(default_factory=dict)
    image: tuple[int, int] = (0, 0)

    def holds_image(self) -> bool:
        """Says whether the object describes an image in base64."""
        return self.said.get("type") == b"base64" and self.said.get("media_type", b"").startswith(b"image/")


@dataclass(eq=False)
class ImageCutter:
    """Collects a body's JSON without the texts of images. ``kept`` is what has been collected so far.

    It follows strings and brackets only, each byte once, and cuts nothing but the inside of strings, so what was JSON
    stays JSON; what was none is collected somehow.
    """

    kept: bytearray = field(default_factory=bytearray)
    _open: list[_Open] = field(default_factory=lambda: [_Open()])
    _pieces: int = 0
    # Up to here, ``kept`` has been read.
    _at: int = 0
    # The begin of the string that is being read, behind its quote; None between strings.
    _string: int | None = None
    # The string that ended last, which is a key if a colon follows it.
    _last: bytes = b""
    # What is to become of the string that is being read: an image's text is not kept.
    _drops: bool = False
    # A string that may be an image's URL is judged when enough of it is there.
    _judges: bool = False

    def feed(self, data: bytes) -> None:
        """Collects the next bytes of the body."""
        self.kept += data
        if len(self.kept) <= SMALL_BYTES:
            return
        while self._at < len(self.kept) and self._pieces < MAX_PIECES:
            if not (self._between() if self._string is None else self._inside()):
                return

    def _between(self) -> bool:
        """Reads up to the next piece between strings. Returns whether there is one."""
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
        """Reads on in a string. Returns whether its end was found, or another turn is needed."""
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
        # A backslash at the end is half of something.
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
    # The number 31 stands for gzip's head.
    return zlib.decompressobj(31)


def _zstd() -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


_INFLATERS: dict[str, Callable[[], Any]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}


def _inflated(stream: Any, data: bytes) -> Iterator[bytes]:
    """Yields what some bytes become, about STEP_BYTES at a time at most. Raises EOFError for bytes after the end."""
    more = True
    while more:
        part = stream.decompress(data, STEP_BYTES)
        yield part
        # The object for zstd keeps what it has not read yet; that for gzip wants it again.
        data = getattr(stream, "unconsumed_tail", b"")
        more = not stream.eof and (len(part) == STEP_BYTES or bool(data))
    if stream.unused_data:
        raise EOFError


class BodyReader:
    """Collects one body from the chunks in which it comes. ``kept_bytes`` is its size so far, without images.

    Args:
        encoding: its Content-Encoding, in small letters; "" and "identity" for none.

    Raises ApiError for an encoding that is not known.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", *_INFLATERS):
            known = ", ".join(sorted(("identity", *_INFLATERS)))
            raise ApiError(415, f"Content-Encoding: {encoding[:100]!r} is not taken; {known} are")
        self._encoding = encoding
        self._inflater = _INFLATERS[encoding]() if encoding in _INFLATERS else None
        self._sent_bytes = self._commas = 0
        self._cutter = ImageCutter()

    @property
    def packed(self) -> bool:
        """Says whether the body is compressed."""
        return self._inflater is not None

    @property
    def kept_bytes(self) -> int:
        """Gives the number of bytes that are kept."""
        return len(self._cutter.kept)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes as they came. It may take milliseconds. Raises ApiError for a body that is too large or
        cannot be inflated."""
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
        """Returns the body. Raises ApiError where its compressed bytes are not whole, and for more items than are
        taken: only a client whose whole body was read is sure to see why."""
        if self._inflater is not None and not self._inflater.eof:
            raise _not_packed(self._encoding)
        if self._commas > MAX_COMMAS:
            raise ApiError(413, f"the body has more than {MAX_COMMAS} items", code="request_too_large")
        return bytes(self._cutter.kept.removeprefix(BOM))


def too_large() -> ApiError:
    """Makes the error of a body with more bytes than are taken."""
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")


def _not_packed(encoding: str) -> ApiError:
    text = f"Content-Encoding: the body is not whole, or not compressed as {encoding}"
    return ApiError(400, text, code="invalid_value")
