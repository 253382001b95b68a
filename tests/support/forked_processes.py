"""A plugin of pytest: on Linux the processes of a run are forks of the one that leads it, which has read the tests.

    the leading process: reads the test files --> forks one process for each that pytest-xdist is to start
    a fork: waits --execnet's first line--> is the program that execnet would start --> collects, and runs tests

To read the tests is to import, for the most part: eleven seconds of a core for each process. A fork has imported it
all, and shares the memory. A file whose import fails, warns or skips is imported again there, and pytest tells of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pathlib
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pytest
from _pytest.config import apply_warning_filters

from tests.support.limits import LIMITS


class ForkedIO:
    """Represents the leading process's end of the connection to a fork, with what execnet uses of a ``Popen2IOMaster``
    beside reading and writing."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.ends = (stdin, stdout)
        self._pid = pid
        self._status: int | None = None

    def wait(self) -> int:
        """Returns the exit status when the process has ended, for a signal its negative number."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status

    def kill(self) -> None:
        """Sends SIGKILL where the process has not been waited for."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """pytest-xdist is about to start processes. Nothing can be forked beside threads."""
    if not sys.platform.startswith("linux"):
        return
    # What is made now stays alive in all processes: a search for garbage would write to it, and so copy it.
    gc.disable()
    read_tests(config)
    gc.freeze()
    gc.enable()
    limits = config.pluginmanager.get_plugin(LIMITS)
    with limits.suspended() if limits is not None else contextlib.nullcontext():
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            config.get_terminal_writer().line(f"the processes are no forks: to read the tests leaves {threads} threads")
            return
        waiting: list[ForkedIO] = []
        for _ in specs:
            waiting.append(forked(waiting))
    _start_with(waiting)


def read_tests(config: pytest.Config) -> None:
    """Imports the files that a run is to collect, by the names that pytest gives them, under its rules for warnings."""
    with warnings.catch_warnings():
        apply_warning_filters(config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or [])
        for file in _files(config):
            # Whatever is wrong with a file, a process of the run meets it as well.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def _files(config: pytest.Config) -> Iterator[pathlib.Path]:
    for argument in config.args:
        path = pathlib.Path(config.invocation_params.dir, argument.partition("::")[0]).resolve()
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            if file.is_relative_to(config.rootpath) and not _ignored(config, file):
                yield file


def _ignored(config: pytest.Config, file: pathlib.Path) -> bool:
    return any(
        config.hook.pytest_ignore_collect(collection_path=path, config=config)
        for path in (file, *file.parents)
        if path.is_relative_to(config.rootpath)
    )


def forked(earlier: Sequence[ForkedIO]) -> ForkedIO:
    """Forks a process that waits to be a program of execnet. It holds no connection to those made ``earlier``, which
    notice the leading process's end."""
    (its_stdin, stdin), (stdout, its_stdout) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        for end in (stdin, stdout, *(end for one in earlier for end in one.ends)):
            os.close(end)
        os.dup2(its_stdin, 0)
        os.dup2(its_stdout, 1)
    os.close(its_stdin)
    os.close(its_stdout)
    if not pid:
        _run()
    return ForkedIO(pid, stdin, stdout)


def _run() -> NoReturn:
    """Runs what ``python -c LINE`` of execnet runs, and ends as a process does that has nothing to clean up: what is
    registered for the end belongs to the leading process."""
    from execnet.gateway_io import popen_bootstrapline

    status = 1
    try:
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.argv = ["-c"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(popen_bootstrapline, vars(sys.modules["__main__"]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _start_with(waiting: list[ForkedIO]) -> None:
    """Lets execnet take the forks as the processes that it starts."""
    from execnet import gateway_io
    from execnet.gateway_base import ExecModel, Popen2IO

    start = gateway_io.create_io

    def create_io(spec: Any, execmodel: ExecModel) -> object:
        if not (spec.popen and waiting):
            return start(spec, execmodel)
        fork = waiting.pop(0)
        stdin, stdout = fork.ends
        io = Popen2IO(os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), execmodel)
        io.wait, io.kill = fork.wait, fork.kill
        return io

    gateway_io.create_io = create_io
