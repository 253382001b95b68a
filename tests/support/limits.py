"""A pytest plugin that enforces the time limits of each test and of the run.

pytest-timeout raises an exception in the main thread, once, and cancels its timer once the test has failed. A wait that
swallows the exception, a wait in C and a cleanup after a failure may hang forever. After the limit and a grace, a
faulthandler thread ends the process with all tracebacks. With pytest-xdist the death of a worker fails its test, and
the Makefile's options end the run then; the controller enforces the limit of the run.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

# Settings in pyproject.toml, or by -o on the command line.
RUN_LIMIT, GRACE = "run_limit_s", "timeout_grace_s"
# Signals that tests send, and that background jobs and nohup inherit as ignored.
SENT = (signal.SIGINT, signal.SIGTERM)


def restore_signals() -> None:
    """Restore the default of ignored signals, which children would inherit as ignored."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT)
    for number in SENT:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Limits:
    """Limits of one process.

    Args: run_limit_s: max time of the run from now on. grace_s: time for a test's cleanup after its limit. stderr: a
    descriptor that pytest does not capture. patient: a debugger is in use, so no limit applies after a failure.
    """

    def __init__(self, run_limit_s: float, grace_s: float, stderr: int, patient: bool) -> None:
        self._run_end_s = time.monotonic() + run_limit_s
        self._test_end_s = math.inf
        self._grace_s = grace_s
        self._stderr = stderr
        self._patient = patient
        self._arm()

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> Iterator[None]:
        """Set a test's limit plus the grace when pytest-timeout starts to watch it."""
        self._test_end_s = time.monotonic() + settings.timeout + self._grace_s
        self._arm()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_exception_interact(self) -> Iterator[None]:
        """Set the limit again after a failure: pytest's own plugin cancels faulthandler's timers for pdb."""
        try:
            return (yield)
        finally:
            if not self._patient:
                self._arm()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Keep the test's limit until its fixtures are torn down."""
        try:
            return (yield)
        finally:
            self._test_end_s = math.inf
            self._arm()

    def _arm(self) -> None:
        left_s = max(0.1, min(self._run_end_s, self._test_end_s) - time.monotonic())
        faulthandler.dump_traceback_later(left_s, exit=True, file=self._stderr)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the two settings."""
    parser.addini(RUN_LIMIT, "seconds after which a run is ended", default="3600")
    parser.addini(GRACE, "seconds that a test may clean up after its time limit", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Set the limits in the controller and in each worker process."""
    restore_signals()
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        stderr = os.dup(2)
    else:
        with capture.global_and_fixture_disabled():
            stderr = os.dup(2)
    run_limit_s, grace_s = (float(config.getini(name)) for name in (RUN_LIMIT, GRACE))
    config.pluginmanager.register(Limits(run_limit_s, grace_s, stderr, config.getoption("usepdb")))
