"""Requests that wait for a model that is not served now. One task polls for all of them, ten times a second.

wait(model) --joins the model's queue--+
                                       |   the task: polls the registry, checks each model once, and answers
Served, or Unavailable <---------------+   all requests in its queue, or those that have waited long enough
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
    """Waiting requests by model. Admission bounds their number.

    Args:
        refresh: polls the registry; does not raise if the registry does not answer.
        find: returns how a model is served now, and whether all components that it needs are live. Raises Unavailable.
        wait_limit_s: returns the max wait of a request for a model, as of now.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        find: Callable[[ModelKey], tuple[T, bool]],
        wait_limit_s: Callable[[ModelKey], float],
    ) -> None:
        self._refresh = refresh
        self._find = find
        self._wait_limit_s = wait_limit_s
        self._queues: dict[ModelKey, deque[tuple[float, asyncio.Future[T]]]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._defects = Defects("the search for lost components")

    async def wait(self, key: ModelKey) -> T:
        """Return how the model is served as soon as all needed components are live or, after the max wait, if a worker
        is. Raises Unavailable if none is."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append((time.monotonic(), answer))
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="search for lost components")
        return await answer

    async def aclose(self) -> None:
        """End the polling task; waiting requests get no answer."""
        await end_tasks(self._poller)

    async def _poll(self) -> None:
        while self._queues:
            try:
                await self._refresh()
            except Exception as error:  # noqa: BLE001  (all waiting requests depend on this task)
                self._defects.note(error)
            for key in tuple(self._queues):
                self._answer(key, time.monotonic())
            if self._queues:
                await asyncio.sleep(LOOK_INTERVAL_S)

    def _answer(self, key: ModelKey, now_s: float) -> None:
        """Answer the requests for one model, unless they are to wait longer."""
        queue, wait_limit_s = self._queues[key], self._wait_limit_s(key)
        result: T | Unavailable
        try:
            result, complete = self._find(key)
        except Unavailable as error:
            result, complete = error, False
        except Exception as error:  # noqa: BLE001
            self._defects.note(error)
            result, complete = Unavailable("looking for the model's workers failed; see the gateway's log"), False
        while queue:
            joined_s, answer = queue[0]
            if not (complete or answer.done() or now_s - joined_s >= wait_limit_s):
                return
            queue.popleft()
            if answer.done():
                continue
            if isinstance(result, Unavailable):
                answer.set_exception(Unavailable(result.message, result.retry_after_ms))
            else:
                answer.set_result(result)
        del self._queues[key]
