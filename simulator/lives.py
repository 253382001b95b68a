"""A component of a simulated cluster, over all its lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from pillion.simulator.hash_model import HashBackend, StepCosts
from pillion.simulator.virtual_loop import Process


class SupervisedChild(Protocol):
    """A component's process as its supervisor knows it."""

    def kill(self) -> None: ...
    def exited(self, status: int) -> None: ...


@dataclass(eq=False)
class Life:
    """What is there of a component now. ``process``, ``component`` and the rest are None while it does not run.

    Attributes:
        child: its process as the supervisor knows it.
        component: what the production start function returned.
        backend, costs: a worker's model, and what its steps take.
        stop: set to have it drain and exit.
    """

    name: str
    process: Process | None = None
    child: SupervisedChild | None = None
    component: Any = None
    backend: HashBackend | None = None
    costs: StepCosts | None = None
    stop: asyncio.Event | None = None

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
