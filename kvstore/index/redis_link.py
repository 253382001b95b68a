"""Calls of Lua scripts in Redis, each with a deadline and a circuit breaker.

    closed --failure--> open --BREAKER_OPEN_MS later, one call probes--> closed | open again

Each server has a breaker: while it is open, calls to the server fail at once, so that a dead Redis, or a dead shard of
a Cluster, does not delay requests (I1, I3). Calls to several shards run concurrently, pipelined per shard, and partial
answers are used. After a failure, a Cluster's slot map is read again in the background.

Times are on the event loop's clock, so that a simulated clock applies to deadlines and breakers too.
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

import redis.asyncio
from redis.exceptions import ClusterDownError, MovedError, NoScriptError, RedisError, ResponseError

from pillion.errors import Unavailable
from pillion.kvstore.index.redis_url import MAX_CONNECTIONS, RedisServerAt, connect, parse
from pillion.tasks import end_tasks

BREAKER_OPEN_MS = 500
# Min time of a call whose timeout counts as a failure of the server.
MIN_PATIENCE_MS = 50
# Min interval between readings of a Cluster's slot map.
DISCOVERY_INTERVAL_MS = 500
DISCOVERY_DEADLINE_MS = 5000

# Remedies by pattern of Redis's refusal. The wording differs between releases, and redis-py maps some refusals to
# exception classes, so their names are matched too.
REMEDIES = {
    "READONLY|ReadOnlyError": "it is a replica: give --redis-url the master, or promote it (REPLICAOF NO ONE)",
    "OOM|OutOfMemoryError": "its memory is full: raise its maxmemory",
    "MISCONF": "it could not save its data: repair its disk, or CONFIG SET stop-writes-on-bgsave-error no",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write: start them, or lower that number",
    "NoPermissionError|NOPERM|no permissions|can't run this command": "its ACL lacks what docs/redis.md lists",
}

_SCRIPTS = Path(__file__).parent / "lua"

T = TypeVar("T")
Argument = bytes | str | int


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """Keys and arguments of one run of a script. All keys are in the same hash slot."""

    keys: Sequence[bytes]
    args: Sequence[Argument]


class Breaker:
    """Circuit breaker. While it is open, one call per ``open_s`` may probe the server. Sans-IO."""

    def __init__(self, open_s: float) -> None:
        self._open_s = open_s
        self._closed = True
        self._try_again_s = 0.0

    def may_try(self, now: float) -> bool:
        """Return whether a call may be sent now. If the breaker is open, this call is the probe."""
        if self._closed:
            return True
        if now < self._try_again_s:
            return False
        self._try_again_s = now + self._open_s
        return True

    def succeeded(self) -> None:
        self._closed = True

    def record_failure(self, now: float) -> None:
        self._closed = False
        self._try_again_s = now + self._open_s


class RedisLink:
    """Runs scripts on one server. ``scripts`` are names without suffix. Created by :func:`open_link`."""

    cluster = False

    def __init__(self, client: Any, *scripts: str) -> None:
        self._client = client
        self._texts = {name: script_text(name) for name in scripts}
        self._shas = {name: _script_sha(name) for name in scripts}
        self._breakers: dict[str, Breaker] = {}
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)

    async def call(self, script: str, call: ScriptCall, read: Callable[[Any], T], *, deadline_ms: float) -> T:
        """Run a script once and decode its answer by ``read``. Raises Unavailable if Redis does not answer, refuses, or
        answers nonsense."""
        [answer] = await self.call_each(script, [call], read, deadline_ms=deadline_ms)
        assert answer is not None
        return answer

    async def call_each(
        self, script: str, calls: Sequence[ScriptCall], read: Callable[[Any], T], *, deadline_ms: float
    ) -> list[T | None]:
        """Run a script once per call, of which there is at least one; return the answers, None for calls that failed.

        ``read`` decodes a raw answer; if it raises ValueError or TypeError, the call counts as failed. Raises
        Unavailable if all calls failed.
        """
        return await self._ask("", script, calls, read, _now_s() + deadline_ms / 1000)

    async def aclose(self) -> None:
        # The master's client does not close the Sentinels' clients.
        manager = getattr(getattr(self._client, "connection_pool", None), "sentinel_manager", None)
        for client in (self._client, *(manager.sentinels if manager else ())):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    async def _ask(
        self, name: str, script: str, calls: Sequence[ScriptCall], read: Callable[[Any], T], until: float
    ) -> list[T | None]:
        """Send calls to one server and decode the answers. Raises Unavailable if all calls failed."""
        breaker = self._breakers.setdefault(name, Breaker(BREAKER_OPEN_MS / 1000))
        if not breaker.may_try(_now_s()):
            raise Unavailable("Redis does not answer; waiting before the next try")
        cancels, begun_s = _cancels(), _now_s()
        try:
            async with asyncio.timeout_at(until), self._free:
                raw = await self._send(name, script, calls)
                answers = [_read(read, one) for one in raw]
        except Exception as error:  # noqa: BLE001  (redis-py raises any exception for malformed answers)
            if not isinstance(error, TimeoutError) or _now_s() - begun_s >= MIN_PATIENCE_MS / 1000:
                breaker.record_failure(_now_s())
            if _cancels() > cancels:
                raise asyncio.CancelledError from None
            raise Unavailable(f"Redis: {str(error) or 'no answer in time'}") from None
        breaker.succeeded()
        if _cancels() > cancels:
            raise asyncio.CancelledError
        refused = [one for one in raw if isinstance(one, ResponseError)]
        if len(refused) == len(raw):
            raise Unavailable(f"Redis refuses: {_with_remedy(refused[0])}")
        return answers

    async def _send(self, name: str, script: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Send calls to one server and return the raw answers; that of a refused call is its ResponseError. If the
        server lacks the script, send its text."""
        answers = await self._execute(name, "EVALSHA", self._shas[script], calls)
        unknown = [i for i, one in enumerate(answers) if isinstance(one, NoScriptError)]
        if unknown:
            again = await self._execute(name, "EVAL", self._texts[script], [calls[i] for i in unknown])
            for i, one in zip(unknown, again, strict=True):
                answers[i] = one
        return answers

    async def _execute(self, name: str, verb: str, script: str | bytes, calls: Sequence[ScriptCall]) -> list[Any]:
        """Send commands to one server, and return the raw answers; that of a refused command is its ResponseError."""
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(await self._client.execute_command(*_command(verb, script, call)))
            except ResponseError as error:
                answers.append(error)
        return answers


class ClusterLink(RedisLink):
    """Runs scripts on a Cluster's shards: concurrently, and pipelined per shard."""

    cluster = True

    def __init__(self, client: redis.asyncio.RedisCluster, *scripts: str) -> None:
        super().__init__(client, *scripts)
        self._client: redis.asyncio.RedisCluster = client
        self._discovery: asyncio.Task[None] | None = None
        self._discovered_s = 0.0

    async def aclose(self) -> None:
        await end_tasks(self._discovery)
        await super().aclose()

    async def call_each(
        self, script: str, calls: Sequence[ScriptCall], read: Callable[[Any], T], *, deadline_ms: float
    ) -> list[T | None]:
        until = _now_s() + deadline_ms / 1000
        answers: list[T | None] = [None] * len(calls)
        shards = await self._shards(calls, until)
        outcomes = await asyncio.gather(
            *(self._outcome(name, script, [calls[i] for i in indexes], read, until) for name, indexes in shards.items())
        )
        for indexes, outcome in zip(shards.values(), outcomes, strict=True):
            if not isinstance(outcome, Unavailable):
                for i, answer in zip(indexes, outcome, strict=True):
                    answers[i] = answer
        if all(answer is None for answer in answers):
            raise next((one for one in outcomes if isinstance(one, Unavailable)), Unavailable("Redis refused the call"))
        return answers

    async def _shards(self, calls: Sequence[ScriptCall], until: float) -> dict[str, list[int]]:
        """Return the indexes of calls by the name of the server that has their slot, "" for no server."""
        known = self._client.nodes_manager.slots_cache
        if not known:
            self._discover()
        if self._discovery is not None and not known:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await asyncio.shield(self._discovery)
        shards: dict[str, list[int]] = {}
        for i, call in enumerate(calls):
            nodes = self._client.nodes_manager.slots_cache.get(self._client.keyslot(call.keys[0]))
            shards.setdefault(nodes[0].name if nodes else "", []).append(i)
        return shards

    async def _outcome(
        self, name: str, script: str, calls: list[ScriptCall], read: Callable[[Any], T], until: float
    ) -> list[T | None] | Unavailable:
        """Return the result of :meth:`_ask`, or the Unavailable that it raises; then read the slot map again, which may
        be outdated."""
        try:
            return await self._ask(name, script, calls, read, until)
        except Unavailable as error:
            self._discover()
            return error

    async def _execute(self, name: str, verb: str, script: str | bytes, calls: Sequence[ScriptCall]) -> list[Any]:
        if not name:
            raise OSError("no shard of the Cluster serves this slot")
        pipeline = self._client.pipeline()
        node = self._client.get_node(node_name=name)
        for call in calls:
            pipeline.execute_command(*_command(verb, script, call), target_nodes=node)
        answers = list(await pipeline.execute(raise_on_error=False))
        for one in answers:
            if isinstance(one, BaseException) and not isinstance(one, ResponseError):
                raise one
            if isinstance(one, MovedError | ClusterDownError):
                self._discover()
        return answers

    def _discover(self) -> None:
        """Read the slot map in the background, at most once per DISCOVERY_INTERVAL_MS."""
        now = _now_s()
        busy = self._discovery is not None and not self._discovery.done()
        if not busy and now - self._discovered_s >= DISCOVERY_INTERVAL_MS / 1000:
            self._discovered_s = now
            self._discovery = asyncio.create_task(self._read_map(), name="redis cluster map")

    async def _read_map(self) -> None:
        again = bool(self._client.nodes_manager.slots_cache)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(DISCOVERY_DEADLINE_MS / 1000):
                await self._client.initialize()
                if again:
                    await self._client.nodes_manager.initialize()


def open_link(server: RedisServerAt, *scripts: str) -> RedisLink:
    """Connect to Redis. Raises ConfigError for an invalid URL (:mod:`pillion.kvstore.index.redis_url`)."""
    client = connect(parse(server)) if isinstance(server, str) else server
    if isinstance(client, redis.asyncio.RedisCluster):
        return ClusterLink(client, *scripts)
    return RedisLink(client, *scripts)


class RedisScripts:
    """Base of clients that call the scripts named in ``scripts``. The constructor raises ConfigError for an invalid
    URL; calls raise Unavailable if Redis does not answer in time, or refuses."""

    scripts: tuple[str, ...] = ()

    def __init__(self, redis_url: RedisServerAt) -> None:
        self._link = open_link(redis_url, *self.scripts)

    async def aclose(self) -> None:
        await self._link.aclose()


def _command(verb: str, script: str | bytes, call: ScriptCall) -> tuple[Argument, ...]:
    return verb, script, len(call.keys), *call.keys, *call.args


def _with_remedy(refusal: ResponseError) -> str:
    """Return the text of a refusal, with a remedy if known."""
    named = f"{type(refusal).__name__} {refusal}"
    remedies = [remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, named)]
    return f"{refusal} Remedy: {remedies[0]}." if remedies else str(refusal)


def _read(read: Callable[[Any], T], raw: Any) -> T | None:
    """Decode a raw answer; None for a refusal. Raises ValueError if it cannot be decoded."""
    if isinstance(raw, ResponseError):
        return None
    try:
        return read(raw)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"an invalid reply ({error})") from None


def as_bytes(raw: Any) -> bytes:
    """Return a raw answer that is a string. Raises TypeError for any other."""
    if not isinstance(raw, bytes):
        raise TypeError(f"{type(raw).__name__} for bytes")
    return raw


@cache
def _script_sha(name: str) -> str:
    return hashlib.sha1(script_text(name), usedforsecurity=False).hexdigest()


@cache
def script_text(name: str) -> bytes:
    """Return the text of a script, preceded by the functions that it shares with other scripts."""
    parts = ("common", "registry", name) if name in ("heartbeat", "leave", "components", "nodes") else ("common", name)
    return "".join((_SCRIPTS / f"{part}.lua").read_text() for part in parts).encode()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _cancels() -> int:
    """Return how often the current task was cancelled. redis-py swallows a cancellation while it reads an answer, but
    asyncio counts it, so that the caller can raise it again."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
