"""Notices that are recorded instead of printed."""

from __future__ import annotations

import os

from rich.console import Console

from pillion.cli.console import Notices


class RecordedNotices(Notices):
    """Records each line as ``component: text``."""

    def __init__(self) -> None:
        super().__init__(Console(file=open(os.devnull, "w")))  # noqa: SIM115
        self.lines: list[str] = []

    def component(self, component_id: str, line: str, style: str = "") -> None:
        self.lines.append(f"{component_id}: {line}")
