"""Rewrites of histories lose no text, and do not mutate their input."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.formats.tool_formats import spelling
from pillion.gateway.tokens.template_worker import (
    REWRITES,
    History,
    contents_as_thoughts,
    null_contents,
    short_ids,
    spelled_calls,
)

SPELLED = [partial(spelled_calls, spelling=spelling(name)) for name in ("hermes", "granite", "lfm2", "qwen3_coder")]
EVERY = (contents_as_thoughts, null_contents, *REWRITES, *SPELLED)
IDS = st.sampled_from(["call_1", "call_2", "abcdefgh1", ""])


@st.composite
def histories(draw: st.DrawFn) -> History:
    words = iter(f"word{number}x" for number in range(1000))
    messages: list[dict[str, Any]] = []
    for role in draw(st.lists(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), max_size=8)):
        message: dict[str, Any] = {"role": role, "content": draw(st.sampled_from(["", next(words)]))}
        if role == "tool":
            message["tool_call_id"] = draw(IDS)
        if role == "assistant":
            if draw(st.booleans()):
                message["reasoning_content"] = next(words)
            made = [
                {"name": next(words), "arguments": {next(words): next(words)}} for _ in range(draw(st.integers(0, 3)))
            ]
            if made:
                message["tool_calls"] = [{"id": draw(IDS), "type": "function", "function": one} for one in made]
        messages.append(message)
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": next(words)}}]
    if draw(st.booleans()):
        tools[0]["function"]["parameters"] = {"required": [next(words)]}
    return History(messages, draw(st.sampled_from([None, tools])))


def words_of(value: Any) -> list[str]:
    return sorted(word for word in json.dumps(value).replace('"', " ").replace("\\", " ").split() if "word" in word)


@given(histories(), st.lists(st.sampled_from(EVERY), min_size=1, max_size=6))
def test_rewrites_lose_no_text(history: History, rewrites: list[Any]) -> None:
    before = copy.deepcopy(history)
    after = history
    for rewrite in rewrites:
        after = rewrite(after)
    assert history == before
    for word in words_of(list(before)):
        assert word.strip("n,:[]{}()=") in json.dumps(list(after)), word


@given(histories())
def test_ids_are_replaced_consistently(history: History) -> None:
    """Calls and results that shared an id still do."""

    def ids(messages: list[dict[str, Any]]) -> list[str]:
        results = [one.get("tool_call_id", "") for one in messages if one["role"] == "tool"]
        return [*results, *(call["id"] for one in messages for call in one.get("tool_calls", ()))]

    before, after = ids(history.messages), ids(short_ids(history).messages)
    assert all(len(one) == 9 and one.isalnum() for one in after)
    assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "é", "b": [1, null, true]}}\n</tool_call>'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": "é", "b": [1, null, true]}}]'),
        ("lfm2", '<|tool_call_start|>[f(a="é", b=[1, None, True])]<|tool_call_end|>'),
        ("none", '<tool_call>\n{"name": "f", "arguments": {"a": "é", "b": [1, null, true]}}\n</tool_call>'),
    ],
)
def test_calls_that_a_template_leaves_out_are_written_as_the_model_writes_them(name: str, text: str) -> None:
    function = {"name": "f", "arguments": {"a": "é", "b": [1, None, True]}}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": "So", "tool_calls": [call]}
    asked = History([message], None)
    assert spelled_calls(asked, spelling(name)).messages == [{"role": "assistant", "content": f"So\n{text}"}]
