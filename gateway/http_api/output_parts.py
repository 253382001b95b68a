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
    """Part number ``index`` of an answer. Only calls have ``call_id`` and ``name``, only texts ``logprobs``."""

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

    def split(self, delta: Delta) -> Iterator[tuple[OutputPart, str, bool]]:
        """Add a delta. Yield (part, its next text, whether the part starts with it).

        A delta may be merged from several: the current call continues first, and further calls come after reasoning
        and text.
        """
        current_call = self._call
        for call in delta.tool_calls:
            if call.index == current_call:
                yield self._extend(PartKind.CALL, call.arguments, call)
        if delta.reasoning:
            yield self._extend(PartKind.REASONING, delta.reasoning)
        if delta.text:
            yield self._extend(PartKind.TEXT, delta.text)
        for call in delta.tool_calls:
            if call.index != current_call:
                yield self._extend(PartKind.CALL, call.arguments, call)

    def extend_text(self, delta: Delta) -> bool:
        """Fast path of :meth:`split`: if ``delta`` only continues a text part, add it and return True."""
        if delta.finish_reason or delta.reasoning or delta.tool_calls:
            return False
        if not self.all or self.all[-1].kind is not PartKind.TEXT:
            return False
        self.all[-1].texts.append(delta.text)
        return True

    def _extend(self, kind: PartKind, text: str, call: ToolCallDelta | None = None) -> tuple[OutputPart, str, bool]:
        number = -1 if call is None else call.index
        is_first = not self.all or self.all[-1].kind is not kind or number != self._call
        if is_first:
            self.all.append(OutputPart(kind, len(self.all)))
            self._call = number
        part = self.all[-1]
        if call is not None:
            part.call_id, part.name = part.call_id or call.id, part.name or call.name
        part.texts.append(text)
        return part, text, is_first
