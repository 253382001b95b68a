"""The step thread where the worker may not speak: it stops in bounded time, and nothing is lost or turned round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pillion.engine.backends.backend import BackendLost
from pillion.engine.backends.host_backend import FinishedStep
from pillion.engine.sampling.sampling_rows import Sampled
from pillion.engine.scheduling.step_plan import Outcome, StepPlan, Update
from pillion.engine.worker.step_loop import MAX_UNREAD_OUTCOMES, StepLoop
from testbed.conditions import WITHIN_S, loop_turns, until


class Counting:
    """A scheduler whose steps are numbered, without end."""

    def __init__(self) -> None:
        self.steps = 0

    def schedule(self, now: float) -> StepPlan:
        return StepPlan((object(),))  # type: ignore[arg-type]

    def flush(self, now: float) -> Outcome:
        return Outcome()

    def commit(self, plan: StepPlan, sampled: Sampled, now: float) -> Outcome:
        self.steps += 1
        return Outcome(updates=[Update(seq_id=self.steps)])


def step_loop(scheduler: Counting, launch: Any = lambda plan: FinishedStep(Sampled()), **changes: Any) -> Any:
    """A started loop over ``scheduler``, which has its first event."""
    options: dict[str, Any] = {
        "ahead": False,
        "on_outcome": lambda outcome: None,
        "on_death": lambda reason: None,
        "on_step": lambda plan, seconds, ok: None,
        "may_publish": lambda: True,
    }
    loop = StepLoop(scheduler, launch, **{**options, **changes})  # type: ignore[arg-type]
    loop.start()
    loop.post_event(lambda scheduler, now: None)
    return loop


async def all_that_may_be_unread(scheduler: Counting) -> None:
    """Returns when the thread has run the step behind those that may wait, and waits with its outcome."""
    await until("the last step", lambda: scheduler.steps == MAX_UNREAD_OUTCOMES + 1)


async def test_what_may_not_be_published_is_kept_in_order_and_bounded() -> None:
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


async def test_a_thread_that_waits_for_leave_to_speak_can_be_stopped() -> None:
    scheduler = Counting()
    loop = step_loop(scheduler, may_publish=lambda: False)
    await all_that_may_be_unread(scheduler)
    await asyncio.wait_for(loop.stop(), WITHIN_S)
    assert not loop.running


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
    assert "no device" in await asyncio.wait_for(died, WITHIN_S)
    await asyncio.wait_for(loop.stop(), WITHIN_S)
