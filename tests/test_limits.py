"""The limits of tests and runs hold against tests that do their worst, and signals arrive whoever started the run.
A summary shows where a process crashed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import started

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEARD = """
import signal, subprocess, sys
from tests.support.limits import restore_signals
ask = "import signal; print(*(signal.getsignal(n) is not signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)))"
for turn in range(2):
    subprocess.run([sys.executable, "-c", ask], check=True)
    restore_signals()
"""
# Hangs that pytest-timeout alone does not end.
STUBBORN = """
import signal
def test_hangs():
    while True:
        try:
            signal.pause()
        except BaseException:
            pass
def test_after(): ...
"""
CLEANING = """
import signal, pytest
@pytest.fixture
def room():
    yield
    while True:
        signal.pause()
def test_hangs(room):
    assert False
def test_after(): ...
"""
CRASHING = """
import faulthandler, resource
def test_crashes():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler._sigsegv()
def test_after(): ...
"""


AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
QUICK = ("--timeout=1", "-o", "timeout_grace_s=1")
RUNS = {
    "a test": (STUBBORN, *QUICK),
    "a fixture": (CLEANING, *QUICK),
    "a test of one of several processes": (STUBBORN, *QUICK, "-n", "1"),
    "a crash": (CRASHING, "-n", "1"),
    "a run": (STUBBORN, "-o", "run_limit_s=3"),
    "a run of several processes": (STUBBORN, "-o", "run_limit_s=3", "-n", "1"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run all at once: each mostly waits for its limit."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(_running(tmp_path_factory.mktemp("run"), *program))
            for name, program in RUNS.items()
        }


@contextlib.contextmanager
def _running(folder: pathlib.Path, program: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "test_it.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.limits", "--rootdir", str(folder), *options]
    command += ["-p", "tests.support.crashes", "-p", "pytest_timeout", "-p", "xdist.plugin"]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "-c", f"{folder}/pytest.ini", str(folder)]
    # Importing other installed plugins takes as long as all else.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {AUTOLOAD: "1"}}
    with started(command, cwd=ROOT, text=True, **pipes) as process:
        yield process


@pytest.mark.parametrize("name", ["a test", "a fixture"])
def test_a_test_that_cannot_be_interrupted_ends_its_process(runs: dict[str, subprocess.Popen[str]], name: str) -> None:
    _, said = runs[name].communicate(timeout=200)
    assert runs[name].returncode == 1
    assert "Timeout (0:00:0" in said
    assert "in test_hangs" in said or "in room" in said


def test_a_timeout_ends_only_its_own_xdist_worker(runs: dict[str, subprocess.Popen[str]]) -> None:
    one = runs["a test of one of several processes"]
    printed, _ = one.communicate(timeout=200)
    assert one.returncode == 1
    assert "crashed while running 'test_it.py::test_hangs'" in printed
    assert "1 failed, 1 passed" in printed


def test_the_summary_shows_where_a_process_crashed(runs: dict[str, subprocess.Popen[str]]) -> None:
    printed, said = runs["a crash"].communicate(timeout=200)
    assert runs["a crash"].returncode == 1
    assert "in test_crashes" not in said
    summary = printed[printed.index("gw0 crashed ===") :]
    assert "Fatal Python error: Segmentation fault" in summary
    assert "in test_crashes" in summary
    assert "1 failed, 1 passed" in summary


@pytest.mark.parametrize("name", ["a run", "a run of several processes"])
def test_a_run_ends_at_its_limit(runs: dict[str, subprocess.Popen[str]], name: str) -> None:
    _, said = runs[name].communicate(timeout=200)
    assert runs[name].returncode == 1
    assert "Timeout (0:00:0" in said


def test_programs_receive_signals_that_the_parent_ignores() -> None:
    command = ["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh", sys.executable, "-c", HEARD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "False False\nTrue True\n"
