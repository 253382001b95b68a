"""The supervisor with small fake components: order, restarts, giving up, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until, wait_for, within
from pillion.errors import ConfigError, Unavailable
from pillion.supervisor.child_process import MAX_LINE_BYTES, ChildProcess
from pillion.supervisor.lifeline import PARENT_PID_VARIABLE
from pillion.supervisor.restarts import Restart, RestartPolicy
from pillion.supervisor.runtime_dir import RuntimeDir, sweep
from pillion.supervisor.supervisor import MAX_UNANSWERED_PROBES, ProcessSpec, Supervisor
from tests.support.notices import RecordedNotices
from tests.support.processes import STAY, started

# Writes its name to a log when it starts and stops; ready once its file exists.
COMPONENT = (
    """
import pathlib, signal, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def note(what):
    with open(folder / "log", "a") as log: log.write(f"{what} {name}\\n")
def stop(*_):
    note("stop"); (folder / name).unlink(); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("start"); print("hello from", name, flush=True); (folder / name).touch()
"""
    + STAY
)
DEAF = "import signal, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + (
    f"(pathlib.Path(sys.argv[1]) / sys.argv[2]).touch(); {STAY}"
)


def pid_of(supervisor: Supervisor, component_id: str) -> int | None:
    """Return the process id of a running component, None while it is not running."""
    named = (one.child for one in supervisor._components if one.spec.component_id == component_id)
    return next((child.pid for child in named if child), None)


async def known(supervisor: Supervisor, component_id: str) -> int:
    """Return the process of a started component. Its output may exist before its supervisor, which ends it together
    with a component that it needs, knows its process."""
    pid: int = await until(f"{component_id} to run", lambda: pid_of(supervisor, component_id))
    return pid


async def kill(supervisor: Supervisor, component_id: str) -> None:
    """End a started component."""
    os.kill(await known(supervisor, component_id), signal.SIGKILL)


def spec(folder: pathlib.Path, name: str, level: int = 0, program: str = COMPONENT) -> ProcessSpec:
    async def probe() -> bool:
        return (folder / name).exists()

    argv = (sys.executable, "-c", program, str(folder), name)
    return ProcessSpec(component_id=name, level=level, argv=argv, environ=dict(os.environ), probe=probe)


def until_there(path: pathlib.Path) -> str:
    """Python that waits for a file."""
    return f"import pathlib, time\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)"


def log_of(folder: pathlib.Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


async def test_components_start_and_stop_level_by_level(folder: pathlib.Path) -> None:
    notices = RecordedNotices()
    supervisor = Supervisor([spec(folder, "c", 2), spec(folder, "a", 0), spec(folder, "b", 1)], notices)
    await supervisor.start()
    await until("three lines", lambda: len(notices.lines) == 3)
    await supervisor.stop()
    assert log_of(folder) == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]
    assert sorted(notices.lines) == ["a: hello from a", "b: hello from b", "c: hello from c"]
    assert supervisor.living() == []
    await supervisor.stop()


async def test_a_failed_start_is_logged_once(folder: pathlib.Path) -> None:
    notices = RecordedNotices()
    program = "print('loading'); print('pillion: --listen x: no'); raise SystemExit(2)"
    supervisor = Supervisor([spec(folder, "a", program=program)], notices)
    with pytest.raises(ConfigError, match=r"^a cannot start: --listen x: no$"):
        await supervisor.start()
    await supervisor.stop()
    assert notices.lines == ["a: loading"]


async def test_a_supervisor_bug_does_not_end_components(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises while a component is managed, it is reported, and the component is restarted once."""
    monkeypatch.setattr("pillion.supervisor.supervisor.DEFECT_DELAY_S", 0.01)
    notices = RecordedNotices()
    supervisor = Supervisor([spec(folder, "a")], notices, RestartPolicy(first_delay_ms=10))
    await supervisor.start()
    try:
        raises = iter((RuntimeError("a defect"),))
        decide = supervisor._policy.died

        def died(*arguments: Any) -> Any:
            for error in raises:
                raise error
            return decide(*arguments)

        monkeypatch.setattr(supervisor._policy, "died", died)
        (folder / "a").unlink()
        await kill(supervisor, "a")
        await until("a to run again", lambda: (folder / "a").exists() and pid_of(supervisor, "a"))
        assert any("bug in the supervisor" in line for line in notices.lines)
        assert log_of(folder) == ["start a", "start a"]
    finally:
        await supervisor.stop()


async def test_a_dead_component_is_started_again(folder: pathlib.Path) -> None:
    notices = RecordedNotices()
    supervisor = Supervisor([spec(folder, "a"), spec(folder, "b", 1)], notices, RestartPolicy(first_delay_ms=10))
    await supervisor.start()
    try:
        first = pid_of(supervisor, "a")
        assert first
        (folder / "a").unlink()
        os.kill(first, signal.SIGKILL)
        await until("a to run again", lambda: (folder / "a").exists() and pid_of(supervisor, "a"))
        assert pid_of(supervisor, "a") != first
        assert "pillion: a was ended by SIGKILL; restarting it at once" in notices.lines
        assert log_of(folder).count("start b") == 1
    finally:
        await supervisor.stop()
    assert supervisor.living() == []


async def test_a_component_waits_for_its_dead_dependency(folder: pathlib.Path) -> None:
    gate = folder / "gate"
    gate.touch()
    gated = spec(folder, "a", program=f"{until_there(gate)}\n{COMPONENT}")
    needy, free = dataclasses.replace(spec(folder, "b", 1), needs=("a",)), spec(folder, "c", 1)
    supervisor = Supervisor([gated, needy, free], RecordedNotices(), RestartPolicy(first_delay_ms=10))
    await supervisor.start()
    try:
        gate.unlink()
        for name in ("a", "b", "c"):
            (folder / name).unlink()
        first = await known(supervisor, "a")
        os.kill(first, signal.SIGKILL)
        # Of two deaths at once a supervisor may hear in either order.
        await until("the supervisor to know", lambda: pid_of(supervisor, "a") != first)
        await kill(supervisor, "c")
        await until("c to run again", lambda: log_of(folder).count("start c") == 2)
        gate.touch()
        await until("b to run again", lambda: log_of(folder).count("start b") == 2)
        assert log_of(folder)[3:] == ["start c", "start a", "start b"]
    finally:
        await supervisor.stop()


async def test_a_component_is_stopped_with_its_dependency(folder: pathlib.Path) -> None:
    """It does not count as its own death, however often it happens."""
    notices = RecordedNotices()
    needy, free = dataclasses.replace(spec(folder, "b", 1), needs=("a",)), spec(folder, "c", 1)

    class ForgivesTheFirst(RestartPolicy):
        def died(self, component_id: str, exit_code: int, now: float) -> Restart:
            assert component_id == "a"
            return Restart(0.01)

    supervisor = Supervisor([spec(folder, "a"), needy, free], notices, ForgivesTheFirst())
    await supervisor.start()
    try:
        for starts in (2, 3):
            (folder / "a").unlink()
            await kill(supervisor, "a")
            await until("b to run again", lambda starts=starts: log_of(folder).count("start b") == starts)
            await known(supervisor, "b")
            assert log_of(folder)[-2:] == ["start a", "start b"]
        assert log_of(folder).count("start c") == 1
        assert notices.lines.count("pillion: b was ended by SIGKILL; restarting it after a") == 2
    finally:
        await supervisor.stop()


async def test_a_starting_component_is_stopped_with_its_dependency(folder: pathlib.Path) -> None:
    notices = RecordedNotices()
    known_late, hold = asyncio.Event(), False

    async def launch(argv: Sequence[str], *args: Any, **options: Any) -> ChildProcess:
        child = await ChildProcess.start(argv, *args, **options)
        if argv[-1] == "b" and hold:
            await known_late.wait()
        return child

    needy = dataclasses.replace(spec(folder, "b", 1), needs=("a",))
    supervisor = Supervisor([spec(folder, "a"), needy], notices, RestartPolicy(first_delay_ms=10), launch=launch)
    await supervisor.start()
    try:
        hold = True
        await kill(supervisor, "b")
        await until("b to be started", lambda: log_of(folder).count("start b") == 2)
        (folder / "a").unlink()
        await kill(supervisor, "a")
        await until("a to run again", lambda: log_of(folder).count("start a") == 2)
        hold = False
        known_late.set()
        await until("b to run again", lambda: log_of(folder).count("start b") == 3)
        assert "pillion: b was ended by SIGKILL; restarting it after a" in notices.lines
    finally:
        await supervisor.stop()


async def test_a_crash_looping_component_ends_the_cluster(folder: pathlib.Path) -> None:
    policy = RestartPolicy(max_deaths=3, first_delay_ms=1)
    supervisor = Supervisor([spec(folder, "a"), spec(folder, "b")], RecordedNotices(), policy)
    await supervisor.start()
    failed = asyncio.create_task(supervisor.failed())
    for count in (1, 2, 3):
        await until("another start of a", lambda count=count: log_of(folder).count("start a") == count)
        await kill(supervisor, "a")
    assert await within("the supervisor to give up", failed) == "a died 3 times within 60 s"
    await supervisor.stop()
    assert supervisor.living() == []


def flapping() -> RestartPolicy:
    """A policy by which a component flaps from its second death, and then waits for longer than a test."""
    return RestartPolicy(max_deaths=2, window_s=600.0, flap_delay_s=3600.0, max_flap_delay_s=3600.0)


async def die_twice(folder: pathlib.Path, supervisor: Supervisor, name: str) -> None:
    """Kill a component, and kill it again when it is back."""
    for count in (1, 2):
        await until("another start", lambda count=count: log_of(folder).count(f"start {name}") == count)
        await kill(supervisor, name)


async def test_a_flapping_component_is_dropped_if_others_serve(folder: pathlib.Path) -> None:
    """It reports which one is down, and gives up when nothing of its kind can serve."""
    notices = RecordedNotices()
    specs = [dataclasses.replace(spec(folder, name), kind="decode") for name in ("a", "b")]
    supervisor = Supervisor([*specs, spec(folder, "c")], notices, flapping())
    await supervisor.start()
    failed = asyncio.create_task(supervisor.failed())
    try:
        await die_twice(folder, supervisor, "a")
        [down] = await until("a to be down", supervisor.down)
        assert (down.component_id, down.why) == ("a", "a died 2 times within 600 s")
        assert down.left_s > 0
        assert f"pillion: {down.why}; restarting it in 3600 s" in notices.lines
        # A single death of the other one is as any other.
        await kill(supervisor, "b")
        await until("b to be back", lambda: log_of(folder).count("start b") == 2)
        assert not failed.done()
        assert [one.component_id for one in supervisor.down()] == ["a"]
        await kill(supervisor, "b")
        assert await within("the supervisor to give up", failed) == "b died 2 times within 600 s"
    finally:
        await supervisor.stop()


async def test_a_flapping_optional_component_does_not_end_the_cluster(folder: pathlib.Path) -> None:
    spare = dataclasses.replace(spec(folder, "a"), spare=True)
    supervisor = Supervisor([spare, spec(folder, "b")], RecordedNotices(), flapping())
    await supervisor.start()
    try:
        await die_twice(folder, supervisor, "a")
        await until("a to be down", supervisor.down)
        assert not supervisor._failure.done()
    finally:
        await supervisor.stop()


async def test_an_unstartable_component_does_not_end_a_cluster_with_another_one(
    folder: pathlib.Path,
) -> None:
    program = folder / "program"
    program.symlink_to(sys.executable)
    gone = spec(folder, "a")
    gone = dataclasses.replace(gone, argv=(str(program), *gone.argv[1:]), kind="decode")
    other = dataclasses.replace(spec(folder, "b"), kind="decode")
    notices = RecordedNotices()
    supervisor = Supervisor([gone, other], notices, flapping())
    await supervisor.start()
    try:
        program.unlink()
        await kill(supervisor, "a")
        await until("a to be down", supervisor.down)
        assert not supervisor._failure.done()
    finally:
        await supervisor.stop()


async def test_a_surviving_dependents_exit_is_not_counted_as_its_own_death(folder: pathlib.Path) -> None:
    """Such a worker notices only later that it cannot continue, when its KV node is already back."""
    notices = RecordedNotices()
    needy = dataclasses.replace(spec(folder, "b", 1), needs=("a",), survives=True)

    class ForgivesTheFirst(RestartPolicy):
        def died(self, component_id: str, exit_code: int, now: float) -> Restart:
            assert component_id == "a"
            return Restart(0.01)

    supervisor = Supervisor([spec(folder, "a"), needy], notices, ForgivesTheFirst())
    await supervisor.start()
    try:
        for starts in (2, 3):
            (folder / "a").unlink()
            await kill(supervisor, "a")
            await until("a to be back", lambda starts=starts: log_of(folder).count("start a") == starts)
            await until("it to be ready", supervisor._components[0].ready.is_set)
            assert log_of(folder).count("start b") == starts - 1
            await kill(supervisor, "b")
            await until("b to run again", lambda starts=starts: log_of(folder).count("start b") == starts)
            await known(supervisor, "b")
        assert notices.lines.count("pillion: b was ended by SIGKILL; restarting it after a") == 2
    finally:
        await supervisor.stop()


async def test_a_start_that_fails_half_way_leaves_nothing(folder: pathlib.Path) -> None:
    broken = spec(folder, "b", 1, "import sys; print('the reason', flush=True); sys.exit(3)")
    notices = RecordedNotices()
    supervisor = Supervisor([spec(folder, "a"), broken, spec(folder, "c", 2)], notices)
    with pytest.raises(Unavailable, match="b ended with status 3 before it was ready"):
        await supervisor.start()
    await supervisor.stop()
    assert log_of(folder) == ["start a", "stop a"]
    assert "b: the reason" in notices.lines
    assert supervisor.living() == []


async def test_a_missing_program_is_reported(folder: pathlib.Path) -> None:
    absent = ProcessSpec(component_id="x", level=0, argv=("/nowhere/x",), environ={}, probe=spec(folder, "x").probe)
    supervisor = Supervisor([absent], RecordedNotices())
    with pytest.raises(Unavailable, match="x cannot be started"):
        await supervisor.start()
    await supervisor.stop()


async def test_a_component_that_never_becomes_ready(folder: pathlib.Path) -> None:
    supervisor = Supervisor([spec(folder, "a", program=STAY)], RecordedNotices(), start_timeout_s=0.2)
    with pytest.raises(Unavailable, match="a was ended by SIGKILL before it was ready"):
        await supervisor.start()
    await supervisor.stop()
    assert supervisor.living() == []


async def test_a_component_that_ignores_sigterm_is_killed(folder: pathlib.Path) -> None:
    supervisor = Supervisor([spec(folder, "a", program=DEAF)], RecordedNotices(), stop_grace_s=0.2)
    await supervisor.start()
    await supervisor.stop()
    assert supervisor.living() == []


async def test_a_cancelled_start_leaves_nothing(folder: pathlib.Path) -> None:
    never = spec(folder, "b", 1, STAY)
    supervisor = Supervisor([spec(folder, "a"), never], RecordedNotices())
    starting = asyncio.create_task(supervisor.start())
    await until("b to run", lambda: pid_of(supervisor, "b") is not None)
    starting.cancel()
    await asyncio.wait({starting})
    await supervisor.stop()
    assert supervisor.living() == []


async def test_a_quiet_component_is_shown_only_when_it_dies(folder: pathlib.Path) -> None:
    notices = RecordedNotices()
    quiet = dataclasses.replace(spec(folder, "a"), quiet=True)
    supervisor = Supervisor([quiet], notices, RestartPolicy(first_delay_ms=10_000))
    await supervisor.start()
    assert notices.lines == []
    await kill(supervisor, "a")
    await until("the notice", lambda: any("restarting it" in line for line in notices.lines))
    assert "a: hello from a" in notices.lines
    await supervisor.stop()


async def test_grandchildren_are_killed(folder: pathlib.Path) -> None:
    program = COMPONENT.replace(STAY, "import subprocess; subprocess.run(['sleep', '60'])")
    supervisor = Supervisor([spec(folder, "a", program=program)], RecordedNotices(), stop_grace_s=0.5)
    await supervisor.start()
    parent = psutil.Process(pid_of(supervisor, "a"))
    await until("a grandchild", lambda: parent.children())
    grandchildren = parent.children()
    await supervisor.stop()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, grandchildren, WITHIN_S)
    assert gone == grandchildren


async def test_output_is_forwarded_in_bounded_lines() -> None:
    lines: list[str] = []
    program = f"import sys; sys.stdout.write('x' * {3 * MAX_LINE_BYTES} + '\\nlast\\rline \\xff\\nno end')"
    child = await ChildProcess.start([sys.executable, "-X", "utf8", "-c", program], dict(os.environ), lines.append)
    assert await child.wait() == 0
    assert "".join(lines[:-2]) == "x" * 3 * MAX_LINE_BYTES
    assert max(map(len, lines)) < 2 * MAX_LINE_BYTES
    assert lines[-2:] == ["line ÿ", "no end"]


def test_a_component_dies_with_a_killed_supervisor(folder: pathlib.Path) -> None:
    component = f"import os; os.environ[{PARENT_PID_VARIABLE!r}] = str(os.getppid());" + (
        "from pillion.supervisor.lifeline import tie_to_parent; tie_to_parent(); print('tied', flush=True);" + STAY
    )
    script = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {component!r}], stdout=subprocess.PIPE);"
        f"child.stdout.readline(); print(child.pid, flush=True); {STAY}"
    )
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
    gone, _ = psutil.wait_procs([child], WITHIN_S)
    assert gone == [child]


def test_an_orphaned_child_exits_before_it_starts() -> None:
    environ = {**os.environ, PARENT_PID_VARIABLE: str(2**22 - 1)}
    done = subprocess.run([sys.executable, "-m", "pillion", "version"], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_watcher_replaces_missing_kernel_support(folder: pathlib.Path) -> None:
    watcher = (
        "import os, sys; from pillion.supervisor.lifeline import watch;"
        f"sys.exit(watch(os.getppid(), [sys.executable, '-c', {STAY!r}]))"
    )
    script = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {watcher!r}]); print(child.pid, flush=True); {STAY}"
    )
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        watching = psutil.Process(int(parent.stdout.readline()))
        children = wait_for("the watched program", watching.children)
    gone, _ = psutil.wait_procs([watching, *children], WITHIN_S)
    assert len(gone) == 2


def test_runtime_directories_are_private_and_swept_once_their_owner_is_dead(folder: pathlib.Path) -> None:
    script = (
        "import pathlib; from pillion.supervisor.runtime_dir import RuntimeDir;"
        f"d = RuntimeDir.create(pathlib.Path({str(folder)!r})); (d.path / 'x').touch(); print(d.path, flush=True);"
        + STAY
    )
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = pathlib.Path(other.stdout.readline().strip())
        assert theirs.stat().st_mode & 0o777 == 0o700
        assert sweep(folder) == []
    ours = RuntimeDir.create(folder)
    assert list(folder.iterdir()) == [ours.path]
    (folder / "pillion-notes").mkdir()
    assert sweep(folder) == []
    ours.remove()
    ours.remove()
    assert [path.name for path in folder.iterdir()] == ["pillion-notes"]


async def test_a_component_that_hangs_is_killed_and_started_again(folder: pathlib.Path) -> None:
    notices = RecordedNotices()
    # Silences with an answer between them are no hang, however many they are.
    answers = [True] * MAX_UNANSWERED_PROBES + 3 * ([False] * (MAX_UNANSWERED_PROBES - 1) + [True])
    hung: list[bool] = []

    async def alive() -> bool:
        return answers.pop(0) if answers else not hung

    watched = dataclasses.replace(spec(folder, "a"), alive=alive)
    supervisor = Supervisor([watched], notices, RestartPolicy(first_delay_ms=10), alive_interval_s=0.01)
    await supervisor.start()
    try:
        first = pid_of(supervisor, "a")
        await until("all answers", lambda: not answers)
        await loop_turns()
        assert pid_of(supervisor, "a") == first
        assert not notices.lines[1:], notices.lines
        hung.append(True)
        await until("another process", lambda: pid_of(supervisor, "a") not in (None, first))
        assert f"pillion: a hangs: no answer to {MAX_UNANSWERED_PROBES} probes" in notices.lines
    finally:
        await supervisor.stop()
    assert supervisor.living() == []
