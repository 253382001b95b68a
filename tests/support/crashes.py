"""A pytest plugin that shows tracebacks of processes killed by a fatal signal in the run's summary.

faulthandler writes them to the terminal at the time of the crash, amid thousands of lines of other tests. Here each
process of pytest-xdist writes them to its own file, which the controller reads.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import tempfile
from typing import Any

import pytest

# Lines shown per crashed process, from the top: the crashed thread is mostly among them.
SHOWN_LINES = 80
_FOLDER = "crash_folder"


class CrashReports:
    """Crash reports in the controller; creates and removes the folder of their files."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pillion-crashes-")
        self._reports: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass the file's path to a process that is about to start."""
        node.workerinput[_FOLDER] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Read the file of a process that has ended."""
        name = node.gateway.id
        file = pathlib.Path(self._folder.name, name)
        if error and file.exists() and (written := file.read_text(errors="replace")):
            self._reports[name] = written

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show crashes after the failures."""
        for name, written in self._reports.items():
            terminalreporter.section(f"{name} crashed")
            for line in written.splitlines()[:SHOWN_LINES]:
                terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Open the file of an xdist process, after pytest's own plugin has chosen the terminal."""
    folder = getattr(config, "workerinput", {}).get(_FOLDER)
    if folder is None:
        config.pluginmanager.register(CrashReports())
    else:
        # Left open: faulthandler may write to it until the process ends.
        name = config.workerinput["workerid"]  # type: ignore[attr-defined]
        faulthandler.enable(os.open(pathlib.Path(folder, name), os.O_WRONLY | os.O_CREAT))
