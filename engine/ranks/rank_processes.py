"""Rank 0's management of a worker's other ranks: start, joint calls, supervision and end.

    started --LOAD--> loading --OK--> called together, step after step --close--> sockets closed, ranks exit
                         |                          |
                         '---- one died, failed, or is silent for too long ----> lost: the memory of the ranks is
                                 aborted, every wait for a rank raises BackendLost, the worker's process exits

No rank continues without another. A worker that lost one exits with all its ranks, and its supervisor restarts it.

No rank outlives the worker: a thread per rank starts its process and waits for it, and the system kills the process
when that thread ends (PR_SET_PDEATHSIG), even a stopped one; a supervisor's SIGKILL goes to the process group. No rank
writes to a pool whose slots were reassigned (I4): each has a duplicate of the worker's connection to its KV node, and
the node sees its end only when the last of them is closed. For GPU memory the node awaits the exit of every rank, whose
processes rank 0 has reported.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from pillion.engine.backends.backend import BackendLost
from pillion.engine.ranks.rank_messages import RankLink, RankMessage, RankTimeout, error_text, json_to_bytes
from pillion.errors import ConfigError, Internal
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading

log = logging.getLogger("pillion.worker")

MODULE = "pillion.engine.ranks.rank_main"
# Timeouts of rank 0 for a silent rank: in a step, and while the rank loads, compiles or packs.
STEP_SILENCE_MS = 20_000
LOAD_SILENCE_MS = 600_000
# Grace periods for a rank to exit by itself, and after SIGKILL.
END_TIMEOUT_S = 2.0
KILL_TIMEOUT_S = 5.0
DescriptorsOf = Callable[[int], Sequence[int]]


class AbortableMemory(Protocol):
    """Memory in which processes wait for each other, such as :class:`pillion.engine.ranks.rank_memory.RankMemory`."""

    def abort(self) -> None:
        """End all waits for other ranks for good; thread-safe."""

    def close(self) -> None:
        """Close the memory's descriptor; existing mappings stay. Idempotent."""


class RankProcess:
    """One rank's process and both connections to it. Its thread starts the process and waits for its exit."""

    def __init__(
        self,
        rank: int,
        label: str,
        ended: Callable[[int, int], None],
        environ: Mapping[str, str] | None = None,
        module: str = "",
    ) -> None:
        """Start the process. ``label`` is shown in process lists; ``ended`` is called with the rank and the exit
        status, on a separate thread; ``environ``: its environment, None for this process's; ``module``: its program, ""
        for MODULE. Raises ConfigError if it cannot be started."""
        self.rank, self.label = rank, label
        self._ended, self._environ = ended, environ
        (steps, theirs), (packing, their_packing) = (socket.socketpair() for _ in range(2))
        self.link, self.packing = RankLink(steps), RankLink(packing)
        passed = theirs.fileno(), their_packing.fileno()
        command = [sys.executable, "-m", module or MODULE, label, str(os.getpid()), *map(str, passed)]
        started: Future[subprocess.Popen[bytes]] = Future()
        self.thread = threading.Thread(target=self._tend, args=(command, passed, started), name=f"pillion-rank-{rank}")
        self.thread.daemon = True
        self.thread.start()
        try:
            self._process = started.result()
        except OSError as error:
            self.end()
            raise ConfigError(f"rank {rank} cannot be started: {error}") from None
        finally:
            theirs.close()
            their_packing.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until the process exits."""
        return self.thread.is_alive()

    def end(self) -> None:
        """Close both connections, which ends the process."""
        self.link.close()
        self.packing.close()

    def kill(self) -> None:
        """Send SIGKILL, which ends even a stopped process."""
        if self.alive:
            self._process.kill()

    def _tend(self, command: Sequence[str], passed: tuple[int, ...], started: Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, pass_fds=passed, env=self._environ
            )
        except BaseException as error:  # noqa: BLE001  (whoever waits for the process raises it)
            started.set_exception(error)
            return
        started.set_result(process)
        self._ended(self.rank, process.wait())


class RankProcesses:
    """Ranks 1 .. ``size`` - 1 of a worker. :meth:`together`, :meth:`beginning` and :meth:`ended` are for the step
    thread, all other methods for any thread.

    Attributes:
        lost: why the ranks cannot continue, or "".
        work_ms: max time for which ranks may still compute when rank 0 begins to wait for them; added to the timeout
            for a silent rank.
        noun: name of a process in messages.
    """

    noun = "rank"

    def __init__(
        self,
        size: int,
        label: str,
        memory: AbortableMemory,
        environ: Callable[[int], Mapping[str, str] | None] = lambda rank: None,
        module: str = "",
    ) -> None:
        """Start the processes. ``memory`` is owned, and aborted when a rank is lost. ``environ`` returns a rank's
        environment, None for this process's; ``module``: the ranks' program, "" for MODULE. Raises ConfigError."""
        self.size = size
        self.lost = ""
        self.work_ms = 0
        # Rank 0's total wait for the other ranks, after its own part of each step.
        self.waited_s = 0.0
        self._memory = memory
        # Messages sent to each rank, and messages with all answers received.
        self._sent = self._answered = 0
        self._contents: dict[int, list[bytearray]] = {}
        self._closing = False
        self._lock = threading.Lock()
        self._packing = threading.Lock()
        self._on_lost: Callable[[str], object] = lambda reason: None
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(1, size):
                name = self.name_of(rank).replace(" ", "-")
                self._ranks.append(RankProcess(rank, f"{label}/{name}", self._ended, environ(rank), module))
        except BaseException:
            self.close()
            raise

    def name_of(self, rank: int) -> str:
        """Return the name of a process in messages."""
        return f"rank {rank}"

    def watch(self, on_lost: Callable[[str], object]) -> None:
        """Call ``on_lost`` with a reason when a rank is lost, on any thread; immediately if one is lost already."""
        with self._lock:
            self._on_lost = on_lost
        if self.lost:
            on_lost(self.lost)

    @contextmanager
    def together(
        self,
        kind: RankMessage,
        *payloads: bytes,
        descriptors: Sequence[int] | DescriptorsOf = (),
        limit_ms: int | None = None,
    ) -> Iterator[None]:
        """Send a message to the other ranks, run the context here, and wait for the answers.

        ``payloads``: one for all ranks, or one per rank. ``descriptors``: those for all ranks, or a function of the
        rank. ``limit_ms``: timeout for a silent rank; None for STEP_SILENCE_MS. After an error the ranks are lost,
        since they are out of sync. Raises BackendLost, and ConfigError if a rank refuses.
        """
        limit_ms = STEP_SILENCE_MS if limit_ms is None else limit_ms
        with self._lose_on_error():
            number = self._send(kind, payloads, descriptors, limit_ms)
            yield
            self._receive_answers(number, limit_ms)

    @contextmanager
    def beginning(self, step: bytes) -> Iterator[int]:
        """Send a step to the other ranks, and run the context, which begins it here. Yields the step's number for
        :meth:`ended`; raises like :meth:`together`."""
        with self._lose_on_error():
            yield self._send(RankMessage.STEP, (step,), (), STEP_SILENCE_MS)

    def ended(self, number: int) -> list[bytearray]:
        """Wait until the other ranks have answered all messages up to ``number``, and return the answers to that step;
        [] if all are empty. Raises BackendLost."""
        with self._lose_on_error():
            self._receive_answers(number, STEP_SILENCE_MS)
        return self._contents.pop(number, [])

    @contextmanager
    def loading(self, order: dict[str, Any], *descriptors: int, each: DescriptorsOf | None = None) -> Iterator[None]:
        """Make the other ranks load their shards by ``order``, while the context loads this rank's. ``descriptors`` are
        sent to all ranks, the ranks' memory first, or ``each`` returns those of a rank. Ends all ranks if one of them,
        or the context, fails. Raises ConfigError."""
        try:
            orders = [json_to_bytes(**order, rank=rank.rank, name=rank.label) for rank in self._ranks]
            with self.together(RankMessage.LOAD, *orders, descriptors=each or descriptors, limit_ms=LOAD_SILENCE_MS):
                yield
        except BaseException:
            self.close()
            raise

    def map_pool(self, line: bytes, descriptors: Sequence[int]) -> None:
        """Make the other ranks map the pool, by the line and descriptors of this rank's attachment."""
        with self.together(RankMessage.POOL, line, descriptors=descriptors, limit_ms=LOAD_SILENCE_MS):
            pass

    def pack(self, payload: bytes, descriptor: int) -> int:
        """Make the other ranks pack their shards of an adapter, during steps, and return the total bytes. Raises
        Internal if a rank fails to pack it; the ranks continue."""
        with self._packing:
            try:
                for rank in self._ranks:
                    rank.packing.send(RankMessage.PACK, payload, [descriptor], limit_ms=LOAD_SILENCE_MS)
                answers = [rank.packing.receive(LOAD_SILENCE_MS) for rank in self._ranks]
            except (RankTimeout, ConnectionError) as error:
                self._lose(f"a rank does not answer while it packs an adapter: {error!r}")
                raise Internal(f"{self.lost}; this worker ends") from None
        for kind, text, _ in answers:
            if kind is not RankMessage.OK:
                raise Internal(f"a rank could not pack an adapter: {error_text(text)}")
        return sum(int(text) for _, text, _ in answers)

    def close(self) -> None:
        """End all ranks, at once if one was lost, and wait for their exit. Idempotent."""
        with self._lock:
            self._closing = True
        for rank in self._ranks:
            rank.end()
        give_up_s = time.monotonic() + (0.0 if self.lost else END_TIMEOUT_S)
        for rank in self._ranks:
            rank.thread.join(max(0.0, give_up_s - time.monotonic()))
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.thread.join(KILL_TIMEOUT_S)
            if rank.alive:
                log.error("%s, process %d, does not exit", self.name_of(rank.rank), rank.pid)
        self._memory.close()

    def pids(self) -> list[int]:
        """Return the process ids, from rank 1 on."""
        return [rank.pid for rank in self._ranks]

    def readings(self) -> Iterator[Reading]:
        """Yield the number of ranks, and rank 0's total wait for the others."""
        yield names.RANKS, (), self.size
        yield names.RANK_WAIT, (), self.waited_s

    def check_integrity(self) -> None:
        """Raise AssertionError unless all ranks are alive, or all have exited."""
        alive = [rank.rank for rank in self._ranks if rank.alive]
        if self._closing:
            assert not alive, f"ranks {alive} outlive their worker"
        elif not self.lost:
            assert len(alive) == self.size - 1, f"only ranks {alive} of {self.size} live"

    @contextmanager
    def _lose_on_error(self) -> Iterator[None]:
        """Give up all ranks on any error in the block. Raises that error, or BackendLost if a rank is the reason."""
        if self.lost:
            raise BackendLost(self.lost)
        try:
            yield
        except (RankTimeout, ConnectionError) as error:
            silent = isinstance(error, RankTimeout)
            self._lose(f"a {self.noun} was silent for too long" if silent else f"a {self.noun} has ended")
            raise BackendLost(self.lost) from None
        except BaseException as error:
            self._lose(f"the ranks are out of step: {error}")
            raise

    def _send(
        self,
        kind: RankMessage,
        payloads: Sequence[bytes],
        descriptors: Sequence[int] | DescriptorsOf,
        limit_ms: int,
    ) -> int:
        """Send a message to all ranks and return its number."""
        for rank in self._ranks:
            payload = payloads[rank.rank - 1 if len(payloads) > 1 else 0]
            given = descriptors(rank.rank) if callable(descriptors) else descriptors
            rank.link.send(kind, payload, given, limit_ms=limit_ms + self.work_ms)
        self._sent += 1
        return self._sent

    def _receive_answers(self, number: int, limit_ms: int) -> None:
        """Receive the answers up to message ``number`` that were not yet received."""
        began_s = time.monotonic()
        while self._answered < number:
            contents = []
            for rank in self._ranks:
                kind, text, _ = rank.link.receive(limit_ms + self.work_ms)
                if kind is RankMessage.REFUSED:
                    raise ConfigError(error_text(text))
                if kind is not RankMessage.OK:
                    raise BackendLost(f"{self.name_of(rank.rank)} failed: {error_text(text)}")
                contents.append(text)
            self._answered += 1
            if any(contents):
                self._contents[self._answered] = contents
        self.waited_s += time.monotonic() - began_s

    def _ended(self, rank: int, status: int) -> None:
        self._lose(f"{self.name_of(rank)} ended with status {status}")

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.lost or self._closing:
                return
            self.lost, on_lost = reason, self._on_lost
        self._memory.abort()
        on_lost(reason)
