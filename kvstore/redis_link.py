"""One way to Redis for the index and the registry: scripts only, every call with a deadline, behind a circuit breaker.

    closed --failure--> open --OPEN_MS later, one call may try--> closed | open again

While the breaker is open, calls fail at once, so that a dead Redis costs a request nothing (I1, I3).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pillion.errors import ConfigError, Unavailable

OPEN_MS = 500
CONNECT_TIMEOUT_MS = 1000
# Connections to Redis per link; more calls at once wait for one, within their deadline.
MAX_CONNECTIONS = 16
KEY_PREFIX = b"pillion:"

_SCRIPTS = Path(__file__).parent / "lua"


class Breaker:
    """Sans-IO. While open, one caller per ``open_s`` is let through to see whether things are better."""

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._closed = True
        self._try_again_s = 0.0

    def may_try(self, now: float) -> bool:
        """Whether a call may go out; counts as the probe when the breaker is open."""
        if self._closed:
            return True
        if now < self._try_again_s:
            return False
        self._try_again_s = now + self._open_s
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self._closed = True

    def failed(self, now: float) -> None:
        """A call was not answered."""
        self._closed = False
        self._try_again_s = now + self._open_s


class RedisLink:
    """Raises ConfigError for a URL that cannot be one."""

    def __init__(self, url: str, *scripts: str) -> None:
        self._breaker = Breaker(OPEN_MS / 1000)
        pool = redis.asyncio.BlockingConnectionPool
        try:
            self._client = redis.asyncio.Redis(
                connection_pool=pool.from_url(
                    url,
                    max_connections=MAX_CONNECTIONS,
                    socket_connect_timeout=CONNECT_TIMEOUT_MS / 1000,
                    # The deadline of a call is ours; a library that tries again would only use it up.
                    retry=Retry(NoBackoff(), 0),
                    timeout=CONNECT_TIMEOUT_MS / 1000,
                )
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--redis-url {_without_password(url)}: {error}") from None
        common = (_SCRIPTS / "common.lua").read_text()
        self._scripts = {
            name: self._client.register_script(common + (_SCRIPTS / f"{name}.lua").read_text()) for name in scripts
        }

    async def call(self, script: str, *args: bytes | str | int, deadline_ms: int) -> Any:
        """One EVALSHA (the first one ever loads the script). Raises Unavailable when Redis does not answer in time."""
        if not self._breaker.may_try(time.monotonic()):
            raise Unavailable("Redis does not answer; waiting before the next try")
        cancels = _cancels()
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                answer = await cast(Awaitable[Any], self._scripts[script](keys=[KEY_PREFIX], args=list(args)))
        except (RedisError, OSError, TimeoutError) as error:
            self._breaker.failed(time.monotonic())
            if _cancels() > cancels:
                raise asyncio.CancelledError from None
            raise Unavailable(f"Redis: {error or 'no answer in time'}") from None
        self._breaker.succeeded()
        if _cancels() > cancels:
            raise asyncio.CancelledError
        return answer

    async def aclose(self) -> None:
        """Closes the connections."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose(close_connection_pool=True)


def _cancels() -> int:
    """How often the caller's task was cancelled. redis-py loses a cancel that comes while it reads an answer; asyncio
    still counts it, and a task that nobody can cancel would never end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
