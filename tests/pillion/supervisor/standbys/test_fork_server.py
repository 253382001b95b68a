"""The fork server with real processes: forks are children like any other, and its own end only costs time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from lab.testbed.cluster import alive, words_of
from lab.testbed.conditions import WITHIN_S, until, within
from pillion.supervisor.child_process import UNKNOWN_STATUS, ChildProcess, ForkedProcess, child_environ
from pillion.supervisor.lifeline import adopt_orphans
from pillion.supervisor.standbys import fork_server
from pillion.supervisor.standbys.fork_server import ForkServer
from pillion.supervisor.standbys.process_title import WAITING_NAME, WAITING_TITLE
from pillion.supervisor.standbys.standby import Successor
from tests.support.processes import STAY, NewChildren, started

PILLION = (sys.executable, "-m", "pillion")
# Enough for a component without a model.
MODULES = ("pillion.cli.app", "pillion.kvstore.pool_survival.keeper_process")


@contextlib.asynccontextmanager
async def serving(*modules: str, environ: dict[str, str] | None = None) -> AsyncIterator[tuple[ForkServer, list[str]]]:
    """A fork server and its output."""
    said: list[str] = []
    server = ForkServer(modules or MODULES, child_environ(os.environ, "") | (environ or {}), said.append)
    server.start()
    try:
        yield server, said
    finally:
        await server.stop()
    assert server.has_exited()


@contextlib.asynccontextmanager
async def keeper(
    server: ForkServer, folder: pathlib.Path, **more: str
) -> AsyncIterator[tuple[ChildProcess, list[str]]]:
    """The smallest component, once it listens, and its lines."""
    lines: list[str] = []
    path = folder / "k.sock"
    environ = child_environ(os.environ, "") | more
    child = await server.launch((*PILLION, "keeper", str(path)), environ, lines.append)
    try:
        await until("it to listen", path.exists)
        yield child, lines
    finally:
        await child.stop(WITHIN_S)
        path.unlink(missing_ok=True)
    assert child.has_exited()


async def test_a_fork_is_a_child_like_any_other(folder: pathlib.Path) -> None:
    async with serving() as (server, said), keeper(server, folder) as (child, _):
        process = psutil.Process(child.pid)
        # Of this process and not of the server, which is shown by another command line.
        assert (process.ppid(), os.getsid(child.pid), os.getpgid(child.pid)) == (os.getpid(), child.pid, child.pid)
        assert words_of(process)[:4] == [*PILLION, "keeper"]
        assert process.exe() == psutil.Process().exe()
        assert process.name() == pathlib.Path(sys.executable).name
        # Standard input, output and error, its socket, and nothing of the server's.
        assert process.num_fds() == 4
        child.kill()
        assert await within("the fork's end", child.wait()) == -signal.SIGKILL
        assert not psutil.pid_exists(child.pid)
        assert said == []


async def test_a_fork_has_its_own_output_status_and_environment(folder: pathlib.Path) -> None:
    async def run(*words: str, **more: str) -> tuple[int, list[str]]:
        lines: list[str] = []
        child = await server.launch((*PILLION, *words), child_environ(os.environ, "") | more, lines.append)
        return await within("the fork's end", child.wait()), lines

    async with serving() as (server, _):
        status, lines = await run("version")
        assert status == 0
        assert lines[0].startswith("pillion ")
        status, lines = await run("keeper", str(folder / "k"), PILLION_NONSENSE="1")
        assert status == 2
        assert "PILLION_NONSENSE" in lines[0]
        status, lines = await run("health", f"unix:{folder}/nobody")
        assert status == 1
        assert lines[0].startswith(f"unix:{folder}/nobody is not serving")


async def test_a_component_outlives_the_fork_server_and_others_start_without_it(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "RESPAWN_DELAY_S", 0.01)
    (folder / "2").mkdir()
    async with serving() as (server, _), keeper(server, folder) as (child, _):
        first = server.pid
        assert first
        os.kill(first, signal.SIGKILL)
        # It may not have been noticed yet: its connection says so.
        async with keeper(server, folder / "2") as (other, _):
            assert {child.running, other.running} == {True}
        await until("another server", lambda: server.pid not in (None, first))
        async with keeper(server, folder / "2") as (other, _):
            assert psutil.Process(other.pid).ppid() == os.getpid()
        assert child.running


async def test_a_fork_server_killed_during_import_is_respawned(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "RESPAWN_DELAY_S", 0.01)
    marked = folder / "killed"
    (folder / "dies_once.py").write_text(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(marked)!r})\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    async with serving("dies_once", *MODULES, environ={"PYTHONPATH": str(folder)}) as (server, _):
        await until("a server after the one that died", lambda: server.pid)
        assert marked.exists()


async def test_a_server_that_hangs_is_killed_and_not_waited_for(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (server, _):
        async with keeper(server, folder):
            pass
        monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 0.05)
        first = psutil.Process(server.pid)
        first.suspend()
        async with keeper(server, folder) as (child, _):
            assert psutil.Process(child.pid).ppid() == os.getpid()
        await until("its end", lambda: not alive(first))


async def test_an_abandoned_fork_request_is_never_run(folder: pathlib.Path) -> None:
    async with serving() as (server, _):
        async with keeper(server, folder):
            pass
        children = NewChildren()
        first = psutil.Process(server.pid)
        first.suspend()
        path = folder / "k.sock"
        asking = asyncio.create_task(
            server.launch((*PILLION, "keeper", str(path)), child_environ(os.environ, ""), print)
        )
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        first.resume()
        async with keeper(server, folder):
            pass
        await until("the fork to be waited for", lambda: children() == [])


async def test_an_abandoned_fork_is_reaped_before_shutdown_ends(folder: pathlib.Path) -> None:
    children = NewChildren()
    async with serving() as (server, said):
        async with keeper(server, folder):
            pass
        asking = asyncio.create_task(server.launch((*PILLION, "version"), child_environ(os.environ, ""), print))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    assert (children(), said) == ([], [])


async def test_a_server_without_descriptors_forks_nothing(folder: pathlib.Path) -> None:
    async with serving() as (server, said):
        async with keeper(server, folder):
            pass
        first = server.pid
        assert first
        # One more than it has: of an order's three it gets one.
        highest = max(map(int, os.listdir(f"/proc/{first}/fd")))
        limits = resource.prlimit(first, resource.RLIMIT_NOFILE, (highest + 2, highest + 2))
        async with keeper(server, folder):
            pass
        assert limits[0] > highest + 2
        assert (server.pid, said) == (first, [])


def test_a_fork_server_exits_if_its_supervisor_is_lost_during_import() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, started([sys.executable, "-m", fork_server.PROGRAM], stdin=theirs, stderr=subprocess.PIPE) as process:
        theirs.close()
        with ours:
            ours.settimeout(WITHIN_S)
            # It stays unread, so that the server's next look at the connection is an error.
            assert ours.recv(1, socket.MSG_PEEK) == fork_server.READY
        assert process.wait(WITHIN_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


async def test_modules_that_start_threads_on_import_are_not_forked(folder: pathlib.Path) -> None:
    (folder / "with_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    async with serving("with_thread", environ={"PYTHONPATH": path}) as (server, said):
        async with keeper(server, folder):
            assert server.pid is None
        reason = "2 threads run after the imports, so nothing can be forked"
        await until("the reason", lambda: reason in said)


async def test_a_standby_is_shown_as_one_until_it_serves(folder: pathlib.Path) -> None:
    async with serving() as (server, _):
        argv = (*PILLION, "kvnode", f"--node-listen=unix:{folder}/n.sock", f"--attach-socket={folder}/a.sock")
        successor = await Successor.start(argv, child_environ(os.environ, ""), server.launch)
        try:
            assert await within("the standby", successor.ready())
            process = psutil.Process(successor.pid)
            assert (process.name(), words_of(process)[0]) == (WAITING_NAME, WAITING_TITLE)
            child = successor.begin(lambda line: None)
            assert child is not None
            await until("it to serve", lambda: words_of(process)[:4] == [*PILLION, "kvnode"])
            assert process.name() != WAITING_NAME
            await child.stop(WITHIN_S)
        finally:
            successor.close()


def test_a_fork_dies_with_a_killed_supervisor(folder: pathlib.Path) -> None:
    script = f"""
import asyncio, os, pathlib
from pillion.supervisor.child_process import child_environ
from pillion.supervisor.standbys.fork_server import ForkServer

async def main():
    environ = child_environ(os.environ, "")
    server = ForkServer({MODULES!r}, environ, print)
    server.start()
    path = {str(folder / "k.sock")!r}
    child = await server.launch({PILLION!r} + ("keeper", path), environ, print)
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    print(child.pid, server.pid, flush=True)
    {STAY}

asyncio.run(main())
"""
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(number)) for number in parent.stdout.readline().split()]
    gone, _ = psutil.wait_procs(processes, WITHIN_S)
    assert len(gone) == 2


async def test_adopted_orphans_are_reaped() -> None:
    """A program left behind by its component is killed with the component, and is not a zombie of the supervisor."""
    assert adopt_orphans()
    quiet = f"subprocess.Popen([sys.executable, '-c', {STAY!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    program = f"import subprocess, sys; print({quiet}.pid, flush=True); {STAY}"
    lines: list[str] = []
    child = await ChildProcess.start((sys.executable, "-c", program), dict(os.environ), lines.append)
    await until("the grandchild", lambda: lines)
    os.kill(child.pid, signal.SIGKILL)
    assert await within("the component's end", child.wait()) == -signal.SIGKILL
    # Nobody asks whether it is gone, which would bury it as well.
    await until("it to be buried", lambda: not psutil.pid_exists(int(lines[0])))
    assert child.has_exited()


@pytest.fixture(autouse=True)
def _linux() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux hands orphans over to a supervisor")


async def test_a_child_reaped_elsewhere_counts_as_ended() -> None:
    """Otherwise the event loop would poll for it forever, and do little else."""
    with started([sys.executable, "-S", "-c", ""]) as program:
        child = ForkedProcess(program.pid, None)
        program.wait(WITHIN_S)
    assert await within("the child's end", child.wait()) == UNKNOWN_STATUS
    assert child.returncode == UNKNOWN_STATUS
