"""A model's formats are detected from its chat template or set by flags; the flags list every row of the tables."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.errors import ConfigError, InvalidRequest
from pillion.gateway.formats.harmony import HARMONY_MARKS
from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.formats.reasoning import REASONING_ALIASES, REASONING_FORMATS
from pillion.gateway.formats.tool_formats import TOOL_ALIASES, TOOL_FORMATS
from pillion.gateway.grammars import tool_pieces
from pillion.types import ChatMessage, ChatOptions, GenerateRequest, Tool, ToolOptions

TOOLS = ToolOptions(tools=(Tool(name="f"),))


def test_aliases_and_writers_match_the_format_tables() -> None:
    assert set(TOOL_ALIASES.values()) <= TOOL_FORMATS.keys()
    assert set(REASONING_ALIASES.values()) <= REASONING_FORMATS.keys()
    assert TOOL_ALIASES.keys().isdisjoint(TOOL_FORMATS)
    assert REASONING_ALIASES.keys().isdisjoint(REASONING_FORMATS)
    assert set(tool_pieces._WRITERS) == set(TOOL_FORMATS)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes", "none"),
        ("{% if tools %}<tool_call>\n<function=x>\n<parameter=y>{% endif %}", "qwen3_coder", "none"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral", "none"),
        ('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}', "llama3_json", "none"),
        ("{% if tools %}<tool_call>{% endif %}{% if enable_thinking %}<think></think>", "hermes", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "generic", "qwen3"),
        ("[THINK][/THINK]", "generic", "mistral"),
        ("{{ tools }}functions.<|channel|>analysis<|message|><|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("<|channel|>final<|message|>, but no tools", "openai", "openai_gptoss"),
        ("<tool_call>, but no variable", "generic", "none"),
        ("", "none", "none"),
    ],
)
def test_formats_are_detected_from_the_template(template: str, tools: str, reasoning: str) -> None:
    codec = byte_tokenizer()
    codec.add_special_tokens([AddedToken(mark, special=True) for mark in HARMONY_MARKS])
    found = choose_formats(template, codec)
    assert (found.tool_parser, found.reasoning_parser) == (tools, reasoning)


def test_a_flag_overrides_the_template() -> None:
    found = choose_formats("{{ tools }}<tool_call></think>", byte_tokenizer(), "mistral", "none")
    assert (found.tool_parser, found.reasoning_parser) == ("mistral", "none")
    found = choose_formats("", byte_tokenizer(), "qwen25", "qwen3-thinking")
    assert (found.tool_parser, found.reasoning_parser) == ("hermes", "deepseek_r1")
    with pytest.raises(ConfigError, match="--tool-call-parser 'x' is not one of auto, none, "):
        choose_formats("", byte_tokenizer(), "x")


def test_channel_formats_need_both_parsers_and_their_tokens() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser hermes and --reasoning-parser openai_gptoss cannot be"):
        choose_formats("", byte_tokenizer(), "hermes", "openai_gptoss")
    with pytest.raises(ConfigError, match="--tool-call-parser openai and --reasoning-parser qwen3 cannot be combined"):
        choose_formats("", byte_tokenizer(), "openai", "qwen3")
    with pytest.raises(ConfigError, match=r"tokens that the model lacks: <\|start\|>, <\|channel\|>"):
        choose_formats("", byte_tokenizer(), "openai")


def test_marks_in_the_vocabulary_are_matched_by_token_id() -> None:
    codec = byte_tokenizer()
    codec.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    codec.add_tokens([AddedToken("[ARGS]", special=False), AddedToken("</think>", special=False)])
    found = choose_formats("", codec, "mistral", "qwen3")
    called, thought = codec.token_to_id("[TOOL_CALLS]"), codec.token_to_id("</think>")
    # llguidance treats each added token in angle brackets, and each special one, as a token without text.
    ours = {mark: number for mark, number in found.mark_ids.items() if number > codec.token_to_id("<eos>")}
    assert ours == {"[TOOL_CALLS]": called, "</think>": thought}
    assert found.visible == {called: "[TOOL_CALLS]"}


def test_tools_need_a_format() -> None:
    none, chosen = choose_formats("", byte_tokenizer()), choose_formats("", byte_tokenizer(), "hermes", "none", False)
    none.check(ToolOptions())
    none.check(ToolOptions(tools=TOOLS.tools, choice="none"))
    with pytest.raises(
        InvalidRequest, match="no chat template, or its gateway was started with --tool-call-parser none"
    ):
        none.check(TOOLS)
    with pytest.raises(InvalidRequest, match="--enable-auto-tool-choice"):
        chosen.check(TOOLS)
    chosen.check(ToolOptions(tools=TOOLS.tools, choice="required"))


def test_a_model_without_a_tool_format_calls_tools_only_if_forced() -> None:
    foreign = choose_formats("{% if tools %}<|call|>{% endif %}", byte_tokenizer())
    assert (foreign.tool_parser, foreign.foreign) == ("generic", True)
    with pytest.raises(InvalidRequest, match=r'ask for "required" or .*--tool-call-parser, one of .*hermes') as refused:
        foreign.check(TOOLS)
    assert [one.field for one in refused.value.violations] == ["tools.choice"]
    foreign.check(ToolOptions(tools=TOOLS.tools, choice="required"))
    foreign.check(ToolOptions(tools=TOOLS.tools, choice="named", name=TOOLS.tools[0].name))
    # If the template does not decide, or the operator sets the format, the model may choose.
    choose_formats("{{ messages }}", byte_tokenizer()).check(TOOLS)
    choose_formats("{{ tools }}", byte_tokenizer(), "generic").check(TOOLS)


@pytest.mark.parametrize(
    ("content", "opened"), [("<think>so", True), ("<think>so</think>then", False), ("then", False)]
)
def test_a_continued_message_may_be_within_its_reasoning(content: str, opened: bool) -> None:
    formats = choose_formats("", byte_tokenizer(), "none", "qwen3")
    messages = (ChatMessage("user", "x"), ChatMessage("assistant", content))
    request = GenerateRequest(messages=messages, chat=ChatOptions(continue_final_message=True))
    form = formats.output_format(request, content)
    assert form is not None
    assert form.opened is opened
    assert formats.output_format(GenerateRequest(text="x"), "x") is None
