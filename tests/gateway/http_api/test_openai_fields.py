"""Every field of OpenAI's requests: it has an effect, or it is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.http_api.body_reading import BodyReading, harmless_values, unsupported_fields, with_reading
from pillion.gateway.http_api.http_errors import ApiError, from_pillion
from pillion.gateway.http_api.openai_fields import READ_AS, ChatBody, CompletionBody
from pillion.gateway.http_api.openai_requests import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_PROMPTS,
    chat_request,
    completion_request,
)
from pillion.gateway.request.validation import MAX_MESSAGES, MAX_PROMPT_IDS
from pillion.types import ChatOptions, SamplingParams, StructuredOutputs, ToolOptions

MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "seed": -(2**63),
    "max_tokens": 9,
    "min_tokens": 3,
    "n": 2,
    "best_of": 4,
    "ignore_eos": True,
    "repetition_penalty": 1.5,
    "presence_penalty": -2,
    "frequency_penalty": 2,
}


def complete(**fields: Any):
    return completion_request(json.dumps({"prompt": "x", **fields}).encode(), "r")


def chat(**fields: Any):
    return chat_request(json.dumps({"messages": MESSAGES, **fields}).encode(), "r")


def refusal(read, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("read", [complete, chat])
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_fields_are_parsed(read, name: str) -> None:
    before, after = read().requests[0].sampling, read(**{name: SAMPLING[name]}).requests[0].sampling
    assert getattr(after, name) == SAMPLING[name]
    assert after != before
    assert refusal(read, **{name: "x"}).param == name
    assert getattr(read(**{name: None}).requests[0].sampling, name) == getattr(before, name)


@pytest.mark.parametrize("read", [complete, chat])
def test_routing_and_stop_fields_are_parsed(read) -> None:
    request = read(model="m", cache_salt="s", priority=-5, user="me").requests[0]
    assert (request.model, request.cache_salt, request.priority, request.request_id) == ("m", "s", -5, "r")
    sampling = read(stop="a", stop_token_ids=[5], logit_bias={"7": -1, "8": 0.5}).requests[0].sampling
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("a",), (5,), {7: -1.0, 8: 0.5})
    assert read(stop=["a", "b"]).requests[0].sampling.stop == ("a", "b")
    assert read(stop=None, logit_bias=None, stop_token_ids=None).requests[0] == read().requests[0]


def test_chat_options_are_parsed() -> None:
    options = chat(add_generation_prompt=False, chat_template_kwargs={"thinking": False, "n": 5}).requests[0].chat
    assert (options.add_generation_prompt, options.continue_final_message) == (False, False)
    assert json.loads(options.chat_template_kwargs) == {"thinking": False, "n": 5}
    assert chat(continue_final_message=True).requests[0].chat == ChatOptions(continue_final_message=True)
    unset = {"add_generation_prompt": None, "continue_final_message": None, "chat_template_kwargs": None}
    assert chat(**unset, reasoning_effort=None).requests[0].chat == ChatOptions()
    assert refusal(chat, chat_template_kwargs=[]).param == "chat_template_kwargs"
    assert "16384 bytes" in refusal(chat, chat_template_kwargs={"a": "x" * 2**14}).message
    for name in ("add_generation_prompt", "continue_final_message"):
        assert refusal(chat, **{name: 1}).param == name
        assert refusal(complete, **{name: True}).code == "unknown_parameter"


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    kwargs = chat(reasoning_effort="low", chat_template_kwargs={"a": 1}).requests[0].chat.chat_template_kwargs
    assert json.loads(kwargs) == {"a": 1, "reasoning_effort": "low"}
    chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})
    both = refusal(chat, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert both.param == "reasoning_effort"
    assert refusal(chat, reasoning_effort="lots").param == "reasoning_effort"


@pytest.mark.parametrize("read", [complete, chat])
def test_metadata_fields_have_no_effect(read) -> None:
    labels = {"metadata": {"a" * 65: ["b"], "c": 5}, "user": 17, "store": "yes", "service_tier": "x" * 10_000}
    assert read(**labels).requests == read().requests
    assert read(metadata="a", user=None, model=None).requests == read().requests


@pytest.mark.parametrize("read", [complete, chat])
def test_neutral_and_lenient_values_are_accepted(read) -> None:
    """Values that request the default behaviour, or spell a supported one differently."""
    assert read(max_tokens=4.0).requests[0].sampling.max_tokens == 4
    assert read(top_p=0).requests[0].sampling.top_p == 0
    assert read(seed=-1).requests[0].sampling.seed == -1
    assert read(model=None).requests[0].model == ""
    assert len(read(stop=[f"stop {n}" for n in range(100)]).requests[0].sampling.stop) == 100
    assert read(stop="x" * 1000).requests[0].sampling.stop == ("x" * 1000,)
    assert (read(stream=True, usage={"include": True}).include_usage, read(usage={"include": False}).include_usage) == (
        True,
        False,
    )
    for harmless in ({"length_penalty": 1.5}, {"early_stopping": True}, {"kv_transfer_params": {"a": 1}}):
        assert with_reading(BodyReading(), lambda fields: read(**fields), harmless).requests == read().requests


def test_unset_fields_stay_unset() -> None:
    assert chat().requests[0].sampling == SamplingParams()
    assert complete().requests[0].sampling == SamplingParams(max_tokens=DEFAULT_COMPLETION_TOKENS)
    assert complete(min_tokens=40).requests[0].sampling.max_tokens == 40
    assert not any((chat().stream, chat().include_usage, chat().logprobs, complete().body.echo))


def test_chat_token_limits_and_logprobs_are_parsed() -> None:
    assert chat(max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).requests[0].sampling.max_tokens == 5
    assert refusal(chat, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    assert chat(max_tokens=5).names[0].get("sampling.max_tokens") is None
    assert chat(max_completion_tokens=5).names[0]["sampling.max_tokens"] == "max_completion_tokens"
    assert chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).requests[0].sampling.logprobs == 3
    assert chat(logprobs=False).requests[0].sampling.logprobs is None
    assert chat(logprobs=False, top_logprobs=0).requests[0].sampling.logprobs is None
    assert chat(top_logprobs=0).requests[0].sampling.logprobs is None
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, logprobs=3).param == "logprobs"


def test_completion_echo_and_logprobs_are_parsed() -> None:
    assert complete(logprobs=3).requests[0].sampling.logprobs == 3
    assert complete(echo=True).body.echo
    scored = complete(echo=True, logprobs=1, max_tokens=0)
    assert (scored.requests[0].sampling.prompt_logprobs, scored.body.prompt_logprobs) == (1, None)
    assert scored.names[0]["sampling.prompt_logprobs"] == "logprobs"
    both = complete(echo=True, logprobs=1, prompt_logprobs=4)
    assert (both.requests[0].sampling.prompt_logprobs, both.body.prompt_logprobs) == (4, 4)
    assert "sampling.prompt_logprobs" not in both.names[0]
    assert complete(echo=True, prompt_logprobs=0).requests[0].sampling.prompt_logprobs == 0
    assert refusal(complete, prompt_logprobs=0, stream=True).param == "prompt_logprobs"
    assert refusal(complete, logprobs=True).param == "logprobs"
    assert refusal(complete, suffix="tail").param == "suffix"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
    ids=str,
)
def test_prompts_of_every_form_are_parsed(prompt: Any, read: list[Any]) -> None:
    requests = complete(prompt=prompt).requests
    assert [request.token_ids or request.text for request in requests] == read


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [1, "a"], [[1], "a"], [[]], ["a", ""], [1.5], [True], [[["a"]]]], ids=str
)
def test_invalid_prompts(prompt: Any) -> None:
    assert refusal(complete, prompt=prompt).param.startswith("prompt")


def test_too_long_lists_are_refused() -> None:
    assert len(complete(prompt=["a"] * MAX_PROMPTS, n=8).requests) == MAX_PROMPTS
    assert "more than 16384 answers" in refusal(complete, prompt=["a"] * MAX_PROMPTS, best_of=9).message
    assert "at most" in refusal(complete, prompt=["a"] * (MAX_PROMPTS + 1)).message
    assert "more than" in refusal(complete, prompt=[[1]] * (MAX_PROMPTS + 1)).message
    assert "more than" in refusal(complete, prompt=[1] * (MAX_PROMPT_IDS + 1)).message
    assert refusal(chat, messages=MESSAGES * (MAX_MESSAGES + 1)).param == "messages"
    assert refusal(complete, stop=["x" * 200] * 500).param == "stop"
    assert refusal(complete, stop_token_ids=list(range(5000))).param == "stop_token_ids"
    assert refusal(complete, logit_bias={str(n): 1 for n in range(20_000)}).param == "logit_bias"


def test_missing_or_invalid_messages_are_refused() -> None:
    assert refusal(chat, messages=[]).param == "messages"
    assert refusal(chat, messages=None).param == "messages"
    assert refusal(chat, messages="hi").param == "messages"


def test_stream_options() -> None:
    assert chat(stream=True).stream
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).continuous_usage
    # As in vLLM: without include_usage no event has usage.
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
    chat(stream=True, stream_options={"include_obfuscation": False})
    chat(stream=False, stream_options=None)
    for fields, ignored in (
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ):
        reading = BodyReading()
        asked = with_reading(reading, lambda given: chat(**given), fields)
        assert (asked.requests, reading.ignored) == (chat().requests, ignored)


def undone(kind: type[Any]) -> tuple[str, ...]:
    return tuple(unsupported_fields(READ_AS[kind]))


@pytest.mark.parametrize("name", undone(ChatBody))
def test_unsupported_chat_fields_are_refused(name: str) -> None:
    check_undone(chat, name)


@pytest.mark.parametrize("name", undone(CompletionBody))
def test_unsupported_completion_fields_are_refused(name: str) -> None:
    check_undone(complete, name)


def check_undone(read, name: str) -> None:
    """Null and no-op values pass; all others are refused by name, with OpenAI's code."""
    for harmless in (None, *harmless_values(name)):
        assert read(**{name: harmless}).requests == read().requests
    for wanted in ("auto!", 17, 0, [1], {"type": "json_object"}, "x" * 10_000):
        error = refusal(read, **{name: wanted})
        assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"user": "u", "metadata": {"a": "b"}, "service_tier": "flex", "store": True}, None),
        ({"safety_identifier": "s", "prompt_cache_key": "k", "kv_hints": {"protocol_version": "0.1"}}, None),
        ({"prompt_cache_retention": "24h", "kv_hints": [1]}, None),
        ({"prompt_cache_options": {}, "prediction": {"type": "content", "content": "x"}, "verbosity": "low"}, None),
        ({"service_tier": "auto", "store": False, "verbosity": "medium", "user": "", "metadata": None}, ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_fields_without_effect_are_named(fields: dict[str, Any], ignored: str | None) -> None:
    reading = BodyReading()
    asked, named = (
        with_reading(reading, chat_request, json.dumps({"messages": MESSAGES, **fields}).encode(), "r"),
        reading.ignored,
    )
    assert named == (", ".join(sorted(fields)) if ignored is None else ignored)
    assert asked.requests == chat().requests


def test_tools_of_a_server_are_left_out_and_named() -> None:
    function = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral", "scope": "x"}}
    tools = [{"type": "web_search", "filters": {}}, function, {"function": {"name": "g"}}, CUSTOM]
    reading = BodyReading()
    asked = with_reading(reading, lambda given: chat(**given), {"tools": tools, "tool_choice": "auto"})
    assert reading.ignored == "tools.cache_control, tools.web_search"
    assert [tool.name for tool in asked.requests[0].tools.tools] == ["f", "g", "patch"]
    wrong = InvalidRequest.of(*(FieldViolation(f"tools.tools[{n}].name", "x") for n in range(3)))
    named = from_pillion(wrong, asked.names[0]).message
    assert named == "tools[1].function.name: x; tools[2].function.name: x; tools[3].custom.name: x"


CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "read_as"),
    [
        ({"type": "function", "function": {"name": "f"}}, ToolOptions(choice="named", name="f")),
        ({"type": "custom", "custom": {"name": "patch"}}, ToolOptions(choice="named", name="patch")),
        *(
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": mode,
                        "tools": [FUNCTION, {"type": "custom", "custom": {"name": "patch"}}],
                    },
                },
                ToolOptions(choice=mode, allowed=("f", "patch")),
            )
            for mode in ("auto", "required")
        ),
    ],
    ids=str,
)
def test_tool_choice_is_read(choice: Any, read_as: ToolOptions) -> None:
    asked = chat(tools=[FUNCTION, CUSTOM], tool_choice=choice)
    tools = asked.requests[0].tools
    assert (tools.choice, tools.name, tools.allowed) == (read_as.choice, read_as.name, read_as.allowed)
    assert ([tool.name for tool in tools.tools], asked.custom) == (["f", "patch"], {"patch"})
    wrong = InvalidRequest.of(
        FieldViolation("tools.tools[0].name", "x"),
        FieldViolation("tools.tools[1].name", "x"),
        FieldViolation("tools.tools[1].parameters", "x"),
    )
    named = from_pillion(wrong, asked.names[0]).message
    assert named == "tools[0].function.name: x; tools[1].custom.name: x; tools[1].custom.format: x"


def test_custom_tool_calls_can_be_sent_back() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a"\n'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (made,) = chat(messages=messages).requests[0].messages[1].tool_calls
    assert (made.name, json.loads(made.arguments)) == ("patch", {"input": 'a"\n'})
    del call["custom"]
    assert refusal(chat, messages=messages).param == "messages[1].tool_calls[0].custom"


@pytest.mark.parametrize(
    ("read", "least"), [(completion_request, {"prompt": "x"}), (chat_request, {"messages": MESSAGES})]
)
def test_unknown_fields_have_no_effect_and_are_named(read: Any, least: dict[str, Any]) -> None:
    body = json.dumps(
        {**least, "new-field": [1], "top_a": 0.5, "gone": None, "seed": 4.0, "temperature": None}
    ).encode()
    reading = BodyReading()
    asked = with_reading(reading, read, body, "r")
    assert reading.ignored == "new-field, top_a"
    assert asked.requests == read(json.dumps({**least, "seed": 4}).encode(), "r").requests
    for strict, wrong in ((True, {"top_a": 0.5}), (False, {"temprature": 1})):
        with pytest.raises(ApiError) as caught:
            with_reading(BodyReading(strict), read, json.dumps(least | wrong).encode(), "r")
        assert (caught.value.param, caught.value.code) == (next(iter(wrong)), "unknown_parameter")


def test_a_field_that_is_missing_is_named() -> None:
    for read, name in ((completion_request, "prompt"), (chat_request, "messages")):
        for body in ({}, {name: None}):
            with pytest.raises(ApiError) as caught:
                read(json.dumps(body).encode(), "r")
            assert (caught.value.param, caught.value.code) == (name, "missing_required_parameter")


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": [1.5, None]}}}
FORMATS: dict[str, tuple[Any, StructuredOutputs | None]] = {
    "text": ({"type": "text"}, None),
    "null": (None, None),
    "json_object": ({"type": "json_object"}, StructuredOutputs(json_object=True)),
    "json_schema": (
        {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA}},
        StructuredOutputs(json=json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    "no schema": ({"type": "json_schema", "json_schema": {"name": "n"}}, StructuredOutputs(json_object=True)),
    "structural_tag": (
        {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]},
        StructuredOutputs(structural_tag='{"structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<"]}'),
    ),
}
SHAPES: dict[str, tuple[Any, StructuredOutputs]] = {
    "json": ({"json": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA, separators=(",", ":")))),
    "json as text": ({"json": '{"a": 1}'}, StructuredOutputs(json='{"a": 1}')),
    "regex": ({"regex": "a+", "disable_any_whitespace": False}, StructuredOutputs(regex="a+")),
    "choice": ({"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    "grammar": ({"grammar": "root ::= x"}, StructuredOutputs(grammar="root ::= x")),
    "json_object": ({"json_object": True}, StructuredOutputs(json_object=True)),
    "structural_tag": ({"structural_tag": "{}"}, StructuredOutputs(structural_tag="{}")),
}


@pytest.mark.parametrize("read", [complete, chat])
def test_structured_outputs_are_parsed(read) -> None:
    for sent, shape in FORMATS.values():
        assert read(response_format=sent).requests[0].sampling.structured_outputs == shape
    for sent, shape in SHAPES.values():
        assert read(structured_outputs=sent).requests[0].sampling.structured_outputs == shape


@pytest.mark.parametrize("read", [complete, chat])
def test_wrong_shapes_are_refused_by_name(read) -> None:
    both = refusal(read, response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert both.param == "structured_outputs"
    assert refusal(read, response_format={"type": "xml"}).param == "response_format.type"
    assert refusal(read, response_format={"type": "json_schema"}).param == "response_format.json_schema"
    assert refusal(read, structured_outputs={"choice": [1]}).param == "structured_outputs.choice[0]"
    closed = refusal(read, structured_outputs={"json": {}, "disable_additional_properties": True})
    assert closed.param == "structured_outputs.disable_additional_properties"
    assert refusal(read, structured_outputs={"regex": "a" * 10**6}).param == "structured_outputs"


def test_a_gateways_error_names_the_clients_field() -> None:
    field = "sampling.structured_outputs"
    kinds = {
        f"{field}.json": (FORMATS["json_schema"][0], "response_format.json_schema.schema", "structured_outputs.json"),
        f"{field}.structural_tag.format.tags[3]": (
            FORMATS["structural_tag"][0],
            "response_format.format.tags[3]",
            "structured_outputs.structural_tag.format.tags[3]",
        ),
        field: (FORMATS["json_object"][0], "response_format", "structured_outputs"),
    }
    for ours, (sent, of_format, of_shape) in kinds.items():
        error = InvalidRequest.of(FieldViolation(ours, "wrong"))
        assert from_pillion(error, chat(response_format=sent).names[0]).param == of_format
        assert from_pillion(error, chat(structured_outputs={"json_object": True}).names[0]).param == of_shape
