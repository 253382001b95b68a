"""The interface of redis-py's asyncio client to a RedisModel, as far as RedisLink uses it, on the running loop's clock.

    execute_command --way.there_s--> the model answers --way.back_s--> the answer
      gone:   connections are refused at once
      silent: commands wait until the server continues (SIGSTOP), and are answered then, perhaps too late

A command runs even if its caller has stopped waiting, as on a connection that breaks after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from lab.simulator.redis_keyspace import RedisRefusalError
from lab.simulator.redis_model import RedisModel, RedisWord


@dataclass
class WayToRedis:
    """The network path from clients to a Redis.

    Attributes:
        there_s: latency of a command.
        back_s: latency of its answer.
        gone: no server listens.
    """

    there_s: float = 0.0
    back_s: float = 0.0
    gone: bool = False
    _silent: bool = False
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def silence(self) -> None:
        """Stop answering."""
        self._silent = True

    def go_on(self) -> None:
        """Answer again, first the waiting commands in order."""
        self._silent = False
        while self._waiting and not self._silent:
            self._waiting.pop(0)()

    def arrive(self, work: Callable[[], None]) -> None:
        """Run an arrived command, now or when the server continues."""
        if self._silent:
            self._waiting.append(work)
        else:
            work()


class RedisModelClient:
    """A client of one server, without pipelining."""

    def __init__(self, model: RedisModel, way: WayToRedis) -> None:
        self._model = model
        self._way = way

    async def execute_command(self, *words: RedisWord) -> Any:
        """Return the answer. Raises redis-py's ResponseError for a refusal, ConnectionError without a server."""
        if self._way.gone:
            raise RedisConnectionError("connection refused")
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()

        def settle(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        def carry_out() -> None:
            loop.call_later(self._way.back_s, settle, self._answer(words))

        loop.call_later(self._way.there_s, self._way.arrive, carry_out)
        answer = await answered
        if isinstance(answer, RedisError):
            raise answer
        return answer

    async def aclose(self) -> None:
        """Do nothing."""

    def _answer(self, words: tuple[RedisWord, ...]) -> Any:
        try:
            return self._model.execute(*words)
        except RedisRefusalError as refusal:
            code, _, rest = refusal.message.partition(" ")
            if code == "NOSCRIPT":
                return NoScriptError(rest)
            return ResponseError(rest if code == "ERR" else refusal.message)
