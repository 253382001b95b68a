"""The real `anthropic` client over HTTP: messages, streams, tools, thinking, errors, keys."""

from __future__ import annotations

import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from pillion.errors import DeadlineExceeded, Internal, Overloaded, PermissionDenied, Unavailable
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.http_api.request_bodies import MAX_SENT_BYTES
from pillion.types import ChatMessage, FinishReason
from tests.support.fake_components import FakeCluster, running_fake_cluster
from tests.support.http import call
from tests.support.scripted import ScriptedGateway, called, ended, said, thought_said_and_called

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: Any = {"model": "toy", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
ANSWER = "Größe: 北京 12"
TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort }}"
)
KEY = "plk-" + "k" * 43


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    async with running_fake_cluster(ANSWER, max_inflight_requests=1024) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def templated() -> AsyncIterator[FakeCluster]:
    """Run a cluster with a template that describes tools briefly, for the toy model's short context."""
    async with running_fake_cluster(ANSWER, template=TEMPLATE) as running:
        yield running


@pytest.fixture
def scripted(fakes: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> ScriptedGateway:
    monkeypatch.setattr(fakes.gateway.gateway, "generate", fakes.gateway.gateway.generate)
    return ScriptedGateway(fakes)


def client_of(fakes: FakeCluster, **options: Any) -> anthropic.AsyncAnthropic:
    url = f"http://{fakes.gateway.http_address}"
    return anthropic.AsyncAnthropic(**{"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 60, **options})


MARK: Any = {"cache_control": {"type": "ephemeral"}}
TOOL: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}, **MARK}
IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
CALLED: Any = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **MARK}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}, **MARK},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE], "is_error": True}]},
]
SHAPES: list[dict[str, Any]] = [
    {"system": "x-anthropic-billing-header: cch=12345;\nBe brief."},
    {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be.", **MARK},
        ]
    },
    {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {"tools": [TOOL], "tool_choice": {"type": "none"}},
    {"tools": [TOOL], "messages": CALLED},
    {"messages": [*ASKED["messages"], {"role": "assistant", "content": "It is"}]},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    {"thinking": {"type": "disabled"}, "context_management": {"edits": []}},
    {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
        ]
    },
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:60])
async def test_count_tokens_equals_the_requests_usage(templated: FakeCluster, shape: dict[str, Any]) -> None:
    address, asked = templated.gateway.http_address, ASKED | {"max_tokens": 1} | shape
    counted = {name: value for name, value in asked.items() if name != "max_tokens"}
    count = await call(address, "/v1/messages/count_tokens", counted)
    made = await call(address, "/v1/messages", asked)
    assert (count.status, made.status) == (200, 200), (count.body, made.body)
    usage = made.json["usage"]
    found = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert count.json["input_tokens"] == usage["input_tokens"] + found
    assert count.headers.get("x-pillion-ignored") == made.headers.get("x-pillion-ignored")


async def test_a_message_equals_its_stream(fakes: FakeCluster) -> None:
    fakes.node.pinned = 2
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    async with client_of(fakes) as client:
        for more, text, reason in (
            ({}, ANSWER, "end_turn"),
            ({"stop_sequences": ["x", "北"]}, "Größe: ", "stop_sequence"),
            ({"max_tokens": 4}, "Grö", "max_tokens"),
        ):
            asked = {**ASKED, "system": system, **more}
            whole = await client.messages.create(**asked)
            assert [block.text for block in whole.content if block.type == "text"] == [text]
            assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", "toy", reason)
            assert whole.stop_sequence == ("北" if reason == "stop_sequence" else None)
            count = await client.messages.count_tokens(model="toy", messages=ASKED["messages"], system=system)
            assert whole.usage.cache_read_input_tokens == 8
            assert whole.usage.input_tokens == count.input_tokens - 8
            assert whole.id == whole._request_id.replace("req-", "msg_")
            async with client.messages.stream(**asked) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == text
                final = await stream.get_final_message()
            assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    fakes.node.pinned = 0
    await fakes.settled()


async def test_events_are_named_and_in_order(fakes: FakeCluster) -> None:
    raw = (await call(fakes.gateway.http_address, "/v1/messages", {**ASKED, "stream": True})).body.decode()
    events = [block.split("\n") for block in raw.split("\n\n")[:-1]]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert [json.loads(data.removeprefix("data: "))["type"] for _, data in events] == names


@pytest.mark.parametrize("together", [False, True])
async def test_thinking_text_and_calls_are_blocks(
    fakes: FakeCluster, scripted: ScriptedGateway, together: bool
) -> None:
    scripted.together = together
    scripted.script = thought_said_and_called("t1", "t2")
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
    ]
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    async with client_of(fakes) as client:
        whole = await client.messages.create(**ASKED, tools=tools, tool_choice={"type": "any"})
        async with client.messages.stream(**ASKED, tools=tools) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            got = [block.model_dump(exclude_none=True) for block in message.content]
            assert got == [{name: value for name, value in block.items() if value is not None} for block in blocks]
            # Omit null keys: clients validate answers and reject null for a list.
            assert "citations" not in message.content[1].model_fields_set
            assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", 9)
            assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (14, 16)
            assert message.usage.output_tokens_details.thinking_tokens == 4
        assert scripted.requests[0].tools.choice == "required"
        again = [*ASKED["messages"], {"role": "assistant", "content": whole.content}]
        again.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "12"}]})
        await client.messages.create(**{**ASKED, "messages": again})
        assert [message.role for message in scripted.requests[-1].messages] == ["user", "assistant", "tool"]
        assert scripted.requests[-1].messages[1].tool_calls[0].arguments == '{"city":"Rome"}'
        assert scripted.requests[-1].messages[1].reasoning == "Let me see."


async def test_hidden_thinking_is_restored_from_its_signature(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    scripted.script = [
        said(reasoning="Größe? "),
        said(reasoning="Let me see."),
        said("I look."),
        ended(FinishReason.STOP),
    ]
    hides: Any = {"extra_body": {"thinking": {"type": "adaptive", "display": "omitted"}}}
    async with client_of(fakes) as client:
        whole = await client.messages.create(**ASKED, **hides)
        async with client.messages.stream(**ASKED, **hides) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            hidden, text = (block.model_dump() for block in message.content)
            assert (hidden["type"], hidden["thinking"], text["text"]) == ("thinking", "", "I look.")
            assert "see" not in hidden["signature"]
            again = [*ASKED["messages"], {"role": "assistant", "content": message.content}, *ASKED["messages"]]
            await client.messages.create(**{**ASKED, "messages": again})
            assert scripted.requests[-1].messages[1] == ChatMessage(
                "assistant", "I look.", reasoning="Größe? Let me see."
            )


async def test_a_call_that_is_cut_short_keeps_its_text(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    scripted.script = [called(0, '{"city": "R', id="t", name="f"), ended(FinishReason.LENGTH)]
    async with client_of(fakes) as client:
        whole = await client.messages.create(**ASKED)
        assert (whole.content[0].input, whole.stop_reason) == ({"INVALID_JSON": '{"city": "R'}, "max_tokens")
        async with client.messages.stream(**ASKED) as stream:
            assert (await stream.get_final_message()).content[0].input == {}


async def test_an_empty_answer_has_no_blocks(fakes: FakeCluster, scripted: ScriptedGateway) -> None:
    scripted.script = [ended()]
    async with client_of(fakes) as client:
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
        assert whole.content == final.content == []
        assert whole.stop_reason == final.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("error", "status", "kind", "raised"),
    [
        (PermissionDenied("x"), 403, "permission_error", anthropic.PermissionDeniedError),
        (Overloaded("x", 1500), 429, "rate_limit_error", anthropic.RateLimitError),
        (Internal("x"), 500, "api_error", anthropic.InternalServerError),
        (Unavailable("x"), 529, "overloaded_error", anthropic.APIStatusError),
        (DeadlineExceeded("x"), 504, "timeout_error", anthropic.InternalServerError),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_errors_raise_the_anthropic_sdks_exceptions(
    fakes: FakeCluster, scripted: ScriptedGateway, error: Any, status: int, kind: str, raised: Any
) -> None:
    async with client_of(fakes) as client:
        scripted.script = [error]
        with pytest.raises(raised) as caught:
            await client.messages.create(**ASKED)
        body = caught.value.body
        told = {"type": kind, "message": "x. Please try again in 1.5s." if status == 429 else "x"}
        assert (caught.value.status_code, body["type"], body["error"]) == (status, "error", told)
        assert caught.value.request_id == body["request_id"]
        scripted.script = [said("a"), error]
        with pytest.raises(anthropic.APIStatusError) as late:
            async with client.messages.stream(**ASKED) as stream:
                await stream.until_done()
        assert late.value.body["error"] == told


async def test_a_forced_call_of_a_tool_that_a_server_runs_is_refused(fakes: FakeCluster) -> None:
    """Otherwise it is an ordinary call, and the model does not see that tool."""
    search, asked = {"type": "web_search_20250305", "name": "web_search"}, {"model": "toy", "max_tokens": 5}
    body = asked | {"messages": ASKED["messages"], "tools": [search]}
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        reply = await call(fakes.gateway.http_address, "/v1/messages", body | {"tool_choice": choice})
        assert (reply.status, "tool_choice" in reply.json["error"]["message"]) == (400, True)
    reply = await call(fakes.gateway.http_address, "/v1/messages", body | {"tool_choice": {"type": "auto"}})
    assert (reply.status, reply.headers["x-pillion-ignored"]) == (200, "tools.web_search_20250305")


async def test_errors_have_anthropics_form(fakes: FakeCluster) -> None:
    address = fakes.gateway.http_address
    image = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
    wrong: list[tuple[str, Any, dict[str, str], int, str, str]] = [
        (
            "/v1/messages",
            {**ASKED, "messages": [image]},
            {},
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        ("/v1/messages", {**ASKED, "max_tokens": -2}, {}, 400, "invalid_request_error", "max_tokens"),
        ("/v1/messages", {**ASKED, "stop_sequences": [""]}, {}, 400, "invalid_request_error", "stop_sequences[0]"),
        ("/v1/messages", {**ASKED, "model": "x"}, {}, 404, "not_found_error", "model"),
        ("/v1/messages/batches", ASKED, {}, 404, "not_found_error", ""),
        ("/v1/messages", ASKED, {"Content-Type": "text/plain"}, 415, "invalid_request_error", ""),
        ("/v1/messages", ASKED, {"X-Filler": "x" * 40_000}, 431, "invalid_request_error", ""),
        ("/v1/messages", None, {}, 405, "invalid_request_error", ""),
        ("/v1/messages", b"", {"Content-Length": str(MAX_SENT_BYTES + 1)}, 413, "request_too_large", ""),
    ]
    for path, body, headers, status, kind, field in wrong:
        reply = await call(address, path, body, {"anthropic-version": "2023-06-01", **headers})
        assert reply.status == status, reply.body
        assert set(reply.json) == {"type", "error", "request_id"}
        assert (reply.json["type"], reply.json["error"]["type"]) == ("error", kind)
        assert reply.json["error"]["message"].startswith(f"{field}: " if field else "")
        assert reply.headers["request-id"] == reply.headers["x-request-id"] == reply.json["request_id"]
    await fakes.settled()


async def test_keys_of_anthropics_clients_are_accepted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILLION_API_KEY", KEY)
    path = tmp_path / "keys.toml"
    path.write_text(f'[tenant.acme]\n[[key]]\ntenant = "acme"\nhash = "{hash_of(KEY)}"\n')
    async with running_fake_cluster("abc", api_keys=str(path)) as guarded:
        for options in ({"api_key": KEY}, {"api_key": None, "auth_token": KEY}):
            async with client_of(guarded, **options) as client:
                assert (await client.messages.create(**ASKED)).content[0].text == "abc"
        async with client_of(guarded, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**ASKED)
            assert caught.value.body["error"]["type"] == "authentication_error"
        address = guarded.gateway.http_address
        # Older clients send the key bare; accept that on every page.
        for page, body in (("/v1/messages", ASKED), ("/v1/completions", {"prompt": "x"}), ("/v1/models", None)):
            assert (await call(address, page, body, {"X-Api-Key": KEY})).status == 200
            assert (await call(address, page, body, {"X-Api-Key": "wrong"})).status == 401
            assert (await call(address, page, body)).status == 401
        await guarded.settled()
