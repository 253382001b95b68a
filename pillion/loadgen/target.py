"""Interface to a server under load, and Pillion's gRPC API. :mod:`pillion.loadgen.openai_target` has OpenAI's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pillion.client.async_client import AsyncClient
from pillion.errors import PillionError
from pillion.types import SamplingParams

Message = dict[str, str]


class TargetError(Exception):
    """A request failed: ``status`` is the kind of failure ("Overloaded", "HTTP 429"), ``message`` the server's text."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One request: token ids, or a conversation."""

    output_tokens: int
    ids: Sequence[int] = ()
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts as the server reports them; ``cached`` counts prompt tokens."""

    prompt: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """One message of an answer: its new tokens (1 if the server does not report them), and the counts at the end."""

    text: str
    tokens: int
    counts: TokenCounts | None = None


class LoadTarget(Protocol):
    """A server under load."""

    def stream(self, request: AnswerRequest) -> AsyncGenerator[AnswerMessage, None]:
        """Stream one answer. Raises TargetError."""

    async def describe(self) -> dict[str, Any]:
        """Return the server's self-description, for the report. Raises TargetError if it does not answer."""

    async def aclose(self) -> None:
        """Close all connections to the server."""


class PillionTarget:
    """A Pillion gateway under load, over gRPC.

    Args:
        ignore_eos: generate exactly the requested length.
        timeout_s: each request's deadline at the gateway, in seconds; None: none.
        reach: arguments of :class:`pillion.AsyncClient`: target, ca, cert, key, api_key.
    """

    def __init__(
        self, model: str, ignore_eos: bool, temperature: float, timeout_s: float | None = None, **reach: Any
    ) -> None:
        self._client = AsyncClient(**reach)
        self._model = model
        self._ignore_eos = ignore_eos
        self._temperature = temperature
        self._timeout_s = timeout_s

    async def stream(self, request: AnswerRequest) -> AsyncGenerator[AnswerMessage, None]:
        sampling = SamplingParams(
            max_tokens=request.output_tokens, temperature=self._temperature, ignore_eos=self._ignore_eos
        )
        try:
            common: dict[str, Any] = {"model": self._model, "sampling": sampling, "timeout_s": self._timeout_s}
            if request.messages:
                stream = self._client.chat(request.messages, **common)
            else:
                stream = self._client.generate(request.ids, **common)
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    usage = delta.usage
                    counts = None
                    if usage is not None:
                        counts = TokenCounts(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
                    yield AnswerMessage(delta.text, len(delta.token_ids), counts)
        except PillionError as error:
            raise TargetError(type(error).__name__, error.message) from None

    async def describe(self) -> dict[str, Any]:
        try:
            models, status = await self._client.models(), await self._client.status()
        except PillionError as error:
            raise TargetError(type(error).__name__, error.message) from None
        components = [
            {"component": component.component_id, "role": component.role, "kernels": component.kernels}
            for component in status.components
        ]
        return {"version": status.version, "models": [asdict(model) for model in models], "components": components}

    async def aclose(self) -> None:
        await self._client.close()
