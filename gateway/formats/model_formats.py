"""Selects the formats of one model's reasoning and calls, by flags or from its chat template. Sans-IO (I9)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from pillion.errors import ConfigError, FieldViolation, InvalidRequest
from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import OutputFormat, ReadAnswerText
from pillion.gateway.formats.harmony import HARMONY_MARKS
from pillion.gateway.formats.reasoning import HARMONY, REASONING_ALIASES, REASONING_FORMATS, ReasoningFormat
from pillion.gateway.formats.tool_formats import (
    GENERIC,
    OPENAI,
    SPELLED_OUT,
    TOOL_ALIASES,
    TOOL_FORMATS,
    ToolFormat,
    spelling,
)
from pillion.gateway.formats.xml_calls import MINIMAX
from pillion.gateway.grammars.json_schema import of_arguments
from pillion.gateway.request.client_json import parsed
from pillion.gateway.tokens.answer_text import AnswerText, Detokenizer, StopRules
from pillion.gateway.tokens.chat_template import knows_tools
from pillion.types import GenerateRequest, Tool, ToolOptions

AUTO, NONE = "auto", "none"
# Tokens that may be marks are in brackets, so one pass finds all candidates in a text.
MARK = re.compile(rf"{re.escape(MINIMAX)}|[<\[][^<>\[\]]*[>\]]")


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How a model writes reasoning and tool calls.

    Attributes:
        tool_parser, reasoning_parser: names of the formats of calls and of reasoning, or "none".
        auto_choice: whether the model may decide to call a tool.
        foreign: whether its template describes calls in an unsupported format. Calls are then only made on request, in
            the generic format, which a grammar enforces.
        mark_ids: ids of tokens that may be marks, by text; a grammar refers to such a mark by id.
        visible: texts of the formats' special tokens, by id; detokenized text has no other special tokens.
    """

    tool_parser: str = NONE
    reasoning_parser: str = NONE
    auto_choice: bool = True
    mark_ids: Mapping[str, int] = field(default_factory=dict)
    visible: Mapping[int, str] = field(default_factory=dict)
    foreign: bool = False

    @property
    def tools(self) -> ToolFormat | None:
        """Format of tool calls, or None."""
        return TOOL_FORMATS.get(self.tool_parser)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """Format of reasoning, or None."""
        return REASONING_FORMATS.get(self.reasoning_parser)

    @property
    def reads_reasoning(self) -> bool:
        """True if answers have a reasoning part."""
        return self.reasoning_parser != NONE

    @property
    def spells_out(self) -> bool:
        """True if tools, calls and results can be put into the prompt as text."""
        return self.tool_parser in SPELLED_OUT

    @property
    def spelling(self) -> tuple[str, str, str]:
        """Format of calls as text, for templates without calls."""
        return spelling(self.tool_parser)

    @property
    def in_channels(self) -> bool:
        """True if answers are messages in channels."""
        return self.tool_parser == OPENAI or self.reasoning_parser == HARMONY

    def check(self, options: ToolOptions) -> None:
        """Raise InvalidRequest if the model cannot call tools, or may not decide to."""
        if not options.asks_for_calls:
            return
        if self.tools is None:
            text = "this model has no chat template, or its gateway was started with --tool-call-parser none"
            raise InvalidRequest.of(FieldViolation("tools.tools", text))
        if self.foreign and (options.choice or AUTO) == AUTO:
            text = (
                'the tool call format of this model is unknown: ask for "required" or for a tool by its name, or'
                f" start the gateway with --tool-call-parser, one of {', '.join(TOOL_FORMATS)}"
            )
            raise InvalidRequest.of(FieldViolation("tools.choice", text))
        if not self.auto_choice and (options.choice or AUTO) == AUTO:
            text = '"auto" needs a gateway that was started with --enable-auto-tool-choice'
            raise InvalidRequest.of(FieldViolation("tools.choice", text))

    def read_answers(self, options: ToolOptions) -> bool:
        """Return whether the answers to a conversation may contain more than content."""
        return self.reasoning is not None or (self.tools is not None and options.asks_for_calls)

    def output_format(self, request: GenerateRequest, prompt: str) -> OutputFormat | None:
        """Return what the answers to a validated conversation may contain, or None for only content. ``prompt``: the
        rendered conversation."""
        structured = request.sampling.structured_outputs
        visible = {} if structured is None else self._marks_of_tag(structured.structural_tag)
        if not request.messages or not self.read_answers(request.tools):
            return OutputFormat(None, None, None, {}, visible) if visible else None
        reasoning, opened, answering = self.reasoning, None, False
        tools = self.tools if request.tools.asks_for_calls else None
        if reasoning is not None:
            opened, answering = reasoning.begins_in_reasoning(prompt), reasoning.begins_in_content(prompt)
            if request.chat.continue_final_message:
                last = request.messages[-1].content
                opened = last.rfind(reasoning.begin) > last.rfind(reasoning.end)
        schemas = {tool.name: schema_of(tool) for tool in request.tools.tools} if tools is not None else {}
        return OutputFormat(reasoning, opened, tools, schemas, {**self.visible, **visible}, answering)

    def _marks_of_tag(self, tag: str | None) -> dict[int, str]:
        """Return the special tokens in a request's structural tag, texts by id; clients see them in the answer."""
        if not tag:
            return {}
        try:
            text = json.dumps(parsed(tag), ensure_ascii=False)
        except (ValueError, RecursionError):
            return {}
        # An iterator, since a single findall would block other threads.
        marks = (match[0] for match in MARK.finditer(text))
        return {self.mark_ids[mark]: mark for mark in marks if mark in self.mark_ids}

    def new_text(
        self, output: OutputFormat | None, detokenizer: Detokenizer, stops: StopRules, answer_id: str, index: int
    ) -> AnswerText:
        """Create the text of answer ``index`` of a request, before its first token."""
        if output is None:
            return AnswerText(detokenizer, stops.strings, stops.ids, stops.min_tokens, stops.included)
        parts = AnswerParts(answer_id, index, output.tools is not None and output.tools.short_ids)
        return ReadAnswerText(detokenizer, stops.strings, stops.ids, stops.min_tokens, output, parts, stops.included)


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the normalized schema of a validated tool's arguments; {} allows any object."""
    return of_arguments(parsed(tool.parameters)) if tool.parameters else {}


def choose_formats(
    template: str,
    codec: tokenizers.Tokenizer,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    auto_choice: bool = True,
) -> ModelFormats:
    """Return a model's formats. ``template`` is its chat template's text, "" if it has none; the names are "auto",
    "none" or a format's. Raises ConfigError for other names."""
    tools, reasoning = parser_names(template, tool_parser, reasoning_parser)
    marks: list[str] = []
    if tools != NONE:
        marks += TOOL_FORMATS[tools].marks
    if reasoning != NONE:
        marks += REASONING_FORMATS[reasoning].marks
    added = codec.get_added_tokens_decoder()
    if tools == OPENAI or reasoning == HARMONY:
        known = {token.content for token in added.values()}
        if missing := [mark for mark in HARMONY_MARKS if mark not in known]:
            raise ConfigError(
                f"answers in OpenAI's Harmony format need tokens that the model lacks: {', '.join(missing)}"
            )
    return ModelFormats(
        tools,
        reasoning,
        auto_choice,
        # llguidance sees these as tokens without text, so a grammar refers to them by id.
        {
            token.content: number
            for number, token in added.items()
            if MARK.fullmatch(token.content) and (token.special or token.content[0] == "<")
        },
        # A mark may consist of several tokens.
        {
            number: token.content
            for number, token in added.items()
            if token.special and MARK.fullmatch(token.content) and any(token.content in mark for mark in marks)
        },
        foreign=tools == GENERIC and tool_parser == AUTO and knows_tools(template),
    )


def parser_names(template: str, tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """Return the tool format and the reasoning format that :func:`choose_formats` uses for a template. Raises
    ConfigError for unknown names, or a combination that is not supported."""
    tools = _chosen("--tool-call-parser", tool_parser, TOOL_FORMATS, TOOL_ALIASES, _tools_in(template))
    detected = next((name for name, form in REASONING_FORMATS.items() if form.is_in(template)), NONE)
    reasoning = _chosen("--reasoning-parser", reasoning_parser, REASONING_FORMATS, REASONING_ALIASES, detected)
    if reasoning == HARMONY and tool_parser == AUTO:
        tools = OPENAI
    if tools == OPENAI and reasoning_parser == AUTO:
        reasoning = HARMONY
    if (reasoning == HARMONY and tools not in (OPENAI, NONE)) or (tools == OPENAI and reasoning not in (HARMONY, NONE)):
        text = f"--tool-call-parser {tools} and --reasoning-parser {reasoning} cannot be combined"
        raise ConfigError(f"{text}: combine {OPENAI} and {HARMONY}, or either with {NONE}")
    return tools, reasoning


def _chosen(flag: str, name: str, known: Mapping[str, Any], aliases: Mapping[str, str], detected: str) -> str:
    """Return the format that a flag names, maybe by an alias; for "auto" the ``detected`` one. Raises ConfigError."""
    if name == AUTO:
        return detected
    if name != NONE and name not in known and name not in aliases:
        raise ConfigError(f"{flag} {name!r} is not one of auto, none, {', '.join(sorted({*known, *aliases}))}")
    return aliases.get(name, name)


def _tools_in(template: str) -> str:
    """Return the name of the tool format that a chat template describes, else the generic one; "none" without a
    template."""
    if knows_tools(template):
        for name, form in TOOL_FORMATS.items():
            if any(all(text in template for text in texts) for texts in form.template_texts):
                return name
    return GENERIC if template else NONE
