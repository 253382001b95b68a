"""Turns the bodies of POST /v1/responses into requests of the gateway.

Items of the assistant that follow each other, reasoning, text and calls, are one message of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.custom_tools import custom_call, custom_tool
from pillion.gateway.http_api.gathered_messages import UNSEEN, GatheredMessages
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import called_with, json_object
from pillion.gateway.http_api.model_calls import AskedCall
from pillion.gateway.http_api.openai_fields import JsonObjectFormat, TextFormat, given, note_ignored, parse
from pillion.gateway.http_api.openai_requests import read_metadata, read_stops, template_kwargs
from pillion.gateway.http_api.sampling_body import sampling_of
from pillion.gateway.responses.responses_fields import (
    AllowedChoices,
    CustomTool,
    DroppedTool,
    FunctionTool,
    InputGrammar,
    InputItem,
    ItemPart,
    NamedTool,
    NamespaceTool,
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
# These ask for more of items that an answer here has in full, or never has.
_IDLE_INCLUDES = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.logprobs": "top_logprobs",
    "sampling.structured_outputs.json": "text.format.schema",
    "sampling.structured_outputs": "text.format",
    "tools.tools": "tools",
    "tools.choice": "tool_choice",
    "tools.name": "tool_choice.name",
    "tools.allowed": "tool_choice.tools",
    "tools.parallel_tool_calls": "parallel_tool_calls",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(AskedCall):
    """Holds a parsed call of the Responses API.

    Attributes:
        logprobs: whether log probabilities are shown.
        echoed: the fields of the request that come back with the response, as JSON has them.
        custom: the names of the custom tools, as the model has them.
        spaced: the namespaces of tools and their names there, by the names that the model has.
    """

    logprobs: bool
    echoed: Mapping[str, Raw]
    custom: frozenset[str] = frozenset()
    spaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def responses_request(raw: bytes, request_id: str) -> ResponsesRequest:
    """Reads the body of POST /v1/responses. Raises ApiError."""
    body = parse(raw, ResponsesBody)
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "it needs stream to be true")
    logprobs = _check_included(body)
    sampling = SamplingParams(
        **sampling_of(body, "responses"),
        max_tokens=body.max_output_tokens,
        stop=read_stops(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=(body.top_logprobs or 0) if logprobs else None,
        structured_outputs=_shape(text),
    )
    names, read = dict(_NAMES), ToolsRead(body.tools or ())
    request = GenerateRequest(
        model=body.model,
        messages=_messages(body, names),
        chat=ChatOptions(
            chat_template_kwargs=template_kwargs(body.chat_template_kwargs, reasoning.effort, "reasoning.effort")
        ),
        tools=read.options(body, names),
        sampling=sampling,
        cache_salt=body.cache_salt or "",
        request_id=request_id,
        priority=body.priority or 0,
    )
    return ResponsesRequest(
        requests=(request,),
        names=(names,),
        stream=bool(body.stream),
        logprobs=logprobs,
        echoed=_echoed(body),
        custom=frozenset(read.custom),
        spaced=read.spaced,
    )


def _check_included(body: ResponsesBody) -> bool:
    """Returns whether the field ``include`` asks for log probabilities. Raises ApiError for an unknown value."""
    for n, name in enumerate(body.include or ()):
        if name in _IDLE_INCLUDES:
            note_ignored("include")
        elif name != LOGPROBS:
            raise refused(f"include[{n}]", "this is not supported here", "unsupported_value")
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
    """Returns the conversation. The client's names of its messages are added to ``names``. Raises ApiError."""
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
    """Makes messages of a conversation's items."""

    def __init__(self, names: dict[str, str]) -> None:
        self.gathered = GatheredMessages("assistant", "input", names)
        # These are the names of the functions that were called, by the ids of calls.
        self._called: dict[str, str] = {}

    def add_item(self, item: InputItem, path: str) -> None:
        """Adds one item of the conversation. Raises ApiError."""
        if item.type == "message":
            role = _needed(item.role, f"{path}.role")
            text = _text(_needed(item.content, f"{path}.content"), f"{path}.content")
            self.gathered.add(ChatMessage("system" if role == "developer" else role, text), path)
        elif item.type in ("function_call", "custom_tool_call"):
            name, call_id = _needed(item.name, f"{path}.name"), _needed(item.call_id, f"{path}.call_id")
            name = self._called[call_id] = flat_name(item.namespace, name)
            if item.type == "function_call":
                call = ToolCall(call_id, name, called_with(_needed(item.arguments, f"{path}.arguments")))
            else:
                call = custom_call(call_id, name, _needed(item.input, f"{path}.input"))
            self.gathered.add(ChatMessage("assistant", "", (call,)), path)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            call_id = _needed(item.call_id, f"{path}.call_id")
            text = _text(_needed(item.output, f"{path}.output"), f"{path}.output", images=True)
            self.gathered.add(ChatMessage("tool", text, tool_call_id=call_id, name=self._called.get(call_id, "")), path)
        else:
            text = _text(item.content or item.summary or "", f"{path}.content")
            # A reasoning item that another server has encrypted says nothing here.
            if text:
                self.gathered.add(ChatMessage("assistant", "", reasoning=text), path)


def _one_turn(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Joins what the assistant says in items that follow each other."""
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


def _text(content: str | Sequence[ItemPart], path: str, images: bool = False) -> str:
    """Returns the text of an item's content. ``images`` says whether an image in it is told of, or refused. Raises
    ApiError."""
    if isinstance(content, str):
        return content
    texts = []
    for n, part in enumerate(content):
        if part.type == "input_image" and images:
            note_ignored(f"{path}.input_image")
        elif part.type == "input_image":
            raise refused(f"{path}[{n}].type", "'input_image' is not supported here", "unsupported_value")
        texts.append(UNSEEN if part.type == "input_image" else _needed(part.text, f"{path}[{n}].text"))
    return "\n".join(texts)


def flat_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool of a namespace: models know no namespaces."""
    return name if not namespace else f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


class ToolsRead:
    """Reads a response's tools. Raises ApiError.

    Attributes:
        tools: the tools that the model is told of.
        custom: the names of the custom tools among them.
        spaced: the namespaces of tools and their names there, by the names that the model has.
        paths: where each of the tools stands in the body.
    """

    def __init__(self, bodies: Sequence[Any]) -> None:
        self.tools: list[Tool] = []
        self.custom: set[str] = set()
        self.spaced: dict[str, tuple[str, str]] = {}
        self.paths: list[str] = []
        for n, body in enumerate(bodies):
            if isinstance(body, DroppedTool):
                note_ignored(f"tools.{body.__struct_config__.tag}")
            elif isinstance(body, NamespaceTool):
                for m, inner in enumerate(body.tools):
                    about = body.description if m == 0 else None
                    self._add(inner, f"tools[{n}].tools[{m}]", body.name, about)
            else:
                self._add(body, f"tools[{n}]")

    def _add(
        self, body: FunctionTool | CustomTool, path: str, namespace: str | None = None, about: str | None = None
    ) -> None:
        name, description = flat_name(namespace, body.name), "\n\n".join(filter(None, (about, body.description)))
        if namespace is not None:
            self.spaced[name] = (namespace, body.name)
        self.paths.append(path)
        if isinstance(body, CustomTool):
            self.custom.add(name)
            grammar = body.format if isinstance(body.format, InputGrammar) else None
            self.tools.append(custom_tool(name, description, grammar))
        else:
            schema = json_object(body.parameters, f"{path}.parameters") if given(body.parameters) else ""
            self.tools.append(Tool(name=name, description=description, parameters=schema, strict=body.strict))

    def options(self, body: ResponsesBody, names: dict[str, str]) -> ToolOptions:
        """Returns the tools and how they may be called. What the client calls them is added to ``names``."""
        for n, (tool, path) in enumerate(zip(self.tools, self.paths, strict=True)):
            names[f"tools.tools[{n}]"] = path
            if tool.name in self.custom:
                names[f"tools.tools[{n}].parameters"] = f"{path}.format"
        choice = body.tool_choice
        options = ToolOptions(tools=tuple(self.tools), parallel_tool_calls=body.parallel_tool_calls)
        if isinstance(choice, NamedTool):
            return replace(options, choice="named", name=flat_name(choice.namespace, choice.name))
        if not isinstance(choice, AllowedChoices):
            return replace(options, choice=choice or "")
        if not choice.tools:
            raise refused("tool_choice.tools", "at least one tool is needed")
        allowed = tuple(flat_name(one.namespace, one.name) for one in choice.tools)
        return replace(options, choice=choice.mode, allowed=allowed)


def _echoed(body: ResponsesBody) -> dict[str, Raw]:
    """Returns what a response repeats of its request, with OpenAI's defaults, except for the sampling values. The
    fields are encoded here, once, because a stream repeats them three times."""
    reasoning = body.reasoning or ReasoningConfig()
    echoed = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": read_metadata(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "text": {"format": body.text.format if body.text and body.text.format else TextFormat()},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_echoed_tool(tool) for tool in body.tools or () if not isinstance(tool, DroppedTool)],
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }
    return {name: Raw(msgspec.json.encode(value)) for name, value in echoed.items()}


def _echoed_tool(tool: Any) -> Any:
    """Returns a tool as a response repeats it: a function with all of its fields."""
    if isinstance(tool, NamespaceTool):
        return {**msgspec.structs.asdict(tool), "type": "namespace", "tools": [_echoed_tool(one) for one in tool.tools]}
    if not isinstance(tool, FunctionTool):
        return tool
    parameters = tool.parameters if given(tool.parameters) else None
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
        "strict": tool.strict,
    }
