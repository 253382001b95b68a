"""Runs `pillion serve` as a user starts it: real processes, found by the role in their command line."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import psutil

from lab.testbed.conditions import WITHIN_S, wait_for
from lab.testbed.faults.board import FaultBoard, hook_environment
from lab.testbed.faults.points import BY_NAME
from lab.testbed.forks import shared_forks
from lab.testbed.nested_forks import FORKED_VARIABLE
from lab.testbed.ports import free_port
from pillion import Client
from pillion.errors import Conflict, PillionError
from pillion.kvstore.client.node_client import NodeClient
from pillion.supervisor.child_process import child_environ
from pillion.supervisor.lifeline import PARENT_PID_VARIABLE
from pillion.supervisor.local_cluster import compute_environ
from pillion.supervisor.standbys.process_title import STANDBY_VARIABLE, WAITING_NAME, WAITING_TITLE
from pillion.v1.kvnode_pb2 import NodeStatus

READY_TIMEOUT_S = 200.0
# This covers the longest drain, and the time for all processes to end.
STOP_TIMEOUT_S = 120.0
# With this heartbeat timeout no component is taken for lost because the machine is busy, or because a test holds a
# process.
PATIENT_MS = int(2 * WITHIN_S * 1000)
# A decode worker passes this point once for each step. Unless tokens are drafted, a step gives a stream one token at
# most, so the number of passings is certain; whether the tokens of earlier steps have left the worker is not.
AMID_STEPS = "decode, before a launch"
# A worker is held this long for the sake of streams that may begin meanwhile, before it goes on for some steps: first
# briefly, because most begin only where it goes on, and after so many looks ever longer, because then it is another
# process that lags, and the worker's streams are not to end before that one runs again.
BEGUN_WITHIN_S, BEGUN_WITHIN_AT_MOST_S, BRIEF_LOOKS = 0.5, 16.0, 4


class HostProcess(Protocol):
    """Describes what tests use of a process: a Popen's methods."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: signal.Signals) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ServedCluster:
    """Represents a running `pillion serve`, with its temporary files under ``folder``."""

    def __init__(
        self,
        process: HostProcess,
        folder: pathlib.Path,
        port: int,
        log: pathlib.Path,
        board: FaultBoard | None = None,
    ) -> None:
        """Takes a running process. ``board`` is that of its processes, where they have hooks for faults."""
        self.process = process
        self.folder = folder
        self.target = f"127.0.0.1:{port}"
        self.log = log
        self.ever_seen: dict[int, psutil.Process] = {}
        self._faults = board
        self._armed = ""

    @property
    def board(self) -> FaultBoard:
        """Gives the board on which the faults of the cluster's processes are armed."""
        assert self._faults is not None, "served() was not told to have faults"
        return self._faults

    def processes(self) -> list[psutil.Process]:
        """Returns all living processes of the cluster, the supervisor included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for process in (top, *top.children(recursive=True)):
                self.ever_seen[process.pid] = process
        return [process for process in self.ever_seen.values() if alive(process)]

    def components(self, role: str) -> list[psutil.Process]:
        """Returns the processes of ``role`` ("prefill", "decode", "kvnode", "gateway", "redis-server"), without those
        that only stand by."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = words_of(process)
                named = any(pathlib.Path(word).name == role for word in words[:5])
                if named and process.pid != self.process.pid and not stands_by(process):
                    found.append(process)
        return found

    def standbys(self) -> int:
        """Returns how many processes are ready to take over from others."""
        count = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                count += process.name() == WAITING_NAME
        return count

    def component(self, role: str) -> psutil.Process | None:
        """Returns the first process of ``role``, None if there is none."""
        return next(iter(self.components(role)), None)

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to the component; returns its pid."""
        process = self.component(role)
        assert process is not None, f"no {role} lives"
        process.send_signal(number)
        return process.pid

    def arm(
        self,
        passing: int,
        number: signal.Signals | None,
        *,
        point: str = AMID_STEPS,
        victim: str = "",
        held_s: float = 0.0,
    ) -> None:
        """Arms a fault: a signal is sent at the ``passing``-th passing of a named point from now on, over all processes
        of its role: to the process that passes it, or to that of the role ``victim``. Without a signal, the thread that
        passes is held for ``held_s``, and the rest of its process goes on. It replaces the fault that was armed
        before."""
        process = self.component(victim) if victim else None
        assert process is not None or not victim, f"no {victim} lives"
        self.board.clear()
        self.board.arm(0, BY_NAME[point], passing, number, process.pid if process else 0, held_s)
        self._armed = point

    def struck(self) -> int:
        """Waits until the fault that is armed has happened; returns the process that passed the point."""

        def passings() -> str:
            return f"{self.board.passings(BY_NAME[self._armed])} passings"

        what = f"the fault at {self._armed!r}"
        return int(wait_for(what, lambda: self.board.fired(0), saw=passings).pid)

    @contextlib.contextmanager
    def holding(self) -> Iterator[psutil.Process]:
        """Waits until the process has passed the point at which :meth:`arm` stops it; the process goes on when the
        block ends, if it still lives. The work at that point is not over before that."""
        process = psutil.Process(self.struck())
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    @contextlib.contextmanager
    def holding_all(self, what: str, begun: Callable[[], bool], steps: int) -> Iterator[psutil.Process]:
        """Waits as :meth:`holding` does, until ``begun`` says that all streams have: the only decode worker, armed to
        stop amid the first of them, is let go on for some more ``steps`` until then."""
        for look in itertools.count():
            look_s = BEGUN_WITHIN_S * 2 ** max(0, look - BRIEF_LOOKS)
            with self.holding() as process:
                with contextlib.suppress(AssertionError):
                    wait_for(what, begun, min(look_s, BEGUN_WITHIN_AT_MOST_S))
                if begun():
                    yield process
                    return
                self.arm(steps, signal.SIGSTOP)

    def node_status(self) -> NodeStatus:
        """Returns the KV node's status after it proved its integrity. Raises AssertionError while it does not answer,
        and Conflict where it cannot prove its integrity."""
        path = next(self.folder.rglob("kvnode*.sock"), None)
        assert path, "no KV node has a socket"
        status = asyncio.run(proven_status(f"unix:{path}"))
        assert status is not None, f"no KV node answers at {path}"
        return status

    def idle(self) -> bool:
        """Returns whether nothing is pinned, reserved or waiting; leased slots are the decode worker's stock. The node
        has proved its integrity; where it cannot, this raises Conflict. False while it does not answer."""
        try:
            status = self.node_status()
        except AssertionError:
            return False
        return not (status.tickets or status.pinned_blocks or status.reserved_blocks)

    def serving(self) -> bool:
        """Returns whether the gateway knows a decode worker and every prefill worker."""
        with contextlib.suppress(PillionError), Client(self.target) as client:
            known = [component for component in client.status().components if component.role == "prefill"]
            return bool(client.models()) and len(known) >= len(self.components("prefill"))
        return False

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ends the cluster as Ctrl-C does; returns its exit status."""
        self.processes()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def end(self) -> None:
        """Stops the cluster, and kill all processes that do not end in time, the supervisor included."""
        try:
            self.stop()
        finally:
            for leftover in self.processes():
                leftover.kill()

    def left_behind(self) -> list[str]:
        """Returns living processes and files that an ended cluster should not have left."""
        processes = [" ".join(p.cmdline()) for p in self.ever_seen.values() if alive(p)]
        return processes + [str(path) for path in self.folder.rglob("*") if path != self.log]


async def proven_status(address: str) -> NodeStatus | None:
    """Returns a KV node's status after it proved its integrity (I4); None where it does not answer. Raises Conflict
    where it cannot prove it."""
    client = NodeClient(address, "test")
    try:
        await client.check_integrity()
        return await client.status()
    except Conflict:
        raise
    except PillionError:
        return None
    finally:
        await client.aclose()


def words_of(process: psutil.Process) -> list[str]:
    """Returns a process's command line, empty where it has ended. Forked components, like Redis, show one word with
    spaces in it."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).split()
    return []


def stands_by(process: psutil.Process) -> bool:
    """Returns whether a process was started as a standby and serves nothing yet: it loads, waits, or takes over just
    now."""
    if process.name() == WAITING_NAME or words_of(process)[:1] == [WAITING_TITLE]:
        return True
    return STANDBY_VARIABLE in process.environ() and not any(one.laddr for one in process.net_connections("unix"))


def alive(process: psutil.Process) -> bool:
    """Returns whether a process runs and is no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _start(command: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> HostProcess:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)


def _fork(command: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> HostProcess:
    """Starts a cluster as a fork, and its fork server, too, where its workers have one thread each."""
    imported_in = child_environ(environ, "") | compute_environ(1)
    return shared_forks(imported_in).start(command, environ, log)


@contextlib.contextmanager
def served(
    folder: pathlib.Path,
    model: str,
    *flags: str,
    split_policy: str = "disaggregated",
    environ: Mapping[str, str] | None = None,
    faults: bool = False,
    forked: bool = False,
) -> Iterator[ServedCluster]:
    """Runs `pillion serve MODEL FLAGS` with its temporary files under ``folder``; stops it at the end.

    The cluster dies with the thread that calls this (on Linux), so nothing outlives a test or a benchmark that is
    killed.

    Without --split-policy among the flags, ``split_policy`` holds, with which a prefill worker computes every prompt;
    "" leaves it to the default of `pillion serve`. Without --standby no process stands by: starting those takes as long
    as starting the cluster, and without --partial-block-percent workers keep no partial blocks, so that leaked slots
    show. ``environ`` is added to the environment. With ``faults`` its processes have hooks at their
    fault points, no component is taken for lost by silence alone, unless flags say when, and Redis is waited for. With
    ``forked`` or ``faults``, or where the environment has FORKED_VARIABLE, all of them are forks
    (:mod:`lab.testbed.forks`), for tests start such clusters by the hundred.
    """
    port = free_port()
    temporary = folder / "t"
    temporary.mkdir()
    log = folder / "serve.log"
    command = [sys.executable, "-m", "pillion", "serve", model, "--grpc-port", str(port), "--http-port", "0", *flags]
    policy = {"PILLION_SPLIT_POLICY": split_policy} if split_policy else {}
    quiet = {"PILLION_LOG_LEVEL": "info", "PILLION_STANDBY": "false", "PILLION_PARTIAL_BLOCK_PERCENT": "0"}
    environment = policy | {**quiet, **os.environ, **(environ or {})}
    board = None
    if faults:
        environment |= {"PILLION_HEARTBEAT_TIMEOUT_MS": str(PATIENT_MS), **hook_environment(folder / "board")}
        board = FaultBoard(folder / "board")
    environment |= {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", PARENT_PID_VARIABLE: str(os.getpid())}
    start = _fork if forked or faults or FORKED_VARIABLE in os.environ else _start
    cluster = ServedCluster(start(command, environment, log), temporary, port, log, board)
    try:

        def ready() -> bool:
            assert cluster.process.poll() is None, f"serve ended:\n{log.read_text()}"
            return cluster.serving()

        wait_for("the cluster to serve", ready, READY_TIMEOUT_S)
        cluster.processes()
        yield cluster
    except BaseException:
        sys.stderr.write(log.read_text()[-8000:])
        raise
    finally:
        cluster.end()
