"""A component of a simulated cluster over all its lives, and the turn of a process to begin one.

a process starts --> its turn comes: it is the component now --> it serves --> it ends
                 '-- standby: loads, and waits for its turn ^
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lab.simulator.hash_model import HashBackend, StepCosts
from lab.simulator.virtual_loop import Process, VirtualLoop


class SupervisedChild(Protocol):
    """A component's process as its supervisor sees it."""

    def kill(self) -> None: ...
    def exited(self, status: int) -> None: ...


class SimTurn:
    """A process's wait until it may take part: none, or, for a standby, until its supervisor begins it (StartTurn).

    ``waits`` resolves to True when the process waits for its turn; ``child``: the process as its supervisor sees it,
    None for a standby.
    """

    def __init__(
        self, loop: VirtualLoop, process: Process, took: Callable[[SimTurn], None], *, stands_by: bool
    ) -> None:
        self.process = process
        self.child: SupervisedChild | None = None
        self.waits: asyncio.Future[bool] = loop.create_future()
        self._loop = loop
        self._took = took
        self._come: asyncio.Future[float] = loop.create_future()
        if not stands_by:
            self._arrived()

    @property
    def waiting(self) -> bool:
        """True while the process waits for its turn."""
        return not self._come.done()

    def begin(self) -> None:
        """Begin the process, on its supervisor's call."""
        self._loop.post(self.process, self._arrived)

    def _arrived(self) -> None:
        self._took(self)
        self._come.set_result(0.0)

    def wait(self) -> Any:
        """Wait until the process may take part; return the seconds waited. A wait is returned as a coroutine, like all
        work that waits on a simulated thread."""
        return self._wait() if self.waiting else 0.0

    async def _wait(self) -> float:
        if not self.waits.done():
            self.waits.set_result(True)
        return await asyncio.shield(self._come)


@dataclass(eq=False)
class Life:
    """The current process and objects of a component; ``process``, ``component`` and the rest are None while it does
    not run.

    Attributes:
        child: its process as the supervisor sees it.
        component: result of the production start function.
        backend, costs: a worker's model, and the cost of its steps.
        stop: event that makes the component drain and exit.
        standby: the last standby process.
    """

    name: str
    process: Process | None = None
    child: SupervisedChild | None = None
    component: Any = None
    backend: HashBackend | None = None
    costs: StepCosts | None = None
    stop: asyncio.Event | None = None
    standby: Process | None = None

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def is_worker(self) -> bool:
        return self.role in ("decode", "prefill")

    @property
    def runs(self) -> bool:
        """True if the component's process is alive and the component has started."""
        return self.component is not None and self.process is not None and self.process.alive
