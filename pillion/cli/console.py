"""Standard error as a person sees it: notices, progress, and components' logs with a coloured prefix each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
PREFIX_WIDTH = 10


class Notices:
    """Prints to standard error: with colours and a spinner on a terminal, as plain lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True, highlight=False)
        self._colours: dict[str, str] = {}

    def say(self, text: str, style: str = "") -> None:
        """Prints one line of the supervisor's own."""
        self.component("pillion", text, style)

    def component(self, component_id: str, line: str, style: str = "") -> None:
        """Prints one line of a component's log, as it is: nothing in it is markup."""
        from rich.text import Text

        colour = self._colours.setdefault(component_id, _COLOURS[len(self._colours) % len(_COLOURS)])
        text = Text.assemble((f"{component_id:<{PREFIX_WIDTH}} | ", colour), (line, style))
        self.console.print(text, soft_wrap=True)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[str], None]]:
        """Shows ``title`` while the block runs; the yielded function shows a step of it."""
        if not self.console.is_terminal:
            self.say(title)
            yield self.say
            return
        with self.console.status(title) as status:
            yield lambda step: status.update(f"{title}: {step}")


def table_console(width: int) -> Console:
    """A console on standard output for tables: where it is no terminal, at least ``width`` columns wide."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def fail(message: str) -> None:
    """Prints the one line on standard error with which a failed command ends."""
    print(f"pillion: {' '.join(message.split())}", file=sys.stderr)
