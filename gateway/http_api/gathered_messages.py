"""Joining of consecutive messages into one, as models expect them, with one copy of each text.

Appending each message to the text before it would copy megabytes again for each small message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pillion.errors import InvalidRequest
from pillion.gateway.http_api.body_reading import note_ignored
from pillion.gateway.http_api.http_errors import from_pillion, refused
from pillion.gateway.request.validation import MAX_MESSAGES, MAX_PROMPT_CHARS, message_chars, too_many_chars
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import ChatMessage

# Replaces an image in a tool result, so that the conversation can continue.
UNSEEN = "[There is an image here, which this model cannot see.]"


def without_text(kind: str, path: str, number: int, role: str, *, is_image: bool, is_new: bool) -> list[str]:
    """Return the model's replacement for part ``number``, without text, of the content ``path`` of a ``role``.

    Raises ApiError for an image of the user's, and for any part of a new message of the user's. Others are dropped, and
    named as without effect.
    """
    if role == "user" and (is_image or is_new):
        raise refused(f"{path}[{number}].type", f"{kind[:100]!r} is not supported here", "unsupported_value")
    note_ignored(f"{path}.{kind}")
    return [UNSEEN] if is_image and role == "tool" else []


class GatheredMessages:
    """Messages of a conversation.

    Args:
        role: consecutive messages of this role are joined.
        field: the client's field with the conversation, for errors.
        names: receives the gateway's name of each message -> the client's, for errors.
    """

    def __init__(self, role: str, field: str, names: dict[str, str]) -> None:
        self._role = role
        self._field = field
        self._names = names
        self._groups: list[list[ChatMessage]] = []
        self._chars = 0

    def add(self, message: ChatMessage, path: str) -> None:
        """Add a message, which the client calls ``path``. Raises ApiError for too many messages or too much text."""
        check_wanted()
        self._chars += message_chars(message)
        if self._chars > MAX_PROMPT_CHARS:
            raise from_pillion(InvalidRequest.of(too_many_chars("messages")), {"messages": self._field})
        last = self._groups[-1][-1] if self._groups else None
        if last is not None and last.role == message.role == self._role:
            self._groups[-1].append(message)
            return
        if len(self._groups) >= MAX_MESSAGES:
            raise refused(self._field, f"more than {MAX_MESSAGES} messages, results of tools included")
        self._names[f"messages[{len(self._groups)}]"] = path
        self._groups.append([message])

    def joined(self, join: Callable[[Sequence[ChatMessage]], ChatMessage]) -> tuple[ChatMessage, ...]:
        """Return the whole conversation; ``join`` merges several messages."""
        return tuple(group[0] if len(group) == 1 else join(group) for group in self._groups)
