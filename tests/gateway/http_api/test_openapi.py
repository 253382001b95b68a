"""The OpenAPI description matches the body parsers, field by field."""

from __future__ import annotations

import html
import json
import pathlib
import re
import shlex
from typing import Any

import jsonschema
import pytest
from msgspec.structs import fields
from openapi_spec_validator import validate
from starlette.routing import Route

from pillion.gateway.anthropic.anthropic_fields import CountTokensBody, MessagesBody
from pillion.gateway.anthropic.anthropic_requests import messages_request
from pillion.gateway.batches.batches_api import BatchBody
from pillion.gateway.http_api.body_reading import is_ignored, unsupported_fields
from pillion.gateway.http_api.docs_page import ADDRESS, page
from pillion.gateway.http_api.http_call import Endpoint, HttpCall
from pillion.gateway.http_api.http_errors import ApiError
from pillion.gateway.http_api.openai_fields import READ_AS, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pillion.gateway.http_api.openai_requests import chat_request, completion_request
from pillion.gateway.http_api.openapi import POLICY, describe
from pillion.gateway.responses.responses_fields import ResponsesBody
from pillion.gateway.responses.responses_requests import responses_request
from pillion.types import GenerateRequest
from tests.support.fake_components import running_fake_cluster
from tests.support.http import call

BODIES: list[Any] = [
    *(ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, MessagesBody, CountTokensBody, BatchBody),
    ResponsesBody,
]
MESSAGES = [{"role": "user", "content": "hi"}]
EXAMPLES: dict[str, Any] = {
    "stop": ["a", "b"],
    "stop_token_ids": [1],
    "logit_bias": {"5": 1.5},
    "metadata": {"team": "a"},
    "chat_template_kwargs": {"enable_thinking": False, "n": [1]},
    "chat_template_args": {"enable_thinking": False},
    "reasoning_effort": "low",
    "thinking": {"type": "disabled"},
    "json_schema": {"type": "object"},
    "truncation_side": "left",
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "prompt": [[1, 2], [3]],
}
ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "cache_control": {"type": "ephemeral"},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
}
RESPONSES: dict[str, Any] = {
    "include": ["message.output_text.logprobs"],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "stream_options": {},
    "truncation": "disabled",
    "prompt_cache_options": {},
}


async def handled(call: HttpCall) -> None:
    """Does it."""


DOCUMENT = describe([Route(f"/{kind.__name__}", Endpoint("POST", handled, None, kind)) for kind in BODIES])


def valid(body: dict[str, Any], kind: str) -> bool:
    schema = {"$ref": f"#/components/schemas/{kind}", "components": DOCUMENT["components"]}
    return not list(jsonschema.Draft202012Validator(schema).iter_errors(body))


@pytest.mark.parametrize("kind", BODIES)
def test_each_accepted_field_is_described(kind: type[Any]) -> None:
    """With the policy of its type: applied, ignored, or refused."""
    known: Any = READ_AS.get(kind, kind)
    described = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
    policies = {field.encode_name: "no effect" if is_ignored(field) else "carried out" for field in fields(known)}
    policies |= dict.fromkeys(unsupported_fields(known), "refused")
    assert {name: schema[POLICY] for name, schema in described.items()} == policies
    unexplained = [name for name, schema in described.items() if not schema["description"]]
    assert not unexplained, "a field without a meaning"


@pytest.mark.parametrize(
    ("kind", "read", "least", "examples"),
    [
        ("ChatBody", chat_request, {"messages": MESSAGES}, {}),
        ("CompletionBody", completion_request, {"prompt": "x"}, {}),
        ("MessagesBody", messages_request, {"messages": MESSAGES, "max_tokens": 2000}, ANTHROPIC),
        ("ResponsesBody", responses_request, {"input": MESSAGES}, RESPONSES),
    ],
)
def test_the_description_matches_the_parser(
    kind: str, read: Any, least: dict[str, Any], examples: dict[str, Any]
) -> None:
    """Each described field accepts a value of its type, and forbidden values are refused."""
    values: dict[str, Any] = {"boolean": True, "integer": 1, "number": 0.5, "string": "x"}
    for name, schema in DOCUMENT["components"]["schemas"][kind]["properties"].items():
        types = [one.get("type") for one in schema.get("anyOf", [schema])]
        value = schema["enum"][0] if "enum" in schema else (EXAMPLES | examples).get(name, values.get(str(types[0])))
        needed = {"stream": True} if name == "stream_options" else {}
        if name == "top_logprobs":
            needed = {"include": RESPONSES["include"]} if kind == "ResponsesBody" else {"logprobs": True}
        body = {**least, **needed, name: value}
        assert valid(body, kind), name
        assert isinstance(read(json.dumps(body).encode(), "r").requests[0], GenerateRequest), name
    for wrong in ({"temperature": "hot"}, {"stream": "yes"}):
        assert not valid({**least, **wrong}, kind)
        with pytest.raises(ApiError):
            read(json.dumps({**least, "stream": True, **wrong}).encode(), "r")
    assert not valid({}, kind)


async def test_each_example_call_of_the_page_works(tmp_path: pathlib.Path) -> None:
    """Sends the request that curl would send, to a gateway of another model's name (a classifier for label calls).
    Operator calls need more than a model."""
    more = {"/v1/files", "/v1/batches", "/v1/cache/prefixes", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    classifier = tmp_path / "config.json"
    classifier.write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"], "num_labels": 4}))
    async with running_fake_cluster() as fakes, running_fake_cluster(config=classifier) as labelling:
        address = fakes.gateway.http_address
        served, *_ = (await call(address, "/v1/models")).json["data"]
        text = html.unescape((await call(address, "/docs")).body.decode())
        shown = {}
        for command in re.findall(r"<pre tabindex='0'><code>curl (.*?)</code></pre>", text, re.DOTALL):
            url, *rest = shlex.split(command.replace("\\\n", ""))
            body = None
            if rest[:1] == ["-H"]:
                assert rest[1:3] == ["Content-Type: application/json", "-d"]
                body = json.loads(rest[3])
                body |= {"model": served["id"]} if "model" in body else {}
            path = url.removeprefix("http://localhost")
            asked = labelling.gateway.http_address if path.endswith("/classify") else address
            shown[path] = (await call(asked, path, body)).status
    assert {path for path, status in shown.items() if status != 200} <= more | {"/"}, shown
    assert set(shown) >= more | {f"/{kind}" for kind in ("tokenize", "v1/chat/completions", "v1/messages", "metrics")}


async def test_the_documentation_pages_load_no_external_content() -> None:
    origin = "https://chat.example.org"
    async with running_fake_cluster(allowed_origins=(f'["{origin}", "http://127.0.0.1:3000"]',)) as fakes:
        address = fakes.gateway.http_address
        document = (await call(address, "/openapi.json")).json
        validate(document)
        assert set(document["paths"]) >= {"/v1/chat/completions", "/tokenize", "/health", "/v1/models/{name}", "/docs"}
        assert set(document["paths"]["/v1/files"]) == {"get", "post"}
        assert set(document["paths"]["/v1/files"]["post"]["requestBody"]["content"]) == {"multipart/form-data"}
        for operations in document["paths"].values():
            assert all(operation["summary"].endswith(".") for operation in operations.values())
        shown = await call(address, "/docs")
        assert shown.headers["content-type"] == "text/html; charset=utf-8"
        assert shown.headers["content-security-policy"].startswith("default-src 'none'")
        text = shown.body.decode()
        assert shown.body == page(document).replace(ADDRESS.encode(), b"http://localhost")
        assert not re.search(r"<script|<link|<img|src=|@import|url\(|https?://", text.replace("http://localhost", ""))
        anchors = re.findall(r" id='([^']*)'", text)
        assert len(set(anchors)) == len(anchors)
        parts = set(re.findall(r"<h3 id='([^']*)'", text))
        assert parts >= set(document["components"]["schemas"])
        assert set(re.findall(r"href='([^']*)'", text)) == {"openapi.json"} | {f"#{name}" for name in parts}
        first = await call(address, "/")
        assert (first.status, first.headers["location"]) == (307, "docs")
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization, content-type"
        allowed = await call(address, "/v1/completions", headers=asked, method="OPTIONS")
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, origin)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        body = {"prompt": "x", "stream": True}
        for status, sent in ((200, body), (400, body | {"temperature": -1})):
            answer = await call(address, "/v1/completions", sent, {"Origin": origin})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, origin)
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert [event["choices"][0]["text"] for event in (await call(address, "/v1/completions", body)).events]
        stranger = await call(address, "/v1/completions", headers=asked | {"Origin": "https://x.org"}, method="OPTIONS")
        assert stranger.status == 400
        assert "access-control-allow-origin" not in stranger.headers
        assert "access-control-allow-origin" not in (await call(address, "/v1/models")).headers
