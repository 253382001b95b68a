"""Parsing of the parts of a message's content: texts, reasoning, and, in Anthropic's form, calls and results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from pillion.gateway.http_api.body_reading import REQUIRED, given, note_ignored, parse_field
from pillion.gateway.http_api.custom_tools import custom_call
from pillion.gateway.http_api.gathered_messages import replace_textless
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import arguments_of, text_in
from pillion.gateway.http_api.openai_fields import CallBody, CalledFunction, ContentPart
from pillion.types import ChatMessage, ToolCall

_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning"})
# Types of images, sounds and files, which a model would have to see or hear.
MEDIA_TYPES = frozenset(
    {
        *("image_url", "image", "input_image", "image_file", "video_url", "video", "input_video"),
        *("input_audio", "audio_url", "audio", "file", "input_file", "document"),
    }
)


@dataclass(slots=True)
class ReadContent:
    """Parsed content of a message. Tool results (``results``) are separate messages that precede the message itself."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The texts, joined by newlines."""
        return "\n".join(self.texts)

    @property
    def is_results(self) -> bool:
        """True if the message has nothing but tool results."""
        return bool(self.results) and not (self.texts or self.thoughts or self.calls)


def read_content(
    content: str | Sequence[ContentPart],
    role: str,
    path: str,
    *,
    is_new: bool = False,
    in_result: bool = False,
    media_types: Collection[str] = MEDIA_TYPES,
) -> ReadContent:
    """Parse the content of a message, or of a tool result in it.

    Args:
        content: a text, or parts.
        role: role of the message.
        path: the client's name of the content, for errors.
        is_new: whether this is the last user message; then a part without text is an error.
        in_result: whether this is the content of a tool result.
        media_types: types of parts that are an error in any user message.

    Raises ApiError.
    """
    read = ReadContent()
    if isinstance(content, str):
        read.texts.append(content)
        return read
    for n, part in enumerate(content):
        thought = _thought(part) if role == "assistant" else ""
        text = part.text or part.refusal or ("" if thought else _thought(part))
        if thought:
            read.thoughts.append(thought)
        elif part.type == "tool_use" and role == "assistant" and part.name:
            read.calls.append(ToolCall(part.id or f"{path}[{n}]", part.name, arguments_of(part.input)))
        elif part.type == "tool_result" and part.tool_use_id and role in ("user", "tool") and not in_result:
            read.results.append(_result(part, f"{path}[{n}].content"))
        elif text or part.type in _TEXT_TYPES or (part.type not in media_types and (text := text_in(part.content))):
            read.texts.append(text)
        else:
            read.texts += replace_textless(part.type, path, n, role, is_media=part.type in media_types, is_new=is_new)
    return read


def _result(part: ContentPart, path: str) -> ChatMessage:
    content = parse_field(part.content, str | list[ContentPart], path) if given(part.content) else ""
    text = read_content(content, "tool", path, in_result=True).text
    return ChatMessage("tool", ("Error: " if part.is_error else "") + text, tool_call_id=part.tool_use_id or "")


def _thought(part: ContentPart) -> str:
    """Return the reasoning in a part, "" for none."""
    if isinstance(part.thinking, list):
        return "\n".join(one.text for one in part.thinking)
    return part.thinking or ((part.text or "") if part.type in ("thinking", "reasoning") else "")


def read_calls(
    calls: Sequence[CallBody], function_call: CalledFunction | None, path: str, id_prefix: str
) -> Iterator[ToolCall]:
    """Yield the calls of a message at ``path``. A call without an id gets one that starts with ``id_prefix``.
    Raises ApiError."""
    for m, call in enumerate(calls):
        where, call_id = f"{path}.tool_calls[{m}]", call.id or f"{id_prefix}{m:02}"
        if call.custom is not None:
            yield custom_call(call_id, call.custom.name, call.custom.input)
        elif call.function is not None:
            yield _function_call(call.function, call_id)
        elif call.type in ("function", "custom"):
            raise refused(f"{where}.{call.type}", REQUIRED, "missing_required_parameter")
        else:
            note_ignored(f"{where}.{call.type}")
    if function_call is not None:
        yield _function_call(function_call, f"{id_prefix}{len(calls):02}")


def _function_call(function: CalledFunction, call_id: str) -> ToolCall:
    return ToolCall(call_id, function.name, arguments_of(function.arguments))
