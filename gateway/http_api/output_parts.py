"""Parts of one answer in the order of their start: reasoning, texts, and tool calls. Sans-IO (I9).

They become Anthropic's content blocks and the output items of OpenAI's Responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pillion.types import Delta, TokenLogprob, ToolCallDelta


class PartKind(Enum):
    """Kind of a part of an answer."""

    REASONING = 0
    TEXT = 1
    CALL = 2


@dataclass(slots=True)
class OutputPart:
    """Part number ``index`` of an answer. Only calls have ``call_id`` and ``name``, and only texts ``logprobs``."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The part's text so far; for a call, its arguments."""
        return "".join(self.texts)


class OutputParts:
    """Splitter of one answer's deltas into parts. A part ends where the next one starts.

    Attributes:
        all: parts so far; the last one is incomplete.
    """

    def __init__(self) -> None:
        self.all: list[OutputPart] = []
        # Index of the last part's call among the answer's calls, -1 for other kinds.
        self._call = -1

    @property
    def has_calls(self) -> bool:
        """True if the answer has a tool call."""
        return any(part.kind is PartKind.CALL for part in self.all)

    def take(self, delta: Delta) -> Iterator[tuple[OutputPart, str, bool]]:
        """Yield (part, next text, whether the part starts with it).

        A delta may be merged from several: the current call continues first, and further calls come after reasoning
        and content.
        """
        growing = self._call
        for call in delta.tool_calls:
            if call.index == growing:
                yield self._grown(PartKind.CALL, call.arguments, call)
        if delta.reasoning:
            yield self._grown(PartKind.REASONING, delta.reasoning)
        if delta.text:
            yield self._grown(PartKind.TEXT, delta.text)
        for call in delta.tool_calls:
            if call.index != growing:
                yield self._grown(PartKind.CALL, call.arguments, call)

    def further_text(self, delta: Delta) -> bool:
        """Add ``delta`` to the last part and return True if it only has further text of it (the common case)."""
        if delta.finish_reason or delta.reasoning or delta.tool_calls:
            return False
        if not self.all or self.all[-1].kind is not PartKind.TEXT:
            return False
        self.all[-1].texts.append(delta.text)
        return True

    def _grown(self, kind: PartKind, text: str, call: ToolCallDelta | None = None) -> tuple[OutputPart, str, bool]:
        number = -1 if call is None else call.index
        begins = not self.all or self.all[-1].kind is not kind or number != self._call
        if begins:
            self.all.append(OutputPart(kind, len(self.all)))
            self._call = number
        part = self.all[-1]
        if call is not None:
            part.call_id, part.name = part.call_id or call.id, part.name or call.name
        part.texts.append(text)
        return part, text, begins
