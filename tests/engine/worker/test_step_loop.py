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


async def test_what_may_not_be_published_is_kept_in_order_and_bounded() -> None:
    scheduler, published, allowed = Counting(), [], [False]
    loop: Any = StepLoop(
        scheduler,  # type: ignore[arg-type]
        lambda plan: FinishedStep(Sampled()),
        on_outcome=lambda outcome: published.append(outcome.updates[0].seq_id),
        on_death=lambda reason: None,
        may_publish=lambda: allowed[0],
    )
    loop.start()
    loop.post_event(lambda scheduler, now: None)
    async with asyncio.timeout(10):
        while loop.held_back < MAX_UNREAD_OUTCOMES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert scheduler.steps <= MAX_UNREAD_OUTCOMES + 1
    assert not published
    loop.publish()
    assert not published, "it is still forbidden"
    allowed[0] = True
    loop.publish()
    assert published == list(range(1, MAX_UNREAD_OUTCOMES + 1))
    async with asyncio.timeout(10):
        while len(published) < 3 * MAX_UNREAD_OUTCOMES:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await loop.stop()
    assert published == list(range(1, len(published) + 1))


async def test_a_thread_that_waits_for_leave_to_speak_can_be_stopped() -> None:
    scheduler = Counting()
    loop: Any = StepLoop(
        scheduler,  # type: ignore[arg-type]
        lambda plan: FinishedStep(Sampled()),
        on_outcome=lambda outcome: None,
        on_death=lambda reason: None,
        may_publish=lambda: False,
    )
    loop.start()
    loop.post_event(lambda scheduler, now: None)
    await asyncio.sleep(0.1)
    await asyncio.wait_for(loop.stop(), 10)
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

    loop: Any = StepLoop(
        Counting(),  # type: ignore[arg-type]
        launch,
        on_outcome=lambda outcome: None,
        on_death=died.set_result,
    )
    loop.start()
    loop.post_event(lambda scheduler, now: None)
    assert "no device" in await asyncio.wait_for(died, 10)
    await asyncio.wait_for(loop.stop(), 10)
