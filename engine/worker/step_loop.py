"""The step thread: schedule -> launch -> wait -> commit, over and over; everything else happens on asyncio's thread.

    asyncio --post_event--> inbox --between two steps--> scheduler
    asyncio <--call_soon_threadsafe, before and after a step-- outcome <--held back while the worker may not emit

Where the backend runs ahead, the step that is committed is the one before the step just launched: while the device runs
that, the results of the one before are applied, events happen, and the next one is scheduled. If the step just launched
chooses by tokens of the one before (StepPlan.awaits_tokens), its choice is begun as soon as that one is committed. With
nothing to schedule, and where the scheduler wants to know their tokens first, the steps in flight are committed.

The thread never waits for an RPC or a client: with nothing to do it sleeps on a condition, and only where asyncio has
fallen MAX_UNREAD_OUTCOMES behind does it wait for asyncio.
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
from typing import Any

from pillion.engine.backends.backend import BackendLost, InFlightStep
from pillion.engine.sampling.sampling_rows import Sampled, SamplingRows
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import Outcome, StepPlan
from pillion.errors import Internal

log = logging.getLogger("pillion.step")

# Events that wait for the next step. Each live sequence causes a few at most, so meeting this is a defect.
MAX_EVENTS = 100_000
MAX_UNREAD_OUTCOMES = 64
# How often the thread looks whether it was stopped while it waits for asyncio.
UNREAD_POLL_S = 1.0

Launch = Callable[[StepPlan], InFlightStep]
Choose = Callable[[StepPlan, InFlightStep], None]
# Called on the step thread with a plan, the seconds that it took and whether it succeeded.
OnStep = Callable[[StepPlan, float, bool], None]


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """Stands for a step that could not be launched, so that it fails in its turn."""

    error: Exception

    def choose(self, rows: SamplingRows) -> None:
        raise self.error

    def wait(self) -> Sampled:
        raise self.error


class StepLoop:
    """Runs a scheduler over a backend.

    Args:
        scheduler: belongs to this thread from :meth:`start` on.
        launch: begins a step. What ``launch`` raises, or waiting for its step, fails that step's sequences.
        choose: begins the choice of a launched step that awaits tokens of the one before; what it raises does so, too.
        ahead: whether a step may be launched before the one before it has ended, where the scheduler has no objection.
        on_outcome: called on the asyncio loop before and after every step that has something to report.
        on_death: called there with a reason, once, if the thread dies of a defect.
        on_step: called on the step thread when a step has ended, before it is committed. The step took the time since
            it was launched, or since the step before it ended, whichever was later.
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
        self._launch = launch
        self._choose = choose
        self._ahead = ahead
        # Launched steps with the times of their launch, oldest first: one between two steps, two for a moment.
        self._in_flight: deque[tuple[StepPlan, InFlightStep, float]] = deque()
        self._last_end_s = 0.0
        self._on_outcome = on_outcome
        self._on_death = on_death
        self._on_step = on_step
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
                idle = not self._step()
        except BaseException as error:
            log.exception("the step thread died")
            self._call_on_asyncio(self._on_death, f"the step thread died: {error!r}")
        finally:
            for _, step, _ in self._in_flight:
                # Its result is not needed any more, but its end is: until then it uses the pool.
                with contextlib.suppress(Exception):
                    step.wait()

    def _step(self) -> bool:
        """Schedule and launch one step, and commit the steps that are due. False when there was nothing to do."""
        plan = self._scheduler.schedule(time.monotonic())
        # Outcomes of the events before this step are reported now: they must not wait for a step, which may be long.
        self._report(self._scheduler.flush(time.monotonic()))
        stays_in_flight = bool(plan.pieces) and self._launch_step(plan)
        busy = bool(self._in_flight)
        while len(self._in_flight) > stays_in_flight:
            self._commit_oldest()
        if stays_in_flight:
            chosen = not plan.awaits_tokens or self._choose_tokens()
            if not (chosen and self._scheduler.may_run_ahead):
                self._commit_oldest()
        return busy

    def _launch_step(self, plan: StepPlan) -> bool:
        """Launch a step. True when it may stay in flight while the next one is scheduled."""
        began_s = time.monotonic()
        step: InFlightStep
        try:
            step = self._launch(plan)
        except BackendLost:
            raise
        except Exception as error:  # noqa: BLE001  (raised again when the step is waited for)
            step = _FailedLaunch(error)
        if self._ahead:
            self._scheduler.launched(plan)
        self._in_flight.append((plan, step, began_s))
        return self._ahead and not isinstance(step, _FailedLaunch)

    def _choose_tokens(self) -> bool:
        """Begin the choice of the step in flight. False when it has failed."""
        plan, step, began_s = self._in_flight[-1]
        try:
            self._choose(plan, step)
        except BackendLost:
            raise
        except Exception as error:  # noqa: BLE001  (raised again when the step is waited for)
            self._in_flight[-1] = (plan, _FailedLaunch(error), began_s)
            return False
        return True

    def _commit_oldest(self) -> None:
        """Wait for the oldest step and commit, or fail, its plan."""
        plan, step, began_s = self._in_flight.popleft()
        began_s = max(began_s, self._last_end_s)
        failure: Exception | None = None
        try:
            sampled = step.wait()
        except BackendLost:
            raise
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.pieces))
            failure = error
        self._last_end_s = time.monotonic()
        self._on_step(plan, self._last_end_s - began_s, failure is None)
        if failure is None:
            self._report(self._scheduler.commit(plan, sampled, time.monotonic()))
        else:
            internal = Internal(f"the step failed on the worker: {type(failure).__name__}")
            self._report(self._scheduler.fail_step(plan, internal, time.monotonic()))

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
