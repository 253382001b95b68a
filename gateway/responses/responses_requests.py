"""Conversion of the bodies of POST /v1/responses to requests of the gateway.

Consecutive items of the assistant (reasoning, text and calls) become one message of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.body_reading import REQUIRED, given, note_ignored, parse, parse_field
from pillion.gateway.http_api.content_parts import ReadContent, read_calls, read_content
from pillion.gateway.http_api.custom_tools import custom_call
from pillion.gateway.http_api.gathered_messages import GatheredMessages
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import arguments_of, text_in
from pillion.gateway.http_api.model_calls import ParsedCall
from pillion.gateway.http_api.openai_fields import ContentPart
from pillion.gateway.http_api.openai_requests import (
    read_metadata,
    read_stops,
    request_of,
    sampling_of,
    structure_of,
    template_kwargs,
    token_limit,
)
from pillion.gateway.http_api.tool_reading import ParsedTools, echoed_tools, model_tool_name
from pillion.gateway.responses.responses_fields import InputItem, ReasoningConfig, ResponsesBody
from pillion.types import (
    ChatMessage,
    ChatOptions,
    SamplingParams,
    StructuredOutputs,
    ToolCall,
)

# Precedes, for the model, the result of a call that the client sent by id only.
LOST_CALL = "[This is the result of a call of a tool that is not part of this conversation.]"
LOGPROBS = "message.output_text.logprobs"
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.logprobs": "top_logprobs",
    "tools.tools": "tools",
    "tools.choice": "tool_choice",
    "tools.parallel_tool_calls": "parallel_tool_calls",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ParsedCall):
    """A parsed call of the Responses API.

    Attributes:
        logprobs: whether log probabilities are returned.
        echoed: request fields that the response repeats, encoded.
        custom: names of the custom tools, as the model has them.
        namespaced: the model's name of a tool -> its namespace, and its name in it.
    """

    logprobs: bool
    echoed: Mapping[str, Raw]
    custom: frozenset[str] = frozenset()
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def responses_request(raw: bytes, request_id: str) -> ResponsesRequest:
    """Parse the body of POST /v1/responses. Raises ApiError."""
    body = parse(raw, ResponsesBody)
    reasoning = body.reasoning or ReasoningConfig()
    logprobs = LOGPROBS in (body.include or ())
    if set(body.include or ()) - {LOGPROBS}:
        note_ignored("include")
    if body.top_logprobs and not logprobs:
        note_ignored("top_logprobs")
    structured, structure_names = structure_of(body)
    sampling = SamplingParams(
        **sampling_of(body, "responses"),
        max_tokens=token_limit(body.max_output_tokens),
        stop=read_stops(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=(body.top_logprobs or 0) if logprobs else None,
        structured_outputs=structured,
    )
    read = ParsedTools(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    names = {**_NAMES, **structure_names, **read.names}
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
        tools=read.options,
    )
    return ResponsesRequest(
        requests=(request,),
        names=(names,),
        stream=bool(body.stream),
        logprobs=logprobs,
        echoed=_echoed(body, structured),
        custom=frozenset(read.custom),
        namespaced=read.namespaced,
    )


def _messages(body: ResponsesBody, names: dict[str, str]) -> tuple[ChatMessage, ...]:
    """Return the conversation, and add the client's names of its messages to ``names``. Raises ApiError."""
    conversation = _ItemConversation(names)
    if body.instructions:
        conversation.gathered.add(ChatMessage("system", body.instructions), "instructions")
    if isinstance(body.input, str):
        conversation.gathered.add(ChatMessage("user", body.input), "input")
    elif not body.input:
        raise refused("input", "at least one item is needed")
    else:
        # Be lenient with earlier turns, which clients resend: only items after the last one of the model are new.
        last = len(body.input) - 1
        last_old = next((n for n in range(last, -1, -1) if body.input[n].role in (None, "assistant")), -1)
        for n, item in enumerate(body.input):
            conversation.add_item(item, f"input[{n}]", is_new=n > last_old)
    messages = conversation.gathered.joined(_join_turn)
    if not messages:
        raise refused("input", "at least one item with text is needed; nothing is stored that an item could refer to")
    return messages


class _ItemConversation:
    """Converter of a conversation's items to messages."""

    def __init__(self, names: dict[str, str]) -> None:
        self.gathered = GatheredMessages("assistant", "input", names)
        # Id of a call -> name of its tool.
        self._called: dict[str, str] = {}
        self._has_references = False

    def add_item(self, item: InputItem, path: str, is_new: bool) -> None:
        """Add an item of the conversation. In a new item, a part without text is an error. Raises ApiError."""
        if item.type == "message":
            self._add_message(item, path, is_new)
        elif item.type in ("function_call", "custom_tool_call"):
            name, call_id = _require(item.name, f"{path}.name"), _require(item.call_id, f"{path}.call_id")
            name = self._called[call_id] = model_tool_name(item.namespace, name)
            if item.type == "function_call":
                call = ToolCall(call_id, name, arguments_of(item.arguments))
            else:
                call = custom_call(call_id, name, text_in(item.input))
            self.gathered.add(ChatMessage("assistant", "", (call,)), path)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            call_id = _require(item.call_id, f"{path}.call_id")
            text = _content(item.output, f"{path}.output", "tool").text
            if self._has_references and call_id not in self._called:
                # The call was sent by id only, and nothing is stored.
                self.gathered.add(ChatMessage("user", f"{LOST_CALL}\n{text}"), path)
                return
            self.gathered.add(ChatMessage("tool", text, tool_call_id=call_id, name=self._called.get(call_id, "")), path)
        elif item.type == "reasoning":
            # Reasoning encrypted by another server has no text.
            if text := text_in(item.content) or text_in(item.summary):
                self.gathered.add(ChatMessage("assistant", "", reasoning=text), path)
        elif text := text_in(item.content) or text_in(item.output) or text_in(item.summary):
            # The model did not see this call, so its result is not a tool message.
            role = item.role or ("user" if item.type.endswith("_output") else "assistant")
            self.gathered.add(ChatMessage("system" if role == "developer" else role, text), path)
        else:
            self._has_references |= item.type == "item_reference"
            note_ignored(f"{path}.{item.type}")

    def _add_message(self, item: InputItem, path: str, is_new: bool) -> None:
        role = _require(item.role, f"{path}.role")
        if is_new and not given(item.content):
            raise refused(f"{path}.content", REQUIRED, "missing_required_parameter")
        read = _content(item.content, f"{path}.content", role, is_new)
        for result in read.results:
            name = self._called.get(result.tool_call_id, "")
            self.gathered.add(replace(result, name=name), path)
        calls = (*read.calls, *read_calls(item.tool_calls or (), None, path, f"{path}.tool_calls"))
        self._called.update((call.id, call.name) for call in calls)
        if role == "tool" and not read.is_results:
            call_id = _require(item.tool_call_id, f"{path}.tool_call_id")
            name = self._called.get(call_id, "")
            self.gathered.add(ChatMessage("tool", read.text, tool_call_id=call_id, name=name), path)
        elif calls or not read.is_results:
            role = "system" if role == "developer" else role
            self.gathered.add(ChatMessage(role, read.text, calls, reasoning="\n".join(read.thoughts)), path)


def _join_turn(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Join consecutive messages of the assistant."""
    return ChatMessage(
        "assistant",
        "\n".join(message.content for message in messages if message.content),
        tuple(call for message in messages for call in message.tool_calls),
        reasoning="\n".join(message.reasoning for message in messages if message.reasoning),
    )


def _require(value: Any, path: str) -> Any:
    """Return ``value``. Raises ApiError if it is None."""
    if value is None:
        raise refused(path, REQUIRED, "missing_required_parameter")
    return value


def _content(raw: Raw, path: str, role: str, is_new: bool = False) -> ReadContent:
    """Parse the content of an item of a ``role``. Raises ApiError."""
    content: str | list[ContentPart] = parse_field(raw, str | list[ContentPart], path) if given(raw) else ""
    return read_content(content, role, path, is_new=is_new, media_types=("input_image",))


def _echoed(body: ResponsesBody, structured: StructuredOutputs | None) -> dict[str, Raw]:
    """Return the request fields that the response repeats, with OpenAI's defaults, except for sampling.

    Encoded once, because a stream repeats them three times.
    """
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
            "summary": reasoning.summary if reasoning.summary in ("auto", "concise", "detailed") else None,
        },
        "safety_identifier": body.safety_identifier,
        "text": {"format": _echoed_format(body, structured)},
        "tool_choice": body.tool_choice or "auto",
        "tools": echoed_tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }
    return {name: Raw(msgspec.json.encode(value)) for name, value in echoed.items()}


def _echoed_format(body: ResponsesBody, structured: StructuredOutputs | None) -> Any:
    """Return the answer's format as the response repeats it: OpenAI's unchanged, another converted to OpenAI's."""
    sent = body.text.format if body.text is not None else Raw()
    if structured is None:
        return {"type": "text"}
    if bytes(sent)[:1] == b"{":
        return sent
    if structured.json is not None:
        return {"type": "json_schema", "name": "answer", "schema": Raw(structured.json.encode())}
    return {"type": "json_object" if structured.json_object else "text"}
