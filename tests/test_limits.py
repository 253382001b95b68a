"""The limits of tests and runs hold against tests that do their worst, and signals arrive whoever started the run."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEARD = """
import signal, subprocess, sys
from tests.support.limits import restore_signals
ask = "import signal; print(*(signal.getsignal(n) is not signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)))"
for turn in range(2):
    subprocess.run([sys.executable, "-c", ask], check=True)
    restore_signals()
"""
# Each hangs where pytest-timeout alone does not help.
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


def run(folder: pathlib.Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.limits", "--rootdir", str(folder), *options]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "-c", f"{folder}/pytest.ini"]
    return subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("program", [STUBBORN, CLEANING])
def test_a_test_that_cannot_be_interrupted_ends_its_process(tmp_path: pathlib.Path, program: str) -> None:
    done = run(tmp_path, program, "--timeout=1", "-o", "timeout_grace_s=1")
    assert done.returncode == 1
    assert "Timeout (0:00:0" in done.stderr
    assert "in test_hangs" in done.stderr or "in room" in done.stderr


def test_of_several_processes_only_that_one_ends(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, STUBBORN, "--timeout=1", "-o", "timeout_grace_s=1", "-n", "1")
    assert done.returncode == 1
    assert "crashed while running 'test_it.py::test_hangs'" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_run_ends_at_its_limit(tmp_path: pathlib.Path, processes: str) -> None:
    began = time.monotonic()
    done = run(tmp_path, STUBBORN, "-o", "run_limit_s=3", "-n", processes)
    assert done.returncode == 1
    assert "Timeout (0:00:0" in done.stderr
    assert time.monotonic() - began < 60


def test_programs_hear_what_tests_send() -> None:
    command = ["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh", sys.executable, "-c", HEARD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "False False\nTrue True\n"
