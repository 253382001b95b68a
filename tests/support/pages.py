"""Parsed documentation pages: fenced blocks, commands in them, and inline code."""

from __future__ import annotations

import pathlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from lab.fleets.__main__ import simulate
from pillion.cli.app import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
_DOCS = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("docs", "lab/docs") for path in (ROOT / folder).rglob("*.md")
)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", *_DOCS)
LANGUAGES = ("python", "sh", "json", "toml", "yaml", "text")
PROGRAMS = (
    *("pillion", "make", "curl", "docker", "helm", "kubectl", "pip", "git", "grpcurl", "python", "pytest"),
    *(".venv/bin/pillion", ".venv/bin/pytest", ".venv/bin/python"),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_]+=.*")


@dataclass(frozen=True, slots=True)
class PageBlock:
    """A fenced block of a page. ``line`` is the number of its first line."""

    page: str
    line: int
    language: str
    text: str


def blocks(page: str) -> list[PageBlock]:
    """Return all fenced blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    return [PageBlock(page, text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in _FENCE.finditer(text)]


def outside_blocks(page: str) -> str:
    """Return a page's text without its fenced blocks."""
    return _FENCE.sub("", (ROOT / page).read_text("utf-8"))


def commands(block: PageBlock) -> Iterator[str]:
    """Return a block's commands, with continued lines joined and comments kept."""
    for line in block.text.replace("\\\n", " ").splitlines():
        yield from filter(None, (part.strip() for part in line.split("&&")))


def words_of(command: str) -> list[str]:
    """Return a command's words without comments and leading variables; a placeholder "..." is left out."""
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    while words and _VARIABLE.fullmatch(words[0]):
        del words[0]
    if words and words[0].startswith(".venv/bin/"):
        words[0] = words[0].removeprefix(".venv/bin/")
    return words


def inline_code(page: str) -> list[str]:
    """Return inline code, with line breaks as spaces."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", outside_blocks(page))]


def check_command(words: list[str]) -> None:
    """Raise click.UsageError or AssertionError for an unknown command, flag, make target or extra."""
    if words[0] == "pillion":
        parse(words[1:])
    elif words[:3] == ["python", "-m", "lab.fleets"]:
        simulate.make_context(simulate.name, words[3:])
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert set(targets) <= make_targets(), f"no such make target: {targets}"
        for word in words[1:]:
            name = word.partition("=")[0]
            assert "=" not in word or f"$({name})" in makefile() or f"$${name}" in makefile(), f"make knows no {name}"
    elif words[0] == "pip":
        extras = re.findall(r"\[(\w+)\]", " ".join(words))
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(extras) <= set(known), f"no such extra: {extras}"


def parse(words: list[str]) -> None:
    """Parse a command line of ``pillion`` as the program does, without running it."""
    command: Any = cli
    ctx = click.Context(cli, info_name="pillion")
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(ctx, command_words(command, words))
        assert found is not None
        command, words = found, rest
        ctx = click.Context(found, info_name=name, parent=ctx)
    command.make_context(command.name, list(words))


def command_words(group: click.Group, words: list[str]) -> list[str]:
    """Insert the default subcommand: ``bench --rate 2`` is ``bench run --rate 2``."""
    return ["run", *words] if group.name == "bench" and words[0] not in group.commands else words


def flags_of(command: click.Command) -> set[str]:
    """Return every option of a command and its subcommands."""
    own = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*map(flags_of, below), {"--help"})


def makefile() -> str:
    """The Makefile's text."""
    return (ROOT / "Makefile").read_text()


def make_targets() -> set[str]:
    """Return the Makefile's targets."""
    found = re.search(r"^\.PHONY: (.*)$", makefile(), re.MULTILINE)
    assert found
    return set(found[1].split())
