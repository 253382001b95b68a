"""Responses in the format of OpenAI's Responses API: numbered server-sent events, or one object at the end.

    created  in_progress  item ...  completed, incomplete or failed
    item: output_item.added  content_part.added  delta ...  done  content_part.done  output_item.done

Fields that are the same in all events of an item are encoded once; an event costs the encoding of its text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pillion.gateway.http_api.custom_tools import CustomCalls
from pillion.gateway.http_api.model_calls import AnswerWriter, DeltaBatch
from pillion.gateway.http_api.openai_events import LOGPROB_BYTES, cached_fields
from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.gateway.http_api.output_parts import OutputPart, OutputParts, PartKind
from pillion.gateway.responses.responses_requests import ResponsesRequest
from pillion.types import Delta, FinishReason, TokenLogprob, Usage

# Part kind -> prefix of its item's id, and type of the events with its text.
_ITEMS = {
    PartKind.REASONING: ("rs", "response.reasoning_text"),
    PartKind.TEXT: ("msg", "response.output_text"),
    PartKind.CALL: ("fc", "response.function_call_arguments"),
}
# Code of an error -> code of a failed response; other errors become "server_error".
_CODES = {
    "context_length_exceeded": "context_length_exceeded",
    "rate_limit_exceeded": "rate_limit_exceeded",
    "invalid_value": "invalid_prompt",
}

_encode = msgspec.json.Encoder().encode


class ResponsesWriter(AnswerWriter):
    """Writer of the response to one call of /v1/responses.

    Args:
        head: the response's fields "id", "created_at", "model" and "system_fingerprint", and those of sampling.
        tokens: texts of the model's tokens, for log probabilities; None for a response without text.
        parsed: the call.
    """

    def __init__(self, head: Mapping[str, Any], tokens: TokenTexts | None, parsed: ResponsesRequest) -> None:
        self._head = head
        self._tokens = tokens
        self._shows_logprobs = parsed.logprobs
        self._echoed = parsed.echoed
        self._parts = OutputParts()
        self._custom = CustomCalls(parsed.custom)
        self._namespaced = parsed.namespaced
        self._sequence_number = 0
        # Bytes before and after the text in the current item's delta events.
        self._front = self._back = b""
        self._finish_reason: FinishReason | None = None
        self._pending_logprobs: list[TokenLogprob] = []

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return deltas as events of output items, preceded by the start of the response."""
        written = self._begin()
        for _, delta in batch:
            if not self._shows_logprobs and self._parts.extend_text(delta):
                written.append(self._text_event(delta.text))
            else:
                written += self._delta_events(delta)
        return b"".join(written)

    def last_events(self, usage: Usage) -> bytes:
        """Return the events that end the last item and the response."""
        item_end = [*self._item_end(self._parts.all[-1])] if self._parts.all else []
        status = self._status()
        return b"".join([*item_end, self._event(f"response.{status}", {"response": self._response(status, usage)})])

    def failed(self, error: bytes) -> bytes:
        """Return the last events of a failed response, with the items so far. ``error``: body of an OpenAI error."""
        content = msgspec.json.decode(error)["error"]
        code = _CODES.get(content["code"], "server_error")
        response = self._response("failed", None) | {"error": {"code": code, "message": content["message"]}}
        return b"".join([*self._begin(), self._event("response.failed", {"response": response})])

    def collect(self, prompt: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        for part, text, _ in self._parts.split(self._custom.read(delta)):
            self.size_bytes += len(text)
            self._add_logprobs(part, delta)
        self._store_pending_logprobs(delta)
        self._finish_reason = delta.finish_reason or self._finish_reason
        self._flush_logprobs()

    def whole(self, usage: Usage) -> bytes:
        """Return the whole response, for a call without streaming."""
        return _encode(self._response(self._status(), usage))

    def _begin(self) -> list[bytes]:
        """Return the events of the response's start, once."""
        if self._sequence_number:
            return []
        begun = self._response("in_progress", None)
        return [self._event(f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")]

    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        self._finish_reason = delta.finish_reason or self._finish_reason
        for part, text, is_first in self._parts.split(self._custom.read(delta)):
            if is_first:
                if part.index:
                    yield from self._item_end(self._parts.all[part.index - 1])
                yield from self._item_start(part)
            logprobs = self._add_logprobs(part, delta)
            if logprobs:
                fields = {**self._location(part), "delta": text, "logprobs": self._logprobs(logprobs)}
                yield self._event("response.output_text.delta", fields)
            elif text:
                yield self._text_event(text)
        self._store_pending_logprobs(delta)
        if last := self._flush_logprobs():
            fields = {**self._location(self._parts.all[-1]), "delta": "", "logprobs": self._logprobs(last)}
            yield self._event("response.output_text.delta", fields)

    def _add_logprobs(self, part: OutputPart, delta: Delta) -> list[TokenLogprob]:
        """Add a delta's log probabilities, and those of preceding tokens without text, to a text part."""
        if not self._shows_logprobs or part.kind is not PartKind.TEXT:
            return []
        logprobs = [*self._pending_logprobs, *delta.logprobs]
        self._append_logprobs(part, logprobs)
        return logprobs

    def _flush_logprobs(self) -> list[TokenLogprob]:
        """At the answer's end, add the pending log probabilities, e.g. of EOS, to the last text; return them."""
        pending = self._pending_logprobs
        if self._finish_reason is None or not pending or not self._parts.all:
            return []
        part, self._pending_logprobs = self._parts.all[-1], []
        if part.kind is not PartKind.TEXT:
            return []
        self._append_logprobs(part, pending)
        return pending

    def _append_logprobs(self, part: OutputPart, logprobs: Sequence[TokenLogprob]) -> None:
        part.logprobs.extend(logprobs)
        self.size_bytes += LOGPROB_BYTES * sum(1 + len(one.top_ids) for one in logprobs)

    def _store_pending_logprobs(self, delta: Delta) -> None:
        """Store the log probabilities of tokens without text, until the next text."""
        if delta.text or delta.reasoning or delta.tool_calls:
            self._pending_logprobs.clear()
        elif self._shows_logprobs:
            self._pending_logprobs += delta.logprobs

    def _item_start(self, part: OutputPart) -> Iterator[bytes]:
        empty = OutputPart(part.kind, part.index, part.call_id, part.name)
        item = self._item(empty, "in_progress")
        if part.kind is not PartKind.CALL:
            item["content"] = []
        yield self._event("response.output_item.added", {"output_index": part.index, "item": item})
        if part.kind is not PartKind.CALL:
            yield self._event("response.content_part.added", {**self._location(part), "part": self._content(empty)})
        kind, more = f"{self._kind(part)}.delta", b',"logprobs":[]' if part.kind is PartKind.TEXT else b""
        head = _encode({"type": kind, **self._location(part)})[:-1]
        self._front = b"event: " + kind.encode() + b"\ndata: " + head + b',"delta":'
        self._back = more + b',"sequence_number":'

    def _item_end(self, part: OutputPart) -> Iterator[bytes]:
        field = "text" if part.kind is not PartKind.CALL else "input" if self._is_custom(part) else "arguments"
        fields: dict[str, Any] = {**self._location(part), field: part.text}
        if part.kind is PartKind.TEXT:
            fields["logprobs"] = self._logprobs(part.logprobs)
        yield self._event(f"{self._kind(part)}.done", fields)
        if part.kind is not PartKind.CALL:
            yield self._event("response.content_part.done", {**self._location(part), "part": self._content(part)})
        item = self._item(part, self._item_status(part, self._status()))
        yield self._event("response.output_item.done", {"output_index": part.index, "item": item})

    def _text_event(self, text: str) -> bytes:
        event = self._front + _encode(text) + self._back + b"%d}\n\n" % self._sequence_number
        self._sequence_number += 1
        return event

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        numbered = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(numbered) + b"\n\n"

    def _status(self) -> str:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _item_status(self, part: OutputPart, status: str) -> str:
        """Return the status of an item; only the last one can be incomplete."""
        return "incomplete" if status != "completed" and part is self._parts.all[-1] else "completed"

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        ended = status in ("completed", "incomplete")
        return {
            **self._head,
            "object": "response",
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if ended else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._echoed,
            "output": [self._item(part, self._item_status(part, status)) for part in self._parts.all],
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _location(self, part: OutputPart) -> dict[str, Any]:
        """Return the fields that locate the text of an item in the response."""
        location = {"item_id": self._item_id(part), "output_index": part.index}
        return location if part.kind is PartKind.CALL else {**location, "content_index": 0}

    def _is_custom(self, part: OutputPart) -> bool:
        return part.kind is PartKind.CALL and part.name in self._custom.names

    def _kind(self, part: OutputPart) -> str:
        return "response.custom_tool_call_input" if self._is_custom(part) else _ITEMS[part.kind][1]

    def _item_id(self, part: OutputPart) -> str:
        prefix = "ctc" if self._is_custom(part) else _ITEMS[part.kind][0]
        return f"{prefix}_{part.index}_{self._head['id']}"

    def _item(self, part: OutputPart, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        match part.kind:
            case PartKind.REASONING:
                return {**item, "type": "reasoning", "summary": [], "content": [self._content(part)]}
            case PartKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": [self._content(part)]}
            case PartKind.CALL:
                namespace, name = self._namespaced.get(part.name, ("", part.name))
                call = {"call_id": part.call_id, "name": name, **({"namespace": namespace} if namespace else {})}
                if self._is_custom(part):
                    return {**item, "type": "custom_tool_call", **call, "input": part.text}
                return {**item, "type": "function_call", **call, "arguments": part.text}

    def _content(self, part: OutputPart) -> dict[str, Any]:
        if part.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": part.text}
        logprobs = self._logprobs(part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, logprobs: Any) -> Any:
        assert self._tokens is not None
        return self._tokens.chat(logprobs)["content"]


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage in the fields of OpenAI's Responses."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {**cached_fields(usage), "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
