"""Files of prompts for `pillion cache`: what is accepted, and what is rejected with its line."""

from __future__ import annotations

import pathlib

import pytest

from pillion.cli.cache import duration, parse_duration, read_prompts
from pillion.errors import ConfigError


def test_a_text_file_is_one_prompt_and_each_jsonl_line_is_one(tmp_path: pathlib.Path) -> None:
    text, lines = tmp_path / "system.txt", tmp_path / "all.jsonl"
    text.write_text("One\n\nprompt.\n")
    (only,) = read_prompts(text)
    assert (only.prompt, only.options) == ("One\n\nprompt.\n", {})
    lines.write_text(
        '{"text": "a", "name": "n", "ttl_s": 60}\n\n{"tokens": [1, 2], "model": "m"}\n'
        '{"messages": [{"role": "system", "content": "x"}], "adapter": "sql", "cache_salt": "s", "tools": []}\n'
    )
    first, second, third = read_prompts(lines)
    assert (first.prompt, first.options, first.where) == ("a", {"name": "n", "ttl_s": 60}, f"{lines}:1")
    assert (second.prompt, second.options) == ([1, 2], {"model": "m"})
    assert third.options == {"cache_salt": "s", "tools": [], "model": "sql"}
    assert third.where == f"{lines}:4"


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\u0085"])
def test_jsonl_lines_end_only_at_newlines(inside: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(f'{{"text": "a{inside}b"}}\r\n{{"text": "c"}}\n', encoding="utf-8")
    assert [one.prompt for one in read_prompts(path)] == [f"a{inside}b", "c"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "invalid JSON"),
        ("[]", "an object"),
        ("{}", "an object with exactly one of"),
        ('{"text": "a", "tokens": [1]}', "an object with exactly one of"),
        ('{"text": ""}', "empty"),
        ('{"text": 1}', "text must be a string"),
        ('{"text": "a", "ttl_s": true}', "ttl_s must be an integer"),
        ('{"text": "a", "colour": 1}', "unknown field 'colour'"),
        ("", "0 prompts"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=words) as caught:
        read_prompts(path)
    assert str(path) in caught.value.message
    with pytest.raises(ConfigError):
        read_prompts(tmp_path / "missing")


def test_durations_are_parsed_and_formatted() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "5m", "1h", "7d")] == [90, 90, 300, 3600, 7 * 86_400]
    for wrong in ("", "h", "-1s", "1w", "1.5h"):
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(wrong)
    assert [duration(seconds) for seconds in (5, 119, 300, 86_399, 86_400 * 7)] == ["5s", "119s", "5m", "24h", "7d"]
