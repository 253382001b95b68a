"""Runs scripts in Redis for the index and the registry, each call with a deadline and behind a circuit breaker.

    closed --failure--> open --OPEN_MS later, one call may try--> closed | open again

While the breaker is open, calls fail at once, so that a dead Redis costs a request nothing (I1, I3).

Time is the event loop's: a loop of another clock moves deadlines and breakers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import NoScriptError, RedisError, ResponseError

from pillion.errors import Unavailable
from pillion.kvstore.index.redis_url import MAX_CONNECTIONS, RedisServerAt, connect, parse

OPEN_MS = 500
# A failed call that was given less time than this, because an earlier one had used the time up, does not show that the
# server failed.
LEAST_PATIENCE_MS = 50

# For a pattern of Redis's refusal, this says what helps against it: releases differ in their words, and the client
# turns some of them into classes.
REMEDIES = {
    "READONLY|ReadOnlyError": "it is a replica: give --redis-url the master, or promote it (REPLICAOF NO ONE)",
    "OOM|OutOfMemoryError": "its memory is full: raise its maxmemory",
    "MISCONF": "it could not save its data: mend its disk, or CONFIG SET stop-writes-on-bgsave-error no",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write: start them, or lower that number",
    "NoPermissionError|NOPERM|no permissions|can't run this command": "its ACL lacks what docs/index.md lists",
}

_SCRIPTS = Path(__file__).parent / "lua"
_REGISTRY_SCRIPTS = ("heartbeat", "leave", "components", "nodes")

T = TypeVar("T")
Argument = bytes | str | int


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """Describes one run of a script."""

    keys: Sequence[bytes]
    args: Sequence[Argument]


class Breaker:
    """Implements a circuit breaker, sans-IO. While it is open, one call per ``open_s`` may try the server again."""

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._closed = True
        self._try_again_s = 0.0

    def may_try(self, now: float) -> bool:
        """Returns whether a call may go out; with an open breaker that call is its probe."""
        if self._closed:
            return True
        if now < self._try_again_s:
            return False
        self._try_again_s = now + self._open_s
        return True

    def succeeded(self) -> None:
        """Records that a call was answered."""
        self._closed = True

    def failed(self, now: float) -> None:
        """Records that a call was not answered."""
        self._closed = False
        self._try_again_s = now + self._open_s


class RedisLink:
    """Runs scripts, each named without its suffix, by a client of Redis. :func:`open_link` makes it."""

    def __init__(self, client: Any, *scripts: str) -> None:
        self._client = client
        self._texts = {name: script_text(name) for name in scripts}
        self._shas = {name: _script_sha(name) for name in scripts}
        self._breaker = Breaker(OPEN_MS / 1000)
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)

    async def call(self, script: str, call: ScriptCall, read: Callable[[Any], T], *, deadline_ms: float) -> T:
        """Runs a script once and reads its answer by ``read``, which may raise ValueError or TypeError. Raises
        Unavailable for silence, a refusal and a bad answer."""
        begun_s = _now_s()
        if not self._breaker.may_try(begun_s):
            raise Unavailable("Redis does not answer; waiting before the next try")
        cancels = _cancels()
        try:
            async with asyncio.timeout_at(begun_s + deadline_ms / 1000), self._free:
                raw = await self._send(script, call)
                answer = None if isinstance(raw, ResponseError) else _read(read, raw)
        except Exception as error:  # noqa: BLE001  (of a server that speaks nonsense, redis-py raises anything)
            if not isinstance(error, TimeoutError) or _now_s() - begun_s >= LEAST_PATIENCE_MS / 1000:
                self._breaker.failed(_now_s())
            if _cancels() > cancels:
                raise asyncio.CancelledError from None
            raise Unavailable(f"Redis: {str(error) or 'no answer in time'}") from None
        self._breaker.succeeded()
        if _cancels() > cancels:
            raise asyncio.CancelledError
        if isinstance(raw, ResponseError):
            raise Unavailable(f"Redis refuses: {_with_remedy(raw)}")
        assert answer is not None
        return answer

    async def aclose(self) -> None:
        """Closes the connections to Redis."""
        # The Sentinels' clients are not closed with the master's client.
        manager = getattr(getattr(self._client, "connection_pool", None), "sentinel_manager", None)
        for client in (self._client, *(manager.sentinels if manager else ())):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    async def _send(self, script: str, call: ScriptCall) -> Any:
        """Returns the raw answer, or the refusal. A script that the server lacks is sent whole."""
        answer = await self._execute("EVALSHA", self._shas[script], call)
        if isinstance(answer, NoScriptError):
            answer = await self._execute("EVAL", self._texts[script], call)
        return answer

    async def _execute(self, verb: str, script: str | bytes, call: ScriptCall) -> Any:
        try:
            return await self._client.execute_command(verb, script, len(call.keys), *call.keys, *call.args)
        except ResponseError as error:
            return error


def open_link(server: RedisServerAt, *scripts: str) -> RedisLink:
    """Connects to Redis. Raises ConfigError for an invalid URL (:mod:`pillion.kvstore.index.redis_url`)."""
    return RedisLink(connect(parse(server)) if isinstance(server, str) else server, *scripts)


class RedisScripts:
    """Calls the scripts that a subclass names in ``scripts``. Making one raises ConfigError for a bad URL; calls raise
    Unavailable when Redis does not answer in time, or refuses."""

    scripts: tuple[str, ...] = ()

    def __init__(self, redis_url: RedisServerAt) -> None:
        self._link = open_link(redis_url, *self.scripts)

    async def aclose(self) -> None:
        """Closes the connections to Redis."""
        await self._link.aclose()


def _with_remedy(refusal: ResponseError) -> str:
    """Returns the text of a refusal, with what helps against it where that is known."""
    named = f"{type(refusal).__name__} {refusal}"
    remedies = [remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, named)]
    return f"{refusal} What helps: {remedies[0]}." if remedies else str(refusal)


def _read(read: Callable[[Any], T], raw: Any) -> T:
    """Converts a raw answer. Raises ValueError for an answer that cannot be read."""
    try:
        return read(raw)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"nonsense instead of an answer ({error})") from None


def as_bytes(raw: Any) -> bytes:
    """Checks a string in a raw answer. Raises TypeError for anything else."""
    if not isinstance(raw, bytes):
        raise TypeError(f"{type(raw).__name__} for bytes")
    return raw


@cache
def _script_sha(name: str) -> str:
    return hashlib.sha1(script_text(name), usedforsecurity=False).hexdigest()


@cache
def script_text(name: str) -> bytes:
    """Returns a script as Redis is sent it, after what all scripts share."""
    parts = ("common", "registry", name) if name in _REGISTRY_SCRIPTS else ("common", name)
    return "".join((_SCRIPTS / f"{part}.lua").read_text() for part in parts).encode()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _cancels() -> int:
    """Returns how often the caller's task was cancelled. redis-py loses a cancel that comes while it reads an answer.
    asyncio still counts it, and a task that nobody can cancel would never end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
