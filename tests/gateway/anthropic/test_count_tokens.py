"""count_tokens of a random conversation equals the usage of a request with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pillion.gateway.anthropic.signatures import signature_of
from tests.gateway.tokens.test_tool_templates import QWEN
from tests.support import fake_components
from tests.support.examples import examples
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call

MAX_MARKS = 4
TEXTS = st.text(st.sampled_from('aé 😀\n"<{'), max_size=12)
TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}, optional={"citations": st.none()})
HEADERS = st.integers(0, 9).map(lambda n: f"x-anthropic-billing-header: cch={n};")
SYSTEM = (
    TEXTS
    | st.tuples(HEADERS, TEXTS).map("\n".join)
    | st.lists(TEXT | st.fixed_dictionaries({"type": st.just("text"), "text": HEADERS}), max_size=3)
)
TOOL = st.fixed_dictionaries(
    {
        "input_schema": st.sampled_from(
            [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "string"}}}]
        )
    },
    optional={
        "description": TEXTS,
        "strict": st.booleans(),
        "defer_loading": st.booleans(),
        "input_examples": st.just([{}]),
    },
)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}
PARTS = TEXT | st.just(IMAGE) | st.fixed_dictionaries({"type": st.just("tool_reference"), "tool_name": st.just("f0")})
RESULT = st.fixed_dictionaries(
    {"type": st.just("tool_result")},
    optional={"content": TEXTS | st.lists(PARTS, max_size=3), "is_error": st.booleans()},
)
THOUGHTS = st.fixed_dictionaries(
    {"type": st.just("thinking"), "thinking": TEXTS}, optional={"signature": TEXTS | TEXTS.map(signature_of)}
) | st.just({"type": "redacted_thinking", "data": "x"})
INPUTS = st.dictionaries(st.sampled_from("ab"), TEXTS | st.integers() | st.just([None, 0.5]))
TURNS = st.tuples(
    st.lists(TEXT, max_size=2), st.lists(THOUGHTS | TEXT, max_size=3), st.lists(st.tuples(INPUTS, RESULT), max_size=2)
)
MORE: dict[str, st.SearchStrategy[Any]] = {
    "system": SYSTEM,
    "thinking": st.sampled_from(
        [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}]
    ),
    "tool_choice": st.sampled_from(
        [{"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": True}]
    ),
    "output_config": st.sampled_from([{"effort": "low"}, {"task_budget": {"type": "tokens", "total": 9000}}]),
    "context_management": st.just({"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "betas": st.just(["context-management-2025-06-27"]),
    "cache_control": st.just({"type": "ephemeral"}),
    "speed": st.just("standard"),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Return a body valid for both pages, with breakpoints at some allowed places."""
    tools = [{"name": f"f{n}", **tool} for n, tool in enumerate(draw(st.lists(TOOL, max_size=3)))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(TEXTS)}]
    for number, (asked, said, called) in enumerate(draw(st.lists(TURNS, max_size=3))):
        uses = [
            {"type": "tool_use", "id": f"c{number}{n}", "name": "f0", "input": given}
            for n, (given, _) in enumerate(called)
        ]
        results = [{**result, "tool_use_id": f"c{number}{n}"} for n, (_, result) in enumerate(called)]
        # The last user message must not be empty.
        told = results + asked or [{"type": "text", "text": "go on"}]
        messages += [{"role": "assistant", "content": said + uses}, {"role": "user", "content": told}]
    if draw(st.booleans()):
        messages.append({"role": "assistant", "content": draw(TEXTS.filter(str.strip))})
    body = {"model": "toy", "messages": messages, "tools": tools, **draw(st.fixed_dictionaries({}, optional=MORE))}
    if not tools:
        body.pop("tool_choice", None)
    lists = [tools, *(one["content"] for one in messages), body.get("system")]
    places = [
        one for listed in lists if isinstance(listed, list) for one in listed if "thinking" not in one.get("type", "")
    ]
    least = MAX_MARKS - ("cache_control" in body)
    for place in draw(st.permutations(places))[: draw(st.integers(0, least))]:
        place["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_components, "MAX_LEN", 65_536)
        async with running_fake_cluster("a", template=QWEN, max_inflight_requests=1024) as running:
            yield running


@pytest.mark.asyncio(loop_scope="module")
@given(body=bodies())
@settings(max_examples=examples(60), suppress_health_check=[*HealthCheck])
async def test_a_request_uses_the_counted_tokens(fakes: FakeCluster, body: dict[str, Any]) -> None:
    count = await call(fakes.gateway.http_address, "/v1/messages/count_tokens", body)
    made = await call(fakes.gateway.http_address, "/v1/messages", {**body, "max_tokens": 2000})
    assert (count.status, made.status) == (200, 200), (count.body, made.body)
    usage = made.json["usage"]
    found = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert count.json["input_tokens"] == usage["input_tokens"] + found
    assert count.headers.get("x-pillion-ignored") == made.headers.get("x-pillion-ignored")
