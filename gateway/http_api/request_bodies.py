"""Reads the bytes of a body as they come, and inflates them about STEP_BYTES at a time (no I/O)."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

from pillion.gateway.http_api.http_errors import ApiError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# A body has at most this many bytes, as they come and inflated, as at Anthropic.
MAX_BODY_BYTES = 32 * 2**20
# The parser works in one piece, on a thread, and holds the interpreter's lock. The time that it takes depends on the
# number of items more than on their size, and for so many it is about 30 ms. Each item but the first follows a comma.
MAX_COMMAS = 2**21
# Compressed bytes become at most this many at once, so that a body that swells is noticed early.
STEP_BYTES = 256 * 2**10
# A body may make its reader keep 8 MiB of what came before, which is what RFC 8878 asks of everybody.
ZSTD_WINDOW_LOG = 23


class _Gzip:
    """Inflates gzip."""

    def __init__(self) -> None:
        # The number 31 stands for gzip's head.
        self._stream = zlib.decompressobj(31)

    @property
    def ended(self) -> bool:
        """Says whether the compressed bytes were whole."""
        return self._stream.eof

    def parts(self, data: bytes) -> Iterator[bytes]:
        """Yields what some bytes become, about STEP_BYTES at a time at most."""
        part = self._stream.decompress(data, STEP_BYTES)
        yield part
        while not self._stream.eof and (self._stream.unconsumed_tail or len(part) == STEP_BYTES):
            part = self._stream.decompress(self._stream.unconsumed_tail, STEP_BYTES)
            yield part
        if self._stream.unused_data:
            raise EOFError


class _Zstd:
    """Inflates zstd."""

    def __init__(self) -> None:
        self._stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})

    @property
    def ended(self) -> bool:
        """Says whether the compressed bytes were whole."""
        return self._stream.eof

    def parts(self, data: bytes) -> Iterator[bytes]:
        """Yields what some bytes become, about STEP_BYTES at a time at most."""
        yield self._stream.decompress(data, STEP_BYTES)
        while not (self._stream.needs_input or self._stream.eof):
            yield self._stream.decompress(b"", STEP_BYTES)
        if self._stream.unused_data:
            raise EOFError


_INFLATERS: dict[str, type[_Gzip | _Zstd] | None] = {
    "": None,
    "identity": None,
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "zstd": _Zstd,
}


class BodyReader:
    """Collects one body from the chunks in which it comes. ``kept`` is what has come so far.

    Args:
        encoding: its Content-Encoding, in small letters; "" and "identity" for none.

    Raises ApiError for an encoding that is not known.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in _INFLATERS:
            known = ", ".join(sorted(name for name in _INFLATERS if name))
            raise ApiError(415, f"Content-Encoding: {encoding[:100]!r} is not taken; {known} are")
        self._encoding = encoding
        inflater = _INFLATERS[encoding]
        self._inflater = None if inflater is None else inflater()
        self._commas = 0
        self.kept = bytearray()

    @property
    def packed(self) -> bool:
        """Says whether the body is compressed."""
        return self._inflater is not None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes as they came. It may take milliseconds. Raises ApiError for a body that is too large or
        cannot be inflated."""
        try:
            for part in (data,) if self._inflater is None else self._inflater.parts(data):
                self._commas += part.count(b",")
                self.kept += part
                if len(self.kept) > MAX_BODY_BYTES:
                    raise too_large()
        except (zlib.error, zstd.ZstdError, EOFError):
            raise _not_packed(self._encoding) from None

    def whole(self) -> bytes:
        """Returns the body. Raises ApiError where its compressed bytes are not whole, and for more items than are
        taken: only a client whose whole body was read is sure to see why."""
        if self._inflater is not None and not self._inflater.ended:
            raise _not_packed(self._encoding)
        if self._commas > MAX_COMMAS:
            raise ApiError(413, f"the body has more than {MAX_COMMAS} items", code="request_too_large")
        return bytes(self.kept)


def too_large() -> ApiError:
    """Makes the error of a body with more bytes than are taken."""
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")


def _not_packed(encoding: str) -> ApiError:
    text = f"Content-Encoding: the body is not whole, or not compressed as {encoding}"
    return ApiError(400, text, code="invalid_value")
