"""The step thread, which alternates between events and steps (:class:`StepCycle`).

    asyncio --post_event--> inbox --between two steps--> scheduler
    asyncio <--held back while the worker may not emit-- <--call_soon_threadsafe-- outcome, before and after a step

Everything else runs on the event loop's thread. The step thread never waits for an RPC or a client: idle, it sleeps on
a condition, and it waits for the event loop only if that is MAX_UNREAD_OUTCOMES behind.

A StepCycle runs a scheduler's steps on a backend: schedule -> launch -> wait -> commit. If the backend runs ahead, each
launch is followed by the commit of the previous step, so that the device is busy while results are applied, events are
handled and the next step is scheduled. A pipeline has one step in flight per stage, of which the oldest is committed.
If a launched step samples by the previous step's tokens (StepPlan.awaits_tokens), its sampling starts after that step's
commit. If there is nothing to schedule, or the scheduler needs their tokens first, all steps in flight are committed.

StepLoop drives a StepCycle on a thread. A driver that must not block can poll each in-flight step that
:meth:`StepCycle.step` yields, and resume the iterator once the step has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pillion.engine.backends.backend import BackendLost, InFlightStep
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import Outcome, StepPlan
from pillion.errors import Internal
from pillion.kernels.step import Sampled, SamplingRows

log = logging.getLogger("pillion.step")

Launch = Callable[[StepPlan], InFlightStep]
Choose = Callable[[StepPlan, InFlightStep], None]
OnStep = Callable[[StepPlan, float, bool], None]


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """A step that could not be launched; its error is raised by ``wait``, in launch order."""

    error: Exception

    def choose(self, rows: SamplingRows) -> None:
        raise self.error

    def wait(self) -> Sampled:
        raise self.error


class StepCycle:
    """Runs a scheduler over a backend, for one caller at a time.

    Args:
        scheduler: used only on the caller's thread.
        launch: starts a step. An error of this call, or of the wait for the step, fails the step's sequences.
        choose: starts the sampling of a launched step that awaits the previous step's tokens. An error fails the step's
            sequences.
        max_in_flight: max launched steps; the scheduler may allow fewer.
        on_step: called when a step has ended, before its commit, with the plan, the seconds since its launch or since
            the previous step's end, whichever was later, and whether it succeeded.
    """

    def __init__(
        self, scheduler: Scheduler, launch: Launch, choose: Choose, *, max_in_flight: int, on_step: OnStep
    ) -> None:
        self._scheduler = scheduler
        self._launch = launch
        self._choose = choose
        self._max_in_flight = max_in_flight
        self._on_step = on_step
        self._in_flight: deque[tuple[StepPlan, InFlightStep, float]] = deque()
        self._last_end_s = 0.0
        self.busy = False

    def step(self) -> Iterator[Outcome | InFlightStep]:
        """Schedule and launch one step, and commit the steps that are due.

        Yields each outcome, in order, and each in-flight step just before the blocking wait for it. Raises BackendLost
        if the device has failed permanently.
        """
        plan = self._scheduler.schedule(time.monotonic())
        # Report the outcomes of events before the step, which may take long.
        yield self._scheduler.flush(time.monotonic())
        launched = bool(plan.scheduled)
        max_left = self._launch_step(plan) if launched else len(self._in_flight) - 1
        self.busy = bool(self._in_flight)
        while len(self._in_flight) > max(max_left, 0):
            yield from self._commit_oldest()
        if launched and max_left:
            sampling_started = not plan.awaits_tokens or self._choose_tokens()
            while self._in_flight and not (sampling_started and self._scheduler.may_run_ahead):
                yield from self._commit_oldest()

    def drain(self) -> Iterator[InFlightStep]:
        """Wait for the steps in flight, which access the pool until they end, and drop their results. Yields each
        before the blocking wait for it."""
        while self._in_flight:
            _, step, _ = self._in_flight.popleft()
            yield step
            with contextlib.suppress(Exception):
                step.wait()

    def _launch_step(self, plan: StepPlan) -> int:
        """Launch a step. Return the max number of steps that may stay in flight while the next one is scheduled."""
        began_s = time.monotonic()
        step: InFlightStep
        try:
            step = self._launch(plan)
        except BackendLost:
            raise
        except Exception as error:  # noqa: BLE001  (raised again when the step is waited for)
            step = _FailedLaunch(error)
        if self._max_in_flight > 1:
            self._scheduler.launched(plan)
        self._in_flight.append((plan, step, began_s))
        if isinstance(step, _FailedLaunch):
            return 0
        return min(self._max_in_flight - 1, 1) if plan.awaits_tokens else self._max_in_flight - 1

    def _choose_tokens(self) -> bool:
        """Start the sampling of the last launched step. Return False if that failed."""
        plan, step, began_s = self._in_flight[-1]
        try:
            self._choose(plan, step)
        except BackendLost:
            raise
        except Exception as error:  # noqa: BLE001  (raised again when the step is waited for)
            self._in_flight[-1] = (plan, _FailedLaunch(error), began_s)
            return False
        return True

    def _commit_oldest(self) -> Iterator[Outcome | InFlightStep]:
        """Wait for the oldest step in flight, and commit its tokens or its failure."""
        plan, step, began_s = self._in_flight[0]
        # Until the wait it stays in the list, because a driver that stops here must still drain it.
        yield step
        self._in_flight.popleft()
        began_s = max(began_s, self._last_end_s)
        failure: Exception | None = None
        try:
            sampled = step.wait()
        except BackendLost:
            raise
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.scheduled))
            failure = error
        self._last_end_s = time.monotonic()
        self._on_step(plan, self._last_end_s - began_s, failure is None)
        if failure is None:
            yield self._scheduler.commit(plan, sampled, time.monotonic())
        else:
            internal = Internal(f"the step failed on the worker: {type(failure).__name__}")
            yield self._scheduler.fail_step(plan, internal, time.monotonic())


# Max events waiting for the next step. A live sequence posts only a few, so reaching the limit is a defect.
MAX_EVENTS = 100_000
# Max outcomes that the event loop has not handled; at the limit, the step thread waits.
MAX_UNREAD_OUTCOMES = 64
# Interval at which a waiting step thread checks whether to stop.
UNREAD_POLL_S = 1.0


class StepLoop:
    """The step thread of a scheduler and a backend.

    Args:
        scheduler: used only on the step thread from :meth:`start` on.
        launch, choose, max_in_flight, on_step: as in :class:`StepCycle`; called on the step thread.
        on_outcome: called on the event loop with each outcome that is not empty.
        on_death: called on the event loop once, with a reason, if the thread dies of a defect.
        may_publish: called on the event loop before each on_outcome. While it returns False, outcomes are held back, in
            order, for :meth:`publish`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        launch: Launch,
        choose: Choose,
        *,
        max_in_flight: int,
        on_outcome: Callable[[Outcome], None],
        on_death: Callable[[str], None],
        on_step: OnStep,
        may_publish: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._cycle = StepCycle(scheduler, launch, choose, max_in_flight=max_in_flight, on_step=on_step)
        self._on_outcome = on_outcome
        self._on_death = on_death
        self._may_publish = may_publish
        # Included in the unread outcomes, so bounded by MAX_UNREAD_OUTCOMES.
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
        """Number of outcomes that wait for :meth:`publish`."""
        return len(self._held_back)

    def post_event(self, event: Callable[..., None], *args: Any) -> None:
        """Schedule a call of ``event``, a method of Scheduler, as event(scheduler, *args, now) before the next step.
        Thread safe. Raises Internal at MAX_EVENTS."""
        with self._wake:
            if len(self._inbox) >= MAX_EVENTS:
                raise Internal(f"{MAX_EVENTS} events wait for the step loop")
            self._inbox.append((event, args))
            self._wake.notify()

    def halt(self) -> None:
        """Stop launching steps."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def publish(self) -> None:
        """Publish the outcomes held back, as long as ``may_publish`` allows it. On the event loop only."""
        while self._held_back and self._may_publish():
            self._unread.release()
            self._on_outcome(self._held_back.popleft())

    async def stop(self) -> None:
        """Halt, and wait for the thread to end; then no step is in flight."""
        self.halt()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

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
            # The pool may be unmapped only after the last step has ended.
            for _ in self._cycle.drain():
                pass

    def _handle_events(self, wait: bool) -> bool:
        """Apply the events in the inbox; if ``wait``, sleep until there is one. Return False to stop."""
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
            self._stopping = True
