"""One step after the other of a scheduler over a backend, without a thread: schedule -> launch -> wait -> commit.

Where the backend runs ahead, the step that is committed is the one before the step just launched: while the device runs
that, the results of the one before are applied, events happen, and the next one is scheduled. If the step just launched
chooses by tokens of the one before (StepPlan.awaits_tokens), its choice is begun as soon as that one is committed. With
nothing to schedule, and where the scheduler wants to know their tokens first, the steps in flight are committed.

:class:`pillion.engine.worker.step_loop.StepLoop` drives it on a thread. A driver that must not block looks at the
in-flight steps that :meth:`StepCycle.step` yields, and comes back when they have landed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pillion.engine.backends.backend import BackendLost, InFlightStep
from pillion.engine.sampling.sampling_rows import Sampled, SamplingRows
from pillion.engine.scheduling.scheduler import Scheduler
from pillion.engine.scheduling.step_plan import Outcome, StepPlan
from pillion.errors import Internal

log = logging.getLogger("pillion.step")

Launch = Callable[[StepPlan], InFlightStep]
Choose = Callable[[StepPlan, InFlightStep], None]
# Called with a plan, the seconds that it took and whether it succeeded.
OnStep = Callable[[StepPlan, float, bool], None]


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """Stands for a step that could not be launched, so that it fails in its turn."""

    error: Exception

    def choose(self, rows: SamplingRows) -> None:
        raise self.error

    def wait(self) -> Sampled:
        raise self.error


class StepCycle:
    """Runs a scheduler over a backend, for one caller at a time.

    Args:
        scheduler: belongs to the caller's thread.
        launch: begins a step. What ``launch`` raises, or waiting for its step, fails that step's sequences.
        choose: begins the choice of a launched step that awaits tokens of the one before; what it raises does so, too.
        ahead: whether a step may be launched before the one before it has ended, where the scheduler has no objection.
        on_step: called when a step has ended, before it is committed. The step took the time since it was launched, or
            since the step before it ended, whichever was later.
    """

    def __init__(self, scheduler: Scheduler, launch: Launch, choose: Choose, *, ahead: bool, on_step: OnStep) -> None:
        self._scheduler = scheduler
        self._launch = launch
        self._choose = choose
        self._ahead = ahead
        self._on_step = on_step
        # Launched steps with the times of their launch, oldest first: one between two steps, two for a moment.
        self._in_flight: deque[tuple[StepPlan, InFlightStep, float]] = deque()
        self._last_end_s = 0.0
        # Whether the last call of :meth:`step` had something to do.
        self.busy = False

    def step(self) -> Iterator[Outcome | InFlightStep]:
        """Schedules and launches one step, and commits the steps that are due.

        Yields each outcome, in order, and each in-flight step just before it is waited for, which blocks. Raises
        BackendLost where the device has failed for good.
        """
        plan = self._scheduler.schedule(time.monotonic())
        # Outcomes of the events before this step are reported now: they must not wait for a step, which may be long.
        yield self._scheduler.flush(time.monotonic())
        stays_in_flight = bool(plan.pieces) and self._launch_step(plan)
        self.busy = bool(self._in_flight)
        while len(self._in_flight) > stays_in_flight:
            yield from self._commit_oldest()
        if stays_in_flight:
            chosen = not plan.awaits_tokens or self._choose_tokens()
            if not (chosen and self._scheduler.may_run_ahead):
                yield from self._commit_oldest()

    def land(self) -> Iterator[InFlightStep]:
        """Waits for the steps in flight, which use the pool until then, and drops their results. Yields as
        :meth:`step` does."""
        while self._in_flight:
            _, step, _ = self._in_flight.popleft()
            yield step
            with contextlib.suppress(Exception):
                step.wait()

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

    def _commit_oldest(self) -> Iterator[Outcome | InFlightStep]:
        """Wait for the oldest step and commit, or fail, its plan."""
        plan, step, began_s = self._in_flight[0]
        # A driver that stops here has to land it still.
        yield step
        self._in_flight.popleft()
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
            yield self._scheduler.commit(plan, sampled, time.monotonic())
        else:
            internal = Internal(f"the step failed on the worker: {type(failure).__name__}")
            yield self._scheduler.fail_step(plan, internal, time.monotonic())
