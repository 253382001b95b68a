"""Joins neighbouring messages of a client's conversation into one message, as models expect them, and copies each text
only once.

If each message were appended to the text of those before it, megabytes of text would be copied again for each small
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pillion.errors import InvalidRequest
from pillion.gateway.http_api.body_reading import note_ignored
from pillion.gateway.http_api.http_errors import from_pillion, refused
from pillion.gateway.request.validation import MAX_MESSAGES, MAX_PROMPT_CHARS, message_chars, too_many_chars
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import ChatMessage

# A tool's result may hold an image. It stays in the conversation for good, so the model is told of it, and the
# conversation can go on.
UNSEEN = "[There is an image here, which this model cannot see.]"


def without_text(kind: str, path: str, number: int, role: str, *, is_image: bool, is_new: bool) -> list[str]:
    """Returns what the model reads in place of a part without text, part ``number`` of the content ``path`` of a
    ``role``. Only what the user shows the model has to be seen by it: raises ApiError for an image of the user's, and
    for any part of what ``is_new``. Others are left out and named."""
    if role == "user" and (is_image or is_new):
        raise refused(f"{path}[{number}].type", f"{kind[:100]!r} is not supported here", "unsupported_value")
    note_ignored(f"{path}.{kind}")
    return [UNSEEN] if is_image and role == "tool" else []


class GatheredMessages:
    """Gathers the messages of a conversation.

    Args:
        role: neighbouring messages of this role are joined.
        field: the field of the client's request that has the conversation, which errors name.
        names: a dict that is filled with what the client calls each message, by what the gateway calls it, for errors.
    """

    def __init__(self, role: str, field: str, names: dict[str, str]) -> None:
        self._role = role
        self._field = field
        self._names = names
        self._groups: list[list[ChatMessage]] = []
        self._chars = 0

    def add(self, message: ChatMessage, path: str) -> None:
        """Adds a message, which the client calls ``path``. Raises ApiError where there are too many messages or too
        much text."""
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
        """Returns the whole conversation; ``join`` makes one message of several."""
        return tuple(group[0] if len(group) == 1 else join(group) for group in self._groups)
