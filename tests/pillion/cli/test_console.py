"""What is printed while components run: text for people, JSON for collectors, or a file."""

from __future__ import annotations

import io
import json

from rich.console import Console

from pillion.cli.console import Notices


def printed(form: str, *, log_file: io.StringIO | None = None) -> list[str]:
    """The lines of a supervisor, of a component that logs JSON, and of one that prints something else."""
    out = io.StringIO()
    notices = Notices(Console(file=out, width=40), form=form, log_file=log_file)
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


def test_a_file_gets_the_components_lines() -> None:
    file = io.StringIO()
    assert [line.split(" ")[0] for line in printed("text", log_file=file)] == ["pillion", "model", "", "pillion"]
    assert [line.split(" ")[0] for line in file.getvalue().splitlines()] == ["decode-0", "redis", "redis"]
    file = io.StringIO()
    printed("json", log_file=file)
    assert [json.loads(line)["component"] for line in file.getvalue().splitlines()] == ["decode-0", "redis", "redis"]
