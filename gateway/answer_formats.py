"""Defines the seam at which formats read more than plain text in answers, and make answers follow grammars."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pillion.config import AnswerFlags
from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.tokens.answer_text import AnswerText, Detokenizer, StopStrings
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.rooms import Seam, entered_one
from pillion.types import GenerateRequest, ToolOptions

NONE = "none"


class AskedOutput:
    """Says what the answers to one request may hold besides content. The formats of answers extend it."""

    __slots__ = ()


class RequestGrammar(NamedTuple):
    """Holds the grammar that the answers to a request follow, as a worker gets it, and the client's fields from which
    it was made."""

    text: str
    fields: tuple[str, ...]


class TenantTurns(NamedTuple):
    """Says how a tenant's work leaves the event loop: ``off_loop(bytes, job, *arguments)`` runs a job, on a thread
    where it is long; ``boxed()`` is the tenant's turn at a process that all tenants share."""

    off_loop: Callable[..., Awaitable[Any]]
    boxed: Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class StopRules:
    """Says when an answer ends by its text or tokens: by stop strings and stop ids, but not before ``min_tokens``. What
    stops it is part of its text where it is ``included``."""

    strings: StopStrings
    ids: frozenset[int]
    min_tokens: int
    included: bool = False


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Says how a model's answers are written. In this class they are content alone.

    Attributes:
        tool_parser, reasoning_parser: the names of the formats of calls and of reasoning; "none" where there is none.
    """

    tool_parser: str = NONE
    reasoning_parser: str = NONE

    @property
    def spells_out(self) -> bool:
        """Says whether tools, calls and results can be told to the model as text."""
        return False

    @property
    def in_channels(self) -> bool:
        """Says whether the model writes messages in channels, and its template takes one call a message."""
        return False

    def check(self, options: ToolOptions, structured: bool = False) -> None:
        """Raises InvalidRequest where answers cannot call these tools, or cannot be ``structured``."""
        text = "this gateway reads no formats of answers"
        if options.asks_for_calls:
            raise InvalidRequest.of(FieldViolation("tools.tools", text))
        if structured:
            raise InvalidRequest.of(FieldViolation("sampling.structured_outputs", text))

    def read_answers(self, options: ToolOptions) -> bool:
        """Returns whether the answers to a conversation may hold more than content."""
        return False

    def output_format(self, request: GenerateRequest, prompt: str) -> AskedOutput | None:
        """Returns what the answers to a checked conversation may hold; None where that is content alone. ``prompt`` is
        its text."""
        return None

    async def grammar(
        self, request: GenerateRequest, output: AskedOutput | None, turns: TenantTurns
    ) -> RequestGrammar | None:
        """Returns the grammar that every answer follows; None where the answers may be any text. Raises InvalidRequest,
        Overloaded and Unavailable."""
        return None

    def new_text(
        self, output: AskedOutput | None, detokenizer: Detokenizer, stops: StopRules, answer_id: str, index: int
    ) -> AnswerText:
        """Makes the text of answer number ``index`` of a request, before its first token."""
        return AnswerText(detokenizer, stops.strings, stops.ids, stops.min_tokens, stops.included)

    async def warm_up(self) -> None:
        """Does once what the first request would otherwise wait for. It raises nothing."""

    async def aclose(self) -> None:
        """Ends the work that a model's formats do beside requests, such as processes that compile grammars."""


NO_FORMATS = AnswerFormats()


@dataclass(frozen=True, slots=True)
class FormatSource:
    """Holds that in which the formats of a model's answers are found: its tokenizer with the chat template, the
    tokenizer's file, and the token ids."""

    tokenizer: ModelTokenizer
    file: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class FormatMakers(NamedTuple):
    """Makes the formats of answers for a room. ``names`` returns the names of the formats of calls and of reasoning,
    for a chat template's text; ``make`` makes the formats of a model. Both raise ConfigError for flags that cannot
    work."""

    names: Callable[[str, AnswerFlags], tuple[str, str]]
    make: Callable[[FormatSource, AnswerFlags], AnswerFormats]


FORMATS = Seam[FormatMakers]("gateway.formats")


def parser_names(template: str, flags: AnswerFlags) -> tuple[str, str]:
    """Returns the names of the formats in which a model with this chat template writes calls and reasoning. Raises
    ConfigError."""
    return entered_one(FORMATS).names(template, flags)


def formats_of(source: FormatSource, flags: AnswerFlags) -> AnswerFormats:
    """Makes the formats of a model's answers. Raises ConfigError."""
    return entered_one(FORMATS).make(source, flags)
