"""The step thread when the worker must not speak: it stops in bounded time, and nothing is lost or reordered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.testbed.conditions import loop_turns, until, within
from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.host_backend import FinishedStep
from pillion.engine.scheduling.step_plan import Outcome, StepPlan, Update
from pillion.engine.worker.step_loop import MAX_UNREAD_OUTCOMES, StepLoop
from pillion.errors import PillionError
from pillion.kernels.step import Sampled


class Counting:
    """A scheduler whose steps are numbered, without end."""

    may_run_ahead = True

    def __init__(self) -> None:
        self.steps = 0

    def schedule(self, now: float) -> StepPlan:
        return StepPlan((object(),))  # type: ignore[arg-type]

    def flush(self, now: float) -> Outcome:
        return Outcome()

    def commit(self, plan: StepPlan, sampled: Sampled, now: float) -> Outcome:
        self.steps += 1
        return Outcome(updates=[Update(seq_id=self.steps)])


def step_loop(
    scheduler: Counting,
    launch: Any = lambda plan: FinishedStep(Sampled()),
    choose: Any = lambda plan, step: None,
    **changes: Any,
) -> Any:
    """A started loop over ``scheduler``, which has its first event."""
    options: dict[str, Any] = {
        "max_in_flight": 1,
        "on_outcome": lambda outcome: None,
        "on_death": lambda reason: None,
        "on_step": lambda plan, seconds, ok: None,
        "may_publish": lambda: True,
    }
    loop = StepLoop(scheduler, launch, choose, **{**options, **changes})  # type: ignore[arg-type]
    loop.start()
    loop.post_event(lambda scheduler, now: None)
    return loop


async def all_that_may_be_unread(scheduler: Counting) -> None:
    """Returns when the thread has run the step after those that may wait, and waits with its outcome."""
    await until("the last step", lambda: scheduler.steps == MAX_UNREAD_OUTCOMES + 1)


async def test_unpublishable_outcomes_are_queued_in_order_and_limited() -> None:
    scheduler, published, allowed = Counting(), [], [False]
    loop = step_loop(
        scheduler,
        on_outcome=lambda outcome: published.append(outcome.updates[0].seq_id),
        may_publish=lambda: allowed[0],
    )
    await all_that_may_be_unread(scheduler)
    await until("what is held back", lambda: loop.held_back == MAX_UNREAD_OUTCOMES)
    await loop_turns()
    assert scheduler.steps <= MAX_UNREAD_OUTCOMES + 1
    assert not published
    loop.publish()
    assert not published, "it is still forbidden"
    allowed[0] = True
    loop.publish()
    assert published == list(range(1, MAX_UNREAD_OUTCOMES + 1))
    await until("more outcomes", lambda: len(published) >= 3 * MAX_UNREAD_OUTCOMES)
    await loop.stop()
    assert published == list(range(1, len(published) + 1))


async def test_a_thread_that_waits_to_publish_can_be_stopped() -> None:
    scheduler = Counting()
    loop = step_loop(scheduler, may_publish=lambda: False)
    await all_that_may_be_unread(scheduler)
    await within("the loop to stop", loop.stop())
    assert not loop.running


class _Ahead(Counting):
    """Every step's choices depend on the tokens of the step before; what happens is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = 0
        self.story: list[str] = []

    def schedule(self, now: float) -> StepPlan:
        self.plans += 1
        piece = SimpleNamespace(sequence=SimpleNamespace(reads_history=True))
        return StepPlan((piece,), budget_tokens=self.plans, unknown=((0, 0),) if self.plans > 1 else ())  # type: ignore[arg-type]

    def launched(self, plan: StepPlan) -> None:
        self.story.append(f"launched {plan.budget_tokens}")

    def commit(self, plan: StepPlan, sampled: Sampled, now: float) -> Outcome:
        self.story.append(f"committed {plan.budget_tokens}")
        return super().commit(plan, sampled, now)

    def fail_step(self, plan: StepPlan, error: PillionError, now: float) -> Outcome:
        self.story.append(f"failed {plan.budget_tokens}")
        return Outcome()


async def test_a_step_lands_before_the_next_one_is_scheduled_where_the_scheduler_says_so() -> None:
    scheduler = _Ahead()
    scheduler.may_run_ahead = False
    loop = step_loop(scheduler, max_in_flight=2)
    await until("some steps", lambda: scheduler.steps > 2)
    await loop.stop()
    assert scheduler.story[:4] == ["launched 1", "committed 1", "launched 2", "committed 2"]


@pytest.mark.parametrize("broken", [False, True])
async def test_sampling_begins_once_the_previous_step_is_committed(broken: bool) -> None:
    """A choice that cannot be begun fails its own step, before another is launched."""
    scheduler = _Ahead()

    def choose(plan: StepPlan, step: FinishedStep) -> None:
        scheduler.story.append(f"chosen {plan.budget_tokens}")
        if broken and plan.budget_tokens == 3:
            raise ArithmeticError("broken")

    loop = step_loop(scheduler, choose=choose, max_in_flight=2)
    await until("some steps", lambda: scheduler.steps > 4)
    await loop.stop()
    between = ["failed 3", "launched 4", "chosen 4"] if broken else ["launched 4", "committed 3", "chosen 4"]
    expected = ["launched 1", "launched 2", "committed 1", "chosen 2", "launched 3", "committed 2", "chosen 3"]
    assert scheduler.story[:11] == [*expected, *between, "launched 5"]


class _Pipeline(_Ahead):
    """Five steps are there, none of which chooses tokens; then there is nothing to schedule until one has landed."""

    def schedule(self, now: float) -> StepPlan:
        self.story.append("scheduled")
        if self.plans == 5:
            return StepPlan(())
        return replace(super().schedule(now), unknown=())


async def test_a_pipeline_has_one_step_in_flight_per_stage() -> None:
    """With nothing to schedule one step is committed at a time: what comes meanwhile need not wait for all of them."""
    scheduler = _Pipeline()
    loop = step_loop(scheduler, max_in_flight=3)
    await until("all steps", lambda: scheduler.steps == 5)
    await loop.stop()
    steps = [f"launched {number}" for number in (1, 2, 3)]
    for number in (1, 2):
        steps += [f"committed {number}", f"launched {number + 3}"]
    steps += [f"committed {number}" for number in (3, 4, 5)]
    told = [step for step in scheduler.story if step != "scheduled"]
    assert told == steps
    last = scheduler.story[scheduler.story.index("launched 5") :]
    assert last[:6] == ["launched 5", "committed 3", "scheduled", "committed 4", "scheduled", "committed 5"]


class _Lost:
    def wait(self) -> Sampled:
        raise BackendLost("no device")


@pytest.mark.parametrize("at_launch", [True, False])
async def test_a_device_that_is_lost_ends_the_thread(at_launch: bool) -> None:
    """Every later step would fail as well: it is the worker that has to go, not one step's sequences."""
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def launch(plan: StepPlan) -> _Lost:
        return _Lost().wait() if at_launch else _Lost()  # type: ignore[return-value]

    loop = step_loop(Counting(), launch, on_death=died.set_result)
    assert "no device" in await within("the loop to die", died)
    await within("the loop to stop", loop.stop())
