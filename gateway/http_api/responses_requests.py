"""Turns the bodies of POST /v1/responses into requests of the gateway.

Items of the assistant that follow each other, reasoning, text and calls, are one message of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.gathered_messages import GatheredMessages
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import json_object
from pillion.gateway.http_api.model_calls import AskedCall
from pillion.gateway.http_api.openai_fields import JsonObjectFormat, TextFormat, given, parse, refuse_unsupported
from pillion.gateway.http_api.openai_requests import check_label, read_metadata, read_stops, template_kwargs
from pillion.gateway.http_api.responses_fields import (
    FunctionTool,
    InputItem,
    ItemPart,
    NamedTool,
    ReasoningConfig,
    ResponsesBody,
    SchemaFormat,
    TextConfig,
)
from pillion.types import (
    ChatMessage,
    ChatOptions,
    GenerateRequest,
    SamplingParams,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolOptions,
)

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.logprobs": "top_logprobs",
    "sampling.structured_outputs.json": "text.format.schema",
    "sampling.structured_outputs": "text.format",
    "tools.tools": "tools",
    "tools.choice": "tool_choice",
    "tools.name": "tool_choice.name",
    "tools.parallel_tool_calls": "parallel_tool_calls",
}
# Fields that the body and SamplingParams hold alike.
_SAME_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(AskedCall):
    """A parsed call.

    Attributes:
        logprobs: whether log probabilities are shown.
        echoed: the fields of the request that come back with the response, as JSON has them.
    """

    logprobs: bool
    echoed: Mapping[str, Raw]


def responses_request(raw: bytes, request_id: str) -> ResponsesRequest:
    """Reads the body of POST /v1/responses. Raises ApiError."""
    body = parse(raw, ResponsesBody)
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    for part, prefix in ((text, "text."), (reasoning, "reasoning."), (body.stream_options, "stream_options.")):
        if part is not None:
            refuse_unsupported(part, prefix)
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "it needs stream to be true")
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        check_label(getattr(body, name), name)
    logprobs = _check_included(body)
    sampling = SamplingParams(
        **{name: getattr(body, name) for name in _SAME_FIELDS},
        max_tokens=body.max_output_tokens,
        stop=read_stops(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=(body.top_logprobs or 0) if logprobs else None,
        structured_outputs=_shape(text),
    )
    names = dict(_NAMES)
    request = GenerateRequest(
        model=body.model,
        messages=_messages(body, names),
        chat=ChatOptions(
            chat_template_kwargs=template_kwargs(body.chat_template_kwargs, reasoning.effort, "reasoning.effort")
        ),
        tools=_tools(body, names),
        sampling=sampling,
        cache_salt=body.cache_salt or "",
        request_id=request_id,
        priority=body.priority or 0,
    )
    return ResponsesRequest(
        requests=(request,), names=(names,), stream=bool(body.stream), logprobs=logprobs, echoed=_echoed(body)
    )


def _check_included(body: ResponsesBody) -> bool:
    """Whether log probabilities are asked for."""
    for n, name in enumerate(body.include or ()):
        if name not in _INCLUDED:
            raise refused(f"include[{n}]", f"only {' and '.join(_INCLUDED)} are supported here", "unsupported_value")
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise refused("top_logprobs", f"it needs {LOGPROBS} in include")
    return logprobs


def _shape(text: TextConfig) -> StructuredOutputs | None:
    match text.format:
        case SchemaFormat(schema=schema):
            return StructuredOutputs(json=json_object(schema, "text.format.schema"))
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
    return None


def _messages(body: ResponsesBody, names: dict[str, str]) -> tuple[ChatMessage, ...]:
    """The conversation. The client's names of its messages are added to ``names``. Raises ApiError."""
    conversation = _ItemConversation(names)
    if body.instructions:
        conversation.gathered.add(ChatMessage("system", body.instructions), "instructions")
    if isinstance(body.input, str):
        conversation.gathered.add(ChatMessage("user", body.input), "input")
    elif not body.input:
        raise refused("input", "at least one item is needed")
    else:
        for n, item in enumerate(body.input):
            conversation.add_item(item, f"input[{n}]")
    return conversation.gathered.joined(_one_turn)


class _ItemConversation:
    """Messages, made of items."""

    def __init__(self, names: dict[str, str]) -> None:
        self.gathered = GatheredMessages("assistant", "input", names)
        # The names of the functions that were called, by the ids of calls.
        self._called: dict[str, str] = {}

    def add_item(self, item: InputItem, path: str) -> None:
        """Adds one item. Raises ApiError."""
        refuse_unsupported(item, f"{path}.")
        if item.type == "message":
            role = _needed(item.role, f"{path}.role")
            text = _text(_needed(item.content, f"{path}.content"), f"{path}.content")
            self.gathered.add(ChatMessage("system" if role == "developer" else role, text), path)
        elif item.type == "function_call":
            name, call_id = _needed(item.name, f"{path}.name"), _needed(item.call_id, f"{path}.call_id")
            self._called[call_id] = name
            call = ToolCall(call_id, name, _needed(item.arguments, f"{path}.arguments"))
            self.gathered.add(ChatMessage("assistant", "", (call,)), path)
        elif item.type == "function_call_output":
            call_id = _needed(item.call_id, f"{path}.call_id")
            text = _text(_needed(item.output, f"{path}.output"), f"{path}.output")
            self.gathered.add(ChatMessage("tool", text, tool_call_id=call_id, name=self._called.get(call_id, "")), path)
        else:
            parts = item.content or item.summary or ""
            self.gathered.add(ChatMessage("assistant", "", reasoning=_text(parts, f"{path}.content")), path)


def _one_turn(messages: Sequence[ChatMessage]) -> ChatMessage:
    """What the assistant says in items that follow each other."""
    return ChatMessage(
        "assistant",
        "\n".join(message.content for message in messages if message.content),
        tuple(call for message in messages for call in message.tool_calls),
        reasoning="\n".join(message.reasoning for message in messages if message.reasoning),
    )


def _needed(value: Any, path: str) -> Any:
    if value is None:
        raise refused(path, "this field is required", "missing_required_parameter")
    return value


def _text(content: str | Sequence[ItemPart], path: str) -> str:
    if isinstance(content, str):
        return content
    for n, part in enumerate(content):
        refuse_unsupported(part, f"{path}[{n}].")
    return "\n".join(part.text for part in content)


def _tools(body: ResponsesBody, names: dict[str, str]) -> ToolOptions:
    choice = body.tool_choice
    for n in range(len(body.tools or ())):
        names[f"tools.tools[{n}]"] = f"tools[{n}]"
    return ToolOptions(
        tools=tuple(_tool(tool, f"tools[{n}]") for n, tool in enumerate(body.tools or ())),
        choice="named" if isinstance(choice, NamedTool) else choice or "",
        name=choice.name if isinstance(choice, NamedTool) else "",
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _tool(tool: FunctionTool, path: str) -> Tool:
    refuse_unsupported(tool, f"{path}.")
    schema = json_object(tool.parameters, f"{path}.parameters") if given(tool.parameters) else ""
    return Tool(name=tool.name, description=tool.description or "", parameters=schema, strict=tool.strict)


def _echoed(body: ResponsesBody) -> dict[str, Raw]:
    """What a response repeats of its request, with OpenAI's defaults, but for its sampling. It is encoded here, once,
    because a stream has it three times."""
    reasoning = body.reasoning or ReasoningConfig()
    echoed = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": read_metadata(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "text": {"format": body.text.format if body.text and body.text.format else TextFormat()},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }
    return {name: Raw(msgspec.json.encode(value)) for name, value in echoed.items()}
