"""Messages of the gateway, some of which are made of several of a client's: all of one are joined at once.

Joined one after another, megabytes of small messages would be copied once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.request.validation import MAX_MESSAGES, MAX_PROMPT_CHARS, message_chars
from pillion.gateway.tokens.tokenizer import check_wanted
from pillion.types import ChatMessage


class GatheredMessages:
    """Gathers a conversation.

    Args:
        role: messages of this role that follow each other are one.
        field: the client's field of the conversation, for errors.
        names: gets the client's names of messages, by the gateway's.
    """

    def __init__(self, role: str, field: str, names: dict[str, str]) -> None:
        self._role = role
        self._field = field
        self._names = names
        self._groups: list[list[ChatMessage]] = []
        self._chars = 0

    def add(self, message: ChatMessage, path: str) -> None:
        """Adds a message, which the client calls ``path``. Raises ApiError where they are too many or too long."""
        check_wanted()
        self._chars += message_chars(message)
        if self._chars > MAX_PROMPT_CHARS:
            raise refused(self._field, f"longer than {MAX_PROMPT_CHARS} characters together")
        last = self._groups[-1][-1] if self._groups else None
        if last is not None and last.role == message.role == self._role:
            self._groups[-1].append(message)
            return
        if len(self._groups) >= MAX_MESSAGES:
            raise refused(self._field, f"more than {MAX_MESSAGES} messages, results of tools included")
        self._names[f"messages[{len(self._groups)}]"] = path
        self._groups.append([message])

    def joined(self, join: Callable[[Sequence[ChatMessage]], ChatMessage]) -> tuple[ChatMessage, ...]:
        """The conversation; ``join`` makes one message of several."""
        return tuple(group[0] if len(group) == 1 else join(group) for group in self._groups)
