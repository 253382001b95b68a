"""The test bed's waits, whose errors name what they waited for and saw, its ports and its forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import Future

import pytest
import torch

from lab.testbed.conditions import LINE_CHARACTERS, WITHIN_S, result_of, until, wait_for, within
from lab.testbed.forks import ForkedComponent, Forks, component_forks
from lab.testbed.ports import FIRST, LAST, free_port, free_ports
from pillion._version import VERSION
from pillion.supervisor.child_process import child_environ

FOUND = [3]


async def told() -> int:
    await asyncio.sleep(0)
    return 2


def test_an_error_shows_the_answer_or_its_operands() -> None:
    other = "much\nlonger" * 1000

    def ready() -> bool:
        least = 7
        return bool(FOUND and FOUND[0] >= least)

    cases = [
        (lambda: len(FOUND) == 3, "len(FOUND) = 1"),
        (lambda: not any(one > 2 for one in FOUND), "FOUND = [3]"),
        (lambda: other == "x", "other = "),
        (list, "[]"),
        (lambda: None, "None"),
        (ready, "FOUND = [3], FOUND[0] = 3, least = 7"),
        (asyncio.Event().is_set, "self._value = False"),
    ]
    for condition, seen in cases:
        with pytest.raises(AssertionError) as caught:
            wait_for("something", condition, 0)
        (line,) = str(caught.value).splitlines()
        assert re.match(r"waited 0 s for something; for \d+\.\d s it saw ", line)
        assert seen in line
        assert len(line) < LINE_CHARACTERS + 100
    with pytest.raises(AssertionError, match=r"it saw a log$"):
        wait_for("something", lambda: False, 0, saw=lambda: "a\nlog")


async def test_an_error_shows_the_operands_of_coroutines() -> None:
    count = iter(range(100))

    async def enough() -> bool:
        asked = next(count)
        return await told() + asked > 500

    with pytest.raises(AssertionError, match=r"waited 0\.1 s for more; for \d\.\d s it saw asked = [1-9]"):
        await until("more", enough, 0.1)
    assert await until("an answer", told) == 2


async def test_a_timeout_names_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"^waited 0 s for a word; it saw \[3\]$"):
        await within("a word", asyncio.Event().wait(), 0, saw=lambda: FOUND)
    assert await within("an answer", told()) == 2


def test_a_timeout_names_the_call_of_another_thread() -> None:
    future: Future[int] = Future()
    with pytest.raises(AssertionError, match=r"^waited 0 s for a call; it saw <Future at .* state=pending>$"):
        result_of("a call", future, 0)
    future.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        result_of("a call", future)


def test_a_port_is_assigned_once_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither assigned before, in this process or another, nor listened on."""
    mine = free_port()
    program = (
        f"from lab.testbed import ports; ports._next = iter(range({mine - FIRST}, 9**9)); print(ports.free_port())"
    )
    theirs = int(subprocess.check_output([sys.executable, "-c", program]))
    assert theirs != mine
    with socket.create_server(("127.0.0.1", theirs)):
        monkeypatch.setattr("lab.testbed.ports._next", iter(range(theirs - FIRST, 9**9)))
        assert free_port() not in (mine, theirs)
    assert all(FIRST <= port < LAST for port in (mine, theirs))


def test_consecutive_ports_are_all_reserved() -> None:
    first = free_ports(2, 10_000)
    for port in (first, first + 10_000):
        with socket.socket(type=socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_random_numbers_of_torch_depend_on_no_earlier_test() -> None:
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.long
def test_a_forked_component_is_watched_as_a_program_is(tmp_path: pathlib.Path) -> None:
    forks = Forks(child_environ(os.environ, ""))

    def started(*words: str) -> ForkedComponent:
        return forks.start((sys.executable, "-m", "pillion", *words), forks.environ, tmp_path / f"{words[0]}.log")

    with tempfile.TemporaryDirectory(prefix="pil-") as short, contextlib.ExitStack() as stack:
        stack.callback(forks.stop)
        told, refused = started("--version"), started("decode", "--no-such-flag")
        assert (told.wait(WITHIN_S), refused.wait(WITHIN_S)) == (0, 2)
        assert VERSION in (tmp_path / "--version.log").read_text()
        assert "--no-such-flag" in (tmp_path / "decode.log").read_text()
        for end, number in ((ForkedComponent.terminate, signal.SIGTERM), (ForkedComponent.kill, signal.SIGKILL)):
            path = pathlib.Path(short, str(number))
            keeper = started("keeper", str(path))
            wait_for("the keeper to listen", path.exists)
            assert keeper.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                keeper.wait(0.01)
            end(keeper)
            assert keeper.wait(WITHIN_S) == keeper.poll() == -number
            end(keeper)


@pytest.mark.long
def test_a_forked_program_has_its_own_output_errors_and_status(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "output").open("w") as output, (tmp_path / "errors").open("w") as errors:
        files = output.fileno(), errors.fileno()
        programs = [
            component_forks().program("lab.benchmarks.replays", [word], os.environ, *files)
            for word in ("--help", "--no-such-flag")
        ]
        assert [program.wait(WITHIN_S) for program in programs] == [0, 2]
    assert "--requests" in (tmp_path / "output").read_text()
    assert "--no-such-flag" in (tmp_path / "errors").read_text()
