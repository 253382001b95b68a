"""Tools, calls and results as text, for chat templates without support for them."""

from __future__ import annotations

import json

from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import AnswerReader, OutputFormat
from pillion.gateway.formats.tool_formats import TOOL_FORMATS
from pillion.gateway.tokens.chat_template import introduction, spelled_out
from pillion.types import ChatMessage, Tool, ToolCall

TOOLS = (Tool(name="weather", description="Tells {it}.", parameters='{"type": "object"}'), Tool(name="now"))
CALLS = (ToolCall("a", "weather", '{"city": "Zürich"}'), ToolCall("b", "now", ""))
TURNS = [
    ChatMessage("user", "And in Zürich?"),
    ChatMessage("assistant", "I look.", CALLS),
    ChatMessage("tool", "rain", tool_call_id="a"),
    ChatMessage("tool", "noon", tool_call_id="b"),
    ChatMessage("user", "So?"),
]


def test_tools_calls_and_results_become_text_in_their_turns() -> None:
    told = spelled_out([ChatMessage("system", "Be brief."), *TURNS], introduction(TOOLS))
    assert [one.role for one in told] == ["system", "user", "assistant", "user"]
    assert not any(one.tool_calls or one.tool_call_id or one.name for one in told)
    assert told[0].content.startswith("Be brief.\n\n# Tools\n")
    listed = told[0].content.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line)["function"]["name"] for line in listed.splitlines()] == ["weather", "now"]
    assert "Tells {it}." in listed
    assert told[1].content == "And in Zürich?"
    assert told[3].content == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nSo?"


def test_calls_are_written_in_the_format_that_is_parsed() -> None:
    (told,) = spelled_out([TURNS[1]], "")
    reader = AnswerReader(OutputFormat(None, None, TOOL_FORMATS["generic"], {}, {}), AnswerParts("r", 0))
    reader.push(told.content)
    reader.flush()
    _, deltas = reader.parts.take()
    assert reader.parts.take_content() == "I look."
    assert [delta.name for delta in deltas if delta.name] == ["weather", "now"]
    assert "".join(delta.arguments for delta in deltas if delta.index == 0) == CALLS[0].arguments


def test_without_a_system_message_tools_go_into_the_first_user_message() -> None:
    told = spelled_out([ChatMessage("user", "Hi.")], introduction(TOOLS))
    assert [one.role for one in told] == ["user"]
    assert told[0].content.startswith("# Tools\n")
    assert told[0].content.endswith("</tool_call>\n\nHi.")
    assert spelled_out(TURNS[:1], "") == TURNS[:1]
