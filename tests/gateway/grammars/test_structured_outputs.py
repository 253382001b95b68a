"""Structures become grammars that accept exactly the allowed texts; llguidance is the oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from lab.testbed.toy_tokenizer import byte_tokenizer
from pillion.errors import InvalidRequest
from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import OutputFormat, ReadAnswerText
from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.grammars.answer_grammar import Piece, join
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.gateway.tokens.answer_text import new_detokenizer, stop_strings
from pillion.types import GenerateRequest, SamplingParams, StructuredOutputs

TOKENIZER = LLTokenizer("byte")
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)


def takes(grammar: str, text: str) -> bool:
    """Return whether ``text`` is a complete answer of the grammar."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(**structured: Any) -> str:
    return join([structured_piece(StructuredOutputs(**structured))]).text


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
@example(["\x7f", '"', "\\", "\n", "a/b", "\u2028", "🙂", "<|x|>"], "/")
def test_a_choice_grammar_accepts_only_its_choices(choices: list[str], other: str) -> None:
    grammar = grammar_of(choice=tuple(choices))
    assert all(takes(grammar, choice) for choice in choices)
    assert takes(grammar, other) is (other in choices)


@given(TEXTS, TEXTS)
@example("/\n\r", "\\")
def test_an_escaped_literal_regex_matches_only_that_literal(text: str, other: str) -> None:
    grammar = grammar_of(regex=re.escape(text))
    assert takes(grammar, text)
    assert takes(grammar, other) is (other == text)


@given(st.lists(st.sampled_from(["/", "\\/", "\n", "\\\n", "\\\\", "[/]", "a", "\\d"]), min_size=1, max_size=6), TEXTS)
def test_a_regex_matches_what_pythons_re_matches(parts: list[str], text: str) -> None:
    pattern = "".join(parts)
    grammar = grammar_of(regex=pattern)
    for one in (text, pattern, "".join({"\\d": "7", "[/]": "/"}.get(part, part.strip("\\") or "\\") for part in parts)):
        assert takes(grammar, one) is bool(re.fullmatch(pattern, one, re.ASCII))


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        (r"\d{3}", ["123"], ["١٢٣", "12٣"]),
        (r"[\d-]\D", ["1a", "--", "1٣"], ["٣a", "12"]),
        (r"\w+", ["aZ_9"], ["é", "a b"]),
        (r"[^\w ]\W", ["é!", "-\u00a0"], ["ab", " !"]),
        (r"a\sb\S", ["a bc", "a\tb\u00a0"], ["a\u00a0bc", "a b\n"]),
        (r"\\d", [r"\d"], ["1"]),
    ],
)
def test_regex_character_classes_are_ascii(pattern: str, fits: list[str], others: list[str]) -> None:
    tag = {"format": {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": pattern}, "end": "."}}
    for end, grammar in [("", grammar_of(regex=pattern)), (".", grammar_of(structural_tag=json.dumps(tag)))]:
        assert [one for one in fits + others if takes(grammar, one + end)] == fits


def test_an_expression_cannot_end_within_an_escape() -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex"):
        grammar_of(regex="a\\\\\\")


def test_client_grammar_rule_names_do_not_collide_with_ours() -> None:
    clients = structured_piece(StructuredOutputs(grammar='start: answer\nanswer: "a" | "b" answer'))
    ours = Piece("answer", rules=('answer: "<" /[0-9]+/ ">"',))
    grammar = join([ours, clients]).text
    assert takes(grammar, "<12>bba")
    assert not takes(grammar, "bba")


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": 1, "b": [null, -1.5]}'])
def test_json_schema_and_json_object_are_enforced(text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert takes(grammar_of(json=json.dumps(schema)), text)
    assert takes(grammar_of(json_object=True), text)
    assert not takes(grammar_of(json=json.dumps(schema)), text.replace("1", '"1"', 1))
    assert not takes(grammar_of(json_object=True), f"[{text}]")


def test_a_schema_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: not JSON"):
        grammar_of(json="{")


LEGACY = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TAGGED: dict[str, tuple[Any, list[str], list[str]]] = {
    "legacy": (LEGACY, ["x", "", "a <f=a>12</f> b <f=b>null</f>!"], ["<f=a>x</f>", "<f=c>", "<f=a>1"]),
    "a sequence": (
        {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "a/"}, NUMBER]}},
        ["a/12"],
        ["a/", "12"],
    ),
    "either": (
        {"format": {"type": "or", "elements": [NUMBER, {"type": "json_schema", "json_schema": {"type": "boolean"}}]}},
        ["12", "true"],
        ["null"],
    ),
    "a tag of any text": (
        {"format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}},
        ["<t></t>", "<t>a < b\n</t>"],
        ["<t>a", "<t></t>a"],
    ),
    "one call at least": (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{"begin": "<n>", "content": NUMBER, "end": ["</n>", "."]}],
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        ["so <n>1</n>", "<n>1."],
        ["so", "<n>1</n> more"],
    ),
    "separated": (
        {
            "format": {
                "type": "tags_with_separator",
                "separator": ", ",
                "tags": [{"begin": "(", "content": NUMBER, "end": ")"}],
            }
        },
        ["", "(1)", "(1), (22)"],
        ["(1),(2)", "(1), "],
    ),
    "a grammar": (
        {"format": {"type": "grammar", "grammar": 'start: x\nx: "a" x "b" | "c"'}},
        ["c", "aacbb"],
        ["ac"],
    ),
}


@pytest.mark.parametrize("name", TAGGED)
def test_structural_tags(name: str) -> None:
    tag, good, bad = TAGGED[name]
    grammar = grammar_of(structural_tag=json.dumps(tag))
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        ({}, "format"),
        ({"structures": [], "triggers": ["a"]}, "structures"),
        ({"structures": [1], "triggers": ["a"]}, "structures.tags[0].begin"),
        (LEGACY | {"triggers": ["<x"]}, "structures.tags[0].begin"),
        (LEGACY | {"triggers": [""]}, "structures.triggers"),
        ({"format": {"type": "qwen_xml_parameter"}}, "format.type"),
        ({"format": {"type": "sequence", "elements": [NUMBER, {"type": "regex"}]}}, "format.elements[1].pattern"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {"type": "null"}}}}, "format.json_schema"),
        ({"format": {"type": "tag", "begin": "a", "content": NUMBER}}, "format.end"),
    ],
)
def test_a_wrong_structural_tag_names_the_place(tag: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(structural_tag=json.dumps(tag))
    assert caught.value.violations[0].field == f"sampling.structured_outputs.structural_tag.{field}"


NUMBERED = {"type": "regex", "pattern": "[0-9]"}
TOKENS = ("<tool>", "</tool>", "[SEP]")
# A tag, texts that it accepts and texts that it rejects, whether or not their marks are tokens.
MARKED: dict[str, tuple[Any, list[str], list[str]]] = {
    "triggered": (
        {"structures": [{"begin": "<tool>a", "schema": {"type": "integer"}, "end": "</tool>"}], "triggers": ["<to"]},
        ["", "so", "so <tool>a1</tool>", "<tool>a1</tool>, <tool>a22</tool>."],
        ["<tool>", "<tool>b1</tool>", "<tool>a1.", "<tool>a1</tool> <tool>"],
    ),
    "a text before the mark": (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["\n<tool>"],
                "tags": [{"begin": "\n<tool>", "content": NUMBERED, "end": "</tool>"}],
            }
        },
        ["", "so\n", "a\nb\n<tool>1</tool>", "\n<tool>1</tool> more\n"],
        ["so\n<tool>x", "so\n<tool>1"],
    ),
    "a text between": (
        {"format": {"type": "tag", "begin": "<tool>", "content": {"type": "any_text"}, "end": ["</tool>", "stop"]}},
        ["<tool></tool>", "<tool>a text</tool>", "<tool>a text stop"],
        ["<tool>a text", "a text</tool>", "<tool>a text</tool>x"],
    ),
    "separated": (
        {
            "format": {
                "type": "tags_with_separator",
                "separator": "[SEP]\n",
                "at_least_one": True,
                "tags": [{"begin": "(", "content": NUMBERED, "end": ")"}],
            }
        },
        ["(1)", "(1)[SEP]\n(2)"],
        ["(1)[SEP]", "(1)(2)"],
    ),
    "a constant": (
        {"format": {"type": "const_string", "value": "<tool>[SEP]x"}},
        ["<tool>[SEP]x"],
        ["<tool>x", "<tool>[SEP]"],
    ),
}


class _OnlyAsked(dict[str, int]):
    """A model's marks, with too many special tokens to visit each."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every token is looked at")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_the_work_for_a_tag_does_not_grow_with_the_special_tokens() -> None:
    """Gemma has over 6,000 of them, and a tag may be a megabyte."""
    structured = StructuredOutputs(structural_tag=json.dumps(MARKED["a constant"][0]))
    codec = byte_tokenizer()
    codec.add_special_tokens([AddedToken(text, special=True) for text in TOKENS])
    formats = choose_formats("", codec)
    marks = _OnlyAsked(formats.mark_ids)
    request = GenerateRequest(text="x", sampling=SamplingParams(structured_outputs=structured))
    output = replace(formats, mark_ids=marks).output_format(request, "")
    assert isinstance(output, OutputFormat)
    assert set(output.visible.values()) == {"<tool>", "[SEP]"}
    assert structured_piece(structured, marks) == structured_piece(structured, formats.mark_ids)


@pytest.mark.parametrize("name", MARKED)
def test_structural_tags_may_use_special_tokens(name: str) -> None:
    tag, good, bad = MARKED[name]
    codec = byte_tokenizer()
    codec.add_special_tokens([AddedToken(text, special=True) for text in TOKENS])
    end = codec.token_to_id("<eos>")
    structured = StructuredOutputs(structural_tag=json.dumps(tag))
    formats = choose_formats("", codec)
    grammar = join([structured_piece(structured, formats.mark_ids)]).text
    output = formats.output_format(
        GenerateRequest(text="x", sampling=SamplingParams(structured_outputs=structured)), ""
    )
    assert isinstance(output, OutputFormat)
    tokenizer = LLTokenizer(codec.to_str(), eos_token=end)
    for text in (*good, *bad):
        spelled = [token for letter in text for token in codec.encode(letter).ids]
        for ids in (codec.encode(text).ids, spelled):
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken is (text in good), (text, ids)
            answer = ReadAnswerText(
                new_detokenizer(codec), stop_strings(()), frozenset([end]), 0, output, AnswerParts()
            )
            assert answer.push(ids).text + answer.flush().text == text
