"""Standbys of small fake components: they wait, take over, end with their supervisor, and report why there is none."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import psutil
import pytest

from lab.testbed.cluster import alive
from lab.testbed.conditions import WITHIN_S, until, within
from pillion.supervisor.standbys.process_title import WAITING_NAME
from pillion.supervisor.standbys.standby import Successor
from pillion.supervisor.supervisor import Supervisor
from tests.pillion.supervisor.test_supervisor import COMPONENT, kill, log_of, pid_of, spec, until_there
from tests.support.notices import RecordedNotices
from tests.support.processes import NewChildren

# The component's program, which waits for its turn where it was started as a standby.
STANDING_BY = (
    f"from pillion.supervisor.standbys.standby import Standby; by = Standby.of_process(); by and by.wait()\n{COMPONENT}"
)


def waiting(children: NewChildren) -> list[psutil.Process]:
    """Return the processes that stand by."""
    return [child for child in children() if alive(child) and child.name() == WAITING_NAME]


async def test_a_standby_replaces_a_dead_component_at_once(folder: pathlib.Path) -> None:
    notices, children = RecordedNotices(), NewChildren()
    kept = dataclasses.replace(spec(folder, "a", program=STANDING_BY), standby=True)
    supervisor = Supervisor([kept], notices, standby_delay_s=0.01)
    await supervisor.start()
    try:
        for starts in (2, 3):
            [standby] = await until("a standby", lambda: waiting(children))
            assert log_of(folder).count("start a") == starts - 1, "it has not begun"
            await kill(supervisor, "a")
            await until("it to begin", lambda starts=starts: log_of(folder).count("start a") == starts)
            assert pid_of(supervisor, "a") == standby.pid
        await until("three lines", lambda: notices.lines.count("a: hello from a") == 3)
        [standby] = await until("a standby", lambda: waiting(children))
        standby.kill()
        await until("its end", lambda: not alive(standby))
        await kill(supervisor, "a")
        await until("another one to begin", lambda: log_of(folder).count("start a") == 4)
        assert await until("a standby", lambda: waiting(children))
    finally:
        await supervisor.stop()
    assert supervisor.living() == []
    assert waiting(children) == []


async def test_an_unready_standby_still_takes_over(folder: pathlib.Path) -> None:
    gate = folder / "gate"
    slow = f"{until_there(gate)}\n{STANDING_BY}"
    waits = spec(folder, "a", program=slow)
    lines: list[str] = []
    child = (await Successor.start(waits.argv, waits.environ)).begin(lines.append)
    assert child is not None
    try:
        gate.touch()
        await until("it to begin", lambda: lines == ["hello from a"])
    finally:
        await child.stop(WITHIN_S)


async def test_a_missing_standby_is_logged(folder: pathlib.Path) -> None:
    program = "import os\nif 'PILLION_AWAITS_TURN' in os.environ: raise SystemExit('the reason')\n" + COMPONENT
    notices = RecordedNotices()
    kept = dataclasses.replace(spec(folder, "a", program=program), standby=True)
    supervisor = Supervisor([kept], notices, standby_delay_s=0.01)
    await supervisor.start()
    try:
        await until("the notice", lambda: "a: the reason" in notices.lines)
        assert "pillion: a has no standby; it ended:" in notices.lines
    finally:
        await supervisor.stop()


async def test_a_failing_standby_is_logged_once(folder: pathlib.Path) -> None:
    tries: list[str] = []

    async def refuse(*_: object) -> Successor:
        tries.append("try")
        raise OSError("no room")

    notices = RecordedNotices()
    supervisor = Supervisor(
        [dataclasses.replace(spec(folder, "a"), standby=True)], notices, stand_by=refuse, standby_delay_s=0.01
    )
    await supervisor.start()
    try:
        await until("some tries", lambda: len(tries) > 2)
        assert notices.lines.count("pillion: a has no standby: no room") == 1
    finally:
        await supervisor.stop()


async def test_a_standby_ends_with_its_supervisor(folder: pathlib.Path) -> None:
    waits = spec(folder, "a", program=STANDING_BY)
    successor = await Successor.start(waits.argv, waits.environ)
    try:
        assert await within("the standby", successor.ready())
        # A supervisor's end closes its side of the connection, too.
        successor._connection.close()
        await within("the standby's end", successor.wait())
    finally:
        successor.close()
    assert not (folder / "log").exists()


async def test_a_standby_that_has_ended_gets_no_signal(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = spec(folder, "a", program="")
    successor = await Successor.start(waits.argv, waits.environ)
    await within("the standby's end", successor.wait())
    sent: list[int] = []
    # Its number may be another process's by then.
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(pid))
    successor.close()
    assert successor.begin(print) is None
    assert not sent
