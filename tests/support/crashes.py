"""A plugin of pytest: where a process of a run dies of a fatal signal, the run's summary shows the tracebacks.

faulthandler writes them in the moment of the death to the terminal, amid thousands of lines of other tests, and whoever
keeps the end of a run's output loses them. Here each process of pytest-xdist writes them into a file of its own, which
the process that leads the run reads.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import tempfile
from typing import Any

import pytest

# The summary shows this many lines of a crashed process's tracebacks, from the first one on: the thread that crashed is
# mostly among them.
SHOWN_LINES = 80
_FOLDER = "crash_folder"


class CrashReports:
    """What the leading process knows of the others' deaths; it makes and removes the folder of their files."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pillion-crashes-")
        self._reports: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a process that is about to start where to write."""
        node.workerinput[_FOLDER] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Reads what a process wrote that has ended."""
        name = node.gateway.id
        file = pathlib.Path(self._folder.name, name)
        if error and file.exists() and (written := file.read_text(errors="replace")):
            self._reports[name] = written

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Shows what crashed, after the failures."""
        for name, written in self._reports.items():
            terminalreporter.section(f"{name} crashed")
            for line in written.splitlines()[:SHOWN_LINES]:
                terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """Removes the files."""
        self._folder.cleanup()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Opens the file after pytest's own plugin has chosen the terminal, in a process that another one leads."""
    folder = getattr(config, "workerinput", {}).get(_FOLDER)
    if folder is None:
        config.pluginmanager.register(CrashReports())
    else:
        # The file stays open as long as faulthandler may write to it: to the process's end.
        name = config.workerinput["workerid"]  # type: ignore[attr-defined]
        faulthandler.enable(os.open(pathlib.Path(folder, name), os.O_WRONLY | os.O_CREAT))
