"""The step thread: events, then one step (:mod:`pillion.engine.worker.step_cycle`), over and over.

    asyncio --post_event--> inbox --between two steps--> scheduler
    asyncio <--call_soon_threadsafe, before and after a step-- outcome <--held back while the worker may not emit

Everything else happens on asyncio's thread.
The thread never waits for an RPC or a client: with nothing to do it sleeps on a condition, and only where asyncio has
fallen MAX_UNREAD_OUTCOMES behind does it wait for asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import Outcome
from pillion.engine.worker.step_cycle import Choose, Launch, OnStep, StepCycle
from pillion.errors import Internal

log = logging.getLogger("pillion.step")

# Events that wait for the next step. Each live sequence causes a few at most, so meeting this is a defect.
MAX_EVENTS = 100_000
MAX_UNREAD_OUTCOMES = 64
# How often the thread looks whether it was stopped while it waits for asyncio.
UNREAD_POLL_S = 1.0


class StepLoop:
    """Runs a scheduler over a backend.

    Args:
        scheduler: belongs to this thread from :meth:`start` on.
        launch, choose, ahead, on_step: see :class:`StepCycle`; they are called on the step thread.
        on_outcome: called on the asyncio loop before and after every step that has something to report.
        on_death: called there with a reason, once, if the thread dies of a defect.
        may_publish: asked on the asyncio loop before each on_outcome. Outcomes that it forbids are held back, in order,
            for :meth:`publish`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        launch: Launch,
        choose: Choose,
        *,
        ahead: bool,
        on_outcome: Callable[[Outcome], None],
        on_death: Callable[[str], None],
        on_step: OnStep,
        may_publish: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._cycle = StepCycle(scheduler, launch, choose, ahead=ahead, on_step=on_step)
        self._on_outcome = on_outcome
        self._on_death = on_death
        self._may_publish = may_publish
        # Counted as unread, and so bounded with them.
        self._held_back: deque[Outcome] = deque()
        self._asyncio = asyncio.get_running_loop()
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._unread = threading.BoundedSemaphore(MAX_UNREAD_OUTCOMES)
        self._thread = threading.Thread(target=self._main, name="pillion-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def held_back(self) -> int:
        """Outcomes that wait for :meth:`publish`."""
        return len(self._held_back)

    def post_event(self, event: Callable[..., None], *args: Any) -> None:
        """Have ``event``, a method of Scheduler, called as event(scheduler, *args, now) before the next step, from any
        thread. Raises Internal when MAX_EVENTS wait."""
        with self._wake:
            if len(self._inbox) >= MAX_EVENTS:
                raise Internal(f"{MAX_EVENTS} events wait for the step loop")
            self._inbox.append((event, args))
            self._wake.notify()

    def halt(self) -> None:
        """Let the steps that are in flight now be the last."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def publish(self) -> None:
        """Hand on the outcomes that were held back, as far as that is allowed now. On asyncio's thread only."""
        while self._held_back and self._may_publish():
            self._unread.release()
            self._on_outcome(self._held_back.popleft())

    async def stop(self) -> None:
        """:meth:`halt`, and wait for the thread's end: no step is in flight then."""
        self.halt()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # The step thread.

    def _main(self) -> None:
        try:
            idle = True
            while self._handle_events(wait=idle):
                for event in self._cycle.step():
                    if isinstance(event, Outcome):
                        self._report(event)
                idle = not self._cycle.busy
        except BaseException as error:
            log.exception("the step thread died")
            self._call_on_asyncio(self._on_death, f"the step thread died: {error!r}")
        finally:
            # Their results are not needed any more, but their ends are.
            for _ in self._cycle.land():
                pass

    def _handle_events(self, wait: bool) -> bool:
        """Apply the events in the inbox; sleeps for the first one when ``wait``. False: stop."""
        with self._wake:
            while wait and not self._inbox and not self._stopping:
                self._wake.wait()
            events = tuple(self._inbox)
            self._inbox.clear()
            if self._stopping:
                return False
        for event, args in events:
            event(self._scheduler, *args, time.monotonic())
        return True

    def _report(self, outcome: Outcome) -> None:
        if outcome.empty:
            return
        while not self._unread.acquire(timeout=UNREAD_POLL_S):
            if self._stopping:
                return
        self._call_on_asyncio(self._receive, outcome)

    def _receive(self, outcome: Outcome) -> None:
        self._held_back.append(outcome)
        self.publish()

    def _call_on_asyncio(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._asyncio.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The event loop has closed: nothing is left to call.
            self._stopping = True
