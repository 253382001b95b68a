"""Defines the seams at which processes are made ready ahead of their need: forked from one that is ready, or started to
stand by.

without a room: a component starts by its command line when it is wanted, and nothing waits to take over from it
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from pillion.config import WorkerFlags
from pillion.rooms import Seam
from pillion.supervisor.child_process import ChildProcess, Launch

# This variable is set for a process that stands by until its turn comes.
STANDBY_VARIABLE = "PILLION_AWAITS_TURN"
# A process that waits for its turn has this name.
WAITING_NAME = "pillion-standby"
# These words stand before the command line of a fork that stands by, whether it waits already or not.
WAITING_TITLE = "standby:"


class StandbyTurn(Protocol):
    """Represents the turn for which a process that stands by waits.

    Attributes:
        waiting: whether the turn has not come yet.
    """

    @property
    def waiting(self) -> bool: ...

    def wait(self) -> float:
        """Blocks until the turn has come; returns for how many seconds it has waited in all."""

    def serves(self) -> None:
        """Notes that the process has taken over and serves."""

    def load_ahead(self) -> Callable[[WorkerFlags, int], Any]:
        """Returns a worker's factory of models, which may load a model before the process waits."""


class NextProcess(Protocol):
    """Represents a process that stands by for a component, as its supervisor sees it."""

    @property
    def pid(self) -> int: ...

    def gone(self) -> bool:
        """Returns whether no process of the standby's group lives."""

    async def ready(self) -> bool:
        """Returns when the process waits for its turn, or, with False, when it has ended."""

    def output(self) -> tuple[str, ...]:
        """Returns the last lines of the standby's output."""

    def begin(self, show: Callable[[str], None]) -> ChildProcess | None:
        """Begins the process's turn, and passes its output to ``show``. Returns None where the process has ended."""

    def close(self) -> None:
        """Kills the process that stands by. Idempotent."""

    async def wait(self) -> None:
        """Returns when the process that stands by has ended."""


class Launcher(Protocol):
    """Starts components faster than by their command lines."""

    def start(self) -> None:
        """Begins to make the launcher ready."""

    async def stop(self) -> None:
        """Ends the launcher; components go on. Idempotent."""

    def gone(self) -> bool:
        """Returns whether no process of the launcher lives."""

    @property
    def launch(self) -> Launch:
        """Starts a component's process, as :meth:`ChildProcess.start` does."""


# A function of this type starts a process that stands by, from its command line, its environment, and the function that
# starts processes.
StandBy = Callable[[Sequence[str], Mapping[str, str], Launch], Awaitable[NextProcess]]

# The room's function returns the turn that this process waits for; None where it was not started as a standby.
TURN = Seam[Callable[[], StandbyTurn | None]]("supervisor.turn")
STAND_BY = Seam[StandBy]("supervisor.stand_by")
# The room makes a launcher, from the modules that components need, the environment, and the function that shows its
# lines.
LAUNCHER = Seam[Callable[[Sequence[str], Mapping[str, str], Callable[[str], None]], Launcher]]("supervisor.launcher")
