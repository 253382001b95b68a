"""Output on standard error: notices, progress, and components' logs with coloured prefixes.

If the log cannot be written, because the disk is full or the reader of a pipe has exited, lines are lost. They are
counted, and the count is logged as soon as writing works again.

With ``--log-format json`` every line is a JSON object: components' objects are passed on, and any other line (of Redis,
of a traceback, of a library) is wrapped into one.
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
# Prefix of the supervisor's own lines, and name of its logger.
OWN = "pillion"


class Notices:
    """A supervisor's output on standard error: with colours and a spinner on a terminal, else as plain lines.

    Args:
        form: "text" for plain lines, "json" for one object per line.

    Attributes:
        lost_lines: lines that could not be written since the last successful one.
    """

    def __init__(self, console: Console | None = None, *, form: str = "text") -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True, highlight=False)
        self.lost_lines = 0
        self._json = form == "json"
        self._colours: dict[str, str] = {}

    def say(self, text: str, style: str = "") -> None:
        """Print a line of the supervisor itself."""
        self.component(OWN, text, style)

    def fact(self, name: str, text: str, style: str = "") -> None:
        """Print a named fact about the starting cluster, such as its model."""
        self.component(OWN if self._json else name, f"{name}: {text}" if self._json else text, style)

    def command(self, text: str) -> None:
        """Print a command on a separate line, for copying."""
        if self._json:
            self.say(f"try: {text}")
        else:
            self._show(f"  {text}")

    def component(self, component_id: str, line: str, style: str = "") -> None:
        """Print a line of a component's log, without interpreting markup."""
        from rich.text import Text

        if self._json:
            self._show(Text(as_json(component_id, line)))
            return
        colour = self._colours.setdefault(component_id, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._show(Text.assemble((f"{component_id:<10} | ", colour), (line, style)))

    def _show(self, line: str | Text) -> None:
        if self.console.is_terminal:
            # Through rich, because a spinner may run below the line.
            self._write(partial(self.console.print, line, soft_wrap=True, markup=False))
        else:
            # Not through rich, which would buffer a line that it cannot write, and exit on a broken pipe.
            text = line if isinstance(line, str) else line.plain
            self._write(partial(print, text, file=self.console.file, flush=True))

    def _write(self, write: Callable[[], object]) -> None:
        """Write a line, or count it as lost: a log that cannot be written must not stop the cluster."""
        try:
            write()
        except (OSError, ValueError):
            self.lost_lines += 1
            return
        if self.lost_lines:
            lost, self.lost_lines = self.lost_lines, 0
            self.say(f"{lost} lines before this one were lost: the log could not be written", "bold yellow")

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show ``title`` on a terminal while the block runs; the yielded function shows the current step."""
        if self._json or not self.console.is_terminal:
            yield self.say
            return
        with self.console.status(title) as status:
            yield lambda step: status.update(f"{title}: {step}")


def as_json(component_id: str, line: str) -> str:
    """Return the line if it is a JSON object, else an object with the line as its message."""
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
    """Return a console on standard output for tables, at least ``width`` columns wide unless it is a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def fail(message: str) -> None:
    """Print a failed command's error to standard error, as one line."""
    from pillion.observability.log_format import logs_json

    if logs_json():
        logging.getLogger(OWN).error(message)
    else:
        print(f"{OWN}: {' '.join(message.split())}", file=sys.stderr)
