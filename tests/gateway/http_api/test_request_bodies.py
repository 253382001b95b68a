"""Bodies as they come: compressed, or too large."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pillion.gateway.http_api import request_bodies
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.request_bodies import MAX_BODY_BYTES, BodyReader
from tests.support.fake_components import running_fake_cluster
from tests.support.http import JSON, call

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = {"model": "toy", "prompt": "hi"}


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "zstd": ("zstd", zstd.compress),
}


async def test_a_compressed_body_is_read_at_each_api() -> None:
    async with running_fake_cluster("abc") as fakes:
        address, messages = fakes.gateway.http_address, [{"role": "user", "content": "hi"}]
        bodies = {
            "/v1/completions": TEXT,
            "/v1/chat/completions": {"messages": messages},
            "/v1/responses": {"input": "hi"},
            "/v1/messages": {"messages": messages, "max_tokens": 5},
            "/tokenize": TEXT,
        }
        for encoding, pack in PACKED.values():
            for path, body in bodies.items():
                sent = pack(json.dumps(body).encode())
                reply = await call(address, path, sent, {**JSON, "Content-Encoding": encoding})
                assert reply.status == 200, (encoding, path, reply.body)
        refused = await call(address, "/v1/completions", b"x", {**JSON, "Content-Encoding": "compress"})
        assert refused.status == 415
        assert all(name in refused.error["message"] for name in ("gzip", "zstd"))
        await fakes.settled()


def read(encoding: str, *chunks: bytes) -> bytes:
    """The body of these chunks."""
    reader = BodyReader(encoding)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.whole()


@pytest.mark.parametrize(("encoding", "pack"), PACKED.values(), ids=PACKED)
def test_compressed_chunks_of_any_size_are_the_body(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    body = json.dumps({"prompt": "Größe " * 200_000, "n": list(range(1000))}).encode()
    packed = pack(body)
    for size in (1, 7, 1000, len(packed)):
        chunks = packed if size > 1 else packed[:200]
        reader = BodyReader(encoding.lower())
        for at in range(0, len(chunks), size):
            reader.feed(chunks[at : at + size])
        if size > 1:
            assert reader.whole() == body
    reader = BodyReader(encoding.lower())
    reader.feed(packed[:-1])
    with pytest.raises(ApiError, match="not whole"):
        reader.whole()
    for wrong in (packed + b"more", b"\x00\xff" * 50, b"{}" * 50):
        with pytest.raises(ApiError, match="not whole, or not compressed") as error:
            read(encoding.lower(), wrong)
        assert error.value.status == 400


@pytest.mark.parametrize(("encoding", "pack"), PACKED.values(), ids=PACKED)
async def test_a_body_that_swells_is_refused_before_it_is_large(
    encoding: str, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is inflated on a thread, in steps, and no further than to the bound."""
    bomb = pack(b'{"prompt": "' + b"x" * (4 * MAX_BODY_BYTES))
    sizes: list[int] = []
    inflater = request_bodies._INFLATERS[encoding.lower()]
    assert inflater is not None
    before = inflater.parts

    def parts(self: Any, data: bytes) -> Iterator[bytes]:
        for part in before(self, data):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(inflater, "parts", parts)
    threads = watched_threads(monkeypatch)
    async with running_fake_cluster("abc") as fakes:
        address = fakes.gateway.http_address
        refused = await call(address, "/v1/completions", bomb, {**JSON, "Content-Encoding": encoding})
        assert (refused.status, refused.error["code"]) == (413, "request_too_large")
        assert max(sizes) <= 2 * request_bodies.STEP_BYTES
        assert sum(sizes) <= MAX_BODY_BYTES + 2 * request_bodies.STEP_BYTES
        assert not any(threads), "bytes were inflated on the event loop"
        assert (await call(address, "/v1/completions", TEXT)).status == 200
        await fakes.settled()


def watched_threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Says of each piece of a compressed body whether it was read on the main thread."""
    import threading

    found: list[bool] = []
    before = BodyReader.feed

    def feed(reader: BodyReader, data: bytes) -> None:
        if reader.packed:
            found.append(threading.current_thread() is threading.main_thread())
        before(reader, data)

    monkeypatch.setattr(BodyReader, "feed", feed)
    return found


def test_a_body_of_too_many_items_is_refused() -> None:
    with pytest.raises(ApiError, match="items") as error:
        read("", *[b"{}," * (2**20 // 3)] * (MAX_BODY_BYTES // 2**20))
    assert error.value.status == 413
