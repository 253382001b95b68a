"""The formats of one model: named by flags, or found in its chat template. Sans-IO (I9)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from pillion.errors import ConfigError, FieldViolation, InvalidRequest
from pillion.gateway.formats.answer_reader import AnswerForm
from pillion.gateway.formats.client_json import parsed
from pillion.gateway.formats.reasoning import REASONING_FORMATS, ReasoningFormat
from pillion.gateway.formats.tool_formats import GENERIC, SPELLED_OUT, TOOL_FORMATS, ToolFormat
from pillion.types import GenerateRequest, Tool, ToolOptions

AUTO, NONE = "auto", "none"
_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How a model writes reasoning and calls.

    Attributes:
        tool_parser, reasoning_parser: the names of the formats; "none" where there is none.
        auto_choice: whether the model may choose by itself to call a tool.
        foreign: whether its template tells it to call tools in a way that is not read here, so that it calls them in
            the generic one where a grammar makes it, and may not choose.
        mark_ids: by text, the ids of marks that are one token, which a grammar names by its id.
        visible: by id, the texts of those that are left out of plain text.
    """

    tool_parser: str = NONE
    reasoning_parser: str = NONE
    auto_choice: bool = True
    mark_ids: Mapping[str, int] = field(default_factory=dict)
    visible: Mapping[int, str] = field(default_factory=dict)
    foreign: bool = False

    @property
    def tools(self) -> ToolFormat | None:
        """The format of calls."""
        return TOOL_FORMATS.get(self.tool_parser)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning."""
        return REASONING_FORMATS.get(self.reasoning_parser)

    @property
    def spells_out(self) -> bool:
        """Whether tools, calls and results can be told to the model as text."""
        return self.tool_parser in SPELLED_OUT

    def check(self, options: ToolOptions) -> None:
        """Raises InvalidRequest where the model cannot call tools, or may not choose to."""
        if not asks_for_calls(options):
            return
        if self.tools is None:
            text = "this model has no chat template, or its gateway was started with --tool-call-parser none"
            raise InvalidRequest.of(FieldViolation("tools.tools", text))
        if self.foreign and (options.choice or AUTO) == AUTO:
            text = (
                'how this model calls tools by itself is not known: ask for "required" or for a tool by its name, or'
                f" start the gateway with --tool-call-parser, one of {', '.join(TOOL_FORMATS)}"
            )
            raise InvalidRequest.of(FieldViolation("tools.choice", text))
        if not self.auto_choice and (options.choice or AUTO) == AUTO:
            text = '"auto" needs a gateway that was started with --enable-auto-tool-choice'
            raise InvalidRequest.of(FieldViolation("tools.choice", text))

    def read_answers(self, options: ToolOptions) -> bool:
        """Whether the answers to a conversation may hold more than content."""
        return self.reasoning is not None or (self.tools is not None and asks_for_calls(options))

    def answer_form(self, request: GenerateRequest, prompt: str) -> AnswerForm | None:
        """What the answers to a checked conversation may hold; None where it is content alone. ``prompt`` is its
        text."""
        if not request.messages or not self.read_answers(request.tools):
            return None
        reasoning, opened = self.reasoning, None
        tools = self.tools if asks_for_calls(request.tools) else None
        if reasoning is not None:
            opened = reasoning.opened_by(prompt)
            if request.chat.continue_final_message:
                last = request.messages[-1].content
                opened = last.rfind(reasoning.begin) > last.rfind(reasoning.end)
        schemas = {tool.name: schema_of(tool) for tool in request.tools.tools} if tools is not None else {}
        return AnswerForm(reasoning, opened, tools, schemas, self.visible)


NO_FORMATS = ModelFormats()


def asks_for_calls(options: ToolOptions) -> bool:
    """Whether answers may call tools."""
    return bool(options.tools) and options.choice != NONE


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a checked tool's arguments; {} is any object."""
    return dict(parsed(tool.parameters)) if tool.parameters else {}


def choose_formats(
    template: str,
    codec: tokenizers.Tokenizer,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    auto_choice: bool = True,
) -> ModelFormats:
    """The formats of a model. ``template`` is its chat template's text, "" where it has none; the names are "auto",
    "none" or a format's. Raises ConfigError for another name."""
    tools, reasoning = parser_names(template, tool_parser, reasoning_parser)
    marks: list[str] = []
    if tools != NONE:
        marks += TOOL_FORMATS[tools].marks
    if reasoning != NONE:
        marks += (REASONING_FORMATS[reasoning].begin, REASONING_FORMATS[reasoning].end)
    added = {token.content: (number, token) for number, token in codec.get_added_tokens_decoder().items()}
    known = [(mark, *added[mark]) for mark in dict.fromkeys(marks) if mark in added]
    return ModelFormats(
        tools,
        reasoning,
        auto_choice,
        # llguidance takes them for tokens without a text: they are named by their ids or not at all.
        {mark: number for mark, number, token in known if token.special or (mark[0] == "<" and mark[-1] == ">")},
        {number: mark for mark, number, token in known if token.special},
        foreign=tools == GENERIC and tool_parser == AUTO and knows_tools(template),
    )


def parser_names(template: str, tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """The names of the formats of calls and of reasoning; see :func:`choose_formats`."""
    return (
        _chosen("--tool-call-parser", tool_parser, TOOL_FORMATS, _tools_in(template)),
        _chosen("--reasoning-parser", reasoning_parser, REASONING_FORMATS, _reasoning_in(template)),
    )


def _chosen(flag: str, name: str, known: Mapping[str, Any], found: str) -> str:
    if name == AUTO:
        return found
    if name != NONE and name not in known:
        raise ConfigError(f"{flag} {name!r} is not one of auto, none, {', '.join(known)}")
    return name


def knows_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return _TOOLS.search(template) is not None


def _tools_in(template: str) -> str:
    """The format that a chat template speaks of, or the generic one; none where there is no template."""
    if knows_tools(template):
        for name, form in TOOL_FORMATS.items():
            if any(all(text in template for text in texts) for texts in form.found):
                return name
    return GENERIC if template else NONE


def _reasoning_in(template: str) -> str:
    """The format whose marks are in a chat template. Many templates have them for models that do not reason, so a
    format that takes every answer for reasoning is never found."""
    for name, form in REASONING_FORMATS.items():
        if form.end in template and not form.assumed:
            return name
    return NONE
