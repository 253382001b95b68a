"""Turns the bodies of POST /v1/responses into requests of the gateway.

Items of the assistant that follow each other, reasoning, text and calls, are one message of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.body_reading import given, note_ignored, parse, parse_field
from pillion.gateway.http_api.custom_tools import custom_call, custom_tool
from pillion.gateway.http_api.gathered_messages import GatheredMessages, without_text
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import arguments_of, json_object, text_in
from pillion.gateway.http_api.model_calls import AskedCall
from pillion.gateway.http_api.openai_fields import JsonObjectFormat, TextFormat
from pillion.gateway.http_api.openai_requests import read_metadata, read_stops, request_of, sampling_of, template_kwargs
from pillion.gateway.responses.responses_fields import (
    AllowedChoices,
    CustomTool,
    FunctionTool,
    InputGrammar,
    InputItem,
    ItemPart,
    NamedTool,
    NamespaceTool,
    OtherTool,
    ReasoningConfig,
    ResponsesBody,
    SchemaFormat,
    TextConfig,
)
from pillion.types import (
    ChatMessage,
    ChatOptions,
    SamplingParams,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolOptions,
)

LOGPROBS = "message.output_text.logprobs"
# The reasoning of an answer has no summary, whichever of these is asked for.
_SUMMARIES = ("auto", "concise", "detailed")
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
    logprobs = LOGPROBS in (body.include or ())
    if set(body.include or ()) - {LOGPROBS}:
        note_ignored("include")
    if body.top_logprobs and not logprobs:
        note_ignored("top_logprobs")
    sampling = SamplingParams(
        **sampling_of(body, "responses"),
        max_tokens=body.max_output_tokens,
        stop=read_stops(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=(body.top_logprobs or 0) if logprobs else None,
        structured_outputs=_shape(text),
    )
    names, read = dict(_NAMES), ToolsRead(body.tools or ())
    request = request_of(
        body,
        request_id,
        sampling,
        messages=_messages(body, names),
        chat=ChatOptions(
            chat_template_kwargs=template_kwargs(
                body.chat_template_kwargs, [("reasoning_effort", reasoning.effort, "reasoning.effort")]
            )
        ),
        tools=read.options(body, names),
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


def _shape(text: TextConfig) -> StructuredOutputs | None:
    match text.format:
        case SchemaFormat(schema=schema):
            return StructuredOutputs(json=json_object(schema, "text.format.schema"))
        case JsonObjectFormat(schema=schema) if given(schema):
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
        # Earlier turns are told, not judged: a client sends them again with each turn.
        last = len(body.input) - 1
        earlier = next((n for n in range(last, -1, -1) if body.input[n].role in (None, "assistant")), -1)
        for n, item in enumerate(body.input):
            conversation.add_item(item, f"input[{n}]", is_new=n > earlier)
    messages = conversation.gathered.joined(_one_turn)
    if not messages:
        raise refused("input", "at least one item with a text is needed; nothing is stored here that it may refer to")
    return messages


class _ItemConversation:
    """Makes messages of a conversation's items."""

    def __init__(self, names: dict[str, str]) -> None:
        self.gathered = GatheredMessages("assistant", "input", names)
        # These are the names of the functions that were called, by the ids of calls.
        self._called: dict[str, str] = {}
        # Whether an item was left out of which only its id came.
        self._has_references = False

    def add_item(self, item: InputItem, path: str, is_new: bool) -> None:
        """Adds one item of the conversation. Every part of one that ``is_new`` has to be told. Raises ApiError."""
        if item.type == "message":
            role = _needed(item.role, f"{path}.role")
            if is_new and not given(item.content):
                raise refused(f"{path}.content", "this field is required", "missing_required_parameter")
            text = _text(item.content, f"{path}.content", role, is_new)
            self.gathered.add(ChatMessage("system" if role == "developer" else role, text), path)
        elif item.type in ("function_call", "custom_tool_call"):
            name, call_id = _needed(item.name, f"{path}.name"), _needed(item.call_id, f"{path}.call_id")
            name = self._called[call_id] = flat_name(item.namespace, name)
            if item.type == "function_call":
                call = ToolCall(call_id, name, arguments_of(item.arguments))
            else:
                call = custom_call(call_id, name, text_in(item.input))
            self.gathered.add(ChatMessage("assistant", "", (call,)), path)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            call_id = _needed(item.call_id, f"{path}.call_id")
            text = _text(item.output, f"{path}.output", "tool")
            if self._has_references and call_id not in self._called:
                # The call was referred to, and nobody here has it.
                self.gathered.add(ChatMessage("user", text), path)
                return
            self.gathered.add(ChatMessage("tool", text, tool_call_id=call_id, name=self._called.get(call_id, "")), path)
        elif item.type == "reasoning":
            # A reasoning item that another server has encrypted says nothing here.
            if text := text_in(item.content) or text_in(item.summary):
                self.gathered.add(ChatMessage("assistant", "", reasoning=text), path)
        elif text := text_in(item.content) or text_in(item.output) or text_in(item.summary):
            # The result of a call that the model is not told of is no result of its own.
            role = item.role or ("user" if item.type.endswith("_output") else "assistant")
            self.gathered.add(ChatMessage("system" if role == "developer" else role, text), path)
        else:
            self._has_references |= item.type == "item_reference"
            note_ignored(f"{path}.{item.type}")


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


def _text(raw: Raw, path: str, role: str, is_new: bool = False) -> str:
    """Returns the text of what an item of a ``role`` says. What the model cannot see of a user's is refused; without
    text, other parts of what ``is_new`` are, too. Raises ApiError."""
    content: str | list[ItemPart] = parse_field(raw, str | list[ItemPart], path) if given(raw) else ""
    if isinstance(content, str):
        return content
    texts = []
    for n, part in enumerate(content):
        text = part.text or part.refusal
        if text or part.type.endswith("_text"):
            texts.append(text or "")
        else:
            texts += without_text(part.type, path, n, role, is_image=part.type == "input_image", is_new=is_new)
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
            if isinstance(body, NamespaceTool):
                for m, inner in enumerate(body.tools):
                    about = body.description if m == 0 else None
                    self._add(inner, f"tools[{n}].tools[{m}]", body.name, about)
            else:
                self._add(body, f"tools[{n}]")

    def _add(
        self,
        body: FunctionTool | CustomTool | OtherTool,
        path: str,
        namespace: str | None = None,
        about: str | None = None,
    ) -> None:
        if isinstance(body, OtherTool):
            note_ignored(f"tools.{body.sent_type}")
            return
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
        told = [one for one in choice.tools if not isinstance(one, OtherTool)]
        for one in choice.tools:
            if isinstance(one, OtherTool):
                note_ignored(f"tool_choice.tools.{one.sent_type}")
        if not told and choice.mode == "required":
            raise refused("tool_choice.tools", "no answer here calls a tool that a server runs", "unsupported_value")
        allowed = tuple(flat_name(one.namespace, one.name) for one in told)
        return replace(options, choice=choice.mode if told else "none", allowed=allowed)


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
        "reasoning": {
            "effort": reasoning.effort,
            "summary": reasoning.summary if reasoning.summary in _SUMMARIES else None,
        },
        "safety_identifier": body.safety_identifier,
        "text": {"format": body.text.format if body.text and body.text.format else TextFormat()},
        "tool_choice": body.tool_choice or "auto",
        "tools": _echoed_tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }
    return {name: Raw(msgspec.json.encode(value)) for name, value in echoed.items()}


def _echoed_tools(tools: Sequence[Any]) -> list[Any]:
    """Returns tools as a response repeats them: functions with all of their fields."""
    return [_echoed_tool(tool) for tool in tools if not isinstance(tool, OtherTool)]


def _echoed_tool(tool: Any) -> Any:
    said: dict[str, Any]
    if isinstance(tool, NamespaceTool):
        said = {"type": "namespace", "name": tool.name, "description": tool.description}
        return {**said, "tools": _echoed_tools(tool.tools)}
    if not isinstance(tool, FunctionTool):
        return tool
    said = {"type": "function", "name": tool.name, "description": tool.description, "strict": tool.strict}
    return {**said, "parameters": tool.parameters if given(tool.parameters) else None}
