"""From what people type to a request: shared by the clients, their batches and :class:`pillion.LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.types import ChatMessage, GenerateRequest, SamplingParams
from pillion.v1 import gateway_pb2
from pillion.wire.public import request_to_pb

Prompt = str | Sequence[int]
Message = ChatMessage | Mapping[str, str]
# One item of a batch: a prompt, or a conversation.
Item = Prompt | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What every call takes beside its prompt; ``fields`` are those of the sampling, given by keyword."""

    model: str = ""
    sampling: SamplingParams | None = None
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def of_prompt(self, prompt: Prompt) -> GenerateRequest:
        """Raises TypeError for unknown fields."""
        if isinstance(prompt, str):
            return replace(self._request(), text=prompt)
        return replace(self._request(), token_ids=tuple(prompt))

    def of_chat(self, messages: Sequence[Message]) -> GenerateRequest:
        """Raises TypeError for unknown fields, InvalidRequest for what is no message."""
        said = (message_of(message, f"messages[{n}]") for n, message in enumerate(messages))
        return replace(self._request(), messages=tuple(said))

    def of_item(self, item: Item) -> GenerateRequest:
        """Whatever it is. Raises as the others do."""
        if not isinstance(item, str) and item and isinstance(item[0], ChatMessage | Mapping):
            return self.of_chat(item)  # type: ignore[arg-type]
        return self.of_prompt(item)  # type: ignore[arg-type]

    def _request(self) -> GenerateRequest:
        return GenerateRequest(
            model=self.model,
            sampling=sampling_of(self.sampling, self.fields),
            cache_salt=self.cache_salt,
            request_id=self.request_id,
            priority=self.priority,
        )


def sampling_of(sampling: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """Raises TypeError for an unknown field, or for both ways at once."""
    if sampling is not None and fields:
        raise TypeError(f"give sampling or its fields by keyword, not both: {', '.join(sorted(fields))}")
    said = sampling if sampling is not None else SamplingParams(**fields)
    stop: Any = said.stop
    # Else every letter of it would be a stop string.
    return replace(said, stop=(stop,)) if isinstance(stop, str) else said


def to_pb(request: GenerateRequest) -> gateway_pb2.GenerateRequest:
    """Raises InvalidRequest for what fits no field of the message: it never leaves this machine."""
    try:
        return request_to_pb(request)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from None


def message_of(message: Message, where: str) -> ChatMessage:
    """Raises InvalidRequest, naming ``where``, for what is no message of role and text."""
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidRequest.of(FieldViolation(where, "a message is its role and its content, and nothing else"))
    for name, text in message.items():
        if not isinstance(text, str):
            raise InvalidRequest.of(FieldViolation(f"{where}.{name}", f"a text, not {type(text).__name__}"))
    return ChatMessage(message["role"], message["content"])
