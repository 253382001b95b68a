"""Error messages with the wording that clients match, at every API: OpenAI's, Anthropic's, gRPC's."""

from __future__ import annotations

import pathlib
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from pillion.errors import InvalidRequest
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.request.validation import too_long
from tests.support.fake_components import MAX_LEN, FakeCluster, running_fake_cluster
from tests.support.http import call
from tests.support.scripted import ScriptedGateway, called, ended, said

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = "x" * 3 * MAX_LEN
SAID: Any = [{"role": "user", "content": LONG}]
MOST = f"This model's maximum context length is {MAX_LEN} tokens"
LESS = "Please reduce the length of the messages."
IN_MESSAGES = rf"{MOST}\. However, your messages resulted in (\d+) tokens\. {LESS}"
IN_A_TEXT = rf"{MOST}, however you requested \d+ tokens \((\d+) in your prompt; 1 for the completion\)\. Please .*"
# Each API with the field that it names, and its wording.
TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"messages": SAID}, "messages", IN_MESSAGES),
    ("/v1/completions", {"prompt": LONG}, "prompt", IN_A_TEXT),
    ("/v1/completions", {"prompt": ["x", LONG]}, "prompt[1]", IN_A_TEXT),
    ("/v1/completions", {"prompt": [5] * MAX_LEN * 2}, "prompt", IN_A_TEXT),
    ("/v1/responses", {"input": LONG}, "input", IN_MESSAGES),
    ("/tokenize", {"messages": SAID}, "messages", IN_MESSAGES),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fakes() -> AsyncIterator[FakeCluster]:
    async with running_fake_cluster() as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "words"), TOO_LONG)
async def test_a_too_long_prompt_has_openais_wording(
    fakes: FakeCluster, path: str, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    reply = await call(fakes.gateway.http_address, path, body | ({"stream": stream} if path != "/tokenize" else {}))
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "invalid_request_error", param)
    assert reply.error["code"] == "context_length_exceeded"
    assert (found := re.fullmatch(words, reply.error["message"])), reply.error
    assert int(found[1]) >= MAX_LEN


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_too_long_prompt_has_anthropics_wording(fakes: FakeCluster, path: str) -> None:
    body = {"messages": SAID} | ({} if path.endswith("tokens") else {"max_tokens": 1})
    reply = await call(fakes.gateway.http_address, path, body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    # Claude Code parses both numbers.
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", reply.json["error"]["message"])
    assert found
    assert int(found[1]) > int(found[2]) == MAX_LEN - 1


async def test_a_too_long_prompt_has_the_same_wording_over_grpc(fakes: FakeCluster) -> None:
    with pytest.raises(InvalidRequest, match=f"messages: {IN_MESSAGES}") as failure:
        async for _ in fakes.client.chat(SAID):
            pass
    assert [one.field for one in failure.value.violations] == ["messages"]


async def test_a_partly_counted_prompt_is_reported_with_a_lower_bound(fakes: FakeCluster) -> None:
    endless = [{"role": "user", "content": "x" * 2**20}]
    reply = await call(fakes.gateway.http_address, "/v1/messages", {"messages": endless, "max_tokens": 1})
    found = re.fullmatch(r"prompt is too long: at least (\d+) tokens > \d+ maximum", reply.json["error"]["message"])
    assert found
    assert MAX_LEN <= int(found[1]) <= 2**20
    reply = await call(fakes.gateway.http_address, "/v1/chat/completions", {"messages": endless})
    assert f"{MOST}. However, your messages resulted in at least {found[1]} tokens" in reply.error["message"]
    # For text whose tokens were not all counted, the same wording with a lower bound.
    told = [
        ("/v1/chat/completions", {}, "messages", "messages"),
        ("/v1/responses", {}, "input", "messages"),
        ("/v1/completions", {}, "prompt", "prompt"),
    ]
    for path, more, field, what in told:
        over: Any = "x" * (2**22 + 1)
        over = over if field == "prompt" else [{"role": "user", "content": over}]
        reply = await call(fakes.gateway.http_address, path, {field: over, **more})
        assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", field)
        assert reply.error["message"].startswith("This model's maximum context length is exceeded.")
        assert f"Please reduce the length of the {what}." in reply.error["message"]


async def test_a_failed_responses_stream_reports_a_too_long_prompt(
    fakes: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes.gateway.gateway, "generate", fakes.gateway.gateway.generate)
    ScriptedGateway(fakes).script = [said("a"), too_long(70, "messages", 64)]
    reply = await call(fakes.gateway.http_address, "/v1/responses", {"input": "x", "stream": True})
    assert b'"type":"response.failed"' in reply.body
    assert b'"error":{"code":"context_length_exceeded","message":"This model\'s maximum context length' in reply.body


async def test_a_wrong_or_missing_key_has_the_expected_wording(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenant.a]\n[[key]]\ntenant = "a"\nhash = "{hash_of("plk-" + "k" * 43)}"\n')
    async with running_fake_cluster(api_keys=str(file)) as fakes:
        for sent in ({}, {"Authorization": "Bearer plk-no"}):
            reply = await call(fakes.gateway.http_address, "/v1/chat/completions", {"messages": SAID}, sent)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            # LiteLLM takes an error of this type for a bad request unless it has this wording.
            assert "Incorrect API key provided" in reply.error["message"]
            reply = await call(fakes.gateway.http_address, "/v1/messages", {"messages": SAID, "max_tokens": 1}, sent)
            assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
            assert "invalid x-api-key" in reply.json["error"]["message"]


async def test_anthropics_tool_runner_falls_back_without_threads(
    fakes: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "thread": {"type": "create"}}
    reply = await call(fakes.gateway.http_address, "/v1/messages", body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert reply.json["error"]["details"] == details
    monkeypatch.setattr(fakes.gateway.gateway, "generate", fakes.gateway.gateway.generate)
    scripted, asked = ScriptedGateway(fakes), []
    url = f"http://{fakes.gateway.http_address}"

    @anthropic.beta_async_tool
    async def look(place: str) -> str:
        """Looks at a place.

        Args:
            place: Where.
        """
        asked.append(place)
        scripted.script = [said("It is sunny."), ended()]
        return "sunny"

    scripted.script = [called(0, id="c1", name="look"), called(0, '{"place": "Rome"}'), ended()]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="toy", max_tokens=50, tools=[look], messages=[{"role": "user", "content": "hi"}]
        )
        last = await runner.until_done()
    assert (asked, last.content[0].text) == (["Rome"], "It is sunny.")
