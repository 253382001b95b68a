"""Responses as OpenAI's clients read them: one server-sent event for each delta, or one object at the end.

What does not change from event to event is encoded once for each answer; an event costs the encoding of its text.

    opening(0)  event(0, delta) ...  opening(1)  event(1, delta) ...   usage()   data: [DONE]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pillion.gateway.http_api.openai_logprobs import TokenTexts
from pillion.types import Delta, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"
_END = b"\n\n"
# About what the log probability of a token, or of an alternative to it, takes in a response.
LOGPROB_BYTES = 64

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _WrittenAnswer:
    """One answer as written so far. ``head`` is what its events begin with; ``front`` and ``back`` stand around the
    text of one that brings text and no more."""

    head: bytes
    front: bytes
    back: bytes
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str = ""
    offset: int = 0
    # The first token of a prompt whose log probabilities are echoed and have not been written yet.
    first_token: int | None = None
    opened: bool = False


class ResponseWriter:
    """Writes the response to one call; the base of both endpoints. Indexes count answers over all prompts.

    Args:
        head: the fields that every event and the whole response begin with; "object" is set by the endpoint.
        tokens: texts of the model's tokens, for log probabilities.
        logprobs: whether log probabilities are shown.
        usage_field: whether each event has a field for usage, null before the last.
        prompt_logprobs: with how many alternatives those of a prompt are listed; None lists none.
    """

    kind = ""
    event_kind = ""
    # What stands before and behind the text of an event.
    before = b""
    behind = b""
    # The choice of an event before an answer's first one, if there is one, and that of an event that only ends it.
    opening = b""
    empty = b""

    def __init__(
        self,
        head: Mapping[str, Any],
        tokens: TokenTexts,
        *,
        logprobs: bool,
        usage_field: bool,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._head = head
        self._listed = prompt_logprobs
        self._scores: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self._tokens = tokens
        self._shows = logprobs
        self._tail = b',"usage":null}\n\n' if usage_field else b"}\n\n"
        self._common = b"data: " + _encode({**head, "object": self.event_kind})[:-1]
        self._answers: dict[int, _WrittenAnswer] = {}
        # About what the whole response takes so far.
        self.size_bytes = 0

    def event(self, index: int, delta: Delta, usage: bytes = b"") -> bytes:
        """``delta`` as an event, after the opening where it is its answer's first. ``usage`` is JSON."""
        answer = self._answers.get(index) or self._begin(index)
        if delta.text and answer.opened and delta.finish_reason is None and not (usage or self._shows):
            # Nearly every event.
            return answer.front + _encode(delta.text) + answer.back
        tail = self._tail if not usage else b',"usage":' + usage + b"}\n\n"
        opening = b"" if answer.opened or not self.opening else answer.head + self.opening + tail
        answer.opened = True
        content = self.before + _encode(delta.text) + self.behind
        if not (delta.text or delta.token_ids):
            content = self.empty
        logprobs = b"null"
        if self._shows and delta.logprobs:
            logprobs = _encode(self._logprobs(answer, delta.logprobs))
        reason = b"null" if delta.finish_reason is None else _encode(delta.finish_reason.value)
        if delta.stop_string:
            reason += b',"stop_reason":' + _encode(delta.stop_string)
        return b"".join(
            (opening, answer.head, content, b',"logprobs":', logprobs, b',"finish_reason":', reason, b"}]", tail)
        )

    def usage_event(self, usage: Usage) -> bytes:
        """The event with the usage, after the last event of every answer."""
        return self._common + b',"choices":[],"usage":' + usage_json(usage) + b"}" + _END

    def keep(self, index: int, delta: Delta) -> None:
        """Collects a delta for :meth:`whole`."""
        answer = self._answers.get(index) or self._begin(index)
        answer.texts.append(delta.text)
        self.size_bytes += len(delta.text)
        if self._shows:
            answer.logprobs.extend(delta.logprobs)
            self.size_bytes += LOGPROB_BYTES * sum(1 + len(one.top_ids) for one in delta.logprobs)
        if delta.finish_reason is not None:
            answer.finish_reason, answer.stop_string = delta.finish_reason.value, delta.stop_string

    def score(self, prompt: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Collects the log probabilities of a prompt's next tokens."""
        self._scores[prompt].extend(logprobs)
        self.size_bytes += self._score_bytes(logprobs)

    def echo_bytes(self, index: int) -> int:
        """About what the log probabilities of the prompt take that the next event of an answer echoes."""
        return 0 if index in self._answers else ResponseWriter._score_bytes(self, self._echoed_scores(index))

    def _score_bytes(self, logprobs: Sequence[TokenLogprob]) -> int:
        """About what log probabilities of a prompt take in the whole response."""
        return LOGPROB_BYTES * sum(1 + len(one.top_ids) for one in logprobs)

    def _listed_scores(self, prompt: int) -> dict[str, Any]:
        """The field with the log probabilities of a prompt, encoded once for all its answers; none if not asked."""
        if self._listed is None:
            return {}
        return {"prompt_logprobs": msgspec.Raw(_encode(self._tokens.prompt(self._scores[prompt], self._listed)))}

    def whole(self, usage: Usage) -> bytes:
        """All answers in one object."""
        choices = []
        for index, answer in sorted(self._answers.items()):
            logprobs = self._logprobs(answer, [*self._echoed_scores(index), *answer.logprobs]) if self._shows else None
            text = "".join(answer.texts)
            choice = {"index": index, **self._choice(index, text)}
            choices.append({**choice, "logprobs": logprobs, "finish_reason": answer.finish_reason})
            if answer.stop_string:
                # The field is vLLM's.
                choices[-1]["stop_reason"] = answer.stop_string
        whole = {**self._head, "object": self.kind, "choices": choices, "usage": usage_fields(usage)}
        return _encode({**whole, **self._around()})

    def _around(self) -> dict[str, Any]:
        """Further fields of the whole response."""
        return {}

    def _echoed_scores(self, index: int) -> Sequence[TokenLogprob]:
        """Log probabilities of the prompt that the answer's own follow."""
        return ()

    def _begin(self, index: int) -> _WrittenAnswer:
        head = self._common + b',"choices":[{"index":%d,' % index
        back = self.behind + b',"logprobs":null,"finish_reason":null}]' + self._tail
        answer = _WrittenAnswer(head, head + self.before, back)
        self._answers[index] = answer
        return answer

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, answer: _WrittenAnswer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class ChatResponseWriter(ResponseWriter):
    """Responses of /v1/chat/completions."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    before = b'"delta":{"content":'
    behind = b"}"
    opening = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
    empty = b'"delta":{}'

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _around(self) -> dict[str, Any]:
        return self._listed_scores(0)

    def _logprobs(self, answer: _WrittenAnswer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._tokens.chat(logprobs)


class CompletionResponseWriter(ResponseWriter):
    """Responses of /v1/completions.

    Args:
        prompts: the texts to echo, one for each prompt; none without an echo.
        answers: to each prompt.
        echoed_logprobs: with how many alternatives log probabilities of an echoed prompt are shown.
        first_token: gives the first token of a prompt.
    """

    kind = event_kind = "text_completion"
    before = b'"text":'
    empty = b'"text":""'

    def __init__(
        self,
        head: Mapping[str, Any],
        tokens: TokenTexts,
        *,
        logprobs: bool,
        usage_field: bool,
        prompts: Sequence[str],
        answers: int,
        prompt_logprobs: int | None = None,
        echoed_logprobs: int = 0,
        first_token: Callable[[int], int] = lambda prompt: 0,
    ) -> None:
        super().__init__(head, tokens, logprobs=logprobs, usage_field=usage_field, prompt_logprobs=prompt_logprobs)
        self._prompts = prompts
        self._echoed = echoed_logprobs
        self._first_token = first_token
        self._listings: dict[int, dict[str, Any]] = {}
        self._per_prompt = answers
        self.size_bytes = answers * sum(map(len, prompts))

    def event(self, index: int, delta: Delta, usage: bytes = b"") -> bytes:
        """``delta`` as an event; an echoed prompt is an event of its own before it."""
        echoed = b""
        if self._prompts and index not in self._answers:
            text, scores = self._prompts[index // self._per_prompt], tuple(self._echoed_scores(index))
            echoed = super().event(index, Delta(delta.request_id, text, logprobs=scores), usage)
        return echoed + super().event(index, delta, usage)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        prompt = index // self._per_prompt
        if prompt not in self._listings:
            self._listings[prompt] = self._listed_scores(prompt)
        return {"text": (self._prompts[prompt] if self._prompts else "") + text, **self._listings[prompt]}

    def _echoed_scores(self, index: int) -> Sequence[TokenLogprob]:
        if not (self._prompts and self._shows):
            return ()
        scores, most = self._scores[index // self._per_prompt], self._echoed
        if most >= (self._listed or 0):
            return scores
        return [replace(one, top_ids=one.top_ids[:most], top_logprobs=one.top_logprobs[:most]) for one in scores]

    def _score_bytes(self, logprobs: Sequence[TokenLogprob]) -> int:
        times = (self._listed is not None) + bool(self._prompts and self._shows)
        return self._per_prompt * times * super()._score_bytes(logprobs)

    def _begin(self, index: int) -> _WrittenAnswer:
        answer = super()._begin(index)
        if self._prompts and self._shows:
            answer.first_token = self._first_token(index // self._per_prompt)
        return answer

    def _logprobs(self, answer: _WrittenAnswer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        columns, answer.offset = self._tokens.completion(logprobs, answer.offset, answer.first_token)
        answer.first_token = None
        return columns


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Usage by OpenAI's names; cached tokens are always there."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def usage_json(usage: Usage) -> bytes:
    """Usage as JSON."""
    return _encode(usage_fields(usage))


def error_event(body: bytes) -> bytes:
    """The last event of a stream that fails; OpenAI's clients raise it."""
    return b"data: " + body + _END
