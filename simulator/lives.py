"""A component of a simulated cluster, over all its lives, and when a process begins one.

a process starts --> its turn comes: it is the component's now --> it serves --> it ends
                 '-- stands by: loads, and waits for its turn ^
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pillion.simulator.hash_model import HashBackend, StepCosts
from pillion.simulator.virtual_loop import Process, VirtualLoop


class SupervisedChild(Protocol):
    """A component's process as its supervisor knows it."""

    def kill(self) -> None: ...
    def exited(self, status: int) -> None: ...


class SimTurn:
    """When a process may take part: at once, or, where it stands by, when its supervisor says so (StartTurn).

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
        """Whether it has not come yet."""
        return not self._come.done()

    def begin(self) -> None:
        """The supervisor says so."""
        self._loop.post(self.process, self._arrived)

    def _arrived(self) -> None:
        self._took(self)
        self._come.set_result(0.0)

    def wait(self) -> Any:
        """How long it took to come: a coroutine where it has not, as work of a thread that waits is one here."""
        return self._wait() if self.waiting else 0.0

    async def _wait(self) -> float:
        if not self.waits.done():
            self.waits.set_result(True)
        return await asyncio.shield(self._come)


@dataclass(eq=False)
class Life:
    """What is there of a component now. ``process``, ``component`` and the rest are None while it does not run.

    Attributes:
        child: its process as the supervisor knows it.
        component: what the production start function returned.
        backend, costs: a worker's model, and what its steps take.
        stop: set to have it drain and exit.
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
        """Whether its process lives and it has started."""
        return self.component is not None and self.process is not None and self.process.alive
