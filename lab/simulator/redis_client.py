"""Offers the interface of redis-py's asyncio client to a RedisModel, as far as RedisLink uses it, on the running loop's
clock.

    execute_command --way.there_s--> the model answers --way.back_s--> the answer
      gone:   a connection is refused at once
      silent: what arrives waits until the server goes on (SIGSTOP), and is answered then; nobody may be left to read it

A command that its caller no longer waits for is carried out all the same, as on a connection that breaks after it.
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
    """Describes the network path from some clients to a Redis.

    Attributes:
        there_s: how long a command takes to the server; a slow one is long.
        back_s: how long its answer takes.
        gone: whether nobody listens there.
    """

    there_s: float = 0.0
    back_s: float = 0.0
    gone: bool = False
    _silent: bool = False
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def silence(self) -> None:
        """Lets the server answer nothing from now on."""
        self._silent = True

    def go_on(self) -> None:
        """Lets the server answer again, first the commands that have arrived meanwhile, in their order."""
        self._silent = False
        while self._waiting and not self._silent:
            self._waiting.pop(0)()

    def arrive(self, work: Callable[[], None]) -> None:
        """Runs a command that has arrived at the server, now or when the server goes on."""
        if self._silent:
            self._waiting.append(work)
        else:
            work()


class RedisModelClient:
    """Stands for a client of one server. Each command is sent on its own."""

    def __init__(self, model: RedisModel, way: WayToRedis) -> None:
        self._model = model
        self._way = way

    async def execute_command(self, *words: RedisWord) -> Any:
        """Returns the answer. Raises redis-py's ResponseError for a refusal, ConnectionError where nobody listens."""
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
        """Does nothing, because there is no connection."""

    def _answer(self, words: tuple[RedisWord, ...]) -> Any:
        try:
            return self._model.execute(*words)
        except RedisRefusalError as refusal:
            code, _, rest = refusal.message.partition(" ")
            if code == "NOSCRIPT":
                return NoScriptError(rest)
            return ResponseError(rest if code == "ERR" else refusal.message)
