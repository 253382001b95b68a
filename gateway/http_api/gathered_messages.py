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

# Replacement of an image in a tool result, so that the conversation can continue.
UNSEEN = "[There is an image here, which this model cannot see.]"


def replace_textless(kind: str, path: str, number: int, role: str, *, is_media: bool, is_new: bool) -> list[str]:
    """Return the texts that replace a content part without text: a note for media in a tool result, else none.

    The part is number ``number`` of the content ``path`` of a message of a ``role``; it is noted as without effect.
    Raises ApiError for media in a user message, and for any such part of a new user message.
    """
    if role == "user" and (is_media or is_new):
        raise refused(f"{path}[{number}].type", f"{kind[:100]!r} is not supported here", "unsupported_value")
    note_ignored(f"{path}.{kind}")
    return [UNSEEN] if is_media and role == "tool" else []


class GatheredMessages:
    """Collector of a conversation's messages, which joins consecutive ones of a role.

    Args:
        role: role whose consecutive messages are joined.
        field: the client's field with the conversation, for errors.
        names: the gateway's name of each message -> the client's, for errors; filled in.
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
