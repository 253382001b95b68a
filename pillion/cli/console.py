"""Prints on standard error what a person should see: notices, progress, and components' logs with a coloured prefix
each.

A log that cannot be written, because its disk is full or its reader has gone, loses lines and nothing else: what is
lost is counted, and said in one line as soon as a line can be written again.

With ``--log-format json`` every line is a JSON object instead: a component's own objects go on as they are, and any
other line (Redis's, a traceback's, a library's) is put into one.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
PREFIX_WIDTH = 10
OWN = "pillion"


class Notices:
    """Prints a supervisor's lines to standard error: with colours and a spinner on a terminal, as plain lines
    elsewhere.

    Args:
        form: "text" for plain lines, "json" for one object a line.

    Attributes:
        lost_lines: lines that could not be written since a line was written last.
    """

    def __init__(self, console: Console | None = None, *, form: str = "text") -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True, highlight=False)
        self.lost_lines = 0
        self._json = form == "json"
        self._colours: dict[str, str] = {}

    def say(self, text: str, style: str = "") -> None:
        """Print one line of the supervisor's own."""
        self.component(OWN, text, style)

    def fact(self, name: str, text: str, style: str = "") -> None:
        """Print one of the lines with which a cluster starts."""
        self.component(OWN if self._json else name, f"{name}: {text}" if self._json else text, style)

    def command(self, text: str) -> None:
        """Print a command on a line of its own, to be copied."""
        if self._json:
            self.say(f"try: {text}")
        else:
            self._show(f"  {text}")

    def component(self, component_id: str, line: str, style: str = "") -> None:
        """Print one line of a component's log, without reading markup in it."""
        from rich.text import Text

        if self._json:
            self._show(Text(as_json(component_id, line)))
            return
        colour = self._colours.setdefault(component_id, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._show(Text.assemble((f"{component_id:<{PREFIX_WIDTH}} | ", colour), (line, style)))

    def _show(self, line: str | Text) -> None:
        """Print a line to standard error."""
        if self.console.is_terminal:
            # A spinner may run below the line, so rich has to write it.
            self._write(partial(self.console.print, line, soft_wrap=True, markup=False))
        else:
            # Rich would keep a line that it could not write, and would end this process where the reader has gone.
            text = line if isinstance(line, str) else line.plain
            self._write(partial(print, text, file=self.console.file, flush=True))

    def _write(self, write: Callable[[], object]) -> None:
        """Write a line, or counts it as lost: no cluster may end or stand still because nobody can read of it."""
        try:
            write()
        except (OSError, ValueError):
            # A file that was closed raises ValueError.
            self.lost_lines += 1
            return
        if self.lost_lines:
            lost, self.lost_lines = self.lost_lines, 0
            self.say(f"{lost} lines before this one are lost: the log could not be written", "bold yellow")

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show ``title`` while the block runs, where there is a terminal; the yielded function shows the step that
        runs now."""
        if self._json or not self.console.is_terminal:
            yield self.say
            return
        with self.console.status(title) as status:
            yield lambda step: status.update(f"{title}: {step}")


def as_json(component_id: str, line: str) -> str:
    """Return the line itself where it is a JSON object, else an object with the line as its message."""
    from pillion.observability.log_format import JsonFormatter

    if line.startswith("{"):
        try:
            if isinstance(json.loads(line), dict):
                return line
        except ValueError:
            pass
    record = logging.LogRecord(f"{OWN}.output", logging.INFO, "", 0, "%s", (line,), None)
    return JsonFormatter(component_id).format(record)


def table_console(width: int) -> Console:
    """Make a console on standard output for tables. Where that is no terminal, it is at least ``width`` columns
    wide."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def fail(message: str) -> None:
    """Print a message as the one line on standard error with which a failed command ends."""
    from pillion.observability.log_format import logs_json

    if logs_json():
        logging.getLogger(OWN).error(message)
    else:
        print(f"{OWN}: {' '.join(message.split())}", file=sys.stderr)
