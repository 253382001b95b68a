"""The step thread: schedule -> launch -> land -> commit, over and over; everything else happens on asyncio's thread.

    asyncio --post_event--> inbox --between two steps--> scheduler
    asyncio <--call_soon_threadsafe, before and after a step-- outcome <--held back while the worker may not speak

Where the backend runs ahead, the step that lands is the one before the step just launched: while the device runs that,
its results are taken, events happen, and the next one is scheduled. With nothing to schedule what is under way lands.

The thread never waits for an RPC or a client: with nothing to do it sleeps on a condition, and only where asyncio has
fallen MAX_UNREAD_OUTCOMES behind does it wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pillion.engine.backends.backend import BackendLost, InFlightStep
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import Outcome, Sampled, StepPlan
from pillion.errors import Internal

log = logging.getLogger("pillion.step")

# Events that wait for the next step. Each live sequence causes a few at most, so meeting this is a defect.
MAX_EVENTS = 100_000
MAX_UNREAD_OUTCOMES = 64
# How often the thread looks whether it was stopped while it waits for asyncio.
UNREAD_POLL_S = 1.0

Launch = Callable[[StepPlan], InFlightStep]


class OnStep(Protocol):
    """Hears on the step thread of a step that has landed, before it is committed. It took the ``seconds`` since it was
    launched, or since the step before it landed, whichever was later."""

    def __call__(self, plan: StepPlan, seconds: float, *, ok: bool) -> None: ...


def _unheard(plan: StepPlan, seconds: float, *, ok: bool) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Failed:
    """The flight of a step that could not be launched."""

    error: Exception

    def wait(self) -> Sampled:
        raise self.error


class StepLoop:
    """Runs a scheduler over a backend.

    Args:
        scheduler: belongs to this thread from :meth:`start` on.
        launch: begins a step. What it raises, or the flight's landing, fails that step's sequences.
        ahead: whether a step may be launched before the one before it has landed.
        on_outcome: called on the asyncio loop before and after every step that has news.
        on_death: called there with a reason, once, if the thread dies of a defect.
        on_step: called on the step thread.
        may_publish: asked there before each on_outcome. What it forbids is kept, in order, for :meth:`publish`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        launch: Launch,
        *,
        ahead: bool = False,
        on_outcome: Callable[[Outcome], None],
        on_death: Callable[[str], None],
        on_step: OnStep = _unheard,
        may_publish: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._launch = launch
        self._ahead = ahead
        # Steps under way with the times of their launch, oldest first: one between two steps, two for a moment.
        self._out: deque[tuple[StepPlan, InFlightStep, float]] = deque()
        self._landed_s = 0.0
        self._on_outcome = on_outcome
        self._on_death = on_death
        self._on_step = on_step
        self._may_publish = may_publish
        # Counted as unread, and so bounded with them.
        self._held: deque[Outcome] = deque()
        self._clock = clock
        self._asyncio = asyncio.get_running_loop()
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._unread = threading.BoundedSemaphore(MAX_UNREAD_OUTCOMES)
        self._thread = threading.Thread(target=self._main, name="pillion-step", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post_event(self, event: Callable[..., None], *args: Any) -> None:
        """Have ``event``, a method of Scheduler, called as event(scheduler, *args, now) before the next step.

        Any thread may. Raises Internal when MAX_EVENTS wait.
        """
        with self._wake:
            if len(self._inbox) >= MAX_EVENTS:
                raise Internal(f"{MAX_EVENTS} events wait for the step loop")
            self._inbox.append((event, args))
            self._wake.notify()

    def halt(self) -> None:
        """Let what is launched now be the last."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def publish(self) -> None:
        """Hand on what was held back, as far as that is allowed now. On asyncio's thread only."""
        while self._held and self._may_publish():
            self._unread.release()
            self._on_outcome(self._held.popleft())

    async def stop(self) -> None:
        """:meth:`halt`, and wait for the thread's end: nothing is under way then, whatever it was."""
        self.halt()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # The step thread.

    def _main(self) -> None:
        try:
            idle = True
            while self._take_events(wait=idle):
                idle = not self._step()
        except BaseException as error:
            log.exception("the step thread died")
            self._post(self._on_death, f"the step thread died: {error!r}")
        finally:
            for _, flight, _ in self._out:
                # Whether it fails is nobody's concern any more; that it has ended is: until then it uses the pool.
                with contextlib.suppress(Exception):
                    flight.wait()

    def _step(self) -> bool:
        """Launch one step, and land what is due. False when there was nothing to do."""
        plan = self._scheduler.schedule(self._clock())
        # What the events before this step led to is told now: it must not wait for a step, which may be long.
        self._report(self._scheduler.flush(self._clock()))
        stays = bool(plan.pieces) and self._begin(plan)
        busy = bool(self._out)
        while len(self._out) > stays:
            self._end()
        return busy

    def _begin(self, plan: StepPlan) -> bool:
        """Launch a step. True when it may stay under way while the next one is scheduled."""
        began_s = self._clock()
        flight: InFlightStep
        try:
            flight = self._launch(plan)
        except BackendLost:
            raise
        except Exception as error:  # noqa: BLE001  (raised again in the order of landings)
            flight = _Failed(error)
        if self._ahead:
            self._scheduler.launched(plan)
        self._out.append((plan, flight, began_s))
        return self._ahead and not isinstance(flight, _Failed)

    def _end(self) -> None:
        """Land the oldest step."""
        plan, flight, began_s = self._out.popleft()
        began_s = max(began_s, self._landed_s)
        try:
            sampled = flight.wait()
        except BackendLost:
            raise
        except Exception as error:
            self._landed_s = self._clock()
            self._on_step(plan, self._landed_s - began_s, ok=False)
            log.exception("a step of %d sequences failed", len(plan.pieces))
            failure = Internal(f"the step failed on the worker: {type(error).__name__}")
            self._report(self._scheduler.fail_step(plan, failure, self._clock()))
            return
        self._landed_s = self._clock()
        self._on_step(plan, self._landed_s - began_s, ok=True)
        self._report(self._scheduler.commit(plan, sampled, self._clock()))

    def _take_events(self, wait: bool) -> bool:
        """Let what arrived happen; sleeps for the first event when ``wait``. False: stop."""
        with self._wake:
            while wait and not self._inbox and not self._stopping:
                self._wake.wait()
            events = tuple(self._inbox)
            self._inbox.clear()
            if self._stopping:
                return False
        for event, args in events:
            event(self._scheduler, *args, self._clock())
        return True

    def _report(self, outcome: Outcome) -> None:
        if outcome.empty:
            return
        while not self._unread.acquire(timeout=UNREAD_POLL_S):
            if self._stopping:
                return
        self._post(self._read, outcome)

    def _read(self, outcome: Outcome) -> None:
        self._held.append(outcome)
        self.publish()

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._asyncio.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The event loop has closed: nobody is left to hear.
            self._stopping = True
