"""Follows a component of a simulated cluster over all its lives, and decides when a process begins one.

a process starts --> its turn comes: it is the component's now --> it serves --> it ends
                 '-- stands by: loads, and waits for its turn ^
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lab.simulator.hash_model import HashBackend, StepCosts
from lab.simulator.virtual_loop import Process, VirtualLoop


class SupervisedChild(Protocol):
    """Represents a component's process as its supervisor knows it."""

    def kill(self) -> None: ...
    def exited(self, status: int) -> None: ...


class SimTurn:
    """Holds back a process until it may take part: at once, or, where it stands by, when its supervisor lets it begin
    (StartTurn).

    ``waits`` is done, with True, when the process waits for its turn; ``child`` is the process as its supervisor knows
    it, None as long as it stands by.
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
        """Returns whether the process still waits for its turn."""
        return not self._come.done()

    def begin(self) -> None:
        """Lets the process begin, because its supervisor has called for it."""
        self._loop.post(self.process, self._arrived)

    def _arrived(self) -> None:
        self._took(self)
        self._come.set_result(0.0)

    def wait(self) -> Any:
        """Waits until the process may take part; returns the seconds that it waited. Where it has to wait it returns a
        coroutine, as all work does that waits on a simulated thread."""
        return self._wait() if self.waiting else 0.0

    async def _wait(self) -> float:
        if not self.waits.done():
            self.waits.set_result(True)
        return await asyncio.shield(self._come)


@dataclass(eq=False)
class Life:
    """Holds the process and the objects of a component that exist now. ``process``, ``component`` and the rest are None
    while it does not run.

    Attributes:
        child: its process as the supervisor knows it.
        component: what the production start function returned.
        backend, costs: a worker's model, and what its steps take.
        stop: an event that is set to make the component drain and exit.
        standby: the last process that was started to stand by.
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
        """Returns whether the component's process lives and the component has started."""
        return self.component is not None and self.process is not None and self.process.alive
