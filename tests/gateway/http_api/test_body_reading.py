"""Bodies that do not match their types: values converted, fields ignored and named, client errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Raw

from pillion.gateway.http_api.body_reading import (
    MAX_IGNORED_HEADER_BYTES,
    MAX_IGNORED_NAME_CHARS,
    MAX_IGNORED_NAMES,
    BodyReading,
    is_one_edit,
    parse,
    replace_unpaired_surrogates,
    with_reading,
)
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.json_objects import OTHER, JsonObject
from pillion.gateway.http_api.openai_fields import Int
from pillion.gateway.request.validation import MAX_STRINGS


class LeafBody(msgspec.Struct, tag_field="type", tag="leaf", forbid_unknown_fields=True):
    size: Int = 0


class TwigBody(msgspec.Struct, tag_field="type", tag="twig", forbid_unknown_fields=True):
    leaves: list[LeafBody] | None = None


class OtherBody(msgspec.Struct, tag_field="type", tag=OTHER, forbid_unknown_fields=True):
    sent_type: str = ""
    text: str | None = None


class BarkBody(msgspec.Struct, forbid_unknown_fields=True):
    colour: Literal["brown", "white"] = "brown"


class TreeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    messages: list[LeafBody | TwigBody | OtherBody]
    temperature: float = 1.0
    max_tokens: Int = 5
    bark: BarkBody | str = ""
    ages: list[Int] = []
    plain: list[LeafBody] | str = ""
    tree_schema: JsonObject = Raw()


def read(body: Any, *, strict: bool = False) -> tuple[TreeBody, str]:
    reading = BodyReading(strict)
    sent = body if isinstance(body, bytes) else json.dumps({"messages": [], **body}).encode()
    return with_reading(reading, parse, sent, TreeBody), reading.ignored


@pytest.mark.parametrize(
    ("body", "made", "ignored"),
    [
        ({"max_tokens": 4.0, "ages": [1, 2.0]}, {"max_tokens": 4, "ages": [1, 2]}, ""),
        ({"max_tokens": 0.0, "temperature": 4}, {"max_tokens": 0, "temperature": 4.0}, ""),
        ({"max_tokens": None, "bark": None, "foreign": None, "tree_schema": None}, {}, ""),
        ({"foreign": [1], "top_a": 5}, {}, "foreign, top_a"),
        ({"bark": {"colour": "white", "x": {"y": None}, "z": None}}, {"bark": BarkBody("white")}, "bark.x"),
        ({"bark": {"colour": None}}, {"bark": BarkBody()}, ""),
        ({"tree_schema": {"a": None, "b": 4.0}, "x": 1}, {}, "x"),
        ({"plain": [{"size": 1.0, "x": 1}, {"type": "leaf", "x": 2}]}, {"plain": [LeafBody(1), LeafBody()]}, "plain.x"),
        (
            {"messages": [{"type": "twig", "leaves": [{"type": "leaf", "size": 3.0, "x": 1}], "y": 1}]},
            {"messages": [TwigBody([LeafBody(3)])]},
            "messages.leaves.x, messages.y",
        ),
        (
            {"messages": [{"type": "bird", "text": "tweet", "wings": 2}, {"text": None}]},
            {"messages": [OtherBody("bird", "tweet"), OtherBody("")]},
            "",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
def test_tolerable_mistakes_in_a_body_are_repaired(body: dict[str, Any], made: dict[str, Any], ignored: str) -> None:
    tree, named = read(body)
    expected = TreeBody(**{"messages": [], **made})
    tree.tree_schema, expected.tree_schema = Raw(), Raw()
    assert (tree, named) == (expected, ignored)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"max_token": 5}, "max_token", "unknown_parameter"),
        ({"temprature": 5}, "temprature", "unknown_parameter"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"max_tokens": 4.5, "x": 1}, "max_tokens", "invalid_type"),
        ({"max_tokens": "4", "x": 1}, "max_tokens", "invalid_type"),
        ({"max_tokens": True, "x": None}, "max_tokens", "invalid_type"),
        ({"ages": [1, 2.5]}, "ages[1]", "invalid_type"),
        ({"plain": [{"type": "leaf"}, {"size": "s", "x": 1}]}, "plain[1].size", "invalid_type"),
        ({"plain": [{"x": 1}, 5]}, "plain[1]", "invalid_type"),
        ({"bark": {"colour": "red", "x": 1}}, "bark.colour", "invalid_type"),
        (b"[1]", None, "invalid_type"),
        (b'{"messages": [], "x": 1, "y": }', None, "invalid_json"),
        (b'{"messages": [], "x\xff": 1}', None, "invalid_json"),
        (b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "invalid_json"),
        (b'{"messages": [], "max_tokens": 1' + b"0" * 6000 + b'.0, "x": 1}', "max_tokens", "invalid_type"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_invalid_values_are_refused_with_their_field(body: Any, param: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_a_misspelled_field_gets_a_suggestion() -> None:
    with pytest.raises(ApiError, match=r"temprature: did you mean temperature\?"):
        read({"temprature": 5})
    assert read({"bar": 5, "ag3s": 1})[1] == "ag3s, bar"


@pytest.mark.parametrize("body", [{"top_a": 1}, {"bark": {"x": 1}}, {"messages": [{"type": "leaf", "x": 1}]}])
def test_strict_fields_are_refused_at_any_depth(body: dict[str, Any]) -> None:
    assert read(body)[1]
    with pytest.raises(ApiError) as caught:
        read(body, strict=True)
    assert caught.value.code == "unknown_parameter"
    assert read({"max_tokens": None, "ages": [1.0]}, strict=True)[0].ages == [1]


@pytest.mark.parametrize(
    ("name", "other", "near"),
    [
        ("temprature", "temperature", True),
        ("temperatture", "temperature", True),
        ("temperatuse", "temperature", True),
        ("tempreature", "temperature", True),
        ("temperatur", "temperature", True),
        ("xtemperature", "temperature", True),
        ("temperature", "temperature", False),
        ("emperatur", "temperature", False),
        ("min_tokens", "max_tokens", False),
        ("", "a", True),
        ("", "", False),
    ],
)
def test_names_one_edit_apart_are_recognized(name: str, other: str, near: bool) -> None:
    assert (is_one_edit(name, other), is_one_edit(other, name)) == (near, near)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (rb'"\ud800"', "\ufffd"),
        (rb'"\udc00x\uD83D\uDE00"', "\ufffdx\U0001f600"),
        (rb'"\ud800\ud83d\ude00\ud83d"', "\ufffd\U0001f600\ufffd"),
        (rb'"\ude00\ud83d"', "\ufffd\ufffd"),
        (rb'"\\ud800 \\\ud800"', "\\ud800 \\\ufffd"),
        (rb'"\\ud83d\ude00"', "\\ud83d\ufffd"),
        (rb'"\ud7ff\u00e4"', "\ud7ffä"),
    ],
    ids=str,
)
def test_a_lone_surrogate_is_replaced(sent: bytes, text: str) -> None:
    assert msgspec.json.decode(replace_unpaired_surrogates(sent)) == text
    tree, _ = read(b'{"messages": [], "tree_schema": {"a": ' + sent + b'}, "bark": ' + sent + b"}")
    assert (tree.bark, msgspec.json.decode(tree.tree_schema)) == (text, {"a": text})


def test_the_header_is_bounded_and_printable() -> None:
    names = {f"f{n:03}": 1 for n in range(MAX_IGNORED_NAMES + 1)}
    _, ignored = read(names)
    assert (ignored[-5:], len(ignored.split(", "))) == (", ...", MAX_IGNORED_NAMES + 1)
    _, ignored = read({"x" * 60 + str(n): 1 for n in range(50)})
    assert MAX_IGNORED_HEADER_BYTES - 70 < len(ignored) <= MAX_IGNORED_HEADER_BYTES + len(", ...")
    _, ignored = read({"x" * 10**6: 1, "a\r\nSet-Cookie: b": 1, "ä,\x00": {}})
    assert ignored == f"???, a??Set-Cookie:?b, {'x' * MAX_IGNORED_NAME_CHARS}..."


def test_ignored_names_are_bounded_before_they_are_built() -> None:
    for body in (
        b'{"messages": [' + b"{}," * 2**19 + b"{}]}",
        b'{"messages": [' + b"1," * 2**20 + b"1]}",
        json.dumps({"messages": [], **{f"name{n}": 1 for n in range(MAX_STRINGS)}}).encode(),
    ):
        with pytest.raises(ApiError) as caught:
            read(body)
        assert str(caught.value.param).startswith("messages")


def test_json_that_is_passed_on_is_unchanged() -> None:
    tree, named = read({"tree_schema": {"a": None, "b": 4.0}, "x": 1, "bark": {"y": 1}})
    assert (json.loads(bytes(tree.tree_schema)), named) == ({"a": None, "b": 4.0}, "bark.y, x")
