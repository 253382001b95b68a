"""Finished answers in vLLM's form, collected from a stream of deltas; returned by LLM and Client.batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic

from pillion.types import Delta, Timings, TokenLogprob, ToolCall, ToolCallDelta, Usage, Value


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token at its position.

    Attributes:
        logprob: natural logarithm, before temperature, penalties and bias.
        rank: 1 for the most likely token; None for a sampled one outside the reported alternatives.
        decoded_token: the token's text if a tokenizer is available (:class:`pillion.LLM`), else None.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput(Generic[Value]):
    """One finished answer.

    Attributes:
        finish_reason: "stop", "length" or "tool_calls".
        logprobs: for each token, the sampled one first, then the alternatives; None if not requested.
        cumulative_logprob: sum of the log probabilities of the sampled tokens; None if not requested.
        reasoning: the model's reasoning before the answer.
        tool_calls: the model's tool calls.
        parsed: the answer as a value of the caller's schema; None without a schema, and for a truncated answer.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    parsed: Value | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Embedding vector of one text."""

    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """Embedding of one text, in vLLM's form.

    Attributes:
        outputs: the vector, as ``outputs.embedding``.
        prompt_token_ids: the text as the model read it, including the checkpoint's prompt.
    """

    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Score of one pair of texts."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """Score of one pair of texts, in vLLM's form: ``outputs.score``."""

    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A classifier's probability per label for one text."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationRequestOutput:
    """A classifier's result for one text, in vLLM's form: ``outputs.probs``.

    Attributes:
        labels: names of the labels, in the order of the probabilities.
    """

    outputs: ClassificationOutput
    labels: tuple[str, ...]
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput(Generic[Value]):
    """All answers to one prompt.

    Attributes:
        prompt: the prompt's text; None if token ids were given. For a conversation: the output of the chat template
            (LLM), or None (Client).
        prompt_token_ids: the prompt as the model read it; None if only the gateway has the ids.
        prompt_logprobs: log probabilities per token of the prompt, the token's own first, then alternatives; the first
            token has None. None if not requested.
        num_cached_tokens: tokens of the prompt with cached KV.
        usage, timings: from the stream's last delta.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput[Value]]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    usage: Usage | None = None
    timings: Timings | None = None


class OutputCollector:
    """Collects one stream's deltas; :meth:`output` may be called at any time.

    Args:
        prompt, prompt_token_ids: as in :class:`RequestOutput`.
        with_logprobs, with_prompt_logprobs: True if log probabilities were requested.
        decode: returns a token's text, or None if unknown.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: Iterable[int] | None,
        with_logprobs: bool,
        decode: Callable[[int], str | None] = lambda _: None,
        with_prompt_logprobs: bool = False,
    ) -> None:
        self._prompt = prompt
        self._prompt_token_ids = None if prompt_token_ids is None else list(prompt_token_ids)
        self._with_logprobs = with_logprobs
        self._scores: list[TokenLogprob] | None = [] if with_prompt_logprobs else None
        self._decode = decode
        self._answers: dict[int, list[Delta]] = {}
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Add the stream's next delta."""
        self._last = delta
        if delta.prompt_logprobs:
            self._scores = [] if self._scores is None else self._scores
            self._scores.extend(delta.prompt_logprobs)
        else:
            self._answers.setdefault(delta.index, []).append(delta)

    def output(self) -> RequestOutput:
        """Return the answers so far; ``finished`` is True after the last delta."""
        usage = self._last.usage if self._last else None
        return RequestOutput(
            request_id=self._last.request_id if self._last else "",
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(index, deltas) for index, deltas in sorted(self._answers.items())],
            prompt_logprobs=None if self._scores is None else [None, *map(self._position, self._scores)],
            finished=usage is not None,
            num_cached_tokens=usage.cached_tokens if usage else 0,
            usage=usage,
            timings=self._last.timings if self._last else None,
        )

    def _completion(self, index: int, deltas: list[Delta]) -> CompletionOutput:
        logprobs = [one for delta in deltas for one in delta.logprobs] if self._with_logprobs else None
        reason = next((delta.finish_reason for delta in deltas if delta.finish_reason), None)
        return CompletionOutput(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            finish_reason=reason.value if reason else None,
            logprobs=None if logprobs is None else [self._position(one) for one in logprobs],
            cumulative_logprob=None if logprobs is None else sum(one.logprob for one in logprobs),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=_whole_calls(part for delta in deltas for part in delta.tool_calls),
            parsed=next((delta.parsed for delta in deltas if delta.parsed is not None), None),
        )

    def _position(self, sampled: TokenLogprob) -> dict[int, Logprob]:
        """Return the log probabilities at a position, the sampled token first, then the alternatives."""
        ranks = {token_id: rank for rank, token_id in enumerate(sampled.top_ids, 1)}
        rank = sampled.rank or ranks.get(sampled.token_id)
        logprobs = {sampled.token_id: Logprob(sampled.logprob, rank, self._decode(sampled.token_id))}
        for token_id, logprob in zip(sampled.top_ids, sampled.top_logprobs, strict=True):
            logprobs.setdefault(token_id, Logprob(logprob, ranks[token_id], self._decode(token_id)))
        return logprobs


def _whole_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCall]:
    """Join the deltas of streamed tool calls to whole calls."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        call = calls.setdefault(part.index, ToolCall(part.id, part.name, ""))
        calls[part.index] = replace(call, arguments=call.arguments + part.arguments)
    return list(calls.values())
