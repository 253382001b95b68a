"""Shared waiting of requests whose model is not served now: one task looks for all of them, several times a second.

wait(model) --joins the line of its model--+
                                           |   the waker: asks the registry, looks at each model once
Served, or Unavailable <-------------------+   and answers all in its line, or those who waited long enough
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pillion.errors import Unavailable
from pillion.gateway.links.defects import Defects
from pillion.tasks import end_tasks

LOOK_INTERVAL_S = 0.1

T = TypeVar("T")
# A model's name, its fingerprint, and the rank of the requested adapter, 0 without one.
ModelKey = tuple[str, str, int]


class OutageWaiters(Generic[T]):
    """The waiting requests by model. Admission bounds their number.

    Args:
        refresh: asks the registry; does not raise if it does not answer.
        look: returns how a model is served now, and whether all components that it needs are there. Raises Unavailable.
        patience_s: returns how long a request waits for a model, as of now.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        look: Callable[[ModelKey], tuple[T, bool]],
        patience_s: Callable[[ModelKey], float],
    ) -> None:
        self._refresh = refresh
        self._look = look
        self._patience_s = patience_s
        self._lines: dict[ModelKey, deque[tuple[float, asyncio.Future[T]]]] = {}
        self._waker: asyncio.Task[None] | None = None
        self._defects = Defects("the search for lost components")

    async def wait(self, key: ModelKey) -> T:
        """Return how the model is served as soon as all needed components are there or, after the max wait, with those
        that are. Raises Unavailable."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(key, deque()).append((time.monotonic(), answer))
        if self._waker is None or self._waker.done():
            self._waker = asyncio.create_task(self._wake(), name="search for lost components")
        return await answer

    async def aclose(self) -> None:
        """End the task that looks for models; pending requests get no answer."""
        await end_tasks(self._waker)

    async def _wake(self) -> None:
        while self._lines:
            try:
                await self._refresh()
            except Exception as error:  # noqa: BLE001  (everybody in line depends on this task)
                self._defects.note(error)
            for key in tuple(self._lines):
                self._answer(key, time.monotonic())
            if self._lines:
                await asyncio.sleep(LOOK_INTERVAL_S)

    def _answer(self, key: ModelKey, now_s: float) -> None:
        line, patience_s = self._lines[key], self._patience_s(key)
        found: T | Unavailable
        try:
            found, complete = self._look(key)
        except Unavailable as error:
            found, complete = error, False
        except Exception as error:  # noqa: BLE001
            self._defects.note(error)
            found, complete = (
                Unavailable("the gateway could not look for the model's workers; its log says more"),
                False,
            )
        while line:
            joined_s, answer = line[0]
            if not (complete or answer.done() or now_s - joined_s >= patience_s):
                return
            line.popleft()
            if answer.done():
                continue
            if isinstance(found, Unavailable):
                answer.set_exception(Unavailable(found.message, found.retry_after_ms))
            else:
                answer.set_result(found)
        del self._lines[key]
