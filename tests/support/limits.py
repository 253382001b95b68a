"""A plugin of pytest: no test outlives its time limit, and no run its own.

pytest-timeout ends a test by an exception in the main thread, once, and takes its timer back as soon as the test has
failed. A wait that swallows the exception, a wait in C and everything that is cleaned up after a failure may go on for
ever. After it, a thread of faulthandler ends the process with the tracebacks of all its threads. Where tests run in
several processes, pytest-xdist counts the death of one as a failure of its test, and the Makefile's options have it end
the run then; the process that leads them has the limit of the run.
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

# Settings in pyproject.toml, or on the command line by -o.
RUN_LIMIT, GRACE = "run_limit_s", "timeout_grace_s"
# What tests send, and what a background job or nohup inherits as ignored.
SENT = (signal.SIGINT, signal.SIGTERM)


def restore_signals() -> None:
    """Programs hear what tests send to them, whoever started the run: an ignored signal stays ignored in children."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT)
    for number in SENT:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Limits:
    """The limits that hold in one process.

    Args:
        run_limit_s: longest time of the run, from now on.
        grace_s: time that a test has for its clean-up after its limit.
        stderr: a descriptor that pytest does not capture.
        patient: somebody debugs failures, so that no limit is set after one.
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
        """pytest-timeout begins to watch a test: the test has that time, and the grace to clean up."""
        self._test_end_s = time.monotonic() + settings.timeout + self._grace_s
        self._arm()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_exception_interact(self) -> Iterator[None]:
        """A test has failed. pytest's own plugin now stops all that faulthandler waits for, for the sake of pdb."""
        try:
            return (yield)
        finally:
            if not self._patient:
                self._arm()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """The test's limit holds until its fixtures are gone."""
        try:
            return (yield)
        finally:
            self._test_end_s = math.inf
            self._arm()

    def _arm(self) -> None:
        left_s = max(0.1, min(self._run_end_s, self._test_end_s) - time.monotonic())
        faulthandler.dump_traceback_later(left_s, exit=True, file=self._stderr)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the two settings."""
    parser.addini(RUN_LIMIT, "seconds after which a run is ended", default="3600")
    parser.addini(GRACE, "seconds that a test may clean up after its time limit", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the limits, in the process that leads the run and in each that runs tests."""
    restore_signals()
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        stderr = os.dup(2)
    else:
        with capture.global_and_fixture_disabled():
            stderr = os.dup(2)
    run_limit_s, grace_s = (float(config.getini(name)) for name in (RUN_LIMIT, GRACE))
    config.pluginmanager.register(Limits(run_limit_s, grace_s, stderr, config.getoption("usepdb")))
