"""Turns the messages of a chat into the gateway's own. Earlier turns are told to the model, and not judged: what has
text becomes text, and what has none is left out and named, because a client sends it again with every turn.

Only what the user shows the model has to be seen by it: a part of a user's message that is no text is refused where it
is an image or the like, or stands in the last of these messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Raw

from pillion.gateway.http_api.body_mending import REQUIRED, note_ignored
from pillion.gateway.http_api.custom_tools import custom_call
from pillion.gateway.http_api.gathered_messages import UNSEEN
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import arguments_of
from pillion.gateway.http_api.openai_fields import (
    CallBody,
    CalledFunction,
    ContentPart,
    MessageBody,
    parse_field,
)
from pillion.gateway.request.validation import MAX_MESSAGES
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import ChatMessage, ToolCall

# "developer" is OpenAI's newer name of the same role, which no open model's template knows; "function" is the older
# name of a tool.
_ROLES = {"developer": "system", "function": "tool"}
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning"})
# Parts of these types show something to the model.
_SHOWN = frozenset(
    {
        *("image_url", "image", "input_image", "image_file", "video_url", "video", "input_video"),
        *("input_audio", "audio_url", "audio", "file", "input_file", "document"),
    }
)


def read_messages(raw: Raw) -> tuple[ChatMessage, ...]:
    """Reads a conversation. Raises ApiError. The number of strings in a body, which was checked, bounds what is made of
    it."""
    messages: list[MessageBody] = parse_field(raw, list[MessageBody], "messages")
    if not messages:
        raise refused("messages", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise refused("messages", f"more than {MAX_MESSAGES} messages")
    return tuple(_Told(messages))


class _Told:
    """Tells the messages of a conversation in the gateway's own form. Raises ApiError."""

    def __init__(self, messages: Sequence[MessageBody]) -> None:
        self._messages = messages
        self._last_user = max((n for n, one in enumerate(messages) if one.role == "user"), default=-1)
        # These calls have no result so far: the name of each, by its id.
        self._open: dict[str, str] = {}

    def __iter__(self) -> Iterator[ChatMessage]:
        for n, message in enumerate(self._messages):
            check_wanted()
            yield self._message(message, n)

    def _message(self, message: MessageBody, n: int) -> ChatMessage:
        role = _ROLES.get(message.role, message.role)
        texts, thoughts = self._content(message, role, n)
        calls = tuple(self._calls(message, n))
        for call in calls:
            self._open[call.id] = call.name
        return ChatMessage(
            role=role,
            content="\n".join(texts),
            tool_calls=calls,
            tool_call_id=self._answered(message) if role == "tool" else message.tool_call_id or "",
            name=message.name or "",
            reasoning=message.reasoning_content or message.reasoning or "\n".join(thoughts),
        )

    def _content(self, message: MessageBody, role: str, n: int) -> tuple[list[str], list[str]]:
        """Returns the texts of a message, and what the assistant thought."""
        path, content = f"messages[{n}]", message.content
        if content is None and role not in ("assistant", "tool") and n == len(self._messages) - 1:
            raise refused(f"{path}.content", REQUIRED, "missing_required_parameter")
        if not isinstance(content, list):
            return [content or message.refusal or ""], []
        texts: list[str] = []
        thoughts: list[str] = []
        for m, part in enumerate(content):
            thought = _thought(part) if role == "assistant" else ""
            text = part.text or part.refusal or ("" if thought else _thought(part))
            if thought:
                thoughts.append(thought)
            elif text or part.type in _TEXTS:
                texts.append(text)
            elif role == "user" and (part.type in _SHOWN or n == self._last_user):
                reason = f"{part.type[:100]!r} is not supported here"
                raise refused(f"{path}.content[{m}].type", reason, "unsupported_value")
            else:
                note_ignored(f"{path}.content.{part.type}")
                texts += [UNSEEN] if role == "tool" and part.type in _SHOWN else []
        return texts, thoughts

    def _calls(self, message: MessageBody, n: int) -> Iterator[ToolCall]:
        for m, call in enumerate(message.tool_calls or ()):
            made = _call(call, f"messages[{n}].tool_calls[{m}]", call.id or f"call{n:03}{m:02}")
            if made is not None:
                yield made
        if message.function_call is not None:
            yield _function_call(message.function_call, f"call{n:03}{len(message.tool_calls or ()):02}")

    def _answered(self, message: MessageBody) -> str:
        """Returns the id of the call whose result a message is, and takes it for answered. A result that names none
        belongs to the first call without one, if it can be by its name."""
        found = message.tool_call_id or ""
        if not found:
            names = [one for one, name in self._open.items() if message.name in (None, "", name)]
            found = next(iter([*names, *self._open]), "")
        self._open.pop(found, None)
        return found


def _thought(part: ContentPart) -> str:
    """Returns what a part says of the assistant's reasoning."""
    if isinstance(part.thinking, list):
        return "\n".join(one.text for one in part.thinking)
    return part.thinking or ((part.text or "") if part.type in ("thinking", "reasoning") else "")


def _call(call: CallBody, path: str, call_id: str) -> ToolCall | None:
    """Returns an earlier call, None for one of a kind that no tool here has."""
    if call.custom is not None:
        return custom_call(call_id, call.custom.name, call.custom.input)
    if call.function is not None:
        return _function_call(call.function, call_id)
    if call.type not in ("function", "custom"):
        note_ignored(f"{path}.{call.type}")
        return None
    raise refused(f"{path}.{call.type}", REQUIRED, "missing_required_parameter")


def _function_call(function: CalledFunction, call_id: str) -> ToolCall:
    return ToolCall(call_id, function.name, arguments_of(function.arguments))
