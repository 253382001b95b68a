"""Request bodies that are compressed, too large, or full of unused images."""

from __future__ import annotations

import copy
import gzip
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.gateway.http_api import request_bodies
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.request_bodies import MAX_BODY_BYTES, BodyReader, ImageCutter
from tests.support.examples import examples
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
    """Yield the body in these chunks."""
    reader = BodyReader(encoding)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.whole()


@pytest.mark.parametrize(("encoding", "pack"), PACKED.values(), ids=PACKED)
def test_compressed_bodies_may_arrive_in_chunks_of_any_size(encoding: str, pack: Callable[[bytes], bytes]) -> None:
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
    with pytest.raises(ApiError, match="truncated"):
        reader.whole()
    for wrong in (packed + b"more", b"\x00\xff" * 50, b"{}" * 50):
        with pytest.raises(ApiError, match="truncated, or not compressed") as error:
            read(encoding.lower(), wrong)
        assert error.value.status == 400


@pytest.mark.parametrize(("encoding", "pack"), PACKED.values(), ids=PACKED)
async def test_a_decompression_bomb_is_refused_early(
    encoding: str, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inflated on a thread, in steps, no further than the limit."""
    bomb = pack(b'{"prompt": "' + b"x" * (4 * MAX_BODY_BYTES))
    sizes: list[int] = []
    before = ImageCutter.feed

    def feed(cutter: ImageCutter, data: bytes) -> None:
        sizes.append(len(data))
        before(cutter, data)

    monkeypatch.setattr(ImageCutter, "feed", feed)
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
    """Record for each piece of a compressed body whether it was read on the main thread."""
    import threading

    found: list[bool] = []
    before = BodyReader.feed

    def feed(reader: BodyReader, data: bytes) -> None:
        if reader.compressed:
            found.append(threading.current_thread() is threading.main_thread())
        before(reader, data)

    monkeypatch.setattr(BodyReader, "feed", feed)
    return found


def test_a_body_of_too_many_items_is_refused() -> None:
    with pytest.raises(ApiError, match="items") as error:
        read("", *[b"{}," * (2**20 // 3)] * (MAX_BODY_BYTES // 2**20))
    assert error.value.status == 413


PNG = "iVBORw0KGgo/" * 40
# Image-like strings that the model does read.
URL = f"data:image/png;base64,{PNG}"
SEEN = (
    URL,
    json.dumps({"image_url": URL}),
    json.dumps({"source": {"type": "base64", "data": PNG}}),
    PNG,
    "",
    'a\\"b\\',
)
MARK = "an image"


def image_parts() -> st.SearchStrategy[Any]:
    """Draw content parts with images that no model reads; each image is MARK."""
    kinds = st.sampled_from(["png", "jpeg", "svg+xml"])
    url = kinds.map(lambda kind: f"data:image/{kind};base64,{MARK}")
    source = st.permutations([("type", "base64"), ("media_type", "image/png"), ("data", MARK), ("extra", None)]).map(
        dict
    )
    return st.one_of(
        url.map(lambda one: {"type": "image_url", "image_url": {"detail": "high", "url": one}}),
        url.map(lambda one: {"image_url": one, "type": "input_image"}),
        source.map(lambda one: {"type": "image", "source": one}),
    )


def seen_parts() -> st.SearchStrategy[Any]:
    """Draw parts with text, future model input, or other files."""
    text = st.sampled_from(SEEN)
    return st.one_of(
        text.map(lambda one: {"type": "text", "text": one}),
        text.map(lambda one: {"type": "tool_use", "id": "1", "name": "f", "input": {"image_url": one, "data": one}}),
        text.map(
            lambda one: {
                "type": "tool_use",
                "input": {"content": [{"image_url": {"url": one}, "source": {"type": "base64", "data": one}}]},
            }
        ),
        text.map(lambda one: {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": one}}),
        text.map(lambda one: {"source": {"type": "base64", "media_type": "application/pdf", "data": one}}),
        text.map(
            lambda one: {"source": {"data": None, "type": "base64", one: "media_type", "media_type": "image/png"}}
        ),
        st.just({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
    )


def bodies() -> st.SearchStrategy[Any]:
    """Draw chat bodies, with images as MARK."""
    part = st.one_of(image_parts(), seen_parts())
    result = st.lists(part, max_size=3).map(lambda parts: {"type": "tool_result", "tool_use_id": "1", "content": parts})
    result = st.one_of(part, result.filter(lambda one: all("input" not in part for part in one["content"])))
    text = st.sampled_from(SEEN)
    message = st.fixed_dictionaries(
        {"role": st.just("user"), "content": st.one_of(text, st.lists(result, max_size=4))},
        optional={
            "tool_calls": text.map(
                lambda one: [{"function": {"name": "f", "arguments": one}, "image_url": {"url": one}}]
            ),
            "images": st.lists(image_parts().filter(lambda one: "source" not in one), max_size=2),
            "image_url": text,
        },
    )
    item = st.fixed_dictionaries(
        {},
        optional={
            "content": st.lists(part.filter(lambda one: "source" not in one), max_size=3),
            "output": st.one_of(text, st.lists(part.filter(lambda one: "source" not in one), max_size=3)),
            "arguments": text,
            "input": text,
        },
    )
    return st.fixed_dictionaries(
        {"messages": st.lists(message, max_size=4)},
        optional={
            "tools": text.map(lambda one: [{"parameters": {"image_url": {"url": one}}, "image_url": one}]),
            "input": st.lists(item, max_size=3),
            "prompt": text,
            "image_url": text,
            "source": st.just({"type": "base64", "media_type": "image/png", "data": PNG}),
        },
    )


@given(body=bodies(), data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_images_are_left_out_and_nothing_else(body: Any, data: st.DataObject) -> None:
    """A body with images, in chunks of any sizes, parses as the body without them."""
    plain = json.dumps(
        body,
        ensure_ascii=data.draw(st.booleans()),
        separators=data.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", " :  ")])),
    )
    escaped = data.draw(st.booleans())
    sent = plain.replace(MARK, PNG.replace("/", "\\/") if escaped else PNG).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    before, request_bodies.SMALL_BYTES = request_bodies.SMALL_BYTES, 0
    try:
        cutter = ImageCutter()
        for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            cutter.feed(sent[begin:end])
    finally:
        request_bodies.SMALL_BYTES = before
    assert json.loads(bytes(cutter.kept)) == json.loads(plain.replace(MARK, ""))


@given(
    st.lists(
        st.sampled_from([*'{}[]",:\\ ', *('"image_url"', '"data"', '"source"', '"messages"', "data:image/png;base64,")])
    )
)
@settings(max_examples=examples(300), deadline=None)
def test_invalid_json_does_not_break_the_parser(pieces: list[str]) -> None:
    cutter, raw = ImageCutter(), "".join(pieces).encode()
    before, request_bodies.SMALL_BYTES = request_bodies.SMALL_BYTES, 0
    try:
        for at in range(len(raw)):
            cutter.feed(raw[at : at + 1])
    finally:
        request_bodies.SMALL_BYTES = before
    assert len(cutter.kept) <= len(raw)


async def test_twelve_screenshots_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each API, in tool results; their total exceeds the body limit."""
    shot = PNG * (MAX_BODY_BYTES // 11 // len(PNG))
    result = [{"type": "text", "text": "Here."}]
    chat = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shot}"}}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": shot}}
    item = {"type": "input_image", "image_url": f"data:image/png;base64,{shot}"}
    ask, use = {"role": "user", "content": "look"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {
            "messages": [
                ask,
                {"role": "assistant", "content": None, "tool_calls": [made]},
                {"role": "tool", "tool_call_id": "1", "content": [*result, *[chat] * 12]},
            ]
        },
        "/v1/messages": {
            "max_tokens": 5,
            "messages": [
                ask,
                {"role": "assistant", "content": [use]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": [*result, *[block] * 12]}],
                },
            ],
        },
        "/v1/responses": {
            "input": [
                ask,
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [{"type": "input_text", "text": "Here."}, *[item] * 12],
                },
            ]
        },
    }
    monkeypatch.setattr("tests.support.fake_components.MAX_LEN", 4096)
    async with running_fake_cluster("abc") as fakes:
        for path, body in bodies.items():
            raw = json.dumps(body).encode()
            assert len(raw) > MAX_BODY_BYTES
            reply = await call(fakes.gateway.http_address, path, raw)
            small = json.dumps(copy.deepcopy(body)).replace(shot, "AAAA")
            same = await call(fakes.gateway.http_address, path, json.loads(small))
            assert reply.status == same.status, (path, reply.body, same.body)
            if reply.status == 200:
                first, second = fakes.decode.submits[-2:]
                assert first.token_ids == second.token_ids
            else:
                # This API accepts no images in tool results, however small.
                assert (path, reply.error) == ("/v1/chat/completions", same.error)
        await fakes.settled()
