"""Gateway flags that make it compatible with other servers: keys, names, a path prefix, template variables."""

from __future__ import annotations

import json

import pytest

from pillion.gateway.http_api.public_url import public_url
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

MESSAGES = [{"role": "user", "content": "x"}]
MOOD = "{% for message in messages %}{{ message.content }}{% endfor %}{{ mood }}"


async def test_a_plain_key_grants_no_operator_access() -> None:
    async with running_fake_cluster(api_key=("token-abc123", "other")) as fakes:
        address = fakes.gateway.http_address
        assert (await call(address, "/v1/models")).status == 401
        for headers in ({"Authorization": "Bearer token-abc123"}, {"x-api-key": "other"}):
            assert (await call(address, "/v1/models", headers=headers)).status == 200
        assert not fakes.gateway.gateway.tenant_of("Bearer other").operator


async def test_default_template_variables() -> None:
    async with running_fake_cluster(template=MOOD, default_chat_template_kwargs='{"mood": "calm"}') as fakes:
        address = fakes.gateway.http_address

        async def tokens(**more: object) -> int:
            reply = await call(address, "/tokenize", {"messages": MESSAGES, **more})
            return int(reply.json["count"])

        assert await tokens() == len("xcalm")
        assert await tokens(chat_template_kwargs={"mood": "wild!"}) == len("xwild!")
        assert await tokens(chat_template_kwargs={"other": 1}) == len("xcalm")
        body = {"model": "toy", "messages": MESSAGES, "max_tokens": 2}
        assert (await call(address, "/v1/messages/count_tokens", body)).json == {"input_tokens": len("xcalm")}
        asked = {
            "/v1/chat/completions": (body, "prompt_tokens"),
            "/v1/messages": (body, "input_tokens"),
            "/v1/responses": ({"model": "toy", "input": "x", "max_output_tokens": 16}, "input_tokens"),
        }
        for path, (sent, name) in asked.items():
            reply = await call(address, path, sent)
            assert reply.json["usage"][name] == len("xcalm"), reply.body
        stream = fakes.client.chat(MESSAGES, max_tokens=2)
        usage = [delta.usage async for delta in stream if delta.usage is not None]
        assert usage[-1].prompt_tokens == len("xcalm")


async def test_a_proxys_root_path_is_served() -> None:
    async with running_fake_cluster(root_path="/models/small", ui=True, allowed_hosts=("llm.example.org",)) as fakes:
        address = fakes.gateway.http_address
        for path in ("/health", "/models/small/health", "/models/small/v1/models", "/models/small/docs"):
            assert (await call(address, path)).status == 200
        assert (await call(address, "/models/smaller/health")).status == 404
        document = (await call(address, "/openapi.json")).json
        assert document["servers"] == [{"url": "/models/small"}]
        start = await call(address, "/models/small/")
        assert start.headers["location"] == "ui"
        said = {"Host": "llm.example.org", "X-Forwarded-Proto": "https"}
        page = (await call(address, "/docs", headers=said)).body.decode()
        assert "curl https://llm.example.org/models/small/v1/models" in page
        assert "href='openapi.json'" in page
        assert "127.0.0.1:8000" not in page


@pytest.mark.parametrize("host", ["", "a b", "x<script>", "$(id)", "a'b", "a;b", "[::1", "x:port", "a" * 300])
def test_an_invalid_host_header_is_not_used_in_the_public_url(host: str) -> None:
    assert public_url(host, "", encrypted=False) == "http://127.0.0.1:8000"


def test_valid_host_headers_are_used_in_the_public_url() -> None:
    shown = {host: public_url(host, "/a", encrypted=True) for host in ("x.org", "x.org:81", "[::1]:80", "10.0.0.1")}
    assert json.dumps(shown) == json.dumps({host: f"https://{host}/a" for host in shown})
