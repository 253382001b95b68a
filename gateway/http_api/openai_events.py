"""Responses in OpenAI's format: one server-sent event per delta, or one object at the end.

Fields that are the same in all events of an answer are encoded once; an event costs the encoding of its text.

    opening(0)  event(0, delta) ...  opening(1)  event(1, delta) ...   usage   data: [DONE]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pillion.gateway.http_api.custom_tools import CustomCalls
from pillion.gateway.http_api.model_calls import AnswerWriter, DeltaBatch
from pillion.gateway.http_api.openai_fields import ChatBody
from pillion.gateway.http_api.openai_logprobs import TokenOffsets, TokenTexts
from pillion.gateway.http_api.openai_requests import OpenAIRequest
from pillion.types import Delta, Timings, TokenLogprob, ToolCallDelta, Usage

DONE = b"data: [DONE]\n\n"
# Approximate size of a token id in a response.
ID_BYTES = 8
_BEFORE_REASONING, _AFTER_REASONING = "<think>\n", "\n</think>\n\n"
# Approximate size of a token's log probability in a response.
LOGPROB_BYTES = 64

_encode = msgspec.json.Encoder().encode
PromptIds = Callable[[int], Sequence[int]]


@dataclass(slots=True)
class _WrittenAnswer:
    """What was written of one answer.

    Attributes:
        head: start of its events.
        front, back: what encloses the text in an event without other content.
        offsets: offsets of its tokens, in completions with log probabilities.
    """

    head: bytes
    front: bytes
    back: bytes
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str = ""
    offsets: TokenOffsets | None = None
    # First token of a prompt whose echoed log probabilities are still to be written.
    first_token: int | None = None
    opened: bool = False


class ResponseWriter(AnswerWriter):
    """Writer of the response to one call of OpenAI's API; subclassed per endpoint. Answers are
    indexed over all prompts.

    Args:
        head: first fields of every event and of the whole response; "object" is set by the endpoint.
        tokens: texts of the model's tokens, for log probabilities.
        parsed: the call.
        prompt_ids: returns the token ids of a prompt that has had a delta.
    """

    kind = ""
    event_kind = ""
    before = b""
    after = b""
    # Rest of the choice in an answer's opening event, if there is one, and content of a choice without text.
    opening = b""
    empty = b""

    def __init__(
        self, head: Mapping[str, Any], tokens: TokenTexts, parsed: OpenAIRequest, prompt_ids: PromptIds
    ) -> None:
        self._head = head
        self._tokens = tokens
        self._parsed = parsed
        self._prompt_ids = prompt_ids
        self._shows_logprobs, self._shows_ids = parsed.logprobs, bool(parsed.body.return_token_ids)
        self._shows_usage = parsed.continuous_usage
        self._prompt_usage = b""
        self._per_prompt = parsed.answers
        self._tail = b',"usage":null}\n\n' if parsed.include_usage else b"}\n\n"
        self._common = b"data: " + _encode({**head, "object": self.event_kind})[:-1]
        self._answers: dict[int, _WrittenAnswer] = {}
        self._timings: Timings | None = None
        self._prompt_logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return one event per delta; the first one of an answer is preceded by its opening event, if it has one."""
        so_far = b""
        if self._shows_usage:
            counts = usage()
            so_far = usage_json(counts)
            self._prompt_usage = usage_json(Usage(counts.prompt_tokens, counts.cached_tokens, 0))
        if batch:
            self._timings = batch[-1][1].timings
        return b"".join([self.event(prompt * self._per_prompt + delta.index, delta, so_far) for prompt, delta in batch])

    def events_bytes(self, batch: DeltaBatch) -> int:
        """Return the approximate size of the prompts' token ids in these events."""
        if not self._shows_ids:
            return 0
        return sum(ID_BYTES * len(self._prompt_ids(prompt)) for prompt in self._starting_prompts(batch))

    def _starting_prompts(self, batch: DeltaBatch) -> set[int]:
        """Return the numbers of the prompts whose first deltas of an answer are in this batch."""
        return {prompt for prompt, delta in batch if prompt * self._per_prompt + delta.index not in self._answers}

    def last_events(self, usage: Usage) -> bytes:
        """Return the event with usage and timings, if requested, and the end marker."""
        fields: dict[str, Any] = {"usage": self._usage(usage)} if self._parsed.include_usage else {}
        fields |= self._timings_field()
        if not fields:
            return DONE
        return self._common + b',"choices":[],' + _encode(fields)[1:] + b"\n\n" + DONE

    def event(self, index: int, delta: Delta, usage: bytes = b"") -> bytes:
        """Return ``delta`` as an event; the first one of an answer is preceded by its opening event.

        ``usage``: JSON; b"" for none.
        """
        answer = self._answers.get(index) or self._start_answer(index)
        if (
            delta.text
            and answer.opened
            and delta.finish_reason is None
            and not (usage or self._shows_logprobs or self._shows_ids)
        ):
            # Fast path: nearly every event has only text.
            return answer.front + _encode(delta.text) + answer.back
        opening, ids = self._opening(index, answer, bool(usage))
        content = self.before + _encode(delta.text) + self.after
        if not (delta.text or delta.token_ids):
            content = self.empty
        logprobs = b"null"
        if self._shows_logprobs and delta.logprobs:
            logprobs = _encode(self._logprobs(answer, delta.logprobs))
        reason = b"null" if delta.finish_reason is None else _encode(delta.finish_reason.value)
        if delta.stop_string:
            reason += b',"stop_reason":' + _encode(delta.stop_string)
        if self._shows_ids:
            ids += b',"token_ids":' + _encode(delta.token_ids)
        tail = self._tail_with(usage)
        return b"".join(
            (opening, answer.head, content, b',"logprobs":', logprobs, b',"finish_reason":', reason, ids, b"}]", tail)
        )

    def _opening(self, index: int, answer: _WrittenAnswer, with_usage: bool) -> tuple[bytes, bytes]:
        """Return, once per answer, its opening events, and further fields for the choice of its first event.

        ``with_usage``: whether each event has the usage so far.
        """
        answer.opened = True
        return b"", b""

    def _tail_with(self, usage: bytes) -> bytes:
        """Return the end of an event, after its choices. ``usage`` is JSON, or b"" for none."""
        return b',"usage":' + usage + b"}\n\n" if usage else self._tail

    def collect(self, prompt: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        self._timings = delta.timings
        if delta.prompt_logprobs:
            self._prompt_logprobs[prompt].extend(delta.prompt_logprobs)
            self.size_bytes += self._prompt_logprobs_copies * _logprobs_bytes(delta.prompt_logprobs)
            return
        index = prompt * self._per_prompt + delta.index
        answer = self._answers.get(index) or self._start_answer(index)
        answer.texts.append(delta.text)
        self.size_bytes += len(delta.text)
        if self._shows_logprobs:
            answer.logprobs.extend(delta.logprobs)
            self.size_bytes += LOGPROB_BYTES * sum(1 + len(one.top_ids) for one in delta.logprobs)
        if self._shows_ids:
            if not answer.token_ids:
                self.size_bytes += ID_BYTES * len(self._prompt_ids(prompt))
            answer.token_ids.extend(delta.token_ids)
            self.size_bytes += ID_BYTES * len(delta.token_ids)
        if delta.finish_reason is not None:
            answer.finish_reason, answer.stop_string = delta.finish_reason.value, delta.stop_string

    def whole(self, usage: Usage) -> bytes:
        """Return all answers of a call in one object."""
        choices = []
        for index, answer in sorted(self._answers.items()):
            logprobs = None
            if self._shows_logprobs:
                logprobs = self._logprobs(answer, [*self._echoed_logprobs(index), *answer.logprobs])
            text = "".join(answer.texts)
            choice = {"index": index, **self._choice(index, text)}
            choices.append({**choice, "logprobs": logprobs, "finish_reason": answer.finish_reason})
            if self._shows_ids:
                choices[-1]["token_ids"] = answer.token_ids
            if answer.stop_string:
                choices[-1]["stop_reason"] = answer.stop_string
        whole = {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(usage)}
        return _encode({**whole, **self._timings_field(), **self._extra_fields()})

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_fields(usage, with_receipt=bool(self._parsed.body.timings))

    def _timings_field(self) -> dict[str, Any]:
        return {"timings": self._timings} if self._parsed.body.timings and self._timings is not None else {}

    @property
    def _prompt_logprobs_copies(self) -> int:
        """Number of times that the whole response repeats a prompt's log probabilities."""
        return 1

    def _prompt_logprobs_field(self, prompt: int) -> dict[str, Any]:
        """Return vLLM's field with a prompt's log probabilities, if requested."""
        max_top = self._parsed.body.prompt_logprobs
        if max_top is None:
            return {}
        return {"prompt_logprobs": self._tokens.prompt(self._prompt_logprobs[prompt], max_top)}

    def _extra_fields(self) -> dict[str, Any]:
        """Return further fields of a whole response."""
        return {}

    def _echoed_logprobs(self, index: int) -> Sequence[TokenLogprob]:
        """Return the log probabilities of the echoed prompt, which precede the answer's."""
        return ()

    def _start_answer(self, index: int) -> _WrittenAnswer:
        head = self._common + b',"choices":[{"index":%d,' % index
        back = self.after + b',"logprobs":null,"finish_reason":null}]' + self._tail
        answer = _WrittenAnswer(head, head + self.before, back)
        self._answers[index] = answer
        return answer

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, answer: _WrittenAnswer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class ChatResponseWriter(ResponseWriter):
    """Writer of responses of /v1/chat/completions."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    before = b'"delta":{"content":'
    after = b"}"
    opening = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
    empty = b'"delta":{}'

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return the events of these deltas. The finish reason comes in a separate event with an empty delta, since
        some clients ignore the rest of the event that has it."""
        return super().events([part for prompt, delta in batch for part in self._with_end(prompt, delta)], usage)

    def _with_end(self, prompt: int, delta: Delta) -> Iterator[tuple[int, Delta]]:
        """Yield (prompt, delta), with a finish reason moved into a separate delta."""
        if delta.finish_reason is None:
            yield prompt, delta
            return
        shows_tokens = bool(delta.token_ids) and (self._shows_logprobs or self._shows_ids)
        if delta.text or delta.reasoning or delta.tool_calls or shows_tokens:
            yield prompt, replace(delta, finish_reason=None, stop_string="")
        yield prompt, replace(delta, text="", reasoning="", tool_calls=(), token_ids=(), logprobs=())

    def _opening(self, index: int, answer: _WrittenAnswer, with_usage: bool) -> tuple[bytes, bytes]:
        if answer.opened:
            return b"", b""
        answer.opened = True
        ids = b""
        if self._shows_ids:
            ids = b',"prompt_token_ids":' + _encode(self._prompt_ids(0))
        tail = self._tail_with(self._prompt_usage if with_usage else b"")
        events = answer.head + self.opening + ids + tail
        if self._parsed.echoed:
            content = self.before + _encode(self._parsed.echoed) + self.after
            events += answer.head + content + b',"logprobs":null,"finish_reason":null}]' + tail
        return events, b""

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self._parsed.echoed + text, "refusal": None}}

    def _extra_fields(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._prompt_ids(0)} if self._shows_ids else {}
        return {**self._prompt_logprobs_field(0), **ids}

    def _logprobs(self, answer: _WrittenAnswer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._tokens.chat(logprobs)


@dataclass(slots=True)
class _WrittenParts:
    """Reasoning and tool calls of an answer.

    Attributes:
        calls: call's index -> its deltas.
        think_opened, think_closed: whether <think> and </think> were written into the content.
    """

    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)
    think_opened: bool = False
    think_closed: bool = False


class ParsedChatWriter(ChatResponseWriter):
    """Writer of chat responses that may have reasoning and tool calls. An event has a delta of at most one call.

    Args:
        reasons: whether the model reasons. If reasoning is omitted, so are log probabilities and token ids, which would
            reveal it.
    """

    def __init__(
        self, head: Mapping[str, Any], tokens: TokenTexts, parsed: OpenAIRequest, prompt_ids: PromptIds, reasons: bool
    ) -> None:
        super().__init__(head, tokens, parsed, prompt_ids)
        assert isinstance(parsed.body, ChatBody)
        self._hides_reasoning = parsed.body.include_reasoning is False
        self._inlines_reasoning = parsed.body.separate_reasoning is False
        if reasons and self._hides_reasoning:
            self._shows_logprobs = self._shows_ids = False
        self._parts: defaultdict[int, _WrittenParts] = defaultdict(_WrittenParts)
        self._custom = CustomCalls(parsed.custom)

    def event(self, index: int, delta: Delta, usage: bytes = b"") -> bytes:
        """Return ``delta`` as events: one with its reasoning and content, then one per delta of a call."""
        delta = self._apply_reasoning_options(index, delta)
        if not (delta.reasoning or delta.tool_calls):
            return super().event(index, delta, usage)
        delta = self._custom.read(delta, index)
        written: dict[str, Any] = _reasoning_fields(delta.reasoning) if delta.reasoning else {}
        if delta.text:
            written["content"] = delta.text
        changes = ([written] if written else []) + [
            {"tool_calls": [_call_delta(part, self._custom.has(part.index, index))]} for part in delta.tool_calls
        ]
        answer = self._answers.get(index) or self._start_answer(index)
        tail = self._tail_with(usage)
        events = [self._opening(index, answer, bool(usage))[0]]
        for n, change in enumerate(changes):
            shows_logprobs = self._shows_logprobs and delta.logprobs and n == 0
            logprobs = self._logprobs(answer, delta.logprobs) if shows_logprobs else None
            fields = {"delta": change, "logprobs": logprobs, "finish_reason": None}
            if self._shows_ids and n == 0:
                fields["token_ids"] = delta.token_ids
            events.append(answer.head + _encode(fields)[1:] + b"]" + tail)
        return b"".join(events)

    def _apply_reasoning_options(self, index: int, delta: Delta) -> Delta:
        """Return the delta with its reasoning omitted, or moved into its text, if the call requests that."""
        if self._hides_reasoning:
            return replace(delta, reasoning="") if delta.reasoning else delta
        if not self._inlines_reasoning:
            return delta
        parts, text = self._parts[index], delta.text
        if parts.think_opened and not parts.think_closed and (text or delta.tool_calls) and not delta.reasoning:
            parts.think_closed, text = True, _AFTER_REASONING + text
        if delta.reasoning:
            begin = "" if parts.think_opened else _BEFORE_REASONING
            parts.think_opened, parts.think_closed = True, bool(text or delta.tool_calls)
            text = begin + delta.reasoning + (_AFTER_REASONING if parts.think_closed else "") + text
        return delta if text == delta.text else replace(delta, text=text, reasoning="")

    def collect(self, prompt: int, delta: Delta) -> None:
        """Collect a delta for :meth:`whole`."""
        index = prompt * self._per_prompt + delta.index
        delta = self._apply_reasoning_options(index, delta)
        super().collect(prompt, delta)
        if not (delta.reasoning or delta.tool_calls):
            return
        delta, parts = self._custom.read(delta, index), self._parts[index]
        parts.reasoning.append(delta.reasoning)
        self.size_bytes += len(delta.reasoning)
        for part in delta.tool_calls:
            parts.calls.setdefault(part.index, []).append(part)
            self.size_bytes += len(part.arguments)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        parts = self._parts[index]
        reasoning = "".join(parts.reasoning)
        text = self._parsed.echoed + text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if not text and (reasoning or parts.calls):
            message["content"] = None
        if reasoning:
            message |= _reasoning_fields(reasoning)
        if parts.calls:
            calls = sorted(parts.calls.items())
            message["tool_calls"] = [_whole_call(call, self._custom.has(n, index)) for n, call in calls]
        return {"message": message}


class CompletionResponseWriter(ResponseWriter):
    """Writer of responses of /v1/completions.

    Args:
        prompts: the texts to echo, one per prompt; none without echo.
    """

    kind = event_kind = "text_completion"
    before = b'"text":'
    empty = b'"text":""'

    def __init__(
        self,
        head: Mapping[str, Any],
        tokens: TokenTexts,
        parsed: OpenAIRequest,
        prompt_ids: PromptIds,
        prompts: Sequence[str],
    ) -> None:
        super().__init__(head, tokens, parsed, prompt_ids)
        self._prompts = prompts
        self._echoes_logprobs = bool(prompts) and parsed.logprobs
        self._prompt_fields: dict[int, dict[str, Any]] = {}
        self.size_bytes = parsed.answers * sum(map(len, prompts))

    def events(self, batch: DeltaBatch, usage: Callable[[], Usage]) -> bytes:
        """Return one event per delta of an answer. A prompt's log probabilities are stored, and sent with its echo."""
        if self._echoes_logprobs:
            for prompt, delta in batch:
                self._prompt_logprobs[prompt].extend(delta.prompt_logprobs)
            batch = [(prompt, delta) for prompt, delta in batch if not delta.prompt_logprobs]
        return super().events(batch, usage)

    def events_bytes(self, batch: DeltaBatch) -> int:
        """Return the approximate size of echoes and prompts' token ids in these events."""
        if not self._echoes_logprobs:
            return super().events_bytes(batch)
        logprobs_bytes = sum(_logprobs_bytes(self._prompt_logprobs[prompt]) for prompt in self._starting_prompts(batch))
        return super().events_bytes(batch) + self._per_prompt * logprobs_bytes

    def event(self, index: int, delta: Delta, usage: bytes = b"") -> bytes:
        """Return ``delta`` as an event, preceded by an event with the echoed prompt."""
        echoed = b""
        if self._prompts and index not in self._answers:
            text, logprobs = self._prompts[index // self._per_prompt], tuple(self._echoed_logprobs(index))
            prompt_usage = self._prompt_usage if usage else b""
            echoed = super().event(index, Delta(delta.request_id, text, logprobs=logprobs), prompt_usage)
        return echoed + super().event(index, delta, usage)

    def _opening(self, index: int, answer: _WrittenAnswer, with_usage: bool) -> tuple[bytes, bytes]:
        is_first, answer.opened = not answer.opened, True
        if not (is_first and self._shows_ids):
            return b"", b""
        return b"", b',"prompt_token_ids":' + _encode(self._prompt_ids(index // self._per_prompt))

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        prompt = index // self._per_prompt
        if prompt not in self._prompt_fields:
            listed = self._prompt_logprobs_field(prompt)
            if self._shows_ids:
                listed["prompt_token_ids"] = self._prompt_ids(prompt)
            self._prompt_fields[prompt] = {name: msgspec.Raw(_encode(value)) for name, value in listed.items()}
        return {"text": (self._prompts[prompt] if self._prompts else "") + text, **self._prompt_fields[prompt]}

    @property
    def _prompt_logprobs_copies(self) -> int:
        return self._per_prompt * ((self._parsed.body.prompt_logprobs is not None) + self._echoes_logprobs)

    def _echoed_logprobs(self, index: int) -> Sequence[TokenLogprob]:
        if not self._echoes_logprobs:
            return ()
        logprobs, max_top = (
            self._prompt_logprobs[index // self._per_prompt],
            self._parsed.requests[0].sampling.logprobs or 0,
        )
        if max_top >= (self._parsed.body.prompt_logprobs or 0):
            return logprobs
        return [
            replace(one, top_ids=one.top_ids[:max_top], top_logprobs=one.top_logprobs[:max_top]) for one in logprobs
        ]

    def _start_answer(self, index: int) -> _WrittenAnswer:
        answer = super()._start_answer(index)
        prompt, echoed, prompt_tokens = index // self._per_prompt, "", 0
        if self._echoes_logprobs:
            ids = self._prompt_ids(prompt)
            answer.first_token, echoed, prompt_tokens = ids[0], self._prompts[prompt], len(ids)
        if self._shows_logprobs:
            shows_specials = self._parsed.requests[0].sampling.skip_special_tokens is False
            answer.offsets = TokenOffsets(self._tokens, echoed, prompt_tokens, shows_specials)
        return answer

    def _logprobs(self, answer: _WrittenAnswer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        assert answer.offsets is not None
        first_token, answer.first_token = answer.first_token, None
        return self._tokens.completion(logprobs, answer.offsets, first_token)


def _logprobs_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    """Return the approximate size of log probabilities in a response, in bytes."""
    return LOGPROB_BYTES * sum(1 + len(one.top_ids) for one in logprobs)


def _reasoning_fields(text: str) -> dict[str, Any]:
    """Return the fields with reasoning: "reasoning_content", which most clients read, and vLLM's "reasoning"."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(part: ToolCallDelta, custom: bool) -> dict[str, Any]:
    """Return a delta of a tool call in OpenAI's format; the call's first delta has its id and name."""
    kind, field = ("custom", "input") if custom else ("function", "arguments")
    if not part.name:
        return {"index": part.index, kind: {field: part.arguments}}
    return {"index": part.index, "id": part.id, "type": kind, kind: {"name": part.name, field: part.arguments}}


def _whole_call(parts: Sequence[ToolCallDelta], custom: bool) -> dict[str, Any]:
    kind, field = ("custom", "input") if custom else ("function", "arguments")
    function = {"name": parts[0].name, field: "".join(part.arguments for part in parts)}
    return {"id": parts[0].id, "type": kind, kind: function}


def usage_fields(usage: Usage, *, with_receipt: bool = False) -> dict[str, Any]:
    """Return the usage in OpenAI's fields.

    Cached tokens are always included; their tiers, reasoning tokens and draft tokens only if nonzero. The receipt
    (:func:`receipt_fields`) is Pillion's extension.
    """
    details = {"reasoning_tokens": usage.reasoning_tokens} if usage.reasoning_tokens else {}
    if usage.guessed_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = usage.guessed_tokens - usage.accepted_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cached_fields(usage),
        **({"completion_tokens_details": details} if details else {}),
        **(receipt_fields(usage) if with_receipt else {}),
    }


def receipt_fields(usage: Usage) -> dict[str, Any]:
    """Return the fields with the tokens that a request computed, and with its KV memory in byte seconds."""
    return {"computed_tokens": usage.computed_tokens, "kv_byte_seconds": usage.kv_byte_seconds()}


def cached_fields(usage: Usage) -> dict[str, Any]:
    """Return the number of cached prompt tokens and, if any, their tiers."""
    tiers = {"cached_tokens_details": usage.cached_by_tier()} if usage.cached_tokens else {}
    return {"cached_tokens": usage.cached_tokens, **tiers}


def usage_json(usage: Usage) -> bytes:
    """Return the usage in OpenAI's fields as JSON, without the receipt."""
    return _encode(usage_fields(usage))
