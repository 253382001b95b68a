"""Builds requests from callers' arguments, for the clients, their batches and :class:`pillion.LLM`."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pillion.errors import FieldViolation, InvalidRequest, PillionError
from pillion.types import ChatMessage, ChatOptions, GenerateRequest, SamplingParams, Tool, ToolCall, ToolOptions
from pillion.v1 import gateway_pb2
from pillion.wire.public import request_to_pb

T = TypeVar("T")

MAX_NAMED = 32
_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"}
)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_PROMPT_FIELD = re.compile(r"^(text|token_ids|prompt)(?![^\[])")

Prompt = str | Sequence[int]
Message = ChatMessage | Mapping[str, Any]
Item = Prompt | Sequence[Message]


def prompt_request(prompt: Prompt, **options: Any) -> GenerateRequest:
    """Return the request for one prompt; ``options`` are other fields of GenerateRequest. Raises InvalidRequest, which
    names items of ``prompt`` that are not token ids."""
    if isinstance(prompt, str):
        return GenerateRequest(text=prompt, **options)
    return GenerateRequest(token_ids=_checked_ids(prompt), **options)


def chat_request(messages: Sequence[Message], **options: Any) -> GenerateRequest:
    """Return the request for one conversation, like :func:`prompt_request`. Raises InvalidRequest for a bad message."""
    if not messages:
        raise InvalidRequest.of(FieldViolation("messages", "the prompt is empty"))
    checked = (message_of(message, f"messages[{n}]") for n, message in enumerate(messages))
    return GenerateRequest(messages=tuple(checked), **options)


def chat_options(
    add_generation_prompt: bool | None, continue_final_message: bool, chat_template_kwargs: Mapping[str, Any] | None
) -> ChatOptions:
    """Return the options of the chat template. Raises InvalidRequest for variables that are not JSON."""
    kwargs = ""
    if chat_template_kwargs:
        kwargs = _json(chat_template_kwargs, "chat.chat_template_kwargs", ensure_ascii=True)
    return ChatOptions(
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=kwargs,
    )


def tool_options(
    tools: Sequence[Tool | Mapping[str, Any]], tool_choice: str | Mapping[str, Any], parallel_tool_calls: bool | None
) -> ToolOptions:
    """Convert the tools of a conversation, in OpenAI's form or as Tool. ``tool_choice`` may be "auto", "none",
    "required", a tool's name, or OpenAI's object with a name. Raises InvalidRequest otherwise."""
    parsed = tuple(_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools))
    if isinstance(tool_choice, Mapping):
        choice, name = "named", str(_named_function(tool_choice, "tool_choice")["name"])
    else:
        choice, name = (tool_choice, "") if tool_choice in ("", "auto", "none", "required") else ("named", tool_choice)
    return ToolOptions(tools=parsed, choice=choice, name=name, parallel_tool_calls=parallel_tool_calls)


def _tool(tool: Tool | Mapping[str, Any], where: str) -> Tool:
    if isinstance(tool, Tool):
        return tool
    function = _named_function(tool, where)
    unknown = sorted(set(function) - {"name", "description", "parameters", "strict"})
    if unknown:
        raise InvalidRequest.of(*(FieldViolation(f"{where}.function.{key}", "not known") for key in unknown))
    parameters = function.get("parameters")
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else _json(parameters, f"{where}.function.parameters"),
        strict=function.get("strict"),
    )


def _json(value: Any, field: str, *, ensure_ascii: bool = False) -> str:
    """Return a value as JSON text. Raises InvalidRequest, which names the ``field``, for other values."""
    try:
        plain = dict(value) if isinstance(value, Mapping) else value
        return json.dumps(plain, allow_nan=False, ensure_ascii=ensure_ascii)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest.of(FieldViolation(field, str(error))) from None


def _named_function(value: Any, where: str) -> Mapping[str, Any]:
    """Return the "function" of one of OpenAI's objects, which must have a name. Raises InvalidRequest."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        text = 'an object of type "function" is needed, whose "function" has a "name"'
        raise InvalidRequest.of(FieldViolation(where, text))
    return function


def item_request(item: Item, **options: Any) -> GenerateRequest:
    """Return the request for a batch item, by :func:`chat_request` or :func:`prompt_request`."""
    if not isinstance(item, str) and item and isinstance(item[0], ChatMessage | Mapping):
        return chat_request(item, **options)  # type: ignore[arg-type]
    return prompt_request(item, **options)  # type: ignore[arg-type]


def prefix_request(
    prompt: Item,
    *,
    model: str,
    cache_salt: str,
    tools: Sequence[Tool | Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None,
) -> GenerateRequest:
    """Return the request for a prompt whose KV is computed ahead; a conversation is rendered without the beginning of
    an answer. Raises InvalidRequest."""
    is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], ChatMessage | Mapping)
    chat_fields: dict[str, Any] = {}
    if is_chat:
        chat_fields["chat"] = chat_options(False, False, chat_template_kwargs)
        chat_fields["tools"] = tool_options(tools, "", None)
    for name, value in (("tools", tools), ("chat_template_kwargs", chat_template_kwargs)):
        if value and not is_chat:
            raise InvalidRequest.of(FieldViolation(name, "only allowed with messages"))
    return item_request(prompt, model=model, cache_salt=cache_salt, **chat_fields)


def embed_message(inputs: Prompt | Sequence[Prompt], **options: Any) -> gateway_pb2.EmbedRequest:
    """Return the message that requests the embeddings of one or several texts or lists of token ids; ``options`` are
    other fields of EmbedRequest. Raises InvalidRequest for a value that fits no field."""
    listed: Any = [inputs] if isinstance(inputs, str) else list(inputs)
    if listed and all(isinstance(one, int) for one in listed):
        listed = [listed]
    messages = []
    for number, one in enumerate(listed):
        try:
            request = prompt_request(one)
        except InvalidRequest as error:
            raise respelled(error, f"inputs[{number}]") from None
        messages.append(gateway_pb2.TextInput(text=request.text, token_ids=request.token_ids))
    return made(gateway_pb2.EmbedRequest, inputs=messages, **options)


def sampling_of(sampling: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters, passed whole or by keyword. Raises TypeError for both, and for an unknown
    keyword."""
    if sampling is not None and fields:
        raise TypeError(f"give sampling or its fields by keyword, not both: {', '.join(sorted(fields))}")
    chosen = sampling if sampling is not None else SamplingParams(**fields)
    stop: Any = chosen.stop
    # A bare str would be read as a sequence of one-letter stop strings.
    return replace(chosen, stop=(stop,)) if isinstance(stop, str) else chosen


def to_pb(request: GenerateRequest) -> gateway_pb2.GenerateRequest:
    """Return the message of a request. Raises InvalidRequest for a value that fits no field."""
    return made(request_to_pb, request=request)


def made(make: Callable[..., T], **fields: Any) -> T:
    """Return ``make(**fields)``. Raises InvalidRequest for a value that fits no field."""
    try:
        return make(**fields)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from None


def respelled(error: PillionError, prompt: str = "prompt") -> PillionError:
    """Return a gateway's error with the caller's argument ``prompt`` in place of the message's fields."""
    if not isinstance(error, InvalidRequest) or not error.violations:
        return error
    return InvalidRequest.of(
        *(replace(one, field=_PROMPT_FIELD.sub(lambda _: prompt, one.field, count=1)) for one in error.violations)
    )


def _checked_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        # Raises for anything that is not a token id, faster than a loop in Python.
        return tuple(array("I", prompt))
    except (TypeError, OverflowError):
        wrong = (FieldViolation(f"prompt[{n}]", text) for n, one in enumerate(prompt) if (text := _id_fault(one)))
        raise InvalidRequest.of(*itertools.islice(wrong, MAX_NAMED)) from None


def _id_fault(item: Any) -> str:
    """Return why an item is not a token id; "" if it is one."""
    if not hasattr(item, "__index__"):
        return f"an id is an integer, not {type(item).__name__}"
    return "" if 0 <= item.__index__() < 2**32 else f"{str(item)[:40]} is not in [0, 2**32)"


def message_of(message: Message, where: str) -> ChatMessage:
    """Convert a message to ChatMessage. Raises InvalidRequest, which names ``where``, unless it is a message in
    OpenAI's form."""
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping) or "role" not in message or not _MESSAGE_KEYS.issuperset(message):
        optional = ", ".join(sorted(_MESSAGE_KEYS - {"role"}))
        raise InvalidRequest.of(FieldViolation(where, f"a message is an object with a role, and optionally {optional}"))
    fields = {name: value for name, value in message.items() if value is not None}
    calls = fields.pop("tool_calls", ())
    if isinstance(fields.get("content"), list | tuple):
        fields["content"] = _text_of_parts(fields["content"], f"{where}.content")
    for name, text in fields.items():
        if not isinstance(text, str):
            raise InvalidRequest.of(FieldViolation(f"{where}.{name}", f"a text, not {type(text).__name__}"))
    if "content" not in fields and not calls and fields["role"] not in ("assistant", "tool"):
        raise InvalidRequest.of(FieldViolation(f"{where}.content", "this field is needed"))
    return ChatMessage(
        role=fields["role"],
        content=fields.get("content", ""),
        tool_calls=tuple(_called(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)),
        tool_call_id=fields.get("tool_call_id", ""),
        name=fields.get("name", ""),
        reasoning=fields.get("reasoning") or fields.get("reasoning_content", ""),
    )


def _text_of_parts(parts: Sequence[Any], where: str) -> str:
    """Return the text of a content that is a list of parts, joined as the HTTP API does. Raises InvalidRequest, which
    names ``where``, for images and other parts."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            fault = (
                'a part is {"type": "text", "text": TEXT}' if kind == "text" else f"only text is supported, not {kind}"
            )
            raise InvalidRequest.of(FieldViolation(f"{where}[{number}]", fault))
        texts.append(text)
    return "\n".join(texts)


def _called(call: ToolCall | Mapping[str, Any], where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function, call_id = _named_function(call, where), call.get("id")
    if not isinstance(call_id, str):
        raise InvalidRequest.of(FieldViolation(f"{where}.id", f"a text, not {type(call_id).__name__}"))
    arguments = function.get("arguments") or ""
    if isinstance(arguments, Mapping):
        arguments = _json(arguments, f"{where}.function.arguments")
    if not isinstance(arguments, str):
        text = f"a text or an object, not {type(arguments).__name__}"
        raise InvalidRequest.of(FieldViolation(f"{where}.function.arguments", text))
    return ToolCall(call_id, function["name"], arguments)
