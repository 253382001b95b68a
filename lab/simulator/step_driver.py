"""The step thread of a simulated worker as a task that waits for steps on the virtual clock.

It drives production's :class:`pillion.engine.worker.step_loop.StepCycle`; only blocking calls differ.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pillion.engine.scheduling.step_plan import Outcome
from pillion.engine.worker.step_loop import StepLoop

log = logging.getLogger("pillion.step")

# Polling interval while too many outcomes are unread by asyncio.
UNREAD_LOOK_S = 0.01


class VirtualStepLoop(StepLoop):
    """A StepLoop without a thread."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._signal = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self.scheduler = self._scheduler
        # True during a step, while the scheduler's state is inconsistent.
        self.in_step = False

    def start(self) -> None:
        self._driver = asyncio.get_running_loop().create_task(self._drive(), name="step loop")

    @property
    def running(self) -> bool:
        return self._driver is not None and not self._driver.done()

    def post_event(self, event: Callable[..., None], *args: Any) -> None:
        super().post_event(event, *args)
        self._signal.set()

    def halt(self) -> None:
        super().halt()
        self._signal.set()

    async def stop(self) -> None:
        self.halt()
        if self._driver is not None:
            await asyncio.wait([self._driver])

    async def _drive(self) -> None:
        try:
            idle = True
            while True:
                while idle and not self._inbox and not self._stopping:
                    self._signal.clear()
                    await self._signal.wait()
                if not self._handle_events(wait=False):
                    return
                self.in_step = True
                for event in self._cycle.step():
                    await self._follow(event)
                self.in_step = False
                idle = not self._cycle.busy
        except Exception as error:
            # As production's step thread does; the checker counts such a line as a finding.
            log.exception("the step thread died")
            self._call_on_asyncio(self._on_death, f"the step thread died: {error!r}")
        finally:
            for step in self._cycle.drain():
                await _landed(step)

    async def _follow(self, event: Any) -> None:
        if not isinstance(event, Outcome):
            await _landed(event)
            return
        while not event.empty and not self._stopping and not self._has_room():  # noqa: ASYNC110
            await asyncio.sleep(UNREAD_LOOK_S)
        if event.empty or self._has_room():
            self._report(event)

    def _has_room(self) -> bool:
        """Return whether asyncio can accept an outcome without a wait."""
        if free := self._unread.acquire(blocking=False):
            self._unread.release()
        return free


async def _landed(step: Any) -> None:
    """Wait for the end of a step in flight; one that failed to launch has ended."""
    while (left_s := getattr(step, "lands_s", 0.0) - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left_s)
