"""Responses in Anthropic's format: named server-sent events, or one message at the end.

message_start  ping  (content_block_start  content_block_delta ...  content_block_stop) ...  message_delta  message_stop
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from pillion.gateway.anthropic.anthropic_errors import ANTHROPIC_ERRORS
from pillion.gateway.anthropic.signatures import signature_of
from pillion.gateway.http_api.json_objects import CUT_SHORT
from pillion.gateway.http_api.model_calls import AnswerWriter, DeltaBatch
from pillion.gateway.http_api.output_parts import OutputPart, OutputParts, PartKind
from pillion.types import Delta, FinishReason, Usage

_STOP_REASONS = {
    None: None,
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
# Part of an answer -> type of its deltas, and the field with their text.
_DELTAS = {
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}

_encode = msgspec.json.Encoder().encode


class MessageWriter(AnswerWriter):
    """Writer of the response to one call of /v1/messages.

    Args:
        head: the message's fields "id", "model" and "system_fingerprint".
        shows_thinking: whether thinking blocks contain their text; otherwise their signatures do.
        pinned: TTL in seconds -> number of prompt tokens pinned by ``cache_control`` breakpoints.
    """

    def __init__(self, head: Mapping[str, Any], shows_thinking: bool, pinned: Mapping[int, int]) -> None:
        self._head = {**head, "type": "message", "role": "assistant"}
        self._shows_thinking = shows_thinking
        self._pinned = pinned
        self._parts = OutputParts()
        self._begun = False
        # Start of the current block's delta events, up to the text.
        self._front = b""
        self._finish_reason: FinishReason | None = None
        self._stop_string = ""

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return deltas as events of content blocks, preceded by the start of the message."""
        written = []
        if not self._begun:
            self._begun = True
            written += [_event("message_start", {"message": self._message([], usage())}), ANTHROPIC_ERRORS.waiting]
        for _, delta in batch:
            if self._parts.extend_text(delta):
                written.append(self._front + _encode(delta.text) + b"}}\n\n")
            else:
                written += self._delta_events(delta)
        return b"".join(written)

    def last_events(self, usage: Usage) -> bytes:
        """Return the events that end the last content block and the message."""
        block_end = self._block_end(self._parts.all[-1]) if self._parts.all else b""
        message_end = _event("message_delta", {"delta": self._stop(), "usage": _usage(usage, self._pinned)})
        return block_end + message_end + _event("message_stop", {})

    def collect(self, prompt: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        for _, text, _ in self._parts.split(delta):
            self.size_bytes += len(text)
        self._note_end(delta)

    def whole(self, usage: Usage) -> bytes:
        """Return the whole message, for a call without streaming."""
        return _encode(self._message([self._block(part) for part in self._parts.all], usage))

    def _delta_events(self, delta: Delta) -> list[bytes]:
        written = []
        for part, text, is_first in self._parts.split(delta):
            if is_first:
                block_end = self._block_end(self._parts.all[part.index - 1]) if part.index else b""
                empty = self._block(replace(part, texts=[]))
                written += [block_end, _event("content_block_start", {"index": part.index, "content_block": empty})]
                kind, field = _DELTAS[part.kind]
                first_delta = _event("content_block_delta", {"index": part.index, "delta": {"type": kind, field: ""}})
                self._front = first_delta.removesuffix(b'""}}\n\n')
            if text and (self._shows_thinking or part.kind is not PartKind.REASONING):
                written.append(self._front + _encode(text) + b"}}\n\n")
        self._note_end(delta)
        return written

    def _block_end(self, part: OutputPart) -> bytes:
        """Return the events that end a part's content block."""
        signature = self._signature(part)
        signed = {"index": part.index, "delta": {"type": "signature_delta", "signature": signature}}
        return (_event("content_block_delta", signed) if signature else b"") + _event(
            "content_block_stop", {"index": part.index}
        )

    def _note_end(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string

    def _message(self, content: list[Any], usage: Usage) -> dict[str, Any]:
        return {**self._head, "content": content, **self._stop(), "usage": _usage(usage, self._pinned)}

    def _stop(self) -> dict[str, str | None]:
        """Return the fields with the reason of the answer's end."""
        reason = _STOP_REASONS[self._finish_reason]
        if self._stop_string:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._parts.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self._stop_string or None}

    def _block(self, part: OutputPart) -> dict[str, Any]:
        """Convert a part of the answer to a content block."""
        match part.kind:
            case PartKind.REASONING:
                shown = part.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": shown, "signature": self._signature(part)}
            case PartKind.TEXT:
                return {"type": "text", "text": part.text}
            case PartKind.CALL:
                return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}

    def _signature(self, part: OutputPart) -> str:
        """Return the signature of a thinking part whose text is omitted; "" for other parts."""
        omitted = part.kind is PartKind.REASONING and not self._shows_thinking
        return signature_of(part.text) if omitted and part.text else ""


def _input(arguments: str) -> Raw | dict[str, str]:
    """Return a call's arguments as a JSON object. Anything else, e.g. of a truncated call, is wrapped in an object, as
    by Anthropic."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Raw])
    except (ValueError, RecursionError):
        return {CUT_SHORT: arguments} if arguments else {}
    return Raw(arguments.encode())


def _usage(usage: Usage, pinned: Mapping[int, int]) -> dict[str, Any]:
    """Return the usage in Anthropic's fields, which divide the prompt into cached, newly pinned, and remaining tokens.

    ``pinned``: TTL in seconds -> number of pinned tokens.
    """
    cached = usage.cached_tokens
    # Pins with a TTL of an hour.
    hour = max(0, pinned.get(3600, 0) - cached)
    written = max(0, max(pinned.values(), default=0) - cached)
    return {
        "input_tokens": usage.prompt_tokens - cached - written,
        "cache_creation_input_tokens": written,
        "cache_creation": {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour},
        "cache_read_input_tokens": cached,
        **({"cached_tokens_details": usage.cached_by_tier()} if cached else {}),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"
