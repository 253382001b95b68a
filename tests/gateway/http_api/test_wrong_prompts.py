"""Errors of a prompt name the field as the client spelled it, over HTTP, for any mutation."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
LONG = "x" * 300


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes():
    async with running_fake_cluster("abc", max_inflight_requests=1024) as running:
        yield running


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETE, {"prompt": ""}, "prompt"),
    (COMPLETE, {"prompt": []}, "prompt"),
    (COMPLETE, {"prompt": [1, -2]}, "prompt[1]"),
    (COMPLETE, {"prompt": [1, 2, 259]}, "prompt[2]"),
    (COMPLETE, {"prompt": [1, 2**62]}, "prompt[1]"),
    (COMPLETE, {"prompt": [1, 2**70]}, "prompt[1]"),
    (COMPLETE, {"prompt": [1, 1.5]}, "prompt[1]"),
    (COMPLETE, {"prompt": [1, None]}, "prompt[1]"),
    (COMPLETE, {"prompt": [1, "x"]}, "prompt[1]"),
    (COMPLETE, {"prompt": ["x", 1]}, "prompt[1]"),
    (COMPLETE, {"prompt": ["x", ""]}, "prompt[1]"),
    (COMPLETE, {"prompt": ["x", LONG]}, "prompt[1]"),
    (COMPLETE, {"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
    (COMPLETE, {"prompt": [[1], [2, 0.5]]}, "prompt[1][1]"),
    (COMPLETE, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETE, {"prompt": [[1], [1] * 256]}, "prompt[1]"),
    (COMPLETE, {"prompt": [[1], [1] * 257]}, "prompt[1]"),
    (COMPLETE, {"prompt": [[1], "x"]}, "prompt[1]"),
    (COMPLETE, {"prompt": [1] * 256}, "prompt"),
    (COMPLETE, {"prompt": [1, 259], "echo": True}, "prompt[1]"),
    (COMPLETE, {"prompt": ["x"] * 40 + [LONG]}, "prompt[40]"),
    (COMPLETE, {"prompt": ["x", LONG], "stream": True}, "prompt[1]"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [USER, {"role": "a b", "content": ""}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/tokenize", {"prompt": ""}, "prompt"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"prompt": LONG, "add_special_tokens": False}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [259]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, 2.5]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1] * 257}, "tokens"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: str(value)[:40])
async def test_errors_name_the_invalid_item(fakes: FakeCluster, path: str, body: dict[str, Any], param: str) -> None:
    reply = await call(fakes.gateway.http_address, path, body)
    if body.get("stream") and reply.status == 200:
        assert json.loads(reply.body.rpartition(b"data: ")[2])["error"]["param"] == param
        return
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    begin = "This model's " if reply.error["code"] == "context_length_exceeded" else f"{param}: "
    assert reply.error["message"].startswith(begin)


NUMBERS = st.integers(-2, 262) | st.sampled_from([2**31, 2**32, 2**63, -(2**63) - 1, 10**30, 0.5, 1e300, 1.0])
ODD = NUMBERS | st.none() | st.booleans() | st.text(max_size=3) | st.just(LONG)
PROMPTS = (
    ODD | st.lists(ODD, max_size=4) | st.lists(NUMBERS, max_size=4) | st.lists(st.lists(ODD, max_size=3), max_size=3)
)
CONTENT = ODD | st.lists(st.fixed_dictionaries({}, optional={"type": st.just("text") | ODD, "text": ODD}), max_size=3)
TALKS = ODD | st.lists(
    ODD | st.fixed_dictionaries({}, optional={"role": st.just("user") | ODD, "content": CONTENT}), max_size=3
)
MORE = {
    "max_tokens": NUMBERS,
    "n": NUMBERS,
    "stop": PROMPTS,
    "stop_token_ids": PROMPTS,
    "logit_bias": st.dictionaries(st.text(max_size=3) | NUMBERS.map(str), ODD, max_size=3),
    "echo": ODD,
    "stream": ODD,
    "temperature": ODD,
}
BODIES = st.one_of(
    st.tuples(st.just(COMPLETE), st.fixed_dictionaries({"prompt": PROMPTS}, optional=MORE)),
    st.tuples(st.just(CHAT), st.fixed_dictionaries({"messages": TALKS}, optional=MORE)),
    st.tuples(
        st.just("/tokenize"),
        st.fixed_dictionaries({}, optional={"prompt": ODD, "messages": TALKS, "add_special_tokens": ODD}),
    ),
    st.tuples(st.just("/detokenize"), st.fixed_dictionaries({}, optional={"tokens": PROMPTS})),
)


@pytest.mark.asyncio(loop_scope="module")
@given(BODIES)
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_mutated_bodies_are_served_or_refused_by_field(
    fakes: FakeCluster, asked: tuple[str, dict[str, Any]]
) -> None:
    path, body = asked
    reply = await call(fakes.gateway.http_address, path, body)
    assert reply.status in (200, 400), (body, reply.body)
    if reply.status == 400:
        name = reply.error["param"]
        assert name, (body, reply.body)
        assert name.split("[")[0].split(".")[0] in {*body, "prompt", "messages", "tokens"}, (body, name)
