"""What is printed while components run: text for people, or JSON for collectors."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from pillion.cli.console import Notices


def printed(form: str) -> list[str]:
    """The lines of a supervisor, of a component that logs JSON, and of one that prints something else."""
    out = io.StringIO()
    notices = Notices(Console(file=out, width=40), form=form)
    notices.say("starting :smile: [bold]")
    notices.fact("model", "toy")
    notices.command("curl x -d '{\"a\": [1]}'")
    with notices.progress("a title") as step:
        step("a step")
    notices.component("decode-0", '{"message": "ready", "component": "decode-0"}')
    notices.component("redis", "# Warning: " + "x" * 100)
    notices.component("redis", "{not json")
    return out.getvalue().splitlines()


def test_text_for_people() -> None:
    assert printed("text") == [
        "pillion    | starting :smile: [bold]",
        "model      | toy",
        "  curl x -d '{\"a\": [1]}'",
        "pillion    | a step",
        'decode-0   | {"message": "ready", "component": "decode-0"}',
        f"redis      | # Warning: {'x' * 100}",
        "redis      | {not json",
    ]


def test_json_for_collectors() -> None:
    lines = [json.loads(line) for line in printed("json")]
    assert [(line["component"], line["message"]) for line in lines] == [
        ("pillion", "starting :smile: [bold]"),
        ("pillion", "model: toy"),
        ("pillion", "try: curl x -d '{\"a\": [1]}'"),
        ("pillion", "a step"),
        ("decode-0", "ready"),
        ("redis", f"# Warning: {'x' * 100}"),
        ("redis", "{not json"),
    ]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError(), ValueError("closed")]
)
def test_an_unwritable_log_only_loses_lines(error: Exception) -> None:
    """A full disk, a reader that has gone, a closed file: losses are counted, and reported when writing works again."""

    class Full(io.StringIO):
        works = False

        def write(self, text: str) -> int:
            if not self.works:
                raise error
            return super().write(text)

    out = Full()
    notices = Notices(Console(file=out, width=200))
    for number in range(3):
        notices.component("decode-0", f"line {number}")
    assert notices.lost_lines == 3
    out.works = True
    notices.component("decode-0", "line 3")
    assert notices.lost_lines == 0
    lines = ["decode-0   | line 3", "pillion    | 3 lines before this one were lost: the log could not be written"]
    assert out.getvalue().splitlines() == lines


def test_a_disconnected_log_reader_does_not_end_the_program() -> None:
    program = """
import os, sys
from pillion.cli.console import Notices
notices = Notices()
notices.say("first")
sys.stdin.readline()
notices.say("second")
print("lost", notices.lost_lines, flush=True)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        assert b"first" in child.stderr.readline()
        child.stderr.close()
        child.stdin.write(b"go\n")
        child.stdin.close()
        assert child.stdout.read() == b"lost 1\n"
