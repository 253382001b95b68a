"""`pillion serve` as a user starts it: real processes, found by the role in their command line."""

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
from lab.testbed.defaults import CLUSTER, DECODE, Defaults, defaults_environment
from lab.testbed.faults.board import FaultBoard, hook_environment, hook_path
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

# Defaults of served clusters.
QUIET: Defaults = {CLUSTER: {"standby": False}, DECODE: {"partial_block_percent": 0}}
READY_TIMEOUT_S = 200.0
# Covers the longest drain and the end of all processes.
STOP_TIMEOUT_S = 120.0
# Heartbeat timeout that a busy machine or a process held by a test does not reach.
PATIENT_MS = int(2 * WITHIN_S * 1000)
# Passed once per step by a decode worker. Without draft tokens a step adds at most one token per stream, so the number
# of passes is exact; whether earlier tokens have left the worker is not.
AMID_STEPS = "decode, before a launch"
# Time to hold a worker for streams that have yet to begin, before it continues for some steps: brief at first, since
# most begin only when it continues, then doubled after BRIEF_LOOKS, when another process must be lagging.
BEGUN_WITHIN_S, BEGUN_WITHIN_AT_MOST_S, BRIEF_LOOKS = 0.5, 16.0, 4


class HostProcess(Protocol):
    """The methods of a Popen that tests use."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: signal.Signals) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ServedCluster:
    """A running `pillion serve`, with its temporary files under ``folder``."""

    def __init__(
        self,
        process: HostProcess,
        folder: pathlib.Path,
        port: int,
        log: pathlib.Path,
        board: FaultBoard | None = None,
    ) -> None:
        """``board``: of its processes, if they have fault hooks."""
        self.process = process
        self.folder = folder
        self.target = f"127.0.0.1:{port}"
        self.log = log
        self.ever_seen: dict[int, psutil.Process] = {}
        self._faults = board
        self._armed = ""

    @property
    def board(self) -> FaultBoard:
        """The board on which its processes' faults are armed."""
        assert self._faults is not None, "served() was not told to have faults"
        return self._faults

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the cluster, including the supervisor."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for process in (top, *top.children(recursive=True)):
                self.ever_seen[process.pid] = process
        return [process for process in self.ever_seen.values() if alive(process)]

    def components(self, role: str) -> list[psutil.Process]:
        """Return the processes of ``role`` ("prefill", "decode", "kvnode", "gateway", "redis-server"), without
        standbys."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = words_of(process)
                named = any(pathlib.Path(word).name == role for word in words[:5])
                if named and process.pid != self.process.pid and not stands_by(process):
                    found.append(process)
        return found

    def standbys(self) -> int:
        """Return the number of ready standbys."""
        count = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                count += process.name() == WAITING_NAME
        return count

    def component(self, role: str) -> psutil.Process | None:
        return next(iter(self.components(role)), None)

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the component and return its pid."""
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
        """Arm a fault, replacing the last: a signal at the ``passing``-th pass of a named point, counted over all
        processes of its role, sent to the passing process or to that of role ``victim``. Without a signal, the passing
        thread is held for ``held_s`` while the rest of its process continues."""
        process = self.component(victim) if victim else None
        assert process is not None or not victim, f"no {victim} lives"
        self.board.clear()
        self.board.arm(0, BY_NAME[point], passing, number, process.pid if process else 0, held_s)
        self._armed = point

    def struck(self) -> int:
        """Wait until the armed fault has happened and return the pid that passed the point."""

        def passings() -> str:
            return f"{self.board.passings(BY_NAME[self._armed])} passings"

        what = f"the fault at {self._armed!r}"
        return int(wait_for(what, lambda: self.board.fired(0), saw=passings).pid)

    @contextlib.contextmanager
    def holding(self) -> Iterator[psutil.Process]:
        """Wait until the process has stopped at the point of :meth:`arm`; continue it when the block ends. The work at
        that point is not finished before."""
        process = psutil.Process(self.struck())
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    @contextlib.contextmanager
    def holding_all(self, what: str, begun: Callable[[], bool], steps: int) -> Iterator[psutil.Process]:
        """Like :meth:`holding`, until ``begun`` returns True for all streams: meanwhile the only decode worker, armed
        to stop during the first of them, is continued for ``steps`` at a time."""
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
        """Return the KV node's status after an integrity check. Raises AssertionError if it does not answer, and
        Conflict if the check fails."""
        path = next(self.folder.rglob("kvnode*.sock"), None)
        assert path, "no KV node has a socket"
        status = asyncio.run(proven_status(f"unix:{path}"))
        assert status is not None, f"no KV node answers at {path}"
        return status

    def idle(self) -> bool:
        """Return whether nothing is pinned, reserved or waiting; slots leased by the decode worker do not count. False
        if the node does not answer. Raises Conflict if its integrity check fails."""
        try:
            status = self.node_status()
        except AssertionError:
            return False
        return not (status.tickets or status.pinned_blocks or status.reserved_blocks)

    def serving(self) -> bool:
        """Return whether the gateway has discovered a decode worker and every prefill worker."""
        with contextlib.suppress(PillionError), Client(self.target) as client:
            known = [component for component in client.status().components if component.role == "prefill"]
            return bool(client.models()) and len(known) >= len(self.components("prefill"))
        return False

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End the cluster as Ctrl-C does and return its exit status."""
        self.processes()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def end(self) -> None:
        """Stop the cluster, and kill all processes that do not end in time, including the supervisor."""
        try:
            self.stop()
        finally:
            for leftover in self.processes():
                leftover.kill()

    def left_behind(self) -> list[str]:
        """Return living processes and files that should be gone after the end."""
        processes = [" ".join(p.cmdline()) for p in self.ever_seen.values() if alive(p)]
        return processes + [str(path) for path in self.folder.rglob("*") if path != self.log]


async def proven_status(address: str) -> NodeStatus | None:
    """Return a KV node's status after an integrity check (I4), or None if it does not answer. Raises Conflict if the
    check fails."""
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
    """Return a process's command line, empty if it has ended. Forked components and Redis show one word with
    spaces."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).split()
    return []


def stands_by(process: psutil.Process) -> bool:
    """Return whether a process is a standby that does not serve yet: loading, waiting or taking over."""
    if process.name() == WAITING_NAME or words_of(process)[:1] == [WAITING_TITLE]:
        return True
    return STANDBY_VARIABLE in process.environ() and not any(one.laddr for one in process.net_connections("unix"))


def alive(process: psutil.Process) -> bool:
    """Return whether a process is running and not a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _start(command: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> HostProcess:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)


def _fork(command: Sequence[str], environ: Mapping[str, str], log: pathlib.Path) -> HostProcess:
    """Start a cluster as a fork; its fork server as well if its workers have one thread each."""
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
    defaults: Defaults | None = None,
) -> Iterator[ServedCluster]:
    """Run `pillion serve MODEL FLAGS` with its temporary files under ``folder``, and stop it at the end.

    The cluster dies with the calling thread (on Linux), so that nothing outlives a killed test.

    Args:
        split_policy: used unless flags set --split-policy; the default prefills every prompt on a prefill worker, ""
            is the default of `pillion serve`.
        environ: added to the environment.
        faults: processes have hooks at their fault points, silence alone never makes a component lost unless flags set
            a timeout, and Redis is waited for.
        forked: components are forks (:mod:`lab.testbed.forks`), as with ``faults`` or FORKED_VARIABLE; tests start such
            clusters by the hundred.
        defaults: defaults of the product's parameters.

    Unless ``defaults`` set them, there are no standbys, which take as long to start as the cluster, and no partial
    blocks, so that leaked slots show.
    """
    port = free_port()
    temporary = folder / "t"
    temporary.mkdir()
    log = folder / "serve.log"
    command = [sys.executable, "-m", "pillion", "serve", model, "--grpc-port", str(port), "--http-port", "0", *flags]
    policy = {"PILLION_SPLIT_POLICY": split_policy} if split_policy else {}
    environment = policy | {"PILLION_LOG_LEVEL": "info", **os.environ, **(environ or {})}
    environment |= defaults_environment(QUIET, defaults or {}) | hook_path(environment)
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
